"""Drafts from layers on top of a model's hidden states, all of it on AITER's real Triton kernels, against the torch backend in float32."""

from dataclasses import replace

import torch
from torch import Tensor

from model_worker.engine import Engine
from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.triton_backend import AiterTritonKernels
from model_worker.kernels.interface import Kernels
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.layers.decoder import Decoder
from model_worker.models.mtp_head import MtpHead
from model_worker.placement import Placement
from model_worker.sampler import Sampler
from model_worker.speculation.draft_draws import DraftDraws
from model_worker.speculation.head_proposer import HeadProposer
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tests.aiter.model_pairs import BLOCK, FORCED, MAX_LEN, PROMPT, round_weights
from tests.aiter.model_shapes import DEEPSEEK_V3
from tests.aiter.test_triton_models import BOUND
from tests.model_worker.engine_driver import EngineDriver, Row, entry
from tests.model_worker.random_llama import build, fill

SHAPE = replace(DEEPSEEK_V3, num_mtp_layers=1)


class MtpDriver(EngineDriver):
    """An engine that drafts by multi-token prediction, and the logits of every draft."""

    def __init__(self, kernels: Kernels) -> None:
        model = build(SHAPE, kernels)
        assert isinstance(model, Decoder)
        with kernels.placement.in_force():
            head = MtpHead(SHAPE, kernels, model, given=())
        fill(head.slots())
        round_weights(model.slots() | head.slots())
        self.model, self.step, self.logits = model, 0, []
        self.pool = kv = KVPool.of_shape(SHAPE.kv_shape, 4, BLOCK, kernels.kv_store(), head.kv_shape)
        assert kv.paired is not None
        self._watch(head)
        info = ModelInfo("m", SHAPE.architecture, SHAPE.vocab_size, MAX_LEN, (), None, "", "")
        geometry = KVGeometry(4, BLOCK, kv.bytes_per_token, kv.geometry.kv_format, 0)
        limits = WorkerLimits(max_num_seqs=2, max_num_batched_tokens=32, num_speculative_tokens=2)
        proposer = HeadProposer(head, kv.paired, 8, DraftDraws(Sampler(())), kernels.placement)
        self.engine = Engine(model, kv, WorkerDescription(b"b" * 16, info, geometry, limits), proposer)

    def _watch(self, head: MtpHead) -> None:
        logits = head.logits

        def watched(hidden: Tensor, layer: int) -> Tensor:
            self.logits.append(logits(hidden, layer))
            return self.logits[-1]

        head.logits = watched  # type: ignore[method-assign]


def draft_logits(kernels: Kernels) -> Tensor:
    """Of two drafts."""
    driver = MtpDriver(kernels)
    driver.run([Row(0, 4, 4)], [entry(0, PROMPT[:4], [2], sampling=FORCED)])
    assert driver.run([Row(0, 3, 7)], num_decodes=1).row_errors == ()
    return torch.cat(driver.logits)


def test_drafts_of_multi_token_prediction(arch: str) -> None:
    kernels = AiterTritonKernels(AiterLibrary(arch), Placement(torch.device("cpu"), torch.bfloat16))
    expected, found = draft_logits(TorchKernels()), draft_logits(kernels)
    assert found.shape == expected.shape == (2, SHAPE.vocab_size)
    assert float((found - expected).abs().max() / expected.std()) < BOUND
