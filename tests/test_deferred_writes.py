"""Convolutions that wait for their post-ops: what is written after the call is not seen.

Winograd's algorithms are off here (conftest.py): which one runs does not depend on the post-ops.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from deferred_cases import conv, image, norm, saved, waits
from torch import nn

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")


def _flat(x):
    return x.view(x.size(0), -1)


WRITES = {
    "src": lambda x, layer, bn: x.zero_(),
    "src, foreach": lambda x, layer, bn: torch._foreach_mul_([x], 2.0),
    "src, copied": lambda x, layer, bn: x.copy_(torch.ones(x.shape)),
    "src, a part": lambda x, layer, bn: x.__setitem__((0, 0), 5.0),
    "src, detached": lambda x, layer, bn: x.detach().mul_(2),
    "src, a channel": lambda x, layer, bn: x[:, 16:].mul_(2),
    "src, data": lambda x, layer, bn: setattr(x, "data", torch.ones(x.shape).to(tb.blocked)),
    "src, shown": lambda x, layer, bn: x.physical.zero_(),
    "src, shown by a detached one": lambda x, layer, bn: x.detach().physical.zero_(),
    "src, its numpy array": lambda x, layer, bn: x.physical.numpy().fill(3),
    "weight, shown": lambda x, layer, bn: layer.weight.physical.zero_(),
    "residual, shown": lambda x, layer, bn: bn.other.physical.zero_(),
    "src, out": lambda x, layer, bn: torch.mul(x, 3.0, out=x),
    "weight": lambda x, layer, bn: layer.weight.mul_(2),
    "weight, data": lambda x, layer, bn: layer.weight.data.mul_(2),
    "weight, another": lambda x, layer, bn: setattr(layer, "weight", nn.Parameter(torch.zeros(layer.weight.shape))),
    "weights, loaded": lambda x, layer, bn: layer.load_state_dict(
        {name: torch.zeros(value.shape) for name, value in layer.state_dict().items()}
    ),
    "bias": lambda x, layer, bn: layer.bias.data.zero_(),
    "statistics": lambda x, layer, bn: bn.running_mean.data.add_(1),
    "scale": lambda x, layer, bn: bn.weight.data.zero_(),
    "residual": lambda x, layer, bn: bn.other.zero_(),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_after_the_call_are_not_seen(write):
    def answers(how):
        torch.manual_seed(1)
        with torch.no_grad(), tb.fuse(how):
            x, layer, bn = image(), conv(), norm()
            bn.other = image()
            y = layer(x)
            y = bn(y)
            y = y + bn.other
            assert waits(y) == (how == "auto")
            WRITES[write](x, layer, bn)
            return y.to_dense(), (layer(x) if isinstance(layer.weight, tb.BlockedTensor) else x).to_dense()

    for one, other in zip(answers("auto"), answers("never"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _view_blocked():
    plain = torch.randn(2, 32, 1, 1)
    return tb.view_blocked(plain, tb.nChw16c), plain


def _from_physical():
    physical = torch.randn(2, 2, 7, 6, 16)
    return tb.from_physical(physical, (2, 32, 7, 6), tb.nChw16c), physical


def _alias(show):
    x = torch.randn(2, 32, 1, 1).to(tb.nChw16c)
    return x, show(x)


ALIASES = {
    "physical": lambda: _alias(lambda x: x.physical),
    "a view of physical": lambda: _alias(lambda x: x.physical.view(-1)),
    "numpy": lambda: _alias(lambda x: x.physical.numpy()),
    "physical of a detached one": lambda: _alias(lambda x: x.detach().physical),
    "view_strided": lambda: _alias(lambda x: x.view_strided()),
    "view": lambda: _alias(_flat),
    "flatten": lambda: _alias(lambda x: x.flatten(1)),
    "view_blocked": _view_blocked,
    "from_physical": _from_physical,
}


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("of", ["src", "residual"])
def test_writes_through_plain_tensors_are_not_seen(no_gradients, name, of):
    x, alias = ALIASES[name]()
    layer = conv(32, 32)
    y = layer(x) if of == "src" else layer(torch.ones(x.shape).to(tb.nChw16c)) + x
    alias[:] = 7
    expected = y.to_dense()
    assert bool((x.to_dense() == 7).all()), "no alias"
    with tb.fuse("never"):
        now = layer(x) if of == "src" else layer(torch.ones(x.shape).to(tb.nChw16c)) + x
    assert not torch.allclose(expected, now.to_dense())


def test_a_view_of_one_pixel_made_after_the_call(no_gradients):
    x, layer = torch.randn(2, 32, 1, 1).to(tb.nChw16c), conv(32, 32)
    expected = layer(x).to_dense()
    y = layer(x)
    x.view_strided().zero_()
    torch.testing.assert_close(y.to_dense(), expected)


def test_inference_mode_entered_between():
    x, layer, bn = image(), conv(), norm()
    with torch.no_grad():
        y = layer(x)
        with torch.inference_mode():
            y = bn(y)
            assert not waits(y) and y.is_inference() and y.physical.is_inference()


def test_counts(no_gradients):
    x, layer = image(), nn.Conv2d(20, 20, 3)  # a plain weight, reordered at each call
    blocked = conv()
    y = blocked(x)
    with tb.count() as counts:
        assert not waits(y)
        y = blocked(x)
    assert not waits(y) and not counts.fallbacks
    with tb.count() as counts:
        layer(x)
    assert sum(counts.reorders.values()) == 1


def test_writes_to_shown_weights_are_not_seen(no_gradients):
    x, layer = image(), conv(bias=False)
    shown = layer.weight.physical
    y = layer(x)
    shown.zero_()
    assert bool(y.to_dense().any()) and not bool(layer(x).to_dense().any())


def test_writes_to_a_plain_image_are_not_seen(no_gradients):
    x, layer = torch.randn(1, 3, 20, 20), conv(3, 32, bias=False)
    y = layer(x)
    assert waits(y)
    x.zero_()
    assert bool(y.to_dense().any())


def test_what_blocked_tensors_do_not_see_is_an_error():
    with torch.no_grad():
        x, layer = image(), conv()
        y = layer(x)
        vars(x)["_physical"].zero_()
        with pytest.raises(RuntimeError, match=r"written to by code that .* call torch_blocked.fuse\('never'\)"):
            y.to_dense()


def test_writes_before_a_post_op_that_blocked_tensors_do_not_see():
    with torch.no_grad():
        x, layer = image(), conv()
        y = layer(x)
        vars(x)["_physical"].zero_()
        with pytest.raises(RuntimeError, match="written to by code that"):
            F.relu(y)


COMPILED = {
    "written": lambda x, function: torch.compile(function, backend="aot_eager")(x),
    "a view that is written": lambda x, function: torch.compile(lambda x: (x.flatten(1), x + 1), backend="aot_eager")(
        x
    )[0].zero_(),
}


@pytest.mark.parametrize("name", COMPILED)
def test_writes_of_compiled_code_are_not_seen(no_gradients, name):
    layer, function = conv(32, 32, 1), lambda x: x.mul_(0)
    COMPILED[name](torch.randn(2, 32, 1, 1).to(tb.blocked), function)  # compiles
    x = torch.randn(2, 32, 1, 1).to(tb.blocked)
    expected = F.relu(layer(x)).to_dense()
    y = layer(x)
    COMPILED[name](x, function)
    y = F.relu(y)
    torch.testing.assert_close(y.to_dense(), expected)
    assert not bool(x.to_dense().any())


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda objects: torch.load(saved(objects), weights_only=True)}


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_share_memory(no_gradients, name):
    x, layer = image(), conv()
    objects = COPIES[name]({"x": x, "physical": x.physical})
    y = layer(objects["x"])
    objects["physical"].zero_()
    torch.testing.assert_close(y.to_dense(), layer(x).to_dense())


def test_what_is_sent_to_another_process_is_read_before(no_gradients):
    """Which may write to it: what is sent moves to shared memory."""
    x, layer = image(), conv()
    y = layer(x)
    assert waits(y)
    x.__reduce_ex__(2)
    assert not waits(y)


def test_settings_are_those_of_the_call(no_gradients):
    x, layer = image(64, 1, (12, 12)), conv(64, 64)
    with tb.winograd("f4"):
        y = layer(x)
    with tb.fuse("never"), tb.winograd("f4"):
        expected = layer(x)
    direct = layer(x)
    assert torch.equal(y.to_dense(), expected.to_dense()) and not torch.equal(y.to_dense(), direct.to_dense())
