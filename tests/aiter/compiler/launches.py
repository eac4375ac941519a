"""Every Triton kernel of AITER that we launch, at the shapes of real models: tensors without memory.

A step of 32 decoding rows and a prefill of 2,048 tokens, since AITER chooses tiles by the number of tokens. Sizes are the models' own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.kernels.aiter.triton_calls import KVCache, PagedRows, Scaled, SortedTokens, TritonCalls
from tests.aiter.checkout import CHECKOUT

DEVICE = "meta" if CHECKOUT is None else "cpu"
"""AITER's head launches nothing for meta tensors; on the CPU, memory that nothing touches is none either."""

DECODE, PREFILL = 32, 2048
BLOCK_SIZE, BLOCKS, CONTEXT = 16, 4096, 2048
LATENT, ROTATED = 512, 64


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes that kernels see. `experts`: how many there are, how many are chosen, their width; None: none."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    experts: tuple[int, int, int] | None = None


MODELS = {
    "Llama-8B": Model(4096, 32, 8, 128),
    "Qwen3-30B-A3B": Model(2048, 32, 4, 128, (128, 8, 768)),
    "gpt-oss-20b": Model(2880, 64, 8, 64, (32, 4, 2880)),
    "DeepSeek-V3": Model(7168, 128, 128, 192, (256, 8, 2048)),
}
GROUPED = [name for name, model in MODELS.items() if model.kv_heads < model.heads]
"""Those with keys and values by head in the cache; DeepSeek-V3 keeps latent vectors."""

Launch = Callable[[TritonCalls], object]


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)


def f32(*shape: int) -> Tensor:
    return torch.empty(shape, device=DEVICE)


def i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=DEVICE)


def i64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=DEVICE)


def fp8(calls: TritonCalls, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=calls.library.fp8, device=DEVICE)


def cache(calls: TritonCalls, model: Model, is_fp8: bool) -> KVCache:
    shape = (BLOCKS, BLOCK_SIZE, model.kv_heads, model.head_size)
    planes = [fp8(calls, *shape) if is_fp8 else bf16(*shape) for _ in range(2)]
    return KVCache(*planes, f32(1), f32(1))


def rows(tokens: int, context: int = CONTEXT) -> PagedRows:
    """One row of all tokens, or a token each."""
    count = tokens if tokens == DECODE else 1
    return PagedRows(i32(count + 1), i32(count), i32(count, context // BLOCK_SIZE), tokens // count, context)


def attention(
    name: str, tokens: int, context: int, window: int | None = None, has_sinks: bool = False, is_fp8: bool = False
) -> dict[str, Launch]:
    model = MODELS[name]
    kind = f"{', window' if window else ''}{', sinks' if has_sinks else ''}{', fp8' if is_fp8 else ''}"
    return {
        f"{name}: {tokens} tokens, context {context}{kind}": lambda calls: calls.attention(
            bf16(tokens, model.heads, model.head_size),
            cache(calls, model, is_fp8),
            rows(tokens, context),
            0.1,
            window,
            bf16(model.heads) if has_sinks else None,
        )
    }


def attentions() -> dict[str, Launch]:
    """Contexts above 512 are split over programs while rows are few."""
    found: dict[str, Launch] = {}
    for name in ("Llama-8B", "Qwen3-30B-A3B"):
        for tokens, context in ((DECODE, 512), (DECODE, CONTEXT), (PREFILL, CONTEXT), (16, CONTEXT)):
            found |= attention(name, tokens, context)
    for tokens in (DECODE, PREFILL):
        found |= attention("Llama-8B", tokens, CONTEXT, is_fp8=True)
        found |= attention("gpt-oss-20b", tokens, CONTEXT, window=128, has_sinks=True)
        found |= attention("gpt-oss-20b", tokens, CONTEXT, has_sinks=True)
    return found


def norms(launch: Callable[[TritonCalls, int, int], object]) -> dict[str, Launch]:
    def of(tokens: int, size: int) -> Launch:
        return lambda calls: launch(calls, tokens, size)

    sizes = sorted({model.hidden for model in MODELS.values()} | {LATENT, 1536, 128})
    return {f"{DECODE} x {size}": of(DECODE, size) for size in sizes}


PRODUCTS = {
    "Llama-8B, up": (14336, 4096),
    "Llama-8B, down": (4096, 14336),
    "DeepSeek-V3, down to latents": (2112, 7168),
    "gpt-oss-20b, query, key and value": (5120, 2880),
}
"""Rows and columns of weights. AITER splits the third's sums on gfx950, and joins them in another kernel."""


def products(launch: Callable[[TritonCalls, int, int, int], object]) -> dict[str, Launch]:
    """What `launch` does with tokens, and a weight's rows and columns."""

    def of(tokens: int, rows: int, size: int) -> Launch:
        return lambda calls: launch(calls, tokens, rows, size)

    return {
        f"{name}: {tokens} tokens": of(tokens, rows, size)
        for name, (rows, size) in PRODUCTS.items()
        for tokens in (DECODE, PREFILL)
    }


def rotations(is_fp8: bool) -> dict[str, Launch]:
    def of(tokens: int, model: Model) -> Launch:
        half = model.head_size // 2
        return lambda calls: calls.rotate_and_cache(
            (
                bf16(tokens, model.heads, model.head_size),
                bf16(tokens, model.kv_heads, model.head_size),
                bf16(tokens, model.kv_heads, model.head_size),
            ),
            cache(calls, model, is_fp8),
            i64(tokens),
            (bf16(tokens, half), bf16(tokens, half)),
        )

    return {
        f"{name}: {tokens} tokens{', fp8' if is_fp8 else ''}": of(tokens, MODELS[name])
        for name in GROUPED
        for tokens in (DECODE,)
    }


def latent_attentions() -> dict[str, Launch]:
    """DeepSeek-V3, whole and with its heads over 8 ranks."""

    def of(tokens: int, heads: int, splits: int) -> Launch:
        return lambda calls: calls.latent_attention(
            bf16(tokens, heads, LATENT + ROTATED),
            bf16(BLOCKS * BLOCK_SIZE, 1, LATENT + ROTATED),
            LATENT,
            (i32(tokens + 1), i32(tokens * CONTEXT)),
            0.1,
            splits,
        )

    return {
        f"DeepSeek-V3: {tokens} tokens, {heads} heads, {splits} parts": of(tokens, heads, splits)
        for tokens, heads, splits in ((DECODE, 128, 4), (DECODE, 16, 16), (512, 128, 1))
    }


def chosen_latent_attentions() -> dict[str, Launch]:
    def of(tokens: int, heads: int) -> Launch:
        return lambda calls: calls.chosen_latent_attention(
            bf16(tokens, heads, LATENT + ROTATED),
            bf16(BLOCKS, BLOCK_SIZE, 1, LATENT + ROTATED),
            LATENT,
            i32(tokens, 2048),
            rows(tokens),
            0.1,
        )

    return {f"DeepSeek-V3.2: {tokens} tokens, {heads} heads": of(tokens, heads) for tokens, heads in ((DECODE, 128), (512, 16))}


def expert_launches(launch: Callable[[TritonCalls, Tensor, Tensor, SortedTokens, Tensor], object]) -> dict[str, Launch]:
    """What `launch` does with vectors, weights, sorted tokens and ids, for the products up and down of each model with experts."""

    def of(tokens: int, model: Model, is_up: bool) -> Launch:
        assert model.experts is not None
        count, chosen, width = model.experts
        sizes = (2 * width, model.hidden) if is_up else (model.hidden, width)
        block_size = 16 if tokens == DECODE else 64

        def run(calls: TritonCalls) -> object:
            ids = i32(tokens, chosen)
            x = bf16(tokens if is_up else tokens * chosen, sizes[1])
            blocks = ids.numel() // block_size + count
            sorted_tokens = SortedTokens(i32(blocks * block_size), i32(blocks), i32(1), block_size)
            return launch(calls, x, bf16(count, *sizes), sorted_tokens, ids)

        return run

    return {
        f"{name}: {tokens} tokens, {'up' if is_up else 'down'}": of(tokens, model, is_up)
        for name, model in MODELS.items()
        if model.experts is not None
        for tokens in (DECODE, PREFILL)
        for is_up in (True, False)
    }


def sortings() -> dict[str, Launch]:
    def of(tokens: int, count: int, chosen: int) -> Launch:
        return lambda calls: calls.sort_tokens(i32(tokens, chosen), count, 16 if tokens == DECODE else 64)

    return {
        f"{name}: {tokens} tokens": of(tokens, model.experts[0], model.experts[1])
        for name, model in MODELS.items()
        if model.experts is not None
        for tokens in (DECODE, PREFILL)
    }


def turned_heads() -> dict[str, Launch]:
    """Heads of 64 rotated elements behind others (DeepSeek-V3), and half of each of 128 (GLM-4)."""

    def of(tokens: int, heads: int, size: int, rotated: int) -> Launch:
        return lambda calls: calls.rotate(bf16(tokens, heads, size), bf16(tokens, rotated // 2), bf16(tokens, rotated // 2))

    return {
        f"{tokens} tokens, {rotated} of {size}": of(tokens, heads, size, rotated)
        for tokens in (DECODE, PREFILL)
        for heads, size, rotated in ((128, ROTATED, ROTATED), (96, 128, 64))
    }


LAUNCHES: dict[str, dict[str, Launch]] = {
    "rms_norm": norms(lambda calls, tokens, size: calls.rms_norm(bf16(tokens, size), bf16(size), 1e-6)),
    "add_rms_norm": norms(
        lambda calls, tokens, size: calls.add_rms_norm(bf16(tokens, size), bf16(tokens, size), bf16(size), 1e-6)
    ),
    "layer_norm": {
        "DeepSeek-V3.2's indexer": lambda calls: calls.layer_norm(bf16(PREFILL, 128), bf16(128), bf16(128), 1e-6),
    },
    "rotate": turned_heads(),
    "rotate_and_cache": rotations(is_fp8=False) | rotations(is_fp8=True),
    "attention": attentions(),
    "latent_attention": latent_attentions(),
    "chosen_latent_attention": chosen_latent_attentions(),
    "gemm": products(lambda calls, tokens, rows, size: calls.gemm(bf16(tokens, size), bf16(rows, size), None)),
    "gemm_fp8": products(
        lambda calls, tokens, rows, size: calls.gemm_fp8(
            Scaled(fp8(calls, tokens, size), f32(tokens)), Scaled(fp8(calls, rows, size), f32(rows)), None, torch.bfloat16
        )
    ),
    "gemm_fp8_block": products(
        lambda calls, tokens, rows, size: calls.gemm_fp8_block(
            Scaled(fp8(calls, tokens, size), f32(tokens, -(-size // 128))),
            Scaled(fp8(calls, rows, size), f32(-(-rows // 128), -(-size // 128))),
            torch.bfloat16,
        )
    ),
    "quantize": norms(lambda calls, tokens, size: calls.quantize(bf16(tokens, size))),
    "quantize_groups": norms(lambda calls, tokens, size: calls.quantize_groups(bf16(tokens, size // 128 * 128))),
    "sort_tokens": sortings(),
    "gemm_experts": expert_launches(lambda calls, x, weight, tokens, ids: calls.gemm_experts(x, weight, tokens, ids, None)),
}
"""By method of TritonCalls, then by a word on the shape."""
