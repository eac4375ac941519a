"""Limits to the tokens that requests may come to: who is refused, how, and what has been done for it by then."""

from contextlib import asynccontextmanager

import grpc
import pytest
from gateway_house import MAX_MODEL_LEN, max_tokens, output, read_all, reason_and_fields, refused
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from gateway import validation
from gateway.token_count import least_tokens
from services.rpc.access_config import AccessConfig
from services.rpc.channel import open_channel
from services.rpc.status import metadata_of
from tessera.v1 import inference_pb2 as pb
from tessera.values.session import Abort, KnownAs, Submit, TakenOver

PROMPT = pb.TokenPrompt(token_ids=[19556] * 10)


class Caller:
    """A principal at the public port."""

    def __init__(self, h, name):
        self._stub, self._metadata = h.stub, (("authorization", f"Bearer the-token-of-{name}"),)

    def stream(self, tokens=50, count=None, resume=None, **generation):
        asked = pb.Generation(tokens=PROMPT, n=count, sampling=pb.Sampling(max_tokens=tokens), **generation)
        return self._stub.StreamGenerate(pb.StreamGenerateRequest(generation=asked, resume=resume), metadata=self._metadata)


@asynccontextmanager
async def callers(house, tmp_path, **limits):
    """Anna and bert at a gateway, and the scheduler's end."""
    tokens = tmp_path / "tokens"
    tokens.write_text("the-token-of-anna anna public\nthe-token-of-bert bert public\n")
    async with house(access=AccessConfig(tokens=tokens), **limits) as h:
        yield Caller(h, "anna"), Caller(h, "bert"), await h.session()


def details(error):
    info, quota, retry = error_details_pb2.ErrorInfo(), error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    for detail in rpc_status.from_call(error).details:
        _ = detail.Unpack(info) or detail.Unpack(quota) or detail.Unpack(retry)
    return info, [(item.subject, item.description) for item in quota.violations], retry.retry_delay.ToMilliseconds()


def test_one_principal_has_its_tokens_and_leaves_the_rest_to_others(run_async, house, tmp_path):
    async def scenario():
        async with callers(house, tmp_path, max_tokens_per_principal=120, max_concurrent_tokens=200) as (anna, bert, end):
            first = anna.stream()
            submit = await end.hear(Submit)
            second = anna.stream()
            other = await end.hear(Submit)
            error = await refused(anna.stream(tokens=1))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            info, quota, after_ms = details(error)
            assert (info.reason, dict(info.metadata)) == (
                "PRINCIPAL_TOKEN_LIMIT",
                {"limit": "120", "used": "120", "asked": "2"},
            )
            assert quota == [("principal:anna", error.details())] and "120 tokens" in error.details()
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == str(after_ms) and after_ms > 0
            third = bert.stream()
            of_bert = await end.hear(Submit)
            error = await refused(bert.stream(tokens=15))
            info, quota, _ = details(error)
            assert info.reason == "TOKEN_LIMIT" and quota[0][0] == "gateway", "bert has room, the gateway has none"
            end.send(output(submit, 0, [504], max_tokens(1)))
            await read_all(first)
            again = anna.stream()
            await end.hear(Submit)
            end.send(output(other, 0, [504], max_tokens(1)), output(of_bert, 0, [504], max_tokens(1)))
            await read_all(second)
            await read_all(third)
            again.cancel()

    run_async(scenario())


def test_what_never_fits_is_wrong_and_says_what_makes_it_so(run_async, house, tmp_path):
    async def scenario():
        async with callers(house, tmp_path, max_tokens_per_principal=40) as (anna, _, end):
            for options, field in (
                ({"tokens": 39}, "sampling.max_tokens"),
                ({"tokens": 31}, "sampling.max_tokens"),
                ({"tokens": 30, "count": 2}, "n"),
            ):
                error = await refused(anna.stream(**options))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert reason_and_fields(error) == ("PRINCIPAL_TOKEN_LIMIT", [f"generation.{field}"])
                assert metadata_of(error)["limit"] == "40"
            assert end.nothing_heard()
            call = anna.stream(tokens=30)
            await end.hear(Submit)
            call.cancel()
        async with callers(house, tmp_path, max_concurrent_tokens=10) as (anna, _, end):
            error = await refused(anna.stream(tokens=1))
            assert reason_and_fields(error) == ("TOKEN_LIMIT", ["generation.tokens.token_ids"])

    run_async(scenario())


def test_a_prompt_is_not_read_of_one_who_has_no_tokens_or_requests_left(run_async, house, tmp_path, monkeypatch):
    async def scenario():
        read = []
        encode = validation.encode_prompt
        monkeypatch.setattr(validation, "encode_prompt", lambda *args: read.append(1) or encode(*args))
        for limits in ({"max_tokens_per_principal": 60}, {"max_requests_per_principal": 1}, {"max_concurrent_requests": 1}):
            async with callers(house, tmp_path, **limits) as (anna, _, end):
                call = anna.stream()
                await end.hear(Submit)
                read.clear()
                assert (await refused(anna.stream())).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert not read
                call.cancel()

    run_async(scenario())


def test_answers_of_one_prompt_count_it_once_and_are_held_until_they_have_ended(run_async, house, tmp_path):
    async def scenario():
        async with callers(house, tmp_path, max_tokens_per_principal=101) as (anna, _, end):
            call = anna.stream(tokens=40, count=2)  # 10 + 2 * 40
            submits = [await end.hear(Submit) for _ in range(2)]
            small = anna.stream(tokens=1, request_id="small")
            await end.hear(Submit)
            assert details(await refused(anna.stream(tokens=1)))[0].metadata["used"] == "101"
            call.cancel()
            for _ in submits:
                await end.hear(Abort)
            assert details(await refused(anna.stream(tokens=1)))[0].metadata["used"] == "101", "the scheduler still has them"
            small.cancel()

    run_async(scenario())


def test_resumes_are_taken_in_beyond_and_count_once_where_they_take_over(run_async, house, tmp_path):
    async def scenario():
        async with callers(house, tmp_path, max_tokens_per_principal=60) as (anna, _, end):
            first = anna.stream(request_id="a")
            submit = await end.hear(Submit)
            resumed = anna.stream(request_id="a", resume=pb.Resume(number=1))
            later = await end.hear(Submit)
            own, alias = submit.submission.request_id, later.submission.request_id
            end.say(TakenOver(own, 0), KnownAs(alias, 1, own))
            assert (await refused(first)).code() is grpc.StatusCode.ABORTED
            end.send(output(later, 0, [504]).__class__(own, 1, 0, (504,)))
            await resumed.read()
            assert details(await refused(anna.stream(tokens=1)))[0].metadata["used"] == "60"
            resumed.cancel()

    run_async(scenario())


def test_at_the_engines_port_an_absent_max_tokens_is_what_the_limit_leaves(run_async, house):
    async def scenario():
        async with (
            house(engine_listen="127.0.0.1:0", max_concurrent_tokens=100) as h,
            open_channel(h.gateway.engine_address) as channel,
        ):
            end, stub = await h.session(), vllm_engine_pb2_grpc.VllmEngineStub(channel)

            def ask(**params):
                prompt = vllm_engine_pb2.TokenizedInput(input_ids=[19556] * 10)
                sampling = vllm_engine_pb2.SamplingParams(**params)
                return stub.Generate(vllm_engine_pb2.GenerateRequest(tokenized=prompt, sampling_params=sampling, stream=True))

            error = await refused(ask(max_tokens=91))
            assert reason_and_fields(error) == ("TOKEN_LIMIT", ["sampling_params.max_tokens"])
            call = ask()
            assert (await end.hear(Submit)).submission.sampling.max_tokens == 90
            error = await refused(ask(max_tokens=5))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and details(error)[1][0][0] == "gateway"
            call.cancel()

    run_async(scenario())


@pytest.mark.parametrize("prompt_len", [1, 2, 7, MAX_MODEL_LEN - 1])
@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("most", [1, 5, MAX_MODEL_LEN, 2**20])
def test_the_least_is_no_more_than_any_prompt_comes_to(prompt_len, count, most):
    whole = prompt_len + count * min(most, MAX_MODEL_LEN - prompt_len)
    assert 2 <= least_tokens(most, count, MAX_MODEL_LEN) <= whole
