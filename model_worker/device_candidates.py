"""What a filter may leave of a row, found where the logits are: the tokens with the highest logits go to the host, which filters them exactly and draws.

That is enough of a row where the last of them is certainly ruled out, whatever the device rounds off; else the row needs all its logits.
"""

import numpy as np
import torch
from torch import Tensor

from model_worker.candidates import Candidates
from model_worker.device_race import in_parts, race_there, relative
from model_worker.draws import Draws
from model_worker.sampler import NO_TOKEN
from model_worker.sampling_table import Filter
from model_worker.token_draw import Narrowed, draw_narrowed, min_p_floors, top_p_reach

_WIDTH = 256
"""Tokens of a row that are looked at."""


def drawn_there(logits: Tensor, rows: np.ndarray, best: np.ndarray, draws: Draws, by: Filter) -> np.ndarray:
    """The token of each of R `rows` (int64, ascending) of `logits`, float32 `[N, vocab]` on their device; int32 `[R]`, NO_TOKEN where that takes
    the whole row. As for `race_there`, but that each row has the filter `by`."""
    if by is Filter.NONE:
        return race_there(logits, rows, best, draws)
    token_ids = np.full(len(rows), NO_TOKEN, np.int32)
    for some, part in in_parts(logits, rows):
        token_ids[some] = _drawn(part, best[some], draws.only(some), by)
    return token_ids


def _drawn(logits: Tensor, best: np.ndarray, draws: Draws, by: Filter) -> np.ndarray:
    vocab_size = logits.shape[1]
    width = min(_WIDTH, vocab_size)
    values, ids = logits.topk(width, dim=1)
    found, token_ids = torch.stack((values.view(torch.int32), ids.int())).cpu().numpy()
    tops, masses = found.view(np.float32), np.zeros(len(best))
    if by is Filter.TOP_P:
        masses = relative(logits, best, draws.temperatures).sum(dim=1, dtype=torch.float64).cpu().numpy()
        needed = top_p_reach(tops, best, draws, masses)
    elif by is Filter.TOP_K:
        kth = tops[np.arange(len(tops)), np.minimum(draws.top_ks, width) - 1]
        needed = np.count_nonzero(tops >= kth[:, None], axis=1)
    else:
        needed = np.count_nonzero(tops >= min_p_floors(best, draws.temperatures, draws.min_ps)[:, None], axis=1)
    tokens = np.full(len(best), NO_TOKEN, np.int32)
    is_enough = needed < width if width < vocab_size else needed <= width
    enough = np.flatnonzero(is_enough)
    if len(enough):
        few = slice(int(needed[enough].max()))
        ids_there = token_ids[enough, few].astype(np.int64)
        order = ids_there.argsort(axis=1)
        candidates = Candidates(np.take_along_axis(ids_there, order, 1), np.take_along_axis(tops[enough, few], order, 1))
        narrowed = Narrowed(enough, draws.only(enough), best[enough], candidates, masses[enough])
        tokens[enough] = draw_narrowed(narrowed, vocab_size)
    return tokens
