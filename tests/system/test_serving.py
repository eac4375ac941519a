"""A real model served through gateway, scheduler and worker."""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
from process_stack import MODEL, Stack, idle_events, last_idle
from stream_reader import Reader, wait_until

from tessera.client import ChatMessage, Client, DeadlineExceeded, FinishReason, InvalidArgument, NotFound
from tessera.v1 import inference_pb2 as pb
from tessera.v1.inference_pb2_grpc import InferenceServiceStub

PARIS = [ChatMessage("user", "What is the capital of France?")]
STORY = "Once upon a time in a small village there lived"


def test_an_answer_streams_in_pieces(client: Client) -> None:
    reader = Reader(client, PARIS, temperature=0.0).result()
    assert reader.text == "The capital of France is Paris."
    assert reader.finish.reason is FinishReason.STOP
    assert reader.finish.timings.ttft_us > 0


def test_an_answer_that_was_begun_goes_on(client: Client) -> None:
    begun = [*PARIS, ChatMessage("assistant", "The capital of France")]
    answer = client.generate(begun, temperature=0.0, continue_final_message=True)
    assert answer.text == " is Paris."


def test_several_answers_are_those_of_their_seeds_alone(client: Client) -> None:
    options = {"temperature": 0.9, "max_tokens": 6, "logprobs": 1}
    several = client.generate_several(STORY, 3, seed=5, **options)
    alone = [client.generate(STORY, seed=5 + index, **options) for index in range(3)]
    assert [answer.text for answer in several] == [answer.text for answer in alone]
    assert len({answer.text for answer in several}) > 1
    assert [len(answer.logprobs) for answer in several] == [6, 6, 6]


def test_a_prefix_is_shared_within_a_salt(client: Client) -> None:
    prompt = "A salt keeps the prefixes of its requests apart from those of all others " * 6

    def cached(salt: str) -> int:
        return client.generate(prompt, cache_salt=salt, priority=-1, max_tokens=1).finish.usage.cached_tokens

    assert [cached(salt) > 0 for salt in ("anna", "bert", "anna")] == [False, False, True]


def test_a_request_ends_when_its_time_is_over(client: Client, stack: Stack) -> None:
    before = len(idle_events(stack))
    with pytest.raises(DeadlineExceeded) as caught:
        client.generate(STORY, max_tokens=2000, ignore_eos=True, max_total_ms=400)
    assert caught.value.details.reason == "MAX_TOTAL_MS"
    wait_until(lambda: len(idle_events(stack)) > before, "nothing of it goes on")


def test_unary_and_stream_agree(client: Client) -> None:
    answer = client.generate(STORY, temperature=0.9, seed=11, max_tokens=24)
    reader = Reader(client, STORY, temperature=0.9, seed=11, max_tokens=24).result()
    assert answer.token_ids == tuple(reader.token_ids)
    assert answer.text == reader.text


def test_a_prompt_sent_again_is_served_from_the_cache(client: Client) -> None:
    prompt = "The history of the printing press begins long before " * 8
    cold = client.generate(prompt, temperature=0.0, max_tokens=8)
    warm = client.generate(prompt, temperature=0.0, max_tokens=8)
    assert warm.token_ids == cold.token_ids
    assert cold.finish.usage.cached_tokens == 0
    assert warm.finish.usage.cached_tokens >= 64


def test_a_stop_string_ends_the_answer_and_the_request(client: Client, stack: Stack) -> None:
    whole = client.generate(STORY, temperature=0.0, max_tokens=48)
    stop = whole.text[20:24]
    before = len(idle_events(stack))
    cut = client.generate(STORY, temperature=0.0, max_tokens=48, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish.stop_string == stop
    wait_until(lambda: len(idle_events(stack)) > before, "the scheduler is idle again")


def test_everything_is_given_back(client: Client, stack: Stack) -> None:
    client.generate(STORY, temperature=0.0, max_tokens=4)
    wait_until(lambda: last_idle(stack).get("num_free_blocks") == last_idle(stack).get("num_blocks", -1), "all blocks are free")
    wait_until(lambda: not stack.request_keys(), "nothing of any request is left in Redis")


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancelled_call_gives_its_blocks_back(client: Client, stack: Stack, phase: str) -> None:
    prompt = list(range(1000, 1000 + (4 if phase == "decode" else 1500)))
    before = len(idle_events(stack))
    with grpc.insecure_channel(stack.address) as channel:
        generation = pb.Generation(
            tokens=pb.TokenPrompt(token_ids=prompt), sampling=pb.Sampling(max_tokens=2000, ignore_eos=True)
        )
        stub = InferenceServiceStub(channel)
        holder = None
        if phase == "queued":  # 4,000 prompt tokens leave no room in the pool for 1,500 more
            most = pb.Generation(tokens=pb.TokenPrompt(token_ids=range(300, 4300)), sampling=pb.Sampling(max_tokens=1))
            holder = stub.StreamGenerate(pb.StreamGenerateRequest(generation=most))
            threading.Event().wait(0.2)
        call = stub.StreamGenerate(pb.StreamGenerateRequest(generation=generation))
        if phase == "decode":
            next(call)
        elif phase == "prefill":
            threading.Event().wait(0.5)  # chunks of a prompt of seconds: any moment will do
        call.cancel()
        with contextlib.suppress(grpc.RpcError):
            list(call)
        if holder is not None:
            assert sum(len(piece.token_ids) for piece in holder) == 1, "the one that holds the pool goes on to its end"
    answer = client.generate("Hello", temperature=0.0, max_tokens=2)
    assert len(answer.token_ids) == 2
    wait_until(lambda: len(idle_events(stack)) > before, "the scheduler is idle again", timeout_s=30)
    wait_until(
        lambda: last_idle(stack)["num_free_blocks"] == last_idle(stack)["num_blocks"], "all blocks are free", timeout_s=5
    )


REFUSED = {
    "empty text": (pb.Generation(text=""), "text"),
    "no prompt": (pb.Generation(), "generation.text"),
    "too long": (pb.Generation(tokens=pb.TokenPrompt(token_ids=[7] * 9000)), "tokens"),
    "temperature": (pb.Generation(text="x", sampling=pb.Sampling(temperature=float("nan"))), "sampling.temperature"),
    "token id": (pb.Generation(tokens=pb.TokenPrompt(token_ids=[5, 49152])), "tokens.token_ids[1]"),
    "stops": (pb.Generation(text="x", stop=[f"s{i}" for i in range(17)]), "stop"),
    "max_tokens": (pb.Generation(text="x", sampling=pb.Sampling(max_tokens=0)), "sampling.max_tokens"),
    "5 MiB": (pb.Generation(text="word " * (1024 * 1024)), "text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_named_and_harms_nobody(client: Client, stack: Stack, name: str) -> None:
    generation, field = REFUSED[name]
    neighbour = Reader(client, PARIS, temperature=0.0)
    with grpc.insecure_channel(stack.address) as channel, pytest.raises(grpc.RpcError) as refused:
        list(InferenceServiceStub(channel).StreamGenerate(pb.StreamGenerateRequest(generation=generation)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in refused.value.details()
    assert neighbour.result().text == "The capital of France is Paris."


def test_an_unknown_model_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound, match="no-such-model"):
        client.generate("x", model="no-such-model")


def test_the_client_names_the_refused_field(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="top_p"):
        client.generate("x", top_p=2.0)


def test_buf_curl_streams_tokens(stack: Stack) -> None:
    request = {"generation": {"text": STORY, "sampling": {"temperature": 0, "maxTokens": 6}}}
    command = [str(Path(sys.executable).with_name("buf")), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    command += ["-d", json.dumps(request), f"http://{stack.address}/tessera.v1.InferenceService/StreamGenerate"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    decoder, pieces, at = json.JSONDecoder(), [], 0
    while at < len(out.rstrip()):
        piece, at = decoder.raw_decode(out, at)
        pieces.append(piece)
        at += len(out[at:]) - len(out[at:].lstrip())
    assert sum(len(piece.get("tokenIds", [])) for piece in pieces) == 6
    assert pieces[-1]["finish"]["usage"]["completionTokens"] == 6


def test_a_benchmark_measures_it(stack: Stack) -> None:
    given = [
        "--requests",
        "4",
        "--rate",
        "inf",
        "--input-tokens",
        "4-8",
        "--shared-prefix-tokens",
        "32",
        "--output-tokens",
        "3",
    ]
    command = [sys.executable, "-m", "services.cli.main", "bench", "--gateway", stack.address, *given]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (level,) = json.loads(out.splitlines()[-1])["levels"]
    assert (level["num_ok"], level["failed"], level["output_tokens"]) == (4, {}, 12)
    assert 4 * 36 <= level["input_tokens"] <= 4 * 40 and level["ttft_ms"]["p50"] > level["queue_ms"]["p50"]


def test_the_served_model_is_described(client: Client) -> None:
    (model,) = client.models()
    assert model.name == MODEL
    assert client.detokenize(client.tokenize("Hello, world")) == "Hello, world"
