"""EAGLE and EAGLE-3 heads in plain torch, around transformers' Llama: what ours are compared with, and what can be trained."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


class EagleReference(nn.Module):
    """A head for `model`, random until it is trained. With `taps` it is an EAGLE-3 head on what goes into these layers; `token_ids` int64 are the
    ids that it knows, None for all. `own_embedding`: it has one, else it uses the model's."""

    def __init__(
        self,
        model: PreTrainedModel,
        taps: tuple[int, ...] = (),
        token_ids: Tensor | None = None,
        own_embedding: bool = False,
        **options: object,
    ) -> None:
        super().__init__()
        size = model.config.hidden_size
        self.taps, self.token_ids, self.options = taps, token_ids, options
        self._lent = [model]  # not a part of this module
        shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 1}
        shape |= {"rms_norm_eps": model.config.rms_norm_eps, "max_position_embeddings": model.config.max_position_embeddings}
        self.config = LlamaConfig(hidden_size=size, vocab_size=model.config.vocab_size, **shape)
        self.config._attn_implementation = "sdpa"  # causal without a mask
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.layer = LlamaDecoderLayer(self.config, 0)
        self.fc = nn.Linear((len(taps) or 2) * size, size, bias=bool(options.get("bias", False)))
        if taps:
            for name in ("q_proj", "k_proj", "v_proj"):
                projection = nn.Linear(2 * size, getattr(self.layer.self_attn, name).out_features, bias=False)
                setattr(self.layer.self_attn, name, projection)
            self.layer.hidden_norm = nn.RMSNorm(size, self.config.rms_norm_eps)
            self.norm = nn.RMSNorm(size, self.config.rms_norm_eps)
            ids = len(token_ids) if token_ids is not None else self.config.vocab_size
            self.lm_head = nn.Linear(size, ids, bias=False)
        else:
            self.layer.input_layernorm = nn.Identity()
        self.embed_tokens = nn.Embedding(self.config.vocab_size, size) if own_embedding else None
        generator = torch.Generator().manual_seed(7)
        for name, values in sorted(self.named_parameters()):
            if "norm" in name:
                values.data.uniform_(0.5, 1.5, generator=generator)
            else:
                values.data.normal_(0.0, 0.15, generator=generator)

    def enter(self, ids: Tensor) -> Tensor:
        """What the head takes of the model at each of `ids` `[B, T]`, `[B, T, hidden_size]`."""
        (model,) = self._lent
        with torch.no_grad():
            states = model.model(ids, output_hidden_states=True)
        if not self.taps:
            return states.last_hidden_state
        return self.fc(torch.cat([states.hidden_states[tap] for tap in self.taps], dim=-1))

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What it has at each position, `[B, T, hidden_size]`: `ids` `[B, T]` are the tokens behind the positions."""
        (model,) = self._lent
        embedded = (self.embed_tokens or model.model.embed_tokens)(ids)
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        rotation = self.rotary(embedded, positions)
        layer = self.layer
        if self.taps:
            normed = layer.hidden_norm(hidden)
            residual = normed if self.options.get("norm_before_residual") else hidden
            x = torch.cat((layer.input_layernorm(embedded), normed), dim=-1)
        else:
            residual = x = self.fc(torch.cat((embedded, hidden), dim=-1))
        hidden = residual + layer.self_attn(x, position_embeddings=rotation, attention_mask=None)[0]
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Of all ids; far below all others where the head does not know one."""
        (model,) = self._lent
        if not self.taps:
            return model.lm_head(hidden)
        known = self.lm_head(self.norm(hidden))
        if self.token_ids is None:
            return known
        return known.new_full((*known.shape[:-1], self.config.vocab_size), -1e30).index_copy(-1, self.token_ids, known)

    def save(self, directory: Path, name: str = "midlayer") -> None:
        """As heads are published, the layer called `name`."""
        weights = {
            key.replace("layer.", f"{name}.", 1) if key.startswith("layer.") else key: values.contiguous()
            for key, values in self.state_dict().items()
            if "rotary" not in key
        }
        config = {**self.config.to_dict(), "architectures": ["LlamaForCausalLM"], **self.options}
        if self.token_ids is not None:
            weights["d2t"] = self.token_ids - torch.arange(len(self.token_ids))
            weights["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill(0, self.token_ids, True)
            config["draft_vocab_size"] = len(self.token_ids)
        if self.taps:
            config["eagle_aux_hidden_state_layer_ids"] = list(self.taps)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(weights, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config))
