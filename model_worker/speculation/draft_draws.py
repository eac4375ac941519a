"""How drafts are drawn from the logits of whoever makes them."""

import numpy as np
from torch import Tensor

from model_worker.device_sampler import DeviceSampler
from model_worker.kernels.best_tokens import FindBest, first_best
from model_worker.noise import uniforms
from model_worker.sample_rows import SampleRows
from model_worker.sampler import NO_TOKEN, Sampler
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.rejection import DRAFT, drawn_at


class DraftDraws:
    """For coupled verification: draws as the model's own token will be drawn, with the same rules and the same noise. So a draft is the model's token
    wherever the logits are alike enough, greedy or drawn, and with the same logits always."""

    def __init__(self, sampler: Sampler, find_best: FindBest = first_best) -> None:
        """`find_best`: that of the kernels that compute the logits."""
        self._sampler = DeviceSampler(sampler, find_best)
        self._host_sampler = sampler

    def draw(
        self, logits: Tensor, slots: np.ndarray, ahead: int, table: SlotTable, sampling: SamplingTable
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The token `ahead` places behind the known ids of each of `slots`, int32 `[R]`, of logits `[R, vocab_size]`; NO_TOKEN where there is none.
        The drafts in front of it lie in the table. And the `odds` of `Drafts`, float32 `[R, vocab_size]`."""
        return self._sampler.draw(logits, _rows(slots, ahead, table, sampling)).token_ids, None


class FreeDraws(DraftDraws):
    """For rejection sampling: draws with noise that nothing else has."""

    def draw(
        self, logits: Tensor, slots: np.ndarray, ahead: int, table: SlotTable, sampling: SamplingTable
    ) -> tuple[np.ndarray, np.ndarray | None]:
        values, rows = logits.cpu().numpy(), _rows(slots, ahead, table, sampling)
        token_ids, _ = self._host_sampler.draw(values, rows)  # the best ones, and where there is none
        odds = np.zeros(values.shape, np.float32)
        drawn = np.flatnonzero((token_ids != NO_TOKEN) & (sampling.temperatures[slots] > 0))
        if len(drawn):
            part = rows.only(drawn)
            odds[drawn] = self._host_sampler.probabilities(values[drawn], part)
            places = uniforms(sampling.seeds[part.slots], part.output_indices.astype(np.uint64), DRAFT)
            token_ids[drawn] = drawn_at(odds[drawn].astype(np.float64), places)
        return token_ids, odds


def _rows(slots: np.ndarray, ahead: int, table: SlotTable, sampling: SamplingTable) -> SampleRows:
    everyone = np.ones(len(slots), np.bool_)
    return SampleRows(sampling, table.token_ids, slots, table.prompt_lens[slots], table.num_ids[slots] + ahead, everyone)
