"""What tests/opinfo.py does not ask of blocked tensors, and why: (operator, check) -> reason."""

from __future__ import annotations

# The answer's elements are whatever lies in memory: only shape, dtype and padding are compared.
UNINITIALIZED = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())

# Sums of products in another order than PyTorch's: the tolerance of float32 is taken of the largest value.
SUMS_OF_PRODUCTS = frozenset(f"nn.functional.conv{kind}{ndim}d" for kind in ("", "_transpose") for ndim in (1, 2, 3))
# Of half precision PyTorch rounds partial sums, statistics or weights too, the kernels the answer alone: the tolerance
# is one rounding of the largest value.
ROUNDED_ONCE = SUMS_OF_PRODUCTS | {"native_batch_norm", "_native_batch_norm_legit"}
ROUNDED_ONCE |= {"nn.functional.batch_norm", "nn.functional.instance_norm"}
ROUNDED_ONCE |= {f"nn.functional.interpolate.{mode}" for mode in ("linear", "bilinear", "bicubic", "trilinear")}
SUMS_OF_PRODUCTS |= {"linalg.householder_product", "pow"}  # gradients of what was broadcast

_BYTES = "PyTorch compares the addresses of `out` and its view before any operator: an error that says so"
_AXIS = "a blocked axis of one cannot leave a tensor in place: an error that says so"
_IGNORED = "PyTorch never writes `out` where an argument is of a tensor subclass"

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("contiguous", "views"): "the plain tensor, so always a copy",
    ("linalg.matrix_power", "out"): _BYTES,
    ("linalg.matrix_rank", "out"): _IGNORED,
    ("linalg.matrix_rank.hermitian", "out"): _IGNORED,
    ("matmul", "out"): _BYTES,
    ("squeeze", "inplace"): _AXIS,
    ("squeeze.multiple", "inplace"): _AXIS,
}
