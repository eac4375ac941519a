"""How drafts are drawn from the logits of whoever makes them."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from model_worker.sample_rows import SampleRows
from model_worker.sampler import Sampler
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable


class DraftDraws:
    """Draws as the model's own token will be drawn: the same rules, the same noise. So a draft is the model's token wherever the logits are alike
    enough, greedy or drawn, and with the same logits always."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._sampler = Sampler(eos_token_ids)

    def draw(self, logits: Tensor, slots: np.ndarray, ahead: int, table: SlotTable, sampling: SamplingTable) -> np.ndarray:
        """The token `ahead` places behind the known ids of each of `slots`, int32 `[R]`, of logits `[R, vocab_size]`; -1 where there is none. The
        drafts in front of it lie in the table."""
        history_lens = table.num_ids[slots] + ahead
        everyone = np.ones(len(slots), np.bool_)
        rows = SampleRows(sampling, table.token_ids, slots, table.prompt_lens[slots], history_lens, everyone)
        token_ids, failures = self._sampler.draw(logits.cpu().numpy(), rows)
        token_ids[list(failures)] = -1
        return token_ids
