"""The operators that forward and backward of a network call most, once more in C++ (csrc/python/handlers.h).

Their handlers there take the arguments that lie as the kernels read them, so that nothing is reordered, copied or
falls back, and leave all others to the handlers in Python. The answers are the same; a call costs a third.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from torch_blocked import _python
from torch_blocked.dispatch.convolution import CHANNELS, record_packing
from torch_blocked.dispatch.pointwise import AS_ANOTHER, KEEPS_DTYPE, POOLED, out_variant
from torch_blocked.dispatch.registry import QUICK, QuickHandler
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


def _pointwise(func: OpOverload) -> QuickHandler:
    keeps_zero = func._opname not in NOT_ZERO_OF_ZEROS
    op, rest = AS_ANOTHER.get(func, (func, ()))
    variant = out_variant(op) if op._opname in KEEPS_DTYPE else None
    out = variant[0]._overloadname if variant else ""
    name, overload = op._schema.name, op._schema.overload_name
    return _python.Pointwise(BlockedTensor, name, overload, out, rest, POOLED, keeps_zero)


_handlers = _python.Handlers(BlockedTensor, CHANNELS, record_packing)
QUICK.update(
    {
        aten.convolution.default: _handlers.convolution,
        aten.conv2d.default: _handlers.conv2d,
        aten.convolution_backward.default: _handlers.convolution_backward,
        aten.native_batch_norm.default: _handlers.native_batch_norm,
        aten.batch_norm.default: _handlers.batch_norm,
        aten.native_batch_norm_backward.default: _handlers.native_batch_norm_backward,
        aten.mean.dim: _handlers.mean,
        aten.sum.dim_IntList: _handlers.sum,
        aten._adaptive_avg_pool2d.default: _handlers.adaptive_avg_pool2d,
        aten.adaptive_avg_pool2d.default: _handlers.adaptive_avg_pool2d,
        aten.cat.default: _handlers.cat,
        aten.detach.default: _handlers.detach,
    }
)
for _name in POINTWISE:
    _packet, _overload = getattr(aten, _name.partition(".")[0]), _name.partition(".")[2]
    _func = getattr(_packet, _overload or ("Tensor" if "Tensor" in _packet.overloads() else "default"))
    QUICK[_func] = _pointwise(_func)
