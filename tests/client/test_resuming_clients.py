"""Both clients over gateways that fail in the middle of an answer: it goes on, and is the answer that one gateway alone gives."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
import raw_http2
from scripted_gateways import answer_to, gateways, whole_pieces

from services.rpc import errors as service_errors
from tessera import client as tessera_client
from tessera.client import AsyncClient, FinishReason, Piece, Timings, Usage
from tessera.client.request import generation_of
from tessera.v1 import inference_pb2 as pb

TOKENS = 8
ASKED = {"request_id": "r", "seed": 3, "max_tokens": TOKENS}
IDS = tuple(token_id for token_id, _ in answer_to(generation_of("Hi", ASKED)))
TEXT = "".join(word for _, word in answer_to(generation_of("Hi", ASKED)))
DRAINING = service_errors.Unavailable("draining", reason="DRAINING", retry_after_ms=30)
NO_SCHEDULER = service_errors.Unavailable("none", reason="NO_SCHEDULER", retry_after_ms=60_000)
FULL = service_errors.Overloaded("full", reason="OVERLOADED", retry_after_ms=30)


def check_whole(pieces, ids=IDS, text=TEXT):
    """Every token once, dense, and one finish, in the last piece."""
    assert [piece.token_offset for piece in pieces] == [
        sum(len(before.token_ids) for before in pieces[:index]) for index in range(len(pieces))
    ]
    assert [piece.text_offset for piece in pieces] == [
        sum(len(before.text.encode()) for before in pieces[:index]) for index in range(len(pieces))
    ]
    assert tuple(token_id for piece in pieces for token_id in piece.token_ids) == ids
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].finish.usage == Usage(3, len(ids), 1)
    assert pieces[-1].finish.timings == Timings(1, 2, 3, 4)


def resume_of(request):
    resume = request.resume
    return resume.number, resume.token_offset, resume.text_offset, tuple(resume.token_ids)


def received(pieces):
    ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    return len(ids), sum(len(piece.text.encode()) for piece in pieces), ids


@pytest.fixture
def connected(client_kind):
    """A client of some gateways: `async with connected(2) as (client, first, second)`."""

    @asynccontextmanager
    async def connect(count, **options):
        async with (
            gateways(count) as started,
            client_kind([gateway.address for gateway in started], **options) as client,
        ):
            yield client, *started

    return connect


async def cut(gateway):
    gateway.cut()


async def kill(gateway):
    await gateway.kill()


async def end(gateway):
    await gateway.end()


FAILURES = [cut, kill, end]


@pytest.mark.parametrize("held", [0, 1, 5, TOKENS])
@pytest.mark.parametrize("fail", FAILURES)
def test_the_next_gateway_goes_on_from_what_was_received(run_async, connected, fail, held):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.holds_after = held
            stream = client.stream("Hi", **ASKED)
            pieces = [await anext(stream) for _ in range(held)]
            failing = asyncio.create_task(_fail_when_asked(first, fail))
            async for piece in stream:
                pieces.append(piece)
            await failing
            check_whole(pieces)
            assert resume_of(second.asked[0]) == (1, *received(pieces[:held]))
            assert second.asked[0].generation == first.asked[0].generation
            assert not first.asked[0].HasField("resume")
            assert first.book.admitted == 1, "it was not computed twice"

    run_async(scenario())


async def _fail_when_asked(gateway, fail):
    await gateway.until_asked()
    await fail(gateway)


@pytest.mark.parametrize(
    "error",
    [
        DRAINING,
        NO_SCHEDULER,
        FULL,
    ],
)
def test_a_gateway_that_sends_its_streams_away_is_left(run_async, connected, error):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.holds_after, first.error = 3, error
            first.go_on.set()
            pieces = [piece async for piece in client.stream("Hi", **ASKED)]
            check_whole(pieces)
            assert resume_of(second.asked[0]) == (1, *received(pieces[:3]))
            assert (await client.model()).name == "m"
            assert (first.calls, second.calls) == ([], ["GetModel"]), "calls go to the gateway that works"

    run_async(scenario())


def test_a_whole_answer_is_resumed_too(run_async, connected):
    async def scenario():
        async with connected(2) as (client, first, _):
            first.holds_after = 4
            answer, _ = await asyncio.gather(client.generate("Hi", **ASKED), _fail_when_asked(first, cut))
            undisturbed = await client.generate("Hi", **ASKED | {"request_id": "other"})
            assert (answer.request_id, answer.text, answer.token_ids) == ("r", TEXT, IDS)
            assert (answer.text, answer.token_ids, answer.finish) == (
                undisturbed.text,
                undisturbed.token_ids,
                undisturbed.finish,
            )

    run_async(scenario())


def test_what_the_caller_leaves_out_is_the_same_in_every_try(run_async, connected):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.holds_after = 2
            stream = client.stream("Hi", max_tokens=TOKENS)
            pieces = [await anext(stream), await anext(stream)]
            first.cut()
            pieces += [piece async for piece in stream]
            generation = first.asked[0].generation
            assert len(generation.request_id) == 32 and generation.sampling.HasField("seed")
            assert second.asked[0].generation == generation
            answer = answer_to(generation)
            check_whole(pieces, tuple(token_id for token_id, _ in answer), "".join(word for _, word in answer))

    run_async(scenario())


def test_every_failure_is_a_resume_of_its_own(run_async, connected):
    async def scenario():
        async with connected(3) as (client, *all_three):
            stream = client.stream("Hi", **ASKED)
            pieces = []
            for index in range(5):
                gateway = all_three[index % 3]
                gateway.holds_after = 1
                pieces.append(await anext(stream))
                gateway.cut()
            pieces += [piece async for piece in stream]
            check_whole(pieces)
            asked = [all_three[index % 3].asked[index // 3] for index in range(6)]
            assert [resume_of(request) for request in asked[1:]] == [
                (number, *received(pieces[:number])) for number in range(1, 6)
            ]
            assert all_three[0].book.admitted == 1

    run_async(scenario())


def test_a_single_gateway_that_comes_back_goes_on(run_async, connected):
    async def scenario():
        async with connected(1) as (client, gateway):
            gateway.holds_after = 2
            stream = client.stream("Hi", **ASKED)
            pieces = [await anext(stream), await anext(stream)]
            await gateway.kill()
            third = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.3)  # some tries find nobody
            assert not third.done()
            await gateway.start()
            pieces += [await third, *[piece async for piece in stream]]
            check_whole(pieces)
            assert gateway.asked[1].resume.number >= 1
            assert resume_of(gateway.asked[1])[1:] == received(pieces[:2])

    run_async(scenario())


def test_a_request_that_finds_nobody_waits_for_somebody(run_async, connected):
    async def scenario():
        async with connected(2) as (client, first, second):
            await first.kill()
            await second.kill()
            answer = asyncio.create_task(client.generate("Hi", **ASKED))
            await asyncio.sleep(0.2)
            await second.start()
            assert (await answer).token_ids == IDS
            assert first.book.admitted == 1

    run_async(scenario())


@pytest.mark.parametrize(
    "change",
    [
        lambda pieces: whole_pieces(generation_of("Hi", ASKED)),  # as a gateway that knows nothing of resumes
        lambda pieces: [pieces[0], *pieces],
        lambda pieces: [piece for piece in pieces for _ in range(2) if piece.HasField("finish") is False] + pieces[-1:],
    ],
)
def test_pieces_that_come_again_are_cut(run_async, connected, change):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.holds_after, second.change = 3, change
            stream = client.stream("Hi", **ASKED)
            pieces = [await anext(stream) for _ in range(3)]
            first.cut()
            pieces += [piece async for piece in stream]
            check_whole(pieces)

    run_async(scenario())


BUGS = [
    (lambda pieces: pieces[:1] + pieces[2:], "OUTPUT_GAP", 1),
    (lambda pieces: [*pieces[:2], pb.StreamGenerateResponse(token_offset=1, token_ids=[999])], "OUTPUT_CONTRADICTED", 2),
    (lambda pieces: pieces[:-1], "NO_FINISH", TOKENS),
]


@pytest.mark.parametrize(("change", "reason", "tokens"), BUGS)
def test_a_gateway_that_breaks_its_word_is_an_error(run_async, connected, change, reason, tokens):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.change = change
            with pytest.raises(tessera_client.InternalError) as caught:
                async for _ in client.stream("Hi", **ASKED):
                    pass
            error = caught.value
            assert (error.details.reason, error.request_id, error.received_tokens) == (reason, "r", tokens)
            await first.left.wait()
            assert not second.asked

    run_async(scenario())


REFUSALS = [
    service_errors.InvalidArgument((service_errors.FieldViolation("generation.text", "is bad"),)),
    service_errors.NotFound("m", reason="MODEL_NOT_FOUND"),
    service_errors.AlreadyExists("m", reason="REQUEST_ID_IN_USE"),
    service_errors.FailedPrecondition("m", reason="VERSION_SKEW"),
    service_errors.Aborted("m", reason="TAKEN_OVER"),
    service_errors.Internal("m", reason="OUTPUT_GAP"),
    RuntimeError("a bug of the server"),
]


@pytest.mark.parametrize("error", REFUSALS)
@pytest.mark.parametrize("held", [0, 2])
def test_what_a_gateway_decides_is_not_asked_elsewhere(run_async, connected, error, held):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.holds_after, first.error = held, error
            first.go_on.set()
            with pytest.raises(tessera_client.TesseraError) as caught:
                async for _ in client.stream("Hi", **ASKED):
                    pass
            assert (caught.value.request_id, caught.value.received_tokens) == ("r", held)
            assert not second.asked

    run_async(scenario())


@pytest.mark.parametrize("retry_overloaded", [False, True])
def test_a_full_gateway_is_tried_again_if_the_caller_asks(run_async, connected, retry_overloaded):
    async def scenario():
        async with connected(1, retry_overloaded=retry_overloaded) as (client, gateway):
            gateway.holds_after, gateway.error = 0, FULL
            gateway.go_on.set()
            if retry_overloaded:
                assert (await client.generate("Hi", **ASKED)).token_ids == IDS
                assert len(gateway.asked) == 2
            else:
                with pytest.raises(tessera_client.Overloaded) as caught:
                    await client.generate("Hi", **ASKED)
                assert caught.value.received_tokens == 0

    run_async(scenario())


def test_the_stream_that_another_one_takes_over_ends(run_async, connected):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.holds_after = second.holds_after = 2
            stream = client.stream("Hi", **ASKED)
            first_piece = await anext(stream)
            await anext(stream)
            first.book.known["r"].number = 7  # of a client elsewhere
            first.book.known["r"].taken_over.set()
            with pytest.raises(tessera_client.RequestAborted) as caught:
                await anext(stream)
            assert (first_piece.token_ids, caught.value.received_tokens) == (IDS[:1], 2)
            assert (caught.value.details.reason, caught.value.request_id) == ("TAKEN_OVER", "r")
            assert not second.asked

    run_async(scenario())


def test_a_resume_that_comes_too_late_is_not_repeated(run_async, connected):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.holds_after = 1
            stream = client.stream("Hi", **ASKED)
            await anext(stream)
            first.book.known["r"].number = 7
            first.cut()
            with pytest.raises(tessera_client.RequestAborted):
                await anext(stream)
            assert (len(first.asked), len(second.asked)) == (1, 1)

    run_async(scenario())


def test_nobody_for_too_long_is_the_callers(run_async, connected):
    async def scenario():
        async with connected(2, resume_timeout_s=0.4) as (client, first, second):
            first.holds_after = 2
            stream = client.stream("Hi", **ASKED)
            await anext(stream)
            await anext(stream)
            await second.kill()
            await first.kill()
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            with pytest.raises(tessera_client.Unavailable) as caught:
                await anext(stream)
            assert loop.time() - began_s >= 0.4
            assert (caught.value.request_id, caught.value.received_tokens, caught.value.retryable) == ("r", 2, True)

    run_async(scenario())


def test_the_callers_time_bounds_all_tries_together(run_async, connected):
    async def scenario():
        async with connected(2) as (client, first, second):
            await first.kill()
            second.refusal = NO_SCHEDULER
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            with pytest.raises(tessera_client.DeadlineExceeded) as caught:
                await client.generate("Hi", **ASKED, timeout_s=0.7)
            assert loop.time() - began_s >= 0.6  # gRPC counts from a moment of its own
            assert caught.value.request_id == "r"
            assert len(second.asked) > 1

    run_async(scenario())


def test_a_client_that_is_closed_resumes_nothing(run_async, connected):
    async def scenario():
        async with connected(1) as (client, gateway):
            gateway.holds_after, gateway.error = 1, NO_SCHEDULER
            stream = client.stream("Hi", **ASKED)
            await anext(stream)
            gateway.go_on.set()
            waiting = asyncio.ensure_future(anext(stream))
            await gateway.left.wait()
            await asyncio.sleep(0.1)  # most likely it waits for its next try by now; right it is at any moment
            await client.close()
            await asyncio.wait([waiting], timeout=10)
            assert waiting.cancelled() or isinstance(waiting.exception(), tessera_client.TesseraError)

    run_async(scenario())


def test_a_stream_that_is_left_is_not_resumed(run_async, connected):
    async def scenario():
        async with connected(2) as (client, first, second):
            first.holds_after = 1
            stream = client.stream("Hi", **ASKED)
            await anext(stream)
            await stream.aclose()
            await first.left.wait()
            assert not second.asked

    run_async(scenario())


def test_a_task_that_is_cancelled_is_not_resumed(run_async):
    async def scenario():
        async with gateways(2) as (first, second), AsyncClient([first.address, second.address]) as client:
            first.holds_after = 1
            task = asyncio.create_task(client.generate("Hi", **ASKED))
            await first.until_asked()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await first.left.wait()
            assert not second.asked

    run_async(scenario())


def test_an_abort_finds_the_gateway_where_the_request_runs(run_async, connected):
    async def scenario():
        async with connected(3) as (client, first, second, third):
            first.holds_after = second.holds_after = 1
            stream = client.stream("Hi", **ASKED)
            await anext(stream)
            first.cut()
            pieces = [await anext(stream)]
            async with type(client)([third.address, first.address, second.address]) as other:
                await other.abort("r")
            pieces += [piece async for piece in stream]
            assert pieces[-1].finish.reason is FinishReason.ABORTED
            assert third.calls == ["Abort"]
            with pytest.raises(tessera_client.NotFound) as caught:
                await client.abort("unknown")
            assert caught.value.request_id == "unknown"
            await third.kill()
            with pytest.raises(tessera_client.Unavailable):
                await client.abort("unknown")  # it may run where nobody answers

    run_async(scenario())


def test_short_calls_are_tried_at_each_gateway(run_async, connected):
    async def scenario():
        async with connected(3) as (client, first, second, third):
            await first.kill()
            second.refusal = DRAINING
            assert await client.tokenize("Hi") == (4, 5)
            assert await client.detokenize([4]) == "text"
            assert [model.name for model in await client.models()] == ["m"]
            assert (second.calls, third.calls) == (["Tokenize"], ["Tokenize", "Detokenize", "ListModels"])
            third.refusal = service_errors.NotFound("m", reason="MODEL_NOT_FOUND")
            with pytest.raises(tessera_client.NotFound):
                await client.model("m")
            third.refusal = DRAINING
            with pytest.raises(tessera_client.Unavailable):
                await client.model("m")

    run_async(scenario())


def test_a_target_that_grpc_resolves_is_gone_on_with_too(run_async, client_kind):
    async def scenario():
        async with gateways(2) as (first, second), client_kind(f"ipv4:{first.address},{second.address}") as client:
            first.holds_after = second.holds_after = 3
            stream = client.stream("Hi", **ASKED)
            pieces = [await anext(stream) for _ in range(3)]
            used, other = (first, second) if first.asked else (second, first)
            other.holds_after = None
            await used.kill()
            pieces += [piece async for piece in stream]
            check_whole(pieces)
            assert other.asked[-1].resume.token_offset == 3

    run_async(scenario())


def test_addresses_come_in_one_string_too(run_async, client_kind):
    async def scenario():
        async with gateways(2) as (first, second):
            await first.kill()
            async with client_kind(f"{first.address}, {second.address}") as client:
                assert (await client.generate("Hi", **ASKED)).token_ids == IDS

    run_async(scenario())
    with pytest.raises(ValueError, match="twice"):
        client_kind("a:1,a:1")


FIRST_PIECE = whole_pieces(generation_of("Hi", ASKED))[0]
TRANSPORT = {
    **{f"RST_STREAM {code}": [raw_http2.RST_STREAM, code] for code in (0, 1, 2, 7, 8)},
    "reset before headers": lambda stream: [raw_http2.RESET],
    "RST_STREAM before headers": lambda stream: [raw_http2.frame(raw_http2.RST_STREAM, 0, stream, raw_http2.number(2))],
    "end without a status": lambda stream: [
        raw_http2.headers(stream),
        raw_http2.frame(raw_http2.DATA, raw_http2.END_STREAM, stream),
    ],
    "headers only": lambda stream: [raw_http2.frame(raw_http2.HEADERS, 0x5, stream, raw_http2.OK_HEADERS)],
    "GOAWAY and reset": lambda stream: [
        raw_http2.headers(stream),
        raw_http2.frame(raw_http2.GOAWAY, 0, 0, raw_http2.number(0) + raw_http2.number(0)),
        raw_http2.RESET,
    ],
    "a proxy's 502": lambda stream: [raw_http2.frame(raw_http2.HEADERS, 0x5, stream, b"\x48\x03502")],
    "garbage": lambda stream: [raw_http2.headers(stream), b"garbage" * 20],
}


@pytest.mark.parametrize("name", TRANSPORT)
def test_whatever_grpc_calls_a_broken_stream_it_is_resumed(run_async, client_kind, name):
    broken = TRANSPORT[name]
    if isinstance(broken, list):
        kind, code = broken

        def broken(stream):
            reset = raw_http2.frame(kind, 0, stream, raw_http2.number(code))
            return [raw_http2.headers(stream), raw_http2.message(stream, FIRST_PIECE), reset]

    async def scenario():
        async with (
            raw_http2.raw_server(broken) as address,
            gateways(1) as (gateway,),
            client_kind([address, gateway.address]) as client,
        ):
            pieces = [piece async for piece in client.stream("Hi", **ASKED)]
            check_whole(pieces)
            number, tokens, *_ = resume_of(gateway.asked[0])
            assert number == 1 and tokens <= 1

    run_async(scenario())


def test_many_streams_survive_many_cuts(run_async, connected):
    """Cuts at any moment, also of resumes under way; the next one comes when something new has."""

    async def scenario():
        async with connected(3) as (client, *all_three):
            came = asyncio.Event()

            async def read(index):
                pieces = []
                async for piece in client.stream("Hi", request_id=f"r{index}", seed=index, max_tokens=200):
                    pieces.append(piece)
                    came.set()
                return pieces

            draw = random.Random(5)
            streams = [asyncio.create_task(read(index)) for index in range(12)]
            cuts = 0
            while not all(stream.done() for stream in streams):
                came.clear()
                await asyncio.wait([asyncio.ensure_future(came.wait()), *streams], return_when=asyncio.FIRST_COMPLETED)
                if cuts < 40:
                    draw.choice(all_three).cut()
                    cuts += 1
            for index, stream in enumerate(streams):
                answer = answer_to(generation_of("Hi", {"seed": index, "max_tokens": 200}))
                check_whole(stream.result(), tuple(token_id for token_id, _ in answer), "".join(word for _, word in answer))
            assert all_three[0].book.admitted == 12

    run_async(scenario())


def test_a_piece_says_whose_it_is(run_async, connected):
    async def scenario():
        async with connected(1) as (client, _):
            stream = client.stream("Hi", **ASKED)
            assert await anext(stream) == Piece("r", "", 0, IDS[:1], 0, None)
            await stream.aclose()

    run_async(scenario())
