"""Draws from logits where they lie. On the host that is the `Sampler`'s work. On a device a row gives the same token, and little of it leaves the
device: of a greedy row its best token; of one that is drawn without a filter those that may win its race, with a filter those that it may
leave; of others all logits, which the `Sampler` gets."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_worker.device_candidates import drawn_there
from model_worker.device_race import in_parts
from model_worker.draws import Draws
from model_worker.held_logits import EVERY_ROW, HeldLogits
from model_worker.kernels.best_tokens import BestTokens, FindBest, first_best
from model_worker.sample_rows import SampleRows
from model_worker.sampler import NO_TOKEN, NOT_FINITE, Sampler
from model_worker.sampling_table import KINDS, PLAIN
from model_worker.speculation.rejection import RejectionSampler

_UNRULED = {number: kind.filter for number, kind in enumerate(KINDS) if kind.is_drawn and not kind.is_ruled}
"""Kinds of rows that are drawn from the model's own logits, and their filters."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """`token_ids` and `failures` as of `Sampled`; `held`: the logits that the host has now."""

    token_ids: np.ndarray
    failures: dict[int, str]
    held: HeldLogits

    def revise(self, rejection: RejectionSampler, rows: SampleRows, drafts: np.ndarray, odds: np.ndarray | None) -> None:
        """`RejectionSampler.revise` of `token_ids`; the host holds the logits of all rows with a draft."""
        held = self.held.rows
        token_ids = self.token_ids[held]
        rejection.revise(token_ids, self.held.values, rows.only(held), drafts[held], None if odds is None else odds[held])
        self.token_ids[held] = token_ids


class DeviceSampler:
    """Gives every row the token that `sampler` gives it; `find_best` is the kernels' own. Called by one thread."""

    def __init__(self, sampler: Sampler, find_best: FindBest = first_best) -> None:
        self._sampler = sampler
        self._find_best = find_best

    def draw(self, logits: Tensor, rows: SampleRows, wanted: np.ndarray | None = None) -> Drawn:
        """One token per row of `logits`, float32 `[N, vocab]`, not mutated. Of rows that are `wanted` (bool `[N]`; None: none is) and have a token
        the host holds the logits afterwards."""
        if logits.device.type == "cpu":
            values = logits.numpy()
            return Drawn(*self._sampler.draw(values, rows), HeldLogits(EVERY_ROW, values))
        return self.draw_there(logits, rows, wanted)

    def draw_there(self, logits: Tensor, rows: SampleRows, wanted: np.ndarray | None = None) -> Drawn:
        """`draw` of logits on a device of their own."""
        token_ids, best, is_finite = _scan(self._find_best(logits))
        samples = rows.samples & is_finite
        token_ids[~samples] = NO_TOKEN
        failures = {int(row): NOT_FINITE for row in np.flatnonzero(~is_finite)}
        kinds = rows.table.kinds[rows.slots]
        is_left = samples & (kinds != PLAIN)
        if wanted is not None:
            is_left |= samples & wanted
            kinds = np.where(wanted, PLAIN, kinds)
        for kind, by in _UNRULED.items():
            some = np.flatnonzero(is_left & (kinds == kind))
            if len(some):
                token_ids[some] = drawn_there(logits, some, best[some], Draws.of(rows, some), by)
                is_left[some] = token_ids[some] == NO_TOKEN
        left = np.flatnonzero(is_left)
        held = HeldLogits(left, taken(logits, left))
        if len(left):
            token_ids[left], others = self._sampler.draw(held.values, rows.only(left))
            failures.update({int(left[row]): text for row, text in others.items()})
        return Drawn(token_ids, failures, held)


def _scan(best: BestTokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """On the host: token ids int32, logits float32, is_finite bool."""
    bits = best.logits.view(torch.int32)
    found = torch.stack((best.token_ids.int(), bits, best.is_finite.int())).cpu().numpy()
    return found[0], found[1].view(np.float32), found[2].astype(np.bool_)


def taken(logits: Tensor, rows: np.ndarray) -> np.ndarray:
    """Copies on the host of some rows of `logits`, by number (int64)."""
    values = np.empty((len(rows), logits.shape[1]), np.float32)
    for some, part in in_parts(logits, rows):
        torch.from_numpy(values[some[0] : some[-1] + 1]).copy_(part)
    return values
