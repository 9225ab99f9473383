"""Reductions and what runs along one axis, over every axis: the plain tensor's answer, gradients too, no fallback."""

import contextlib
import itertools
import math

import pytest
import torch
from conftest import CHANNELS, assert_same
from dispatch_cases import (
    FEW_FORMATS,
    FORMATS,
    cases,
    check,
    check_error,
    check_gradient,
    each_channels,
    image,
    images,
    native,
)
from torch import Tensor

import torch_blocked as tb
from torch_blocked.formats import activation_format

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


# ---- Reductions: functions of x, axes (a list, or None for all) and keepdim

SEVERAL_AXES = {
    "sum": lambda x, dim, keepdim: x.sum(dim, keepdim),
    "sum in double": lambda x, dim, keepdim: x.sum(dim, keepdim, dtype=torch.float64),
    "sum of integers": lambda x, dim, keepdim: (x * 9).int().sum(dim, keepdim),
    "nansum": lambda x, dim, keepdim: (x - 0.1).sqrt().nansum(dim, keepdim),
    "mean": lambda x, dim, keepdim: x.mean(dim, keepdim),
    "amax of negative": lambda x, dim, keepdim: (x - 9).amax(dim or (), keepdim),
    "amin of positive": lambda x, dim, keepdim: (x + 9).amin(dim or (), keepdim),
    "amin of integers": lambda x, dim, keepdim: (x * 9).int().add(9).amin(dim or (), keepdim),
    "all": lambda x, dim, keepdim: x.gt(-9).all(dim, keepdim),
    "any": lambda x, dim, keepdim: x.gt(9).any(dim, keepdim),
    "var": lambda x, dim, keepdim: (x + 3).var(dim, correction=1, keepdim=keepdim),
    "std": lambda x, dim, keepdim: (x - 3).std(dim, correction=0, keepdim=keepdim),
    "var_mean": lambda x, dim, keepdim: torch.var_mean(x + 1, dim, correction=0, keepdim=keepdim),
    "std_mean": lambda x, dim, keepdim: torch.std_mean(x + 1, dim, correction=0, keepdim=keepdim),
    "logsumexp": lambda x, dim, keepdim: (x - 9).logsumexp(dim or (0, 1, 2, 3), keepdim),
    **{
        f"norm of order {p}": lambda x, dim, keepdim, p=p: torch.linalg.vector_norm(x + 2, p, dim, keepdim)
        for p in (2, 1, 3, math.inf, -math.inf, -1, 0)
    },
}
AXES = [(0,), (1,), (2,), (3,), (2, 3), (-1, -3), (0, 2, 3), (0, 1), (0, 1, 2, 3), None]
NO_GRADIENT = ("sum of integers", "amin of integers", "all", "any", "norm of order 0")
# Their gradients fill by a mask, or divide by a number of integers.
NATIVE_GRADIENT = ("sum", "sum in double", "mean", "var", "var_mean", "logsumexp", "norm of order 1")


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("axes", AXES, ids=str)
@cases(SEVERAL_AXES)
def test_reduction(isa, case, axes, keepdim):
    for channels in CHANNELS:
        for x in images(channels):
            y = check(lambda x: case(x, axes and list(axes), keepdim), x, **CLOSE)
            if axes and {a % 4 for a in axes}.isdisjoint({1}) and (len(axes) == 1 or (keepdim and len(axes) < 3)):
                assert all(isinstance(part, tb.BlockedTensor) for part in (y if isinstance(y, tuple) else (y,)))


@pytest.mark.parametrize("axes", [axes for axes in AXES if axes is None or len(axes) > 1 or axes == (1,)], ids=str)
@cases(SEVERAL_AXES)
def test_reduction_of_many_elements(case, axes):
    """So many that one axis is reduced after the other."""
    for channels in (19, 32):
        x = torch.randn(3, channels, 33, 29).clamp(-2, 2)
        for fmt in (tb.nChw8c, tb.nChw16c):
            for keepdim in (False, True):
                check(lambda x, k=keepdim: case(x, axes and list(axes), k), x.to(fmt), **CLOSE)


@pytest.mark.parametrize("axes", [(1,), (2, 3), (0, 1), (3,)], ids=str)
@pytest.mark.parametrize("name", [n for n in SEVERAL_AXES if n not in NO_GRADIENT])
def test_gradient_of_a_reduction(name, axes):
    for channels, keepdim in itertools.product((15, 17), (False, True)):
        for x in images(channels, FEW_FORMATS[:2]):
            how = {"expects": native} if name in NATIVE_GRADIENT else {"expects": torch.enable_grad}
            check_gradient(lambda x, k=keepdim: SEVERAL_AXES[name](x, list(axes), k), x, **how, **CLOSE)


# ---- Over one axis, or all

ONE_AXIS = {
    "max": lambda x, *dim: (x - 9).max(*dim),
    "min": lambda x, *dim: (x + 9).min(*dim),
    "max of integers with ties": lambda x, *dim: (x * 4).int().max(*dim),
    "argmax with ties": lambda x, *dim: (x * 4).round().argmax(*dim),
    "argmax of negative integers": lambda x, *dim: (x * 4).int().sub(9).argmax(*dim),
    "argmin with ties": lambda x, *dim: (x * 4).round().argmin(*dim),
    "argmax of a constant": lambda x, *dim: (x * 0 - 1).argmax(*dim),
    "prod": lambda x, *dim: (x + 0.7).prod(*dim),
    "prod of integers": lambda x, *dim: (x > 9).add(1).prod(*dim),
    "aminmax": lambda x, *dim: torch.aminmax(x + 5, **dict(zip(("dim", "keepdim"), dim, strict=False))),
    "count_nonzero": lambda x, *dim: x.gt(0).count_nonzero(*dim[:1]),
    "all": lambda x, *dim: x.ne(0).all(*dim),
    "any": lambda x, *dim: x.gt(9).any(*dim),
}


@pytest.mark.parametrize("dim", [(), (0,), (1,), (-2,), (3, True), (1, True)], ids=str)
@cases(ONE_AXIS)
def test_reduction_over_one_axis(isa, case, dim):
    for channels in CHANNELS:
        for x in images(channels):
            check(lambda x: case(x, *dim), x, **CLOSE)


@pytest.mark.parametrize("dim", [(0,), (1,), (2,), (3, True)], ids=str)
@pytest.mark.parametrize("name", ["max", "min"])
def test_gradient_of_an_extreme(name, dim):
    for channels in CHANNELS:
        for x in images(channels):
            check_gradient(lambda x: ONE_AXIS[name](x, *dim)[0], x)


QUANTILES = {
    "quantile": lambda x, dim, keepdim: x.quantile(0.3, dim, keepdim),
    "quantiles": lambda x, dim, keepdim: x.quantile(torch.tensor([0.2, 0.7]), dim, keepdim),
    "nanquantile": lambda x, dim, keepdim: (x - 0.1).sqrt().nanquantile(0.3, dim, keepdim),
}


@pytest.mark.parametrize("size", [(17,), (3, 17), (3, 8), (2, 17, 5), (2, 8, 5), (2, 1, 5), (2, 17, 3, 4)], ids=str)
@cases(QUANTILES)
def test_quantile(case, size):
    for block, dim, keepdim in itertools.product((8, 16), (*range(len(size)), None), (False, True)):
        x = torch.rand(size).to(activation_format(len(size), block))
        check(lambda x, d=dim, k=keepdim: case(x, d, k), x, expects=contextlib.nullcontext)
        with torch.inference_mode():
            check(lambda x, d=dim, k=keepdim: case(x, d, k), x, expects=contextlib.nullcontext)


# ---- Along one axis, which is kept

ALONG = {
    "softmax": lambda x, dim: (x - 90).softmax(dim),
    "log_softmax": lambda x, dim: (x + 90).log_softmax(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "cumsum of integers": lambda x, dim: (x * 9).int().cumsum(dim),
    "cumsum in double": lambda x, dim: x.cumsum(dim, dtype=torch.float64),
    "cumprod": lambda x, dim: (x + 0.7).cumprod(dim),
}
NOT_OVER_CHANNELS = {
    "cummax": lambda x, dim: x.cummax(dim),
    "cummin": lambda x, dim: x.cummin(dim),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "sort": lambda x, dim: x.sort(dim),
    "sort descending": lambda x, dim: x.sort(dim=dim, descending=True, stable=True),
    "topk": lambda x, dim: x.topk(2, dim),
    "kthvalue": lambda x, dim: x.kthvalue(1, dim, True),
    "median": lambda x, dim: x.median(dim),
    "nanmedian": lambda x, dim: x.nanmedian(dim),
    "mode": lambda x, dim: x.mode(dim),
    "quantile": lambda x, dim: x.quantile(0.3, dim, True),
}


@pytest.mark.parametrize("dim", range(-4, 4))
@cases(ALONG)
def test_along_an_axis(isa, case, dim):
    for channels in CHANNELS:
        for x in images(channels):
            y = check(lambda x: case(x, dim), x, **CLOSE)
            assert y.blocking == x.blocking


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefixes_that_overflow(dtype):
    """What comes after may bring them back: they are wider than the answer."""
    x, y = torch.ones(1, 17, 1, 1), torch.zeros(1, 17, 1, 1)
    x[0, :2], x[0, 16] = 1e30, 1e-30
    y[0, :2], y[0, 16] = 3e38, -3e38
    for fmt in (tb.nChw8c, tb.nChw16c):
        assert_same(x.to(dtype).to(fmt).cumprod(1), x.to(dtype).cumprod(1))
        assert_same(y.to(dtype).to(fmt).cumsum(1), y.to(dtype).cumsum(1))


@pytest.mark.parametrize("dim", (0, 2, 3))
@pytest.mark.parametrize("name", [n for n in NOT_OVER_CHANNELS if n != "quantile"])
def test_along_an_axis_that_is_not_blocked(isa, name, dim):
    for channels in CHANNELS:
        for x in images(channels):
            check(lambda x: NOT_OVER_CHANNELS[name](x, dim), x, **CLOSE)


@cases(NOT_OVER_CHANNELS)
def test_along_channels_by_another_way(case):
    for dim in (1, 2):
        for x in images(17):
            check(lambda x, d=dim: case(x, d), x, expects=torch.enable_grad, **CLOSE)


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cumsum"])
def test_gradient_along_an_axis(name, dim):
    for channels in CHANNELS:
        for x in images(channels):
            check_gradient(lambda x: ALONG[name](x, dim), x, **CLOSE)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_along_many_channels(name):
    """So many elements that ATen, for dtypes without a kernel, reduces one axis of the blocks after the other."""
    for channels, fmt, dtype in itertools.product((19, 32), (tb.nChw8c, tb.nChw16c), (torch.float32, torch.float64)):
        x = torch.randn(3, channels, 33, 29, dtype=dtype).to(fmt)
        check(lambda x: ALONG[name](x, 1), x, **CLOSE)
        check_gradient(lambda x: ALONG[name](x, 1), x, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_accumulated_in_single(dtype):
    x = torch.full((1, 53, 3, 2), 30.0)
    x[:, 40:] = 1 / 30
    for fmt in FEW_FORMATS:
        y = x.to(dtype).to(fmt)
        check(lambda x: (x * 1000).mean(1), y, rtol=1e-2, atol=1e-2)  # whose sum is no half
        for f in (lambda x: x.softmax(1), lambda x: x.var(1), lambda x: x.cumsum(1)):
            check(f, y, rtol=2e-2, atol=1e-2)
        # PyTorch rounds by the place of the axis in memory: on a plain tensor, the same.
        check(lambda x: x.log_softmax(1), y, expects=contextlib.nullcontext, rtol=0, atol=0)


DEVIATIONS = {
    "std": lambda x, dim: x.std(dim),
    "std_mean": lambda x, dim: torch.std_mean(x, dim),
    "var": lambda x, dim: x.var(dim),
    "var_mean": lambda x, dim: torch.var_mean(x, dim),
}


@pytest.mark.parametrize("name", DEVIATIONS)
@pytest.mark.parametrize("dim", [None, 1, (1, 2, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("channels", [16, 17])
def test_deviations_whose_squares_overflow(name, dim, channels):
    x = torch.arange(2.0 * channels * 16).view(2, channels, 4, 4)
    for dtype, largest in ((torch.float16, 6e4), (torch.float32, 1e20), (torch.float32, 4e18), (torch.bfloat16, 1e20)):
        y = (x / x.max() * largest).to(dtype)
        tolerances = {} if dtype is torch.float32 else dict(rtol=1e-2, atol=0)
        for fmt in FEW_FORMATS:
            check(lambda x: DEVIATIONS[name](x, dim), y.to(fmt), expects=contextlib.nullcontext, **tolerances)


def test_nansum_of_half_precision_rounds_once():
    x = (torch.rand(4, 64, 7, 8) + 0.5).half()
    y, exact = x.to(tb.nChw16c).nansum((1, 3)), x.double().nansum((1, 3))
    assert ((y.to_dense() - exact).abs() <= exact * 2.0**-11).all()


@pytest.mark.parametrize("dims", [(2, 3), (0, 2, 3)], ids=str)
def test_extremes_of_images(dims):
    for x in images(17):
        x[0, 3], x[:, 4], x[0, 5, 1, 1], x[1, 6, 0, 1] = -math.inf, -7, math.nan, math.inf
        for keepdim, name in itertools.product((False, True), ("amax", "amin")):
            check(lambda x, f=name, k=keepdim: getattr(x, f)(dims, k), x, rtol=0, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dim", [1, 3])
def test_nonfinite_values_stay_where_they_are(value, dim):
    for x in images(17):
        x[0, 3, 0, 0], x[1, 16, 1, 1] = value, value
        for f in (*ALONG.values(), NOT_OVER_CHANNELS["cummax"]):
            check(lambda x, f=f: f(x, dim), x, expects=torch.no_grad, **CLOSE)
        for name in ("sum", "mean", "var", "amax of negative", "amin of positive", "logsumexp", "norm of order -1"):
            check(lambda x, f=SEVERAL_AXES[name]: f(x, [dim], True), x, **CLOSE)
        for name in ("max", "min", "argmax with ties", "prod", "all"):
            check(lambda x, f=ONE_AXIS[name]: f(x, dim), x, **CLOSE)


ERRORS = {
    "argmax over": lambda x: x.argmax(4),
    "softmax over": lambda x: x.softmax(5),
    "cumsum under": lambda x: x.cumsum(-5),
    "prod over": lambda x: x.prod(9),
    "var twice": lambda x: x.var((1, -3)),
    "var of integers": lambda x: x.int().var(1),
    "softmax of integers": lambda x: x.int().softmax(1),
    "argmax of bools": lambda x: x.gt(0).argmax(1),
    "amax of complex": lambda x: x.to(torch.complex64).amax(1),
    "max of nothing": lambda x: x[:, :0].max(1),
    "topk of too many": lambda x: x.topk(9, 2),
}


@cases(ERRORS)
def test_refuses_what_pytorch_refuses(case):
    check_error(case, images(17)[0])


def test_answers_of_one_format_do_not_copy():
    """A reduction over channels reads the blocks as they lie: no reorder."""
    (x,) = images(17, [tb.nChw16c])
    with tb.count() as counts:
        for f in (torch.sum, torch.mean, torch.argmax, torch.softmax, torch.cumsum, torch.var):
            f(x, 1)
    assert counts.reorders.total() == 0
    assert_same(x, x.to_dense())


# ---- Those that are taken together by one operator of the physical tensor

TOGETHER = {
    "mean": lambda x, dim, keepdim: x.mean(dim, keepdim),
    "sum": lambda x, dim, keepdim: x.sum(dim, keepdim),
    "sum in double": lambda x, dim, keepdim: x.sum(dim, keepdim, dtype=torch.float64),
    "amax": lambda x, dim, keepdim: x.amax(dim, keepdim),
    "amin": lambda x, dim, keepdim: (x - 100).amin(dim, keepdim),
    "amax of negative": lambda x, dim, keepdim: (x - 100).amax(dim, keepdim),
}

AXES_TOGETHER = [(0,), (2,), (3,), (2, 3), (-1, -2), (0, 2, 3), (3, 0), (1,), (1, 2), (0, 1, 2, 3), ()]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("axes", AXES_TOGETHER, ids=str)
@cases(TOGETHER)
def test_reduction_over_axes_together(isa, case, axes, keepdim):
    is_native = axes and 1 not in axes
    for channels, fmt in itertools.product(CHANNELS, ("nChw4c", "nChw16c", "acdB8b", "aBcd2b4b")):
        x = image(channels).to(tb.format(fmt))
        y = check(lambda x: case(x, list(axes), keepdim), x, expects=native if is_native else contextlib.nullcontext)
        if is_native and (len(axes) == 1 or (keepdim and len(axes) < 3)):
            assert isinstance(y, tb.BlockedTensor)


REDUCTIONS_OF_ALL = {
    "sum": Tensor.sum,
    "mean": Tensor.mean,
    "amax": Tensor.amax,
    "max": Tensor.max,
    "max over channels": lambda x: x.max(1),
    "var": lambda x: x.var((2, 3)),
    "norm": Tensor.norm,
    "argmax": Tensor.argmax,
    "prod": lambda x: x.prod(1),
    "any": Tensor.any,
    "all over channels": lambda x: x.ne(0).all(1),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "logsumexp": lambda x: x.logsumexp((2, 3)),
    "sum of integers": lambda x: x.int().sum((2, 3)),
    "sum of bools": lambda x: x.gt(0).sum(3),
    "sum of nothing": lambda x: x[:0].sum((0, 2)),
    "mean of nothing": lambda x: x[:, :, :0].mean(2),
    "mean of many, as one vector": lambda x: x.mean((2, 3)).view(-1),
    "mean of columns, as a matrix": lambda x: x.mean(3).view(x.size(0), -1),
    "mean of all images, as a matrix": lambda x: x.mean((0, 2)).view(-1, 2),
}


@each_channels
@cases(REDUCTIONS_OF_ALL)
def test_other_reductions(case, channels):
    for fmt in FORMATS:
        check(case, image(channels).to(fmt), expects=contextlib.nullcontext)


def test_reduction_keeps_nonfinite_values_in_their_channels():
    x = image(17)
    x[0, 3, 0, 0], x[1, 16, 1, 1], x[0, 16, 0, 0] = math.nan, math.inf, -math.inf
    for case in TOGETHER.values():
        check(lambda x, f=case: f(x, (2, 3), True), x.to(tb.nChw16c))


def test_reduction_of_blocked_weights():
    for tag in ("OIhw16i16o", "OIhw4i16o4i", "Ohwi16o"):
        w = torch.randn(17, 20, 3, 2).to(tb.format(tag))
        check(lambda w: (w.sum((2, 3)), w.amax(2), w.mean((2, 3), keepdim=True)), w)
