"""The public API: rejections, ids, slow readers, tokens and text, models."""

import time

import grpc
import pytest
from gateway_house import MAX_MODEL_LEN, MODEL, max_tokens, output, read_all, reason_and_fields, refused
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tessera.v1 import inference_pb2 as pb
from tessera.values.finish import Finish, FinishReason
from tessera.values.request import TimeLimits
from tessera.values.sampling import SamplingParams
from tessera.values.session import Abort, LengthChanged, Rejected, RejectReason, Submit

CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])


def sampling(**fields):
    return {"sampling": pb.Sampling(**fields)}


@pytest.mark.parametrize(("limit", "reason"), [("max_first_token_ms", "MAX_FIRST_TOKEN_MS"), ("deadline_ms", "DEADLINE")])
def test_a_limit_that_is_over_ends_the_call_after_what_had_come(run_async, house, limit, reason):
    async def scenario():
        async with house() as h:
            end = await h.session()
            generation = pb.Generation(text="Hello")
            call = h.stub.StreamGenerate(pb.StreamGenerateRequest(generation=generation), timeout=30)
            submit = await end.hear(Submit)
            assert 0 < submit.submission.limits.deadline_ms < 60_000
            end.send(output(submit, 0, [504]))
            end.send(output(submit, 1, [], Finish(FinishReason.DEADLINE, 1, message="too slow", limit=limit)))
            token_ids = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for piece in call:
                    token_ids += piece.token_ids
            error = caught.value
            assert token_ids == [504]
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert error.details() == f"{limit}: too slow"
            assert reason_and_fields(error) == (reason, [])

    run_async(scenario())


def test_several_answers_come_by_number_and_go_together(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.session()
            asked = {"request_id": "mine", "n": 3, **sampling(seed=2**63 - 2, prompt_logprobs=0)}
            call = h.stream(**asked)
            submits = [await end.hear(Submit) for _ in range(3)]
            first, *others = [item.submission for item in submits]
            assert [item.sampling.seed for item in (first, *others)] == [2**63 - 2, 2**63 - 1, 0]
            assert [item.sampling.prompt_logprobs for item in (first, *others)] == [0, None, None]
            assert {item.fork_of for item in (first, *others)} == {first.request_id}
            await h.stub.Abort(pb.AbortRequest(request_id="mine"))
            aborted = {(await end.hear(Abort)).request_id for _ in range(3)}
            assert aborted == {item.request_id for item in (first, *others)}
            call.cancel()
            call = h.stream(n=2)
            first, second = [await end.hear(Submit) for _ in range(2)]
            end.send(output(second, 0, [504]), output(first, 0, [504, 504], max_tokens(2)))
            end.send(output(second, 1, [504, 504], max_tokens(3)))
            pieces = await read_all(call)
            tokens = [[token for piece in pieces if piece.index == index for token in piece.token_ids] for index in (0, 1)]
            assert tokens == [[504] * 2, [504] * 3]
            assert sorted(piece.index for piece in pieces if piece.HasField("finish")) == [0, 1]
            assert [piece.HasField("total_usage") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            usage = pieces[-1].total_usage
            assert (usage.completion_tokens, usage.prompt_tokens) == (5, pieces[-1].finish.usage.prompt_tokens)
            generation = pb.Generation(text="x", request_id="a", n=2)
            resume = pb.StreamGenerateRequest(generation=generation, resume=pb.Resume(number=1))
            assert reason_and_fields(await refused(h.stub.StreamGenerate(resume)))[1] == ["generation.n"]

    run_async(scenario())


def test_an_answer_that_is_rejected_takes_the_others_with_it(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.session()
            call = h.generate(n=2)
            first, second = [await end.hear(Submit) for _ in range(2)]
            end.say(Rejected(second.submission.request_id, 0, RejectReason.OVERLOADED, "full", 50))
            assert (await refused(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await end.hear(Abort)).request_id == first.submission.request_id

    run_async(scenario())


def test_every_wrong_field_is_named_at_once(run_async, house):
    async def scenario():
        async with house() as h:
            await h.session()
            error = await refused(h.generate(stop=[""], **sampling(top_p=2, max_tokens=0)))
            assert reason_and_fields(error)[1] == [
                "generation.sampling.top_p",
                "generation.sampling.max_tokens",
                "generation.stop[0]",
            ]

    run_async(scenario())


def test_an_unknown_model_is_not_found(run_async, house):
    async def scenario():
        async with house() as h:
            await h.session()
            for call, field in (
                (h.generate(model="gpt-5"), "generation.model"),
                (h.stream(model="gpt-5"), "generation.model"),
                (h.stub.GetModel(pb.GetModelRequest(model="gpt-5")), "model"),
                (h.stub.Tokenize(pb.TokenizeRequest(model="gpt-5", text="x")), "model"),
                (h.stub.Detokenize(pb.DetokenizeRequest(model="gpt-5")), "model"),
            ):
                error = await refused(call)
                assert error.code() is grpc.StatusCode.NOT_FOUND
                assert reason_and_fields(error)[0] == "MODEL_NOT_FOUND"
                assert error.details().startswith(f"{field}: 'gpt-5'") and MODEL in error.details()

    run_async(scenario())


@pytest.mark.parametrize("what", ["text", "chat"])
def test_a_prompt_of_5_mib_is_refused_unread_while_others_stream(run_async, house, what):
    async def scenario():
        async with house() as h:
            end = await h.session()
            neighbour = h.stream()
            submit = await end.hear(Submit)
            text = "x" * (5 << 20)
            message = pb.ChatMessage(role="user", content=text)
            prompt = {"text": text} if what == "text" else {"chat": pb.ChatPrompt(messages=[message])}
            began = time.monotonic()
            error = await refused(h.stub.Generate(pb.GenerateRequest(generation=pb.Generation(**prompt))))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            [field] = reason_and_fields(error)[1]
            assert field in ("generation.text", "generation.chat.messages")
            assert str(5 << 20) in error.details()
            assert time.monotonic() - began < 5
            end.send(output(submit, 0, [504], max_tokens(1)))
            assert len(await read_all(neighbour)) >= 1

    run_async(scenario())


def test_more_than_the_receive_limit_is_refused_by_the_transport(run_async, house):
    async def scenario():
        async with house(receive_bytes_max=1 << 20) as h:
            await h.session()
            assert (await refused(h.generate(text="x" * (2 << 20)))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run_async(scenario())


def test_what_is_asked_reaches_the_scheduler(run_async, house, tokenizer):
    async def scenario():
        async with house() as h:
            end = await h.session()
            call = h.stream(
                request_id="mine",
                stop=["a", "b"],
                include_stop_in_output=True,
                skip_special_tokens=False,
                priority=-4,
                cache_salt="a tenant",
                limits=pb.Limits(max_queue_ms=1, max_first_token_ms=2, max_total_ms=3),
                **sampling(
                    temperature=0,
                    top_p=0.5,
                    top_k=-1,
                    min_p=0.25,
                    seed=7,
                    max_tokens=9,
                    min_tokens=2,
                    ignore_eos=True,
                    stop_token_ids=[3],
                    presence_penalty=0.5,
                    frequency_penalty=-0.5,
                    repetition_penalty=1.25,
                    logit_bias={9: -1.5, 5: 200.0},
                    allowed_token_ids=[5, 9, 3],
                    bad_words=["no"],
                    logprobs=0,
                    prompt_logprobs=20,
                    logprob_token_ids=[6, 5],
                ),
            )
            submission = (await end.hear(Submit)).submission
            assert submission.sampling == SamplingParams(
                *(7, 0.0, 0.5, -1, 0.25, 9, 2, True, (3,)),
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                repetition_penalty=1.25,
                logit_bias=((5, 100.0), (9, -1.5)),
                allowed_token_ids=(5, 9, 3),
                bad_words_ids=(tuple(tokenizer.encode("no", False)), tuple(tokenizer.encode(" no", False))),
                logprobs=0,
                prompt_logprobs=20,
                logprob_token_ids=(6, 5),
            )
            assert submission.client_request_id == "mine"
            assert (submission.priority, submission.cache_salt) == (-4, "a tenant")
            assert submission.limits == TimeLimits(1, 2, 3)
            options = submission.detokenize
            assert (options.stop_strings, options.include_stop_in_output, options.skip_special_tokens) == (
                ("a", "b"),
                True,
                False,
            )
            call.cancel()
            await end.hear(Abort)
            defaults = h.stream()
            submission = (await end.hear(Submit)).submission
            assert submission.sampling == SamplingParams(submission.sampling.seed)
            assert len(submission.client_request_id) == 32
            defaults.cancel()

    run_async(scenario())


def test_chat_goes_through_the_template_and_token_ids_pass_as_they_are(run_async, house, tokenizer):
    async def scenario():
        async with house() as h:
            end = await h.session()
            calls = [h.stub.StreamGenerate(pb.StreamGenerateRequest(generation=pb.Generation(chat=CHAT)))]
            chat = (await end.hear(Submit)).submission.prompt_token_ids.tolist()
            text = tokenizer.decode(chat, skip_special_tokens=False)
            assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
            assert (await h.stub.Tokenize(pb.TokenizeRequest(chat=CHAT))).token_ids == chat
            prompt = pb.TokenPrompt(token_ids=[5, 0, 49151])
            calls.append(h.stub.StreamGenerate(pb.StreamGenerateRequest(generation=pb.Generation(tokens=prompt))))
            assert (await end.hear(Submit)).submission.prompt_token_ids.tolist() == [5, 0, 49151]
            for call in calls:
                call.cancel()

    run_async(scenario())


REJECTIONS = [
    (RejectReason.TOO_LONG, 0, grpc.StatusCode.INVALID_ARGUMENT, "TOO_LONG"),
    (RejectReason.OVERLOADED, 750, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    (RejectReason.ALREADY_EXISTS, 0, grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE"),
    (RejectReason.INVALID, 0, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
]


@pytest.mark.parametrize(("reason", "retry_after_ms", "code", "name"), REJECTIONS)
@pytest.mark.parametrize("kind", ["stream", "generate"])
def test_a_rejection_ends_the_call_with_its_status(run_async, house, kind, reason, retry_after_ms, code, name):
    async def scenario():
        async with house() as h:
            end = await h.session()
            call = getattr(h, kind)()
            submit = await end.hear(Submit)
            end.say(Rejected(submit.submission.request_id, 0, reason, "17 tokens, 16 fit", retry_after_ms))
            error = await refused(call)
            assert error.code() is code
            assert "17 tokens, 16 fit" in error.details()
            found, fields = reason_and_fields(error)
            assert found == name
            assert fields == (["generation.text"] if code is grpc.StatusCode.INVALID_ARGUMENT else [])
            if reason is RejectReason.OVERLOADED:
                retry = error_details_pb2.RetryInfo()
                assert any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
                assert retry.retry_delay.ToMilliseconds() == 750
                assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "750"
            assert end.nothing_heard(), "what was never admitted is not aborted"
            assert len(h.gateway.session.live) == 0

    run_async(scenario())


def test_a_rejection_after_the_stream_has_opened_is_no_clean_end(run_async, house):
    async def scenario():
        async with house() as h:
            first = await h.session()
            call = h.stream()
            submit = await first.hear(Submit)
            first.send(output(submit, 0, [504]))
            assert list((await call.read()).token_ids) == [504]
            first.break_off()
            second = await h.session(submit.submission.request_id, number=2)
            await second.hear(Submit)
            second.say(Rejected(submit.submission.request_id, 0, RejectReason.OVERLOADED, "queue full", 100))
            assert (await refused(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run_async(scenario())


def test_an_id_is_free_after_an_abort(run_async, house):
    """The scheduler hears of the abort first, so the second request is a new one to it."""

    async def scenario():
        async with house() as h:
            end = await h.session()
            first = h.stream(request_id="x")
            old = await end.hear(Submit)
            await h.stub.Abort(pb.AbortRequest(request_id="x"))
            second = h.stream(request_id="x")  # at once: the first one's end has not come yet
            assert (await end.hear(Abort)).request_id == old.submission.request_id
            new = await end.hear(Submit)
            assert new.submission.request_id != old.submission.request_id
            end.send(output(old, 0, [1, 2, 3], Finish(FinishReason.ABORTED, 3)), output(new, 0, [504]))
            pieces = await read_all(first)
            assert pieces[-1].finish.reason == pb.FINISH_REASON_ABORTED
            assert list((await second.read()).token_ids) == [504]
            end.send(output(new, 1, [505], max_tokens(2)))
            assert [i for piece in await read_all(second) for i in piece.token_ids] == [505]
            error = await refused(h.stub.Abort(pb.AbortRequest(request_id="x")))
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")

    run_async(scenario())


FINISHES = [
    (Finish(FinishReason.EOS, 2, stop_token_id=2), pb.FINISH_REASON_STOP, {"stop_token_id": 2}),
    (Finish(FinishReason.STOP_TOKEN, 2, stop_token_id=505), pb.FINISH_REASON_STOP, {"stop_token_id": 505}),
    (Finish(FinishReason.MAX_MODEL_LEN, 2), pb.FINISH_REASON_LENGTH, {}),
    (
        Finish(FinishReason.ERROR, 2, message="logits are not finite"),
        pb.FINISH_REASON_ERROR,
        {"message": "logits are not finite"},
    ),
    (Finish(FinishReason.UNSCHEDULABLE, 2, message="pool"), pb.FINISH_REASON_ERROR, {"message": "pool"}),
]


@pytest.mark.parametrize(("finish", "reason", "rest"), FINISHES)
def test_every_end_has_its_public_reason(run_async, house, finish, reason, rest):
    async def scenario():
        async with house() as h:
            end = await h.session()
            call = h.generate()
            submit = await end.hear(Submit)
            last = finish.stop_token_id or 505
            end.send(output(submit, 0, [504]), output(submit, 1, [last], finish))
            answer = await call
            assert list(answer.token_ids) == [504, last]
            found = answer.finish
            assert found.reason == reason
            assert (found.stop_token_id, found.stop_string, found.message) == (
                rest.get("stop_token_id", 0),
                "",
                rest.get("message", ""),
            )

    run_async(scenario())


def test_slow_readers_cost_no_queue_and_hold_up_nobody(run_async, house, tokenizer):
    """20 clients read one message and stop; a fast one gets every token as it comes; then the slow ones read on and miss nothing."""

    async def scenario():
        count, slow_count = 3000, 20
        words = tokenizer.encode(" lorem ipsum dolor sit amet, consectetur adipiscing elit", False)
        ids = [words[i % len(words)] for i in range(count)]
        async with house() as h:
            end = await h.session()
            slow = [h.stream(**sampling(max_tokens=count)) for _ in range(slow_count)]
            submits = [await end.hear(Submit) for _ in slow]
            fast = h.stream(**sampling(max_tokens=count))
            fast_submit = await end.hear(Submit)
            for i in range(0, count, 10):
                finish = max_tokens(count) if i + 10 == count else None
                end.send(*(output(submit, i, ids[i : i + 10], finish) for submit in [*submits, fast_submit]))
                if i == 0:
                    for call in slow:
                        await call.read()
                held = 0
                while held < 10:  # the fast client is never behind
                    held += len((piece := await fast.read()).token_ids)
                assert piece.token_offset + len(piece.token_ids) == i + 10
            for request in h.gateway.session.live:
                assert len(request._pending) < 64
            for call in slow:
                pieces = await read_all(call)
                assert pieces[-1].HasField("finish")
                assert pieces[-1].token_offset + len(pieces[-1].token_ids) == count

    run_async(scenario())


def test_tokenize_and_detokenize(run_async, house, tokenizer):
    async def scenario():
        text = "Hello 😀 <|im_end|>"
        async with house() as h:
            await h.session()
            ids = tokenizer.encode(text, False)
            plain = await h.stub.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=False))
            assert list(plain.token_ids) == ids
            long = await h.stub.Tokenize(pb.TokenizeRequest(text=text * 300))
            assert list(long.token_ids) == tokenizer.encode(text * 300, True)
            for skip, expected in ((False, text), (True, "Hello 😀 ")):
                request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip)
                assert (await h.stub.Detokenize(request)).text == expected
            assert (await h.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "Hello 😀 "
            assert (await h.stub.Tokenize(pb.TokenizeRequest(text=""))).token_ids == []
            assert (await h.stub.Detokenize(pb.DetokenizeRequest())).text == ""

    run_async(scenario())


def test_models_are_described_also_while_the_scheduler_is_away(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.scheduler.session()
            end.ack(max_request_len=4096)
            model = pb.Model(
                name=MODEL,
                architecture="LlamaForCausalLM",
                vocab_size=49152,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=[2, 0],
                bos_token_id=1,
                max_request_len=4096,
            )
            for name in ("", MODEL):
                assert (await h.stub.GetModel(pb.GetModelRequest(model=name))).model == model
            end.say(LengthChanged(1024))
            model.max_request_len = 1024
            while (await h.stub.GetModel(pb.GetModelRequest())).model != model:
                pass
            end.break_off()
            await h.wait_health(False)
            assert list((await h.stub.ListModels(pb.ListModelsRequest())).models) == [model]

    run_async(scenario())
