"""Three schedulers, one store: stopped, continued, cut off and emptied at any moment, and never two that greet.

Every eighth of a lease each running scheduler acts once, in any order: a standby looks, a leader asks for confirmation every
quarter of a lease, and hears the answer at once or up to two turns later.
"""

import copy
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.lease import LeaseHold, LeaseWatch, next_epoch
from tessera.values.identity import NO_EPOCH, Epoch

TURN_US = 250_000
LEASE_US = 8 * TURN_US
RENEW_TURNS = 2


@dataclass
class StoreModel:
    """A store with a lease. `is_empty` until a leader has heard a first confirmation, and so has written."""

    epoch: Epoch = NO_EPOCH
    held_until_us: int = 0
    is_empty: bool = True
    is_there: bool = True


@dataclass
class Peer:
    """One scheduler process: a standby while `hold` is None."""

    instance: bytes
    watch: LeaseWatch = field(default_factory=lambda: LeaseWatch(LEASE_US))
    hold: LeaseHold | None = None
    epoch: Epoch = NO_EPOCH
    is_stopped: bool = False
    stopped_us: int = 0
    continued_us: int = 0
    slept_long: bool = False
    confirmed_us: int = 0  # when the store carried out what was heard last
    answer: tuple[int, int, bool] | None = None  # due at, carried out at, whether it confirms
    next_ask_us: int = 0
    is_cut: bool = False  # the store went away since its last look
    is_alone: bool = False  # the network lets nothing through to the store
    reunited_us: int = 0

    def stand_by(self) -> None:
        self.watch, self.hold, self.answer = LeaseWatch(LEASE_US), None, None


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0
        self.store = StoreModel()
        self.peers = [Peer(bytes([number]) * 16) for number in range(3)]

    @rule(count=st.integers(1, 12), order=st.permutations(range(3)), delays=st.tuples(*[st.integers(0, 2)] * 3))
    def turns(self, count: int, order: list[int], delays: tuple[int, int, int]) -> None:
        for _ in range(count):
            self._turn(order, delays)
            self.at_most_one_greets()
            self.whoever_slept_is_silent_until_confirmed()

    def _turn(self, order: list[int], delays: tuple[int, int, int]) -> None:
        self.now_us += TURN_US
        for number in order:
            peer = self.peers[number]
            if not peer.is_stopped:
                if peer.hold is None:
                    self._look(peer)
                else:
                    self._lead(peer, peer.hold, delays[number])

    @rule(number=st.integers(0, 2))
    def stop(self, number: int) -> None:
        peer = self.peers[number]
        if not peer.is_stopped:
            peer.is_stopped, peer.stopped_us = True, self.now_us

    @rule(number=st.integers(0, 2))
    def go_on(self, number: int) -> None:
        peer = self.peers[number]
        if peer.is_stopped:
            peer.is_stopped, peer.continued_us = False, self.now_us
            peer.slept_long = self.now_us - peer.stopped_us > LEASE_US

    @rule(number=st.integers(0, 2))
    def cut_off_or_reunite(self, number: int) -> None:
        peer = self.peers[number]
        peer.is_alone, peer.is_cut, peer.reunited_us = not peer.is_alone, True, self.now_us

    @precondition(lambda self: self.store.is_there)
    @rule()
    def store_goes(self) -> None:
        self.store.is_there = False
        for peer in self.peers:
            peer.is_cut = True
            if peer.answer is not None and peer.answer[1] == self.now_us:
                peer.answer = None

    @precondition(lambda self: not self.store.is_there)
    @rule()
    def store_returns(self) -> None:
        self.store.is_there = True

    @precondition(lambda self: not self.store.is_there and sum(peer.hold is not None for peer in self.peers) <= 1)
    @rule()
    def store_returns_empty(self) -> None:
        self.store = StoreModel()

    @invariant()
    def at_most_one_greets(self) -> None:
        greeting = [
            p for p in self.peers if p.hold is not None and not p.is_stopped and copy.copy(p.hold).may_greet(self.now_us)
        ]
        assert len(greeting) <= 1, greeting

    @invariant()
    def whoever_slept_is_silent_until_confirmed(self) -> None:
        for peer in self.peers:
            if peer.hold is None or peer.is_stopped or not peer.slept_long or peer.confirmed_us >= peer.continued_us:
                continue
            assert not copy.copy(peer.hold).may_speak(self.now_us), peer

    def teardown(self) -> None:
        self.store.is_there = True
        for number, peer in enumerate(self.peers):
            self.go_on(number)
            if peer.is_alone:
                self.cut_off_or_reunite(number)
        self.turns(40, [0, 1, 2], (0, 0, 0))
        (leader,) = [peer for peer in self.peers if peer.hold is not None]
        assert leader.hold is not None and leader.hold.may_greet(self.now_us)
        assert not self.store.is_empty

    def _look(self, peer: Peer) -> None:
        if peer.is_cut or not self._reaches_store(peer):
            peer.is_cut = False
            peer.watch.missed()
        if not self._reaches_store(peer):
            return
        store = self.store
        if not peer.watch.saw(self.now_us, store.epoch, self.now_us < store.held_until_us, store.is_empty):
            return
        for other in self.peers:  # a leader that could renew is left in peace
            is_well = other.hold is not None and not other.is_stopped and not other.is_alone
            is_well = is_well and self.now_us - max(other.continued_us, other.reunited_us) > LEASE_US
            assert not is_well or other.epoch.number < store.epoch.number, "a needless takeover"
        peer.epoch = store.epoch = next_epoch(store.epoch, max(p.epoch.number for p in self.peers), (), peer.instance)
        store.held_until_us = self.now_us + LEASE_US
        peer.hold = LeaseHold(LEASE_US, self.now_us)
        peer.slept_long, peer.next_ask_us = False, self.now_us

    def _lead(self, peer: Peer, hold: LeaseHold, delay: int) -> None:
        hold.may_speak(self.now_us)
        if peer.answer is None and self.now_us >= peer.next_ask_us:
            peer.next_ask_us = self.now_us + RENEW_TURNS * TURN_US
            if self._reaches_store(peer):
                peer.answer = (self.now_us + delay * TURN_US, self.now_us, self._renew(peer.epoch))
        if peer.answer is None or peer.answer[0] > self.now_us:
            return
        (_, done_us, confirms), peer.answer = peer.answer, None
        if not confirms:
            peer.stand_by()
            return
        hold.confirmed(done_us)
        peer.confirmed_us = done_us
        if self._reaches_store(peer) and self.store.epoch == peer.epoch:
            self.store.is_empty = False

    def _reaches_store(self, peer: Peer) -> bool:
        return self.store.is_there and not peer.is_alone

    def _renew(self, epoch: Epoch) -> bool:
        if not epoch.supersedes(self.store.epoch):
            return False
        self.store.epoch = epoch
        self.store.held_until_us = self.now_us + LEASE_US
        return True


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
