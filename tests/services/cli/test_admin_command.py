"""`tessera admin` and its client, against an AdminService that plays back a script."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import grpc
import pytest
from click.testing import CliRunner, Result

from services.cli import main
from services.cli.admin_command import command
from tessera.client import AdminClient, NotFound
from tessera.client.admin import CacheReset, RequestState, WorkerState
from tessera.v1 import admin_pb2 as pb
from tessera.v1 import admin_pb2_grpc

WORKERS = [
    pb.WorkerLoad(address="w1:1", state=pb.WORKER_STATE_SERVING, num_running=2, used_kv_tokens=64, total_kv_tokens=256),
    pb.WorkerLoad(address="w2:1", state=pb.WORKER_STATE_DRAINED, total_kv_tokens=256),
]
LOAD = pb.Load(
    num_running=2, num_waiting=3, used_kv_tokens=64, total_kv_tokens=512, prefix_hit_rate=0.25, max_running=8, workers=WORKERS
)
STATS = pb.GetStatsResponse(
    model="SmolLM2", epoch=7, uptime_ms=12_300, admission_paused=True, durable=True, num_submitted=9, load=LOAD
)
ID = "0f" * 16


class ScriptedGroup(admin_pb2_grpc.AdminServiceServicer):
    """Notes what it is asked. `num_requests` live, of which `drain_worker` knows w1:1 alone."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.metadata: list[tuple[str, str]] = []
        self.num_requests = 5

    def GetStats(self, request: Any, context: Any) -> Any:
        self.metadata = [(key, value) for key, value in context.invocation_metadata() if key == "authorization"]
        return STATS

    def ListRequests(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        first = int(request.page_token or 0)
        end = min(self.num_requests, first + request.page_size)
        requests = [
            pb.RequestInfo(id=f"{number:032x}", client_request_id=f"r\x1b{number}", state=pb.REQUEST_STATE_RUNNING, age_ms=1500)
            for number in range(first, end)
        ]
        return pb.ListRequestsResponse(requests=requests, next_page_token=str(end) if end < self.num_requests else "")

    def AbortRequests(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        return pb.AbortRequestsResponse(num_aborted=2)

    def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        return pb.ResetPrefixCacheResponse(num_forgotten_blocks=7, num_held_blocks=3)

    def PauseAdmission(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        return pb.PauseAdmissionResponse()

    def ResumeAdmission(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        return pb.ResumeAdmissionResponse()

    def DrainWorker(self, request: Any, context: Any) -> Any:
        if request.address != "w1:1":
            context.abort(grpc.StatusCode.NOT_FOUND, "address: no such worker")
        return pb.DrainWorkerResponse(num_requests=4)

    def UndrainWorker(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        return pb.UndrainWorkerResponse()


@pytest.fixture
def group() -> Iterator[tuple[ScriptedGroup, str]]:
    server, group = grpc.server(ThreadPoolExecutor(2)), ScriptedGroup()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(group, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield group, f"127.0.0.1:{port}"
    server.stop(0).wait()


def run(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["admin", *arguments, "--gateway", address])


def test_stats_are_a_table_or_json(group: tuple[ScriptedGroup, str]) -> None:
    text = run(group[1], "stats").output
    assert "epoch 7" in text and "PAUSED" in text and "64 of 512 (12.5 %)" in text and "2 running (at most 8)" in text
    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [["w1:1", "serving"], ["w2:1", "drained"]]
    told = json.loads(run(group[1], "stats", "--json").output)
    assert (told["epoch"], told["load"]["workers"][1]["state"]) == (7, "drained")


def test_requests_are_read_page_by_page(group: tuple[ScriptedGroup, str]) -> None:
    script, address = group
    with AdminClient(address) as client:
        assert [int(item.id, 16) for item in client.requests()] == [0, 1, 2, 3, 4]
        script.asked.clear()
        assert [int(item.id, 16) for item in client.requests(2)] == [0, 1]
        assert len(script.asked) == 1, "no page more than are wanted"
        script.num_requests = 2500
        listed = client.requests()
        assert len(listed) == 2500 and listed[0].state is RequestState.RUNNING
    text = run(address, "requests", "--limit", "3").output
    assert len(text.splitlines()) == 1 + 3 and "r?2" in text and "\x1b" not in text
    assert len(json.loads(run(address, "requests", "--json").output)["requests"]) == 100


def test_what_is_to_be_aborted_is_named_in_one_way(group: tuple[ScriptedGroup, str]) -> None:
    script, address = group
    assert run(address, "abort", ID).output == "2 aborted\n"
    assert run(address, "abort", "--principal", "").exit_code == 0
    assert [(request.WhichOneof("target"), request.id) for request in script.asked] == [("id", ID), ("principal", "")]
    for arguments in ((), (ID, "--principal", "me")):
        assert run(address, "abort", *arguments).exit_code == 2
    with AdminClient(address) as client, pytest.raises(ValueError, match="principal"):
        client.abort()


def test_the_other_commands_say_what_came_of_it(group: tuple[ScriptedGroup, str]) -> None:
    script, address = group
    assert run(address, "reset-prefix-cache").output == "7 blocks forgotten; 3 stay, since requests hold them\n"
    assert "refused" in run(address, "pause").output and "taken in" in run(address, "resume").output
    assert run(address, "drain-worker", "w1:1").output == "it still holds 4 requests\n"
    assert "takes requests" in run(address, "undrain-worker", "w1:1").output
    assert script.asked == [pb.PauseAdmissionRequest(), pb.ResumeAdmissionRequest(), pb.UndrainWorkerRequest(address="w1:1")]
    assert json.loads(run(address, "drain-worker", "w1:1", "--json").output) == {"num_requests": 4}
    with AdminClient(address) as client:
        assert client.reset_prefix_cache() == CacheReset(7, 3)
        assert client.stats().load.workers[0].state is WorkerState.SERVING


def test_a_refusal_and_an_absent_gateway_end_with_their_own_status(group: tuple[ScriptedGroup, str]) -> None:
    refused = run(group[1], "drain-worker", "w9:9")
    assert refused.exit_code == 2 and "NOT_FOUND: address: no such worker" in refused.output
    absent = CliRunner().invoke(main.main, ["admin", "stats", "--gateway", "unix:/nonexistent"])
    assert absent.exit_code == 3 and "UNAVAILABLE" in absent.output
    with AdminClient(["unix:/nonexistent", group[1]]) as client, pytest.raises(NotFound):
        client.drain_worker("w9:9")


def test_a_token_goes_with_every_call(group: tuple[ScriptedGroup, str], tmp_path: Any) -> None:
    (tmp_path / "token").write_text("secret-secret-secret\n")
    assert run(group[1], "stats", "--token-file", str(tmp_path / "token")).exit_code == 0
    assert group[0].metadata == [("authorization", "Bearer secret-secret-secret")]


def test_every_option_of_every_command_has_help() -> None:
    assert isinstance(command, click.Group)
    for name, subcommand in command.commands.items():
        text = " ".join(CliRunner().invoke(main.main, ["admin", name, "--help"]).output.split())
        assert subcommand.help and subcommand.short_help
        for parameter in subcommand.params:
            if isinstance(parameter, click.Option):
                assert parameter.help and max(parameter.opts, key=len) in text
