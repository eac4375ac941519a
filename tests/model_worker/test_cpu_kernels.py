"""The compiled CPU kernels, each against float64, and the rule that they all keep: a row's bits depend on the row alone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from model_worker.batch import Batch
from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import CpuLibrary, cpu_library, multiplies_bfloat16
from model_worker.kv_pool import KVPool

THREADS = (1, 3)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", params=THREADS, ids="threads{}".format)
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return cpu_library(request.param)


@pytest.fixture(scope="module", params=DTYPES, ids=["f32", "f16", "bf16"])
def kernels(request: pytest.FixtureRequest, library: CpuLibrary) -> CpuKernels:
    return CpuKernels(library, request.param)


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rounded(kernels: CpuKernels, weight: Tensor) -> Tensor:
    """As the kernels keep it, in float64."""
    return weight.to(kernels.weights_dtype).double()


def met(kernels: CpuKernels, x: Tensor) -> Tensor:
    """As weights meet it, in float64."""
    is_rounded = kernels.weights_dtype == torch.bfloat16 and multiplies_bfloat16()
    return (x.bfloat16() if is_rounded else x).double()


def by_rows(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What `compute` gives for each row of `x` alone."""
    return torch.cat([compute(x[row : row + 1]) for row in range(len(x))])


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 33), (64, 199), (576, 960), (1536, 576)])
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 31, 150])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_float64_and_of_each_row_alone(
    kernels: CpuKernels, inputs: int, outputs: int, rows: int, has_bias: bool
) -> None:
    weight, x = numbers(outputs, inputs, scale=inputs**-0.5), numbers(rows, inputs)
    bias = numbers(outputs) if has_bias else None
    product = kernels.pack(weight)
    assert product is not None
    found = product(x, bias)
    expected = met(kernels, x) @ rounded(kernels, weight).T + (0 if bias is None else bias.double())
    assert found.dtype == torch.float32 and (found - expected).abs().max() < 2e-5
    assert torch.equal(found, by_rows(lambda row: product(row, bias), x))


def test_weights_and_inputs_may_lie_in_strides(kernels: CpuKernels) -> None:
    weight, x = numbers(48, 40), numbers(6, 120)[:, 40:80]
    product, turned = kernels.pack(weight), kernels.pack(weight.t().contiguous().t())
    assert product is not None and turned is not None
    assert torch.equal(product(x, None), turned(x.contiguous(), None))
    assert product(x[:0], None).shape == (0, 48)


def test_rows_of_a_table_are_those_of_the_weight(kernels: CpuKernels) -> None:
    weight = numbers(199, 24)
    table = kernels.pack_table(weight)
    assert table is not None
    ids = torch.tensor([0, 198, 31, 32, 33, 31])
    assert torch.equal(table.rows(ids).double(), rounded(kernels, weight)[ids])


@pytest.mark.parametrize("size", [5, 16, 40, 576])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_norms(kernels: CpuKernels, size: int, rows: int) -> None:
    x, residual, weight = numbers(rows, size), numbers(rows, size, scale=3.0), numbers(size)

    def norm(of: Tensor) -> Tensor:
        of = of.double()
        return of / (of.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert (kernels.rms_norm(x, weight, 1e-5) - norm(x)).abs().max() < 1e-5
    found, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x) and (found - norm(total)).abs().max() < 1e-5
    assert torch.equal(
        found, torch.cat([kernels.add_rms_norm(x[r : r + 1], residual[r : r + 1], weight, 1e-5)[0] for r in range(rows)])
    )
    heads = numbers(rows, 3, size)[:, 1:]
    assert torch.equal(kernels.rms_norm(heads, weight, 1e-5)[0, 1], kernels.rms_norm(heads[0, 1:2], weight, 1e-5)[0])


@pytest.mark.parametrize("n", [3, 16, 100])
def test_silu(kernels: CpuKernels, n: int) -> None:
    x = torch.cat((numbers(9, 2 * n, scale=4.0), torch.tensor([[-200.0] * 2 * n, [90.0] * 2 * n, [0.0] * 2 * n])))
    gate, up = x.double().chunk(2, dim=1)
    expected = silu(gate) * up
    found = kernels.silu_and_mul(x)
    assert ((found - expected).abs() <= 1e-5 * (1 + expected.abs())).all()
    assert torch.equal(found, by_rows(kernels.silu_and_mul, x))


def test_what_is_no_number_stays_so_and_in_its_row(kernels: CpuKernels) -> None:
    x = numbers(4, 32)
    x[2, 5] = float("nan")
    product = kernels.pack(numbers(32, 32))
    assert product is not None
    for found in (product(x, None), kernels.silu_and_mul(x), kernels.rms_norm(x, torch.ones(32), 1e-5)):
        assert found.isnan().any(dim=1).tolist() == [False, False, True, False]


SHAPES = {"gqa": (9, 3, 64), "one-for-all": (16, 1, 32), "mha": (4, 4, 24), "wide": (8, 2, 128), "many": (40, 1, 16)}
"""Query heads, KV heads, head_dim."""

ROWS = {
    "decodes": [(1, 1), (1, 17), (1, 600)],
    "chunks": [(5, 5), (1, 300), (40, 700)],
    "prompt": [(70, 70)],
    "edge": [(3, 256), (2, 257)],
}
"""New positions and context of each row."""


class Attending:
    """One layer's pool with random keys and values, and a batch over it."""

    def __init__(self, kernels: CpuKernels, shape: tuple[int, int, int], rows: list[tuple[int, int]], block_size: int) -> None:
        self.heads, self.kv_heads, self.head_dim = shape
        needed = [-(-context // block_size) for _, context in rows]
        self.pool = KVPool(1, sum(needed), block_size, self.kv_heads, self.head_dim, kernels.kv_store())
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        self.rows, self.block_size = rows, block_size
        for plane, scale in ((self.pool.keys(0), 1.0), (self.pool.values(0), 2.0)):
            plane.copy_(numbers(*plane.shape, scale=scale))

    def batch(self, rows: list[tuple[int, int]] | None = None, tables: list[list[int]] | None = None) -> Batch:
        rows, tables = rows or self.rows, tables or self.tables
        places = [range(context - count, context) for count, context in rows]
        flat = [(table, place) for table, span in zip(tables, places, strict=True) for place in span]
        width = max(map(len, tables))
        ends = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0)
        return Batch(
            input_ids=torch.zeros(len(flat), dtype=torch.int64),
            positions=torch.tensor([place for _, place in flat]),
            slot_mapping=torch.tensor(
                [table[place // self.block_size] * self.block_size + place % self.block_size for table, place in flat]
            ),
            cu_seqlens_q=ends.to(torch.int32),
            context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
            block_tables=torch.tensor([table + [-1] * (width - len(table)) for table in tables], dtype=torch.int32),
            num_decodes=0,
            logits_rows=ends[1:] - 1,
        )

    def expected(self, query: Tensor) -> Tensor:
        """In float64, from the cache as it is."""
        if self.pool.dtype == torch.bfloat16:
            query = query.bfloat16()
        outputs, first = [], 0
        for (count, context), table in zip(self.rows, self.tables, strict=True):
            blocks = torch.from_numpy(np.concatenate([self.pool.block(block)[0] for block in table], axis=1)).double()
            keys, values = blocks[:, :context].transpose(1, 2)
            visible = torch.arange(context) <= torch.arange(context - count, context).unsqueeze(1)
            own = query[first : first + count].double().transpose(0, 1)
            outputs.append(scaled_dot_product_attention(own, keys, values, attn_mask=visible, enable_gqa=True).transpose(0, 1))
            first += count
        return torch.cat(outputs).flatten(1)

    @property
    def tolerance(self) -> float:
        """Weights in bfloat16 have 8 bits; values go up to 8."""
        return 1e-2 if self.pool.dtype == torch.bfloat16 else 5e-6


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("block_size", [16, 48])
def test_attention_is_that_of_float64(
    kernels: CpuKernels, shape: tuple[int, int, int], rows: list[tuple[int, int]], block_size: int
) -> None:
    at = Attending(kernels, shape, rows, block_size)
    batch = at.batch()
    query = numbers(batch.num_tokens, at.heads, at.head_dim)
    found = kernels.paged_attention(batch, at.pool).attend(0, query, query, query)
    assert (found - at.expected(query)).abs().max() < at.tolerance


def test_a_token_s_attention_has_the_same_bits_in_a_chunk_and_alone(kernels: CpuKernels) -> None:
    at = Attending(kernels, (9, 3, 64), [(60, 600)], 16)
    query = numbers(60, 9, 64)
    whole = kernels.paged_attention(at.batch(), at.pool).attend(0, query, query, query)
    for token in (0, 1, 30, 59):
        alone = at.batch([(1, 541 + token)])
        one = query[token : token + 1]
        assert torch.equal(kernels.paged_attention(alone, at.pool).attend(0, one, one, one)[0], whole[token])


def sharing(at: Attending, blocks: list[int]) -> list[list[int]]:
    """Tables of the rows, each of which begins with so many of the first one's blocks."""
    return [at.tables[0][:count] + table[count:] for count, table in zip(blocks, at.tables, strict=True)]


@pytest.mark.parametrize("blocks", [[1, 1, 1, 1, 1], [34, 34, 34, 34, 34], [16, 16, 16, 16, 16], [20, 0, 20, 7, 33]])
@pytest.mark.parametrize("shape", [(9, 3, 64), (16, 1, 32), (4, 4, 24)], ids=str)
def test_rows_whose_tables_begin_alike_are_read_together_and_have_their_own_bits(
    kernels: CpuKernels, shape: tuple[int, int, int], blocks: list[int]
) -> None:
    at = Attending(kernels, shape, [(1, 560), (1, 545), (2, 560), (1, 1000), (1, 550)], 16)
    at.tables = sharing(at, blocks)
    query = numbers(6, at.heads, at.head_dim)
    found = kernels.paged_attention(at.batch(), at.pool).attend(0, query, query, query)
    assert (found - at.expected(query)).abs().max() < at.tolerance
    first = 0
    for row, table in zip(at.rows, at.tables, strict=True):
        own = query[first : first + row[0]]
        alone = kernels.paged_attention(at.batch([row], [table]), at.pool).attend(0, own, own, own)
        assert torch.equal(alone, found[first : first + row[0]])
        first += row[0]


@pytest.mark.parametrize("pairs", [16, 32])
def test_keys_are_rotated_on_their_way_into_the_cache_and_values_stored(kernels: CpuKernels, pairs: int) -> None:
    at = Attending(kernels, (4, 2, 64), [(5, 20), (1, 33)], 16)
    batch = at.batch()
    heads = numbers(6, 4 + 2 + 2, 64)
    angles = numbers(6, pairs)
    attention = kernels.paged_attention(batch, at.pool)
    query, _ = attention.rotate_and_store(0, heads[:, :6], heads[:, 6:], (angles.cos(), angles.sin()))
    expected = torch.cat(
        (kernels.rotary_embedding(heads[:, :6, : 2 * pairs], angles.cos(), angles.sin()), heads[:, :6, 2 * pairs :]), 2
    )
    assert (query - expected[:, :4]).abs().max() < 1e-6

    def stored() -> tuple[Tensor, Tensor]:
        """Keys and values of the batch's positions."""
        blocks = [at.pool.block(int(slot) // 16)[0, :, int(slot) % 16] for slot in batch.slot_mapping]
        return torch.from_numpy(np.stack(blocks, axis=1)).unbind()

    def kept(values: Tensor) -> Tensor:
        return values.to(at.pool.dtype).float()

    keys, values = stored()
    closeness = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
    assert (keys - expected[:, 4:]).abs().max() < closeness[at.pool.dtype]
    assert torch.equal(values, kept(heads[:, 6:]))
    attention.store(0, heads[:, 4:6], heads[:, 6:])
    assert torch.equal(stored()[0], kept(heads[:, 4:6]))


@pytest.mark.parametrize("context", [20, 21])
def test_what_lies_behind_a_context_is_not_read(kernels: CpuKernels, context: int) -> None:
    at = Attending(kernels, (4, 2, 64), [(1, context)], 16)
    query = numbers(1, 4, 64)
    before = kernels.paged_attention(at.batch(), at.pool).attend(0, query, query, query)
    for plane, is_value in (
        (at.pool.raw_block(at.tables[0][1])[:, 0], False),
        (at.pool.raw_block(at.tables[0][1])[:, 1], True),
    ):
        for offset in range(context - 16, 16):
            spoil(at.pool, plane, offset, is_value=is_value)
    assert torch.equal(kernels.paged_attention(at.batch(), at.pool).attend(0, query, query, query), before)


def spoil(pool: KVPool, plane: Tensor, offset: int, *, is_value: bool) -> None:
    """What a block's `plane` holds of a position becomes no number."""
    mask = torch.ones_like(plane)
    pool.store.layout.clear(mask, (torch.tensor([0]), torch.tensor([offset])), is_value=is_value)
    plane[mask == 0] = float("nan")
