"""All layers of a plain model as one call."""

from collections.abc import Sequence
from ctypes import addressof, sizeof

from torch import Tensor

from model_worker.kernels.cpu.attention import CpuAttention
from model_worker.kernels.cpu.library import KIND, AnglesView, CpuLibrary, LayerShape, LayerView, WantedView, address, view_of
from model_worker.kernels.cpu.packed_weight import PackedWeight
from model_worker.kernels.interface import LayerStack, PagedAttention, PlainLayer, Product
from model_worker.kv_pool import KVPool


class CpuLayerStack(LayerStack):
    """Computes what the layers compute one by one, bit for bit. Keeps `layers`, whose weights have been packed."""

    def __init__(self, library: CpuLibrary, layers: Sequence[PlainLayer]) -> None:
        self._library = library
        self._layers = layers
        self._views = (LayerView * len(layers))(*map(_view_of, layers))
        self._shape = LayerShape()
        self._pool: KVPool | None = None  # whose addresses the views have

    def run(
        self,
        layers: range,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: PagedAttention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(attention, CpuAttention) and hidden.is_contiguous(), "these kernels attend themselves"
        if self._pool is not attention.pool:
            self._take(attention.pool)
        cos, sin = rotation
        first = addressof(self._views) + layers.start * sizeof(LayerView)
        angles, count = AnglesView(address(cos), address(sin), cos.shape[1]), len(hidden)
        tokens = WantedView(None, 0)
        if wanted is not None and len(wanted) < count:
            tokens, count = WantedView(address(wanted), len(wanted)), len(wanted)
        views = view_of(self._shape), attention.batch, view_of(angles), view_of(tokens)
        self._library.run_layers(first, len(layers), *views, address(hidden))
        return hidden[:count] if wanted is None or tokens.count else hidden.index_select(0, wanted)

    def _take(self, pool: KVPool) -> None:
        plain = self._layers[0]
        kind = KIND[pool.dtype]
        heads = plain.num_heads, plain.num_kv_heads, pool.head_dim
        self._shape = LayerShape(kind, *heads, pool.block_size, plain.eps, pool.head_dim**-0.5)
        for index, view in enumerate(self._views):
            view.keys, view.values = address(pool.keys(index)), address(pool.values(index))
        self._pool = pool


def are_packed(layers: Sequence[PlainLayer]) -> bool:
    """Whether all their weights are such as a stack can take."""
    products = (product for layer in layers for product in (layer.qkv, layer.output, layer.gate_up, layer.down))
    return all(isinstance(product, PackedWeight) for product in products)


def _view_of(layer: PlainLayer) -> LayerView:
    query_norm, key_norm = layer.head_norms or (None, None)
    return LayerView(
        address(layer.input_norm),
        _packed(layer.qkv).view(layer.qkv_bias),
        _packed(layer.output).view(layer.output_bias),
        address(query_norm),
        address(key_norm),
        address(layer.post_norm),
        _packed(layer.gate_up).view(layer.gate_up_bias),
        _packed(layer.down).view(layer.down_bias),
    )


def _packed(product: Product) -> PackedWeight:
    assert isinstance(product, PackedWeight)
    return product
