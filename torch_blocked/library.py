"""The C++ operators' Python face: loading, settings, autograd.

The same in ATen operations is equivalents.py, for shapes alone fakes.py.

The operators take and return physical tensors. A blocking is a flat list (axis, size, axis, size, ...), outermost
inner block first; a plain tensor's is empty.

``torch_blocked::reorder(src, size, src_blocking, dst_order, dst_blocking, dtype=None) -> dst``
    Copies `src`, of logical size `size`, to another format: `dst_order` names the outer axes from outermost to
    innermost in memory. dst is dense, its padding zero. Floating point to integer rounds to nearest even and saturates.

``torch_blocked::reorder_tile_rate(src, size, src_blocking, dst_order, dst_blocking) -> float``
    Bytes of dst a second of such a reorder's first tiles by one thread again and again, as many as the first cache
    holds: what the kernel's instructions permit where memory takes no time. 0 where there are no elements.

``torch_blocked::convolution(src, src_blocking, weight, weight_size, weight_blocking, bias, stride, padding, dilation,
groups, block, scale=None, shift=None, residual=None, activation="none", alpha=0, residual_last=False,
src_scale=None) -> dst``
    Convolution of 1, 2 or 3 spatial dims; all tensors are float32, or all bfloat16 or float16, computed in float32 and
    rounded once. src is plain (n, ic, id, ih, iw) or blocked; weight plain or
    blocked, of logical size (oc, ic / groups, kd, kh, kw); dst is (n, ceil(oc / block), od, oh, ow, block), d and h
    absent where there are fewer dims. After the sum, in this order: + bias, * scale + shift (a value a channel),
    + residual (laid out as dst), activation ("none", "relu", "relu6", "leaky_relu" of slope alpha, "sigmoid", "silu",
    "hardsigmoid", "hardswish", "gelu", "gelu_tanh"); where `residual_last`, + residual after the activation. With a
    `src_scale`, (n, ceil(ic / block), 1, ..., block), src is first multiplied by it; float32, for a src in dst's
    blocks, a weight in such blocks of ic and then oc, and no groups.

``torch_blocked::convolution_transpose(src, src_blocking, weight, weight_size, weight_blocking, bias, stride, padding,
output_padding, dilation, groups, block, scale=None, shift=None, residual=None, activation="none", alpha=0,
residual_last=False) -> dst``
    Transposed convolution of 1, 2 or 3 spatial dims, dtypes as there. src is blocked by `block` channels, weight plain
    or blocked by channels, of logical size (ic, oc / groups, kd, kh, kw); dst as above. Where src is the gradient of a
    `convolution`'s dst and the rest as there, dst is that of its src; output_padding then makes dst as large as that.
    What follows the sum is as there.

``torch_blocked::convolution_out(dst, first_block, src, ..., block, scale=None, shift=None, activation="none",
alpha=0)``, ``torch_blocked::convolution_transpose_out(dst, first_block, src, ...)``,
``torch_blocked::copy_out(dst, first_block, src)``
    The same without a residual or a src_scale, float32, and a copy of `src`, into the channel blocks from `first_block`
    on of a dense dst with as many or more of them, (n, blocks, od, oh, ow, block). src and weight may not be part of
    these.

``torch_blocked::convolution_chain(src, src_blocking, weights, channels, biases, strides, paddings, dilations, groups,
block, scales, shifts, activations, alphas, residual=None, residual_last=False) -> dst``
    The `convolution` of `src` by the first weight, of that by the second one and so on, for inference: 2 spatial dims,
    float32, a value or an optional tensor of everything for each weight. `channels` are those of src and of every dst;
    strides, paddings and dilations have two numbers a weight, one after the other, `activations` are names between
    commas. Weights are (oc / block, ic / groups, kh, kw, block) or, without groups, (oc / block, ic / block, kh, kw,
    block, block), the inner blocks ic, oc. The residual is the last one's. Some rows of all are computed before the
    next where what lies between leaves the cache otherwise; no bit depends on it.

``torch_blocked::linear(src, weight, bias) -> dst``
    src (n, ic) times the transpose of a weight (oc, ic), + bias, if any, of (oc), as `torch.nn.functional.linear`;
    dense float32 matrices of at most 4 rows of src by kernels that read the weight at the memory's speed.

``torch_blocked::new_empty(like, size) -> dst``
    Dense and uninitialized, of the dtype of `like`, on the CPU, in memory of the pool.

``torch_blocked::convolution_weight_gradient(src, src_blocking, diff_dst, weight_size, weight_order, weight_blocking,
stride, padding, dilation, groups) -> diff_weight``
    The gradient of `convolution` with respect to its weight, dtypes as there. src is blocked as diff_dst, or plain
    without groups; diff_weight is dense, its outer axes in memory as `weight_order` says, its padding zero. By
    Winograd's algorithms where `tb.winograd` allows them and they are estimated to be faster.

``torch_blocked::batch_norm_scale_shift(weight, bias, mean, var, eps) -> (scale, shift)``
    Batch normalization as src * scale + shift; all are float32, a value a channel. Not differentiable.

``torch_blocked::batch_norm_statistics(src, channels) -> (mean, var)``
    Mean and biased variance, float32, of each channel over everything else; src is (n, ceil(channels / block), ...,
    block), float32, bfloat16 or float16.

``torch_blocked::batch_norm_backward(diff_dst, src, weight, mean, invstd, training) -> (diff_src, diff_weight,
diff_bias)``
    The gradients of batch normalization, (src - mean) * invstd * weight + bias; where `training`, the statistics are
    src's own. diff_dst, src and diff_src are of one dtype, float32, bfloat16 or float16, the vectors float32.

``torch_blocked::reduce_channels(src, channels, how) -> dst``
    A value a pixel of src, (n, ceil(channels / block), ..., block), float32, in blocks of `kernel_blocks`; dst is
    (n, ...). `how` is "sum", "mean", "norm" (the root of the sum of squares), "norm_of_deviations" (that of what
    channels differ from their mean), "logsumexp", "max" or "min". From 1 to 2**24 channels.

``torch_blocked::find_channel(src, channels, least) -> (dst, indices)``
    The greatest value, or the `least`, of each pixel and, int64, the first channel that has it; src, dst and indices
    are as there.

``torch_blocked::softmax_channels(src, channels, log) -> dst``
    Softmax along the channels, or its logarithm; src is as there, dst as src.

``torch_blocked::softmax_channels_backward(diff_dst, dst, channels, log) -> diff_src``
    Its gradient with respect to src, from that of dst and dst, all as src there.

``torch_blocked::layer_norm_channels(src, channels, weight, bias, eps) -> (dst, mean, rstd)``
    Layer normalization of each pixel by its channels, (src - mean) * rstd * weight + bias, where rstd is
    1 / sqrt(biased variance + eps); src is as there, dst as src, mean and rstd are (n, ...). weight and bias have a
    value a channel; None: ones, zeros.

``torch_blocked::pool(src, channels, output_size, mode, kernel_size=[], stride=[], padding=[], dilation=[],
count_include_pad=True, divisor_override=None, indices=False) -> (dst, indices)``
    Windows over h and w, float32; all lists are (h, w). src is (n, ceil(channels / block), h, w, block), dst that of
    `output_size`: the caller rounds. mode is "max" (of nothing -inf) or "avg"; without a kernel the windows are those
    of adaptive pooling. The indices, int64, count within the plane; without `indices` there are none, shape (0).

``torch_blocked::upsample(src, output_size, mode, align_corners=False, scale_h=None, scale_w=None) -> dst``
    src and dst are (n, blocks, h, w, block), float32; mode is "nearest", "nearest-exact" or "bilinear". The scales, dst
    to src, are as PyTorch's: None for those of the sizes.

``torch_blocked::max_pool_backward(diff_dst, indices, src_size) -> diff_src``
    The gradient of maxima with respect to src, float32: diff_dst and the int64 `indices` are as `pool` makes them,
    diff_src is (n, blocks, h, w, block) with `src_size` (h, w). What has an index outside the plane, as an empty window
    may, is not added.

``torch_blocked::avg_pool_backward(diff_dst, src_size, kernel_size=[], stride=[], padding=[], count_include_pad=True,
divisor_override=None) -> diff_src``
    The gradient of `pool` in mode "avg", float32, the arguments as there.

``torch_blocked::upsample_backward(diff_dst, src_size, mode, align_corners=False, scale_h=None, scale_w=None) ->
diff_src``
    The gradient of `upsample`, float32, the arguments as there.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torch_blocked import _python, equivalents
from torch_blocked.fakes import FAKES
from torch_blocked.settings import Entry, Setting

PATH = next(Path(__file__).parent.glob("_C*"))  # the C++ operators; packages of compiled models need only this
torch.ops.load_library(PATH)
ops = torch.ops.torch_blocked

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of convolutions and batch normalization

reorder_op = ops.reorder.default
convolution_op = ops.convolution.default
convolution_weight_gradient_op = ops.convolution_weight_gradient.default
convolution_transpose_op = ops.convolution_transpose.default
convolution_out_op = ops.convolution_out.default
convolution_chain_op = ops.convolution_chain.default
convolution_transpose_out_op = ops.convolution_transpose_out.default
copy_out_op = ops.copy_out.default
linear_op = ops.linear.default
new_empty_op = ops.new_empty.default
batch_norm_op = ops.batch_norm.default
batch_norm_statistics_op = ops.batch_norm_statistics.default
batch_norm_backward_op = ops.batch_norm_backward.default
reduce_channels_op = ops.reduce_channels.default
find_channel_op = ops.find_channel.default
softmax_channels_op = ops.softmax_channels.default
layer_norm_channels_op = ops.layer_norm_channels.default
softmax_channels_backward_op = ops.softmax_channels_backward.default
pool_op = ops.pool.default
upsample_op = ops.upsample.default
max_pool_backward_op = ops.max_pool_backward.default
avg_pool_backward_op = ops.avg_pool_backward.default
upsample_backward_op = ops.upsample_backward.default


def isa() -> str:
    """The kernels' instruction set on this CPU: "amx", "avx512", "avx2" or "default"; ATEN_CPU_CAPABILITY lowers it."""
    return ops.isa()


def isa_block() -> int:
    """Channels in one block of the fastest format: 16 on AVX-512, 8 elsewhere."""
    return _isa_block


def set_isa(name: str) -> None:
    """Lowers the kernels' instruction set to another of `isa`'s, or back; never above what the CPU has."""
    global _isa_block
    _python.finish_deferred()  # as it was called
    ops.set_isa(name)
    _isa_block = ops.isa_block()


def set_caches(l1: int, l2: int) -> None:
    """Cuts work up as for a core with caches of so many bytes; zeros: with this CPU's own."""
    _python.finish_deferred()  # as it was called
    ops.set_caches(l1, l2)


def set_amx_always(always: bool) -> None:
    """Whether tiles take every convolution that they can, not only those that they are estimated to be faster for."""
    _python.finish_deferred()  # as it was called
    ops.set_amx_always(always)


def core_round_trip() -> float | None:
    """Seconds that a cache line takes from this core to another one and back; None with one core, or where unknown.

    Of the farthest other core that this process may run on. Two that share a cache take less than 1e-7, two that share
    none 3e-7 and more: there, what one thread wrote is slow to read for another.
    """
    return ops.core_round_trip() or None


_isa_block: int = ops.isa_block()  # a plain number, so that torch.compile can trace what reads it


def kernel_blocks() -> tuple[int, ...]:
    """The block sizes that this CPU's convolution kernels take, the fastest first."""
    return (16, 8) if isa_block() == 16 else (8,)


@functools.cache
def fingerprint() -> str:
    """The name of this build by its content: graphs that torch.compile keeps on disk must not serve another.

    Nor another ISA tier: Inductor generates code for the one that ``ATEN_CPU_CAPABILITY`` names, but its key does not.
    """
    digest = hashlib.sha256(os.environ.get("ATEN_CPU_CAPABILITY", "").encode())
    for path in sorted([*PATH.parent.rglob("*.py"), PATH]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def tag_caches() -> None:
    """Makes this build a part of the key of all that torch.compile keeps on disk, from now on.

    Any backend's graphs may call the operators, by their schemas: with those of another build they would crash.
    """
    torch.compiler.config.cache_key_tag += f" torch_blocked {fingerprint()}"


tag_caches()


def empty_cache() -> None:
    """Gives the system back what freed outputs left in the pool, and packed weights.

    What is left of memory that other outputs are part of stays until those are freed, too.
    """
    _python.finish_deferred()  # what waits holds memory
    ops.empty_cache()


def set_cache_limit(nbytes: int) -> int:
    """Sets how many bytes of freed outputs the pool keeps at most; returns the limit before.

    At first it is a quarter of the memory of the machine, or of its container (cgroup) where that has less; what is
    left of memory that other outputs are part of stays beyond it. ValueError for a negative one.
    """
    return ops.set_cache_limit(nbytes)


def cached_bytes() -> int:
    """Bytes of freed outputs that the pool holds for reuse."""
    return ops.cached_bytes()


def empty_like(like: Tensor) -> Tensor:
    """An uninitialized tensor of the shape, dtype and strides of `like`, dense on the CPU, in memory of the pool."""
    return ops.empty_like(like)


_WINOGRAD_MODES = ("auto", "never", "always", "f2", "f4")


class winograd(Setting):  # noqa: N801
    """Sets when convolutions use Winograd's algorithms; also a context manager that restores it.

    They are those of 3x3 kernels and a stride of 1 or 2, whose groups, if any, have whole blocks of channels or share
    one evenly; and, along the rows only, those of a plain src, a network's first, whose kernels have three or four
    columns a column of their stride.

    "auto" (default): where a cost model says that they are faster. "never". "always": wherever they can be. "f2",
    "f4": only F(2x2, 3x3), or F(4x4, 3x3) and those along the rows, wherever it can be.

    They need four ninths or a quarter of the multiplications, with a stride of 2 25 or 20 of 36, and lose a little
    accuracy: with 512 channels of random data the largest error is 3e-6 (F2) and 2e-5 (F4; 5e-6 with a stride of 2) of
    the answer's rms, against 2e-6 for the direct algorithm. An infinity or a NaN in src spreads over a tile of 2x2 or
    4x4 pixels of the answer. Along the rows it is half the multiplications, an error of 8e-6 (7x7, stride 2, an image
    of three channels) and a spread over four pixels.

    The gradients of such a convolution of stride 1 follow the same rule; a weight's largest error is 3e-6 (F2) and 9e-6
    (F4) of its rms, against 3e-6, with ResNet-18's shapes, and an infinity or a NaN spreads over a filter's nine taps.

    Args:
        mode: one of the above; ValueError for any other, TypeError for max_bytes that is no int.
        max_bytes: bounds the transformed weights (16/9 and 4 times the weights' size) and those that transposed
            convolutions reorder (once their size) that are kept between calls. They belong to a blocked weight tensor
            and are made anew when it is written to; beyond the bound those layers run direct, or reorder on every
            call, that gain least a byte. None: twice the size of the weights seen, at least 256 MiB. Weights that
            cannot be kept, plain ones and those made in `inference_mode`, are transformed on every call where it
            still pays; those of a small image, up to four tiles of F4, always are, and need no room.
    """

    _now: tuple[str, int | None] = ("auto", None)
    _entries: ClassVar[list[Entry]] = [Entry(_now)]
    _prepare = staticmethod(_python.finish_deferred)  # as it was called

    def __init__(self, mode: str, max_bytes: int | None = None) -> None:
        if mode not in _WINOGRAD_MODES:
            raise ValueError(f"winograd: mode is one of {', '.join(_WINOGRAD_MODES)}, got {mode!r}")
        if max_bytes is not None and not isinstance(max_bytes, int):
            raise TypeError(f"winograd: max_bytes is a number of bytes or None, got {max_bytes!r}")
        if max_bytes is not None and not 0 <= max_bytes < 2**63:
            raise ValueError(f"winograd: max_bytes is not negative and below 2**63, got {max_bytes}; None: the default")
        super().__init__((mode, max_bytes))

    @staticmethod
    def _apply(value: tuple[str, int | None]) -> None:
        mode, max_bytes = value
        ops.set_winograd(mode, -1 if max_bytes is None else max_bytes)
        winograd._now = value


def packed_weights_bytes() -> int:
    """Bytes of weights kept as loops read them: transformed for Winograd's algorithms, reordered for others."""
    return ops.packed_weights_bytes()


def guard_outputs(on: bool) -> int:
    """For tests: outputs made while on lie, NaN-filled, between guard bytes.

    Returns how many outputs freed since the last call had their guard bytes overwritten.
    """
    return ops.guard_outputs(on)


# ---- Shape-only kernels

for _name, _fake in FAKES.items():
    torch.library.register_fake(f"torch_blocked::{_name}", _fake)


# ---- Autograd: the vector-Jacobian product of the same in ATen operations


def _register_vjp(name: str) -> None:
    aten = getattr(equivalents, f"{name}_aten")

    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:  # noqa: ANN001
        ctx.positions = [i for i, a in enumerate(inputs) if isinstance(a, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.positions))
        ctx.others = [None if isinstance(a, Tensor) else a for a in inputs]

    def backward(ctx, *diffs: Tensor | None) -> tuple:  # noqa: ANN001
        inputs, grads = list(ctx.others), [None] * len(ctx.others)
        wanted = [i for i in ctx.positions if ctx.needs_input_grad[i]]
        twice = torch.is_grad_enabled()  # the gradient is differentiated again
        for i, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            inputs[i] = tensor if i not in wanted or twice else tensor.detach().requires_grad_()
        with torch.enable_grad():
            dst = aten(*inputs)
        dsts = dst if isinstance(dst, tuple) else (dst,)
        pairs = [(d, diff) for d, diff in zip(dsts, diffs, strict=True) if d.requires_grad and diff is not None]
        if pairs:
            dsts, diffs = zip(*pairs, strict=True)
            found = torch.autograd.grad(dsts, [inputs[i] for i in wanted], diffs, create_graph=twice, allow_unused=True)
            for i, g in zip(wanted, found, strict=True):
                grads[i] = g
        return tuple(grads)

    torch.library.register_autograd(f"torch_blocked::{name}", backward, setup_context=setup_context)


for _name in (
    "reorder",
    "convolution",
    "convolution_transpose",
    "convolution_weight_gradient",
    "linear",
    "batch_norm",
    "batch_norm_statistics",
    "batch_norm_backward",
    "reduce_channels",
    "find_channel",
    "softmax_channels",
    "layer_norm_channels",
    "softmax_channels_backward",
    "pool",
    "upsample",
    "max_pool_backward",
    "avg_pool_backward",
    "upsample_backward",
):
    _register_vjp(_name)
