"""An AITER of which only the declarations are known: what our calls give to its functions is bound to them, and nothing is computed."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model_worker.kernels.aiter.library import AiterFunction, AiterLibrary, AiterUnavailable
from tests.aiter.declarations import Declaration, Undeclared
from tests.aiter.stand_ins import module_aiter_enum

Declared = Callable[[str, str], Declaration]
"""The declaration of a module's function. Raises Undeclared."""

RESULT_COUNTS = {
    "fused_qk_rope_reshape_and_cache": 4,
    "fused_flatten_fp8_group_quant": 2,
    "per_token_quant_hip": 2,
    "per_group_quant_hip": 2,
}
"""Of functions that give more than one tensor."""

QUANTIZERS = {"per_Token": "per_token_quant_hip", "per_1x128": "per_group_quant_hip"}
"""What AITER's `get_hip_quant` returns, by the name of the QuantType."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor,
    "int": int,
    "float": (float, int),
    "bool": bool,
    "str": str,
    "dtype": torch.dtype,
}


class WrongCall(Exception):
    """A call does not fit the declaration."""


class DeclaredLibrary(AiterLibrary):
    """See above. `asked` are the functions that were wanted, by module and name."""

    def __init__(self, arch: str, declared: Declared) -> None:
        self.arch = arch
        self.asked: set[tuple[str, str]] = set()
        self._declared = declared

    def function(self, module: str, name: str) -> AiterFunction:
        if hasattr(module_aiter_enum, name):
            return AiterFunction(name, getattr(module_aiter_enum, name), None)
        try:
            declaration = self._declared(module, name)
        except Undeclared as undeclared:
            raise AiterUnavailable(str(undeclared)) from undeclared
        self.asked.add((module, name))
        # torch hides the parameters of a compiled function, see Declaration.
        parameters = None if declaration.is_compiled else frozenset(declaration.signature.parameters)

        def stand_in(*args: Any, **keywords: Any) -> Any:
            check(name, declaration, args, keywords)
            if name == "get_hip_quant":
                return self.function(module, QUANTIZERS[keywords["qType"].name]).function
            results = [torch.empty(1, 1, 1) for _ in range(RESULT_COUNTS.get(name, 1))]
            return results if len(results) > 1 else results[0]

        return AiterFunction(f"{module}.{name}", stand_in, parameters)

    def forget(self, module: str, name: str) -> None:
        self.function(module, name)

    def triton_dtype(self, dtype: torch.dtype) -> Any:
        return dtype


def check(name: str, declaration: Declaration, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raises WrongCall. Types are compared for compiled functions only: those of the others are comments, some of them wrong."""
    try:
        bound = declaration.signature.bind(*args, **keywords)
    except TypeError as error:
        raise WrongCall(f"{name}: {error}; it is {declaration.signature} in {declaration.file}") from error
    if not declaration.is_compiled:
        return
    for parameter, value in bound.arguments.items():
        annotation = declaration.signature.parameters[parameter].annotation
        if annotation is not inspect.Parameter.empty and not _fits(annotation, value):
            raise WrongCall(f"{name}: {parameter} is {annotation} in {declaration.file}, not {type(value).__name__}")


def _fits(annotation: str, value: object) -> bool:
    """Whether a value is of a type by its text; true for types that are not known here."""
    plain = annotation.replace("torch.", "")
    optional = re.fullmatch(r"Optional\[(.*)\]|(.*) \| None", plain)
    if optional is not None:
        if value is None:
            return True
        plain = optional.group(1) or optional.group(2)
    known = _TYPES.get(plain)
    return known is None or isinstance(value, known)
