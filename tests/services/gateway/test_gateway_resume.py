"""Resume on the public API: at any gateway, with tokens or offsets alone, while the answer is made, after it, or after all have lost it."""

import asyncio
import random
from dataclasses import replace

import grpc
import pytest
from gateway_house import (
    TIMINGS,
    assert_dense,
    known_as,
    max_tokens,
    output,
    read_all,
    reason_and_fields,
    refused,
)

from tessera.v1 import inference_pb2 as pb
from tessera.values.finish import Finish, FinishReason
from tessera.values.session import Abort, Detach, Rejected, RejectReason, StopFound, Submit, TakenOver

ANSWER = "The quick brown fox 😀 jumps over the lazy dog, twice: naïve façade."


def resume(number=1, ids=(), text="", keeps_ids=True):
    """Of a client that has these tokens and this text."""
    return pb.Resume(
        number=number,
        token_offset=len(ids),
        text_offset=len(text.encode()),
        token_ids=ids if keeps_ids else (),
    )


async def began(h, end, **generation):
    """A stream at this gateway of which the client has the first token."""
    call = h.stream(**generation)
    submit = await end.hear(Submit)
    end.send(output(submit, 0, [504]))
    assert list((await call.read()).token_ids) == [504]
    return call, submit


@pytest.mark.parametrize("keeps_ids", [True, False])
def test_an_answer_goes_on_at_another_gateway(run_async, house, tokenizer, keeps_ids):
    """The scheduler knows it under the id of the gateway where it began, which is used from then on."""

    async def scenario():
        ids = tokenizer.encode(ANSWER, False)
        text = tokenizer.decode(ids[:6], True)
        async with house() as h:
            end = await h.session()
            call = h.stream(request_id="mine", resume=resume(3, ids[:6], text, keeps_ids))
            submit = await end.hear(Submit)
            received = tuple(ids[:6]) if keeps_ids else ()
            assert (submit.subscriber, submit.received_token_ids) == (3, received)
            assert submit.submission.client_request_id == "mine"
            known = replace(submit, submission=replace(submit.submission, request_id=b"k" * 16))
            end.say(known_as(submit, known))
            for i in range(len(received), len(ids)):
                end.send(output(known, i, [ids[i]], max_tokens(len(ids)) if i + 1 == len(ids) else None))
            pieces = await read_all(call)
            assert_dense(pieces, 6, len(text.encode()))
            assert [i for piece in pieces for i in piece.token_ids] == ids[6:]
            assert text + "".join(piece.text for piece in pieces) == ANSWER
            assert pieces[-1].finish.usage.completion_tokens == len(ids)
            assert end.nothing_heard()

    run_async(scenario())


def test_the_known_id_stays_over_sessions_and_takeovers(run_async, house):
    async def scenario():
        async with house() as h:
            first = await h.session()
            call = h.stream(request_id="mine", resume=resume(1, [504], "x", keeps_ids=False))
            submit = await first.hear(Submit)
            known = replace(submit, submission=replace(submit.submission, request_id=b"k" * 16))
            first.say(known_as(submit, known))
            first.send(output(known, 0, [504, 505]))
            await call.read()
            first.break_off()
            second = await h.session(b"k" * 16, number=2)
            [live] = second.hello.live
            assert (live.request_id, live.subscriber, live.token_ids) == (b"k" * 16, 1, (504, 505))
            again = await second.hear(Submit)
            assert (again.submission.request_id, again.subscriber, again.received_token_ids) == (b"k" * 16, 1, (504, 505))
            call.cancel()
            assert await second.hear(Abort) == Abort(b"k" * 16, 1)

    run_async(scenario())


def test_what_is_not_known_is_computed_behind_the_tokens_given(run_async, house, tokenizer):
    async def scenario():
        ids = tokenizer.encode(ANSWER, False)
        text = tokenizer.decode(ids[:6], True)
        async with house() as h:
            end = await h.session()
            call = h.stream(request_id="mine", resume=resume(1, ids[:6], text))
            submit = await end.hear(Submit)
            end.send(output(submit, 6, ids[6:], max_tokens(len(ids))))
            pieces = await read_all(call)
            assert_dense(pieces, 6, len(text.encode()))
            assert text + "".join(piece.text for piece in pieces) == ANSWER

    run_async(scenario())


@pytest.mark.parametrize("keeps_ids", [True, False])
def test_only_the_end_is_left_to_tell(run_async, house, tokenizer, keeps_ids):
    """A finished result that the client has but for the word that it is finished."""

    async def scenario():
        ids = tokenizer.encode(ANSWER, False)
        async with house() as h:
            end = await h.session()
            call = h.stream(request_id="mine", resume=resume(1, ids, ANSWER, keeps_ids))
            submit = await end.hear(Submit)
            end.send(output(submit, len(ids) if keeps_ids else 0, [] if keeps_ids else ids, max_tokens(len(ids)), cached=2))
            [piece] = await read_all(call)
            assert (piece.text, list(piece.token_ids)) == ("", [])
            assert (piece.token_offset, piece.text_offset) == (len(ids), len(ANSWER.encode()))
            assert piece.finish.usage == pb.Usage(
                prompt_tokens=len(submit.submission.prompt_token_ids), completion_tokens=len(ids), cached_tokens=2
            )
            assert piece.finish.timings.total_us == TIMINGS.total_us

    run_async(scenario())


def test_text_held_back_at_the_cut_is_shown_or_cut_afterwards(run_async, house, tokenizer):
    async def scenario():
        for rest, text, reason in ((" the bus", "one STOP the bus", "length"), ("PED", "one ", "stop")):
            ids = tokenizer.encode("one STOP" + rest, False)
            held = len(tokenizer.encode("one STOP", False))
            async with house() as h:
                end = await h.session()
                stop = ["STOPPED"]
                call = h.stream(request_id="mine", stop=stop, resume=resume(1, ids[:held], "one "))
                submit = await end.hear(Submit)
                end.send(output(submit, held, ids[held:]))
                if reason == "stop":
                    found = await end.hear(StopFound)
                    assert (found.subscriber, found.output_len, found.stop_string) == (1, len(ids), "STOPPED")
                    end.send(output(submit, len(ids), [], Finish(FinishReason.STOP_STRING, len(ids), stop_string="STOPPED")))
                else:
                    end.send(output(submit, len(ids), [], max_tokens(len(ids))))
                pieces = await read_all(call)
                assert_dense(pieces, held, 4)
                assert "one " + "".join(piece.text for piece in pieces) == text

    run_async(scenario())


@pytest.mark.parametrize("number", [0, 1])
def test_at_the_same_gateway_the_earlier_stream_is_taken_over(run_async, house, number):
    """Number 0 is a plain retry. The earlier stream ends, and its end aborts nothing."""

    async def scenario():
        async with house() as h:
            end = await h.session()
            earlier, old = await began(h, end, request_id="mine")
            later = h.stream(request_id="mine", resume=resume(number, [504], "", keeps_ids=False) if number else None)
            new = await end.hear(Submit)
            assert (new.subscriber, new.submission.client_request_id) == (number, "mine")
            end.say(known_as(new, old))
            claimed = replace(old, subscriber=number)
            end.send(output(claimed, 0, [504, 505], max_tokens(2)))
            error = await refused(earlier)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.ABORTED, "TAKEN_OVER")
            assert [i for piece in await read_all(later) for i in piece.token_ids] == ([505] if number else [504, 505])
            assert end.nothing_heard()
            assert len(h.gateway.session.live) == 0

    run_async(scenario())


def test_an_earlier_stream_goes_on_where_the_later_one_is_refused(run_async, house):
    """Another body under the same id, or a number that is not the highest."""

    async def scenario():
        async with house() as h:
            end = await h.session()
            earlier, old = await began(h, end, request_id="mine")
            other = h.generate(request_id="mine", text="Something else")
            new = await end.hear(Submit)
            end.say(Rejected(new.submission.request_id, 0, RejectReason.ALREADY_EXISTS, "'mine' lives with another body"))
            error = await refused(other)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
            late = h.stream(request_id="mine", resume=resume(1))
            new = await end.hear(Submit)
            end.say(TakenOver(new.submission.request_id, 1))
            error = await refused(late)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.ABORTED, "TAKEN_OVER")
            end.send(output(old, 1, [505], max_tokens(2)))
            assert [i for piece in await read_all(earlier) for i in piece.token_ids] == [505]
            assert end.nothing_heard()

    run_async(scenario())


def test_a_chain_of_resumes_at_one_gateway_ends_with_the_last(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.session()
            calls, submits = [], []
            for number in range(4):
                calls.append(h.stream(request_id="mine", resume=resume(number) if number else None))
                submits.append(await end.hear(Submit))
            for submit in submits[1:]:  # answered only after all have come
                end.say(known_as(submit, submits[0]))
            end.send(output(replace(submits[0], subscriber=3), 0, [504], max_tokens(1)))
            for call in calls[:3]:
                assert (await refused(call)).code() is grpc.StatusCode.ABORTED
            assert [i for piece in await read_all(calls[3]) for i in piece.token_ids] == [504]
            assert end.nothing_heard()

    run_async(scenario())


def test_an_abort_by_the_clients_id_reaches_every_stream_of_it(run_async, house):
    """Before it is known that two streams are of one request, either may be the one that counts."""

    async def scenario():
        async with house() as h:
            end = await h.session()
            earlier, old = await began(h, end, request_id="mine")
            later = h.stream(request_id="mine", resume=resume(1))
            new = await end.hear(Submit)
            await h.stub.Abort(pb.AbortRequest(request_id="mine"))
            aborts = {await end.hear(Abort) for _ in range(2)}
            assert aborts == {Abort(old.submission.request_id, 0), Abort(new.submission.request_id, 1)}
            end.say(known_as(new, old))
            end.send(output(replace(old, subscriber=1), 0, [504], Finish(FinishReason.ABORTED, 1)))
            assert (await refused(earlier)).code() is grpc.StatusCode.ABORTED
            pieces = await read_all(later)
            assert pieces[-1].finish.reason == pb.FINISH_REASON_ABORTED

    run_async(scenario())


BAD = [
    (resume(0), {}, ["resume.number"]),
    (pb.Resume(number=2**31), {}, ["resume.number"]),
    (resume(), {"request_id": ""}, ["generation.request_id"]),
    (pb.Resume(number=1, token_offset=3, token_ids=[504]), {}, ["resume.token_ids"]),
    (pb.Resume(number=1, token_offset=2, token_ids=[504, 49152]), {}, ["resume.token_ids[1]"]),
    (pb.Resume(number=1, token_offset=65), {}, ["resume.token_offset"]),
    (pb.Resume(number=1, token_offset=2**32 - 1), {"sampling": pb.Sampling(max_tokens=9)}, ["resume.token_offset"]),
    (pb.Resume(number=1, text_offset=1), {}, ["resume.text_offset"]),
    (pb.Resume(number=1, token_offset=1, token_ids=[504], text_offset=2**64 - 1), {}, ["resume.text_offset"]),
    (resume(0), {"request_id": "", "stop": [""]}, ["resume.number", "generation.request_id", "generation.stop[0]"]),
]


def test_every_field_that_cannot_be_is_named(run_async, house, tokenizer):
    async def scenario():
        async with house() as h:
            end = await h.session()
            smile = tokenizer.encode("😀", False)
            within = pb.Resume(number=1, token_offset=len(smile), text_offset=1, token_ids=smile)
            for asked, generation, fields in [*BAD, (within, {}, ["resume.text_offset"])]:
                error = await refused(h.stream(resume=asked, **{"request_id": "mine", **generation}))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert reason_and_fields(error) == ("INVALID_FIELD", fields)
            assert end.nothing_heard()

    run_async(scenario())


def test_offsets_that_the_answer_contradicts_are_refused_and_do_not_harm_it(run_async, house, tokenizer):
    """Seen only when the tokens come: the request itself stays, for a resume that knows better."""

    async def scenario():
        ids = tokenizer.encode(ANSWER, False)
        async with house() as h:
            end = await h.session()
            call = h.stream(request_id="mine", resume=pb.Resume(number=1, token_offset=3, text_offset=5_000))
            submit = await end.hear(Submit)
            end.send(output(submit, 0, ids[:2]))
            end.send(output(submit, 2, ids[2:5]))
            error = await refused(call)
            assert (error.code(), reason_and_fields(error)[1]) == (grpc.StatusCode.INVALID_ARGUMENT, ["resume.text_offset"])
            assert await end.hear(Detach) == Detach(submit.submission.request_id, 1)
            late = h.stream(request_id="mine", resume=pb.Resume(number=2, token_offset=9))
            submit = await end.hear(Submit)
            end.send(output(submit, 0, ids[:5], max_tokens(5)))
            error = await refused(late)
            assert (error.code(), reason_and_fields(error)[1]) == (grpc.StatusCode.INVALID_ARGUMENT, ["resume.token_offset"])
            assert end.nothing_heard(), "what has ended needs no word"

    run_async(scenario())


class Client:
    """Reads an answer in pieces over calls that it gives up at random, and resumes."""

    def __init__(self, h, rng, **generation):
        self.h, self.rng, self.generation = h, rng, generation
        self.ids, self.text, self.number, self.finish = [], "", 0, None

    async def read(self):
        while self.finish is None:
            keeps = self.rng.random() < 0.5
            asked = resume(self.number, self.ids, self.text, keeps) if self.number else None
            call = self.h.stream(resume=asked, **self.generation)
            self.number += 1
            pieces_max = self.rng.randint(0, 4)
            try:
                while pieces_max and self.finish is None:
                    await self.take(call)
                    pieces_max -= 1
            finally:
                call.cancel()

    async def take(self, call):
        piece = await call.read()
        assert piece.token_offset == len(self.ids)
        assert piece.text_offset == len(self.text.encode())
        self.ids += piece.token_ids
        self.text += piece.text
        if piece.HasField("finish"):
            self.finish = piece.finish


async def answer_all(end, ids, finish, rng):
    """A scheduler with one request: each Submit claims it, and gets it from where its client stands, in random frames."""
    known, claimed, at = None, None, 0
    while True:
        try:
            async with asyncio.timeout(0.003 if claimed else None):
                submit = await end.hear(Submit)
        except TimeoutError:
            upto = min(len(ids), at + rng.randint(0, 5))
            end.send(output(claimed, at, ids[at:upto], finish if upto == len(ids) else None))
            at = upto
            continue
        known = known or submit
        if submit is not known:
            end.say(known_as(submit, known))
        claimed, at = replace(known, subscriber=submit.subscriber), len(submit.received_token_ids)


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_cut_anywhere_is_the_same_answer(run_async, house, tokenizer, seed):
    """However often and wherever it is cut, with tokens or offsets alone: the same tokens and text, dense offsets, one end."""

    async def scenario():
        rng = random.Random(seed)
        ids = tokenizer.encode(ANSWER, False)
        async with house(detach_grace_ms=60_000) as h:
            end = await h.session()
            end.deaf_to.add(Detach)
            answering = asyncio.create_task(answer_all(end, ids, max_tokens(len(ids)), rng))
            client = Client(h, rng, request_id="mine", stop=["never", "twice: no"])
            reading = asyncio.create_task(client.read())
            await asyncio.wait([answering, reading], return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            await reading
            assert (client.ids, client.text) == (ids, ANSWER)
            assert client.finish.reason == pb.FINISH_REASON_LENGTH

    run_async(scenario())
