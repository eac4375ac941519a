"""Small random models that a whole system can serve: a token is a byte."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig

from tests.parity.tiny_models import save_random


def save_served(config: PreTrainedConfig, directory: Path) -> str:
    """Save a random model of this shape, whose vocabulary is 256, with its tokenizer; its `--model`."""
    save_random(config, directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)
