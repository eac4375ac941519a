"""Python in place of AITER's compiled modules, so that its real declarations are called on a machine that cannot compile them.

AITER imports a module `module_x` by name before it would build it with ROCm's compiler. Here that import gives `stand_ins/module_x.py`: plain functions with the
names and parameters of the operators, computing in torch. So a call passes through AITER's own declaration, its torch operator and its schema; a
wrong name, order, type or missing output fails. What the compiled code would compute is not shown by this.
"""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

STAND_INS = Path(__file__).parent / "stand_ins"
MODULE_PREFIX = "module_"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator as it reached the compiled module: `arguments` by the names of its parameters, defaults filled in."""

    module: str
    operator: str
    arguments: dict[str, Any]


CALLS: list[Call] = []
"""Every call so far, oldest first; each test starts with none."""


class MissingStandIn(Exception):
    """A compiled module or operator was reached that has no stand-in. Not an ImportError or AttributeError: AITER would go on to compile."""


def install() -> None:
    """From now on, compiled modules of AITER are taken from `stand_ins/`."""
    sys.meta_path.insert(0, _StandInFinder())


class _StandInFinder:
    """Finds every `module_*` that AITER asks for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(MODULE_PREFIX):
            return None
        file = STAND_INS / f"{name}.py"
        if not file.exists():
            raise MissingStandIn(f"AITER wants its compiled module {name}: write {file.name} in {STAND_INS}")
        return importlib.util.spec_from_file_location(name, file, loader=_StandInLoader(name, str(file)))


class _StandInLoader(importlib.machinery.SourceFileLoader):
    """Loads a stand-in and puts a recorder around each of its public functions."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.__dict__["__getattr__"] = functools.partial(_missing, module.__name__)
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"):
                setattr(module, name, _recorded(module.__name__, name, function))


def _missing(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise MissingStandIn(f"AITER wants {name} of its compiled {module}: write it in {STAND_INS / module}.py")


def _recorded(module: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def record(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        CALLS.append(Call(module, name, dict(bound.arguments)))
        return function(*bound.args, **bound.kwargs)

    # AITER reads the C++ types of a compiled function from its docstring, except where it starts as pybind's do for an enum.
    record.__doc__ = "Members:"
    return record
