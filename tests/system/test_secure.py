"""The whole system with certificates and tokens at every hop: who gets in, and certificates that change while it serves."""

import os
from pathlib import Path

import grpc
import pytest
import trustme
from process_stack import MODEL, Stack, StackOptions

from tessera.client import AccessDenied, Client, FinishReason, NotFound, Tls
from tessera.scheduler.v1 import session_pb2_grpc
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc

PART_NAME, GATEWAY_NAME = "parts.tessera", "llm.example"
TEAM_A, TEAM_B = "team-a-team-a-team-a", "team-b-team-b-team-b"


class Files:
    """Certificates of an authority that is replaced at will, and the file of tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = folder / "tokens"
        self.tokens.write_text(f"{TEAM_A} team-a public\n{TEAM_B} team-b public\n")
        self.issue()

    def issue(self) -> None:
        """A new authority, and new certificates of it for everybody."""
        authority = trustme.CA()
        for name, host in (("part", PART_NAME), ("client", "client.example")):
            leaf = authority.issue_cert(host, GATEWAY_NAME) if name == "part" else authority.issue_cert(host)
            self._replace(f"{name}.key", leaf.private_key_pem.bytes())
            self._replace(f"{name}.pem", leaf.cert_chain_pems[0].bytes())
        self._replace("ca.pem", authority.cert_pem.bytes())

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def options(self) -> list[str]:
        """Of every role."""
        files = ["--tls-cert", self.path("part.pem"), "--tls-key", self.path("part.key"), "--tls-ca", self.path("ca.pem")]
        return [*files, "--tls-peer-name", PART_NAME]

    def client(self, address: str, token: str = TEAM_A) -> Client:
        tls = Tls(self.path("ca.pem"), server_name=GATEWAY_NAME)
        return Client(address, tls=tls, token=token, resume_timeout_s=20)

    def channel(self, address: str) -> grpc.Channel:
        """As a client that has a certificate of the same authority, with a name that is not a part's."""
        credentials = Tls(self.path("ca.pem"), self.path("client.pem"), self.path("client.key")).credentials()
        return grpc.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", PART_NAME)])

    def _replace(self, name: str, content: bytes) -> None:
        fresh = self.folder / "fresh"
        fresh.write_bytes(content)
        os.replace(fresh, self.folder / name)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    (tmp_path / "files").mkdir()
    return Files(tmp_path / "files")


@pytest.fixture
def stack(tmp_path: Path, files: Files):
    options = StackOptions(
        model=MODEL,
        worker_model=f"deterministic:{MODEL}",
        scheduler=[*files.options(), "--lease-ms", "1000"],
        worker=files.options(),
        gateway=[*files.options(), "--tokens", str(files.tokens)],
    )
    with Stack(tmp_path / "stack", options) as running:
        yield running


def test_only_who_is_known_gets_in_and_answers_go_on_across_new_certificates(stack: Stack, files: Files) -> None:
    with files.client(stack.address) as client:
        before = client.generate([5, 6, 7], max_tokens=8, seed=3)
    for token in ("", "nobody-knows-this-one"):
        with files.client(stack.address, token) as client, pytest.raises(AccessDenied) as refused:
            client.generate([5, 6, 7], max_tokens=1)
        assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED

    with files.channel(stack.scheduler.address) as channel, pytest.raises(grpc.RpcError) as at_scheduler:
        next(session_pb2_grpc.SchedulerServiceStub(channel).Session(iter(())))
    with files.channel(stack.worker.address) as channel, pytest.raises(grpc.RpcError) as at_worker:
        worker_pb2_grpc.WorkerServiceStub(channel).Describe(worker_pb2.DescribeRequest())
    assert {at_scheduler.value.code(), at_worker.value.code()} == {grpc.StatusCode.PERMISSION_DENIED}

    files.issue()
    for role in (stack.worker, stack.scheduler):  # every link between the parts is made anew
        role.kill()
        role.start()
        role.wait_ready()
    with files.client(stack.address) as client:
        after = client.generate([5, 6, 7], max_tokens=8, seed=3)
    assert after.token_ids == before.token_ids


def test_principals_share_neither_request_ids_nor_cached_prompts(stack: Stack, files: Files) -> None:
    prompt = list(range(100, 200))
    with files.client(stack.address, TEAM_A) as ours, files.client(stack.address, TEAM_B) as theirs:
        ours.generate(prompt, max_tokens=1)
        assert ours.generate(prompt, max_tokens=1).finish.usage.cached_tokens > 0
        assert theirs.generate(prompt, max_tokens=1).finish.usage.cached_tokens == 0

        pieces = ours.stream(prompt, max_tokens=100_000, ignore_eos=True, request_id="same")
        next(pieces)
        with pytest.raises(NotFound):
            theirs.abort("same")
        assert theirs.generate(prompt, max_tokens=2, request_id="same").token_ids
        ours.abort("same")
        assert [piece for piece in pieces if piece.finish][-1].finish.reason is FinishReason.ABORTED
