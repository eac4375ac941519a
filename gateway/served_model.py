"""A model that this gateway can serve: what its workers report, and the tokenizer that fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import TokenizerMismatch, UnknownModel
from gateway.tokenizer import Tokenizer
from tessera.values.model import ModelInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Raises TokenizerMismatch where the two would disagree about what a token id means."""

    info: ModelInfo
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        ours, theirs = self.tokenizer.digest, self.info.tokenizer_digest
        if ours != theirs:
            raise TokenizerMismatch(
                f"the worker serves {self.info.name!r} with tokenizer {theirs[:12]}, this gateway has {ours[:12]}: "
                "start both with the same model"
            )
        if self.tokenizer.vocab_size > self.info.vocab_size:
            raise TokenizerMismatch(
                f"the tokenizer of {self.info.name!r} knows {self.tokenizer.vocab_size} ids, the model only {self.info.vocab_size}"
            )

    @property
    def prompt_bytes_max(self) -> int:
        """A longer text cannot fit `max_model_len` whatever its tokens, so it is refused unread."""
        return self.info.max_model_len * self.tokenizer.bytes_per_token_max


def find_model(name: str, models: Sequence[ServedModel]) -> ServedModel:
    """The served model called `name`, or, for an empty name, the only one. Raises UnknownModel."""
    matches = [model for model in models if name in ("", model.info.name)]
    if len(matches) == 1:
        return matches[0]
    served = ", ".join(model.info.name for model in models) or "none"
    if not name:
        raise UnknownModel(f"model: name one of the served models ({served})")
    raise UnknownModel(f"model: {name[:100]!r} is not served here; served are: {served}")
