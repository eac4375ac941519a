"""A device of its own, without hardware: `torch.device("far", 0)`.

Its tensors are wrappers around tensors of the host, so the numbers are right, but for torch, and for whoever asks, they lie elsewhere: an operation
that mixes both raises MixedDevices, as a GPU's kernels would fail, and numpy cannot have them. Within `recording` whatever a graph cannot
hold raises NotRecordable: a copy from or to the host, a value or a shape that the host must know.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from model_worker.graphs.recorder import Replay

_setup_privateuseone_for_python_backend("far")

FAR = torch.device("far", 0)

_aten = torch.ops.aten
_HOST_MUST_KNOW = ("nonzero", "unique", "masked_select", "_local_scalar_dense", "equal", "is_nonzero")


class MixedDevices(Exception):
    """An operation had tensors of the host and of the far device."""


class NotRecordable(Exception):
    """Part of what is recorded needs the host."""


class _FarTensor(Tensor):
    """Stands for `near`, which nobody else has."""

    near: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, near: Tensor) -> "_FarTensor":
        made: _FarTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.size(), strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=FAR
        )
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        _touch_host("tolist")
        return self.near.tolist()


class _FarMode(TorchDispatchMode):
    """In force, new tensors may be made on the far device, and copied to it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and its import takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_is_recording = False


@contextmanager
def recording() -> Iterator[None]:
    """Within it nothing may need the host."""
    global _is_recording
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False


_taken: list[int] = []


@contextmanager
def counting() -> Iterator[list[int]]:
    """Numbers of elements of what is copied from the device to the host within it, in order."""
    _taken.clear()
    yield _taken


@contextmanager
def far_mode() -> Iterator[torch.device]:
    """The device, for one thread."""
    with _FarMode():
        yield FAR


@pytest.fixture
def far() -> Iterator[torch.device]:
    """The device, for the thread of one test."""
    with far_mode() as device:
        yield device


class FarRecorder:
    """A `Recorder` that runs again what it recorded, and lets neither touch the host."""

    def record(self, run: Callable[[], None]) -> Replay:
        def replay() -> None:
            with recording():
                run()

        replay()
        return replay


def _touch_host(what: str) -> None:
    if _is_recording:
        raise NotRecordable(f"{what} needs the host")


@cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def _asks_host(func: Any) -> bool:
    return any(word in str(func) for word in _HOST_MUST_KNOW)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs = dict(zip(_names(func), args, strict=False)) | kwargs
    far, near = [], []
    for value in kwargs.values():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Tensor):
                (far if isinstance(each, _FarTensor) else near).append(each)
    is_far, moves = bool(far), False
    if func is _aten.copy_.default:
        is_far = isinstance(kwargs["self"], _FarTensor)
        moves = is_far != isinstance(kwargs["src"], _FarTensor)
    elif kwargs.get("device") is not None:
        is_far = torch.device(kwargs["device"]).type == "far"
        moves = bool(far or near) and is_far != bool(far)
        kwargs["device"] = torch.device("cpu")
    if far and func is not _aten.copy_.default and any(tensor.dim() for tensor in near):
        raise MixedDevices(f"{func}: {[tuple(tensor.shape) for tensor in near]} of the host beside the far device's")
    if moves or (far and _asks_host(func)):
        _touch_host(str(func))
    if moves and not is_far:
        _taken.extend(tensor.numel() for tensor in far)
    result = func(**{name: _each(_near, value) for name, value in kwargs.items()})
    if not is_far:
        return result
    known = {id(tensor.near): tensor for tensor in far}
    # Inference tensors have no versions, and a wrapper needs one: its own is an ordinary tensor.
    with torch.inference_mode(False):
        return _each(lambda leaf: _far(known, leaf), result)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """`value`, or each element of a list or tuple, changed."""
    return type(value)(change(each) for each in value) if type(value) in (list, tuple) else change(value)


def _far(known: dict[int, _FarTensor], leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return known[id(leaf)] if id(leaf) in known else _FarTensor(leaf)


def _near(leaf: Any) -> Any:
    return leaf.near if isinstance(leaf, _FarTensor) else leaf
