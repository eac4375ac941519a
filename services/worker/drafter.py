"""From the configuration of speculation to whoever drafts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from model_worker.engine import SLOTS_PER_SEQUENCE
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.interface import Kernels
from model_worker.kv_pool import IN_FLOAT32, KVPool, KVStore
from model_worker.kv_shape import KVShape
from model_worker.models.causal_lm import CausalLM
from model_worker.placement import ON_CPU, Placement
from model_worker.ranks.crew import Crew
from model_worker.ranks.leading import LeadingHead
from model_worker.sampler import Sampler
from model_worker.speculation.draft_draws import DraftDraws, FreeDraws
from model_worker.speculation.draft_head import DraftHead
from model_worker.speculation.draft_model import DraftModelProposer
from model_worker.speculation.head_proposer import HeadProposer
from model_worker.speculation.ngram import NgramProposer
from model_worker.speculation.proposer import Proposer
from model_worker.weights.errors import DraftMismatch, ModelUnsupported
from model_worker.weights.model_source import ModelSource
from model_worker.weights.open_model import load_eagle_head, load_model, load_mtp_head, open_model
from services.worker.config import SpeculationConfig
from tessera.values.config import ConfigError
from tessera.values.model import ModelInfo


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """The model that is served, or a rank's part of it, with the files that it is from (None: it is from none). For whoever drafts for it: the
    kernels of what all ranks of this worker run, and of what one rank runs alone. `store`: how its KV pools keep numbers."""

    model: CausalLM
    info: ModelInfo
    source: ModelSource | None
    kernels: Kernels
    kernels_alone: Kernels
    store: KVStore = IN_FLOAT32


@dataclass(frozen=True, slots=True, eq=False)
class Drafter:
    """Who drafts, before there is a KV pool: `kv_shape` is what it keeps of a position in a pool paired with the model's, None for nothing.
    `run` computes one dummy position. `is_spread`: every rank of the model has a part of it, and keeps `kv_shape`. `taps`: see `Follower`."""

    kv_shape: KVShape | None
    make: Callable[[KVPool | None], Proposer]
    run: Callable[[KVPool], None] | None = None
    is_spread: bool = False
    taps: tuple[int, ...] | None = None

    def proposer(self, kv: KVPool) -> Proposer:
        """The proposer, on the pool paired with the model's."""
        return self.make(kv.paired)

    def find_tiles(self, kv: KVPool) -> None:
        """Let the kernels meet its shapes; writes to the null block. Raises NotInvariant."""
        if self.run is not None and kv.paired is not None:
            self.run(kv.paired)


def load_drafter(config: SpeculationConfig, max_num_seqs: int, loaded: LoadedModel, crew: Crew | None = None) -> Drafter | None:
    """Whoever `config` names, for a model that is loaded; None where speculation is off. `crew`: the other ranks, which load their parts of a
    head by themselves. Raises ModelError or ConfigError where that cannot be."""
    if not config.num_speculative_tokens:
        return None
    if config.proposer == "ngram":
        return Drafter(None, lambda _: NgramProposer(config.ngram_min, config.ngram_max))
    head = load_head(config, loaded)
    draws = (FreeDraws if config.rejects else DraftDraws)(Sampler(loaded.info.eos_token_ids), loaded.kernels.best_tokens)
    if head is None:
        assert config.draft_model is not None
        return model_drafter(_draft_model(config.draft_model, loaded), max_num_seqs, draws)
    return head_drafter(head if crew is None else LeadingHead(head, crew), max_num_seqs, draws, loaded.kernels.placement)


def load_head(config: SpeculationConfig, loaded: LoadedModel) -> DraftHead | None:
    """The layers that draft on the model's hidden states, or this rank's part of them; None for another proposer. Raises ModelError."""
    if not config.num_speculative_tokens or config.proposer == "ngram":
        return None
    if loaded.source is None:
        raise ModelUnsupported(f"{loaded.info.name} computes nothing that proposer {config.proposer} could build on: use ngram")
    match config.proposer:
        case "mtp":
            return load_mtp_head(loaded.source, loaded.kernels, loaded.model)
        case "eagle":
            assert config.draft_model is not None
            return load_eagle_head(config.draft_model, loaded.kernels, loaded.model, loaded.info.name)
        case _:
            return None


def head_drafter(head: DraftHead, max_num_seqs: int, draws: DraftDraws, placement: Placement = ON_CPU) -> Drafter:
    """Drafts from a head whose weights are loaded, at `placement`."""

    def make(kv: KVPool | None) -> Proposer:
        assert kv is not None
        return HeadProposer(head, kv, SLOTS_PER_SEQUENCE * max_num_seqs, draws, placement)

    @torch.inference_mode()
    def run(kv: KVPool) -> None:
        one = np.array([1])
        hidden = head.enter(torch.zeros(1, head.tapped_size, device=placement.device, dtype=placement.dtype))
        layers = head.forward(build_dummy_batch(one, one, 1, kv), hidden, hidden.expand(head.num_layers - 1, 1, -1), kv)
        for index, layer in enumerate(layers):
            head.logits(layer, index)

    return Drafter(head.kv_shape, make, run, is_spread=True, taps=head.taps)


def model_drafter(model: CausalLM, max_num_seqs: int, draws: DraftDraws) -> Drafter:
    """Drafts from a model that is loaded."""

    def make(kv: KVPool | None) -> Proposer:
        assert kv is not None
        return DraftModelProposer(model, kv, SLOTS_PER_SEQUENCE * max_num_seqs, draws)

    def run(kv: KVPool) -> None:
        one = np.array([1])
        model.forward(build_dummy_batch(one, one, 1, kv), kv)

    return Drafter(model.config.kv_shape, make, run)


def _draft_model(name: str, loaded: LoadedModel) -> CausalLM:
    """Load what is to draft for a model. Raises DraftMismatch and ConfigError before it reads weights, and other ModelErrors."""
    source, target = open_model(name), loaded.info
    draft = source.info
    if (draft.vocab_size, draft.tokenizer_digest) != (target.vocab_size, target.tokenizer_digest):
        raise DraftMismatch(
            f"{draft.name} cannot draft for {target.name}: it has {draft.vocab_size} token ids of tokenizer "
            f"{draft.tokenizer_digest[:12]}, the model {target.vocab_size} of {target.tokenizer_digest[:12]}"
        )
    if draft.max_model_len < target.max_model_len:
        raise DraftMismatch(
            f"{draft.name} was trained for {draft.max_model_len} tokens and cannot draft for {target.name} with its "
            f"{target.max_model_len}: lower max_model_len"
        )
    if not loaded.kernels_alone.can_share_cache(source.config):
        raise ConfigError(
            f"{draft.name} cannot draft for {target.name} with kernels cpu, which have no attention over windows or latents, and both "
            f"models' KV lies side by side: use kernels torch, or another draft_model"
        )
    return load_model(source, loaded.kernels_alone)
