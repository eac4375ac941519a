"""The race of `model_worker.race` where the logits are: who may win is found there, a few tokens of a row, and only these go to the host, which decides
among them in float64. So the winner is the one that the host alone would find, whatever the device rounds off."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from model_worker.device_noise import device_words
from model_worker.draws import Draws
from model_worker.race import MARGIN, Contenders, winners

_ELEMENTS_MAX = 1 << 22
"""Of logits that are worked on at a time: their words and what these are made of take some 200 MiB."""


def race_there(logits: Tensor, rows: np.ndarray, best: np.ndarray, draws: Draws) -> np.ndarray:
    """The token of each of R `rows` (int64, ascending) of `logits`, float32 `[N, vocab]` on their device, int32 `[R]`. The rows are finite and have no
    filter; `best` float32 `[R]`, their highest logits; `draws` are theirs."""
    parts = [_contenders(part, best[some], draws.only(some)) for some, part in in_parts(logits, rows)]
    tokens: np.ndarray = winners(parts, best, draws.temperatures).astype(np.int32)
    return tokens


def rehearse(logits: Tensor) -> None:
    """Take the memory that drawing from `logits`, float32 `[N, vocab]`, takes at its peak; whatever they are, nothing comes of it."""
    everyone = np.arange(len(logits))
    nought, ones, zeros = np.zeros(len(logits), np.uint64), np.ones(len(logits)), np.zeros(len(logits))
    draws = Draws(nought, nought, ones, zeros.astype(np.int64), ones, zeros)
    for some, part in in_parts(logits, everyone):
        _contenders(part, part.amax(dim=1).cpu().numpy(), draws.only(some))


def in_parts(logits: Tensor, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Some rows (int64, ascending) of the logits, so many at a time that what is made of them stays small: their places among `rows`, and the
    logits, perhaps the very ones that were given."""
    step = max(1, _ELEMENTS_MAX // logits.shape[1])
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        is_together = some[-1] - some[0] == len(some) - 1
        part = logits[some[0] : some[-1] + 1] if is_together else logits.index_select(0, there(some, logits))
        yield np.arange(first, first + len(some)), part


def there(numbers: np.ndarray, logits: Tensor) -> Tensor:
    """Numbers of the host where the logits are."""
    return torch.from_numpy(numbers).to(logits.device)


def relative(logits: Tensor, best: np.ndarray, temperatures: np.ndarray) -> Tensor:
    """Likelihoods, float32 of the shape of `logits`, `[R, vocab]`: 1 for the best token, whose logit is in `best`. `temperatures` float64 `[R]`."""
    gaps = logits - there(best, logits)[:, None]
    return gaps.div_(there(temperatures.astype(np.float32), logits)[:, None]).exp_()


def _contenders(logits: Tensor, best: np.ndarray, draws: Draws) -> Contenders:
    """As `model_worker.race.contenders`, of whole rows `[R, vocab]`."""
    likelihoods = relative(logits, best, draws.temperatures)
    seeds, output_indices = (there(numbers.view(np.int64), logits) for numbers in (draws.seeds, draws.output_indices))
    words = device_words(seeds, output_indices, logits.shape[1])
    bounds = (words.float() + 0.5).div_(likelihoods)
    promising = bounds.argmin(dim=1, keepdim=True)
    draw = -torch.log1p((words.gather(1, promising).double() + 0.5) * -(2.0**-32))
    reach = draw / likelihoods.gather(1, promising) * (2.0**32 * MARGIN)
    row_of, columns = (bounds <= reach.float()).nonzero().unbind(1)
    bits = logits[row_of, columns].view(torch.int32)
    found = torch.stack((row_of, columns, words[row_of, columns], bits)).cpu().numpy()
    counts = np.bincount(found[0], minlength=len(logits))
    return Contenders(counts, found[1], found[2].astype(np.uint32), found[3].astype(np.int32).view(np.float32))
