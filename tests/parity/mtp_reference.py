"""Layers of multi-token prediction in plain torch, around transformers' decoder layer: what ours are compared with, and what can be trained."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel


class MtpReference(nn.Module):
    """One layer for `model`, whose embedding, head and rotary embedding it uses. Random until it is trained."""

    def __init__(self, model: PreTrainedModel, seed: int = 5) -> None:
        super().__init__()
        config = model.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self._lent = [model]  # not a part of this module
        self.enorm, self.hnorm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(model.model.layers[-1])(config, config.num_hidden_layers - 1)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(size, eps)})
        generator = torch.Generator().manual_seed(seed)
        for name, values in sorted((*self.named_parameters(), *self.named_buffers())):
            if "norm" in name:
                values.data.uniform_(0.5, 1.5, generator=generator)
            else:
                values.data.normal_(0.0, 0.15, generator=generator)

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What it has at each position, `[B, T, hidden_size]`: `ids` int64 `[B, T]` are the tokens behind the positions, `hidden` what the model, or
        the layer before, had there."""
        (model,) = self._lent
        joined = torch.cat((self.enorm(model.model.embed_tokens(ids)), self.hnorm(hidden)), dim=-1)
        x, positions = self.eh_proj(joined), torch.arange(ids.shape[1]).unsqueeze(0)
        rotation = model.model.rotary_emb(x, positions)
        seen = torch.ones(len(positions[0]), len(positions[0]), dtype=torch.bool).tril()[None, None]
        x = self.block(x, position_embeddings=rotation, position_ids=positions, attention_mask=seen)
        return self.shared_head["norm"](x)

    def enter(self, ids: Tensor) -> Tensor:
        """What it takes of the model at each of `ids` `[B, T]`, `[B, T, hidden_size]`."""
        (model,) = self._lent
        with torch.no_grad():
            return model.model(ids).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """By the model's head."""
        (model,) = self._lent
        return model.lm_head(hidden)

    def weights(self, index: int) -> dict[str, Tensor]:
        """As a checkpoint has them, of layer `index`."""
        prefix = f"model.layers.{index}"
        return {
            f"{prefix}.{name.removeprefix('block.')}": weight.detach().clone() for name, weight in self.state_dict().items()
        }


def save_layers(layers: list[MtpReference], directory: Path, further: dict[str, Tensor] | None = None) -> None:
    """Beside the model's own file, behind its last layer, and `further` weights with them."""
    (model,) = layers[0]._lent
    weights = dict(further or {})
    for place, layer in enumerate(layers):
        weights |= layer.weights(model.config.num_hidden_layers + place)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, directory / "mtp.safetensors")
