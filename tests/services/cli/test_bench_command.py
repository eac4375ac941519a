"""`tessera bench` as a process, against a public API in this one that answers at once."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from services.cli.main import main
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc

RunAsync = Callable[..., Any]


@dataclass
class QuickGateway(inference_pb2_grpc.InferenceServiceServicer):
    """A token a piece, as many as are asked for. From request number `ends_at` on it answers no more: with `refusal`, or else it waits."""

    room: int = 1000
    ends_at: int = 1 << 40
    refusal: tuple[grpc.StatusCode, str] | None = None
    refused_once: bool = False
    reason: pb.FinishReason = pb.FINISH_REASON_LENGTH
    asked: list[pb.Generation] = field(default_factory=list)
    callers: list[str] = field(default_factory=list)
    num_waiting: int = 0
    two_wait: asyncio.Event = field(default_factory=asyncio.Event)

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        model = pb.Model(
            name="quick", vocab_size=50, max_model_len=1 << 20, eos_token_ids=[7], bos_token_id=1, max_request_len=self.room
        )
        return pb.GetModelResponse(model=model)

    async def StreamGenerate(self, request: Any, context: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
        generation = request.generation
        self.asked.append(generation)
        self.callers += [value for name, value in context.invocation_metadata() if name == "authorization"]
        if len(self.asked) > self.ends_at:
            if self.refusal is None:
                self.num_waiting += 1
                if self.num_waiting == 2:
                    self.two_wait.set()
                await asyncio.Event().wait()
            refusal = self.refusal
            if self.refused_once:
                self.ends_at = 1 << 40
            assert refusal is not None
            await context.abort(*refusal)
        count = generation.sampling.max_tokens
        for offset in range(count):
            yield pb.StreamGenerateResponse(request_id=generation.request_id, token_ids=[3], token_offset=offset)
        usage = pb.Usage(prompt_tokens=len(generation.tokens.token_ids), completion_tokens=count, cached_tokens=1)
        finish = pb.Finish(reason=self.reason, usage=usage, timings=pb.Timings(queue_us=1500, ttft_us=2500))
        yield pb.StreamGenerateResponse(request_id=generation.request_id, token_offset=count, finish=finish)


@asynccontextmanager
async def listening(gateway: QuickGateway) -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@dataclass(frozen=True)
class Ended:
    """What a run left: its report, and the JSON of its last line."""

    status: int
    report: str
    told: dict[str, Any]
    err: str


async def bench(*arguments: str, interrupt: asyncio.Event | None = None) -> Ended:
    command = (sys.executable, "-m", "services.cli.main", "bench", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    if interrupt is not None:
        await interrupt.wait()
        process.send_signal(signal.SIGINT)
    out, err = (text.decode() for text in await process.communicate())
    assert process.returncode is not None
    report, _, last = out.rstrip("\n").rpartition("\n")
    return Ended(process.returncode, report, json.loads(last) if last.startswith("{") else {}, err)


def measure(run_async: RunAsync, gateway: QuickGateway, *arguments: str) -> Ended:
    async def story() -> Ended:
        async with listening(gateway) as address:
            return await bench("--gateway", address, *arguments)

    ended: Ended = run_async(story())
    return ended


def test_a_closed_loop_is_reported_and_written(run_async: RunAsync, tmp_path: Path) -> None:
    gateway, file, picture = QuickGateway(), tmp_path / "requests.jsonl", tmp_path / "one.png"
    given = ("--concurrency", "3", "--requests", "9", "--input-tokens", "20-30", "--output-tokens", "5", "--seed", "4")
    ended = measure(run_async, gateway, *given, "--slo", "ttft:60000", "--json", str(file), "--plot", str(picture))
    assert ended.status == 0, ended.err
    assert ended.report.startswith("quick at 127.0.0.1:") and "20 to 30 tokens in, 5 out" in ended.report
    assert "9 ok; " in ended.report and "TTFT, ms" in ended.report and "within ttft:60000" in ended.report
    (level,) = ended.told["levels"]
    assert (level["load"], level["num_ok"], level["output_tokens"], level["cached_tokens"]) == ("3 at once", 9, 45, 9)
    assert level["input_tokens"] == sum(len(asked.tokens.token_ids) for asked in gateway.asked[2:])
    assert level["queue_ms"]["max"] == 1.5 and level["goodput_share"] == 1.0 and level["lag_ms"] is None
    requests = [json.loads(line) for line in file.read_text().splitlines()]
    assert [request["index"] for request in requests] == list(range(9))
    assert all(request["output_tokens"] == 5 and len(request["itl_ms"]) == 4 for request in requests)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_requests_are_token_ids_with_lengths_that_hold_and_a_salt_of_the_level(run_async: RunAsync) -> None:
    gateway = QuickGateway()
    given = ("--concurrencies", "1,2", "--requests", "3", "--input-tokens", "15", "--shared-prefix-tokens", "10")
    ended = measure(run_async, gateway, *given, "--warmup", "1", "--temperature", "0.5")
    assert ended.status == 0, ended.err
    warmup, *measured = gateway.asked
    prompts = [list(asked.tokens.token_ids) for asked in measured]
    assert prompts[:3] == prompts[3:], "each level asks the same"
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1 and len({tuple(prompt) for prompt in prompts}) == 3
    assert all(len(prompt) == 25 and not {1, 7} & set(prompt) for prompt in prompts)
    assert list(warmup.tokens.token_ids) not in prompts
    salts = [asked.cache_salt for asked in measured]
    assert len(set(salts[:3])) == len(set(salts[3:])) == 1 and len({warmup.cache_salt, *salts}) == 3
    sampling = measured[0].sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (64, True, 0.5)
    again = QuickGateway()
    assert measure(run_async, again, *given, "--cache-salt", "mine").status == 0
    assert [list(asked.tokens.token_ids) for asked in again.asked[2:]] == prompts, "the seed gives the same prompts"
    assert {asked.cache_salt for asked in again.asked} == {"mine"}


def test_an_open_loop_at_several_rates_is_a_row_each_and_a_picture(run_async: RunAsync, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    given = ("--rates", "100,50", "--requests", "5", "--output-tokens", "3", "--slo", "ttft:5", "--plot", str(picture))
    ended = measure(run_async, QuickGateway(), *given)
    assert ended.status == 0, ended.err
    assert [line.split()[0] for line in ended.report.splitlines()[1:]] == ["load", "50", "100"]
    assert [level["load_value"] for level in ended.told["levels"]] == [50.0, 100.0]
    assert all(level["lag_ms"] is not None for level in ended.told["levels"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_rejected_is_counted_and_not_sent_again(run_async: RunAsync) -> None:
    gateway = QuickGateway(ends_at=5, refusal=(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full"))
    ended = measure(run_async, gateway, "--concurrency", "1", "--requests", "6", "--warmup", "2")
    assert ended.status == 0, ended.err
    assert "3 ok, 3 rejected" in ended.report and "the first rejected said: the queue is full" in ended.err
    assert ended.told["levels"][0]["failed"] == {"RESOURCE_EXHAUSTED": 3} and len(gateway.asked) == 8


def test_a_retry_sends_it_again(run_async: RunAsync) -> None:
    gateway = QuickGateway(ends_at=1, refusal=(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), refused_once=True)
    ended = measure(run_async, gateway, "--requests", "2", "--concurrency", "1", "--warmup", "0", "--retries", "1")
    assert ended.status == 0, ended.err
    (level,) = ended.told["levels"]
    assert (level["num_ok"], level["num_retries"], level["failed"]) == (2, 1, {}) and len(gateway.asked) == 3


def test_the_trace_says_lengths_and_prefixes(run_async: RunAsync, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 520, 3, [4, 5]), (10, 900, 200, [4, 6]), (20, 600, 2, [4, 8]), (30, 10, 1, [9])]
    lines = [dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), row, strict=True)) for row in rows]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gateway = QuickGateway()
    ended = measure(run_async, gateway, "--trace", str(trace), "--trace-limit", "3", "--warmup", "0", "--time-scale", "0.5")
    assert ended.status == 0, ended.err
    (level,) = ended.told["levels"]
    assert (level["load"], level["num_ok"], level["num_skipped"]) == ("the trace's times", 2, 1)
    assert "1 request was left out" in ended.err
    assert [(len(asked.tokens.token_ids), asked.sampling.max_tokens) for asked in gateway.asked] == [(520, 3), (600, 2)]
    assert gateway.asked[0].tokens.token_ids[:512] == gateway.asked[1].tokens.token_ids[:512]
    cut = QuickGateway()
    assert measure(run_async, cut, "--trace", str(trace), "--warmup", "0", "--rate", "inf", "--too-long", "cut").status == 0
    assert sorted(len(asked.tokens.token_ids) for asked in cut.asked) == [10, 520, 600, 800]


def test_lengths_of_none_in_a_trace_are_said(run_async: RunAsync, tmp_path: Path) -> None:
    trace, gateway = tmp_path / "conv.csv", QuickGateway()
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,0\n2023-11-16 18:15:46,0,2\n")
    ended = measure(run_async, gateway, "--trace", str(trace), "--warmup", "0")
    assert ended.status == 0 and "Note: 2 requests of conv.csv have 0 tokens of prompt or answer, sent as 1" in ended.err
    assert sorted((len(asked.tokens.token_ids), asked.sampling.max_tokens) for asked in gateway.asked) == [(1, 2), (5, 1)]


def test_several_gateways_get_the_requests_in_turn(run_async: RunAsync) -> None:
    first, second = QuickGateway(), QuickGateway()

    async def story() -> Ended:
        async with listening(first) as one, listening(second) as other:
            return await bench("--gateway", one, "--gateway", other, "--requests", "6", "--warmup", "0")

    assert run_async(story()).told["levels"][0]["num_ok"] == 6
    assert (len(first.asked), len(second.asked)) == (3, 3)


def test_an_interrupt_reports_what_is_finished(run_async: RunAsync, tmp_path: Path) -> None:
    gateway, file = QuickGateway(ends_at=7), tmp_path / "requests.jsonl"

    async def story() -> Ended:
        async with listening(gateway) as address:
            given = ("--concurrency", "2", "--requests", "50", "--warmup", "2", "--json", str(file))
            return await bench("--gateway", address, *given, interrupt=gateway.two_wait)

    ended = run_async(story())
    assert ended.status == 130, ended.err
    (level,) = ended.told["levels"]
    assert (level["num_ok"], level["num_interrupted"]) == (5, 2) and "5 ok, 2 interrupted" in ended.report
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [request["status"] for request in told] == ["OK"] * 5 + ["INTERRUPTED"] * 2
    assert level["duration_s"] >= max(request["end_s"] for request in told) - 0.001 and level["concurrency_peak"] == 2


def test_an_interrupt_of_the_warm_up_reports_nothing(run_async: RunAsync) -> None:
    gateway = QuickGateway(ends_at=0)

    async def story() -> Ended:
        async with listening(gateway) as address:
            return await bench("--gateway", address, interrupt=gateway.two_wait)

    ended = run_async(story())
    assert (ended.status, ended.told["levels"], len(gateway.asked)) == (130, [], 2), ended.err


def test_the_token_goes_along(run_async: RunAsync, tmp_path: Path) -> None:
    gateway, file = QuickGateway(), tmp_path / "token"
    file.write_text("secret\n")
    assert measure(run_async, gateway, "--requests", "1", "--warmup", "0", "--token-file", str(file)).status == 0
    assert gateway.callers == ["Bearer secret"]


@pytest.mark.parametrize(
    ("gateway", "arguments", "status", "complaint"),
    [
        (QuickGateway(room=20), ("--input-tokens", "30"), 2, "20 tokens that the model has room for"),
        (QuickGateway(ends_at=0, refusal=(grpc.StatusCode.INTERNAL, "broken")), (), 1, "the warm-up failed: INTERNAL: broken"),
        (
            QuickGateway(reason=pb.FINISH_REASON_ERROR),
            (),
            1,
            "the warm-up failed: ANSWER_ERROR: the gateway did not say why",
        ),
        (
            QuickGateway(reason=pb.FINISH_REASON_ABORTED),
            (),
            1,
            "the warm-up failed: ANSWER_ABORTED: an operator or another client aborted it",
        ),
        (
            QuickGateway(ends_at=0, refusal=(grpc.StatusCode.INTERNAL, "broken")),
            ("--warmup", "0", "--requests", "2"),
            1,
            "the first INTERNAL said: broken",
        ),
    ],
)
def test_without_one_answer_it_fails(
    run_async: RunAsync, gateway: QuickGateway, arguments: tuple[str, ...], status: int, complaint: str
) -> None:
    ended = measure(run_async, gateway, *arguments)
    assert ended.status == status and complaint in ended.err


def test_nobody_there(run_async: RunAsync) -> None:
    ended = run_async(bench("--gateway", "127.0.0.1:1"))
    assert ended.status == 3 and "Error: UNAVAILABLE" in ended.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--rate", "2", "--concurrency", "3"), "--concurrency and --rate are two kinds of load"),
        (("--rate", "0"), "'0' is not above 0"),
        (("--rate", "fast"), "'fast' is not above 0: give requests a second"),
        (("--rates", ""), "'' has nothing where a number is expected: give 1,2.5,4"),
        (("--rates", "1,,2"), "'1,,2' has nothing where a number is expected"),
        (("--rates", "1,inf"), "give --rate inf"),
        (("--concurrencies", ""), "'' has nothing where a number is expected: give 1,2,4"),
        (("--concurrencies", "4,many"), "'many': each is 1 to 10000"),
        (("--concurrencies", "4," + "9" * 5000), "each is 1 to 10000"),
        (("--concurrencies", "4,0"), "each is 1 to"),
        (("--rate", "inf", "--duration-s", "5"), "--rate inf needs --requests"),
        (("--trace-limit", "5"), "--trace-limit needs --trace"),
        (("--time-scale", "2"), "--time-scale needs --trace"),
        (("--trace", __file__, "--input-tokens", "9"), "--input-tokens has no effect with --trace"),
        (("--burstiness", "2", "--concurrency", "3"), "--burstiness needs --rate or --rates"),
        (("--input-tokens", "few"), "'few' is not a length"),
        (("--slo", "itl:5"), "ttft, tpot, e2el"),
        (("--tls-name", "x"), "need --tls-ca"),
        (("--plot", "curve.txt"), "a picture ends with .png"),
        (("--plot", "no/such/folder/curve.png"), "no folder no/such/folder"),
        (("--json", "no/such/folder/all.jsonl"), "no folder no/such/folder"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2 and complaint in " ".join(result.output.split())


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    result = CliRunner().invoke(main, ["bench", "--trace", str(path)])
    assert result.exit_code == 2 and "line 1: 'a,b'" in result.output


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["bench", "--plot", "x.png"])
    assert result.exit_code == 2 and "pip install 'tessera-server[bench]'" in result.output
