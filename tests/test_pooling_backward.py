"""The gradients' operators of pooling and up-sampling at every ISA tier. Through autograd: test_pooling.py."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same
from kernel_cases import between_nans
from pooling_cases import BLOCKS, DILATED, MODES, WINDOWS, image, wrap

import torch_blocked as tb
from torch_blocked import equivalents, library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format


def each_pair(*tensors):
    """The physical tensors in blocks of every size, dense and the floating ones as views, and the way back."""
    for block, view in itertools.product(BLOCKS, (False, True)):
        physical = [x.to(activation_format(4, block)).physical for x in tensors]
        given = [between_nans(p) if view and p.is_floating_point() else p for p in physical]
        yield given, lambda y, block=block: wrap(y, tensors[0], block)


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special values"])
@pytest.mark.parametrize("window", [*WINDOWS, *DILATED[:2]], ids=str)
def test_max_backward(isa, guarded, window, special):
    size, *args, ceil_mode = window
    for channels in CHANNELS:
        x = image(2, channels, *size, special)
        y, indices = F.max_pool2d(x, *args, ceil_mode, return_indices=True)
        diff = image(*y.shape, special)
        expected = torch.ops.aten.max_pool2d_with_indices_backward(diff, x, *args, ceil_mode, indices)
        for given, back in each_pair(diff, indices):
            assert_same(back(library.max_pool_backward_op(*given, size)), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("index", [-1, 12, -(2**63), 2**63 - 1])
def test_an_index_outside_the_plane_has_no_gradient(isa, guarded, index):
    diff, indices = torch.ones(1, 2, 2, 2, 16), torch.full((1, 2, 2, 2, 16), 11)
    indices[0, 1, 1, 1, 3] = index
    for backward in (library.max_pool_backward_op, equivalents.max_pool_backward_aten):
        y = backward(diff, indices, (3, 4))
        assert y[0, 1, 2, 3, 3] == 3 and y.sum() == diff.numel() - 1


@pytest.mark.parametrize("count_include_pad, divisor", [(True, None), (False, None), (True, 5), (False, -3)])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_avg_backward(isa, guarded, window, count_include_pad, divisor):
    size, kernel, stride, padding, _, ceil_mode = window
    how = (count_include_pad, divisor)
    for channels, special in itertools.product(CHANNELS, (False, True)):
        x = image(2, channels, *size)
        diff = image(*F.avg_pool2d(x, kernel, stride, padding, ceil_mode).shape, special)
        expected = torch.ops.aten.avg_pool2d_backward(diff, x, kernel, stride, padding, ceil_mode, *how)
        for (given,), back in each_pair(diff):
            y = library.avg_pool_backward_op(given, size, kernel, stride, padding, *how)
            assert_same(back(y), expected, equal_nan=True)


@pytest.mark.parametrize("size", [((7, 9), (1, 1)), ((7, 9), (3, 4)), ((5, 3), (8, 7)), ((13, 13), (6, 6))], ids=str)
def test_adaptive_backward(isa, guarded, size):
    src_size, output_size = size
    for channels in CHANNELS:
        x, diff = image(2, channels, *src_size), image(2, channels, *output_size, special=True)
        expected = torch.ops.aten._adaptive_avg_pool2d_backward(diff, x)
        for (given,), back in each_pair(diff):
            assert_same(back(library.avg_pool_backward_op(given, src_size)), expected, equal_nan=True)
        indices = F.adaptive_max_pool2d(x, output_size, return_indices=True)[1]
        expected = torch.ops.aten.adaptive_max_pool2d_backward(diff, x, indices)
        for given, back in each_pair(diff, indices):
            assert_same(back(library.max_pool_backward_op(*given, src_size)), expected, equal_nan=True)


BACKWARD_MODES = {
    "nearest": torch.ops.aten.upsample_nearest2d_backward,
    "nearest-exact": torch.ops.aten._upsample_nearest_exact2d_backward,
    "bilinear": lambda diff, *sizes, **how: torch.ops.aten.upsample_bilinear2d_backward(diff, *sizes, False, **how),
    "aligned": lambda diff, *sizes, **how: torch.ops.aten.upsample_bilinear2d_backward(diff, *sizes, True, **how),
}


def upsample_backward(diff, size, mode, **how):
    given = ("bilinear", True) if mode == "aligned" else (mode, False)
    return library.upsample_backward_op(diff, size, *given, **how)


@pytest.mark.parametrize("mode", MODES)
def test_upsample_backward(isa, guarded, mode):
    sizes = [((1, 1), (3, 1)), ((5, 6), (10, 12)), ((5, 6), (5, 13)), ((7, 4), (3, 9)), ((6, 5), (1, 1))]
    for channels, (src_size, output_size), special in itertools.product(CHANNELS, sizes, (False, True)):
        diff = image(2, channels, *output_size)
        if special:
            diff[0, 0, 0, 0] = diff[-1, -1, -1, -1] = math.nan
        expected = BACKWARD_MODES[mode](diff, output_size, (2, channels, *src_size))
        for (given,), back in each_pair(diff):
            assert_same(back(upsample_backward(given, src_size, mode)), expected, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_upsample_backward_by_every_size_and_scale(mode):
    for n, m in itertools.product((1, 2, 3, 7, 10, 33), (1, 2, 3, 5, 6, 9, 14, 20, 21, 66, 99, 100)):
        diff = torch.randn(1, 8, m, 4)
        for scale in (None, m / n, m / n + 0.03, 0.0, -1.0):
            how = {"scales_h": scale, "scales_w": None}
            expected = BACKWARD_MODES[mode](diff, (m, 4), (1, 8, n, 3), **how)
            actual = upsample_backward(diff.to(tb.nChw8c).physical, (n, 3), mode, scale_h=scale, scale_w=None)
            assert_same(wrap(actual, diff, 8), expected, msg=lambda text: f"{n=} {m=} {scale=}: {text}")  # noqa: B023


@pytest.mark.parametrize("scale", [1e-300, 1e300, math.inf, math.nan])
def test_upsample_backward_stays_inside_whatever_the_scale(isa, guarded, scale):
    diff = torch.ones(1, 1, 6, 5, 16)
    for mode in MODES:
        total = upsample_backward(diff, (3, 4), mode, scale_h=scale, scale_w=scale).sum()
        torch.testing.assert_close(total, diff.sum())  # each pixel of diff_dst is shared out, once


def test_gradients_do_not_depend_on_the_number_of_threads():
    diff = torch.randn(3, 2, 32, 32, 16)
    indices = torch.randint(64 * 64, diff.shape)
    found = []
    for n in (1, 2, 3, 7):
        with num_threads(n):
            ours = (
                library.max_pool_backward_op(diff, indices, (64, 64)),
                library.avg_pool_backward_op(diff, (64, 64), (3, 3), (2, 2), (1, 1)),
                library.upsample_backward_op(diff, (20, 23), "bilinear"),
            )
        found.append(ours)
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))
