"""One leader's term on a table: a checking worker, a store that can fail, gateways that come and go."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from core.fake_worker import MODEL, FakeWorker
from leader_table import CONFIG, WORKER, Table, expected, submission
from structlog.testing import CapturingLogger

from services.rpc.errors import FailedPrecondition
from services.scheduler import leader
from services.scheduler.core.errors import ModelMismatch
from services.scheduler.sessions import GatewaySession
from services.scheduler.store.memory import MemoryStore
from tessera.values.finish import FinishReason
from tessera.values.identity import NO_EPOCH
from tessera.values.model import KVGeometry
from tessera.values.request import Submission
from tessera.values.session import Abort, Hello, LengthChanged, LiveRequest, Rejected, RejectReason, StopFound, TakenOver


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.leader.scheduler.check_integrity()


def test_a_request_runs_to_its_end(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7])
    gateway.submit(request)
    table.run()
    assert gateway.read() == []
    assert gateway.tokens[request.request_id] == expected(request)
    assert gateway.finishes == {request.request_id: FinishReason.MAX_TOKENS}


def test_requests_that_come_while_the_worker_is_busy_are_written_together(table: Table) -> None:
    gateway = table.gateway()
    requests = [submission(number, [7, 8, number]) for number in range(1, 6)]
    while not table.leader.scheduler.is_busy:
        gateway.submit(requests[len(gateway.tokens)])
    table.write()
    last, num_before = table.store.stored().state.last, len(gateway.tokens)
    for request in requests[num_before:]:
        gateway.submit(request)
    table.write()
    assert table.store.stored().state.last == last and num_before < len(requests) - 1
    table.leader.tick()
    table.write()
    assert table.store.stored().state.last == last + 1, "time alone settles, should the worker not answer"
    assert table.store.stored().state.requests.keys() == {request.request_id for request in requests}
    table.run()
    gateway.read()
    assert gateway.tokens == {request.request_id: expected(request) for request in requests}


def test_requests_that_are_left_while_the_worker_is_busy_are_written_together(table: Table) -> None:
    gateway = table.gateway()
    requests = [submission(number, [7, 8, number]) for number in range(1, 6)]
    for request in requests:
        gateway.submit(request)
    table.leader.tick()
    table.write()
    assert table.leader.scheduler.is_busy
    last = table.store.stored().state.last
    for request in requests:
        table.leader.heard(gateway.session, Abort(request.request_id, 0))
    table.write()
    assert table.store.stored().state.last == last
    table.leader.tick()
    table.write()
    assert table.store.stored().state.last == last + 1, "time alone settles, should the worker not answer"
    table.run()
    gateway.read()
    assert gateway.finishes == {request.request_id: FinishReason.ABORTED for request in requests}


def test_nothing_is_shown_before_it_is_written(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7])
    table.store_answers = False
    gateway.submit(request)
    table.run()
    gateway.read()
    assert gateway.tokens[request.request_id] == []
    table.store_answers = True
    table.later(100)
    gateway.read()
    assert gateway.tokens[request.request_id] == expected(request)


def test_without_the_store_tokens_leave_after_the_wait(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7])
    table.store_answers = False
    gateway.submit(request)
    table.run()
    table.later(CONFIG.journal_wait_ms)
    assert not table.leader.is_durable
    gateway.read()
    assert gateway.tokens[request.request_id] == expected(request)
    table.store_answers = True
    table.later(100)
    assert table.leader.is_durable


def test_another_leader_goes_on_in_the_workers_slots(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, list(range(3, 13)), max_tokens=20)
    gateway.submit(request)
    table.run(steps=6)
    gateway.read()
    received = tuple(gateway.tokens[request.request_id])
    assert 0 < len(received) < 20
    after = Table(table.worker, table.store, term=2)
    again = after.gateway((LiveRequest(request.request_id, 0, received),))
    assert again.ack.unknown_request_ids == ()
    after.run()
    again.read()
    assert again.tokens[request.request_id] == expected(request)
    assert after.leader.scheduler.load().recomputed_positions == 0
    after.leader.scheduler.check_integrity()


def test_a_request_that_nobody_wrote_is_submitted_again(table: Table) -> None:
    request = submission(1, [5, 6, 7])
    received = tuple(expected(request)[:3])
    gateway = table.gateway((LiveRequest(request.request_id, 0, received),))
    assert gateway.ack.unknown_request_ids == (request.request_id,)
    gateway.submit(request)
    table.run()
    gateway.read()
    assert gateway.tokens[request.request_id] == expected(request)


def test_the_higher_subscriber_wins(table: Table) -> None:
    first, second = table.gateway(), table.gateway()
    request = submission(1, [5, 6, 7])
    first.submit(request)
    table.run(steps=2)
    second.submit(request, subscriber=1)
    assert first.read() == [TakenOver(request.request_id, 0)]
    for late in (Abort(request.request_id, 0), StopFound(request.request_id, 0, 1, "x")):  # its stream ended; that ends nothing
        table.leader.heard(first.session, late)
    table.run()
    second.read()
    assert second.tokens[request.request_id] == expected(request)


def test_a_lost_gateway_has_the_grace_to_come_back(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7], max_tokens=30)
    gateway.submit(request)
    table.run(steps=3)
    gateway.read()
    table.leader.session_closed(gateway.session)  # its request goes on
    table.later(CONFIG.gateway_grace_ms - 1)
    back = table.gateway((LiveRequest(request.request_id, 0, tuple(gateway.tokens[request.request_id])),))
    table.leader.tick()
    back.read()
    assert back.tokens[request.request_id] == expected(request)


def test_a_gateway_that_stays_away_ends_its_requests(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7], max_tokens=30)
    gateway.submit(request)
    table.run(steps=1)
    table.leader.session_closed(gateway.session)
    table.now_us += 1000 * CONFIG.gateway_grace_ms
    table.leader.tick()
    sequence = table.leader.scheduler.request(request.request_id)
    assert sequence is not None and sequence.finish is not None
    assert sequence.finish.reason is FinishReason.ABORTED
    table.run()
    load = table.leader.scheduler.load()
    assert load.num_free_blocks == load.num_blocks


def test_results_go_after_their_retention(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7])
    gateway.submit(request)
    table.run()
    gateway.read()
    table.later(CONFIG.result_retention_ms)
    assert table.leader.scheduler.request(request.request_id) is None
    assert table.store.is_bare


def test_a_stop_string_ends_the_request_at_its_token(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7], max_tokens=30)
    gateway.submit(request)
    table.run(steps=5)
    gateway.read()
    table.leader.heard(gateway.session, StopFound(request.request_id, 0, 2, "x"))
    table.run()
    sequence = table.leader.scheduler.request(request.request_id)
    assert sequence is not None and sequence.finish is not None
    assert (sequence.finish.reason, sequence.output_len) == (FinishReason.STOP_STRING, 2)


def test_a_leader_that_hands_over_writes_what_comes_and_sends_nothing(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7])
    gateway.submit(request)
    table.leader.hand_over()
    late = submission(2, [5])
    gateway.submit(late)
    assert gateway.read() == [] and not table.leader.is_written
    table.run()
    assert table.leader.is_written and not table.outbox
    assert set(table.store.stored().state.requests) == {request.request_id, late.request_id}


def test_a_leader_that_may_not_speak_decides_and_writes_nothing_until_it_may(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7])
    table.may_speak = False
    gateway.submit(request)
    table.run()
    assert not table.outbox and not table.leader.is_written
    table.may_speak = True
    table.leader.tick()
    table.run()
    gateway.read()
    assert gateway.tokens[request.request_id] == expected(request)


def test_a_store_that_was_emptied_is_written_again(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7])
    gateway.submit(request)
    table.run()
    assert table.leader.is_stored
    table.store = MemoryStore()
    table.store.epoch = table.leader.epoch
    table.leader.store_was_emptied()
    assert not table.leader.is_stored and not table.leader.is_durable
    table.write()
    assert table.leader.is_stored and table.leader.is_durable
    assert list(table.store.stored().state.requests) == [request.request_id]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (submission(2, [3] * 64), RejectReason.TOO_LONG),
        (submission(2, [3, MODEL.vocab_size]), RejectReason.INVALID),
        (submission(2, [9, 9], name="taken"), RejectReason.ALREADY_EXISTS),
        (submission(2, [5, 6, 7], max_tokens=39, name="taken"), RejectReason.ALREADY_EXISTS),
    ],
)
def test_a_refused_submit_is_answered_and_harms_nobody(table: Table, request_: Submission, reason: RejectReason) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7], max_tokens=40, name="taken")
    gateway.submit(request)
    table.run(steps=2)
    gateway.submit(request_)
    (refused,) = gateway.read()
    assert isinstance(refused, Rejected) and refused.reason is reason and refused.message
    table.run()
    gateway.read()
    assert gateway.tokens[request.request_id] == expected(request)


@pytest.mark.parametrize("foreign_id", [MODEL.vocab_size, 2**32 - 1])
def test_received_ids_outside_the_vocabulary_are_refused(table: Table, foreign_id: int) -> None:
    first, request = table.gateway(), submission(1, [5, 6, 7], max_tokens=40)
    first.submit(request)
    table.run(steps=2)
    gateway = table.gateway(live=(LiveRequest(request.request_id, 1, (foreign_id,)),))
    assert gateway.ack.unknown_request_ids == (request.request_id,)
    gateway.submit(request, subscriber=1)
    (refused,) = gateway.read()
    assert isinstance(refused, Rejected) and str(foreign_id) in refused.message
    table.run()
    first.read()
    assert first.tokens[request.request_id] == expected(request)


def test_another_tokenizer_is_refused(table: Table) -> None:
    hello = Hello(NO_EPOCH, "another", b"g" * 16)
    with pytest.raises(FailedPrecondition, match="--model"):
        table.leader.session_opened(GatewaySession(b"g" * 16), hello)


@pytest.mark.parametrize("restarts", [False, True])
def test_requests_of_a_lost_worker_wait_for_it(table: Table, restarts: bool) -> None:
    gateway, request = table.gateway(), submission(1, list(range(3, 13)), max_tokens=20)
    gateway.submit(request)
    table.run(steps=5)
    table.leader.worker_detached(WORKER)
    load = table.leader.scheduler.load()
    assert (load.num_running, load.num_waiting) == (0, 1)
    table.outbox.clear()
    if restarts:
        table.worker.restart()
    table.leader.worker_attached(WORKER, table.worker.attach(table.leader.epoch, 2), table.outbox.append)
    table.run()
    gateway.read()
    assert gateway.tokens[request.request_id] == expected(request)
    assert table.worker.computed_positions == 10 + 19, "every position once in the life of a boot"


def test_a_worker_with_another_model_is_sent_nothing(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7])
    table.leader.worker_detached(WORKER)
    stranger = FakeWorker(model=replace(MODEL, weights_digest="2" * 64))
    with pytest.raises(ModelMismatch):
        table.leader.worker_attached(WORKER, stranger.attach(table.leader.epoch, 2), table.outbox.append)
    gateway.submit(request)
    assert not table.outbox
    table.leader.worker_attached(WORKER, table.worker.attach(table.leader.epoch, 3), table.outbox.append)
    table.run()
    gateway.read()
    assert gateway.tokens[request.request_id] == expected(request)


def test_it_says_once_that_a_request_waits_for_a_larger_worker_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(leader, "_log", log)
    table = Table(FakeWorker(20, 4))
    gateway, request = table.gateway(), submission(1, [5] * 20, max_tokens=30)
    gateway.submit(request)
    table.run(3)
    table.worker.geometry = KVGeometry(10, 4, 8, "fake/int64")
    table.worker.restart()
    table.outbox.clear()
    table.leader.worker_attached(WORKER, table.worker.attach(table.leader.epoch, 2), table.outbox.append)
    table.later(0)
    table.later(2000)
    for _ in range(3):
        table.later(CONFIG.capacity_wait_ms // 2)
    first, last = (call for call in log.calls if "larger worker" in call.args[0])
    assert (first.method_name, first.args) == ("warning", ("requests wait for a larger worker",))
    assert first.kwargs == {"wait_ms": CONFIG.capacity_wait_ms, "blocks_needed": 13, "blocks_there": 10}
    assert last.args == ("no request waits for a larger worker",)
    gateway.read()
    assert gateway.finishes == {request.request_id: FinishReason.ERROR}


def test_gateways_are_told_how_long_the_longest_request_is_at_present() -> None:
    table = Table(FakeWorker(10, 4))
    early = table.gateway()
    assert early.ack.max_request_len == 41
    others = {name: FakeWorker(num_blocks, 4) for name, num_blocks in (("large", 15), ("small", 4))}
    for name, worker in others.items():
        table.leader.worker_attached(name, worker.attach(table.leader.epoch, 1), lambda batch: None)
    assert early.session.take_posted() == [LengthChanged(61)]
    assert table.gateway().ack.max_request_len == 61
    table.leader.worker_detached("large")
    assert not early.session.take_posted(), "it may come back"
    table.leader.worker_removed("large")
    assert early.session.take_posted() == [LengthChanged(41)]
    assert table.gateway().ack.max_request_len == 41


def test_gateways_are_told_the_load_now_and_then_and_only_the_last_is_kept(table: Table) -> None:
    gateway, request = table.gateway(), submission(1, [5, 6, 7], max_tokens=40)
    table.leader.tick()
    gateway.read()
    gateway.submit(request)
    table.run(3)
    table.leader.tick()
    gateway.read()
    assert [load.num_running for load in gateway.loads] == [0], "not with every tick"
    for _ in range(2):
        table.now_us += leader.LOAD_EVERY_US
        table.leader.tick()
    gateway.read()
    assert [load.num_running for load in gateway.loads] == [0, 1]
    table.may_speak = False
    table.now_us += leader.LOAD_EVERY_US
    table.leader.tick()
    gateway.read()
    assert len(gateway.loads) == 2
