"""The operators of pooling and up-sampling at every ISA tier: values, indices, and what they refuse."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same, padding_is_zero
from kernel_cases import between_nans, check_refused
from pooling_cases import BLOCKS, DILATED, MODES, WINDOWS, image, wrap

import torch_blocked as tb
from torch_blocked import equivalents, library
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.formats import activation_format


def each_src(x):
    """The physical tensor of `x` in blocks of every size, dense and as a view, with a way back for the answers."""
    for block, view in itertools.product(BLOCKS, (False, True)):
        physical = x.to(activation_format(4, block)).physical
        yield between_nans(physical) if view else physical, lambda y, block=block: wrap(y, x, block)


def dst_size(plain):
    return plain.shape[2:]


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special values"])
@pytest.mark.parametrize("window", [*WINDOWS, *DILATED], ids=str)
def test_max(isa, guarded, window, special):
    size, *args, ceil_mode = window
    for channels in CHANNELS:
        x = image(2, channels, *size, special)
        values, indices = F.max_pool2d(x, *args, ceil_mode, return_indices=True)
        for src, back in each_src(x):
            dst, none = library.pool_op(src, channels, dst_size(values), "max", *args)
            assert none.numel() == 0
            assert_same(back(dst), values, rtol=0, atol=0, equal_nan=True)
            dst, found = library.pool_op(src, channels, dst_size(values), "max", *args, indices=True)
            assert_same(back(dst), values, rtol=0, atol=0, equal_nan=True)
            assert_same(back(found), indices, rtol=0, atol=0)


@pytest.mark.parametrize("count_include_pad, divisor", [(True, None), (False, None), (True, 5), (False, -3)])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_avg(isa, guarded, window, count_include_pad, divisor):
    size, kernel, stride, padding, dilation, ceil_mode = window
    for channels, special in itertools.product(CHANNELS, (False, True)):
        x = image(2, channels, *size, special)
        expected = F.avg_pool2d(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
        for src, back in each_src(x):
            dst, _ = library.pool_op(
                src, channels, dst_size(expected), "avg", kernel, stride, padding, dilation, count_include_pad, divisor
            )
            assert_same(back(dst), expected, equal_nan=True)


@pytest.mark.parametrize("size", [((7, 9), (1, 1)), ((7, 9), (3, 4)), ((5, 3), (8, 7)), ((13, 13), (6, 6))], ids=str)
def test_adaptive(isa, guarded, size):
    src_size, output_size = size
    for channels in CHANNELS:
        x = image(2, channels, *src_size)
        values, indices = F.adaptive_max_pool2d(x, output_size, return_indices=True)
        average = F.adaptive_avg_pool2d(x, output_size)
        for src, back in each_src(x):
            dst, found = library.pool_op(src, channels, output_size, "max", indices=True)
            assert_same(back(dst), values, rtol=0, atol=0)
            assert_same(back(found), indices, rtol=0, atol=0)
            assert_same(back(library.pool_op(src, channels, output_size, "avg")[0]), average)


def test_average_of_large_planes(isa):
    x = torch.rand(1, 8, 200, 200)
    y, _ = library.pool_op(x.to(tb.nChw8c).physical, 8, (1, 1), "avg")
    torch.testing.assert_close(y.flatten(), x.double().mean((2, 3)).float().flatten(), rtol=2e-6, atol=0)


def test_average_of_long_rows(isa):
    """And of equal pixels, whose errors all have one sign."""
    for x in (torch.rand(1, 8, 1, 300_000), torch.full((1, 8, 1, 300_000), 0.1), torch.full((1, 8, 300_000, 1), 0.1)):
        y, _ = library.pool_op(x.to(tb.nChw8c).physical, 8, (1, 1), "avg")
        torch.testing.assert_close(y.flatten(), x.double().mean((2, 3)).float().flatten(), rtol=3e-6, atol=0)


def test_nan_in_one_channel_of_a_block(isa):
    """The last NaN of a window has the index; its neighbours in the block keep theirs."""
    x = image(1, 16, 3, 3)
    x[0, 3, 0, 1] = x[0, 3, 2, 0] = math.nan
    values, indices = library.pool_op(x.to(tb.nChw16c).physical, 16, (1, 1), "max", *[(3, 3)] * 2, (0, 0), (1, 1),
                                      indices=True)  # fmt: skip
    assert values.isnan().flatten().tolist() == [c == 3 for c in range(16)]
    assert indices[..., 3].item() == 6


def test_wide_windows_do_not_overflow(isa):
    src = torch.ones(1, 1, 2, 3, 16)
    huge, zero = (1 << 30, 1 << 30), (0, 0)
    for mode, args in itertools.product(("max", "avg"), ((huge, huge, zero, huge), ((1, 1), huge, huge, (1, 1)))):
        dst, _ = library.pool_op(src, 16, (4, 5), mode, *args, indices=False)
        assert dst.shape == (1, 1, 4, 5, 16) and not dst.isnan().any()


def upsample(src, size, mode, **how):
    return library.upsample_op(src, size, "bilinear" if mode == "aligned" else mode, mode == "aligned", **how)


@pytest.mark.parametrize("mode", MODES)
def test_upsample(isa, guarded, mode):
    sizes = [((1, 1), (3, 1)), ((5, 6), (10, 12)), ((5, 6), (5, 13)), ((7, 4), (3, 9)), ((6, 5), (1, 1))]
    for channels, (src_size, output_size), special in itertools.product(CHANNELS, sizes, (False, True)):
        x = image(2, channels, *src_size, special)
        expected = MODES[mode](x, output_size)
        for src, back in each_src(x):
            assert_same(back(upsample(src, output_size, mode)), expected, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_upsample_by_every_size_and_scale(mode):
    """Rounding decides which pixel is nearest: it must be PyTorch's."""
    for n in (1, 2, 3, 7, 10, 33):
        x = torch.randn(1, 8, n, 3)
        src = x.to(tb.nChw8c).physical
        for m in (1, 2, 3, 5, 6, 9, 14, 20, 21, 66, 99, 100):
            for scale in (None, m / n, m / n + 0.03, 0.0, -1.0):
                how = {"scales_h": scale, "scales_w": None}
                expected = MODES[mode](x, (m, 4), **how)
                actual = upsample(src, (m, 4), mode, scale_h=scale, scale_w=None)
                assert_same(wrap(actual, x, 8), expected, msg=lambda text: f"{n=} {m=} {scale=}: {text}")  # noqa: B023


@pytest.mark.parametrize("scale", [1e-300, 1e300, math.inf, math.nan])
def test_upsample_reads_src_whatever_the_scale(isa, scale):
    src = torch.ones(1, 1, 3, 4, 16)
    for mode in MODES:
        assert (upsample(src, (6, 5), mode, scale_h=scale, scale_w=scale) == 1).all()


# ---- The operators in torch.library

P = torch.arange(2 * 2 * 5 * 6 * 16.0).view(2, 2, 5, 6, 16).sin()

P[:, 1, ..., 4:] = 0

CALLS = {
    "max": ("pool", [P, 20, [2, 3], "max", [3, 3], [2, 2], [1, 1], [1, 1]], {"indices": True}),
    "max without indices": ("pool", [P, 20, [3, 3], "max", [3, 3], [2, 2], [1, 1], [1, 1]], {}),
    "avg": ("pool", [P, 20, [3, 3], "avg", [2, 2], [2, 2], [0, 0], [1, 1], False, 3], {}),
    "adaptive avg": ("pool", [P, 20, [2, 4], "avg"], {}),
    "adaptive max": ("pool", [P, 20, [2, 4], "max"], {"indices": True}),
    "empty batch": ("pool", [P[:0], 20, [2, 4], "max"], {"indices": True}),
    "nearest": ("upsample", [P, [10, 7], "nearest"], {}),
    "nearest-exact": ("upsample", [P, [10, 7], "nearest-exact", False, 2.0, None], {}),
    "bilinear": ("upsample", [P, [10, 12], "bilinear", True], {}),
    "max backward": ("max_pool_backward", [P, (P * 9).long() + 9, [3, 6]], {}),
    "max backward of nothing": ("max_pool_backward", [P[:0], P[:0].long(), [3, 6]], {}),
    "avg backward": ("avg_pool_backward", [P, [9, 12], [2, 2], [2, 2], [1, 1], False], {}),
    "avg backward, less than ceil": ("avg_pool_backward", [P, [11, 13], [2, 3], [2, 2], [0, 1], True, 7], {}),
    "adaptive avg backward": ("avg_pool_backward", [P, [7, 3]], {}),
    "nearest backward": ("upsample_backward", [P, [3, 7], "nearest"], {}),
    "nearest-exact backward": ("upsample_backward", [P, [3, 7], "nearest-exact", False, 2.0, None], {}),
    "bilinear backward": ("upsample_backward", [P, [3, 3], "bilinear", True], {}),
    "strided backward": ("upsample_backward", [P.transpose(2, 3)[..., ::2], [10, 3], "bilinear"], {}),
    "strided": ("upsample", [P.transpose(2, 3)[..., ::2], [10, 12], "bilinear"], {}),
}

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

# PyTorch's own gradient of bilinear up-sampling cannot be differentiated with symbolic sizes.
NOT_DYNAMIC = ("bilinear backward", "strided backward")


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, requires_grad):
    op, (src, *args), kwargs = CALLS[name]
    src = src.detach().clone().requires_grad_(requires_grad)
    checks = CHECKS[:-1] if requires_grad and name in NOT_DYNAMIC else CHECKS
    torch.library.opcheck(getattr(torch.ops.torch_blocked, op).default, [src, *args], kwargs, test_utils=checks)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_in_aten(name):
    op, args, kwargs = CALLS[name]
    actual = getattr(torch.ops.torch_blocked, op)(*args, **kwargs)
    expected = getattr(equivalents, f"{op}_aten")(*args, **kwargs)
    torch.testing.assert_close(actual, expected)


POOL = dict(src=P, channels=20, output_size=[3, 3], mode="max", kernel_size=[3, 3], stride=[2, 2], padding=[1, 1],
            dilation=[1, 1])  # fmt: skip

GOOD = {
    "pool": POOL,
    "upsample": dict(src=P, output_size=[3, 3], mode="nearest"),
    "max_pool_backward": dict(diff_dst=P, indices=P.long(), src_size=[5, 6]),
    "avg_pool_backward": dict(diff_dst=P, src_size=[9, 9], kernel_size=[3, 3], stride=[2, 2], padding=[1, 1]),
    "upsample_backward": dict(diff_dst=P, src_size=[3, 3], mode="nearest"),
}

BAD = [
    ("pool", {"src": P[0]}, ValueError, "src is"),
    ("pool", {"src": P[:, :, :0]}, ValueError, "not empty"),
    ("pool", {"src": P.double()}, TypeError, "float32 only"),
    ("pool", {"channels": 33}, ValueError, "channels"),
    ("pool", {"channels": 16}, ValueError, "channels"),
    ("pool", {"channels": -1}, ValueError, "channels"),
    ("pool", {"channels": 2**63 - 1}, ValueError, "channels"),
    ("pool", {"output_size": [0, 1]}, ValueError, "output_size"),
    ("pool", {"output_size": [1]}, ValueError, "output_size"),
    ("pool", {"output_size": [1, 2**40]}, ValueError, "output_size"),
    ("pool", {"mode": "min"}, ValueError, "max or avg"),
    ("pool", {"kernel_size": [0, 1]}, ValueError, "kernel"),
    ("pool", {"kernel_size": [1, 1, 1]}, ValueError, "kernel"),
    ("pool", {"stride": [1, 0]}, ValueError, "stride"),
    ("pool", {"stride": []}, ValueError, "stride"),
    ("pool", {"padding": [-1, 0]}, ValueError, "padding"),
    ("pool", {"dilation": [1, 2**40]}, ValueError, "dilation"),
    ("pool", {"divisor_override": 0}, ValueError, "divisor_override"),
    ("pool", {"mode": "avg", "indices": True}, ValueError, "indices"),
    ("upsample", {"src": P[0]}, ValueError, "src is"),
    ("upsample", {"src": P.half()}, TypeError, "float32 only"),
    ("upsample", {"output_size": [-1, 2]}, ValueError, "output_size"),
    ("upsample", {"output_size": []}, ValueError, "output_size"),
    ("upsample", {"mode": "bicubic"}, ValueError, "bilinear"),
    ("max_pool_backward", {"diff_dst": P[0]}, ValueError, "diff_dst is"),
    ("max_pool_backward", {"diff_dst": P[..., :8]}, ValueError, "shape of diff_dst"),
    ("max_pool_backward", {"diff_dst": P.double()}, TypeError, "float32 only"),
    ("max_pool_backward", {"indices": P.int()}, TypeError, "int64"),
    ("max_pool_backward", {"src_size": [0, 5]}, ValueError, "src_size"),
    ("max_pool_backward", {"src_size": [5]}, ValueError, "src_size"),
    ("avg_pool_backward", {"diff_dst": P[:, :, :0]}, ValueError, "not empty"),
    ("avg_pool_backward", {"src_size": [5, 2**40]}, ValueError, "src_size"),
    ("avg_pool_backward", {"kernel_size": [0, 1]}, ValueError, "kernel"),
    ("avg_pool_backward", {"stride": []}, ValueError, "stride"),
    ("avg_pool_backward", {"padding": [-1, 0]}, ValueError, "padding"),
    ("avg_pool_backward", {"divisor_override": 0}, ValueError, "divisor_override"),
    ("upsample_backward", {"diff_dst": P.half()}, TypeError, "float32 only"),
    ("upsample_backward", {"src_size": []}, ValueError, "src_size"),
    ("upsample_backward", {"mode": "bicubic"}, ValueError, "bilinear"),
]


@pytest.mark.parametrize("name, change, error, words", BAD, ids=[f"{b[0]}-{b[3]}-{i}" for i, b in enumerate(BAD)])
def test_refuses(name, change, error, words):
    check_refused(name, GOOD[name], change, error, words)


@pytest.mark.parametrize("size", [(3, 20, 64, 64), (1, 40, 53, 64), (2, 20, 6, 400), (1, 17, 3, 700)])
def test_threads_share_the_rows(size):
    x = torch.randn(size)
    src = x.to(tb.nChw16c).physical
    expected = F.max_pool2d(x, 3, 2, 1)
    for n in (1, 2, 3, 7):
        with num_threads(n):
            window = [(3, 3), (2, 2), (1, 1), (1, 1)]
            y = wrap(library.pool_op(src, size[1], expected.shape[2:], "max", *window)[0], x, 16)
        assert padding_is_zero(y) and torch.equal(y.to_dense(), expected)
