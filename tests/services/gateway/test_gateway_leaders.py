"""Several schedulers: the highest epoch that invited leads, others stand by, come and go; other releases are refused clearly."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from gateway_house import ScriptedScheduler, epoch, max_tokens, output, read_all, reason_and_fields, refused

from services.rpc.errors import FailedPrecondition
from tessera.values.protocol import PROTOCOL_VERSION, VERSION_SKEW
from tessera.values.session import Abort, Heartbeat, Hello, Invite, Submit


@pytest.fixture
def pair(house, model_info):
    """A house with a second scheduler: `async with pair() as (h, other):`."""

    @asynccontextmanager
    async def build(**options):
        async with ScriptedScheduler(model_info) as other, house(more=(other.address,), **options) as h:
            yield h, other

    return build


def test_a_standby_takes_over_on_the_stream_that_stands(run_async, pair):
    """From its invitation on the earlier leader is not listened to; asked anew, it is told of the higher epoch."""

    async def scenario():
        async with pair() as (h, other):
            standby = await other.opened()
            standby.standby()
            leader = await h.session(number=1)
            call = h.stream()
            submit = await leader.hear(Submit)
            leader.send(output(submit, 0, [504]))
            assert list((await call.read()).token_ids) == [504]
            standby.standby()
            await standby.invite(number=2)
            leader.send(output(submit, 1, [1, 2, 3], max_tokens(4)))
            assert [live.token_ids for live in standby.hello.live] == [(504,)]
            assert not await h.health(), "until it has answered"
            standby.ack()
            await h.wait_health(True)
            again = await h.scheduler.opened()
            again.epoch = epoch(1)
            again.say(Invite())
            assert (await again.hear(Hello)).highest_epoch == epoch(2)
            standby.send(output(submit, 1, [505], max_tokens(2)))
            assert [i for piece in await read_all(call) for i in piece.token_ids] == [505]

    run_async(scenario())


def test_requests_wait_until_one_of_the_schedulers_leads(run_async, pair):
    async def scenario():
        async with pair() as (h, other):
            standbys = [await h.scheduler.opened(), await other.opened()]
            for standby in standbys:
                standby.standby()
            call = h.generate()
            await standbys[1].invite(number=7)
            standbys[1].ack()
            submit = await standbys[1].hear(Submit)
            standbys[1].send(output(submit, 0, [504], max_tokens(1)))
            assert list((await call).token_ids) == [504]
            assert standbys[0].nothing_heard()

    run_async(scenario())


def test_a_leader_that_stands_by_again_leads_no_more(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.session(number=1)
            await h.wait_health(True)
            end.standby()
            await h.wait_health(False)
            call = h.stream()
            await end.invite(number=3)
            end.ack()
            await end.hear(Submit)
            call.cancel()
            await end.hear(Abort)

    run_async(scenario())


def test_one_leader_at_two_addresses_gets_one_hello(run_async, pair):
    """As where a name and an address stand for the same process. The other stream takes over as soon as the first one breaks."""

    async def scenario():
        async with pair() as (h, other):
            first = await h.session(number=1)
            spare = await other.opened()
            spare.epoch = epoch(1)
            spare.say(Invite())
            call = h.stream()
            submit = await first.hear(Submit)
            first.break_off()
            hello = await spare.hear(Hello)
            assert [live.request_id for live in hello.live] == [submit.submission.request_id]
            spare.ack()
            spare.send(output(submit, 0, [504], max_tokens(1)))
            assert [i for piece in await read_all(call) for i in piece.token_ids] == [504]

    run_async(scenario())


def test_who_has_not_invited_is_not_listened_to(run_async, pair):
    async def scenario():
        async with pair() as (h, other):
            first = await h.session(number=1)
            call = h.stream()
            submit = await first.hear(Submit)
            stranger = await other.opened()
            stranger.epoch = epoch(9)
            stranger.ack()
            stranger.send(output(submit, 0, [1], max_tokens(1)))
            first.send(output(submit, 0, [504], max_tokens(1)))
            assert [i for piece in await read_all(call) for i in piece.token_ids] == [504]
            assert stranger.nothing_heard()

    run_async(scenario())


@pytest.mark.parametrize("who", ["gateway", "scheduler"])
def test_another_release_is_refused_and_its_requests_are_sent_on(run_async, house, who):
    """Whichever side notices. What runs here can go on at a gateway of the other release; a later leader of ours is served again."""

    async def scenario():
        async with house() as h:
            first = await h.session(number=1)
            call = h.stream()
            await first.hear(Submit)
            first.break_off()
            end = await h.scheduler.opened()
            end.epoch = epoch(2)
            if who == "gateway":
                end.say(Invite(PROTOCOL_VERSION + 1))
                await end.closed.wait()
                assert end.nothing_heard(), "no Hello"
                words = (f"version {PROTOCOL_VERSION} ", f"the scheduler {PROTOCOL_VERSION + 1}")
            else:
                await end.invite(number=2)
                end.refuse(FailedPrecondition("this scheduler speaks 2, the gateway 1", reason=VERSION_SKEW))
                words = ("this scheduler speaks 2, the gateway 1",)
            for refused_call in (call, h.generate(), h.stream()):
                error = await refused(refused_call)
                assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.UNAVAILABLE, VERSION_SKEW)
                assert all(word in error.details() for word in words)
            await h.session(number=3)
            call = h.stream()
            call.cancel()

    run_async(scenario())


def test_schedulers_join_and_leave(run_async, house, model_info, monkeypatch):
    """As a name's records say. The leader is listened to as long as its stream stands, also when its address is gone."""

    async def scenario():
        present = asyncio.Queue()

        async def addresses(targets):
            while True:
                yield frozenset(await present.get())

        monkeypatch.setattr("services.gateway.session.addresses", addresses)
        async with ScriptedScheduler(model_info) as other, house() as h:
            present.put_nowait({h.scheduler.address})
            leader = await h.session(number=1)
            present.put_nowait({h.scheduler.address, other.address})
            standby = await other.opened()
            standby.standby()
            present.put_nowait({h.scheduler.address})
            await standby.closed.wait()
            present.put_nowait({other.address})
            standby = await other.opened()
            call = h.stream()
            submit = await leader.hear(Submit)
            await standby.invite(number=2)
            await leader.closed.wait()
            standby.ack()
            standby.send(output(submit, 0, [504], max_tokens(1)))
            assert [i for piece in await read_all(call) for i in piece.token_ids] == [504]
            assert h.scheduler.none_opened()

    run_async(scenario())


@pytest.mark.parametrize("what", ["garbage", "malformed"])
def test_what_cannot_be_read_ends_the_stream_and_nothing_else(run_async, house, what):
    async def scenario():
        async with house() as h:
            first = await h.session(number=1)
            call = h.stream()
            submit = await first.hear(Submit)
            first.say_raw(b"\xff\xff\xff" if what == "garbage" else b"")
            await first.closed.wait()
            second = await h.session(number=1)
            second.send(output(submit, 0, [504], max_tokens(1)))
            assert [i for piece in await read_all(call) for i in piece.token_ids] == [504]

    run_async(scenario())


def test_a_frame_before_the_answer_ends_the_stream(run_async, house):
    async def scenario():
        async with house() as h:
            end = await h.scheduler.session(number=1)
            end.say(Heartbeat())
            end.send()
            await end.closed.wait()
            again = await h.session(number=1)
            again.ack()
            await again.closed.wait()

    run_async(scenario())


def test_a_restarted_scheduler_is_found(run_async, house):
    async def scenario():
        async with house() as h:
            for number in (1, 2, 3):
                await h.session(number=number)
                await h.scheduler.stop()
                await h.wait_health(False)
                await h.scheduler.start()

    run_async(scenario())


class SwallowingForwarder:
    """Forwards connections to a scheduler; those that stand when `swallow` is called stay open, and nothing comes through any more."""

    def __init__(self, target):
        self._target = target.rpartition(":")
        self._open = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self._server.close()
        self.swallow()

    def swallow(self):
        for task in self._open:
            task.cancel()

    async def _serve(self, reader, writer):
        there = await asyncio.open_connection(self._target[0], int(self._target[2]))
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _pump(self, source, sink):
        while data := await source.read(65536):
            sink.write(data)
        sink.close()


def test_a_connection_that_swallows_everything_is_replaced(run_async, house, model_info):
    """A stream on a new one comes through at once, where the old one may take as long as TCP's next attempt."""

    async def scenario():
        async with (
            ScriptedScheduler(model_info) as scheduler,
            SwallowingForwarder(scheduler.address) as forwarder,
            house(scheduler=(forwarder.address,), heartbeat_ms=100) as h,
        ):
            first = await scheduler.session(number=1)
            first.ack()
            await h.gateway.session.connected(30)
            forwarder.swallow()
            second = await scheduler.session(number=1)
            assert second.hello.gateway_id == first.hello.gateway_id

    run_async(scenario())
