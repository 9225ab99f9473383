"""Convolution: formats chosen, then `torch_blocked::convolution` or `torch_blocked::convolution_transpose`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked import _python, counting, library, reorder
from torch_blocked.dispatch.fallback import announce, fallback, run_plain
from torch_blocked.dispatch.registry import register
from torch_blocked.formats import plain_format
from torch_blocked.memory_desc import Blocking
from torch_blocked.tensor import BlockedTensor, check_tensor

aten = torch.ops.aten

_PLAIN = Blocking()
CHANNELS = {block: Blocking(((1, block),)) for block in (8, 16)}

# stride, padding, dilation: lists of a number a spatial dim each. A plain tuple, which costs a call the least.
Window = tuple[list[int], list[int], list[int]]


@register(aten.convolution.default)
def convolution(
    func: OpOverload,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """1-D to 3-D, of `KERNEL_DTYPES`: a blocked answer. Everything else, and what PyTorch refuses, goes to PyTorch."""
    if torch._C._get_tracing_state() is not None:
        reorder.refuse_jit()
    window = _window(x.dim() - 2, stride, padding, dilation)
    if transposed and _has_transposed_kernel(x, weight, bias, window, output_padding, groups):
        return _convolution_transpose(x, weight, bias, window, output_padding, groups)
    if transposed or not _has_kernel(x, weight, bias, window, groups):
        return fallback(func, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return _convolution(x, weight, bias, window, groups)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, groups: int) -> BlockedTensor:
    block, src, src_blocking = _source(x, weight, groups)
    wei, wei_blocking = _physical(weight)
    before = _python.weight_reorders()
    physical = library.convolution_op(
        src, sum(src_blocking, ()), wei, weight.shape, sum(wei_blocking, ()), reorder.to_plain(bias),
        *window, groups, block,
    )  # fmt: skip
    if _python.weight_reorders() != before:
        record_packing(wei, wei_blocking, block)
    size = physical.shape
    return BlockedTensor(physical, CHANNELS[block], (size[0], weight.shape[0], *size[2:-1]))


def _convolution_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, output_padding: list[int], groups: int
) -> BlockedTensor:
    """1-D to 3-D; the weight is (ic, oc / groups, kd, kh, kw)."""
    stride, padding, dilation = window
    block = _kernel_block(x, weight)
    wei, wei_blocking = _physical(weight)
    if max(wei_blocking.axes, default=0) > 1:  # which the operator does not read
        wei, wei_blocking = reorder.to_plain(weight), _PLAIN
    before = _python.weight_reorders()
    physical = library.convolution_transpose_op(
        reorder.to_blocking(x, CHANNELS[block]), (1, block), wei, weight.shape, sum(wei_blocking, ()),
        reorder.to_plain(bias), stride, padding, output_padding, dilation, groups, block,
    )  # fmt: skip
    if _python.weight_reorders() != before:
        record_packing(wei, wei_blocking, block)
    n, _, *spatial, _ = physical.shape
    return BlockedTensor(physical, CHANNELS[block], (n, weight.shape[1] * groups, *spatial))


def record_packing(wei: Tensor, blocking: Blocking | None, block: int) -> None:
    """Records that an operator has reordered its weights, of this physical tensor and blocking."""
    counting.record_reorder(blocking or _PLAIN, CHANNELS[block], wei, wei)


@register(aten.conv2d.default)
def conv2d(
    func: OpOverload,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: list[int] = (1, 1),
    padding: list[int] = (0, 0),
    dilation: list[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """What `inference_mode` delivers, not yet taken apart."""
    if x.dim() != 4 or weight.dim() != 4:
        return func.decompose(x, weight, bias, stride, padding, dilation, groups)
    if not _has_kernel(x, weight, bias, _window(2, stride, padding, dilation), groups):
        return fallback(func, x, weight, bias, stride, padding, dilation, groups)
    whole = aten.convolution.default
    return convolution(whole, x, weight, bias, stride, padding, dilation, False, [0, 0], groups)


def _has_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, groups: int) -> bool:
    """Whether the operator takes these arguments; those that are wrong are left to PyTorch, which says why."""
    src, wei = x.shape, weight.shape
    return (
        _are_for_kernels(x, weight, bias, src, wei)
        and _is_valid(window, len(src) - 2)
        and src[1] == wei[1] * groups
        and wei[0] % groups == 0
        and (bias is None or bias.shape == wei[:1])
    )


def _has_transposed_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, output_padding: list[int], groups: int
) -> bool:
    """As `_has_kernel`, of the transposed convolution."""
    src, wei = x.shape, weight.shape
    spatial = len(src) - 2
    if not _are_for_kernels(x, weight, bias, src, wei) or not _is_valid(window, spatial):
        return False
    if len(output_padding) != spatial or groups < 1 or wei[0] % groups:
        return False
    sizes = zip(src[2:], wei[2:], *window, output_padding, strict=True)
    return (
        src[1] == wei[0]
        and (bias is None or tuple(bias.shape) == (wei[1] * groups,))
        and all(
            0 <= out < max(s, d) and (n - 1) * s - 2 * pad + d * (k - 1) + out >= 0 for n, k, s, pad, d, out in sizes
        )
    )


def _are_for_kernels(x: Tensor, weight: Tensor, bias: Tensor | None, src: torch.Size, wei: torch.Size) -> bool:
    return (
        3 <= len(src) == len(wei) <= 5
        and x.dtype in library.KERNEL_DTYPES
        and weight.dtype is x.dtype
        and x.is_cpu
        and x.layout is torch.strided
        and 0 not in wei
        and 0 not in src[1:]
        and (bias is None or bias.dtype is x.dtype)
    )


def _window(spatial: int, stride: list[int], padding: list[int], dilation: list[int]) -> Window:
    """One number stands for all of the `spatial` dims, as in PyTorch."""
    if len(stride) == len(padding) == len(dilation) == spatial:
        return stride, padding, dilation
    return tuple(v * spatial if len(v) == 1 else v for v in (stride, padding, dilation))


def _is_valid(window: Window, spatial: int) -> bool:
    """Whether these are as many numbers as there are spatial dims, and none that PyTorch or the operators refuse."""
    stride, padding, dilation = window
    return (
        len(stride) == len(padding) == len(dilation) == spatial
        and min(*stride, *dilation) > 0
        and min(padding) >= 0
        and max(*stride, *padding, *dilation) < 1 << 24
    )


def _physical(weight: Tensor) -> tuple[Tensor, Blocking]:
    return (weight._physical, weight._blocking) if isinstance(weight, BlockedTensor) else (weight, _PLAIN)


def _kernel_block(x: Tensor, weight: Tensor) -> int:
    """The answer's block: that of x, else of the weight, where this CPU's kernels take it."""
    kernel_blocks = library.kernel_blocks()
    if isinstance(x, BlockedTensor) and x._blocking in CHANNELS.values() and x._blocking[0][1] in kernel_blocks:
        return x._blocking[0][1]
    block = weight._blocking.block(0) if isinstance(weight, BlockedTensor) else 0
    return block if block in kernel_blocks else kernel_blocks[0]


def _source(x: Tensor, weight: Tensor, groups: int) -> tuple[int, Tensor, Blocking]:
    """The answer's block, and src's physical tensor and blocking, reordered where no kernel reads it as it is."""
    block = _kernel_block(x, weight)
    # An image of few channels is read as it lies.
    if not isinstance(x, BlockedTensor) and groups == 1 and x.size(1) < block:
        return block, x, _PLAIN
    blocking = CHANNELS[block]
    return block, reorder.to_blocking(x, blocking), blocking


class Algorithm(NamedTuple):
    """What a convolution runs, and why."""

    name: str
    reason: str


def algorithm(
    x: Tensor,
    weight: Tensor,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Algorithm:
    """The algorithm that ``F.conv2d(x, weight, None, stride, padding, dilation, groups)`` would run, not run.

    Of tensors of which at least one is blocked: of two plain ones PyTorch's own convolution runs, whatever this names.
    ``name`` is "first" or "first_winograd" (src plain), "direct", "direct_amx" (float32 as three bfloat16 on an Intel
    CPU's tiles), "winograd_f2", "winograd_f4", "winograd_f4_amx" (of many tiles, on those), "winograd_f4_unpacked" (a
    small image: transforms the weights at every call and keeps none), "depthwise" (groups too), "reference", or
    "fallback" where PyTorch computes it on plain tensors or refuses it; ``reason`` says what decided, with the
    estimated times where there was a choice. x is (n, ic, ih, iw), weight (oc, ic / groups, kh, kw), float32, bfloat16
    or float16; one or three spatial dims too.

    Raises: TypeError for what is no tensor, RuntimeError where the kernel is greater than the padded src.
    """
    check_tensor("algorithm", x)
    check_tensor("algorithm", weight)
    spatial = x.dim() - 2
    window = tuple([v] * spatial if isinstance(v, int) else list(v) for v in (stride, padding, dilation))
    if not _has_kernel(x, weight, None, window, groups):
        return Algorithm(
            "fallback", "the operator takes 1-D to 3-D convolutions of floats, at most 32 bits, whose sizes match"
        )
    block, src, src_blocking = _source(x, weight, groups)
    wei, wei_blocking = _physical(weight)
    return Algorithm(*library.ops.convolution_algorithm(
        src, sum(src_blocking, ()), wei, weight.shape, sum(wei_blocking, ()), *window, groups, block
    ))  # fmt: skip


@register(aten.convolution_backward.default)
def convolution_backward(
    func: OpOverload,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of what `convolution` takes; the gradients of blocked tensors are blocked."""
    window = _window(x.dim() - 2, stride, padding, dilation)
    has_kernel = (
        _has_transposed_kernel(x, weight, None, window, output_padding, groups)
        and all(out < s for out, s in zip(output_padding, window[0], strict=True))
        if transposed
        else _has_kernel(x, weight, None, window, groups)
    )
    if not has_kernel or grad.dtype is not x.dtype or grad.dim() != x.dim():
        announce(func, (grad, x, weight))
        arguments = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask)
        grads = run_plain(func, (grad, x, weight, *arguments), {})
        return _as(grads[0], x), _as(grads[1], weight), grads[2]
    block = _kernel_block(x, weight)
    diff_dst = BlockedTensor(reorder.to_blocking(grad, CHANNELS[block]), CHANNELS[block], grad.shape)
    diff_src = diff_weight = diff_bias = None
    if output_mask[0]:
        backward = _convolution if transposed else _convolution_transpose
        rest = [] if transposed else [_output_padding(grad.shape, x.shape, weight.shape, window)]
        diff_src = _as(backward(diff_dst, weight, None, window, *rest, groups), x)
    if output_mask[1]:
        src, dst = (diff_dst, x) if transposed else (x, diff_dst)
        diff_weight = _weight_gradient(src, dst, weight, window, groups)
    if output_mask[2]:
        sums = diff_dst._physical.sum([*range(2, grad.dim())], dtype=torch.float32).sum(0).flatten()
        diff_bias = sums[: grad.size(1)].to(grad.dtype, copy=True)
    return diff_src, diff_weight, diff_bias


def _output_padding(dst: torch.Size, src: torch.Size, weight: torch.Size, window: Window) -> list[int]:
    """The rows of src that a convolution's last window does not reach, of each spatial dim."""
    sizes = zip(src[2:], dst[2:], weight[2:], *window, strict=True)
    return [n - ((out - 1) * s - 2 * pad + d * (k - 1) + 1) for n, out, k, s, pad, d in sizes]


def _weight_gradient(x: Tensor, diff_dst: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """The gradient of the convolution of x, blocked as the weight is."""
    block, src, src_blocking = _source(x, weight, groups)
    fmt = weight.format if isinstance(weight, BlockedTensor) else plain_format(weight.dim(), None)
    physical = library.convolution_weight_gradient_op(
        src, sum(src_blocking, ()), reorder.to_blocking(diff_dst, CHANNELS[block]), weight.shape, fmt.order,
        sum(fmt.blocking, ()), *window, groups,
    )  # fmt: skip
    return BlockedTensor(physical, fmt.blocking, weight.shape) if fmt.blocking else physical


def _as(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """`grad` in the blocking of `like`."""
    if grad is None:
        return grad
    if not isinstance(like, BlockedTensor):
        return reorder.to_plain(grad)
    return BlockedTensor(reorder.to_blocking(grad, like._blocking), like._blocking, like.shape)
