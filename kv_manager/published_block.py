"""One entry of the prefix cache as the journal and recovery know it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """A full block whose KV is computed and committed.

    `digest` is its link of the hash chain (unsigned 64 bit), `parent` the link before it (None for the first block),
    `token_ids` the block's own ids (length = block size). `published_step` is the worker step whose output completed it:
    the entry holds as long as nothing wrote the block in a later step. `namespace` is the link of the namespace that the first block
    of a sequence belongs to; None for the empty one, and for every other block, which has its parent's.
    """

    block_id: int
    digest: int
    parent: int | None
    token_ids: tuple[int, ...]
    published_step: int
    namespace: int | None = None
