"""What people read of the options that say where a worker computes."""

from services.cli.config_options import Text
from services.worker.device_config import DEVICES, DTYPES, KERNELS, KV_CACHE_DTYPES, QUANTIZATIONS

DEVICE_TEXTS = {
    "device": Text(
        "Where the model computes: cuda is a GPU of either maker, one for each rank; auto is a GPU if there is one.",
        choices=DEVICES,
    ),
    "kernels": Text(
        "With what it computes. torch runs everywhere; cpu are kernels of our own for processors with AVX2 or AVX-512; aiter are AMD's kernels for "
        "ROCm: those compiled from CK, HIP and assembly (aiter-native), or those in Triton (aiter-triton), as GPU and model have it. auto: aiter on "
        "ROCm, cpu on a CPU for which they are compiled or can be, else torch.",
        choices=KERNELS,
    ),
    "dtype": Text(
        "Of weights and activations (with kernels cpu of weights; activations are float32, and KV is, or else float16). auto: with kernels cpu bfloat16 "
        "where the processor multiplies it and the model's files are not in float16, else float16; with torch on a CPU float32; on a GPU what the "
        "model's files have, bfloat16 for float32 with aiter.",
        choices=DTYPES,
    ),
    "gpu_memory_utilization": Text(
        "Part of a GPU's memory that may be in use, above 0, at most 1; what the model leaves of it is for the KV cache. Without it: 0.9.",
        "PART",
    ),
    "kv_cache_dtype": Text(
        "Of the KV cache. auto: as dtype. fp8 holds twice as many tokens, and needs aiter.", choices=KV_CACHE_DTYPES
    ),
    "quantization": Text(
        "Of linear layers, when they are loaded. With aiter fp8 (a scale per token and output) or fp8_block (per 128 numbers); with cpu int8 (per 32, "
        "the embedding too).",
        choices=QUANTIZATIONS,
    ),
    "enforce_eager": Text("On a GPU: record no decode batches, start every kernel by itself."),
    "graph_sizes": Text(
        "On a GPU: rows of a decode batch that is recorded; may be given several times. Without it: 1, 2, 4 and multiples of 8 up to 256.",
        "ROWS",
        name="--graph-size",
    ),
}
