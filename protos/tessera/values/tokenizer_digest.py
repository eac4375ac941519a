"""One number for a tokenizer: gateway and worker compute it from the same files and must get the same.

How callers use it:

- a model directory: `tokenizer_json_digest((directory / "tokenizer.json").read_bytes())`
- a GGUF file: `gguf_tokenizer_digest(tokens, merges, token_types, pre)` with the values of `tokenizer.ggml.tokens`,
  `.merges` and `.token_type` (empty where the file has none) and `.pre` ("" where absent), in file order;
  `tessera.values.gguf_header.read_gguf_header(path).metadata` gives them in milliseconds.

A directory and a GGUF file of one tokenizer give different digests: both ends must be started with the same model.
The chat template is left out: it changes prompts, not what a token id means.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


def tokenizer_json_digest(raw: bytes) -> str:
    """sha256 (hex) of the bytes of a tokenizer.json file."""
    return hashlib.sha256(raw).hexdigest()


def gguf_tokenizer_digest(tokens: Sequence[str], merges: Sequence[str], token_types: Iterable[int], pre: str) -> str:
    """sha256 (hex) over a GGUF file's tokenizer metadata.

    Hashed in this order: tokens, merges, pre (each as a list of strings), then token types (each int32). A list is its count,
    the byte lengths (both little-endian int64) and the UTF-8 bytes, so no two inputs run together. 49,152 tokens take about 20 ms.
    """
    digest = hashlib.sha256(b"gguf-tokenizer-v1")
    for strings in (tokens, merges, [pre]):
        encoded = [string.encode() for string in strings]
        lengths = np.fromiter(map(len, encoded), "<i8", len(encoded))
        digest.update(np.int64(len(encoded)).astype("<i8").tobytes() + lengths.tobytes() + b"".join(encoded))
    types = np.array(list(token_types), "<i4")
    digest.update(np.int64(len(types)).astype("<i8").tobytes() + types.tobytes())
    return digest.hexdigest()
