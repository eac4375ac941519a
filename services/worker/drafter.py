"""From the configuration of speculation to whoever drafts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from model_worker.engine import SLOTS_PER_SEQUENCE
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.interface import Kernels
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.models.causal_lm import CausalLM
from model_worker.sampler import Sampler
from model_worker.speculation.draft_draws import DraftDraws, FreeDraws
from model_worker.speculation.draft_head import DraftHead
from model_worker.speculation.head_proposer import HeadProposer
from model_worker.speculation.ngram import NgramProposer
from model_worker.speculation.proposer import Proposer
from model_worker.weights.errors import ModelUnsupported
from model_worker.weights.model_source import ModelSource
from model_worker.weights.open_model import load_mtp_head
from services.worker.config import SpeculationConfig
from tessera.values.model import ModelInfo


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """The model that is served, with the files that it is from (None: it is from none) and the kernels that it runs on."""

    model: CausalLM
    info: ModelInfo
    source: ModelSource | None
    kernels: Kernels


@dataclass(frozen=True, slots=True, eq=False)
class Drafter:
    """Who drafts, before there is a KV pool: `kv_shape` is what it keeps of a position in a pool paired with the model's, None for nothing.
    `run` computes one dummy position."""

    kv_shape: KVShape | None
    make: Callable[[KVPool | None], Proposer]
    run: Callable[[KVPool], None] | None = None

    def proposer(self, kv: KVPool) -> Proposer:
        """The proposer, on the pool paired with the model's."""
        return self.make(kv.paired)

    def find_tiles(self, kv: KVPool) -> None:
        """Let the kernels meet its shapes, and leave no trace in the pool. Raises NotInvariant."""
        if self.run is not None and kv.paired is not None:
            self.run(kv.paired)
            kv.zero_blocks(np.array([kv.null_block]))


def load_drafter(config: SpeculationConfig, max_num_seqs: int, loaded: LoadedModel) -> Drafter | None:
    """Whoever `config` names, for a model that is loaded; None where speculation is off. Raises ModelError where that cannot be."""
    if not config.num_speculative_tokens:
        return None
    if config.proposer == "ngram":
        return Drafter(None, lambda _: NgramProposer(config.ngram_min, config.ngram_max))
    if loaded.source is None:
        raise ModelUnsupported(f"{loaded.info.name} computes nothing that proposer {config.proposer} could build on: use ngram")
    draws = (FreeDraws if config.rejects else DraftDraws)(Sampler(loaded.info.eos_token_ids))
    assert config.proposer == "mtp", "the config knows no other"
    return head_drafter(load_mtp_head(loaded.source, loaded.kernels, loaded.model), max_num_seqs, draws)


def head_drafter(head: DraftHead, max_num_seqs: int, draws: DraftDraws) -> Drafter:
    """Drafts from a head whose weights are loaded."""

    def make(kv: KVPool | None) -> Proposer:
        assert kv is not None
        return HeadProposer(head, kv, SLOTS_PER_SEQUENCE * max_num_seqs, draws)

    @torch.inference_mode()
    def run(kv: KVPool) -> None:
        one = np.array([1])
        hidden = torch.zeros(1, head.hidden_size)
        layers = head.forward(build_dummy_batch(one, one, 1, kv), hidden, hidden.expand(head.num_layers - 1, 1, -1), kv)
        for index, layer in enumerate(layers):
            head.logits(layer, index)

    return Drafter(head.kv_shape, make, run)
