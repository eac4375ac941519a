"""Decode batches that are recorded: how they are padded, and that what is replayed equals what is computed anew. Proved by a recorder that runs
again what it recorded, so of a GPU's own graphs this shows all but that they replay what they saw."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.graphs.graphed_model import GraphedModel
from model_worker.graphs.padded_decodes import DecodeShape, is_decode_only
from model_worker.graphs.padded_sizes import PaddedSizes
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kernels.torch_device_backend import TorchDeviceKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from tessera.values.config import ConfigError
from tests.model_worker import random_llama
from tests.model_worker.run_again import RunAgain
from tests.model_worker.shaped_models import tiny_shapes

BLOCK_SIZE, MAX_CONTEXT = 4, 40


@pytest.mark.parametrize(
    ("max_num_seqs", "last"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (5, [2, 4, 8]), (20, [8, 16, 24]), (512, [240, 248, 256])]
)
def test_sizes_are_few_and_pad_little(max_num_seqs: int, last: list[int]) -> None:
    sizes = PaddedSizes.usual(max_num_seqs)
    assert list(sizes.sizes[-3:]) == last[-3:]
    for rows in range(1, min(max_num_seqs, 256) + 1):
        size = sizes.holding(rows)
        assert size is not None and rows <= size and (size < 2 * rows if rows > 1 else size == 1) and size - rows < 8
    assert sizes.holding(sizes.sizes[-1] + 1) is None and PaddedSizes(()).holding(1) is None


def test_sizes_may_be_chosen() -> None:
    assert PaddedSizes.given((8, 2, 8), 8).sizes == (2, 8)
    with pytest.raises(ConfigError, match=r"graph_sizes must be from 1 to max_num_seqs \(8\), got 16: no batch has more rows"):
        PaddedSizes.given((16,), 8)


def test_rows_of_padding_touch_the_null_block_alone() -> None:
    shape = DecodeShape(max_blocks=10, block_size=BLOCK_SIZE, null_block=77)
    batch = decodes([[5, 6], [9]], [7, 4])
    padded = shape.pad(batch, 4)
    assert padded.slot_mapping.tolist() == [6 * 4 + 2, 9 * 4 + 3, 77 * 4, 77 * 4]
    assert padded.context_lens.tolist() == [7, 4, 1, 1] and padded.positions.tolist() == [6, 3, 0, 0]
    assert padded.block_tables[2:].unique().tolist() == [77]
    assert padded.block_tables[:2].equal(batch.block_tables), "no wider than the batch needs"
    assert is_decode_only(padded) and padded.logits_rows.tolist() == [0, 1, 2, 3]
    blank = shape.blank(3)
    assert blank.max_context_len == 40 and blank.slot_mapping.tolist() == [77 * 4] * 3
    assert blank.block_tables.shape == (3, 10) and blank.block_tables.unique().tolist() == [77]


def test_only_decodes_whose_logits_are_all_wanted_are_recorded() -> None:
    batch = decodes([[0], [1]], [2, 3])
    assert is_decode_only(batch)
    assert not is_decode_only(replace(batch, logits_rows=torch.tensor([1, 0])))
    assert not is_decode_only(replace(batch, logits_rows=torch.tensor([1])))
    assert not is_decode_only(replace(batch, num_decodes=1))


@pytest.mark.parametrize("architecture", sorted(tiny_shapes()))
def test_replayed_decodes_equal_those_of_the_reference(architecture: str) -> None:
    """Every architecture; rows of several lengths, fewer from step to step, and blocks of which stale ones hold NaN."""
    shape = tiny_shapes()[architecture]
    expected, kv = prepared(architecture, TorchKernels())
    model, replayed_kv = prepared(architecture, TorchDeviceKernels())
    recorder = RunAgain()
    graphed = GraphedModel(model, replayed_kv, PaddedSizes((1, 2, 4)), MAX_CONTEXT, recorder)
    assert recorder.num_recorded == 3 and not replayed_kv.block(replayed_kv.null_block).any(), "recording leaves no trace"
    lens = list(LENS)
    for step, rows in enumerate(([0, 1, 2], [0, 1, 2], [2, 0], [1])):
        batch = decodes([TABLES[row] for row in rows], [lens[row] for row in rows], first_id=step)
        lens = [length + (row in rows) for row, length in enumerate(lens)]
        wanted, found = expected.forward(batch, kv), graphed.forward(batch, replayed_kv)
        assert found.shape == wanted.shape == (len(rows), shape.vocab_size)
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=2e-5)
    assert recorder.num_replays == 4
    assert not replayed_kv.block(replayed_kv.null_block).any(), "padding leaves no trace"
    for block in range(kv.num_blocks):
        np.testing.assert_allclose(replayed_kv.block(block), kv.block(block), rtol=0.0, atol=2e-5, equal_nan=True)


def test_hidden_states_are_replayed_too() -> None:
    kernels = TorchDeviceKernels()
    model, kv = prepared("LlamaForCausalLM", kernels)
    batch = decodes([TABLES[0], TABLES[1]], LENS[:2])
    for taps in ((), (0, 2)):
        recorder = RunAgain()
        graphed = GraphedModel(model, kv, PaddedSizes((4,)), MAX_CONTEXT, recorder, taps)
        logits, hidden = graphed.forward_tapped(batch, kv, taps)
        wanted = model.forward_tapped(batch, kv, taps)  # type: ignore[attr-defined]  # all of them are tapped
        torch.testing.assert_close((logits, hidden), wanted, rtol=0.0, atol=2e-5)
        assert recorder.num_replays == 1
        graphed.forward(batch, kv)
        graphed.forward_tapped(batch, kv, (1,))
        assert recorder.num_replays == 1, "what is not recorded is computed"


def test_other_batches_and_other_pools_go_through_the_model() -> None:
    model, kv = prepared("LlamaForCausalLM", TorchDeviceKernels())
    recorder = RunAgain()
    graphed = GraphedModel(model, kv, PaddedSizes((1, 2)), MAX_CONTEXT, recorder)
    three = decodes(TABLES, LENS)
    assert graphed.forward(three, kv).equal(model.forward(three, kv))
    prompt = prompts()
    assert graphed.forward(prompt, kv).equal(model.forward(prompt, kv))
    other = prepared("LlamaForCausalLM", TorchDeviceKernels())[1]
    one = decodes(TABLES[:1], LENS[:1])
    assert graphed.forward(one, other).equal(model.forward(one, other))
    assert recorder.num_replays == 0


TABLES = [[3, 1, 7, 0], [4, 6], [8, 2, 5, 9]]
LENS = [6, 2, 12]


def decodes(tables: list[list[int]], lens: list[int], first_id: int = 0) -> Batch:
    """One position each, the last of contexts of `lens` tokens; behind a context a table says anything."""
    last = torch.tensor(lens) - 1
    width = max(-(-length // BLOCK_SIZE) for length in lens)
    wide = torch.tensor([(table + [-1] * width)[:width] for table in tables], dtype=torch.int32)
    block = wide.gather(1, (last // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
    rows = len(lens)
    return Batch(
        input_ids=(torch.arange(rows) * 31 + first_id * 17) % 199,
        positions=last,
        slot_mapping=block.long() * BLOCK_SIZE + last % BLOCK_SIZE,
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=wide,
        num_decodes=rows,
        logits_rows=torch.arange(rows),
    )


def prompts() -> Batch:
    """All positions but the last of the three contexts."""
    counts = [length - 1 for length in LENS]
    positions = torch.cat([torch.arange(count) for count in counts])
    row_of = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    tables = torch.tensor([(table + [0] * 4)[:4] for table in TABLES], dtype=torch.int32)
    ends = torch.tensor(counts).cumsum(0)
    return Batch(
        input_ids=(positions * 13 + row_of * 7) % 199,
        positions=positions,
        slot_mapping=tables[row_of, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        cu_seqlens_q=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
        context_lens=torch.tensor(counts, dtype=torch.int32),
        block_tables=tables,
        num_decodes=0,
        logits_rows=ends - 1,
    )


def prepared(architecture: str, kernels: TorchKernels) -> tuple[CausalLM, KVPool]:
    """A model, and a pool full of what others left behind, with the three contexts computed."""
    shape = tiny_shapes()[architecture]
    model = random_llama.build(shape, kernels)
    kv = KVPool.of_shape(shape.kv_shape, 12, BLOCK_SIZE, kernels.kv_store())
    for block in range(kv.num_blocks):
        kv.raw_block(block).fill_(float("nan"))
    model.forward(prompts(), kv)
    return model, kv


def test_all_tensors_of_a_batch_are_copied() -> None:
    """What a replay writes: a new field of a batch must be padded."""
    assert {item.name for item in fields(Batch) if item.type in (Tensor, "Tensor")} == {
        "input_ids",
        "positions",
        "slot_mapping",
        "cu_seqlens_q",
        "context_lens",
        "block_tables",
        "logits_rows",
    }
