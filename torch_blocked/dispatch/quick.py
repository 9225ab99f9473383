"""The operators that forward and backward of a network call most, once more in C++ (csrc/python/quick.h).

Their handlers there take the arguments that lie as the kernels read them, so that nothing is reordered, copied or
falls back, and leave all others to the handlers in Python. The answers are the same. The dispatcher calls them before
it comes to `__torch_dispatch__`.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from torch_blocked import _python
from torch_blocked.dispatch.convolution import CHANNELS, record_packing
from torch_blocked.dispatch.pointwise import AS_ANOTHER, KEEPS_DTYPE, POOLED, out_variant
from torch_blocked.dispatch.registry import QUICK
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

POINTWISE = """
    add add_ sub sub_ mul mul_ div div_ div.Scalar clone
    relu relu_ relu6 relu6_ hardtanh hardtanh_ leaky_relu leaky_relu_ gelu silu silu_
    hardswish hardswish_ sigmoid sigmoid_ hardsigmoid hardsigmoid_ tanh tanh_ elu elu_ mish clamp.default clamp_.default
    abs neg exp sqrt rsqrt square pow.Tensor_Scalar rsub.Scalar maximum minimum
    threshold_backward hardtanh_backward leaky_relu_backward gelu_backward silu_backward hardswish_backward
    sigmoid_backward hardsigmoid_backward
""".split()

# Of zeros, or a gradient of zeros, the others make zeros.
NOT_ZERO_OF_ZEROS = {"div", "div_", "exp", "hardsigmoid", "hardsigmoid_", "rsqrt", "sigmoid", "sigmoid_"}


def _pointwise(func: OpOverload) -> _python.Quick:
    keeps_zero = func._opname not in NOT_ZERO_OF_ZEROS
    op, rest = AS_ANOTHER.get(func, (func, ()))
    variant = out_variant(op) if op._opname in KEEPS_DTYPE else None
    out = variant[0]._overloadname if variant else ""
    computed = _python.Computed(op._schema.name, op._schema.overload_name, rest)
    name, overload = func._schema.name, func._schema.overload_name
    return _python.Pointwise(BlockedTensor, name, overload, computed, out, POOLED, keeps_zero)


def _overload(name: str, overload: str) -> OpOverload:
    return getattr(getattr(aten, name.removeprefix("aten::")), overload or "default")


for _name in POINTWISE:
    _op, _, _which = _name.partition(".")
    _func = _overload(_op, _which or ("Tensor" if "Tensor" in getattr(aten, _op).overloads() else "default"))
    QUICK[_func] = _pointwise(_func)
for _quick in _python.quick_handlers(BlockedTensor, CHANNELS, record_packing):
    QUICK[_overload(_quick.name, _quick.overload)] = _quick
for _quick in QUICK.values():
    _python.install(_quick)
