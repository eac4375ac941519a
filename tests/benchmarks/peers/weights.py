"""Write the weights of a GGUF file as a folder in a float type: `python -m tests.benchmarks.peers.weights GGUF FOLDER DTYPE`."""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tests.parity.reference import Reference


def main(gguf: str, folder: str, dtype: str) -> None:
    """What transformers makes of the file, tokenizer included."""
    source = Path(gguf)
    model = Reference(source).model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
