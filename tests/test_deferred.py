"""Convolutions that wait for their post-ops: what becomes of them, and of answers in between.

Winograd's algorithms are off here (conftest.py): which one runs does not depend on the post-ops.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import one_line, padding_is_zero
from deferred_cases import alike, conv, image, norm, runs, waits
from torch import nn

import torch_blocked as tb
from torch_blocked import library

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- What waits, and what becomes of it

IDENTITY = nn.Identity()
ACTIVATIONS = {
    "none": IDENTITY,
    "relu": F.relu,
    "relu_": F.relu_,
    "relu6": F.relu6,
    "relu6_": lambda x: F.relu6(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu_": lambda x: F.leaky_relu_(x, 0.3),
    "silu": F.silu,
    "silu_": lambda x: F.silu(x, inplace=True),
    "hardswish": F.hardswish,
    "hardswish_": lambda x: F.hardswish(x, inplace=True),
    "gelu": F.gelu,
}
NOT_OF_ZERO = {"sigmoid": torch.sigmoid, "sigmoid_": torch.sigmoid_, "hardsigmoid": F.hardsigmoid}
ADDITIONS = {
    "none": lambda x, other: x,
    "add": torch.add,
    "added": lambda x, other: other + x,
    "add_": lambda x, other: x.add_(other),
}


def chain(layer, *functions):
    """`layer` and then the functions; none of the answers in between is held."""

    def run(x):
        x = layer(x)
        for function in functions:
            x = function(x)
        return x

    return run


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize("normalized", [False, True], ids=["", "batch_norm"])
@pytest.mark.parametrize("last", ["activation", "addition"])
def test_chains(no_gradients, normalized, addition, activation, last):
    x, other, layer = image(), image(), conv()
    follow = [lambda x: ADDITIONS[addition](x, other), ACTIVATIONS[activation]]
    call = chain(layer, norm() if normalized else IDENTITY, *(follow if last == "activation" else reversed(follow)))
    y = call(x)
    assert waits(y)
    with tb.fuse("never"):
        expected = call(x)
        assert not waits(expected)
    alike(y, expected)
    assert runs(lambda: call(x).physical) == 1


@pytest.mark.parametrize("activation", NOT_OF_ZERO)
@pytest.mark.parametrize("channels", [32, 20])
def test_activations_that_are_not_zero_of_zero_wait_where_there_is_no_padding(no_gradients, channels, activation):
    x, layer = image(channels), conv(channels, channels)
    y = NOT_OF_ZERO[activation](layer(x))
    assert waits(y) == (channels % library.isa_block() == 0)
    with tb.fuse("never"):
        expected = NOT_OF_ZERO[activation](layer(x))
    alike(y, expected)


@pytest.mark.parametrize("slope", [float("inf"), float("nan")])
def test_an_infinite_slope_leaves_the_padding_zero(no_gradients, slope):
    x, layer = image(), conv(20, 20)
    held = layer(x)
    y = F.leaky_relu(held, slope)
    with tb.fuse("never"):
        expected = F.leaky_relu(layer(x), slope)
    assert padding_is_zero(y)
    torch.testing.assert_close(y.to_dense(), expected.to_dense(), equal_nan=True)


CONVOLUTIONS = {
    "1x1": lambda: (conv(kernel=1), image()),
    "stride, no bias": lambda: (conv(stride=2, bias=False), image()),
    "grouped": lambda: (conv(32, 32, groups=2), image(32)),
    "depthwise": lambda: (conv(20, 20, groups=20), image()),
    "3-D": lambda: (nn.Conv3d(20, 24, 3, padding=1).to(tb.blocked), image(size=(4, 5, 6))),
    "a plain image": lambda: (conv(3, 32, 7), torch.randn(1, 3, 20, 20)),
    "a plain image, channels_last": lambda: (
        conv(3, 32, 7),
        torch.randn(1, 3, 20, 20).to(memory_format=torch.channels_last),
    ),
    "bfloat16": lambda: (conv(dtype=torch.bfloat16), image(dtype=torch.bfloat16)),
    "float16": lambda: (conv(dtype=torch.float16), image(dtype=torch.float16)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_all_kinds(no_gradients, name):
    layer, x = CONVOLUTIONS[name]()
    y = layer(x)
    assert waits(y) and y.shape == layer(x).to_dense().shape and y.dtype == x.dtype
    y = F.relu(y)
    with tb.fuse("never"):
        expected = F.relu(layer(x))
    alike(y, expected)


@pytest.mark.parametrize("winograd", ["always", "never"])
def test_a_network(no_gradients, winograd):
    from torch_blocked.benchmark.networks import BasicBlock, ResNet

    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=5).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2)
    blocked, x = copy.deepcopy(model).to(tb.blocked), torch.randn(1, 3, 64, 64)
    with tb.winograd(winograd):
        y = blocked(x)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)
        with tb.fuse("never"):
            torch.testing.assert_close(y, blocked(x), rtol=1e-5, atol=1e-5)


NOT_FUSED = {
    "another order": lambda x: image().to(tb.format("nhwC16c")) + x,
    "twice": lambda x: norm()(norm()(x)),
    "after an activation": lambda x: norm()(F.relu(x)),
    "another clamp": lambda x: F.hardtanh(x, -1, 6),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "alpha": lambda x: torch.add(x, image(), alpha=2),
    "a number": lambda x: x + 1.5,
    "a plain tensor": lambda x: x + torch.randn(2, 20, 7, 6),
    "broadcast": lambda x: x + image(n=1),
    "itself": lambda x: x + x,
    "two": lambda x: x + image() + image(),
    "statistics of the batch": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_is_no_post_op_follows_by_itself(no_gradients, name):
    x, layer = image(), conv()

    def answer(how):
        torch.manual_seed(3)
        with tb.fuse(how):
            y = layer(x)
            y = NOT_FUSED[name](y)
            return y.to_dense()

    torch.testing.assert_close(answer("auto"), answer("never"), rtol=1e-5, atol=1e-5)


def test_with_gradients_nothing_waits():
    x, layer = image(), conv()
    assert not waits(layer(x)) and layer(x).requires_grad
    with torch.no_grad():
        y = layer(x)
    assert waits(y)
    scale = torch.ones((), requires_grad=True)
    (y * scale).sum().backward()  # what waited is an ordinary tensor here
    torch.testing.assert_close(scale.grad, y.to_dense().sum())


def test_never(no_gradients):
    x, layer = image(), conv()
    with tb.fuse("never"):
        assert not waits(layer(x))
        with tb.fuse("auto"):
            y = layer(x)
            assert waits(y)
        assert not waits(y)  # what waited has run
        assert not waits(layer(x))
    assert waits(layer(x))


def test_wrong_mode():
    with pytest.raises(ValueError, match="fuse: mode is one of auto, never, got 'always'") as error:
        tb.fuse("always")
    assert one_line(error)


def test_answers_that_nobody_looks_at_are_computed(no_gradients):
    x, layer = image(), conv()
    assert runs(lambda: [layer(x) for _ in range(5)]) >= 3  # two wait
    assert runs(lambda: x.exp()) == 2


# ---- Answers in between

HELD = {"convolution": [0], "batch_norm": [1], "both": [0, 1], "all": [0, 1, 2], "all but the first": [1, 2]}


@pytest.mark.parametrize("first", [0, 1], ids=["in order", "last first"])
@pytest.mark.parametrize("name", HELD)
def test_answers_that_are_held(no_gradients, name, first):
    """They are computed, once, whichever is looked at first; what follows is computed from them."""
    x, layers = image(), [conv(), norm(), F.relu, lambda x: x + image()]

    def call():
        torch.manual_seed(2)
        y, held = x, []
        for i, layer in enumerate(layers):
            y = layer(y)
            held += [y] if i in HELD[name] else []
        return [y, *held]

    with tb.fuse("never"):
        expected = call()
    answers = call()
    assert all(map(waits, answers))
    assert runs(lambda: (answers[0] if first else answers[-1]).physical) == 1
    assert not any(map(waits, answers))
    for one, other in zip(answers, expected, strict=True):
        alike(one, other)


def test_written_answers_are_the_same_tensor(no_gradients):
    x, layer, seen = image(), conv(), []
    y = layer(x)
    seen.append(y)
    assert F.relu_(y) is y and waits(y)
    y += image()
    assert seen[0] is y and waits(y)
    assert y.is_inference() or y._version == y.physical._version > 0


def test_hooks_see_the_answers(no_gradients):
    model, seen = nn.Sequential(conv(), norm(), nn.ReLU()), []
    for layer in model:
        layer.register_forward_hook(lambda layer, args, y: seen.append(y.to_dense()))
    x = image()
    y = model(x)
    with tb.fuse("never"):
        expected = model(x)
    alike(y, expected)
    for one, other in zip(seen[:3], seen[3:], strict=True):
        torch.testing.assert_close(one, other)


# ---- Scale and shift


def test_scale_and_shift_of_batch_norm():
    weight, bias, mean = torch.randn(3, 37)
    var = torch.rand(37)
    x = torch.randn(2, 37, 3, 3)
    for w, b in ((weight, bias), (None, bias), (weight, None), (None, None)):
        scale, shift = library.ops.batch_norm_scale_shift(w, b, mean, var, 1e-3)
        expected = F.batch_norm(x, mean, var, w, b, eps=1e-3)
        torch.testing.assert_close(x * scale.view(-1, 1, 1) + shift.view(-1, 1, 1), expected)
        torch.library.opcheck(library.ops.batch_norm_scale_shift.default, (w, b, mean, var, 1e-3))


@pytest.mark.parametrize("arguments", [(None, None, torch.ones(3), torch.ones(4)), (None, None, None, torch.ones(4))])
def test_bad_arguments_of_scale_and_shift(arguments):
    with pytest.raises((ValueError, RuntimeError), match="batch_norm"):
        library.ops.batch_norm_scale_shift(*arguments, 1e-3)


def test_padding(no_gradients):
    y = norm()(conv()(image()))
    assert waits(y) and padding_is_zero(y)
