"""What transformers generates from the same weights: greedy, one prompt at a time, with its own cache."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging


@dataclass(frozen=True)
class Expected:
    """A prompt's greedy tokens; per token the second best one and how far its logit lies below."""

    token_ids: list[int]
    second_ids: list[int]
    gaps: list[float]


class Reference:
    """transformers' model of a directory or GGUF file, in float32."""

    def __init__(self, path: Path) -> None:
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = _from_directory(path) if path.is_dir() else _from_gguf(path)
        self._model.eval()

    @property
    def model(self) -> PreTrainedModel:
        """transformers' own."""
        return self._model

    @torch.inference_mode()
    def greedy(self, prompt: list[int], max_tokens: int) -> Expected:
        """`max_tokens` tokens after `prompt`, EOS ignored."""
        cache, ids = DynamicCache(config=self._model.config), torch.tensor([prompt])
        expected = Expected([], [], [])
        for _ in range(max_tokens):
            logits = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            best = logits.topk(2)
            first, second = best.indices.tolist()
            expected.token_ids.append(first)
            expected.second_ids.append(second)
            expected.gaps.append(float(best.values[0] - best.values[1]))
            ids = torch.tensor([[first]])
        return expected

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits `[len(token_ids), vocab]` of a sequence, computed in one pass."""
        return self._model(torch.tensor([token_ids]), use_cache=False).logits[0]


def _from_directory(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)


def _from_gguf(path: Path) -> PreTrainedModel:
    """By transformers' own reading of the file: its names, its dequantization, its order of query and key rows. `from_pretrained`
    would do the same, but wants the package accelerate for it."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name), dtype=torch.float32)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set()), missing
    return model
