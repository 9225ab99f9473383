"""`torch._foreach_...` and `torch._fused_...`: operators on lists of tensors, one call for all, as optimizers make
them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import reorder
from torch_blocked.dispatch.fallback import bump_version, fallback
from torch_blocked.dispatch.physical import broadcasts_to, clear_padding, fill_padding, lead, operand
from torch_blocked.dispatch.registry import Handler, register_rule
from torch_blocked.tensor import BlockedTensor


def _of_order(x: Tensor, ord: float = 2) -> float:
    return math.inf if ord < 0 else 0


def _least(x: Tensor) -> float:
    return -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min


# One number of each tensor -> the element that does not change it, given the tensor and the order.
REDUCTIONS = {"_foreach_norm": _of_order, "_foreach_powsum": _of_order, "_foreach_max": _least}


# Of optimizers with `fused=True`: lists of parameters, gradients and what is kept beside them, and settings.
STEPS = {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"}


@register_rule
def handler_of(func: OpOverload) -> Handler | None:
    """Those that are pointwise, out of place and in place, the reductions, and the steps of fused optimizers."""
    name = func._opname
    if any(a.is_out for a in func._schema.arguments):
        return None
    if name in STEPS:
        return step
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return unscale
    if not name.startswith("_foreach_"):
        return None
    return foreach_reduction if name in REDUCTIONS else foreach


def foreach_reduction(func: OpOverload, tensors: list[Tensor], *order: object, **kwargs: object) -> list[Tensor]:
    """A number of each tensor, reduced over the physical one with elements that do not count in the padding."""
    if func._opname == "_foreach_powsum" and order[:1] == (0,):  # there every element counts
        return fallback(func, tensors, *order, **kwargs)

    def elements(x: Tensor) -> Tensor:
        if not isinstance(x, BlockedTensor) or not x.numel() or x.dtype == torch.bool:
            return reorder.to_plain(x)
        return fill_padding(x, list(range(x.dim())), REDUCTIONS[func._opname](x, *order[:1]))

    return func(list(map(elements, tensors)), *order, **kwargs)


def foreach(func: OpOverload, first: object, *rest: object, **kwargs: object) -> list[Tensor] | None:
    """The same operator on the physical tensors; what is written to keeps its format, plain or blocked.

    The first argument is a list but in `_foreach_pow(2.0, tensors)`.
    """
    lists = [a for a in (first, *rest, *kwargs.values()) if _is_tensors(a)]
    in_place = func._schema.arguments[0].is_write
    if len({len(a) for a in lists}) != 1:
        return fallback(func, first, *rest, **kwargs)
    groups = list(zip(*lists, strict=True))
    leads = list(first) if in_place else list(map(lead, groups))
    if not all(map(_fits, groups, leads)) or (in_place and _is_written_first(lists)):
        return fallback(func, first, *rest, **kwargs)

    def laid(a: object) -> object:
        if isinstance(a, BlockedTensor):  # a number for all
            return reorder.to_plain(a)
        return [_laid(x, like) for x, like in zip(a, leads, strict=True)] if _is_tensors(a) else a

    answers = func(*map(laid, (first, *rest)), **{k: laid(v) for k, v in kwargs.items()})
    if not in_place:
        return [_wrapped(y, like) for y, like in zip(answers, leads, strict=True)]
    _finish_writes(first)
    return None


def step(func: OpOverload, *lists: list[Tensor], **settings: object) -> None:
    """The same step on the physical tensors, where what is kept for a parameter lies as it does."""
    given = [tensors for tensors in lists if tensors]
    in_groups = len({len(tensors) for tensors in given}) == 1
    if not in_groups or not all(map(_lie_as_the_first, zip(*given, strict=True))):
        return fallback(func, *lists, **settings)
    func(*(list(map(_bytes, tensors)) for tensors in lists), **settings)
    _finish_writes(lists[0])
    return None


def unscale(func: OpOverload, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """What `torch.amp.GradScaler` does to gradients, done to the physical tensors."""
    func(list(map(_bytes, grads)), found_inf, inv_scale)
    _finish_writes(grads)
    return None


def _bytes(x: Tensor) -> Tensor:
    """A tensor as it lies in memory, for operators that treat all elements alike."""
    if not isinstance(x, BlockedTensor):
        return x
    return x._physical.permute(sorted(range(x._physical.dim()), key=x._physical.stride, reverse=True))


def _finish_writes(tensors: list[Tensor]) -> None:
    """Zeroes the padding of what was written to and counts the writes."""
    for x in tensors:
        if isinstance(x, BlockedTensor):
            clear_padding(x._physical, x._blocking, x.shape)
            bump_version(x)
        elif not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _lie_as_the_first(group: tuple[Tensor, ...]) -> bool:
    """Numbers, which count the steps, aside."""
    first, *others = (x for i, x in enumerate(group) if i == 0 or x.dim())
    if not isinstance(first, BlockedTensor):
        return not any(isinstance(x, BlockedTensor) for x in others)
    return all(
        isinstance(x, BlockedTensor)
        and x._blocking == first._blocking
        and x.shape == first.shape
        and x._physical.stride() == first._physical.stride()
        and _bytes(x).is_contiguous()
        for x in (first, *others)
    )


def _is_written_first(lists: list[list[Tensor]]) -> bool:
    """Whether a tensor that is read may have been written for another before: the operands are laid out at once."""
    written = {id(x): i for i, x in enumerate(lists[0])}
    return any(written.get(id(x), i) != i for a in lists[1:] for i, x in enumerate(a))


def _is_tensors(a: object) -> bool:
    return isinstance(a, (list, tuple)) and len(a) > 0 and isinstance(a[0], Tensor)


def _fits(group: tuple[Tensor, ...], like: Tensor | None) -> bool:
    """Whether these are of floating point and broadcast to the size of the one whose blocking the answer takes."""
    return like is None or all(x.is_floating_point() and broadcasts_to(x.shape, like.shape) for x in group)


def _laid(x: Tensor, like: Tensor | None) -> Tensor:
    return operand(x, like._blocking, like.shape) if isinstance(like, BlockedTensor) else reorder.to_plain(x)


def _wrapped(physical: Tensor, like: Tensor | None) -> Tensor:
    if like is None:
        return physical
    return BlockedTensor(clear_padding(physical, like._blocking, like.shape), like._blocking, like.shape)
