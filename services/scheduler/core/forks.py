"""Sequences that share the prompt of another (n > 1): they wait for it to be computed, and then for no part of it to be computed twice.

An optimisation: without it each of them would compute the prompt itself, with the same tokens.
"""

import numpy as np

from services.scheduler.core.request_book import RequestBook
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus


def parent_of(book: RequestBook, child: Sequence) -> Sequence | None:
    """The live request that a sequence is a fork of: one of the same prompt, tenant and client, and no fork itself, so that nobody waits for
    himself. None as well where it is gone."""
    submission = child.submission
    if submission.fork_of in (b"", submission.request_id):
        return None
    parent = book.get(submission.fork_of)
    if parent is None or parent.finish is not None:
        return None
    own = parent.submission
    if own.fork_of not in (b"", own.request_id):
        return None
    is_same = (own.principal, own.cache_salt) == (submission.principal, submission.cache_salt)
    return parent if is_same and np.array_equal(own.prompt_token_ids, submission.prompt_token_ids) else None


def is_awaited(parent: Sequence) -> bool:
    """Whether forks of a live request wait for its prompt: while it waits for its first turn, and then until its first token has come. One
    that was sent back, swapped out or lost its worker may take long: nobody waits for it."""
    if parent.status is SequenceStatus.WAITING:
        return parent.attempt == 0
    return parent.status is SequenceStatus.RUNNING and parent.output_len == 0


def fork_len(parent: Sequence, child: Sequence) -> int:
    """How many positions of its running parent's KV a sequence can begin with: the prompt but for its last position, whose row samples the
    first token. 0: none, the parent has not computed them, or the child has to compute its own (see `Sequence.hit_token_ids`)."""
    shared_len = min(child.ledger.prompt_len, len(child.hit_token_ids)) - 1
    if not shared_len:
        return 0
    return shared_len if parent.status is SequenceStatus.RUNNING and parent.ledger.computed_len > shared_len else 0
