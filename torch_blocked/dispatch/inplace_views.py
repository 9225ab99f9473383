"""Operators that change a tensor's own shape: `x.transpose_(1, 2)`, `x.resize_(2, 3)`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import _python, reorder
from torch_blocked.dispatch.fallback import bump_version, fallback
from torch_blocked.dispatch.registry import HANDLERS, register
from torch_blocked.dispatch.shape import squeeze_blocked
from torch_blocked.formats import activation_format
from torch_blocked.tensor import BlockedTensor, set_physical

aten = torch.ops.aten

# In place -> the view operator that says what becomes of the bytes.
VIEWS = {
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


@register(*VIEWS)
def view_(func: OpOverload, x: BlockedTensor, *args: object) -> BlockedTensor:
    """The same bytes in another shape, `x` itself.

    Raises: RuntimeError where the view is plain, as `x` cannot be.
    """
    op = VIEWS[func]
    handler = squeeze_blocked if op.overloadpacket is aten.squeeze else HANDLERS[op]
    view = handler(op, x, *args)
    if not isinstance(view, BlockedTensor):
        raise RuntimeError(f"{func} would make {x.format.tag} plain: call it on x.to_dense()")
    _become(x, view)
    return x


@register(aten.resize_.default)
def resize_(func: OpOverload, x: BlockedTensor, size: list[int], **kwargs: object) -> Tensor:
    """The elements in their order in another size, in channels of the same block; those that are new are undefined.

    Raises: RuntimeError for no dims, which no block fits.
    """
    if tuple(size) == tuple(x.shape):
        return fallback(func, x, size, **kwargs)
    if not size:
        raise RuntimeError(f"{func} cannot make a blocked tensor one of no dims: call it on x.to_dense()")
    plain = func(reorder.to_plain(x), size, **kwargs)
    blocking = activation_format(len(size), x._blocking[-1][1]).blocking
    _become(x, BlockedTensor(reorder.to_blocking(plain, blocking), blocking, plain.shape))
    bump_version(x)
    return x


@register(aten.resize_as_.default)
def resize_as_(func: OpOverload, x: Tensor, template: Tensor, **kwargs: object) -> Tensor:
    """`x.resize_(template.shape)`."""
    if not isinstance(x, BlockedTensor):
        return func(x, reorder.to_plain(template), **kwargs)
    return x if x.shape == template.shape else resize_(aten.resize_.default, x, list(template.shape), **kwargs)


def _become(x: BlockedTensor, other: BlockedTensor) -> None:
    """Gives `x` the bytes, the blocking and the size of `other`."""
    _python.set_size(x, other.shape)
    _python.share_version(other._physical, x._physical)
    set_physical(x, other._physical, other._blocking)
