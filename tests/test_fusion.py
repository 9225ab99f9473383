"""What the backend of torch.compile fuses into convolutions."""

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Lambda, assert_close, both, compiled, conv, fresh, randomized  # noqa: F401
from torch import nn

import torch_blocked as tb
from torch_blocked import library

# ---- Fusion: name -> (the model, post-ops of its convolutions as (batch normalization, residual, activation))

PLAIN = (False, False, "none")

FUSED = {
    "relu": (lambda: nn.Sequential(conv(3, 17), nn.ReLU()), [(False, False, "relu")]),
    "relu in place": (lambda: nn.Sequential(conv(3, 17), nn.ReLU(inplace=True)), [(False, False, "relu")]),
    "relu6": (lambda: nn.Sequential(conv(3, 17), nn.ReLU6()), [(False, False, "relu6")]),
    "relu6 in place": (lambda: nn.Sequential(conv(3, 17), nn.ReLU6(inplace=True)), [(False, False, "relu6")]),
    "clamp to [0, 6]": (lambda: Lambda(lambda m, x: m.c(x).clamp(0, 6), c=conv(3, 17)), [(False, False, "relu6")]),
    "another hardtanh": (lambda: nn.Sequential(conv(3, 17), nn.Hardtanh(-0.1, 0.2)), [PLAIN]),
    "clamp to [0, inf]": (lambda: Lambda(lambda m, x: m.c(x).clamp(min=0.1), c=conv(3, 17)), [PLAIN]),
    "batch_norm": (lambda: nn.Sequential(conv(3, 17, bias=False), nn.BatchNorm2d(17)), [(True, False, "none")]),
    "batch_norm after a bias": (lambda: nn.Sequential(conv(3, 17), nn.BatchNorm2d(17)), [(True, False, "none")]),
    "batch_norm without affine": (
        lambda: nn.Sequential(conv(3, 17), nn.BatchNorm2d(17, affine=False), nn.ReLU()), [(True, False, "relu")],
    ),
    "batch_norm twice": (
        lambda: nn.Sequential(conv(3, 17), nn.BatchNorm2d(17), nn.BatchNorm2d(17)), [(True, False, "none")],
    ),
    "batch_norm after relu": (
        lambda: nn.Sequential(conv(3, 17), nn.ReLU(), nn.BatchNorm2d(17)), [(False, False, "relu")],
    ),
    "all": (
        lambda: Lambda(
            lambda m, x: (lambda y: F.relu(y.sin() + m.b(m.c(y))))(m.a(x)),
            a=conv(3, 17), b=nn.BatchNorm2d(17), c=conv(17, 17),
        ),
        [PLAIN, (True, True, "relu")],
    ),
    "all, two convolutions": (
        lambda: Lambda(
            lambda m, x: F.relu(m.b(m.c(x)) + m.d(x)), c=conv(3, 17), b=nn.BatchNorm2d(17), d=conv(3, 17, 1)
        ),
        [(True, False, "none"), (False, True, "relu")],
    ),
    "residual second": (
        lambda: Lambda(lambda m, x: (lambda y: m.b(y.sigmoid()) + y)(m.a(x)), a=conv(3, 17), b=conv(17, 17)),
        [PLAIN, (False, True, "none")],
    ),
    "residual first": (
        lambda: Lambda(lambda m, x: (lambda y: y + m.b(y.sigmoid()))(m.a(x)), a=conv(3, 17), b=conv(17, 17)),
        [PLAIN, (False, True, "none")],
    ),
    "residual in place": (
        lambda: Lambda(lambda m, x: (lambda y: m.b(y.sigmoid()).add_(y))(m.a(x)), a=conv(3, 17), b=conv(17, 17)),
        [PLAIN, (False, True, "none")],
    ),
    "residual twice": (
        lambda: Lambda(lambda m, x: (lambda y: m.b(y) + y + y.sin())(m.a(x)), a=conv(3, 17), b=conv(17, 17)),
        [PLAIN, (False, True, "none")],
    ),
    "two convolutions": (
        lambda: Lambda(lambda m, x: m.a(x) + m.b(x), a=conv(3, 17), b=conv(3, 17)), [PLAIN, (False, True, "none")],
    ),
    "clamp to [-inf, 6]": (lambda: Lambda(lambda m, x: m.a(x).clamp(max=6), a=conv(3, 17)), [PLAIN]),
    "add of what depends on it": (
        lambda: Lambda(lambda m, x: (lambda y: y + y.sigmoid())(m.a(x)), a=conv(3, 17)), [PLAIN],
    ),
    "add of itself": (lambda: Lambda(lambda m, x: (lambda y: y + y)(m.a(x)), a=conv(3, 17)), [PLAIN]),
    "add of a number": (lambda: Lambda(lambda m, x: m.a(x) + 1, a=conv(3, 17)), [PLAIN]),
    "add with alpha": (
        lambda: Lambda(lambda m, x: torch.add(m.a(x), m.b(x), alpha=2), a=conv(3, 17), b=conv(3, 17)), [PLAIN, PLAIN],
    ),
    "add that broadcasts": (
        lambda: Lambda(lambda m, x: m.a(x) + m.b(x).mean((2, 3), True), a=conv(3, 17), b=conv(3, 17)), [PLAIN, PLAIN],
    ),
    "add of a plain tensor": (lambda: Lambda(lambda m, x: m.a(x) + x, a=conv(3, 3)), None),
    "used twice": (lambda: Lambda(lambda m, x: (lambda y: (y, y.relu()))(m.a(x)), a=conv(3, 17)), [PLAIN]),
    "used after relu": (
        lambda: Lambda(lambda m, x: (lambda y: y.relu() * y.exp())(m.a(x)), a=conv(3, 17)), [PLAIN],
    ),
    "seen through a view": (
        lambda: Lambda(lambda m, x: (lambda y: y.relu() + y[:1].sum())(m.a(x)), a=conv(3, 17)), [PLAIN],
    ),
    "relu before add": (
        lambda: Lambda(lambda m, x: m.a(x).relu() + m.b(x), a=conv(3, 17), b=conv(3, 17)),
        [(False, False, "relu"), (False, True, "none")],
    ),
    "sigmoid": (lambda: nn.Sequential(conv(3, 17), nn.Sigmoid(), conv(17, 5)), [(False, False, "sigmoid"), PLAIN]),
    "silu": (lambda: nn.Sequential(conv(3, 17), nn.SiLU()), [(False, False, "silu")]),
    "silu in place": (lambda: nn.Sequential(conv(3, 17), nn.SiLU(inplace=True)), [(False, False, "silu")]),
    "hardsigmoid": (
        lambda: nn.Sequential(conv(3, 17), nn.Hardsigmoid(), conv(17, 5)), [(False, False, "hardsigmoid"), PLAIN],
    ),
    "hardswish": (lambda: nn.Sequential(conv(3, 17), nn.Hardswish()), [(False, False, "hardswish")]),
    "leaky_relu": (lambda: nn.Sequential(conv(3, 17), nn.LeakyReLU()), [(False, False, "leaky_relu")]),
    "leaky_relu, slope": (lambda: nn.Sequential(conv(3, 17), nn.LeakyReLU(-0.7)), [(False, False, "leaky_relu")]),
    "gelu": (lambda: nn.Sequential(conv(3, 17), nn.GELU()), [(False, False, "gelu")]),
    "gelu, tanh": (lambda: nn.Sequential(conv(3, 17), nn.GELU("tanh")), [(False, False, "gelu_tanh")]),
    "silu after batch_norm, depthwise": (
        lambda: nn.Sequential(conv(3, 20), conv(20, 20, groups=20), nn.BatchNorm2d(20), nn.SiLU()),
        [PLAIN, (True, False, "silu")],
    ),
    "all after a transposed convolution": (
        lambda: Lambda(
            lambda m, x: F.relu(m.b(m.c(m.a(x))) + m.d(x)), a=conv(3, 17), b=nn.BatchNorm2d(20), d=conv(3, 20),
            c=nn.ConvTranspose2d(17, 20, 3, padding=1),
        ),
        [PLAIN, (False, True, "relu"), (True, False, "none")],
    ),
    "sigmoid after a transposed convolution": (
        lambda: nn.Sequential(conv(3, 17), nn.ConvTranspose2d(17, 20, 2, 2), nn.Sigmoid(), conv(20, 5)),
        [PLAIN, (False, False, "sigmoid"), PLAIN],
    ),
    "sigmoid, used twice": (
        lambda: Lambda(
            lambda m, x: (lambda y: m.b(y) + y[:, :5])(torch.sigmoid(m.a(x))), a=conv(3, 17), b=conv(17, 5)
        ),
        [(False, False, "sigmoid"), (False, True, "none")],
    ),
    "an activation that takes no convolution": (
        lambda: Lambda(lambda m, x: F.silu(F.hardsigmoid(F.gelu(F.max_pool2d(m.a(x), 2)))), a=conv(3, 17)), [PLAIN],
    ),
    "silu, then add": (
        lambda: Lambda(lambda m, x: (lambda y: F.silu(m.b(y)) + y)(m.a(x).sin()), a=conv(3, 17), b=conv(17, 17)),
        [PLAIN, (False, True, "silu then residual")],
    ),
    "relu, then add, then relu": (
        lambda: Lambda(
            lambda m, x: (lambda y: F.relu(F.relu(m.b(y)) + y))(m.a(x).sin()), a=conv(3, 17), b=conv(17, 17)
        ),
        [PLAIN, (False, True, "relu then residual")],
    ),
    "relu, then add, then at most 6": (
        lambda: Lambda(
            lambda m, x: (lambda y: (F.relu(m.b(y)) + y).clamp(max=6))(10 * m.a(x)), a=conv(3, 17), b=conv(17, 17)
        ),
        [PLAIN, (False, True, "relu then residual")],
    ),
    "linear bottleneck": (
        lambda: Lambda(
            lambda m, x: (lambda y: y + m.m(m.c(F.relu6(m.n(m.b(y))))))(m.a(x)), a=conv(3, 17), b=conv(17, 34, 1),
            n=nn.BatchNorm2d(34), c=conv(34, 17, 1), m=nn.BatchNorm2d(17),
        ),
        [PLAIN, (True, False, "relu6"), (True, True, "none")],
    ),
    "one more after relu": (lambda: nn.Sequential(conv(3, 17), nn.ReLU(), nn.ReLU6()), [(False, False, "relu")]),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_fusion(name, blocked, graphs):
    make, expected = FUSED[name]
    model, x = randomized(make()), torch.randn(2, 3, 6, 5)
    want = model(x)
    got = compiled(model.to(tb.blocked) if blocked else model)(x)
    for actual, answer in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, want)), strict=True):
        assert_close(actual, answer)
    if expected is not None:
        assert graphs.post_ops() == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_fusion_of_symbolic_sizes(name, graphs):
    make, expected = FUSED[name]
    model, x = randomized(make()), torch.randn(2, 3, 6, 5)
    torch._dynamo.mark_dynamic(x, (0, 2, 3))
    compiled(model)(x)
    if expected is not None:
        assert graphs.post_ops() == sorted(expected)


SIZES_OF_ANSWERS = {
    "of the convolution, by what follows": lambda m, x: F.max_pool2d(F.relu(m.n(m.a(x))), 3, 2, 1),
    "of the convolution, by its residual": lambda m, x: (
        lambda y: F.relu(m.n(y) + F.interpolate(F.avg_pool2d(m.b(x), 2), size=y.shape[2:]))
    )(m.a(x)),
}


@pytest.mark.parametrize("name", SIZES_OF_ANSWERS)
@torch.no_grad()
def test_sizes_of_answers_are_no_readers(name, graphs):
    model = randomized(Lambda(SIZES_OF_ANSWERS[name], a=conv(3, 17), n=nn.BatchNorm2d(17), b=conv(3, 17)))
    function = compiled(model)
    for size in ((2, 3, 8, 12), (3, 3, 14, 6)):
        x = torch.randn(size)
        torch._dynamo.mark_dynamic(x, (0, 2, 3))
        assert_close(function(x), model(x))
    assert (True, "residual" in name, "relu") in graphs.post_ops()


INDICES = {  # name -> what is done with a convolution's answer, whether it asks for the indices of the maxima
    "no one": (lambda y: F.max_pool2d(y, 3, 2, 1), False),
    "no one, adaptive": (lambda y: F.adaptive_max_pool2d(y, 3), False),
    "no one, of dilated windows": (lambda y: F.max_pool2d(y, 2, 1, dilation=2, ceil_mode=True), False),
    "the caller": (lambda y: F.max_pool2d(y, 3, 2, 1, return_indices=True), True),
    "the caller, of the indices alone": (lambda y: F.adaptive_max_pool2d(y, 3, return_indices=True)[1], True),
    "max_unpool2d": (lambda y: F.max_unpool2d(*F.max_pool2d(y, 2, return_indices=True), 2), True),
}


@pytest.mark.parametrize("name", INDICES)
@torch.no_grad()
def test_indices_of_maxima_only_for_who_reads_them(name, graphs):
    then, asked = INDICES[name]
    model, x = randomized(Lambda(lambda m, x: then(m.c(x)), c=conv(3, 17))), torch.randn(2, 3, 8, 10)
    got, want = compiled(model)(x), model(x)
    for actual, answer in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, want)), strict=True):
        assert_close(actual, answer)
    assert [node.args[-1] for node in graphs.nodes(library.pool_op)] == [asked]
