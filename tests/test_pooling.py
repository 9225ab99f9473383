"""Pooling and up-sampling operators at every ISA tier: values, indices, gradients, and what they refuse."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same, padding_is_zero

import torch_blocked as tb
from torch_blocked import equivalents, library
from torch_blocked.formats import activation_format

BLOCKS = (8, 16, 5)


@pytest.fixture
def guarded():
    """Outputs lie, NaN-filled, between guard bytes; afterwards none may have been written."""
    library.guard_outputs(True)
    yield
    assert library.guard_outputs(False) == 0, "bytes outside an output were written"


def image(n, channels, h, w, special=False):
    x = torch.randn(n, channels, h, w)
    if special:
        x[0, 0, h // 2, w // 2] = x[-1, -1, 0] = math.nan
        x[0, -1, -1, -1], x[-1, 0, 0, 0], x[0, channels // 2] = math.inf, -math.inf, -math.inf
    return x


def between_nans(x):
    """`x` as a view whose surroundings in memory are NaN: what reads outside it shows."""
    big = torch.full([n + 2 for n in x.shape[:-1]] + [x.size(-1)], math.nan)
    inside = big
    for d in range(x.dim() - 1):
        inside = inside.narrow(d, 1, x.size(d))
    return inside.copy_(x)


def wrap(physical, like, block):
    size = (*like.shape[:2], *physical.shape[2:4])
    return tb.BlockedTensor(physical, activation_format(4, block).blocking, torch.Size(size))


def each_src(x):
    """The physical tensor of `x` in blocks of every size, dense and as a view, with a way back for the answers."""
    for block, view in itertools.product(BLOCKS, (False, True)):
        physical = x.to(activation_format(4, block)).physical
        yield between_nans(physical) if view else physical, lambda y, block=block: wrap(y, x, block)


# ---- Pooling: (h, w), kernel, stride, padding, dilation, ceil_mode

WINDOWS = [
    ((1, 1), (1, 1), (1, 1), (0, 0), (1, 1), False),
    ((7, 9), (3, 3), (2, 2), (1, 1), (1, 1), False),
    ((8, 8), (3, 3), (2, 2), (1, 1), (1, 1), True),
    ((8, 7), (2, 2), (2, 2), (0, 0), (1, 1), False),
    ((7, 8), (2, 2), (2, 2), (1, 1), (1, 1), True),
    ((6, 5), (3, 2), (1, 3), (1, 0), (1, 1), True),  # the last window would start in the padding
    ((5, 5), (2, 2), (3, 3), (1, 1), (1, 1), True),
    ((9, 9), (5, 1), (1, 2), (2, 0), (1, 1), False),
    ((3, 40), (3, 13), (1, 1), (1, 6), (1, 1), False),
]
DILATED = [
    ((9, 8), (3, 3), (1, 1), (0, 0), (2, 3), False),
    ((9, 8), (2, 3), (2, 1), (1, 1), (3, 2), True),
    ((4, 4), (2, 2), (1, 1), (1, 1), (5, 1), False),  # windows that see only padding
    ((4, 4), (2, 2), (1, 1), (1, 1), (5, 5), False),
]


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


# ---- Up-sampling

MODES = {
    "nearest": lambda x, size, **how: torch.ops.aten.upsample_nearest2d(x, size, **how),
    "nearest-exact": lambda x, size, **how: torch.ops.aten._upsample_nearest_exact2d(x, size, **how),
    "bilinear": lambda x, size, **how: torch.ops.aten.upsample_bilinear2d(x, size, False, **how),
    "aligned": lambda x, size, **how: torch.ops.aten.upsample_bilinear2d(x, size, True, **how),
}


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
        upsample(src, (6, 5), mode, scale_h=scale, scale_w=scale)


# ---- Handlers


@pytest.mark.parametrize("inference", [False, True])
def test_inference_mode_makes_no_indices(monkeypatch, inference):
    x, op, wanted = image(2, 17, 9, 8), library.pool_op, []

    def recorded(*args, indices=False):
        wanted.append(indices)
        return op(*args, indices=indices)

    monkeypatch.setattr(library, "pool_op", recorded)
    with torch.inference_mode(inference), tb.count() as counts:
        y = F.max_pool2d(x.to(tb.nChw16c), 3, 2, 1)
    assert wanted == [not inference] and not counts.fallbacks
    assert_same(y, F.max_pool2d(x, 3, 2, 1), rtol=0, atol=0)


INTERPOLATIONS = [
    dict(scale_factor=2), dict(size=(3, 11), mode="bilinear"), dict(scale_factor=(1.7, 0.6), mode="nearest-exact"),
    dict(scale_factor=2.1), dict(scale_factor=1.7, mode="bilinear", align_corners=True), dict(size=4, mode="bicubic"),
]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", INTERPOLATIONS, ids=str)
def test_interpolate(how, inference):
    x = image(2, 17, 5, 6)
    with torch.inference_mode(inference), tb.count() as counts:
        y = F.interpolate(x.to(tb.blocked), **how)
    assert not counts.fallbacks
    assert isinstance(y, tb.BlockedTensor)
    assert_same(y, F.interpolate(x, **how))


GRADIENTS = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max ceil": lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True),
    "avg": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive avg": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "max dilated": lambda x: F.max_pool2d(x, 2, 1, 1, 2),
    "avg ceil": lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True),
    "avg with divisor": lambda x: F.avg_pool2d(x, 2, 1, divisor_override=-3),
    "global avg": lambda x: F.adaptive_avg_pool2d(x, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest exact": lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bilinear aligned": lambda x: F.interpolate(x, (3, 13), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "lp": lambda x: F.lp_pool2d(x.abs(), 2, 2),
}
OF_OTHER_RANKS = {
    "max 1-D": (1, lambda x: F.max_pool1d(x, 3, 2, 1)),
    "avg 1-D": (1, lambda x: F.avg_pool1d(x, 3, 2, 1)),
    "adaptive avg 1-D": (1, lambda x: F.adaptive_avg_pool1d(x, 3)),
    "adaptive max 1-D": (1, lambda x: F.adaptive_max_pool1d(x, 3)),
    "nearest 1-D": (1, lambda x: F.interpolate(x, scale_factor=1.7)),
    "nearest exact 1-D": (1, lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact")),
    "linear": (1, lambda x: F.interpolate(x, scale_factor=1.7, mode="linear")),
    "max 3-D": (3, lambda x: F.max_pool3d(x, 3, 2, 1)),
    "avg 3-D": (3, lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False)),
    "adaptive avg 3-D": (3, lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2))),
    "global avg 3-D": (3, lambda x: F.adaptive_avg_pool3d(x, 1)),
    "adaptive max 3-D": (3, lambda x: F.adaptive_max_pool3d(x, (2, 3, 2))),
    "nearest 3-D": (3, lambda x: F.interpolate(x, scale_factor=1.7)),
    "nearest exact 3-D": (3, lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact")),
    "trilinear": (3, lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear")),
}


def check_gradient(f, x, gradient_in):
    """Value and gradient are the plain tensor's, blocked, and nothing falls back."""
    plain, leaf = x.clone().requires_grad_(), x.to(tb.blocked).requires_grad_()
    expected = f(plain)
    diff = torch.randn_like(expected)
    with tb.count() as counts:
        y = f(leaf)
        y.backward(gradient_in(diff))
    assert not counts.fallbacks
    assert isinstance(leaf.grad, tb.BlockedTensor)
    expected.backward(diff)
    assert_same(y.detach(), expected.detach())
    assert_same(leaf.grad, plain.grad)


GRADIENTS_IN = {"blocked": lambda x: x.to(tb.blocked), "other block": lambda x: x.to(tb.format("aBcd4b"))}


@pytest.mark.parametrize("gradient_in", GRADIENTS_IN)
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_gradient(isa, channels, name, gradient_in):
    check_gradient(GRADIENTS[name], image(2, channels, 7, 8), GRADIENTS_IN[gradient_in])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OF_OTHER_RANKS)
@pytest.mark.parametrize("channels", (1, 16, 17))
def test_other_ranks(isa, channels, name, dtype):
    ndim, f = OF_OTHER_RANKS[name]
    x = torch.randn(2, channels, *(5, 7, 6)[:ndim], dtype=dtype)
    check_gradient(f, x, GRADIENTS_IN["blocked"])
    with torch.inference_mode(), tb.count() as counts:
        y = f(x.to(tb.blocked))
    assert isinstance(y, tb.BlockedTensor) and not counts.fallbacks
    assert_same(y, f(x))


@pytest.mark.parametrize("name", ["max", "avg", "adaptive avg", "adaptive max"])
def test_plain_gradient(isa, name):
    """Of a blocked x that is used by a plain tensor, the gradient that comes in is plain."""
    x, f = image(2, 17, 7, 8), GRADIENTS[name]
    grads = []
    for leaf in (x.clone(), x.to(tb.blocked)):
        with tb.count() as counts:
            y = f(leaf.requires_grad_())
            plain = y.contiguous(memory_format=torch.channels_last)
            plain.backward(torch.arange(float(y.numel())).view(y.shape))
        grads.append(leaf.grad)
        assert not counts.fallbacks
    assert isinstance(grads[1], tb.BlockedTensor)
    assert_same(grads[1], grads[0])


@pytest.mark.parametrize("name", ["avg", "adaptive avg", "nearest", "bilinear"])
def test_second_gradient(name):
    x, f = image(1, 17, 5, 4), GRADIENTS[name]
    found = []
    for leaf in (x.clone().requires_grad_(), x.to(tb.blocked).requires_grad_()):
        first = torch.autograd.grad(f(leaf).sin().sum(), leaf, create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert_same(found[1], found[0])


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
    op, good = getattr(torch.ops.torch_blocked, name), GOOD[name]
    op(**good)
    with pytest.raises(error, match=words) as info:
        op(**{**good, **change})
    assert "\n" not in str(info.value).split("\nException raised from")[0]


def test_threads_share_the_rows():
    x = torch.randn(3, 20, 64, 64)
    src, threads = x.to(tb.nChw16c).physical, torch.get_num_threads()
    expected = F.max_pool2d(x, 3, 2, 1)
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            y = wrap(library.pool_op(src, 20, (32, 32), "max", *[(3, 3), (2, 2), (1, 1), (1, 1)])[0], x, 16)
            assert padding_is_zero(y) and torch.equal(y.to_dense(), expected)
    finally:
        torch.set_num_threads(threads)
