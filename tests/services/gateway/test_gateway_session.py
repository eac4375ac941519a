"""The session: Hello, broken and silent streams, old leaders; no token is lost and none comes twice."""

import asyncio
import random
import time
from dataclasses import replace

import grpc
import pytest
from gateway_house import assert_dense, epoch, max_tokens, output, read_all, reason_and_fields, refused

from services.rpc.errors import TOKENIZER_MISMATCH, FailedPrecondition
from tessera.v1 import inference_pb2 as pb
from tessera.values.finish import Finish, FinishReason
from tessera.values.session import Abort, Heartbeat, Hello, Invite, StopFound, Submit, TakenOver

ANSWER = "The quick brown fox 😀 jumps over the lazy dog, twice: naïve façade."


def test_a_session_opens_with_a_hello_and_makes_the_gateway_ready(run_async, house, tokenizer):
    async def scenario():
        async with house() as h:
            assert not await h.health()
            end = await h.scheduler.session(number=4)
            assert (end.hello.highest_epoch, end.hello.tokenizer_digest) == (end.epoch, tokenizer.digest)
            assert (len(end.hello.gateway_id), end.hello.live) == (16, ())
            end.ack()
            await h.wait_health(True)
            end.break_off()
            await h.wait_health(False)
            again = await h.scheduler.session(number=4)
            assert again.hello.highest_epoch == end.epoch
            assert again.hello.gateway_id == end.hello.gateway_id

    run_async(scenario())


def test_tokens_stream_with_dense_offsets_usage_and_timings(run_async, house, tokenizer):
    async def scenario():
        ids = tokenizer.encode(ANSWER, False)
        async with house() as h:
            end = await h.session()
            call = h.stream(sampling=pb.Sampling(max_tokens=len(ids)))
            submit = await end.hear(Submit)
            assert submit.submission.prompt_token_ids.tolist() == tokenizer.encode("Hello", True)
            assert (submit.subscriber, submit.received_token_ids) == (0, ())
            for i in range(len(ids) - 1):
                end.send(output(submit, i, [ids[i]]))
            end.send(output(submit, len(ids) - 1, ids[-1:], max_tokens(len(ids)), cached=3))
            pieces = await read_all(call)
            assert_dense(pieces)
            assert "".join(piece.text for piece in pieces) == ANSWER
            assert [i for piece in pieces for i in piece.token_ids] == ids
            assert {piece.request_id for piece in pieces} == {submit.submission.client_request_id}
            finish = pieces[-1].finish
            assert finish.reason == pb.FINISH_REASON_LENGTH
            prompt_len = len(submit.submission.prompt_token_ids)
            assert finish.usage == pb.Usage(prompt_tokens=prompt_len, completion_tokens=len(ids), cached_tokens=3)
            tpot_us = 8_000 // (len(ids) - 1)
            assert finish.timings == pb.Timings(queue_us=10, ttft_us=1_000, tpot_us=tpot_us, total_us=9_000, num_preemptions=2)

    run_async(scenario())


def test_a_broken_session_goes_on_where_it_was(run_async, house, tokenizer):
    """The next Hello lists what was received; the leader repeats some of it; the client sees each token once."""

    async def scenario():
        ids = tokenizer.encode(ANSWER, False)
        async with house() as h:
            first = await h.session()
            call = h.stream()
            submit = await first.hear(Submit)
            first.send(output(submit, 0, ids[:5]))
            first.break_off()
            second = await h.scheduler.session(number=2)
            [live] = second.hello.live
            assert (live.request_id, live.subscriber, live.token_ids) == (submit.submission.request_id, 0, tuple(ids[:5]))
            second.ack()
            second.send(output(submit, 3, ids[3:7]), output(submit, 3, ids[3:7]), output(submit, 0, ids[:2]))
            second.send(output(submit, 5, ids[5:], max_tokens(len(ids))))
            pieces = await read_all(call)
            assert_dense(pieces)
            assert "".join(piece.text for piece in pieces) == ANSWER
            assert second.nothing_heard(), "the leader knew the request: no second Submit"

    run_async(scenario())


def test_what_the_leader_does_not_know_is_submitted_again_with_its_tokens(run_async, house, tokenizer):
    async def scenario():
        ids = tokenizer.encode(ANSWER, False)
        async with house() as h:
            first = await h.session()
            calls = [h.stream(request_id="a"), h.stream(request_id="b")]
            submits = [await first.hear(Submit) for _ in calls]
            submits.sort(key=lambda submit: submit.submission.client_request_id)
            first.send(output(submits[0], 0, ids[:4]))
            assert (await calls[0].read()).token_ids == ids[:4]
            await h.scheduler.stop()
            await h.wait_health(False)
            await h.scheduler.start()
            second = await h.session(submits[0].submission.request_id, number=2)
            again = await second.hear(Submit)
            assert again.received_token_ids == tuple(ids[:4])
            assert again.submission.sampling.seed == submits[0].submission.sampling.seed
            assert again.submission.prompt_token_ids.tolist() == submits[0].submission.prompt_token_ids.tolist()
            second.send(*(output(submit, 0, ids, max_tokens(len(ids))) for submit in submits))
            texts = ["".join(piece.text for piece in await read_all(call)) for call in calls]
            assert texts == [tokenizer.decode(ids[4:], True), ANSWER]

    run_async(scenario())


def test_requests_wait_for_a_scheduler(run_async, house):
    async def scenario():
        async with house() as h:
            call = h.generate()
            end = await h.session()
            submit = await end.hear(Submit)
            end.send(output(submit, 0, [504], max_tokens(1)))
            assert (await call).finish.reason == pb.FINISH_REASON_LENGTH

    run_async(scenario())


def test_without_any_scheduler_a_request_is_unavailable_in_time(run_async, house):
    async def scenario():
        async with house(scheduler_wait_ms=30) as h:
            await h.scheduler.stop()
            for call in (h.generate(), h.stream(), h.stub.ListModels(pb.ListModelsRequest())):
                error = await refused(call)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert reason_and_fields(error)[0] == "NO_SCHEDULER"
                assert "0.03 s" in error.details()
            await h.scheduler.start()

    run_async(scenario())


def test_a_deadline_ends_the_wait_for_a_scheduler(run_async, house):
    async def scenario():
        async with house() as h:
            error = await refused(h.generate(timeout=0.1))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run_async(scenario())


def test_an_older_leader_is_refused(run_async, house):
    async def scenario():
        async with house() as h:
            first = await h.session(number=5)
            call = h.stream()
            submit = await first.hear(Submit)
            first.break_off()
            for old_epoch in (epoch(4), replace(epoch(5), instance=b"x" * 16)):
                old = await h.scheduler.opened()
                old.epoch = old_epoch
                old.say(Invite())
                told = await old.hear(Hello)
                assert (told.highest_epoch, told.live) == (first.epoch, ()), "it learns that it is old, and nothing else"
                old.ack()
                old.send(output(submit, 0, [1, 2, 3], max_tokens(3)))
                old.break_off()
            leader = await h.session(number=6)
            leader.send(output(submit, 0, [504], max_tokens(1)))
            assert [i for piece in await read_all(call) for i in piece.token_ids] == [504]

    run_async(scenario())


def test_a_silent_scheduler_is_given_up_and_a_heartbeat_is_enough(run_async, house):
    async def scenario():
        async with house(heartbeat_ms=200) as h:
            talking = await h.scheduler.opened()
            for _ in range(4):  # longer than the silence allowed, before the invitation, before and after the answer
                talking.standby()
                await talking.hear(Heartbeat)
            await talking.invite()
            for _ in range(4):
                talking.say(Heartbeat())
                await talking.hear(Heartbeat)
            talking.ack()
            for _ in range(4):
                talking.say(Heartbeat())
                await talking.hear(Heartbeat)
            assert await h.health()
            await talking.closed.wait()  # silent from here on
            await h.session()

    run_async(scenario())


def test_a_gateway_that_had_no_time_to_listen_keeps_its_session(run_async, house):
    """As where thousands of its clients leave at once."""

    async def scenario():
        async with house(heartbeat_ms=200) as h:
            end = await h.session()
            time.sleep(2.0)  # noqa: ASYNC251 - no turn of the loop, for longer than a scheduler may be silent
            end.say(Heartbeat())
            h.stream()
            await end.hear(Submit)
            assert not end.closed.is_set()

    run_async(scenario())


def test_a_client_that_leaves_aborts_its_request(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.session()
            for start in (h.stream, h.generate, h.stream):
                call = start()
                submit = await end.hear(Submit)
                if isinstance(call, grpc.aio.UnaryStreamCall):
                    end.send(output(submit, 0, [504]))
                    await call.read()
                call.cancel()
                assert await end.hear(Abort) == Abort(submit.submission.request_id, 0)

    run_async(scenario())


@pytest.mark.parametrize("kind", ["stream", "generate"])
def test_a_deadline_aborts_like_a_cancel(run_async, house, kind):
    async def scenario():
        async with house() as h:
            end = await h.session()
            call = getattr(h, kind)(timeout=0.2)
            submit = await end.hear(Submit)
            assert (await refused(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await end.hear(Abort)).request_id == submit.submission.request_id

    run_async(scenario())


def test_an_abort_is_repeated_until_the_request_has_ended(run_async, house):
    async def scenario():
        async with house() as h:
            first = await h.session()
            call = h.stream()
            submit = await first.hear(Submit)
            call.cancel()
            abort = await first.hear(Abort)
            first.break_off()
            second = await h.session(number=2)
            assert [live.request_id for live in second.hello.live] == [submit.submission.request_id]
            assert await second.hear(Abort) == abort
            second.send(output(submit, 0, [], Finish(FinishReason.ABORTED, 0)))
            second.break_off()
            third = await h.session(number=2)
            assert third.hello.live == ()
            assert third.nothing_heard()

    run_async(scenario())


def test_an_abort_of_what_the_leader_does_not_know_is_done(run_async, house):
    """The client of the Abort call still gets its one terminal message."""

    async def scenario():
        async with house() as h:
            first = await h.session()
            call = h.stream(request_id="x")
            submit = await first.hear(Submit)
            await h.stub.Abort(pb.AbortRequest(request_id="x"))
            await first.hear(Abort)
            first.break_off()
            second = await h.session(submit.submission.request_id, number=2)
            [piece] = await read_all(call)
            assert piece.finish.reason == pb.FINISH_REASON_ABORTED
            assert second.nothing_heard()

    run_async(scenario())


def test_a_stop_string_is_reported_and_repeated_until_the_end_comes(run_async, house, tokenizer):
    async def scenario():
        ids = tokenizer.encode("one two three STOP four five", False)
        stop_len = len(tokenizer.encode("one two three STOP", False))
        async with house() as h:
            first = await h.session()
            call = h.stream(stop=["STOP"])
            submit = await first.hear(Submit)
            assert submit.submission.detokenize.stop_strings == ("STOP",)
            first.send(output(submit, 0, ids))
            found = await first.hear(StopFound)
            assert found == StopFound(submit.submission.request_id, 0, stop_len, "STOP")
            first.break_off()
            second = await h.session(number=2)
            assert second.hello.live[0].token_ids == tuple(ids[:stop_len])
            assert await second.hear(StopFound) == found
            second.send(output(submit, stop_len, [], Finish(FinishReason.STOP_STRING, stop_len, stop_string="STOP"), cached=2))
            pieces = await read_all(call)
            assert_dense(pieces)
            assert "".join(piece.text for piece in pieces) == "one two three "
            finish = pieces[-1].finish
            assert (finish.reason, finish.stop_string) == (pb.FINISH_REASON_STOP, "STOP")
            assert (finish.usage.completion_tokens, finish.usage.cached_tokens) == (stop_len, 2)
            assert finish.timings.total_us == 9_000
            assert second.nothing_heard(), "an ended request is not aborted"

    run_async(scenario())


def test_a_stop_string_within_the_last_frame_needs_no_word(run_async, house, tokenizer):
    async def scenario():
        ids = tokenizer.encode("one STOP two", False)
        async with house() as h:
            end = await h.session()
            call = h.generate(stop=["STOP"])
            submit = await end.hear(Submit)
            end.send(output(submit, 0, ids, max_tokens(len(ids))))
            answer = await call
            assert (answer.text, answer.finish.reason, answer.finish.stop_string) == ("one ", pb.FINISH_REASON_STOP, "STOP")
            assert answer.finish.timings.total_us == 9_000
            assert answer.finish.usage.completion_tokens == len(answer.token_ids)
            assert end.nothing_heard()

    run_async(scenario())


def test_a_gap_ends_its_own_request_only(run_async, house, tokenizer):
    async def scenario():
        async with house() as h:
            end = await h.session()
            bad, good = h.stream(request_id="a"), h.stream(request_id="b")
            submits = [await end.hear(Submit), await end.hear(Submit)]
            submits.sort(key=lambda submit: submit.submission.client_request_id)
            end.send(output(submits[0], 1, [504]), output(submits[1], 0, [504]))
            error = await refused(bad)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.INTERNAL, "OUTPUT_GAP")
            assert (await end.hear(Abort)).request_id == submits[0].submission.request_id
            end.send(output(submits[0], 9, [504]), output(submits[1], 1, [505], max_tokens(2)))
            assert [i for piece in await read_all(good) for i in piece.token_ids] == [504, 505]
            assert end.nothing_heard(), "one Abort is enough"

    run_async(scenario())


def test_a_detokenizer_that_fails_ends_its_own_request_only(run_async, house, monkeypatch):
    async def scenario():
        async with house() as h:
            end = await h.session()
            bad, good = h.stream(request_id="a"), h.stream(request_id="b")
            submits = [await end.hear(Submit), await end.hear(Submit)]
            submits.sort(key=lambda submit: submit.submission.client_request_id)
            broken = h.gateway.session.live.get(submits[0].submission.request_id)
            monkeypatch.setattr(broken, "_output", None)  # any bug in there
            broken_subscriber = property(lambda self: 0)
            monkeypatch.setattr(type(broken), "subscriber", broken_subscriber)
            end.send(output(submits[0], 0, [504]), output(submits[1], 0, [504], max_tokens(1)))
            error = await refused(bad)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.INTERNAL, "DETOKENIZER_FAILED")
            assert "NoneType" not in error.details()
            assert [i for piece in await read_all(good) for i in piece.token_ids] == [504]

    run_async(scenario())


def test_a_request_taken_over_ends_and_aborts_nothing(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.session()
            call = h.stream()
            submit = await end.hear(Submit)
            end.send(output(submit, 0, [504]))
            end.say(TakenOver(submit.submission.request_id, 7))  # another subscriber's: a no-op
            end.say(TakenOver(submit.submission.request_id, 0))
            assert list((await call.read()).token_ids) == [504]
            error = await refused(call)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.ABORTED, "TAKEN_OVER")
            assert end.nothing_heard()

    run_async(scenario())


def test_frames_for_nobody_are_no_ops(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.session()
            call = h.stream()
            submit = await end.hear(Submit)
            stranger = replace(output(submit, 0, [1, 2], max_tokens(2)), request_id=b"?" * 16)
            other = replace(output(submit, 0, [1, 2], max_tokens(2)), subscriber=3)
            end.send(stranger, other, output(submit, 0, [504], max_tokens(1)), output(submit, 0, [505]))
            assert [i for piece in await read_all(call) for i in piece.token_ids] == [504]

    run_async(scenario())


def test_another_tokenizer_is_refused_at_both_ends(run_async, house, model_info):
    async def scenario():
        async with house(model=replace(model_info, tokenizer_digest="0" * 64)) as h:
            end = await h.scheduler.session()
            end.ack()
            await end.closed.wait()
            error = await refused(h.generate())
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")
            assert "000000000000" in error.details()
            assert not await h.health()

    run_async(scenario())


def test_a_scheduler_may_refuse_the_tokenizer_itself(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.scheduler.session()
            end.refuse(FailedPrecondition("the workers have another tokenizer", reason=TOKENIZER_MISMATCH))
            error = await refused(h.generate())
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert error.details() == "the workers have another tokenizer"

    run_async(scenario())


class Chaos:
    """A scheduler's memory of one request that answers it in random frames over sessions that break."""

    def __init__(self, submit, token_ids, rng):
        self.submit, self.ids, self.rng = submit, token_ids, rng

    def say_some(self, end, held):
        """Send from somewhere at or before `held` up to somewhere after it; returns what the gateway holds if that arrives."""
        start = self.rng.randint(max(0, held - 3), held)
        stop = self.rng.randint(held, min(len(self.ids), held + 4))
        finish = max_tokens(stop) if stop == len(self.ids) else None
        end.send(output(self.submit, start, self.ids[start:stop], finish))
        return stop


@pytest.mark.parametrize("seed", range(6))
def test_eight_streams_over_sessions_that_keep_breaking(run_async, house, tokenizer, seed):
    async def scenario():
        rng = random.Random(seed)
        answers = [ANSWER * rng.randint(1, 3) + str(i) for i in range(8)]
        ids = [tokenizer.encode(answer, False) for answer in answers]
        async with house() as h:
            end = await h.session()
            calls = [asyncio.create_task(read_all(h.stream(request_id=str(i)))) for i in range(8)]
            requests = {}
            for _ in calls:
                submit = await end.hear(Submit)
                number = int(submit.submission.client_request_id)
                requests[submit.submission.request_id] = Chaos(submit, ids[number], rng)
            number, held = 1, dict.fromkeys(requests, 0)
            while not all(task.done() for task in calls):
                for request_id in rng.sample(sorted(held), len(held)):
                    held[request_id] = requests[request_id].say_some(end, held[request_id])
                held = {i: count for i, count in held.items() if count < len(requests[i].ids)}
                if not held or rng.random() < 0.3:
                    end.break_off()
                    if not held:
                        break
                    number += rng.randint(0, 1)
                    end = await h.scheduler.session(number)
                    held = {live.request_id: len(live.token_ids) for live in end.hello.live}
                    end.ack()
            for answer, token_ids, pieces in zip(answers, ids, await asyncio.gather(*calls), strict=True):
                assert_dense(pieces)
                assert [i for piece in pieces for i in piece.token_ids] == token_ids
                assert "".join(piece.text for piece in pieces) == answer
            assert len(h.gateway.session.live) == 0

    run_async(scenario())
