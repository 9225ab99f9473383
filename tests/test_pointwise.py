"""Pointwise operators: activations, arithmetic of several tensors, broadcasts, promotion, large answers."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same
from dispatch_cases import (
    aten,
    blocked,
    cases,
    check,
    check_error,
    check_in_place,
    formats,
    image,
    native,
)
from torch import Tensor

import torch_blocked as tb
from torch_blocked.dispatch.pointwise import POOLED

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- Activations

ACTIVATIONS = {
    "relu": lambda x, **how: F.relu(x, **how),
    "relu6": lambda x, **how: F.relu6(x, **how),
    "hardtanh": lambda x, **how: F.hardtanh(x, 0.2, 0.7, **how),
    "hardtanh below": lambda x, **how: F.hardtanh(x, -0.7, -0.2, **how),
    "leaky_relu": lambda x, **how: F.leaky_relu(x, 0.1, **how),
    "leaky_relu of an infinite slope": lambda x, **how: F.leaky_relu(x, math.inf, **how),
    "silu": lambda x, **how: F.silu(x, **how),
    "mish": lambda x, **how: F.mish(x, **how),
    "hardswish": lambda x, **how: F.hardswish(x, **how),
    "hardsigmoid": lambda x, **how: F.hardsigmoid(x, **how),
    "elu": lambda x, **how: F.elu(x, 0.3, **how),
    "celu": lambda x, **how: F.celu(x, 0.3, **how),
    "selu": lambda x, **how: F.selu(x, **how),
    "threshold": lambda x, **how: F.threshold(x, 0.1, 20.0, **how),
    "sigmoid": lambda x, inplace=False: x.sigmoid_() if inplace else torch.sigmoid(x),
    "tanh": lambda x, inplace=False: x.tanh_() if inplace else torch.tanh(x),
    "gelu": lambda x, inplace=False: aten.gelu_(x) if inplace else F.gelu(x),
    "gelu tanh": lambda x, inplace=False: (
        aten.gelu_(x, approximate="tanh") if inplace else F.gelu(x, approximate="tanh")
    ),
    "clamp": lambda x, inplace=False: x.clamp_(0.1, 0.5) if inplace else x.clamp(0.1, 0.5),
    "round": lambda x, inplace=False: x.round_(decimals=1) if inplace else x.round(decimals=1),
    "round to too many decimals": lambda x, inplace=False: x.round_(decimals=400) if inplace else x.round(decimals=400),
    "exp": lambda x, inplace=False: x.exp_() if inplace else x.exp(),
}


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special values"])
@cases(ACTIVATIONS)
def test_activation(isa, case, special):
    # PyTorch's own gelu of an infinity depends on the strides: NaN or the limit.
    infinity = 9.0 if case in (ACTIVATIONS["gelu"], ACTIVATIONS["gelu tanh"]) else math.inf
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        x = 3 * image(channels)
        if special:
            x[0, 0, 0, :5] = torch.tensor([math.nan, infinity, -infinity, 0.0, -0.0])
            x[-1, -1, -1, :2] = torch.tensor([infinity, math.nan])
        y = check(case, x.to(fmt))
        assert y.format == x.to(fmt).format
        check_in_place(lambda x: case(x, inplace=True), x.to(fmt))


# ---- Arithmetic of several tensors

BINARIES = {
    "add": (torch.add, Tensor.add_),
    "add alpha": (lambda x, y: torch.add(x, y, alpha=3), lambda x, y: x.add_(y, alpha=3)),
    "sub": (torch.sub, Tensor.sub_),
    "mul": (torch.mul, Tensor.mul_),
    "div": (torch.div, Tensor.div_),
    "div floor": (lambda x, y: x.div(y, rounding_mode="floor"), lambda x, y: x.div_(y, rounding_mode="floor")),
    "pow": (lambda x, y: x.abs().pow(y), lambda x, y: x.abs_().pow_(y)),
    "maximum": (torch.maximum, lambda x, y: x.clamp_(min=y)),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: x.lerp_(y, 0.3)),
    "lt": (torch.lt, Tensor.lt_),
    "where": (lambda x, y: torch.where(x > 0, x, y), lambda x, y: x.copy_(torch.where(x > 0, x, y))),
}

# Shapes of the other tensor, broadcast against (2, c, 5, 6).
BROADCASTS = {
    "same": lambda c: (2, c, 5, 6),
    "a value an image and channel": lambda c: (2, c, 1, 1),
    "a value a channel": lambda c: (1, c, 1, 1),
    "a value a channel, 3-D": lambda c: (c, 1, 1),
    "a value a pixel": lambda c: (1, 1, 5, 6),
    "a value a pixel, 2-D": lambda c: (5, 6),
    "a value a column": lambda c: (6,),
    "a value an image": lambda c: (2, 1, 1, 1),
    "a channel image": lambda c: (1, c, 5, 6),
    "one": lambda c: (1,),
    "one, 4-D": lambda c: (1, 1, 1, 1),
    "no dims": lambda c: (),
}


@cases(BINARIES)
@pytest.mark.parametrize("shape", list(BROADCASTS.values()), ids=list(BROADCASTS))
def test_binary_broadcasts(isa, case, shape):
    out_of_place, in_place = case
    for channels in CHANNELS:
        other = torch.rand(shape(channels)) + 0.5
        x, same_rank = image(channels), other.dim() == 4
        for fmt, other_fmt in ((tb.blocked, None), (tb.blocked, tb.blocked), (tb.nChw16c, tb.nChw8c)):
            y = other if other_fmt is None else blocked(other, other_fmt if same_rank else tb.blocked)
            assert check(out_of_place, x.to(fmt), y).format == x.to(fmt).format
            check_in_place(in_place, x.to(fmt), y)
            # Led by a blocked tensor of fewer dims it may fall back.
            check(out_of_place, y, x.to(fmt), expects=native if same_rank or y is other else contextlib.nullcontext)


@cases(BINARIES)
def test_one_channel_and_channels_that_are_one_in_memory(isa, case):
    """As the gradient of a sum is: the answer has all of them."""
    out_of_place, _ = case
    for channels in (17, 20, 32):
        one, many = image(1), (torch.rand(2, 1, 5, 6) + 0.5).expand(2, channels, 5, 6)
        check(out_of_place, one.to(tb.nChw16c), many)
        check(out_of_place, many, one.to(tb.nChw16c))
        out = torch.zeros(2, channels, 5, 6).to(tb.nChw16c)
        assert_same(torch.add(one.to(tb.nChw16c), many, out=out), one + many)


def test_gradient_of_a_sum_of_weighted_channels():
    weights, x = torch.rand(2, 1, 5, 6), image(32)
    grads = []
    for convert in (lambda x: x, lambda x: x.to(tb.nChw16c)):
        leaves = [t.clone().requires_grad_() for t in (weights, x)]
        one, many = map(convert, leaves)
        (one * many).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert_same(grads[1], grads[0])


@cases(BINARIES)
@pytest.mark.parametrize("shape", list(BROADCASTS.values()), ids=list(BROADCASTS))
def test_binary_of_a_plain_tensor_and_a_blocked_one(isa, case, shape):
    out_of_place, in_place = case
    for channels in CHANNELS:
        x, other = image(channels), blocked(torch.rand(shape(channels)) + 0.5)
        expects = native if other.dim() == 4 else contextlib.nullcontext
        check(out_of_place, x, other, expects=expects)
        check(out_of_place, other, x, expects=expects)
        how = contextlib.nullcontext if case is BINARIES["where"] else native
        assert not isinstance(check(in_place, x, other, expects=how), tb.BlockedTensor)


@cases({name: f for name, f in BINARIES.items() if name not in ("maximum", "where")})
@pytest.mark.parametrize("scalar", [2, 0.5, math.inf, math.nan])
def test_binary_with_a_scalar(isa, case, scalar):
    out_of_place, in_place = case
    if out_of_place is BINARIES["lerp"][0]:
        out_of_place = in_place = lambda x, y: x.lerp_(x + 1, float(y))
    for channels, fmt in itertools.product(CHANNELS, formats(isa)):
        check(out_of_place, image(channels).to(fmt), scalar)
        check_in_place(in_place, image(channels).to(fmt), scalar)


REFLECTED = {
    "rsub": lambda x: 2 - x,
    "rdiv": lambda x: 2 / x,
    "rpow": lambda x: 2**x,
    "radd": lambda x: 2 + x,
    "neg": lambda x: -x,
    "rfloordiv": lambda x: 2 // (x.abs() + 1),
}


@cases(REFLECTED)
def test_reflected_operators(case):
    native_ones = {k: v for k, v in REFLECTED.items() if k not in ("rpow", "rfloordiv")}.values()
    expects = native if case in native_ones else contextlib.nullcontext
    for channels in CHANNELS:
        check(case, image(channels).to(tb.blocked), expects=expects)


@pytest.mark.parametrize("other", [torch.tensor(1.5, dtype=torch.float64), torch.ones(1, dtype=torch.float64), 1.5])
def test_binary_promotes_as_pytorch_does(other):
    for dtype in (torch.float32, torch.int32, torch.bfloat16, torch.bool):
        x = torch.ones(2, 17, 3, 3, dtype=dtype).to(tb.nChw16c)
        for f in (torch.add, torch.mul, torch.gt):
            check(f, x, other)


BINARY_ERRORS = {
    "shapes": lambda x: x + torch.ones(2, 16, 5, 6),
    "shapes in place": lambda x: x.add_(torch.ones(2, 16, 5, 6)),
    "grows in place": lambda x: x[:1].add_(x),
    "grows rank in place": lambda x: x.add_(torch.ones(1, 1, 1, 1, 1)),
    "to integer in place": lambda x: x.int().add_(1.5),
    "to integer in place by a tensor": lambda x: x.int().add_(x),
    "bits of floats": lambda x: x & 1,
}


@cases(BINARY_ERRORS)
def test_binary_refuses_what_pytorch_refuses(case):
    check_error(case, image(17).to(tb.nChw16c))


@pytest.mark.parametrize(
    "size", [(2, 16, 5, 6), (2, 18, 5, 6), (3, 17, 5, 6), (2, 17, 5, 7), (2, 1, 17, 5, 6)], ids=str
)
def test_blocked_operands_that_do_not_fit(size):
    """Also where both are one block of channels, or both pad to two."""
    x, y = image(17).to(tb.nChw16c), torch.ones(size).to(tb.blocked if len(size) == 5 else tb.nChw16c)
    grows = len(size) == 5  # which only out-of-place operators may
    for f in (Tensor.mul_, Tensor.copy_, *(() if grows else (torch.add, lambda x, y: torch.where(x > 0, x, y)))):
        check_error(f, x, y)


LARGE = {
    "add": lambda x: x + x,
    "a float": lambda x: x * 2.5,
    "an int": lambda x: x / 3,
    "a complex number": lambda x: x * 2j,
    "a complex sum": lambda x: x + 1j,
    "a tensor of no dims": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    "clamp": lambda x: x.clamp(0.1, 1),
    "sigmoid": lambda x: x.sigmoid(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "plain and broadcast": lambda x: x + torch.ones(17, 1, 1),
    "relu backward": lambda x: aten.threshold_backward(x, x - 1, 0),
}


@cases(LARGE)
def test_large_answers(case):
    """Those that lie in the pool."""
    x = torch.randn(2, 17, 96, 96)
    assert x.to(tb.nChw16c).physical.numel() >= POOLED
    check(case, x.to(tb.nChw16c), expects=contextlib.nullcontext)
