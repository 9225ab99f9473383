"""Pointwise operators: the same operator on the physical tensor, the padding cleared unless f(0) = 0."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import library
from torch_blocked.dispatch.fallback import assign, bump_version, fallback
from torch_blocked.dispatch.physical import are_alike, broadcasts_to, clear_padding, is_expanded, lead, operand, shifted
from torch_blocked.dispatch.registry import Handler, register, register_rule
from torch_blocked.memory_desc import Blocking
from torch_blocked.physical import padding_of, same_size
from torch_blocked.reorder import to_plain
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

# f(0) = 0 by the defaults: the padding stays zero by itself.
ZERO_PRESERVING = """
    abs asin asinh atan atanh ceil deg2rad erf erfinv expm1 floor frac gelu hardswish leaky_relu log1p mish neg
    nan_to_num positive rad2deg relu round sgn sign silu sin sinh sqrt square tan tanh trunc
""".split()

# Of several tensors, zero where all are.
ZERO_OF_ZEROS = frozenset("add sub mul maximum minimum".split())

# PyTorch tags operators as pointwise; these are, and are not tagged.
UNTAGGED = """
    copysign elu_backward eq floor_divide ge gt hardsigmoid_backward hardswish hardswish_backward hardtanh_backward
    le leaky_relu_backward log_sigmoid_backward log_sigmoid_forward lt masked_fill mish ne _prelu_kernel
    _prelu_kernel_backward rsub softplus_backward threshold true_divide where
""".split()

# Of tensors of one floating dtype these give that dtype.
KEEPS_DTYPE = frozenset(
    """
    abs add addcdiv addcmul clamp clamp_max clamp_min cos div elu erf exp expm1 gelu gelu_backward hardsigmoid
    hardsigmoid_backward hardswish hardtanh hardtanh_backward leaky_relu leaky_relu_backward lerp log log1p maximum
    minimum mish mul neg pow reciprocal rsqrt sigmoid sigmoid_backward silu silu_backward sin softplus sqrt sub tanh
    tanh_backward threshold_backward
""".split()
)
# Operators of floats that ATen computes by another one, and that one's further arguments. Their own overloads with
# out= copy.
AS_ANOTHER = {aten.relu.default: (aten.clamp_min.default, (0,)), aten.square.default: (aten.pow.Tensor_Scalar, (2,))}
# Elements from which an answer lies in the pool: the C library gives memory as large back to the system, and the pages
# of the next answer would fault one by one.
POOLED = 1 << 18

# Of integers a division by zero is an error, and the padding is zero. `div` only where it rounds.
_DIVISIONS = [getattr(aten, n + _) for n in "div floor_divide fmod remainder".split() for _ in ("", "_")]
INTEGER_DIVISIONS = {getattr(packet, o) for packet in _DIVISIONS for o in packet.overloads()}

# Random in-place operators draw for the logical tensor, in its order: the numbers are those of a plain tensor.
RANDOM_IN_PLACE = """
    bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
""".split()


def unary(func: OpOverload, x: BlockedTensor, *args: object, **kwargs: object) -> object:
    """A function of one tensor that makes zero of zero, at least by its defaults."""
    physical = func(x._physical, *args, **kwargs) if kwargs else _call(func, [x._physical, *args])
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
    if not kwargs and are_alike(args) and args[0].is_floating_point():  # nothing broadcasts: most calls, quickly told
        blocking, size, zero = args[0]._blocking, args[0].shape, keeps_zero(func, args)
        args = [a._physical if isinstance(a, BlockedTensor) else a for a in args]
    else:
        blocking, size = _layout((*args, *kwargs.values()) if kwargs else args)
        zero = func._opname in ZERO_OF_ZEROS and not kwargs and all(_spans(a, blocking, size) for a in args)
        args, kwargs = _operands(func, args, kwargs, blocking, size)
    physical = func(*args, **kwargs) if kwargs else _call(func, args)
    if zero:
        return BlockedTensor(physical, blocking, size)
    if isinstance(physical, Tensor):
        return BlockedTensor(clear_padding(physical, blocking, size), blocking, size)
    return type(physical)(BlockedTensor(clear_padding(p, blocking, size), blocking, size) for p in physical)


def keeps_zero(func: OpOverload, args: tuple) -> bool:
    """Whether the answer is zero where all tensors among `args` are: its padding needs no clearing."""
    if func._opname in ("clamp", "hardtanh"):
        low, high = (0 if v is None else v for v in (*args[1:], 0, 0)[:2])
        return isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= 0 <= high
    return func._opname in ZERO_OF_ZEROS and all(isinstance(a, BlockedTensor) for a in args)


def _spans(x: object, blocking: Blocking, size: torch.Size) -> bool:
    """Whether it has padding where the answer has: it does not broadcast along a blocked axis."""
    if not isinstance(x, Tensor):
        return False
    new = len(size) - x.dim()
    return all(a >= new and x.size(a - new) == size[a] and not is_expanded(x, a - new) for a in blocking.axes)


def _call(func: OpOverload, args: list[object]) -> object:
    """`func` of physical tensors; a large answer in the pool."""
    whole = _whole(args)
    op, rest = AS_ANOTHER.get(func, (func, ()))
    variant = out_variant(op) if whole is not None and op._opname in KEEPS_DTYPE else None
    if variant is None:
        return func(*args)
    into, name = variant
    return into(*args, *rest, **{name: library.empty_like(whole)})


def _whole(args: list[object]) -> Tensor | None:
    """The argument that the answer of an operator of KEEPS_DTYPE is laid out as, if that is large."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    whole = max(tensors, key=Tensor.numel) if len(tensors) > 1 else tensors[0]
    if type(whole) is not Tensor or whole.numel() < POOLED or any(isinstance(a, complex) for a in args):
        return None
    if not (whole.is_cpu and whole.is_floating_point() and whole.is_contiguous()):
        return None
    return whole if all(t.dtype == whole.dtype and broadcasts_to(t.shape, whole.shape) for t in tensors) else None


@functools.cache
def out_variant(func: OpOverload) -> tuple[OpOverload, str] | None:
    """The overload with the same arguments that writes to one, and that one's name; None where it only copies."""
    arguments = [(a.name, str(a.type)) for a in func._schema.arguments]
    packet = func.overloadpacket
    for overload in (getattr(packet, o) for o in packet.overloads()):
        outs = [a.name for a in overload._schema.arguments if a.is_out]
        if outs and [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out] == arguments:
            writes = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU")
            return (overload, outs[0]) if writes else None
    return None


def pointwise_(func: OpOverload, x: Tensor, *args: object, **kwargs: object) -> object:
    """The same in place: what is written to keeps its format, plain or blocked."""
    if not isinstance(x, BlockedTensor):
        return func(x, *map(to_plain, args), **{k: to_plain(v) for k, v in kwargs.items()})
    if _broadcast_size((x, *args, *kwargs.values()) if kwargs else (x, *args)) != x.shape:
        return fallback(func, x, *args, **kwargs)
    args, kwargs = _operands(func, (x, *args), kwargs, x._blocking, x.shape)
    func(*args, **kwargs)
    clear_padding(x._physical, x._blocking, x.shape)
    bump_version(x)
    return x


def pointwise_out(func: OpOverload, *args: object, **kwargs: object) -> object:
    """The same into tensors of the answer's size, plain or blocked. What PyTorch resizes falls back."""
    outs = {a.name: kwargs[a.name] for a in func._schema.arguments if a.is_out}
    others = {k: v for k, v in kwargs.items() if k not in outs}
    size = _broadcast_size((*args, *others.values()))
    if not all(same_size(x.shape, size) for x in outs.values()):
        return fallback(func, *args, **kwargs)
    blocking, _ = _layout((*outs.values(), *args, *others.values()))
    args, others = _operands(func, args, others, blocking, size)
    physical = {
        name: x._physical
        if isinstance(x, BlockedTensor) and x._blocking == blocking
        else torch.empty(blocking.physical_shape(tuple(size)), dtype=x.dtype, device=x.device)
        for name, x in outs.items()
    }
    func(*args, **others, **physical)
    for name, x in outs.items():
        _deliver(clear_padding(physical[name], blocking, size), blocking, x)
    return next(iter(outs.values())) if len(outs) == 1 else tuple(outs.values())


def _deliver(physical: Tensor, blocking: Blocking, x: Tensor) -> None:
    """Writes an answer to `x`, which may be its own physical tensor."""
    if not isinstance(x, BlockedTensor):
        x.copy_(to_plain(BlockedTensor(physical, blocking, x.shape)))
    elif x._physical is physical:
        bump_version(x)
    else:
        assign(x, BlockedTensor(physical, blocking, x.shape))


def _layout(given: tuple) -> tuple[Blocking, torch.Size]:
    """The answer's blocking, that of the first blocked tensor of the highest rank, and its size."""
    first, size = lead(given), _broadcast_size(given)
    missing = len(size) - first.dim()
    if not missing:
        return first._blocking, size
    return shifted(first._blocking, {d: d + missing for d in range(first.dim())}), size


def _operands(
    func: OpOverload, args: tuple, kwargs: dict, blocking: Blocking, size: torch.Size
) -> tuple[list[object], dict[str, object]]:
    """The arguments laid out for the physical tensor of the answer."""
    laid = [operand(a, blocking, size) for a in args]
    named = {k: operand(v, blocking, size) for k, v in kwargs.items()} if kwargs else kwargs
    whole = blocking.physical_shape(tuple(size))
    tensors = [a for a in (*laid, *named.values()) if isinstance(a, Tensor) and a.dim() == len(whole)]
    blocked_dims = (*blocking.axes, *range(len(size), len(whole)))
    if any(all(x.size(d) != whole[d] for x in tensors) for d in blocked_dims):  # one of them was expanded
        first = next(i for i, a in enumerate(laid) if isinstance(a, Tensor) and a.dim() == len(whole))
        laid[first] = laid[first].expand(whole)
    if func in INTEGER_DIVISIONS:
        divisors, at = (laid, 1) if len(laid) > 1 else (named, "other")
        divisor = divisors[at]
        if isinstance(divisor, Tensor) and divisor.dim() and not divisor.is_floating_point():
            divisors[at] = _ones_in_padding(divisor, blocking, size)
    return laid, named


def _ones_in_padding(physical: Tensor, blocking: Blocking, size: torch.Size) -> Tensor:
    whole = physical.expand(blocking.physical_shape(tuple(size))).clone()
    for part in padding_of(whole, blocking, size):
        part.fill_(1)
    return whole


def _broadcast_size(args: tuple) -> torch.Size:
    first, *others = [a.shape for a in args if isinstance(a, Tensor)]
    for size in others:
        if not same_size(size, first):
            return torch.broadcast_shapes(first, *others)
    return first


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


for _name in ZERO_PRESERVING:
    for _some, _handler in zip(_overloads(_name), (unary, unary_), strict=True):
        register(*_some)(_handler)
for _name in RANDOM_IN_PLACE:
    register(*_overloads(_name.removesuffix("_"))[1])(random_)


@register_rule
def handler_of(func: OpOverload) -> Handler | None:
    """Every other pointwise operator: by its tag or that of the one that it is the in-place form of."""
    if torch.Tag.nondeterministic_seeded in func.tags or not _is_pointwise(func):
        return None
    arguments = func._schema.arguments
    if any(a.is_out for a in arguments):
        return pointwise_out
    if any(a.is_write for a in arguments):
        return pointwise_ if arguments[0].is_write else None
    return pointwise


def _is_pointwise(func: OpOverload) -> bool:
    if func.namespace != "aten" or any(str(r.type) != "Tensor" for r in func._schema.returns):
        return False
    name = func._opname if func._opname.startswith("__") else func._opname.removesuffix("_")
    twin = getattr(getattr(aten, name, None), func._overloadname, None)
    tagged = torch.Tag.pointwise in func.tags or (twin is not None and torch.Tag.pointwise in twin.tags)
    return tagged or name in UNTAGGED
