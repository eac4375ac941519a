"""`tessera generate` as a process, against a public API that plays back a script."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from services.cli.answer import TimedAnswer
from services.cli.logprob_table import table
from tessera.client import TokenLogprob, TokenLogprobs
from tessera.client.results import Finish, FinishReason, Timings, Usage
from tessera.v1 import inference_pb2, inference_pb2_grpc

RunAsync = Callable[..., Any]


@dataclass
class ScriptedGateway(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with `pieces`, then `reason`; or refuses with `refusal`. Keeps what it was asked, and the resumes of that."""

    pieces: tuple[str, ...] = ("The capital", " is", " Paris.")
    reason: str = "FINISH_REASON_STOP"
    refusal: tuple[grpc.StatusCode, str] | None = None
    ends_after: int | None = None  # pieces; then it is UNAVAILABLE
    asked: list[Any] = field(default_factory=list)
    resumed: list[Any] = field(default_factory=list)

    async def StreamGenerate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request.generation)
        if request.HasField("resume"):
            self.resumed.append(request.resume)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        text_offset = 0
        for index, piece in enumerate(self.pieces):
            if index == self.ends_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
            response = inference_pb2.StreamGenerateResponse(
                request_id="r1", text=piece, text_offset=text_offset, token_ids=[index], token_offset=index
            )
            if request.generation.sampling.HasField("logprobs"):
                told = inference_pb2.TokenLogprob(token_id=index, logprob=-0.25 * index, text=piece.encode())
                response.logprobs.add(token=told if index else None, rank=index, top=[told] * index)
            yield response
            text_offset += len(piece.encode())
        usage = inference_pb2.Usage(prompt_tokens=5, completion_tokens=len(self.pieces))
        finish = inference_pb2.Finish(reason=self.reason, usage=usage)
        yield inference_pb2.StreamGenerateResponse(
            request_id="r1", text_offset=text_offset, token_offset=len(self.pieces), finish=finish
        )

    async def Generate(self, request: Any, context: Any) -> Any:
        """As many whole answers as were asked for; the last ends for `reason`, the others by a stop."""
        self.asked.append(request.generation)
        if self.refusal is not None:
            await context.abort(*self.refusal)

        def end(reason: str, count: int) -> Any:
            usage = inference_pb2.Usage(prompt_tokens=5, completion_tokens=count)
            return inference_pb2.Finish(reason=reason, usage=usage)

        response = inference_pb2.GenerateResponse(
            request_id="r1", text=self.pieces[0], token_ids=[0], finish=end("FINISH_REASON_STOP", 1)
        )
        if request.generation.sampling.HasField("logprobs"):
            response.logprobs.add(token=inference_pb2.TokenLogprob(token_id=0, logprob=-0.5, text=b"The"), rank=1)
        for index in range(1, request.generation.n):
            reason = self.reason if index == request.generation.n - 1 else "FINISH_REASON_STOP"
            response.others.add(index=index, text=f"{self.pieces[index]}\n", token_ids=[index, 7], finish=end(reason, 2))
        return response


@asynccontextmanager
async def listening(gateway: ScriptedGateway) -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def tessera(*arguments: str, given: str = "") -> tuple[int, str, str]:
    """Run the command; its exit status, standard output and standard error."""
    command = (sys.executable, "-m", "services.cli.main", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await process.communicate(given.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def ask(run_async: RunAsync, gateway: ScriptedGateway, *arguments: str, given: str = "") -> tuple[int, str, str]:
    async def story() -> tuple[int, str, str]:
        async with listening(gateway) as address:
            return await tessera("generate", *arguments, "--gateway", address, "--resume-timeout-s", "0", given=given)

    result: tuple[int, str, str] = run_async(story())
    return result


def test_text_goes_to_stdout_and_counts_to_stderr(run_async: RunAsync) -> None:
    gateway = ScriptedGateway()
    status, out, err = ask(run_async, gateway, "What is it?")
    assert (status, out) == (0, "The capital is Paris.\n")
    assert "[stop; prompt 5 tokens, answer 3 tokens; first after" in err
    assert gateway.asked[0].text == "What is it?"
    gateway.asked[0].sampling.ClearField("seed")  # drawn by the client
    assert gateway.asked[0].sampling == inference_pb2.Sampling()  # the server's defaults hold


def test_chat_and_every_sampling_option_reach_the_gateway(run_async: RunAsync) -> None:
    gateway = ScriptedGateway()
    drawing = ("--temperature", "0", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--seed", "7")
    stopping = (
        "--max-tokens",
        "9",
        "--min-tokens",
        "2",
        "--ignore-eos",
        "--stop-token-id",
        "4",
        "--stop",
        "\n",
        "--stop",
        "END",
    )
    penalties = ("--presence-penalty", "0.5", "--frequency-penalty", "-0.5", "--repetition-penalty", "1.25")
    ids = (
        "--logit-bias",
        "5=-1.5",
        "--logit-bias",
        "6=2",
        "--allowed-token-id",
        "5",
        "--allowed-token-id",
        "6",
        "--bad-word",
        "no",
    )
    telling = ("--logprobs", "3", "--prompt-logprobs", "0", "--logprob-token-id", "8", "--logprob-token-id", "9")
    status, _, _ = ask(
        run_async, gateway, "-", "--system", "Be brief.", *drawing, *stopping, *penalties, *ids, *telling, given="Why?"
    )
    assert status == 0
    (asked,) = gateway.asked
    assert [(message.role, message.content) for message in asked.chat.messages] == [("system", "Be brief."), ("user", "Why?")]
    assert list(asked.stop) == ["\n", "END"]
    assert asked.sampling == inference_pb2.Sampling(
        temperature=0,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[4],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={5: -1.5, 6: 2.0},
        allowed_token_ids=[5, 6],
        bad_words=["no"],
        logprobs=3,
        prompt_logprobs=0,
        logprob_token_ids=[8, 9],
    )


def test_everything_of_a_chat_reaches_the_gateway(run_async: RunAsync, tmp_path: Path) -> None:
    gateway, tools = ScriptedGateway(), tmp_path / "tools.json"
    tools.write_text('[{"type": "function"}]')
    chat = ("--tools", str(tools), "--template-arg", "thinking=false", "--template-arg", "mood=kind", "--prefill", "Well, ")
    status, _, err = ask(run_async, gateway, "Why?", *chat, "--priority", "-3", "--cache-salt", "mine", "--max-queue-ms", "9")
    assert status == 0, err
    (asked,) = gateway.asked
    expected = {
        "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Well, "}],
        "tools": [{"type": "function"}],
        "template_args": {"thinking": False, "mood": "kind"},
        "continue_final_message": True,
    }
    assert asked.chat == json_format.ParseDict(expected, inference_pb2.ChatPrompt())
    assert (asked.priority, asked.cache_salt, asked.limits) == (-3, "mine", inference_pb2.Limits(max_queue_ms=9))
    tools.write_text("{}")
    assert ask(run_async, gateway, "Why?", *chat)[0] == 2


def test_log_probabilities_follow_the_answer_for_people_and_are_in_the_json(run_async: RunAsync) -> None:
    """Those of the first token are known to nobody."""
    status, out, err = ask(run_async, ScriptedGateway(), "x", "--logprobs", "2")
    assert (status, out) == (0, "The capital is Paris.\n")
    lines = err.splitlines()
    assert lines[:2] == ["log-probabilities of the answer: each token's, its rank, the token; others", "         -"]
    assert lines[2:4] == [
        '   -0.2500     1  " is"  " is" -0.2500',
        '   -0.5000     2  " Paris."  " Paris." -0.5000  " Paris." -0.5000',
    ]
    status, out, err = ask(run_async, ScriptedGateway(), "x", "--logprobs", "2", "--json")
    told = json.loads(out)["logprobs"]
    is_ = {"token_id": 1, "logprob": -0.25, "text": " is"}
    assert told[:2] == [None, is_ | {"rank": 1, "top": [is_], "asked": []}] and "log-prob" not in err


def test_a_part_of_a_character_is_shown_as_its_bytes() -> None:
    parts = [TokenLogprob(token_id, -0.5, text) for token_id, text in enumerate((b"\xe8", b"\x9f\x98", "é\n".encode()))]
    told = TokenLogprobs(parts[0], 1, tuple(parts[1:]), ())
    finish = Finish(FinishReason.STOP, None, None, Usage(1, 1, 0), Timings(0, 0, 0, 0, 0), "")
    shown = table(TimedAnswer("r", "", (0,), finish, 0.0, 0.0, logprobs=(told,)))
    assert shown.endswith(r'"\xe8"  "\x9f\x98" -0.5000  "é\n" -0.5000')


def test_a_bias_without_a_number_is_refused(run_async: RunAsync) -> None:
    status, _, err = ask(run_async, ScriptedGateway(), "x", "--logit-bias", "5")
    assert status == 2 and "'5' is not a token id, '=' and a number" in err


def test_json_is_one_object_at_the_end(run_async: RunAsync) -> None:
    status, out, _ = ask(run_async, ScriptedGateway(), "x", "--json")
    answer = json.loads(out)
    assert status == 0
    assert (answer["request_id"], answer["text"], answer["token_ids"]) == ("r1", "The capital is Paris.", [0, 1, 2])
    assert answer["finish"]["usage"]["completion_tokens"] == 3 and answer["finish"]["reason"] == "stop"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        (grpc.StatusCode.NOT_FOUND, 2),
        (grpc.StatusCode.UNAVAILABLE, 3),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
    ],
)
def test_a_refusal_is_an_error_with_its_own_exit_status(run_async: RunAsync, code: grpc.StatusCode, status: int) -> None:
    got, out, err = ask(run_async, ScriptedGateway(refusal=(code, "stop: more than 16")), "x")
    assert (got, out) == (status, "")
    assert f"Error: {code.name}: stop: more than 16" in err


def test_an_answer_that_ended_with_an_error_fails(run_async: RunAsync) -> None:
    status, out, err = ask(run_async, ScriptedGateway(reason="FINISH_REASON_ERROR"), "x")
    assert (status, out) == (1, "The capital is Paris.\n") and "[error" in err


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--temperature", "nan", "finite"),
        ("--max-tokens", "0", "between 1 and"),
        ("--top-p", "1.5", "between"),
        ("--logprob-token-id", "-1", "range"),
        ("--stop-token-id", "4294967296", "range"),
        ("--allowed-token-id", "-5", "range"),
        ("--logit-bias", "-3=1", "range"),
    ],
)
def test_a_value_out_of_range_is_refused_here(run_async: RunAsync, option: str, value: str, complaint: str) -> None:
    gateway = ScriptedGateway()
    status, _, err = ask(run_async, gateway, "x", option, value)
    assert status == 2 and option in err and complaint in err and not gateway.asked


@pytest.mark.parametrize("form", ["options", "commas"])
def test_the_answer_goes_on_at_the_next_gateway(run_async: RunAsync, form: str) -> None:
    first, second = ScriptedGateway(ends_after=2), ScriptedGateway()

    async def story() -> tuple[int, str, str]:
        async with listening(first) as one, listening(second) as other:
            given = ("--gateway", one, "--gateway", other) if form == "options" else ("--gateway", f"{one},{other}")
            return await tessera("generate", "x", *given)

    status, out, err = run_async(story())
    assert (status, out) == (0, "The capital is Paris.\n")
    assert "UNAVAILABLE: draining; trying again" in err and "[stop; " in err
    (resume,) = second.resumed
    assert (resume.number, resume.token_offset, list(resume.token_ids)) == (1, 2, [0, 1])
    assert first.asked == second.asked


def test_a_gateway_given_twice_is_refused_here(run_async: RunAsync) -> None:
    status, _, err = run_async(tessera("generate", "x", "--gateway", "a:1", "--gateway", "a:1"))
    assert status == 2 and "--gateway" in err and "twice" in err


def test_nobody_there(run_async: RunAsync) -> None:
    status, out, err = run_async(tessera("generate", "x", "--address", "127.0.0.1:1", "--resume-timeout-s", "0.2"))
    assert (status, out) == (3, "") and "Error: UNAVAILABLE" in err
    assert err.count("trying again") == 1, "once per outage"


def test_several_answers_come_under_their_numbers(run_async: RunAsync) -> None:
    gateway = ScriptedGateway()
    status, out, err = ask(run_async, gateway, "What is it?", "-n", "3", "--logprobs", "0")
    assert status == 0 and gateway.asked[0].n == 3
    assert out == "=== answer 0 ===\nThe capital\n=== answer 1 ===\n is\n\n=== answer 2 ===\n Paris.\n\n"
    assert "answer 0:\nlog-probabilities of the answer" in err and "answer 1:" not in err.partition("[")[0]
    assert "[answer 0: stop; 1 tokens]\n[answer 1: stop; 2 tokens]\n[answer 2: stop; 2 tokens]\n" in err
    assert "[prompt 5 tokens, answers 5 tokens in " in err


def test_several_answers_are_one_json_object(run_async: RunAsync) -> None:
    status, out, _ = ask(run_async, ScriptedGateway(reason="FINISH_REASON_LENGTH"), "x", "--answers", "2", "--json")
    told = json.loads(out)
    assert status == 0 and told.keys() == {"answers", "total_s"}
    assert [answer["text"] for answer in told["answers"]] == ["The capital", " is\n"]
    assert [answer["finish"]["reason"] for answer in told["answers"]] == ["stop", "length"]
    assert [answer["token_ids"] for answer in told["answers"]] == [[0], [1, 7]]


def test_several_answers_of_which_one_failed_are_a_failure(run_async: RunAsync) -> None:
    status, out, err = ask(run_async, ScriptedGateway(reason="FINISH_REASON_ERROR"), "x", "-n", "2")
    assert status == 1 and "=== answer 1 ===" in out and "[answer 1: error; 2 tokens]" in err


def test_more_answers_than_the_gateway_gives_are_refused(run_async: RunAsync) -> None:
    gateway = ScriptedGateway(refusal=(grpc.StatusCode.INVALID_ARGUMENT, "generation.n: must be from 1 to 16, got 17"))
    status, _, err = ask(run_async, gateway, "x", "-n", "17")
    assert status == 2 and "must be from 1 to 16" in err
