"""The engine's port: what a gateway that speaks vLLM's engine protocol sees."""

import asyncio
import hashlib
import io
import json
import zipfile
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import numpy as np
import pytest
from gateway_house import MAX_MODEL_LEN, MODEL, max_tokens, output, read_all, reason_and_fields, refused
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer as Backend

from gateway.tokenizer_bundle import tokenizer_bundle
from services.gateway.vllm_engine import port
from services.rpc.channel import open_channel
from services.rpc.status import metadata_of
from tessera.values.admin import AdminQuery, AdminReply, PrefixCacheReset, ResetPrefixCache
from tessera.values.config import ConfigError
from tessera.values.finish import Finish, FinishReason
from tessera.values.load import GroupLoad, WorkerLoad, WorkerState
from tessera.values.logprobs import Logprobs
from tessera.values.request import RequestOutput
from tessera.values.sampling import SamplingParams
from tessera.values.session import Abort, Rejected, RejectReason, StopFound, Submit

PROMPT = pb.TokenizedInput(input_ids=[19556, 905])


@asynccontextmanager
async def engine(house, **options):
    """A gateway with the engine's port, the scheduler's end of its session, and a stub for the port."""
    async with house(engine_listen="127.0.0.1:0", **options) as h, open_channel(h.gateway.engine_address) as channel:
        yield h, await h.session(), vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(stream=True, params=None, **fields):
    prompt = {} if {"text", "tokenized"} & set(fields) else {"tokenized": PROMPT}
    return pb.GenerateRequest(stream=stream, sampling_params=pb.SamplingParams(**(params or {})), **prompt, **fields)


def test_chunks_are_new_tokens_and_one_complete_says_how_it_ended(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            call = stub.Generate(request())
            submit = await end.hear(Submit)
            assert submit.submission.prompt_token_ids.tolist() == [19556, 905]
            end.send(output(submit, 0, [504, 260]))
            first = await call.read()
            assert (list(first.chunk.token_ids), first.chunk.prompt_tokens, first.chunk.completion_tokens) == ([504, 260], 2, 2)
            end.send(output(submit, 2, [2], Finish(FinishReason.EOS, 3, stop_token_id=2), cached=1))
            second, last = await read_all(call)
            assert (list(second.chunk.token_ids), second.chunk.completion_tokens) == ([2], 3)
            complete = last.complete
            assert (complete.finish_reason, complete.matched_token_id, list(complete.output_ids)) == ("stop", 2, [])
            assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (2, 3, 1)

    run_async(scenario())


def test_without_stream_the_complete_has_everything(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            call = stub.Generate(request(stream=False, text="Hello"))
            submit = await end.hear(Submit)
            end.send(output(submit, 0, [504]))
            end.send(output(submit, 1, [260], max_tokens(2)))
            (only,) = await read_all(call)
            assert (list(only.complete.output_ids), only.complete.finish_reason) == ([504, 260], "length")
            assert only.complete.WhichOneof("matched_stop") is None

    run_async(scenario())


def test_a_stop_string_ends_the_answer_at_its_token(run_async, house, tokenizer):
    async def scenario():
        ids = tokenizer.encode("one two three", False)
        async with engine(house) as (_, end, stub):
            call = stub.Generate(request(params={"stop": ["two"]}))
            submit = await end.hear(Submit)
            end.send(output(submit, 0, ids))
            found = await end.hear(StopFound)
            end.send(
                output(submit, 0, ids[: found.output_len], Finish(FinishReason.STOP_STRING, found.output_len, None, "two"))
            )
            *chunks, last = await read_all(call)
            assert [i for piece in chunks for i in piece.chunk.token_ids] == ids[: found.output_len]
            assert (last.complete.finish_reason, last.complete.matched_stop_str) == ("stop", "two")

    run_async(scenario())


def test_what_is_not_set_has_the_defaults_of_the_protocol(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            call = stub.Generate(request())
            params = (await end.hear(Submit)).submission.sampling
            assert params == SamplingParams(seed=params.seed, max_tokens=MAX_MODEL_LEN - 2)
            call.cancel()

            given = {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "max_tokens": 9, "min_tokens": 2, "seed": 3}
            given |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5, "ignore_eos": True}
            lists = {"stop_token_ids": [5], "logit_bias": {7: 1.5, 6: -2.0}, "logprobs": 2, "prompt_logprobs": 1}
            end.deaf_to |= {Abort}
            call = stub.Generate(request(params={**given, **lists}))
            params = (await end.hear(Submit)).submission.sampling
            lists |= {"stop_token_ids": (5,), "logit_bias": ((6, -2.0), (7, 1.5))}
            assert params == SamplingParams(**given, **lists)
            call.cancel()

    run_async(scenario())


def params(**fields):
    return {"params": fields}


BAD = [
    ({"tokenized": pb.TokenizedInput(input_ids=[1, 49152])}, "tokenized.input_ids[1]"),
    ({"tokenized": pb.TokenizedInput(input_ids=[1] * MAX_MODEL_LEN)}, "tokenized.input_ids"),
    ({"tokenized": pb.TokenizedInput()}, "tokenized.input_ids"),
    ({"text": ""}, "text"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"data_parallel_rank": 1}, "data_parallel_rank"),
    ({"kv_transfer_params": pb.KvTransferParams(remote_host="x")}, "kv_transfer_params"),
    ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
    ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
    ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
    ({"media_refs": pb.MediaRefs()}, "media_refs"),
    (params(n=2), "sampling_params.n"),
    (params(json_schema="{}"), "sampling_params.json_schema"),
    (params(json_object=True), "sampling_params.json_object"),
    (params(regex="a"), "sampling_params.regex"),
    (params(grammar="a"), "sampling_params.grammar"),
    (params(structural_tag="{}"), "sampling_params.structural_tag"),
    (params(choice=pb.ChoiceConstraint(choices=["a"])), "sampling_params.choice"),
    (params(truncate_prompt_tokens=5), "sampling_params.truncate_prompt_tokens"),
    (params(temperature=-1), "sampling_params.temperature"),
    (params(temperature=float("nan")), "sampling_params.temperature"),
    (params(top_p=1.5), "sampling_params.top_p"),
    (params(top_k=2**32 - 1), "sampling_params.top_k"),
    (params(seed=-1), "sampling_params.seed"),
    (params(max_tokens=0), "sampling_params.max_tokens"),
    (params(max_tokens=2, min_tokens=3), "sampling_params.min_tokens"),
    (params(repetition_penalty=-1), "sampling_params.repetition_penalty"),
    (params(logit_bias={-1: 1.0}), "sampling_params.logit_bias"),
    (params(stop_token_ids=[49152]), "sampling_params.stop_token_ids[0]"),
    (params(logprobs=-1), "sampling_params.logprobs"),
    (params(prompt_logprobs=21), "sampling_params.prompt_logprobs"),
    (params(stop=["x"] * 17), "sampling_params.stop"),
    (params(stop=["ok", ""]), "sampling_params.stop[1]"),
]


def test_bad_input_and_what_is_not_offered_name_the_field(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            for fields, field in BAD:
                error = await refused(stub.Generate(request(**fields)))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, field
                assert reason_and_fields(error) == ("INVALID_FIELD", [field])
            error = await refused(stub.Generate(pb.GenerateRequest()))
            assert reason_and_fields(error)[1] == ["tokenized"]
            assert end.nothing_heard()

    run_async(scenario())


def test_a_full_scheduler_and_a_full_gateway_are_resource_exhausted(run_async, house):
    async def scenario():
        async with engine(house, max_concurrent_requests=1) as (_, end, stub):
            call = stub.Generate(request())
            submit = await end.hear(Submit)
            error = await refused(stub.Generate(request()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            id_, subscriber = submit.submission.request_id, submit.subscriber
            end.say(Rejected(id_, subscriber, RejectReason.OVERLOADED, "the queue is full", 100))
            error = await refused(call)
            assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")

    run_async(scenario())


def test_an_id_that_is_in_use_is_named_as_this_protocol_has_it(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            call = stub.Generate(request(request_id="cmpl-1"))
            submit = await end.hear(Submit)
            id_, subscriber = submit.submission.request_id, submit.subscriber
            end.say(Rejected(id_, subscriber, RejectReason.ALREADY_EXISTS, "cmpl-1 runs already"))
            error = await refused(call)
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            assert metadata_of(error) == {"field": "request_id"}

    run_async(scenario())


def test_abort_ends_the_stream_and_an_unknown_id_is_no_error(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            call = stub.Generate(request(request_id="cmpl-1"))
            submit = await end.hear(Submit)
            assert await stub.Abort(pb.AbortRequest(request_ids=["nobody", "cmpl-1"])) == pb.AbortResponse()
            abort = await end.hear(Abort)
            assert abort.request_id == submit.submission.request_id
            end.send(output(submit, 0, [504], Finish(FinishReason.ABORTED, 1)))
            *_, last = await read_all(call)
            assert last.complete.finish_reason == "abort"
            await stub.Abort(pb.AbortRequest(request_ids=["cmpl-1"]))
            assert end.nothing_heard()

    run_async(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_gone_ends_its_request_though_others_may_resume(run_async, house, stream):
    async def scenario():
        async with engine(house, detach_grace_ms=60_000) as (_, end, stub):
            call = stub.Generate(request(stream=stream))
            submit = await end.hear(Submit)
            call.cancel()
            assert (await end.hear(Abort)).request_id == submit.submission.request_id

    run_async(scenario())


def test_a_deadline_that_passes_ends_the_request(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            call = stub.Generate(request(), timeout=0.3)
            submit = await end.hear(Submit)
            assert (await refused(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await end.hear(Abort)).request_id == submit.submission.request_id

    run_async(scenario())


def test_streams_that_outlive_the_grace_end_as_unavailable(run_async, house):
    async def scenario():
        async with AsyncExitStack() as clients:
            async with house(engine_listen="127.0.0.1:0") as h:
                channel = await clients.enter_async_context(open_channel(h.gateway.engine_address))
                end = await h.session()
                call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request())
                await end.hear(Submit)
            error = await refused(call)
        assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")

    run_async(scenario())


def test_the_ready_file_has_both_addresses(run_async, house, tmp_path):
    async def scenario():
        file = tmp_path / "ready.json"
        async with house(engine_listen="127.0.0.1:0", ready_file=file) as h:
            assert json.loads(file.read_text()) == {"address": h.gateway.address, "engine_address": h.gateway.engine_address}
        assert not file.exists()

    run_async(scenario())


def test_log_probabilities_of_prompt_and_output(run_async, house):
    def of(*tokens):
        ids = [i for token in tokens for i in token]
        counts = np.array([len(token) for token in tokens], np.int32)
        return Logprobs(counts, np.array(ids, np.int32), -np.array(ids, np.float32), np.ones(len(tokens), np.int32))

    async def scenario():
        async with engine(house) as (_, end, stub):
            for stream in (True, False):
                call = stub.Generate(request(stream=stream, params={"logprobs": 2, "prompt_logprobs": 1}))
                submit = await end.hear(Submit)
                request_id, finish = submit.submission.request_id, max_tokens(2)
                end.send(
                    RequestOutput(request_id, 0, 0, (504,), logprobs=of([504, 7, 8]), prompt_logprobs=of([905, 6])),
                    RequestOutput(request_id, 0, 1, (260,), finish=finish, logprobs=of([260, 9, 504])),
                )
                got = await read_all(call)
                parts = [piece.chunk for piece in got[:-1]] if stream else [got[-1].complete]
                tops = [list(top.token_ids) for part in parts for top in part.output_logprobs.top_logprobs]
                assert [i for part in parts for i in part.output_logprobs.token_ids] == [504, 260]
                assert [v for part in parts for v in part.output_logprobs.token_logprobs] == [-504.0, -260.0]
                assert tops == [[7, 8], [9, 504]]
                of_prompt = parts[0].input_logprobs
                assert not of_prompt.token_logprobs[0].HasField("value") and of_prompt.token_logprobs[1].value == -905.0
                assert list(of_prompt.token_ids) == [19556, 905]
                assert [list(top.token_ids) for top in of_prompt.top_logprobs] == [[], [6]]
                assert not any(part.HasField("input_logprobs") for part in parts[1:])

    run_async(scenario())


def test_the_tokenizer_comes_as_a_zip_that_others_load(run_async, house, tokenizer, monkeypatch):
    made = []

    def counted(model):
        made.append(model)
        return tokenizer_bundle(model)

    async def scenario():
        monkeypatch.setattr("services.gateway.vllm_engine.tokenizer_files.tokenizer_bundle", counted)
        async with engine(house) as (_, _end, stub):

            async def fetch():
                return [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]

            chunks, others = await asyncio.gather(fetch(), fetch())
            assert chunks == others == await fetch() and len(made) == 1, "made once, however often it is asked for"
        data = b"".join(chunk.data for chunk in chunks)
        assert max(len(chunk.data) for chunk in chunks) <= 64 << 10
        assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        text = "Hello <|im_end|> wörld 😀"
        assert Backend.from_buffer(files["tokenizer.json"]).encode(text).ids == tokenizer.encode(text, True)
        config = json.loads(files["tokenizer_config.json"])
        assert config["eos_token"] == "<|im_end|>" and "im_start" in config["chat_template"]
        assert json.loads(files["config.json"])["eos_token_id"] == [2, 0]

    run_async(scenario())


def test_what_an_engine_says_of_itself(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            info = await stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (info.served_model_name, info.is_generation, info.max_context_length) == (MODEL, True, MAX_MODEL_LEN)
            assert (info.max_req_input_len, list(info.eos_token_ids), info.bos_token_id) == (MAX_MODEL_LEN - 1, [2, 0], 1)
            running = stub.Generate(request())
            end.send(output(await end.hear(Submit), 0, [504]))
            assert (await running.read()).chunk.token_ids == [504]
            waiting = stub.Generate(request())
            second = await end.hear(Submit)
            assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 2
            loads = await stub.GetLoads(pb.GetLoadsRequest())
            assert [(load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) for load in loads.loads] == [(1, 1, 2)]
            assert not (await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
            workers = (WorkerLoad("w1", WorkerState.SERVING, 3, 1, 96, 400),)
            end.say(GroupLoad(3, 4, 1, 96, 400, 0.25, 12.5, 70, 6, workers))
            end.send(output(second, 0, [504]))
            assert (await waiting.read()).chunk.token_ids == [504]
            (load,) = (await stub.GetLoads(pb.GetLoadsRequest(dp_rank=0))).loads
            assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs, load.max_running_requests) == (
                3,
                5,
                8,
                6,
            )
            assert (load.num_used_tokens, load.max_total_num_tokens, load.num_waiting_uncached_tokens) == (96, 400, 70)
            assert (load.token_usage, load.gen_throughput, load.cache_hit_rate, load.utilization) == (0.24, 12.5, 0.25, 0.5)
            info = await stub.GetServerInfo(pb.GetServerInfoRequest())
            assert (info.active_requests, info.max_num_seqs) == (8, 6)
            end.break_off()
            while (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests != 2:
                pass  # until the gateway knows that there is no leader: then of its own requests alone
            for call in (running, waiting):
                call.cancel()

    run_async(scenario())


def test_health_follows_the_session_in_both_protocols(run_async, house):
    async def scenario():
        async with house(engine_listen="127.0.0.1:0") as h, open_channel(h.gateway.engine_address) as channel:
            stub, health = vllm_engine_pb2_grpc.VllmEngineStub(channel), health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service=port.SERVICE_NAME)
            assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await h.session()
            assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING

    run_async(scenario())


def test_what_is_not_offered_is_unimplemented(run_async, house):
    async def scenario():
        async with engine(house) as (_, _end, stub):
            for call in (
                stub.Embed(pb.EmbedRequest()),
                stub.StartProfile(common_pb2.StartProfileRequest()),
                stub.StopProfile(common_pb2.StopProfileRequest()),
            ):
                assert (await refused(call)).code() is grpc.StatusCode.UNIMPLEMENTED

    run_async(scenario())


def test_a_flushed_cache_is_that_of_the_group(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            call = asyncio.ensure_future(stub.FlushCache(common_pb2.FlushCacheRequest()))
            query = await end.hear(AdminQuery)
            assert query.command == ResetPrefixCache()
            end.say(AdminReply(query.number, PrefixCacheReset(7, 3)))
            answer = await call
            assert answer.success and "7 blocks forgotten; 3 stay" in answer.message

    run_async(scenario())


def test_a_cache_is_not_flushed_without_a_leader(run_async, house):
    async def scenario():
        async with engine(house, scheduler_wait_ms=0) as (_, end, stub):
            call = asyncio.ensure_future(stub.FlushCache(common_pb2.FlushCacheRequest()))
            await end.hear(AdminQuery)
            end.break_off()
            assert reason_and_fields(await refused(call))[0] == "LEADER_LOST"
            assert reason_and_fields(await refused(stub.FlushCache(common_pb2.FlushCacheRequest())))[0] == "NO_SCHEDULER"

    run_async(scenario())


def test_without_the_package_the_option_says_what_to_install(run_async, house, monkeypatch):
    async def scenario():
        monkeypatch.setattr("services.gateway.engine_protocol.PACKAGE", "no_such_package")
        async with house():  # nothing is asked of it without the option
            pass
        with pytest.raises(ConfigError, match="engine_listen needs the package smg-grpc-proto: run `pip install"):
            async with house(engine_listen="127.0.0.1:0"):
                pass

    run_async(scenario())
