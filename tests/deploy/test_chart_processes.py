"""What the chart tells its containers starts the real processes, which are ready by the chart's own probes and answer the chart's own test."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tessera.client import AccessDenied, Client, Tls
from tessera.values.known_models import locate
from tests.deploy.loopback_node import LoopbackNode, Secrets
from tests.deploy.rendered import Values, manifests

ORDER = ("redis", "worker", "scheduler", "gateway")
SMALL = {"kv-cache-bytes": 64 << 20}

PART, PUBLIC = "parts.tessera", "llm.example"
WEIGHTS = locate("SmolLM2-135M-Instruct")
SECURE: Values = {
    "model": {"name": f"/models/{WEIGHTS.name}", "weights": {"source": "pvc", "pvc": {"claimName": "weights"}}},
    "worker": {"options": SMALL},
    "redis": {"auth": {"existingSecret": "redis"}},
    "tls": {"enabled": True, "existingSecret": "parts", "peerName": PART, "gatewaySecret": "gateway"},
    "auth": {
        "clients": {"enabled": True, "existingSecret": "clients"},
        "internal": {"enabled": True, "existingSecret": "internal"},
    },
    "test": {"tokenSecret": "mine", "tlsName": PUBLIC},
}
OURS, INNER = b"a-token-of-a-client", b"a-token-of-the-parts"


def secrets() -> Secrets:
    """As SECURE names them."""
    authority = trustme.CA()

    def pair(*names: str) -> dict[str, bytes]:
        leaf = authority.issue_cert(*names)
        chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
        return {"tls.crt": chain, "tls.key": leaf.private_key_pem.bytes(), "ca.crt": authority.cert_pem.bytes()}

    return {
        "parts": pair(PART),
        "gateway": pair(PART, PUBLIC),
        "redis": {"password": rb"""a 'password' with "quotes", \n, $(id) and spaces"""},
        "clients": {"tokens": OURS + b" team-a public\n"},
        "internal": {"tokens": INNER + b" parts internal\n", "token": INNER},
        "mine": {"token": OURS},
    }


def started(folder: Path, values: Values, given: Secrets) -> Iterator[LoopbackNode]:
    node = LoopbackNode(manifests(values), folder, given, {"weights": WEIGHTS.parent})
    try:
        for component in ORDER:
            node.start(component)
        for component in ORDER[1:]:
            for probe in ("startup", "readiness", "liveness"):
                node.wait(component, probe)
        yield node
    finally:
        for component in reversed(ORDER):
            node.stop(component)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackNode]:
    """The chart as it is installed without any values."""
    yield from started(tmp_path_factory.mktemp("plain"), {}, {})


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[LoopbackNode]:
    yield from started(tmp_path, SECURE, secrets())


def test_an_installation_without_values_answers_its_test(plain: LoopbackNode) -> None:
    asked = plain.run("test")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip(), "some text"


def test_every_role_is_scraped_where_its_service_says(plain: LoopbackNode) -> None:
    own = {"gateway": "tessera:gateway_connected 1", "scheduler": "tessera:leading", "worker": "tessera:worker_kv_blocks"}
    for role, line in own.items():
        with urllib.request.urlopen(f"http://{plain.address(role, 9100)}/metrics", timeout=10) as answer:
            assert line in answer.read().decode()


def test_with_tls_tokens_a_password_and_weights_on_a_claim_it_answers_who_may_ask(secure: LoopbackNode) -> None:
    asked = secure.run("test")
    assert asked.returncode == 0, asked.stderr
    ca = secure.pods["test"].folders["/etc/tessera/tls"] / "ca.crt"
    tls = Tls(ca, server_name=PUBLIC)
    with Client(secure.address("gateway", 50051), tls=tls, token="a-token-of-nobody") as stranger, pytest.raises(AccessDenied):
        stranger.generate("Once")
    for component in reversed(ORDER):
        assert secure.stop(component) == 0, secure.tail(component)
