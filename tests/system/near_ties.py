"""Equality of two runs of one request: the same tokens, or a first difference where float32 rounding may decide.

Batches of other sizes round otherwise in the fast mode, so two runs may part where two tokens score within NEAR_TIE_GAP of each other.
A judge computes that score itself, from the real weights.
"""

from collections.abc import Sequence

import numpy as np
import torch

from model_worker.batch import Batch
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.noise import exponentials, noise_words
from model_worker.weights.open_model import load_model, open_model

NEAR_TIE_GAP = 1e-4
BLOCK_SIZE = 16


class Judge:
    """Scores next tokens with one model, float32."""

    def __init__(self, model: str) -> None:
        source = open_model(model)
        self._config = source.config
        self._model = load_model(source, TorchKernels())

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits float32 `[vocab]` of the token after `token_ids`."""
        count = len(token_ids)
        blocks = -(-count // BLOCK_SIZE)
        config = self._config
        pool = KVPool(config.num_layers, blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        positions = torch.arange(count)
        batch = Batch(
            input_ids=torch.tensor(token_ids),
            positions=positions,
            slot_mapping=positions,
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([count], dtype=torch.int32),
            block_tables=torch.arange(blocks, dtype=torch.int32)[None],
            num_decodes=0,
            logits_rows=torch.tensor([count - 1]),
        )
        with torch.inference_mode():
            return self._model.forward(batch, pool)[0].numpy()

    def assert_same(
        self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], temperature: float = 0.0, seed: int = 0
    ) -> bool:
        """Whether the outputs are equal; False where they part at a near tie. Fails for any other difference."""
        if list(one) == list(other):
            return True
        at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        assert at is not None, f"one of the outputs is cut: {len(one)} and {len(other)} tokens"
        logits = self.logits([*prompt, *one[:at]]).astype(np.float64)
        if temperature > 0:
            noise = exponentials(noise_words(seed, at, len(logits)))
            logits = logits - temperature * np.log(noise)
        gap = abs(logits[one[at]] - logits[other[at]])
        assert gap <= NEAR_TIE_GAP, f"outputs differ at token {at}, {one[at]} and {other[at]} score {gap:.6f} apart"
        return False
