"""When a standby may lead, and when a leader may speak: rules over what was seen of the lease and of the clock.

Times are microseconds on a clock that goes on while this process is stopped and while the machine sleeps. The lease only saves
takeovers that nobody needs; what an earlier leader does after one is refused by its epoch.
"""

from tessera.values.identity import Epoch


class LeaseWatch:
    """What a standby has seen of the lease, and whether it may lead. A leader that lives renews its lease several times in a lease
    time, also in a store that came back without it: that is what the two waits are for."""

    __slots__ = ("_away", "_empty_since_us", "_lease_us", "_returned_us", "_seen_us", "mine")

    def __init__(self, lease_us: int, mine: Epoch | None = None) -> None:
        """`mine` is the epoch under which this process has led until now; its lease keeps nobody waiting."""
        assert lease_us > 0
        self._lease_us = lease_us
        self.mine = mine
        self._seen_us: int | None = None  # the last look that was answered
        self._away = False  # the last look was not answered
        self._returned_us: int | None = None  # the store was away, or this process was, before
        self._empty_since_us: int | None = None

    def missed(self) -> None:
        """The store did not answer: what it holds may be older than what it held, and its leader could not renew."""
        self._away = True

    def saw(self, now_us: int, epoch: Epoch, is_held: bool, is_empty: bool) -> bool:
        """What the store said: the stored epoch, whether its lease runs, whether the store is empty. Whether this standby may lead.

        A free lease is taken at once; one lease time after its return from a store that was away (or that nobody has looked at for so
        long); in an empty store two lease times after it was first seen empty.
        """
        if self._away or (self._seen_us is not None and now_us - self._seen_us > self._lease_us):
            self._returned_us, self._empty_since_us = now_us, None
        self._seen_us, self._away = now_us, False
        if not is_empty:
            self._empty_since_us = None
        elif self._empty_since_us is None:
            self._empty_since_us = now_us
        if epoch == self.mine:
            return True
        if is_held:
            return False
        if self._empty_since_us is not None:
            return now_us - self._empty_since_us >= 2 * self._lease_us
        return self._returned_us is None or now_us - self._returned_us >= self._lease_us


class LeaseHold:
    """A leader's right to speak under its epoch, which was asked for at `asked_us`.

    When more than a lease time lies between two looks at the clock, this process was stopped, and another may lead since: it says nothing
    until somebody who would know of that, asked after the gap was seen, has confirmed its epoch.
    """

    __slots__ = ("_confirmed_us", "_doubted_us", "_lease_us", "_looked_us")

    def __init__(self, lease_us: int, asked_us: int) -> None:
        assert lease_us > 0
        self._lease_us = lease_us
        self._looked_us = asked_us
        self._confirmed_us = asked_us  # when the last answered confirmation was asked for
        self._doubted_us: int | None = None  # when a gap was seen that nobody has confirmed since

    def may_speak(self, now_us: int) -> bool:
        """Look at the clock, and whether anything may be sent now. Ask before each sending, whatever else has looked."""
        if now_us - self._looked_us > self._lease_us:
            self._doubted_us = now_us
        self._looked_us = max(now_us, self._looked_us)
        return self._doubted_us is None

    def confirmed(self, asked_us: int) -> None:
        """A store has renewed this epoch's lease, or a worker has named it as the highest, both asked at `asked_us`."""
        self._confirmed_us = max(asked_us, self._confirmed_us)
        if self._doubted_us is not None and asked_us >= self._doubted_us:
            self._doubted_us = None

    def may_greet(self, now_us: int) -> bool:
        """Whether a gateway's Hello may be answered: the epoch was confirmed within the last lease time."""
        return self.may_speak(now_us) and now_us - self._confirmed_us < self._lease_us


def next_epoch(stored: Epoch, told_number: int, held: tuple[Epoch, ...], instance: bytes) -> Epoch:
    """The epoch to take: above the stored one, that of every worker reached (`held`), and any number that was told of."""
    return Epoch(1 + max(stored.number, told_number, *(epoch.number for epoch in held)), instance)
