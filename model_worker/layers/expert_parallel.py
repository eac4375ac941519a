"""Experts that are spread over the ranks of a model, and over the workers of a lockstep group, each of which has tokens of its own.

Every pass of one worker is a pass of all, and each layer of experts is met by all at the same time. They first agree on how many tokens each
has, then exchange these in chunks of the size of the largest, padded with tokens that choose nobody. Each worker computes its experts for
all tokens, and gets back the sums for its own.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.group import Group
from model_worker.kernels.interface import Kernels
from model_worker.layers.share import Share

CHUNK_TOKENS = 512
"""Tokens of one worker that are exchanged at once: bounds the memory of an exchange by that, times the number of workers."""

NOBODY = -1
"""The expert that padding chooses."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The part `[T, hidden_size]` that some experts have in the sum for tokens `[T, hidden_size]`, given ids and weights `[T, num_chosen]`."""


def expert_share(num_experts: int, kernels: Kernels) -> Share:
    """The experts of this rank of this worker."""
    group, peers = kernels.group, kernels.peers
    return Share.of_part(num_experts, peers.rank * group.size + group.rank, peers.size * group.size)


def over_peers(peers: Group, x: Tensor, ids: Tensor, weights: Tensor, compute: Compute) -> Tensor:
    """For the tokens `x` of this worker the sum over all workers of what their experts give; `[T, hidden_size]`."""
    if peers.size == 1:
        return compute(x, ids, weights)
    counts = peers.all_gather(torch.tensor([len(x)], device=x.device)).flatten().tolist()
    sums = []
    for first in range(0, max(counts), CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, max(counts) - first)
        mine = slice(first, first + size)
        padding = (0, 0, 0, size - len(x[mine]))
        all_x, all_weights = (peers.all_gather(functional.pad(each[mine], padding)).flatten(0, 1) for each in (x, weights))
        all_ids = peers.all_gather(functional.pad(ids[mine], padding, value=NOBODY)).flatten(0, 1)
        parts = compute(all_x, all_ids, all_weights).view(peers.size, size, -1)
        sums.append(peers.reduce_scatter(parts)[: len(x[mine])])
    return torch.cat(sums)
