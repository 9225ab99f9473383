"""Normalization of groups of channels, of images and of trailing axes: values, gradients, what has no kernel.

That of a batch is in test_batch_norm.py and test_gradients.py.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same
from dispatch_cases import cases, check, check_error, check_gradient, falls_back, image

import torch_blocked as tb

# Spatial sizes of 1-D to 3-D images.
SIZES = [(7,), (5, 6), (3, 4, 5)]


def check_normalization(f, x, *vectors, gradient_in=lambda x: x.to(tb.blocked), fmt=tb.blocked, native=True):
    """Values and gradients are those of doubles; those of `x` are blocked, and nothing falls back, if `native`."""
    diff, found = torch.linspace(-1, 1, x.numel()).view(x.shape).sin(), []
    exact = [t.double().requires_grad_() for t in (x, *vectors)]
    f(*exact).backward(diff.double())
    found.append([t.detach().float() for t in (f(*exact), *(leaf.grad for leaf in exact))])
    leaves = [t.requires_grad_() for t in (x.to(fmt), *(v.clone() for v in vectors))]
    with tb.count() as counts:
        y = f(*leaves)
        y.backward(gradient_in(diff))
    found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    if native:
        assert not counts.fallbacks
        assert isinstance(y, tb.BlockedTensor) and isinstance(leaves[0].grad, tb.BlockedTensor)
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_same(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    with torch.inference_mode(), tb.count() as counts:
        y = f(x.to(fmt), *vectors)
    assert not native or not counts.fallbacks
    assert_same(y, found[0][0], rtol=1e-4, atol=1e-4, equal_nan=True)


def affine(*size):
    return torch.randn(size), torch.randn(size)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_group_norm(isa, channels, size):
    x = torch.randn(2, channels, *size) * 2 + 3
    for groups in {1, channels, *(g for g in (2, 3, 8) if channels % g == 0)}:
        check_normalization(lambda x, *vectors: F.group_norm(x, groups, *vectors), x, *affine(channels))  # noqa: B023
        check_normalization(lambda x: F.group_norm(x, groups), x)  # noqa: B023
        check_normalization(lambda x, weight: F.group_norm(x, groups, weight), x, torch.randn(channels))  # noqa: B023


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_layer_norm(isa, channels, size):
    x = torch.randn(2, channels, *size) * 2 + 3
    for first in range(1, x.dim()):
        last = x.shape[first:]
        check_normalization(lambda x, *vectors: F.layer_norm(x, last, *vectors), x, *affine(*last))  # noqa: B023
        check_normalization(lambda x: F.layer_norm(x, last), x)  # noqa: B023
        check_normalization(lambda x, bias: F.layer_norm(x, last, None, bias), x, torch.randn(last))  # noqa: B023


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_instance_norm(isa, channels, size):
    """Whole blocks move from image to image; other channels are taken apart on plain tensors."""
    x, mean, var = torch.randn(2, channels, *size) * 2 + 3, torch.randn(channels), torch.rand(channels)
    whole = channels % tb.blocked.resolve(x.shape).blocking.block(1) == 0

    def by_running(x, *vectors):
        return F.instance_norm(x, mean.to(x.dtype, copy=True), var.to(x.dtype, copy=True), *vectors)

    check_normalization(lambda x: F.instance_norm(x), x, native=whole)
    check_normalization(
        lambda x, *vectors: F.instance_norm(x, None, None, *vectors), x, *affine(channels), native=whole
    )
    check_normalization(by_running, x, *affine(channels), native=whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_instance_norm_moves_the_running_statistics(dtype):
    x, mean, var = torch.rand(2, 16, 5, 5).to(dtype), torch.zeros(16, dtype=dtype), torch.ones(16, dtype=dtype)
    with torch.inference_mode():
        check(lambda x, m, v: F.instance_norm(x, m, v, None, None, True), x.to(tb.nChw16c), mean.clone(), var.clone())


CASES = {
    "group": lambda x: F.group_norm(x, 3),
    "group of one": lambda x: F.group_norm(x, 48),
    "layer": lambda x: F.layer_norm(x, x.shape[1:]),
    "rows": lambda x: F.layer_norm(x, x.shape[2:]),
}


@pytest.mark.parametrize("name", CASES)
def test_views_and_other_gradients(name):
    """Outer axes in another order, a slice of channels, a gradient in another format or expanded."""
    x = torch.randn(3, 48, 5, 6)
    for tag in ("nChw4c", "nChw8c", "acdB8b", "BcdA4a4b"):
        check_normalization(CASES[name], x, fmt=tb.format(tag), native=tag != "BcdA4a4b")
    check_normalization(CASES[name], x, gradient_in=lambda g: g.to(tb.format("acdB4b")))
    part = torch.randn(3, 96, 5, 9).to(tb.nChw16c)[:, 32:80, :, ::2]
    check(CASES[name], part)
    grads = []
    for leaf in (x.clone().requires_grad_(), x.to(tb.nChw16c).requires_grad_()):
        CASES[name](leaf.to(tb.nChw16c)).contiguous().mul(x.sin()).sum().backward()
        grads.append(leaf.grad)
    assert_same(grads[1], grads[0].to_dense() if isinstance(grads[0], tb.BlockedTensor) else grads[0])


@pytest.mark.parametrize("name", CASES)
def test_special_values_stay_where_they_are(isa, name):
    x = torch.randn(2, 48, 5, 6)
    x[0, 3, 1, 1], x[1, 40, 0, 0] = math.nan, math.nan
    check(CASES[name], x.to(tb.blocked))


def test_another_default_dtype():
    x = image(17)
    torch.set_default_dtype(torch.float64)
    try:
        for norm in (lambda x: F.layer_norm(x, x.shape[1:]), lambda x: F.group_norm(x, 1), F.instance_norm):
            check(norm, x.to(tb.nChw16c))
            check_gradient(norm, x.to(tb.nChw16c))
    finally:
        torch.set_default_dtype(torch.float32)


def test_large_means(isa):
    x = torch.randn(2, 17, 9, 8) + 1000
    for f in (lambda x: F.group_norm(x, 17), lambda x: F.layer_norm(x, x.shape[1:]), lambda x: F.group_norm(x, 1)):
        expected = f(x.double()).float()
        assert_same(f(x.to(tb.blocked)), expected, rtol=1e-3, atol=1e-3)


WITHOUT_A_KERNEL = {
    "double": lambda x: F.group_norm(x.double(), 1),
    "batch too": lambda x: F.layer_norm(x, x.shape),
    "empty": lambda x: F.group_norm(x[:0], 1),
}
ERRORS = {
    "groups": lambda x: F.group_norm(x, 5),
    "no groups": lambda x: F.group_norm(x, 0),
    "weight": lambda x: F.group_norm(x, 1, torch.ones(16)),
    "size": lambda x: F.layer_norm(x, (5, 6)),
    "affine": lambda x: F.layer_norm(x, x.shape[2:], torch.ones(5)),
}


@cases(WITHOUT_A_KERNEL)
def test_what_has_no_kernel_falls_back(case):
    check(case, torch.randn(2, 17, 3, 4).to(tb.blocked), expects=falls_back)


@cases(ERRORS)
def test_refuses_what_pytorch_refuses(case):
    check_error(case, torch.randn(2, 17, 3, 4).to(tb.blocked))
