"""The prompt tokens whose log-probabilities a forward pass is to give, and where it computes the logits that foretell them."""

from dataclasses import dataclass

import numpy as np

from model_worker.input_batch import Rows
from model_worker.slot_table import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class PromptTargets:
    """P tokens, int64 `[P]` each: `rows` whose they are, in order, `places` of the positions before them among the tokens of the pass."""

    rows: np.ndarray
    places: np.ndarray
    token_ids: np.ndarray


_NOTHING = np.zeros(0, np.int64)


def prompt_targets(rows: Rows, slots: SlotTable, wanting: np.ndarray) -> PromptTargets:
    """Those of the rows of a pass whose slots want them (`wanting`, bool `[num_slots]`)."""
    if not wanting[rows.slots].any():
        return PromptTargets(_NOTHING, _NOTHING, _NOTHING)
    counts = rows.num_scheduled_tokens
    starts = rows.context_lens - counts
    lens = np.maximum(np.minimum(rows.context_lens, slots.prompt_lens[rows.slots] - 1) - starts, 0)
    lens[~wanting[rows.slots]] = 0
    row_of = np.repeat(np.arange(len(lens)), lens)
    offsets = np.arange(len(row_of)) - np.repeat(np.cumsum(lens) - lens, lens)
    return PromptTargets(
        rows=row_of,
        places=(np.cumsum(counts) - counts)[row_of] + offsets,
        token_ids=slots.token_ids[rows.slots[row_of], starts[row_of] + offsets + 1].astype(np.int64),
    )
