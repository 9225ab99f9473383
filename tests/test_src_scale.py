"""Convolutions of an image whose channels are scaled, and squeeze and excitation by them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Lambda, assert_close, compiled, conv, fresh, randomized  # noqa: F401
from kernel_cases import between_nans
from torch import nn

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format, weight_format

aten = torch.ops.aten

# name -> (n, ic, oc, src, kernel, stride, padding), Winograd's mode
CONVOLUTIONS = {
    "1x1": ((2, 37, 20, (9, 8), (1, 1), (1, 1), (0, 0)), "never"),
    "weights for several threads": ((2, 300, 250, (5, 4), (1, 1), (1, 1), (0, 0)), "never"),
    "3x3": ((3, 20, 37, (9, 8), (3, 3), (2, 1), (1, 1)), "never"),
    "winograd": ((2, 20, 37, (9, 7), (3, 3), (1, 1), (1, 1)), "f2"),
    "1-D": ((2, 17, 33, (20,), (3,), (1,), (1,)), "never"),
    "3-D": ((2, 17, 33, (3, 4, 5), (3, 3, 3), (1, 1, 1), (1, 1, 1)), "never"),
    "no image": ((0, 20, 37, (9, 8), (1, 1), (1, 1), (0, 0)), "never"),
}


def arguments(n, ic, oc, src, kernel, stride, padding, block):
    """Of the operator, and PyTorch's answer without the residual and the activation."""
    x, w = torch.randn(n, ic, *src), torch.randn(oc, ic, *kernel)
    scale = torch.rand(n, ic, *[1] * len(src))
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(src) - 1]
    want = convolution((x * scale).double(), w.double(), None, stride, padding)
    fmt, weights = activation_format(x.dim(), block), weight_format(w.shape, block)
    given = dict(
        src=between_nans(x.to(fmt).physical), src_blocking=[1, block],
        weight=w.to(weights).physical, weight_size=list(w.shape), weight_blocking=[1, block, 0, block],
        bias=None, stride=list(stride), padding=list(padding), dilation=[1] * len(src), groups=1, block=block,
        src_scale=between_nans(scale.to(fmt).physical),
    )  # fmt: skip
    return given, want


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolution(isa, guarded, kind):
    problem, mode = CONVOLUTIONS[kind]
    block = library.isa_block()
    given, want = arguments(*problem, block)
    residual = torch.randn(want.shape)
    physical = residual.to(activation_format(want.dim(), block)).physical
    with tb.winograd(mode):
        got = library.convolution_op(**given, residual=physical, activation="relu")
    y = tb.BlockedTensor(got, activation_format(want.dim(), block).blocking, want.shape)
    torch.testing.assert_close(y.to_dense().double(), F.relu(want + residual), rtol=1e-4, atol=1e-4)


def test_opcheck():
    given, _ = arguments(2, 20, 37, (5, 4), (1, 1), (1, 1), (0, 0), library.isa_block())
    torch.library.opcheck(library.convolution_op, (), given)


def test_gradients():
    given, _ = arguments(2, 20, 37, (5, 4), (1, 1), (1, 1), (0, 0), library.isa_block())
    leaves = [given[name].requires_grad_() for name in ("src", "weight", "src_scale")]
    got = torch.autograd.grad(library.convolution_op(**given).square().sum(), leaves)
    given["src"], given["src_scale"] = given["src"] * given["src_scale"], None
    want = torch.autograd.grad(library.convolution_op(**given).square().sum(), leaves)
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_refuses():
    block = library.isa_block()
    given, _ = arguments(2, 32, 32, (5, 4), (1, 1), (1, 1), (0, 0), block)
    scale = given["src_scale"]
    plain = dict(weight=torch.randn(32, 32, 1, 1), weight_blocking=[])
    other = 24 - block  # 8 of 16, 16 of 8
    other_outputs = dict(weight=torch.randn(32 // other, 32 // block, 1, 1, block, other))
    for bad in (
        dict(src_scale=scale[:1]),
        dict(src_scale=scale[:, :, 0]),
        dict(src_scale=scale.double()),
        dict(src=torch.randn(2, 32, 5, 4), src_blocking=[]),
        plain,
        other_outputs | dict(weight_blocking=[1, block, 0, other]),
        dict(block=other),
        dict(groups=2, weight_size=[32, 16, 1, 1], weight=torch.randn(32 // block, 16 // block, 1, 1, block, block)),
    ):
        with pytest.raises(ValueError, match="src_scale"):
            library.convolution_op(**{**given, **bad})


# ---- The backend


def squeeze_excite(m, x):
    y = F.silu(m.a(x))
    scale = torch.sigmoid(m.c(F.silu(m.b(F.adaptive_avg_pool2d(y, 1)))))
    if m.order == "product used again":
        return m.d(y * scale) + y * scale
    return m.n(m.d(y * scale if m.order == "src first" else scale * y)) + (y if m.order == "used again" else 0)


def network(order="src first", oc=24, **options):
    layers = {"a": conv(3, 24), "b": conv(24, 6, 1), "c": conv(6, 24, 1), "d": conv(24, oc, 1, **options)}
    model = randomized(Lambda(squeeze_excite, n=nn.BatchNorm2d(oc), **layers))
    model.layers.order = order
    return model


# name -> (model, the image, products of whole tensors that stay)
NETWORKS = {
    "src first": (network, (12, 10), 0),
    "scale first": (lambda: network("scale first"), (12, 10), 0),
    "used again": (lambda: network("used again"), (12, 10), 0),
    "product used again": (lambda: network("product used again"), (12, 10), 1),
    "more weights than pixels": (network, (3, 4), 1),
    "groups": (lambda: network(groups=2), (12, 10), 1),
}


@pytest.mark.parametrize("dynamic", [(), (0, 2, 3)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_squeeze_and_excitation(name, dynamic, graphs):
    make, size, products = NETWORKS[name]
    model = make()
    function = compiled(model)
    for n in (2, 3):
        x = torch.randn(n, 3, *size)
        if dynamic:
            torch._dynamo.mark_dynamic(x, dynamic)
        assert_close(function(x), model(x))
    (gm,) = graphs if dynamic else graphs[-1:]
    whole = [n for n in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor) if n.meta["val"].dim() == 5]
    assert len(whole) == products


@torch.no_grad()
def test_autocast(graphs):
    """The kernel is for float32: in bfloat16 the product stays."""
    model, x = network(), torch.randn(2, 3, 12, 10)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(x), compiled(model)(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_by_inductor():
    model, x = network(), torch.randn(2, 3, 12, 10)
    function = compiled(model)
    for _ in range(2):
        assert_close(function(x), model(x))
    model.layers.d.weight.mul_(2)
    assert_close(function(x), model(x))
