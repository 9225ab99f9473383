"""The direct convolution of a plain src, part of it read in place, at every ISA tier."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import padding_is_zero
from kernel_cases import check_close

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format, weight_format

# (ic, oc, ih, iw, kernel, stride, padding, dilation): rows of dst of one to nine calls of a kernel, of which the first
# and the last see padding, or one of the two, or none, or all; rows of which the filter's upper or lower taps, or all,
# see padding only; strides that the kernels take and that they do not.
SHAPES = [
    (3, 32, 30, 224, (3, 3), (2, 2), (1, 1), (1, 1)),
    (3, 17, 23, 131, (3, 3), (1, 1), (1, 1), (1, 1)),
    (3, 40, 21, 97, (7, 7), (2, 2), (3, 3), (1, 1)),
    (1, 16, 13, 120, (5, 5), (1, 1), (2, 2), (1, 1)),
    (4, 24, 19, 90, (11, 11), (4, 4), (2, 2), (1, 1)),
    (3, 20, 15, 100, (3, 3), (2, 2), (0, 0), (1, 1)),
    (3, 33, 18, 110, (3, 4), (1, 2), (2, 3), (3, 2)),
    (2, 8, 3, 140, (3, 3), (1, 2), (6, 0), (1, 1)),
    (2, 48, 9, 16, (3, 9), (1, 1), (0, 20), (1, 1)),
    (3, 16, 9, 29, (1, 1), (1, 1), (0, 0), (1, 1)),
    (3, 16, 5, 60, (2, 3), (1, 3), (1, 1), (1, 1)),
    # Only the first column sees padding on its left: with most taps, with a few of them left, with all.
    (1, 24, 8, 130, (2, 2), (1, 1), (1, 1), (1, 1)),
    (3, 16, 7, 120, (3, 3), (2, 2), (2, 2), (1, 1)),
    (3, 20, 9, 100, (3, 3), (2, 2), (2, 2), (2, 2)),
    (2, 16, 9, 120, (3, 1), (1, 1), (1, 1), (1, 1)),
    (2, 40, 5, 90, (1, 1), (2, 2), (2, 2), (1, 1)),
]


def inside_nan(*size):
    """A tensor of dense rows with NaN all around it in memory."""
    *outer, ih, iw = size
    around = torch.full((*outer, ih + 2, iw + 5), float("nan"))
    return around[..., 1:-1, 2:-3].copy_(torch.randn(size))


def first(x, w, b, *window, **post_ops):
    """The operator on plain `x` where it lies."""
    block = library.isa_block()
    with tb.winograd("never"):
        assert tb.algorithm(x, w, stride=window[0], padding=window[1], dilation=window[2]).name == "first"
        physical = library.convolution_op(x, (), w, w.shape, (), b, *window, 1, block, **post_ops)
    shape = torch.Size((x.size(0), w.size(0), *physical.shape[2:4]))
    return tb.BlockedTensor(physical, activation_format(4, block).blocking, shape)


@pytest.mark.parametrize("layout", ["nchw", "inside others", "channels_last", "reversed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution(isa, guarded, shape, layout):
    ic, oc, ih, iw, kernel, *window = shape
    x, w, b = inside_nan(2, ic, ih, iw), torch.randn(oc, ic, *kernel), torch.randn(oc)
    if layout == "nchw":
        x = x.contiguous()
    elif layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "reversed":  # images and channels lie in another order
        x = x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    y = first(x, w, b, *window)
    assert padding_is_zero(y)
    check_close(y, F.conv2d(x.double(), w.double(), b.double(), *window))


def test_one_row_for_all(isa):
    x, w = torch.randn(2, 3, 1, 140).expand(2, 3, 9, 140), torch.randn(20, 3, 3, 3)
    check_close(first(x, w, None, (2, 2), (1, 1), (1, 1)), F.conv2d(x.double(), w.double(), None, 2, 1))


@pytest.mark.parametrize("activation", [F.relu, F.silu], ids=lambda f: f.__name__)
def test_post_ops(isa, guarded, activation):
    x, w, scale, shift = torch.randn(2, 3, 9, 140), torch.randn(20, 3, 3, 3), torch.randn(20), torch.randn(20)
    residual = torch.randn(2, 20, 5, 70)
    expected = F.conv2d(x.double(), w.double(), None, 2, 1) * scale.view(-1, 1, 1) + shift.view(-1, 1, 1) + residual
    blocked = residual.to(activation_format(4, library.isa_block())).physical
    got = first(
        x, w, None, (2, 2), (1, 1), (1, 1), scale=scale, shift=shift, residual=blocked, activation=activation.__name__
    )
    check_close(got, activation(expected))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("window", [((2, 1, 2), (0, 1, 1)), ((1, 1, 1), (1, 1, 1))], ids=str)
def test_three_dims(isa, guarded, depth, window):
    x, w = torch.randn(1, 2, 4, 6, 100), torch.randn(16, 2, depth, 3, 3)
    with tb.winograd("never"):
        check_close(
            F.conv3d(x, w.to(weight_format(w.shape, library.isa_block())), None, *window),
            F.conv3d(x.double(), w.double(), None, *window),
        )


def test_large_dst(isa, guarded):
    """Written past the caches; what later rows read is fetched before, also where there are none."""
    x, w = torch.randn(7, 3, 224, 226), torch.randn(48, 3, 3, 3)
    check_close(first(x, w, None, (1, 1), (1, 1), (1, 1)), F.conv2d(x, w, None, 1, 1))


def test_the_same_bits_for_any_batch_and_number_of_threads(isa):
    x, w = torch.randn(5, 3, 45, 150), torch.randn(48, 3, 3, 3)
    window = (2, 2), (1, 1), (1, 1)
    whole = first(x, w, None, *window).to_dense()
    for image in (0, 4):
        assert torch.equal(first(x[image : image + 1], w, None, *window).to_dense()[0], whole[image])
    with num_threads(1):
        assert torch.equal(first(x, w, None, *window).to_dense(), whole)
