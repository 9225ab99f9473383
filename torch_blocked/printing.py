"""How a blocked tensor prints itself: what is shown is read, the rest of the tensor is not."""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch._tensor_str import PRINT_OPTS, get_printoptions, printoptions

from torch_blocked.formats import format_of

_WITH_BYTES = (Tensor, torch.nn.Parameter)


def describe(y: Tensor) -> str:
    """``BlockedTensor(values, size=..., format=..., padded_dims=...)``, the values as PyTorch prints them.

    Never fails, as debuggers ask for it at any time: of tensors without values, and of one that is only half made.
    """
    physical, size = getattr(y, "_physical", None), tuple(y.shape)
    if physical is None:
        return f"BlockedTensor(not made yet, size={size})"
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        below = torch._C._DisableFuncTorch()  # noqa: F841 - until the end of this block
        has_values = type(physical) in _WITH_BYTES and physical.device.type != "meta"
        values = _values(y) if has_values else _no_values(physical)
        # Strides that are symbols are not compared: that would add to what the trace assumes.
        tag = (y.format if has_values else format_of(tuple(range(len(size))), y._blocking)).tag
        return (
            f"BlockedTensor({values}, size={size}, format={tag}, padded_dims={y._blocking.padded(size)}{_autograd(y)})"
        )


def _values(y: Tensor) -> str:
    """The inside of what PyTorch prints for the plain tensor, of which it shows the corners where it is large."""
    options, large = get_printoptions(), y.numel() > PRINT_OPTS.threshold
    if large:  # the corners alone might not be
        options["threshold"] = 0
    with printoptions(**options):
        text = repr(_corners(y, PRINT_OPTS.edgeitems if large else max(y.shape, default=0)))
    text = text.removeprefix("tensor(").removesuffix(")").replace("\n", "\n" + " " * len("Blocked"))
    return re.sub(r", size=\([^)]*\)", "", text)  # of empty tensors; said anyway


def _corners(y: Tensor, edge: int) -> Tensor:
    """The plain tensor of the first and last `edge` indices of each axis, and one between for the rest."""
    physical, blocking, ndim = y._physical, y._blocking, y.dim()
    indices = []
    for axis, n in enumerate(y.shape):
        index = torch.arange(n, device=physical.device)
        if n > 2 * edge + 1:
            index = torch.cat([index[: edge + 1], index[n - edge :]])
        indices.append(index.view([-1 if d == axis else 1 for d in range(ndim)]))
    outer = [index // blocking.block(axis) for axis, index in enumerate(indices)]
    below, inner = [1] * ndim, []
    for axis, size in reversed(blocking):
        inner.insert(0, indices[axis] // below[axis] % size)
        below[axis] *= size
    return physical[(*outer, *inner)]


def _no_values(physical: Tensor) -> str:
    dtype = "" if physical.dtype == torch.get_default_dtype() else f", dtype={physical.dtype}"
    device = "" if physical.device.type == "cpu" else f", device='{physical.device}'"
    return f"...{device}{dtype}"


def _autograd(y: Tensor) -> str:
    try:
        grad_fn = y.grad_fn and y.grad_fn.name()
    except RuntimeError:  # of a view that was written to where autograd forbids it
        grad_fn = "Invalid"
    return f", grad_fn=<{grad_fn}>" if grad_fn else ", requires_grad=True" * y.requires_grad
