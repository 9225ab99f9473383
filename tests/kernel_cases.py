"""Problems and checks for the tests of the C++ operators, on physical tensors."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from conftest import padding_is_zero
from torch import Tensor

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format

# (n, ic, oc, ih, iw, kh, kw, stride, padding, dilation, groups)
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1),
    (2, 3, 20, 17, 19, 7, 7, 2, 3, 1, 1),
    (1, 5, 16, 9, 9, 3, 3, 1, 2, 2, 1),
    (1, 4, 33, 23, 50, 11, 11, 4, 2, 1, 1),
    (1, 17, 33, 9, 7, 3, 3, 1, 1, 1, 1),
    (1, 64, 48, 14, 14, 3, 3, 2, 1, 1, 1),
    (1, 53, 53, 11, 13, 3, 1, 1, (1, 0), 1, 1),
    (1, 32, 64, 12, 12, 1, 5, (1, 2), (0, 2), (1, 2), 1),
    (1, 300, 40, 20, 60, 5, 5, 3, 4, 2, 1),
    # Dilated: the rows of a tile are as far from each other, a dilation and a stride have a divisor, or none.
    (2, 40, 40, 19, 21, 3, 3, 1, 6, 6, 1),
    (1, 20, 33, 23, 17, 3, 3, 2, 4, 4, 1),
    (1, 20, 33, 25, 26, 3, 2, 2, 3, 3, 1),
    (1, 20, 33, 26, 25, 2, 3, 4, 6, 6, 1),
    # And so wide that columns of the filter see only padding from some columns of dst, or from all.
    (1, 70, 40, 9, 33, 3, 3, 1, (2, 14), (2, 14), 1),
    (2, 48, 64, 11, 33, 3, 3, 1, 24, 24, 2),
    (1, 33, 20, 7, 9, 3, 3, 1, 36, 36, 1),
    (1, 20, 17, 6, 5, 3, 3, 1, (1, 40), 1, 1),
    # Read in place: columns cut where taps begin or cease to see src, or no padding beside it. Cut, but of stride 2.
    (1, 70, 40, 15, 34, 3, 3, 1, (12, 13), (12, 13), 1),
    (1, 40, 40, 20, 33, 3, 3, (2, 1), (6, 12), (6, 12), 1),
    (2, 70, 33, 12, 15, 3, 3, 1, (1, 0), 1, 1),
    (1, 33, 20, 9, 11, 1, 1, 1, (1, 9), 1, 1),
    (1, 33, 20, 11, 40, 3, 3, 2, 20, 20, 1),
    (1, 100, 528, 17, 30, 3, 3, 1, 1, 1, 1),  # a tile is a part of the rows, and reads channels in several parts
    (3, 33, 40, 30, 30, 1, 1, 1, 0, 1, 1),
    (1, 256, 80, 7, 7, 1, 1, 2, 0, 1, 1),
    (1, 512, 16, 3, 400, 3, 3, 1, 1, 1, 1),  # wide: the window is split over input channels
    (1, 292, 16, 3, 400, 3, 3, 1, 1, 1, 1),  # and the last block is not half full
    (1, 16, 16, 3, 3, 3, 3, 1, 9, 6, 1),  # taps that see only padding
    (2, 24, 24, 9, 9, 3, 3, 2, 1, 1, 24),
    (1, 24, 48, 8, 9, 5, 5, 1, 2, 1, 24),  # two filters a channel
    # Depthwise 3x3 of stride 1, narrow: a tile a row, or two, with all or no edges in the padding, or too much of it.
    (2, 40, 40, 7, 7, 3, 3, 1, 1, 1, 40),
    (1, 24, 24, 9, 14, 3, 3, 1, (1, 0), 1, 24),
    (1, 17, 17, 5, 11, 3, 3, 1, (0, 1), 1, 17),
    (1, 16, 16, 3, 3, 3, 3, 1, 0, 1, 16),
    (2, 24, 24, 1, 1, 3, 3, 1, 1, 1, 24),
    (1, 24, 24, 6, 5, 3, 3, 1, (2, 1), 1, 24),
    (1, 24, 24, 6, 5, 3, 3, 1, (1, 2), 1, 24),
    (1, 32, 64, 7, 7, 3, 3, 1, 1, 1, 32),
    (1, 20, 30, 7, 7, 3, 3, 1, 1, 1, 10),
    (1, 48, 96, 6, 6, 3, 3, 1, 1, 1, 2),
    (1, 64, 64, 5, 5, 3, 3, 1, 1, 2, 4),
    (1, 17, 17, 9, 43, 7, 7, 1, 3, 1, 17),  # the padding reaches into the last tile but one
    (2, 17, 17, 5, 2, 5, 5, 2, 2, 1, 17),  # and from both sides into all columns
    (1, 48, 48, 9, 31, 3, 3, 1, 1, 1, 3),  # one block a group
    (2, 32, 32, 5, 2, 5, 5, 1, 2, 1, 2),  # padding from both sides into all columns
    (1, 24, 64, 6, 17, 3, 3, 2, 1, 1, 2),  # groups that end inside a block of input channels
    # Groups of a stride of 2, read where they lie: the first column sees padding, and the first row, and the last.
    (2, 96, 96, 14, 14, 3, 3, 2, 1, 1, 3),
    (1, 96, 128, 7, 62, 3, 3, 2, 1, 1, 2),  # two calls a row, an odd number of blocks
    (1, 64, 64, 9, 10, 2, 3, (1, 2), (0, 1), (3, 2), 2),
    (1, 64, 160, 6, 9, 3, 3, 2, 0, 1, 2),  # no padding; too many blocks of output channels
    (1, 64, 64, 5, 8, 3, 3, 2, (4, 1), 1, 2),  # rows that see only padding
    (1, 64, 64, 5, 8, 3, 3, 2, (10, 1), 1, 2),  # and some more of them
    (1, 64, 64, 5, 80, 3, 3, 2, (4, 1), 1, 2),  # in several calls a row
    (2, 64, 64, 9, 14, 3, 3, 1, (6, 1), 1, 2),
    (2, 70, 48, 21, 37, 1, 1, 1, 0, 1, 1),  # many calls side by side
    (2, 40, 70, 29, 30, 1, 1, 2, 0, 1, 1),
    (1, 40, 33, 9, 200, 3, 3, 1, 1, 1, 1),
    (1, 64, 64, 5, 2, 3, 3, 2, 1, 1, 2),
    (1, 64, 64, 8, 7, 3, 3, 2, 1, 1, 2),  # padding on the right, too
    (2, 48, 48, 9, 10, 5, 3, 2, (0, 1), 1, 6),
    (1, 48, 48, 7, 9, 3, 3, 1, 1, 2, 6),  # dilated
    (2, 24, 24, 6, 45, 3, 3, 2, 1, 1, 3),  # of eight channels a group: several tiles a row, the last block half empty
    (1, 40, 40, 4, 23, 2, 2, 1, 0, 1, 5),
    (1, 32, 32, 3, 25, 3, 3, 1, 2, 1, 4),
    (2, 28, 28, 9, 29, 3, 3, 1, 1, 1, 7),  # of four: the same
    (1, 20, 20, 8, 27, 5, 5, 2, 2, 1, 5),
    (1, 36, 36, 7, 12, 3, 1, 1, (1, 0), 1, 9),
    (1, 12, 12, 7, 11, 3, 3, 1, 2, 2, 3),
    (1, 40, 40, 9, 15, 7, 7, 2, 3, 1, 5),  # of eight, a wide filter
    (1, 64, 64, 13, 13, 3, 3, 2, 1, 1, 2),  # an odd number of rows, the first with fewer taps, or the last
    (1, 64, 64, 7, 7, 4, 3, 1, (2, 1), 1, 2),
    (1, 64, 64, 8, 7, 4, 3, 2, (0, 1), 1, 2),
    (1, 20, 64, 6, 7, 3, 3, 1, 1, 1, 2),  # whole blocks of output channels a group, not of input channels
]

# (n, ic, oc, src, kernel, stride, padding, dilation, groups)
CONVOLUTIONS = [
    (1, 1, 1, (1,), (1,), (1,), (0,), (1,), 1),
    (2, 17, 33, (40,), (3,), (1,), (1,), (1,), 1),
    (1, 53, 20, (29,), (5,), (3,), (4,), (2,), 1),
    (3, 64, 48, (31,), (1,), (1,), (0,), (1,), 1),
    (2, 20, 20, (19,), (4,), (2,), (1,), (1,), 20),
    (2, 48, 48, (33,), (3,), (2,), (1,), (1,), 3),  # one block a group
    (1, 20, 20, (40,), (33,), (1,), (16,), (1,), 20),  # most columns of dst see a part of the filter
    (1, 24, 24, (19,), (11,), (1,), (9,), (2,), 6),
    (1, 3, 18, (50,), (7,), (2,), (3,), (1,), 1),
    (1, 16, 16, (3,), (3,), (1,), (9,), (6,), 1),  # taps that see only padding
    (1, 1, 1, (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    (2, 17, 33, (4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    (1, 53, 20, (7, 9, 8), (2, 3, 1), (3, 2, 1), (1, 0, 2), (2, 1, 1), 1),
    (1, 20, 40, (5, 6, 17), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    (2, 33, 17, (5, 4, 3), (1, 1, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    (1, 16, 16, (3, 5, 5), (1, 1, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1), 1),
    (1, 16, 16, (2, 3, 3), (1, 1, 1), (4, 1, 1), (1, 0, 0), (1, 1, 1), 1),  # one plane, of padding alone
    (1, 3, 20, (5, 9, 11), (3, 7, 7), (1, 2, 2), (1, 3, 3), (1, 1, 1), 1),
    (1, 20, 20, (5, 6, 7), (3, 3, 3), (2, 1, 1), (1, 1, 1), (1, 1, 1), 20),
    (1, 20, 30, (4, 5, 4), (2, 3, 3), (1, 1, 2), (0, 1, 1), (1, 1, 1), 10),
    (1, 32, 32, (4, 5, 17), (3, 3, 3), (2, 1, 1), (1, 1, 1), (1, 1, 1), 2),
    (1, 40, 40, (4, 5, 21), (3, 3, 3), (1, 1, 2), (1, 1, 1), (1, 1, 1), 5),
    (2, 20, 20, (3, 5, 17), (2, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1), 5),
    (1, 64, 64, (4, 3, 5), (3, 1, 3), (1, 1, 1), (2, 0, 1), (2, 1, 1), 2),
    (2, 24, 24, (2, 5, 6), (3, 5, 5), (1, 1, 2), (3, 2, 2), (1, 1, 1), 24),  # planes that see only padding
    (1, 300, 16, (3, 5, 60), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),  # the window is split over ic
]

# (n, ic, oc, src, kernel, stride, padding, output padding, dilation, groups)
TRANSPOSED = [
    (1, 1, 1, (1, 1), (1, 1), (1, 1), (0, 0), (0, 0), (1, 1), 1),
    (1, 16, 20, (9, 1), (1, 1), (1, 2), (0, 0), (0, 0), (1, 1), 1),  # one column, beside which none is of its phase
    (1, 17, 16, (8, 1), (1, 3), (1, 2), (0, 1), (0, 0), (1, 1), 1),
    (1, 32, 16, (6, 9), (1, 1), (1, 1), (0, 1), (0, 2), (1, 3), 1),  # src begins a column before dst and is as wide
    (2, 17, 33, (5, 7), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (1, 53, 20, (6, 5), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1), 1),
    (2, 33, 48, (9, 7), (2, 2), (2, 2), (0, 0), (0, 0), (1, 1), 1),
    (1, 20, 17, (4, 16), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 1),
    (1, 16, 16, (5, 6), (5, 2), (3, 1), (2, 0), (1, 0), (1, 1), 1),
    (1, 15, 20, (5, 6), (3, 1), (1, 2), (3, 0), (0, 1), (1, 1), 1),  # padding over the kernel
    (1, 20, 5, (7, 6), (2, 1), (4, 3), (0, 0), (3, 2), (1, 1), 1),  # pixels that no tap reaches
    (1, 20, 20, (9, 8), (5, 5), (2, 3), (6, 7), (1, 0), (1, 1), 1),  # dst begins inside src
    (1, 16, 16, (3, 3), (1, 1), (5, 5), (3, 3), (0, 0), (1, 1), 1),  # fewer pixels than phases
    (1, 64, 64, (3, 33), (3, 3), (1, 1), (0, 2), (0, 0), (1, 1), 1),
    (1, 512, 16, (2, 400), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1), 1),  # the window is split over ic
    (1, 20, 33, (6, 5), (3, 3), (1, 2), (2, 0), (1, 0), (2, 3), 1),
    (2, 17, 16, (5, 4), (4, 3), (2, 4), (3, 1), (1, 3), (4, 2), 1),  # phases that no tap is of
    (1, 17, 20, (5, 4), (3, 5), (6, 6), (0, 2), (5, 3), (4, 9), 1),  # one tap in two or three is of a phase
    (2, 20, 20, (6, 5), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 20),
    (1, 53, 53, (9, 31), (3, 3), (2, 2), (1, 1), (1, 0), (1, 1), 53),
    (1, 16, 16, (7, 9), (5, 7), (1, 1), (1, 0), (0, 0), (1, 1), 16),
    (1, 20, 20, (5, 6), (3, 3), (2, 1), (3, 2), (1, 1), (3, 2), 20),
    (1, 20, 40, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 20),
    (2, 40, 20, (4, 5), (3, 2), (1, 2), (1, 0), (0, 1), (1, 1), 20),
    (1, 30, 20, (5, 6), (3, 3), (2, 2), (1, 1), (0, 0), (1, 1), 5),
    (1, 24, 24, (5, 19), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 6),
    (1, 24, 24, (5, 16), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1), 3),
    (1, 64, 32, (5, 17), (3, 3), (2, 1), (1, 1), (1, 0), (1, 2), 2),
    (2, 32, 48, (3, 3), (3, 3), (3, 2), (1, 1), (2, 1), (1, 1), 4),  # rows that no tap reaches
    (1, 1, 1, (1,), (1,), (1,), (0,), (0,), (1,), 1),
    (2, 17, 33, (25,), (4,), (2,), (1,), (0,), (1,), 1),
    (1, 53, 16, (9,), (3,), (3,), (2,), (2,), (1,), 1),
    (1, 20, 20, (9,), (3,), (2,), (1,), (1,), (1,), 20),
    (1, 20, 30, (9,), (3,), (2,), (2,), (1,), (3,), 10),
    (1, 1, 1, (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0), (1, 1, 1), 1),
    (2, 17, 33, (4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    (1, 20, 17, (3, 5, 1), (1, 1, 1), (4, 1, 3), (0, 0, 0), (3, 0, 0), (1, 1, 1), 1),  # the same
    (1, 16, 16, (3, 4, 5), (3, 1, 1), (1, 1, 1), (1, 0, 0), (0, 0, 1), (1, 1, 2), 1),  # a column that no tap reaches
    (1, 20, 17, (3, 4, 5), (2, 3, 4), (2, 2, 2), (0, 1, 1), (0, 1, 0), (1, 1, 1), 1),
    (1, 33, 20, (4, 5, 4), (3, 1, 3), (3, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 3), 1),
    (2, 20, 20, (4, 5, 6), (3, 3, 3), (2, 1, 2), (1, 1, 0), (1, 0, 1), (1, 1, 2), 20),
    (1, 20, 30, (3, 5, 4), (3, 2, 3), (1, 2, 1), (1, 0, 1), (0, 1, 0), (1, 1, 1), 10),
    (1, 5, 7, (9, 3, 3), (1, 3, 3), (1, 1, 1), (3, 1, 1), (0, 0, 0), (1, 1, 1), 1),  # dst begins inside src
]


def pair(n):
    return n if isinstance(n, tuple) else (n, n)


def between_nans(x: Tensor, dense: bool = False) -> Tensor:
    """`x` as a view whose surroundings in memory are NaN: what reads outside it shows.

    They are around every row; of a `dense` view, which some kernels read otherwise, before and after it.
    """
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d))  # as its dims lie in memory
    sizes = [x.size(d) for d in order]
    with_nans = 1 if dense else len(sizes) - 1  # dims
    inside = torch.full([n + 2 for n in sizes[:with_nans]] + sizes[with_nans:], math.nan)
    for d, n in enumerate(sizes[:with_nans]):
        inside = inside.narrow(d, 1, n)
    return inside.permute([order.index(d) for d in range(x.dim())]).copy_(x)


def run(x, w, b, args, src_format, wei_format, block, dense=False, **post_ops):
    """The operator on `x` and `w` in these formats; both lie between NaNs, `x` as `between_nans` has it."""
    src = x if src_format is None else x.to(src_format)
    wei = w if wei_format is None else w.to(wei_format)
    physical = library.convolution_op(
        between_nans(src.physical if src_format else src, dense), sum(src.blocking, ()) if src_format else (),
        wei.physical if wei_format else wei, w.shape, sum(wei.blocking, ()) if wei_format else (),
        b, *args, block, **post_ops,
    )  # fmt: skip
    n, _, oh, ow, _ = physical.shape
    return tb.BlockedTensor(physical, activation_format(4, block).blocking, torch.Size((n, w.size(0), oh, ow)))


def assert_same_in_python_threads(call, times=5):
    """Four threads that call at the same time get the tensor that one alone gets, each so many times."""
    expected, answers = call(), {}

    def repeat(i):
        answers[i] = [torch.equal(call(), expected) for _ in range(times)]

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [all(answers[i]) for i in range(4)] == [True] * 4


def plain_weight_gradient(x, diff_dst, size, stride, padding, dilation, groups):
    arguments = (stride, padding, dilation, False, [0] * (x.dim() - 2), groups, [False, True, False])
    return torch.ops.aten.convolution_backward(diff_dst, x, x.new_zeros(size), None, *arguments)[1]


def weight_gradient_problem(shape):
    """src, diff_dst, the weight's size, and the rest of a convolution's arguments."""
    n, ic, oc, src, kernel, *window, groups = shape
    x, size = torch.randn(n, ic, *src), torch.Size([oc, ic // groups, *kernel])
    dst = torch.convolution(x, x.new_zeros(size), None, *window, False, [0] * len(src), groups)
    return x, torch.randn_like(dst), size, (*window, groups)


def weight_gradient(src, diff_dst, size, arguments, fmt):
    """The operator's answer in `fmt`; src and diff_dst lie between NaNs."""
    blocked = isinstance(src, tb.BlockedTensor)
    physical = library.convolution_weight_gradient_op(
        between_nans(src.physical if blocked else src), sum(src.blocking, ()) if blocked else (),
        between_nans(diff_dst.physical), size, fmt.order, sum(fmt.blocking, ()), *arguments,
    )  # fmt: skip
    return tb.BlockedTensor(physical, fmt.blocking, size) if fmt.blocking else physical


def check_refused(name, good, change, error, words):
    """An operator takes `good` arguments; with the change it says what is wrong in one line."""
    op = getattr(torch.ops.torch_blocked, name)
    op(**good)
    with pytest.raises(error, match=words) as info:
        op(**{**good, **change})
    assert "\n" not in str(info.value).split("\nException raised from")[0]


def check_close(y, expected):
    """Against float64, relative to the largest value: sums of thousands of products are rounded."""
    assert padding_is_zero(y)
    error = (y.to_dense() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert y.shape == expected.shape and error < 1e-5, f"error {error:.1e}"
