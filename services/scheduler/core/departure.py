"""How the sequences of a worker that is about to end come to the others: a few at a time, so that none of them pauses for long."""

from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence


def move_away(lifecycle: Lifecycle, leaving: Replica) -> None:
    """Send back as many sequences of `leaving` as the other workers can take in and compute in about one step; call it before each step of
    `leaving`, which goes on with the rest. A sequence that fits nowhere else stays until its worker ends."""
    others = [replica for replica in lifecycle.fleet if replica.takes_requests]
    if lifecycle.waiting or not others:  # whoever waits comes first: more would only wait behind them
        return
    moved: list[Sequence] = []
    tokens_left = sum(min(replica.tokens_max - replica.num_pending_tokens, replica.num_free_tokens) for replica in others)
    seats_left = sum(replica.seats_left for replica in others)
    for sequence in (*leaving.swapped.values(), *leaving.running.values()):
        num_tokens = sequence.ledger.num_tokens
        is_too_much = num_tokens > tokens_left if moved else not _has_room(others, num_tokens)
        if is_too_much or len(moved) == seats_left:
            break
        if any(replica.can_hold(sequence) for replica in others):
            moved.append(sequence)
            tokens_left -= num_tokens
    for sequence in reversed(moved):
        lifecycle.send_back(sequence)


def _has_room(replicas: list[Replica], num_tokens: int) -> bool:
    """Whether one of these workers has blocks for so many tokens, and no prompt to compute that is not scheduled yet."""
    return any(replica.num_free_tokens > num_tokens and not replica.num_pending_tokens for replica in replicas)
