"""One request between session and call: what a reader has not read yet waits as one growing piece."""

import asyncio

import numpy as np
import pytest
from gateway_house import TIMINGS, max_tokens, output

from gateway.output_stream import OutputStream
from services.gateway.request_stream import RequestStream
from services.rpc.errors import Aborted, Internal
from tessera.values.finish import Finish, FinishReason
from tessera.values.request import DetokenizeOptions, Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import StopFound


@pytest.fixture
def stream(tokenizer):
    options = DetokenizeOptions(stop_strings=("STOP",))
    submission = Submission(b"r" * 16, np.array([1], np.int32), SamplingParams(0), options, "x")
    return RequestStream(submission, OutputStream(tokenizer, options), "generation.text")


def feed(stream, offset, ids, finish=None, cached=0):
    return stream.feed(output(stream.submit(), offset, ids, finish, cached))


def test_what_is_not_read_is_joined(run_async, stream, tokenizer):
    async def scenario():
        [word] = tokenizer.encode(" word", False)
        for i in range(10_000):
            feed(stream, i, [word])
            assert len(stream._pending) < 64
        feed(stream, 10_000, [word], max_tokens(10_001))
        delta = await stream.next_delta()
        assert (delta.token_offset, len(delta.token_ids), delta.text) == (0, 10_001, " word" * 10_001)
        assert (delta.finish, delta.timings) == (max_tokens(10_001), TIMINGS)

    run_async(scenario())


def test_a_reader_waits_for_something_new(run_async, stream, tokenizer):
    async def scenario():
        reading = asyncio.create_task(stream.next_delta())
        await asyncio.sleep(0)
        assert not reading.done()
        feed(stream, 0, [504])
        assert (await reading).token_ids == (504,)
        feed(stream, 0, [504])  # a duplicate is nothing new
        again = asyncio.create_task(stream.next_delta())
        await asyncio.sleep(0)
        assert not again.done()
        again.cancel()

    run_async(scenario())


def test_text_before_a_stop_string_goes_out_before_the_end_is_known(run_async, stream, tokenizer):
    async def scenario():
        ids = tokenizer.encode("one STOP two", False)
        found = feed(stream, 0, ids)
        assert isinstance(found, StopFound) and stream.stop_found == found
        delta = await stream.next_delta()
        assert (delta.text, delta.finish) == ("one ", None)
        assert feed(stream, len(ids), [504]) is None, "what comes after the stop is not shown"
        feed(stream, len(ids) + 1, [505], max_tokens(len(ids) + 2), cached=1)
        last = await stream.next_delta()
        assert (last.token_ids, last.text, last.token_offset, last.text_offset) == ((), "", found.output_len, 4)
        assert last.finish == Finish(FinishReason.STOP_STRING, found.output_len, stop_string="STOP")
        assert (last.timings, last.num_cached_tokens) == (TIMINGS, 1)

    run_async(scenario())


def test_an_error_comes_after_what_has_arrived_and_stays(run_async, stream):
    async def scenario():
        feed(stream, 0, [504])
        stream.close(Aborted("first", reason="R"))
        stream.fail(Internal("second", reason="R"))
        assert (await stream.next_delta()).token_ids == (504,)
        for _ in range(2):
            with pytest.raises(Aborted, match="first"):
                await stream.next_delta()

    run_async(scenario())


def test_an_abort_of_an_unknown_request_keeps_what_was_found(run_async, stream, tokenizer):
    async def scenario():
        ids = tokenizer.encode("one STOP two", False)
        feed(stream, 0, ids)
        stream.end_aborted()
        delta = await stream.next_delta()
        assert stream.ended
        assert (delta.text, delta.finish.reason) == ("one ", FinishReason.STOP_STRING)

    run_async(scenario())
