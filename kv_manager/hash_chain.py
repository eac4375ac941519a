"""The hash chain that names prefixes: one xxh64 digest per full block, each folding in the one before it (ATOM-compatible).

A link is xxh64 (seed 0) over the previous link's digest as 8 little-endian bytes, absent for the first block of an empty
namespace, followed by the block's token ids as little-endian int64. Digests are unsigned 64-bit integers and do not
depend on the process, the machine or the dtype the ids arrive in.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh64_intdigest

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
"""Token ids of one sequence, in order; an int32 array is read without copying."""

NAMESPACE_TAG = b"tessera\xff"
"""Opens a namespace link. Read as an int64 it is negative, so no block of token ids begins like it."""

_TOKEN_BYTES = 8
_DIGEST_BYTES = 8


def join_namespace(*parts: str) -> bytes:
    """Namespace bytes of several parts (weights digest, KV format, ...): UTF-8, each after its length as 8 little-endian bytes.

    The lengths keep ("ab", "c") and ("a", "bc") apart. No parts give the empty namespace.
    """
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)


def namespace_link(namespace: bytes) -> int | None:
    """Digest that stands before the first block: xxh64 over the tag, the length as 8 little-endian bytes, and the namespace.

    An empty namespace has no link (None): its digests are those of the bare chain.
    """
    if not namespace:
        return None
    return xxh64_intdigest(NAMESPACE_TAG + len(namespace).to_bytes(8, "little") + namespace)


def namespace_root(namespace: bytes) -> int | None:
    """What stands in the place of a parent before the first block of a sequence: the namespace's link with all bits turned, negative
    so that it is never a block's digest; None for the empty namespace."""
    link = namespace_link(namespace)
    return None if link is None else ~link


def chain_digests(blocks: npt.NDArray[np.int32], parent: int | None = None) -> list[int]:
    """Digests of consecutive full blocks of token ids, int32 `[blocks, block_size]`.

    `parent` is what is before the first of these blocks: the previous block's digest, else `namespace_root`.
    """
    contents: list[bytes] = blocks.astype("<i8").view(f"V{blocks.shape[1] * _TOKEN_BYTES}").ravel().tolist()
    link = b"" if parent is None else max(parent, ~parent).to_bytes(_DIGEST_BYTES, "little")
    digests = []
    for content in contents:
        digest = xxh64_intdigest(link + content)
        link = digest.to_bytes(_DIGEST_BYTES, "little")
        digests.append(digest)
    return digests


def next_digests(blocks: npt.NDArray[np.int32], parents: Sequence[int]) -> list[int]:
    """Digests of full blocks of different sequences, int32 `[blocks, block_size]`, each behind a block with its parent as digest."""
    contents = np.empty((len(blocks), 1 + blocks.shape[1]), "<i8")
    contents[:, 0], contents[:, 1:] = np.array(parents, np.uint64).view(np.int64), blocks
    return list(map(xxh64_intdigest, contents.view(f"V{contents.shape[1] * _TOKEN_BYTES}").ravel().tolist()))
