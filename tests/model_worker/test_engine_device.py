"""An engine whose model's logits lie on a device of their own says what it says with logits on the host: children of one prompt, drafts, failures
and log-probabilities in one batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from engine_driver import DRAFTS_MAX, MAX_LEN, PROMPT, VOCAB, EngineDriver, Row, entry
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.models.deterministic import DeterministicLM, deterministic_config
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts
from tessera.values.batch import ScheduledBatchOutput
from tessera.values.sampling import SamplingParams
from tests.model_worker.far_device import FAR, counting, far

__all__ = ["far"]

GREEDY, HOT = SamplingParams(seed=0, temperature=0.0), SamplingParams(seed=5, temperature=30.0)
CHILDREN = [SamplingParams(seed=seed, temperature=30.0) for seed in (2**63 - 1, 8, 9, 10)]
KINDS = [
    GREEDY,
    SamplingParams(seed=3, temperature=30.0, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=4, temperature=30.0, top_k=9, top_p=0.9),
    SamplingParams(seed=6, temperature=30.0, allowed_token_ids=(4, 5, 6)),
]
NAN_AFTER, FATAL = 96, 95


class PlacedLM(DeterministicLM):
    """Its logits, of all sizes, lie on `device`. Behind NAN_AFTER they are NaN; a pass with FATAL raises."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(deterministic_config(VOCAB, MAX_LEN))
        self.device = device

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        if (batch.input_ids == FATAL).any():
            raise RuntimeError("no such token")
        logits = super().forward(batch, kv)
        last = batch.input_ids[batch.logits_rows].long()
        logits += torch.sin(torch.arange(VOCAB) * (1.0 + last[:, None]))
        logits[last == NAN_AFTER, 3] = torch.nan
        return logits.to(self.device)


@dataclass
class Guesses:
    """Proposes the same for every slot, as far as there is room."""

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        token_ids = np.tile(np.array([4, 5, NAN_AFTER], np.int32), (len(slots), 1))
        token_ids[np.arange(DRAFTS_MAX) >= rooms[:, None]] = -1
        return Drafts(np.minimum(rooms, DRAFTS_MAX), token_ids)


def said(
    device: torch.device, asked: Sequence[SamplingParams], prompt: list[int], *, drafts: bool, rejects: bool
) -> list[object]:
    """All that a run of six steps says."""
    driver = EngineDriver(PlacedLM(device), proposer=Guesses() if drafts else None, rejects=rejects)
    length = len(prompt)
    entries = [
        entry(slot, prompt if slot else PROMPT, [5 * slot + block for block in range(5)], f"r{slot}", sampling=params)
        for slot, params in enumerate(asked)
    ]
    rows = [Row(slot, length, length) for slot in range(len(asked))]
    outputs = [driver.run(rows, entries)]
    lens = [length + 1] * len(asked)
    for _ in range(4):
        alive = [slot for slot in range(len(asked)) if slot not in {error.row for error in outputs[0].row_errors}]
        room = 1 + DRAFTS_MAX if drafts else 1
        rows = [Row(slot, room, lens[slot] + room - 1) for slot in alive]
        outputs.append(driver.run(rows, num_decodes=len(rows), seen_step=driver.step))
        for slot, count in zip(alive, outputs[-1].token_counts.tolist(), strict=True):
            lens[slot] += count
    return [part for output in outputs for part in parts(output)]


def parts(output: ScheduledBatchOutput) -> list[object]:
    tokens = output.token_counts.tolist(), output.token_ids.tolist(), output.row_errors
    return [tokens, output.logprobs, None if output.prompt_logprobs is None else output.prompt_logprobs.tokens]


@pytest.mark.parametrize("asked", [KINDS, CHILDREN], ids=["kinds", "children"])
@pytest.mark.parametrize("prompt_end", [9, NAN_AFTER, FATAL])
@pytest.mark.parametrize(("drafts", "rejects"), [(False, False), (True, False), (True, True)])
@pytest.mark.usefixtures("far")
def test_an_engine_says_the_same(asked: list[SamplingParams], prompt_end: int, *, drafts: bool, rejects: bool) -> None:
    prompt = [*PROMPT[:-1], prompt_end]
    expected = said(torch.device("cpu"), asked, prompt, drafts=drafts, rejects=rejects)
    assert said(FAR, asked, prompt, drafts=drafts, rejects=rejects) == expected


@pytest.mark.usefixtures("far")
def test_a_step_of_greedy_rows_takes_three_numbers_of_a_row_to_the_host() -> None:
    driver = EngineDriver(PlacedLM(FAR))
    with counting() as copied:
        driver.run(
            [Row(slot, 6, 6) for slot in range(4)],
            [entry(slot, PROMPT, [2 * slot, 2 * slot + 1], f"r{slot}") for slot in range(4)],
        )
    assert sum(copied) == 3 * 4 + 1
