"""What Triton 3.6's interpreter lacks for AITER's kernels. With `TRITON_INTERPRET=1` it runs a kernel's programs one after the other in numpy.

- `tl.assume` is a hint to a compiler: the interpreter demands it of values that it cannot decide, so here it means nothing.
- bfloat16 goes through ml_dtypes: the interpreter keeps it as 16-bit integers, and rounds towards zero.
- 8-bit floats: MI300's (no negative zero, `fnuz`) are unknown to it, and all of them are cut instead of rounded to nearest even.
- A function that a kernel calls patches the language again, for no effect, and `tl.flip` reduces with xor, element by element in Python: both took
  most of a rotation's time.
- `tl.dot` multiplies in float32: numpy cannot multiply bfloat16 matrices, and a GPU accumulates in float32 too.
"""

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = {
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
"""By Triton's names. The interpreter keeps their bits in unsigned bytes."""


def apply() -> None:
    """Patch the interpreter of this process. Call it once, before the first kernel runs."""
    InterpreterBuilder.create_assume = lambda self, condition: None
    _teach_bfloat16()
    _teach_float8()
    _patch_once_per_launch()
    _reduce_xor_in_numpy()


def _teach_bfloat16() -> None:
    numpy_dtype, create_dot = interpreter._get_np_dtype, InterpreterBuilder.create_dot

    def numpy_dtype_of(dtype: Any) -> np.dtype:
        if not isinstance(dtype, tl.pointer_type) and dtype.scalar == tl.bfloat16:
            return BFLOAT16
        return numpy_dtype(dtype)

    def cast(self: Any, source: TensorHandle, dtype: Any) -> TensorHandle:
        return TensorHandle(source.data.astype(numpy_dtype_of(dtype)), dtype.scalar)

    def bfloat16_constant(self: Any, value: float) -> TensorHandle:
        return TensorHandle(np.array([value], dtype=BFLOAT16), tl.bfloat16)

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.data.dtype != BFLOAT16:
            return handle
        return TensorHandle(handle.data.astype(np.float32), tl.float32)

    def dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    interpreter._get_np_dtype = numpy_dtype_of
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.get_bf16 = bfloat16_constant
    InterpreterBuilder.create_dot = dot


def _teach_float8() -> None:
    patch_lang_core = interpreter._patch_lang_core

    def patch_lang_core_with_fnuz(lang: Any, scope: Any) -> None:
        patch_lang_core(lang, scope)
        to_ir = lang.dtype.to_ir

        def to_ir_with_fnuz(self: Any, builder: Any) -> Any:
            if self.name == "fp8e4b8":
                return builder.get_fp8e4b8_ty()
            if self.name == "fp8e5b16":
                return builder.get_fp8e5b16_ty()
            return to_ir(self, builder)

        scope.set_attr(lang.dtype, "to_ir", to_ir_with_fnuz)

    def convert(self: Any, source: TensorHandle, dtype: Any, rounding_mode: Any = None) -> TensorHandle:
        data = source.data
        stored = FLOAT8.get(source.dtype.scalar.name)
        if stored is not None:
            data = np.ascontiguousarray(data).view(stored)
        data = data.astype(np.float32)
        wanted = FLOAT8.get(dtype.scalar.name)
        if wanted is None:
            return TensorHandle(data.astype(interpreter._get_np_dtype(dtype)), dtype.scalar)
        return TensorHandle(data.astype(wanted).view(np.uint8), dtype.scalar)

    interpreter._patch_lang_core = patch_lang_core_with_fnuz
    InterpreterBuilder.create_fp_to_fp = convert


def _patch_once_per_launch() -> None:
    patch_lang = interpreter._patch_lang

    def patch_lang_wholly(function: Any) -> Any:
        scope = patch_lang(function)
        for module in (tl, tl.core):
            interpreter._patch_builtin(module, interpreter.interpreter_builder, scope)
            interpreter._patch_lang_core(module, scope)
        return scope

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        return self.rewrite()(*args, **keywords)

    interpreter._patch_lang = patch_lang_wholly
    interpreter.InterpretedFunction.__call__ = call


def _reduce_xor_in_numpy() -> None:
    apply = interpreter.ReduceOps.apply_impl

    def apply_impl(self: Any, values: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return apply(self, values)
        data = values[0].handle.data
        return self.to_tensor(np.bitwise_xor.reduce(data, axis=self.axis, keepdims=self.keep_dims), values[0].dtype)

    interpreter.ReduceOps.apply_impl = apply_impl
