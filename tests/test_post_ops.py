"""What follows a convolution's sum, by every kernel that writes an answer, at every ISA tier."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import padding_is_zero
from kernel_cases import between_nans

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format, weight_format

# name -> (PyTorch's function of float64, alpha)
ACTIVATIONS = {
    "none": (lambda x: x, 0),
    "relu": (F.relu, 0),
    "relu6": (F.relu6, 0),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.3), 0.3),
    "sigmoid": (torch.sigmoid, 0),
    "silu": (F.silu, 0),
    "hardsigmoid": (F.hardsigmoid, 0),
    "hardswish": (F.hardswish, 0),
    "gelu": (F.gelu, 0),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), 0),
}

SOME = ("none", "leaky_relu", "gelu")  # for what does not depend on the function itself

# name -> (n, ic, oc, src, kernel, stride, padding, groups), and Winograd's mode
CONVOLUTIONS = {
    "direct": ((2, 20, 37, (9, 8), (3, 3), (2, 1), (1, 1), 1), "never"),
    "direct 1x1": ((1, 20, 53, (9, 17), (1, 1), (1, 1), (0, 0), 1), "never"),
    "direct, whole blocks": ((1, 16, 48, (9, 7), (3, 3), (1, 1), (1, 1), 1), "never"),
    "direct, one pixel": ((2, 24, 6, (1, 1), (1, 1), (1, 1), (0, 0), 1), "never"),
    "direct, split sums": ((1, 300, 17, (3, 40), (3, 3), (1, 1), (1, 1), 1), "never"),
    "1-D": ((2, 17, 33, (20,), (3,), (1,), (1,), 1), "never"),
    "3-D": ((1, 17, 33, (3, 4, 5), (3, 3, 3), (1, 1, 1), (1, 1, 1), 1), "never"),
    "winograd f2": ((2, 20, 37, (9, 7), (3, 3), (1, 1), (1, 1), 1), "f2"),
    "winograd f4": ((2, 20, 37, (9, 7), (3, 3), (1, 1), (1, 1), 1), "f4"),
    "depthwise": ((2, 37, 37, (9, 17), (3, 3), (1, 1), (1, 1), 37), "never"),
    "depthwise, tap by tap": ((1, 20, 20, (9, 8), (4, 4), (2, 2), (1, 1), 20), "never"),
    "depthwise 3-D": ((1, 20, 20, (4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), 20), "never"),
    "grouped": ((1, 20, 40, (9, 8), (3, 3), (1, 1), (1, 1), 5), "never"),
}  # fmt: skip

# name -> (n, ic, oc, src, kernel, stride, padding, output padding, groups)
TRANSPOSED = {
    "phases": (2, 17, 33, (5, 7), (3, 3), (2, 2), (1, 1), (1, 0), 1),
    "one phase": (1, 17, 33, (5, 7), (3, 3), (1, 1), (1, 1), (0, 0), 1),
    "pixels that no tap reaches": (1, 20, 5, (4, 3), (2, 1), (4, 3), (0, 0), (3, 2), 1),
    "depthwise": (2, 20, 20, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), 20),
    "grouped": (1, 20, 30, (5, 6), (3, 3), (2, 1), (1, 1), (1, 0), 5),
    "3-D": (1, 17, 20, (3, 4, 5), (2, 3, 4), (2, 2, 2), (0, 1, 1), (0, 1, 0), 1),
}


class Problem:
    """A sum of products, float64, and random post-ops with what they make of it."""

    def __init__(self, total, oc, block):
        shape = (-1, *[1] * (total.dim() - 2))
        self.total, self.block = total, block
        self.scale, self.shift, self.residual = torch.randn(oc), torch.randn(oc), 3 * torch.randn(total.shape)
        self.scaled = total * self.scale.view(shape) + self.shift.view(shape)

    def arguments(self, activation, residual_last):
        physical = self.residual.to(activation_format(self.total.dim(), self.block)).physical
        return {
            "scale": self.scale, "shift": self.shift, "residual": between_nans(physical), "activation": activation,
            "alpha": ACTIVATIONS[activation][1], "residual_last": residual_last,
        }  # fmt: skip

    def check(self, physical, activation, residual_last):
        function = ACTIVATIONS[activation][0]
        expected = function(self.scaled) + self.residual if residual_last else function(self.scaled + self.residual)
        y = tb.BlockedTensor(physical, activation_format(expected.dim(), self.block).blocking, expected.shape)
        assert padding_is_zero(y)
        error = (y.to_dense() - expected).abs().max() / self.scaled.abs().max()
        assert error < 1e-4, f"error {error:.1e}"


both_orders = pytest.mark.parametrize("residual_last", [False, True], ids=["residual first", "residual last"])


@both_orders
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolution(isa, guarded, kind, activation, residual_last):
    (n, ic, oc, src, kernel, stride, padding, groups), mode = CONVOLUTIONS[kind]
    window = (stride, padding, (1,) * len(src), groups)
    check_convolution(solved_once(n, ic, oc, src, kernel, window), window, mode, activation, residual_last)


@both_orders
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["first", "reference"])
def test_without_blocks_of_the_kernels(isa, guarded, kind, activation, residual_last):
    """A plain src, and dst in blocks that no kernel is for."""
    window, block = ((2, 2), (1, 1), (1, 1), 1), 5 if kind == "reference" else None
    given = solved_once(2, 3, 37, (9, 17), (3, 3), window)
    check_convolution(given, window, "never", activation, residual_last, plain=True, block=block)


def solved(n, ic, oc, src, kernel, window):
    """A random src, weight and bias, and their convolution in float64."""
    x, w, b = torch.randn(n, ic, *src), torch.randn(oc, ic // window[-1], *kernel), torch.randn(oc)
    return x, w, b, torch.convolution(x.double(), w.double(), b.double(), *window[:3], False, [0] * len(src), window[3])


solved_once = functools.cache(solved)


def check_convolution(given, window, mode, activation, residual_last, plain=False, block=None):
    block, (x, w, b, total) = block or library.isa_block(), given
    problem, wei = Problem(total, len(b), block), w.to(weight_format(w.shape, library.isa_block()))
    src_format = None if plain else activation_format(x.dim(), block)
    with tb.winograd(mode):
        physical = library.convolution_op(
            x if plain else between_nans(x.to(src_format).physical), () if plain else sum(src_format.blocking, ()),
            wei.physical, w.shape, sum(wei.blocking, ()), b, *window, block,
            **problem.arguments(activation, residual_last),
        )  # fmt: skip
    problem.check(physical, activation, residual_last)


@both_orders
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed(isa, guarded, kind, activation, residual_last):
    n, ic, oc, src, kernel, stride, padding, output_padding, groups = TRANSPOSED[kind]
    block, ones = library.isa_block(), (1,) * len(src)
    x, w, b = torch.randn(n, ic, *src), torch.randn(ic, oc // groups, *kernel), torch.randn(oc)
    total = torch.convolution(x.double(), w.double(), b.double(), stride, padding, ones, True, output_padding, groups)
    problem, src_format = Problem(total, oc, block), activation_format(x.dim(), block)
    physical = library.convolution_transpose_op(
        between_nans(x.to(src_format).physical), sum(src_format.blocking, ()), w, w.shape, (), b,
        stride, padding, output_padding, ones, groups, block, **problem.arguments(activation, residual_last),
    )  # fmt: skip
    problem.check(physical, activation, residual_last)


@pytest.mark.parametrize("ic, groups", [(3, 1), (32, 32)], ids=["first", "depthwise"])
def test_answers_larger_than_the_caches(isa, guarded, ic, groups):
    """They are written past the caches."""
    window = ((1, 1), (1, 1), (1, 1), groups)
    given = solved(2, ic, 32, (300, 270), (3, 3), window)
    for activation in SOME:
        check_convolution(given, window, "never", activation, True, plain=groups == 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(isa, activation):
    """Infinities, NaN, zeros and large numbers, as PyTorch's functions of float64 have them."""
    inf = float("inf")
    x = torch.tensor([inf, -inf, float("nan"), 0.0, -0.0, 3.0, -3.0, 6.0, 90.0, -90.0, 1e30, -1e30, 104.0, -104.0])
    expected = ACTIVATIONS[activation][0](x.double()).float()
    torch.testing.assert_close(activated(x, activation), expected, equal_nan=True, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "gelu_tanh"])
def test_rounding(isa, activation):
    """Those of an exponential: a few roundings of the answer, from the smallest to the largest that are not 0 or x."""
    x = torch.linspace(-87, 87, 400_001)
    expected = ACTIVATIONS[activation][0](x.double())
    # gelu_tanh relative to x: where it is nearly 0, its definition itself subtracts nearly equals.
    scale = x.abs().clamp(min=1e-3) if activation == "gelu_tanh" else expected
    error = ((activated(x, activation) - expected) / scale).abs().nan_to_num()  # 0 / 0
    assert error.max() < 3e-7


def activated(x, activation):
    """Of each element, as a depthwise convolution's post-op."""
    block = library.isa_block()
    padded = F.pad(x, [0, -len(x) % 16]).view(1, 16, 1, -1)
    src = padded.to(activation_format(4, block))
    physical = library.convolution_op(
        src.physical, sum(src.blocking, ()), torch.ones(16, 1, 1, 1), (16, 1, 1, 1), (), None,
        (1, 1), (0, 0), (1, 1), 16, block, activation=activation, alpha=ACTIVATIONS[activation][1],
    )  # fmt: skip
    return tb.BlockedTensor(physical, src.blocking, padded.shape).to_dense().flatten()[: len(x)]


@pytest.mark.slow
@pytest.mark.parametrize("residual_last", [False, True])
@pytest.mark.parametrize("activation", SOME)
@pytest.mark.parametrize("name", ["convolution", "convolution_transpose"])
def test_opcheck(name, activation, residual_last):
    block = library.isa_block()
    x, residual = (torch.randn(1, 17, 5, 5).to(activation_format(4, block)) for _ in range(2))
    w, c = torch.randn(17, 17, 3, 3, requires_grad=True), torch.randn(17)
    window = [[1, 1], [1, 1], *([[0, 0]] if name == "convolution_transpose" else []), [1, 1], 1, block]
    src, other = (t.physical.clone().requires_grad_() for t in (x, residual))
    arguments = [src, [1, block], w, [17, 17, 3, 3], [], c, *window]
    post_ops = [c, c, other, activation, ACTIVATIONS[activation][1], residual_last]
    torch.library.opcheck(getattr(torch.ops.torch_blocked, name).default, [*arguments, *post_ops])
