"""AITER for the far device (see `tests.model_worker.far_device`): its functions compute on what the device's tensors stand for."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from model_worker.kernels.aiter.library import AiterFunction, AiterLibrary
from tests.model_worker.far_device import _FarTensor


class FarLibrary(AiterLibrary):
    """Raises AssertionError where a function is given a tensor of the host: a GPU's kernel could not read it."""

    def function(self, module: str, name: str) -> AiterFunction:
        found = super().function(module, name)

        def call(**arguments: Any) -> Any:
            given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
            assert all(isinstance(tensor, _FarTensor) for tensor in given), f"{name} has tensors of the host"
            known = {id(tensor.near): tensor for tensor in given}
            result = found.function(**tree_map(lambda leaf: leaf.near if isinstance(leaf, _FarTensor) else leaf, arguments))
            return tree_map(lambda leaf: _far(leaf, known) if isinstance(leaf, Tensor) else leaf, result)

        return AiterFunction(found.name, call, found.parameters)


def _far(near: Tensor, known: dict[int, _FarTensor]) -> _FarTensor:
    found = known.get(id(near))
    return _FarTensor(near) if found is None else found
