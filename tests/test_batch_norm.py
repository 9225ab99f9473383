"""Batch normalization of blocked tensors: answers, running statistics, what has no kernel."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, dense
from dispatch_cases import (
    SRC_VIEWS,
    cases,
    check,
    check_error,
    check_gradient,
    each_channels,
    falls_back,
    image,
    native,
)

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH_NORMS = {
    "plain": dict(),
    "no affine": dict(affine=False),
    "no running": dict(track_running_stats=False),
    "neither": dict(affine=False, track_running_stats=False),
    "momentum": dict(momentum=0.7, eps=0.1),
    "cumulative": dict(momentum=None),
}


def make_batch_norm(channels, dims=2, **how):
    norm = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)[dims - 1](channels, **how)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    for name, buffer in norm.named_buffers():
        if buffer.is_floating_point():
            torch.nn.init.uniform_(buffer, 0.5 if "var" in name else -1, 2)
    return norm


def check_batch_norm(norm, x, fmt, expects=native, **tolerances):
    twin = type(norm)(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    twin.load_state_dict(norm.state_dict())
    twin.train(norm.training)
    expected = twin(x)
    with expects(), torch.no_grad():
        y = norm(x.to(fmt))
    assert_same(y, expected, equal_nan=True, **tolerances)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value, equal_nan=True, msg=lambda m: f"{name}: {m}")  # noqa: B023
    return y


@each_channels
@pytest.mark.parametrize("training", [True, False])
@cases(BATCH_NORMS)
def test_batch_norm(isa, case, training, channels):
    for fmt in (tb.blocked, tb.format("nChw4c"), tb.nChw16c, tb.format("acdB8b")):
        norm = make_batch_norm(channels, **case).train(training)
        for _ in range(2):
            y = check_batch_norm(norm, image(channels) * 2 + 1, fmt)
            assert y.blocking == image(channels).to(fmt).blocking


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", [1, 3])
@each_channels
def test_batch_norm_of_other_ranks(isa, channels, dims, training):
    x = torch.randn(3, channels, *(4, 3, 2)[:dims])
    check_batch_norm(make_batch_norm(channels, dims).train(training), x, tb.blocked)


@pytest.mark.parametrize("training", [True, False])
@cases(SRC_VIEWS)
def test_batch_norm_of_views(isa, case, training):
    x = torch.randn(3, 48, 5, 6)
    c = case(x).size(1)
    mean, var, weight = torch.randn(c), torch.rand(c) + 0.5, torch.randn(c)
    for fmt in (tb.nChw8c, tb.nChw16c):
        blocks = case(x.to(fmt)).blocking
        expects = native if blocks.axes == (1,) else falls_back
        check(
            lambda x, m, v: F.batch_norm(x, m, v, weight, None, training), case(x.to(fmt)), mean, var, expects=expects
        )


BATCH_NORMS_ON_PLAIN_TENSORS = {
    "two axes": lambda x, f: f(x[:, :, 0, 0]),
    "double": lambda x, f: f(x.double(), torch.float64),
    "mixed": lambda x, f: f(x.bfloat16()),
    "empty batch": lambda x, f: f(x[:0]),
}


@pytest.mark.parametrize("training", [True, False])
@cases(BATCH_NORMS_ON_PLAIN_TENSORS)
def test_batch_norm_without_a_kernel(case, training):
    def f(x, dtype=torch.float32):
        mean, var = torch.zeros(17, dtype=dtype), torch.ones(17, dtype=dtype)
        return F.batch_norm(x, mean, var, None, mean + 1, training), mean, var

    check(lambda x: case(x, f), image(17).to(tb.nChw16c), expects=contextlib.nullcontext)


def test_batch_norm_of_one_value_a_channel():
    """Its unbiased variance is 0 / 0: NaN in the running variance, as for a plain tensor."""

    def f(x, mean, var):
        return torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)

    # The variance is 0, so values are multiplied by 1 / sqrt(eps) before the mean is taken off, in one rounding.
    check(f, torch.randn(1, 17, 1, 1).to(tb.nChw16c), torch.zeros(17), torch.ones(17), rtol=0, atol=1e-3)


def test_batch_norm_keeps_nonfinite_values_in_their_channels(isa):
    x = image(17)
    x[0, 3, 0, 0], x[1, 16, 1, 1] = math.nan, math.inf
    for training in (True, False):
        check_batch_norm(make_batch_norm(17).train(training), x, tb.blocked)
    norm = make_batch_norm(17).eval()
    norm.running_var[2], norm.running_mean[16] = math.nan, math.inf
    check_batch_norm(norm, image(17), tb.blocked)


def test_batch_norm_of_large_means(isa):
    x = image(17) + 300
    for training in (True, False):
        check_batch_norm(make_batch_norm(17).train(training), x, tb.blocked, rtol=1e-4, atol=1e-4)


BATCH_NORM_ERRORS = {
    "channels": lambda x: F.batch_norm(x, torch.zeros(16), torch.ones(16)),
    "weight": lambda x: F.batch_norm(x, torch.zeros(17), torch.ones(17), torch.ones(16)),
    "no running_var": lambda x: F.batch_norm(x, torch.zeros(17), None),
    "no running_mean": lambda x: F.batch_norm(x, None, torch.ones(17)),
    "bias": lambda x: F.batch_norm(x, torch.zeros(17), torch.ones(17), None, torch.ones(18)),
    "native": lambda x: torch.native_batch_norm(x, None, None, torch.zeros(17), None, False, 0.1, 1e-5),
    "no statistics": lambda x: F.batch_norm(x, None, None),
    "one value a channel": lambda x: F.batch_norm(x[:1, :, :1, :1], None, None, training=True),
}


@cases(BATCH_NORM_ERRORS)
def test_batch_norm_refuses_what_pytorch_refuses(case):
    check_error(case, image(17).to(tb.nChw16c))
    with torch.inference_mode():
        check_error(case, image(17).to(tb.nChw16c))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_by_one_running_statistic_changes_none(dtype):
    def f(x, running):
        F.batch_norm(x, running, None, None, None, True)

    def g(x, running):
        F.batch_norm(x, None, running, None, None, True)

    for case in (f, g):
        check_error(case, image(17).to(dtype).to(tb.nChw16c), torch.zeros(17, dtype=dtype))


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("blocked_src", [False, True])
def test_blocked_running_statistics_move(norm, dtype, blocked_src):
    x, found = image(17).to(dtype), []
    for blocked in (False, True):
        running = [torch.zeros(17, dtype=dtype), torch.ones(17, dtype=dtype)]
        running = [r.to(tb.blocked) for r in running] if blocked else running
        src = (x.to(tb.nChw16c) if blocked_src else x.clone()).requires_grad_()
        norm(src, *running, None, None, True, 0.3).square().sum().backward()
        found.append((*running, src.grad))
    for plain, blocked in zip(*found, strict=True):
        assert_same(blocked, dense(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_statistics_of_infinities(dtype):
    x = image(17).to(dtype)
    x[0, 3, 1, 2], x[1, 16, 0, 0] = math.inf, -math.inf
    for momentum in (0.1, 1.0):
        mean, var = torch.zeros(17, dtype=dtype), torch.ones(17, dtype=dtype)
        check(lambda x, m, v: F.batch_norm(x, m, v, None, None, True, momentum), x.to(tb.nChw16c), mean, var)  # noqa: B023


def test_statistics_of_an_infinity_past_the_first_chunk(isa):
    x = torch.randn(2, 17, 20, 20)
    x[1, 3, 19, 19] = math.inf
    check(lambda x, m, v: F.batch_norm(x, m, v, None, None, True), x.to(tb.nChw16c), torch.zeros(17), torch.ones(17))


def test_gradient_by_running_statistics_of_infinities(isa):
    x, mean, var = image(17), torch.randn(17), torch.rand(17) + 0.5
    x[0, 3, 1, 2], x[1, 16, 0, 0] = math.inf, -math.inf
    check_gradient(lambda x: F.batch_norm(x, mean, var), x.to(tb.nChw16c))
