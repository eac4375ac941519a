"""What a gateway's span says of a request, and what it passes on to the scheduler."""

import pytest
from gateway_house import max_tokens, output, read_all
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from services.rpc.channel import open_channel
from tessera.v1 import inference_pb2 as pb
from tessera.values.session import Submit
from tests.recorded_spans import SAMPLED, TRACE_ID, UNSAMPLED, RecordedSpans, attributes, id_of, parent_of, trace_of

STREAM, WHOLE = "tessera.v1.InferenceService/StreamGenerate", "tessera.v1.InferenceService/Generate"
PROMPT, ANSWER = "a secret question", "Hello"


@pytest.fixture
def in_house(run_async, house):
    """Run a scenario in a house, and return what it returns; the gateway has ended then."""

    def run(scenario):
        async def whole():
            async with house() as h:
                return await scenario(h)

        return run_async(whole())

    return run


@pytest.fixture
def spans(monkeypatch):
    recorded = RecordedSpans()
    monkeypatch.setattr("services.gateway.main.start_tracing", lambda *_: recorded.tracing)
    return recorded


async def ask(house, metadata, n=1, text=PROMPT):
    """A stream of `n` answers, and what was submitted for it."""
    end = await house.session()
    sampling = pb.Sampling(temperature=0.5, top_p=0.25, max_tokens=3)
    generation = pb.Generation(text=text, request_id="mine", sampling=sampling, n=n)
    call = house.stub.StreamGenerate(pb.StreamGenerateRequest(generation=generation), metadata=metadata)
    submits = [await end.hear(Submit) for _ in range(n)]
    for submit in submits:
        end.send(output(submit, 0, [19556, 19556, 19556], max_tokens(3), cached=2))
    await read_all(call)
    return submits


def test_a_call_says_what_was_asked_and_what_came_of_it(spans, in_house):
    async def scenario(house):
        (submit,) = await ask(house, (("traceparent", SAMPLED),))
        await house.stub.GetModel(pb.GetModelRequest(), metadata=(("traceparent", UNSAMPLED),))
        return submit

    submit = in_house(scenario)
    span, tokenizing = spans.one(STREAM), spans.one("tokenize")
    assert len(spans.ended) == 2
    assert submit.submission.trace_context == f"00-{TRACE_ID}-{id_of(span)}-01"
    assert parent_of(tokenizing) == id_of(span) and trace_of(tokenizing) == TRACE_ID
    said = attributes(span)
    assert said.items() >= {
        ("gen_ai.request.model", "SmolLM2-135M-Instruct"),
        ("gen_ai.request.id", "mine"),
        ("gen_ai.request.max_tokens", 3),
        ("gen_ai.request.temperature", 0.5),
        ("gen_ai.request.top_p", 0.25),
        ("gen_ai.request.n", 1),
        ("gen_ai.usage.input_tokens", len(submit.submission.prompt_token_ids)),
        ("gen_ai.usage.output_tokens", 3),
        ("gen_ai.usage.cache_read.input_tokens", 2),
        ("gen_ai.response.finish_reasons", ("length",)),
        ("gen_ai.latency.time_in_queue", 10e-6),
        ("gen_ai.latency.time_to_first_token", 1e-3),
        ("gen_ai.latency.e2e", 9e-3),
        ("tessera.request_id", submit.submission.request_id.hex()),
    }
    assert PROMPT not in span.to_json() and ANSWER not in span.to_json()


def test_several_answers_are_one_trace(spans, in_house):
    submits = in_house(lambda house: ask(house, (("traceparent", SAMPLED),), n=2))
    span = spans.one(STREAM)
    assert {submit.submission.trace_context for submit in submits} == {f"00-{TRACE_ID}-{id_of(span)}-01"}
    assert attributes(span)["gen_ai.usage.output_tokens"] == 6
    assert attributes(span)["gen_ai.response.finish_reasons"] == ("length", "length")


def test_a_call_that_is_not_sampled_goes_on_without_a_trace(spans, in_house):
    (submit,) = in_house(lambda house: ask(house, (("traceparent", UNSAMPLED),)))
    assert submit.submission.trace_context == "" and not spans.ended


def test_a_whole_answer_says_the_same(spans, in_house):
    async def scenario(house):
        end = await house.session()
        call = house.generate()
        end.send(output(await end.hear(Submit), 0, [19556], max_tokens(1)))
        await call

    in_house(scenario)
    said = attributes(spans.one(WHOLE))
    assert said["gen_ai.usage.output_tokens"] == 1
    assert not parent_of(spans.one(WHOLE))


def test_a_call_at_the_engine_s_port_is_traced_too(spans, run_async, house):
    async def scenario():
        async with house(engine_listen="127.0.0.1:0") as h, open_channel(h.gateway.engine_address) as channel:
            end = await h.session()
            prompt = vllm_engine_pb2.TokenizedInput(input_ids=[1, 2])
            request = vllm_engine_pb2.GenerateRequest(request_id="mine", tokenized=prompt, stream=True)
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            call = stub.Generate(request, metadata=(("traceparent", SAMPLED),))
            submit = await end.hear(Submit)
            end.send(output(submit, 0, [504, 260], max_tokens(2)))
            await read_all(call)
            return submit

    submit = run_async(scenario())
    span = spans.one("vllm.grpc.engine.VllmEngine/Generate")
    assert submit.submission.trace_context == f"00-{TRACE_ID}-{id_of(span)}-01"
    said = attributes(span)
    assert (said["gen_ai.request.id"], said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == ("mine", 2, 2)
