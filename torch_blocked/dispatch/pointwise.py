"""Pointwise operators: the same operator on the physical tensor, the padding cleared unless f(0) = 0."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked.dispatch.fallback import assign, bump_version, fallback
from torch_blocked.dispatch.physical import are_alike, clear_padding, lead, operand
from torch_blocked.dispatch.registry import register
from torch_blocked.reorder import to_plain
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

# f(0) = 0 by the defaults: the padding stays zero by itself.
ZERO_PRESERVING = """
    abs asin asinh atan atanh ceil deg2rad erf erfinv expm1 floor frac gelu hardswish leaky_relu log1p mish neg
    nan_to_num positive rad2deg relu round sgn sign silu sin sinh sqrt square tan tanh trunc
""".split()

# f(0) is not 0, or depends on the arguments.
PADDING_CLEARED = """
    acos acosh bitwise_not celu clamp clamp_max clamp_min cos cosh digamma elu erfc exp exp2 hardsigmoid hardtanh
    isfinite isinf isnan lgamma log log10 log2 log_sigmoid_forward logical_not logit reciprocal rsqrt sigmoid sinc
    softplus softshrink threshold
""".split()

# Of several tensors, mixed plain and blocked, broadcast as PyTorch does. The padding is cleared.
SEVERAL_TENSORS = """
    add sub rsub mul div true_divide pow maximum minimum fmod remainder floor_divide atan2 copysign hypot eq ne lt
    le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where lerp addcmul addcdiv clamp
    clamp_min clamp_max threshold_backward sigmoid_backward tanh_backward silu_backward gelu_backward
    hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward elu_backward softplus_backward
   
""".split()

INTEGER_DIVISIONS = {getattr(aten, n + _) for n in ["div", "floor_divide", "fmod", "remainder"] for _ in ("", "_")}

# Random in-place operators draw for the logical tensor, in its order: the numbers are those of a plain tensor.
RANDOM_IN_PLACE = """
    bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
""".split()


def unary(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> object:
    """A function of one tensor that makes zero of zero, at least by its defaults."""
    physical = func(x._physical, *args, **kwargs)
    if args or kwargs:  # an infinite slope makes NaN of zero
        clear_padding(physical, x._blocking, x.shape)
    return BlockedTensor(physical, x._blocking, x.shape)


def unary_(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> object:
    """The same in place."""
    func(x._physical, *args, **kwargs)
    if args or kwargs:
        clear_padding(x._physical, x._blocking, x.shape)
    bump_version(x)
    return x


def pointwise(func: OpOverload, *args: object, **kwargs: object) -> object:
    """A function of tensors and scalars that broadcast; the answer takes the first blocked one's format."""
    if are_alike(args) and not _needs_plain(func, args[0], kwargs):  # nothing broadcasts: most calls, and quickly told
        return _pointwise_alike(func, *args, **kwargs)
    first = lead(args)
    size = _broadcast_size(args)
    if first is None or first.dim() != len(size) or _needs_plain(func, first, kwargs):
        return fallback(func, *args, **kwargs)
    blocking = first._blocking
    physical = func(*(operand(a, blocking, size) for a in args), **kwargs)
    return BlockedTensor(clear_padding(physical, blocking, size), blocking, size)


def _pointwise_alike(func: OpOverload, *args: object, **kwargs: object) -> BlockedTensor:
    blocking, size = args[0]._blocking, args[0].shape
    physical = func(*[a._physical if isinstance(a, BlockedTensor) else a for a in args], **kwargs)
    return BlockedTensor(clear_padding(physical, blocking, size), blocking, size)


def pointwise_(func: OpOverload, x: Tensor, *args: object, **kwargs: object) -> object:
    """The same in place: what is written to keeps its format, plain or blocked."""
    if not isinstance(x, BlockedTensor):
        return func(x, *map(to_plain, args), **kwargs)
    if _broadcast_size((x, *args)) != x.shape or _needs_plain(func, x, kwargs):
        return fallback(func, x, *args, **kwargs)
    func(x._physical, *(operand(a, x._blocking, x.shape) for a in args), **kwargs)
    clear_padding(x._physical, x._blocking, x.shape)
    bump_version(x)
    return x


def _needs_plain(func: OpOverload, x: BlockedTensor, kwargs: dict) -> bool:
    """Integers divided in the padding are 0 / 0, an error; tensors given by keyword are rare."""
    divides = not x.is_floating_point() and func.overloadpacket in INTEGER_DIVISIONS
    return divides or (bool(kwargs) and any(isinstance(v, Tensor) for v in kwargs.values()))


def _broadcast_size(args: tuple) -> torch.Size:
    sizes = [a.shape for a in args if isinstance(a, Tensor)]
    return sizes[0] if sizes.count(sizes[0]) == len(sizes) else torch.broadcast_shapes(*sizes)


def random_(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> object:
    """Random numbers in place, the ones a plain tensor would get."""
    if any(isinstance(a, BlockedTensor) for a in args):
        return fallback(func, x, *args, **kwargs)
    assign(x, func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs))
    return x


def _overloads(name: str) -> tuple[list[OpOverload], list[OpOverload]]:
    """The overloads of `name` and of `name_`, without those that write to an `out` argument."""
    packets = [getattr(aten, n, None) for n in (name, name + "_")]
    both = []
    for packet in packets:
        overloads = [getattr(packet, o) for o in packet.overloads()] if packet else []
        both.append([o for o in overloads if not any(a.is_out for a in o._schema.arguments) and _returns_one_tensor(o)])
    return both[0], both[1]


def _returns_one_tensor(overload: OpOverload) -> bool:
    takes_tensor = any(str(a.type) == "Tensor" for a in overload._schema.arguments[:1])
    return takes_tensor and [str(r.type) for r in overload._schema.returns] == ["Tensor"]


def _register_family(names: list[str], out_of_place: object, in_place: object) -> None:
    for name in names:
        for overloads, handler in zip(_overloads(name), (out_of_place, in_place), strict=True):
            register(*overloads)(handler)


_register_family(ZERO_PRESERVING, unary, unary_)
_register_family(sorted({*PADDING_CLEARED, *SEVERAL_TENSORS}), pointwise, pointwise_)
for _name in RANDOM_IN_PLACE:
    register(*_overloads(_name.removesuffix("_"))[1])(random_)
