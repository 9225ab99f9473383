"""Pooling and up-sampling of blocked tensors: the plain answer and gradient, no fallback where there is a kernel."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same, dense
from dispatch_cases import SRC_VIEWS, cases, check, check_error, falls_back, image, native

import torch_blocked as tb
from torch_blocked.dispatch import registry
from torch_blocked.formats import activation_format

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("one_thread")

POOLINGS = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max ceil": lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True),
    "max dilated": lambda x: F.max_pool2d(x, 2, 1, 1, 2),
    "max with indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max with indices, ceil": lambda x: F.max_pool2d(x, 2, 3, ceil_mode=True, return_indices=True),
    "max of windows in the border": lambda x: F.max_pool2d(x[..., :4, :4], 2, 1, 1, 5, return_indices=True),
    "max of all": lambda x: F.max_pool2d(x, (5, 6)),
    "avg": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg ceil": lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True),
    "avg without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg with divisor": lambda x: F.avg_pool2d(x, 2, 1, divisor_override=3),
    "adaptive avg": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive avg of all": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive avg of one axis": lambda x: F.adaptive_avg_pool2d(x, (1, None)),
    "adaptive avg, larger": lambda x: F.adaptive_avg_pool2d(x, (7, 8)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "adaptive max with indices": lambda x: F.adaptive_max_pool2d(x, (2, 1), return_indices=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest to a size": lambda x: F.interpolate(x, (3, 11)),
    "nearest exact": lambda x: F.interpolate(x, scale_factor=(1.5, 0.7), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bilinear aligned": lambda x: F.interpolate(x, (9, 3), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
}


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special values"])
@cases(POOLINGS)
def test_pooling(isa, case, special):
    for channels, tag in itertools.product(CHANNELS, (None, "nChw4c", "nChw16c", "acdB8b")):
        x = image(channels)
        if special:
            x[0, 0, 2, 2], x[1, -1, 0, 0], x[0, -1, -1, -1] = math.nan, math.inf, -math.inf
        y = check(case, x.to(tb.format(tag) if tag else tb.blocked))
        assert isinstance(y[0] if isinstance(y, tuple) else y, tb.BlockedTensor)


# The answer is written past the caches, but for the block with padding.
PAST_CACHES = {
    "max": (lambda x: F.max_pool2d(x, 3, 2, 1), (1, 20, 483, 485)),
    "max with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), (1, 20, 483, 485)),
    "avg": (lambda x: F.avg_pool2d(x, 3, 1, 1), (2, 20, 241, 243)),
    "global avg": (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 20, 483, 485)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (1, 20, 213, 215)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (1, 20, 213, 215)),
}


@cases(PAST_CACHES)
def test_pooling_past_the_caches(isa, case):
    f, size = case
    x = torch.randn(size).to(tb.blocked)
    y = check(f, x)
    y = y[0] if isinstance(y, tuple) else y
    assert isinstance(y, tb.BlockedTensor)
    assert 4 * (x.physical.numel() + y.physical.numel()) > 20 << 20


@pytest.mark.parametrize("name", ["avg", "nearest", "bilinear"])
def test_gradient_past_the_caches(isa, name):
    f, size = PAST_CACHES[name]
    check_gradient(f, torch.randn(size), lambda diff: diff.to(tb.blocked))


@cases(SRC_VIEWS)
def test_pooling_of_views(case):
    for fmt in (tb.nChw8c, tb.nChw16c):
        view = case(torch.randn(3, 48, 5, 6).to(fmt))
        expects = native if view.blocking.axes == (1,) else falls_back
        check(lambda x: F.max_pool2d(x, 2, 1, 1, return_indices=True), view, expects=expects)
        check(lambda x: F.avg_pool2d(x, 2, 1, 1), view, expects=expects)


POOLINGS_ON_PLAIN_TENSORS = {
    "no batch": (tb.nCw16c, (17, 5, 6), lambda x: F.max_pool2d(x, 2, return_indices=True)),
    "1-D": (tb.nCw16c, (2, 17, 6), lambda x: F.avg_pool1d(x, 2)),
    "3-D": (tb.nCdhw16c, (2, 17, 3, 5, 6), lambda x: F.max_pool3d(x, 2)),
    "blocked rows": (tb.format("abCd4c"), (2, 17, 5, 6), lambda x: F.avg_pool2d(x, 2)),
    "two blocks": (tb.format("aBcd4b4b"), (2, 17, 5, 6), lambda x: F.adaptive_avg_pool2d(x, 2)),
    "empty batch": (tb.nChw16c, (0, 17, 5, 6), lambda x: F.max_pool2d(x, 2, return_indices=True)),
    "lp": (tb.nChw16c, (2, 17, 5, 6), lambda x: F.lp_pool2d(x, 2, 2)),
}


@cases(POOLINGS_ON_PLAIN_TENSORS)
def test_pooling_without_a_kernel(case):
    fmt, size, f = case
    check(f, torch.randn(size).to(fmt), expects=contextlib.nullcontext)


POOLING_ERRORS = {
    "padding": lambda x: F.max_pool2d(x, 2, 1, 2),
    "kernel": lambda x: F.avg_pool2d(x, 7),
    "size": lambda x: F.adaptive_avg_pool2d(x, (-1, 2)),
    "stride": lambda x: F.avg_pool2d(x, 2, 0),
    "divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=0),
    "integers": lambda x: F.avg_pool2d(x.bool(), 2),
    "empty": lambda x: F.max_pool2d(x[:, :, :0], 2),
    "a size past memory": lambda x: F.interpolate(x, size=2**40),
    "a scale past memory": lambda x: F.interpolate(x, scale_factor=1e9, mode="bilinear"),
    "windows past memory": lambda x: F.adaptive_avg_pool2d(x, 2**40),
    "windows with indices past memory": lambda x: F.adaptive_max_pool2d(x, 2**40),
    "no number": lambda x: F.interpolate(x, scale_factor=math.nan),
    "infinite": lambda x: F.interpolate(x, scale_factor=math.inf),
}


@pytest.mark.parametrize("inference", [False, True])
@cases(POOLING_ERRORS)
def test_pooling_refuses_what_pytorch_refuses(case, inference):
    with torch.inference_mode(inference):
        check_error(case, image(17).to(tb.nChw16c))


# ---- Modes and gradients


@pytest.mark.parametrize("quick", [False, True], ids=["in Python", "in C++"])
@pytest.mark.parametrize("inference", [False, True])
def test_inference_mode_makes_no_indices(monkeypatch, inference, quick):
    for func in (aten.max_pool2d.default, aten.max_pool2d_with_indices.default):
        monkeypatch.setattr(registry.QUICK[func], "enabled", quick)
    x = image(17, h=9, w=8)
    with torch.inference_mode(inference), tb.count() as counts, torch.profiler.profile(record_shapes=True) as profile:
        y = F.max_pool2d(x.to(tb.nChw16c), 3, 2, 1)
    (call,) = [event for event in profile.events() if event.name == "torch_blocked::pool"]
    assert call.concrete_inputs[-1] is not inference and not counts.fallbacks
    assert_same(y, F.max_pool2d(x, 3, 2, 1), rtol=0, atol=0)


INTERPOLATIONS = [
    dict(scale_factor=2), dict(size=(3, 11), mode="bilinear"), dict(scale_factor=(1.7, 0.6), mode="nearest-exact"),
    dict(scale_factor=2.1), dict(scale_factor=1.7, mode="bilinear", align_corners=True), dict(size=4, mode="bicubic"),
]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", INTERPOLATIONS, ids=str)
def test_interpolate(how, inference):
    x = image(17, h=5, w=6)
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
    check_gradient(GRADIENTS[name], image(channels, h=7, w=8), GRADIENTS_IN[gradient_in])


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


@pytest.mark.parametrize("scale", [1.1, 1.3, 1.45, 2, 2.1, 2.4, 0.6])
def test_nearest_3d_by_every_size_and_scale(scale):
    """Also where the answer is as large as the tensor, or twice as large, by another scale."""
    for n, axis in itertools.product(range(2, 7), range(3)):
        size, scales = [2, 17, 2, 2, 2], [1.0] * 3
        size[2 + axis], scales[axis] = n, scale
        for fmt in (tb.nCdhw8c, tb.nCdhw16c):
            check(lambda x, s=tuple(scales): F.interpolate(x, scale_factor=s), torch.randn(size).to(fmt))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("tag", ["nChw16c", "nChw4c"])
@pytest.mark.parametrize(
    "n, scale", [(64, 2.01), (70, 1.01), (60, 1.01), (64, 1.01), (65, 1.01), (40, 2.01), (31, 2.02)]
)
def test_nearest_by_a_scale_that_is_not_the_sizes(n, scale, tag, inference):
    """PyTorch ignores it up to 128 rows and columns."""
    x = torch.arange(float(n)).expand(1, 17, n, n).contiguous()
    for sizes in (dict(scale_factor=scale), dict(scale_factor=(scale, 1.0))):
        with torch.inference_mode(inference):
            assert_same(F.interpolate(x.to(tb.format(tag)), **sizes), F.interpolate(x, **sizes), rtol=0, atol=0)
    if not inference:
        check(lambda x: F.interpolate(x, scale_factor=scale), x.requires_grad_().to(tb.format(tag)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_index_of_a_window_without_numbers(ndim, dtype):
    """It is that of the first pixel."""
    pool = getattr(F, f"max_pool{ndim}d")
    for window in ((1,), (2, 1, 1), (2, 1, 1, 5), (3, 2, 0, 1, True)):
        x = torch.randn(2, 17, *(4, 4, 4)[:ndim]).to(dtype)
        x[0] = -math.inf
        x[1, :, :2] = -math.inf
        for block in (2, 4, 8, 16):
            given = x.to(activation_format(x.dim(), block))
            check(lambda x, w=window: pool(x, *w, return_indices=True), given)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tag", "plane"), [("nChw4c", (190, 180)), ("nChw16c", (190, 180)), ("nCdhw8c", (9, 64, 60))])
def test_maximum_of_integers(tag, plane, dtype):
    """Planes of more pixels than such an integer counts."""
    pool = getattr(F, f"max_pool{len(plane)}d")
    x = torch.randint(0, 100, (1, 17, *plane)).to(dtype)
    check(lambda x: pool(x, 3, 2, 1, return_indices=True), x.to(tb.format(tag)))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("tag", ["nCw8c", "nChw8c", "nChw4c", "nCdhw16c"])
def test_nearest_in_double_precision(tag, mode):
    """Other pixels than in single precision."""
    fmt = tb.format(tag)
    x = torch.arange(31.0, dtype=torch.float64).expand(1, 3, *[31] * (fmt.ndim - 2)).contiguous()
    check(lambda x: F.interpolate(x, scale_factor=2.7, mode=mode), x.to(fmt))
    wide, narrow = (F.interpolate(values, scale_factor=2.7, mode=mode) for values in (x, x.float()))
    assert not torch.equal(wide, narrow.double()), "the case is one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tag", ["nCw16c", "nChw16c", "nCdhw8c", "aBcd4b4b"])
def test_a_window_in_the_padding_has_no_gradient(tag, dtype):
    """Its index is outside the plane, where PyTorch's own gradient writes: the expected one is stated here."""
    fmt = tb.format(tag)
    pool = getattr(F, f"max_pool{fmt.ndim - 2}d")
    leaf = torch.randn(2, 24, *[1] * (fmt.ndim - 2), dtype=dtype).to(fmt).requires_grad_()
    y, indices = pool(leaf, 2, padding=1, dilation=2, return_indices=True)
    assert (dense(indices) >= 1).all()
    y.backward(torch.ones(y.shape, dtype=dtype))
    assert not dense(leaf.grad).any()


@pytest.mark.parametrize("name", ["max", "avg", "adaptive avg", "adaptive max"])
def test_plain_gradient(isa, name):
    """Of a blocked x that is used by a plain tensor, the gradient that comes in is plain."""
    x, f = image(17, h=7, w=8), GRADIENTS[name]
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
    x, f = image(17, 1, 5, 4), GRADIENTS[name]
    found = []
    for leaf in (x.clone().requires_grad_(), x.to(tb.blocked).requires_grad_()):
        first = torch.autograd.grad(f(leaf).sin().sum(), leaf, create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert_same(found[1], found[0])
