"""The operators that a network's forward calls most, once more in C++ (csrc/python/handlers.h).

Their handlers there take the arguments that lie as the kernels read them, so that nothing is reordered, copied or
falls back, and leave all others to the handlers in Python. The answers are the same; a call costs a third.
"""

from __future__ import annotations

import torch

from torch_blocked import _python
from torch_blocked.dispatch.convolution import CHANNELS, record_packing
from torch_blocked.dispatch.pointwise import KEEPS_DTYPE, POOLED, ZERO_OF_ZEROS, ZERO_PRESERVING, out_variant
from torch_blocked.dispatch.registry import QUICK, QuickHandler
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

POINTWISE = "add mul relu relu6 leaky_relu gelu silu hardswish sigmoid hardsigmoid hardtanh".split()


def _pointwise(name: str) -> QuickHandler:
    packet = getattr(aten, name)
    func = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    out = out_variant(func)[0]._overloadname if name in KEEPS_DTYPE else ""
    keeps_zero = name.removesuffix("_") in (*ZERO_PRESERVING, *ZERO_OF_ZEROS)
    schema = func._schema
    QUICK[func] = _python.Pointwise(BlockedTensor, schema.name, schema.overload_name, out, POOLED, keeps_zero)


_handlers = _python.Handlers(BlockedTensor, CHANNELS, record_packing)
QUICK.update(
    {
        aten.convolution.default: _handlers.convolution,
        aten.conv2d.default: _handlers.conv2d,
        aten.native_batch_norm.default: _handlers.native_batch_norm,
        aten.batch_norm.default: _handlers.batch_norm,
        aten.mean.dim: _handlers.mean,
        aten._adaptive_avg_pool2d.default: _handlers.adaptive_avg_pool2d,
        aten.adaptive_avg_pool2d.default: _handlers.adaptive_avg_pool2d,
        aten.cat.default: _handlers.cat,
    }
)
for _name in POINTWISE:
    for _either in (_name, f"{_name}_"):
        _pointwise(_either)
