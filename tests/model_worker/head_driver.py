"""An engine whose drafts come from a head on its model's hidden states, beside the same head in plain torch."""

from collections.abc import Sequence

import numpy as np
from engine_driver import DRAFTS_MAX, EngineDriver

from model_worker.models.causal_lm import CausalLM
from model_worker.sampler import Sampler
from model_worker.speculation.draft_draws import DraftDraws
from model_worker.speculation.draft_head import DraftHead
from model_worker.speculation.head_proposer import HeadProposer
from tests.parity.head_reference import HeadReference, drafts_in_plain_torch


class HeadDriver(EngineDriver):
    """`layers` are those of `head` in plain torch."""

    def __init__(self, model: CausalLM, head: DraftHead, layers: Sequence[HeadReference]) -> None:
        self.head, self.layers = head, layers
        draws = DraftDraws(Sampler(()))
        super().__init__(model, paired=head.kv_shape, make=lambda kv: HeadProposer(head, kv, 8, draws))

    def expected(self, slot: int = 0, count: int = DRAFTS_MAX) -> list[int]:
        """The drafts behind what a slot holds, in plain torch."""
        return drafts_in_plain_torch(self.layers, self.ids(slot), count)

    def proposed(self, slot: int = 0, count: int = DRAFTS_MAX) -> list[int]:
        """What the proposer would propose now."""
        drafts = self.engine._propose(np.array([slot]), np.array([count]))
        return drafts.token_ids[0, : drafts.counts[0]].tolist()

    def ids(self, slot: int = 0) -> list[int]:
        """What a slot holds."""
        return next(report.token_ids.tolist() for report in self.engine.report(1).slots if report.slot == slot)
