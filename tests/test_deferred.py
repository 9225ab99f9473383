"""Convolutions that wait for their post-ops: the answers are those of the operators one by one, whatever comes between.

Winograd's algorithms are off here, and so are tiles' (conftest.py): which one runs does not depend on the post-ops.
"""

import copy
import gc
import io
import logging
import queue
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, hold_free_memory, one_line, padding_is_zero
from torch import nn

import torch_blocked as tb
from torch_blocked import _python, library

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture(params=MODES)
def mode(request):
    with MODES[request.param]():
        yield request.param


@pytest.fixture(autouse=True)
def nothing_waits_afterwards():
    yield
    _python.finish_deferred()


def waits(x):
    return "_physical" not in vars(x)


def image(channels=20, n=2, size=(7, 6), dtype=torch.float32):
    return torch.randn(n, channels, *size).to(dtype).to(tb.blocked)


def conv(ic=20, oc=20, kernel=3, dtype=torch.float32, **kwargs):
    """A convolution that keeps the size."""
    return nn.Conv2d(ic, oc, kernel, padding=kernel // 2, **kwargs).to(dtype).to(tb.blocked)


def norm(channels=20):
    layer = nn.BatchNorm2d(channels).eval()
    for vector in (layer.weight, layer.bias, layer.running_mean):
        nn.init.normal_(vector)
    nn.init.uniform_(layer.running_var, 0.5, 2)
    return layer


def runs(call):
    """How often `call` runs the operator."""
    with torch.profiler.profile() as profile:
        call()
    return sum(event.name == "torch_blocked::convolution" for event in profile.events())


def alike(y, expected):
    """Whether two answers are the same in all that users see, once looked at."""
    assert type(y) is type(expected) is tb.BlockedTensor
    assert_same(y, expected.to_dense(), rtol=1e-5, atol=1e-5)
    assert y.memory_desc == expected.memory_desc and y.is_inference() == expected.is_inference()
    assert y.is_inference() or y._version == expected._version == y.physical._version
    assert vars(y).keys() - {"_storage"} == vars(expected).keys() - {"_storage"}
    keys = torch._C._dispatch_keys
    assert keys(y) == keys(expected) and keys(y.physical) == keys(expected.physical)


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
def test_chains(mode, normalized, addition, activation, last):
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
def test_activations_that_are_not_zero_of_zero_wait_where_there_is_no_padding(mode, channels, activation):
    x, layer = image(channels), conv(channels, channels)
    y = NOT_OF_ZERO[activation](layer(x))
    assert waits(y) == (channels % library.isa_block() == 0)
    with tb.fuse("never"):
        expected = NOT_OF_ZERO[activation](layer(x))
    alike(y, expected)


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
def test_convolutions_of_all_kinds(mode, name):
    layer, x = CONVOLUTIONS[name]()
    y = layer(x)
    assert waits(y) and y.shape == layer(x).to_dense().shape and y.dtype == x.dtype
    y = F.relu(y)
    with tb.fuse("never"):
        expected = F.relu(layer(x))
    alike(y, expected)


@pytest.mark.parametrize("winograd", ["always", "never"])
def test_a_network(mode, winograd):
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
    "another order": (1, lambda x: image().to(tb.format("nhwC16c")) + x),
    "twice": (2, lambda x: norm()(norm()(x))),
    "after an activation": (1, lambda x: norm()(F.relu(x))),
    "another clamp": (1, lambda x: F.hardtanh(x, -1, 6)),
    "gelu by tanh": (1, lambda x: F.gelu(x, approximate="tanh")),
    "alpha": (1, lambda x: torch.add(x, image(), alpha=2)),
    "a number": (1, lambda x: x + 1.5),
    "a plain tensor": (1, lambda x: x + torch.randn(2, 20, 7, 6)),
    "broadcast": (1, lambda x: x + image(n=1)),
    "itself": (1, lambda x: x + x),
    "two": (1, lambda x: x + image() + image()),
    "statistics of the batch": (1, lambda x: F.batch_norm(x, None, None, training=True)),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_is_no_post_op_follows_by_itself(mode, name):
    _, function = NOT_FUSED[name]
    x, layer = image(), conv()

    def answer(how):
        torch.manual_seed(3)
        with tb.fuse(how):
            y = layer(x)
            y = function(y)
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


def test_never(mode):
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


def test_answers_that_nobody_looks_at_are_computed(mode):
    x, layer = image(), conv()
    assert runs(lambda: [layer(x) for _ in range(5)]) >= 3  # two wait
    assert runs(lambda: x.exp()) == 2


# ---- Answers in between

HELD = {"convolution": [0], "batch_norm": [1], "both": [0, 1], "all": [0, 1, 2], "all but the first": [1, 2]}


@pytest.mark.parametrize("first", [0, 1], ids=["in order", "last first"])
@pytest.mark.parametrize("name", HELD)
def test_answers_that_are_held(mode, name, first):
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


def test_written_answers_are_the_same_tensor(mode):
    x, layer, seen = image(), conv(), []
    y = layer(x)
    seen.append(y)
    assert F.relu_(y) is y and waits(y)
    y += image()
    assert seen[0] is y and waits(y)
    with tb.fuse("never"):
        torch.manual_seed(0)
    assert y.is_inference() or y._version == y.physical._version > 0


def test_hooks_see_the_answers(mode):
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


# ---- What is written between the call and the run


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
def test_writes_through_plain_tensors_are_not_seen(mode, name, of):
    x, alias = ALIASES[name]()
    layer = conv(32, 32)
    y = layer(x) if of == "src" else layer(torch.ones(x.shape).to(tb.nChw16c)) + x
    alias[:] = 7
    expected = y.to_dense()
    assert bool((x.to_dense() == 7).all()), "no alias"
    with tb.fuse("never"):
        now = layer(x) if of == "src" else layer(torch.ones(x.shape).to(tb.nChw16c)) + x
    assert not torch.allclose(expected, now.to_dense())


def test_a_view_of_one_pixel_made_after_the_call(mode):
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


def test_counts(mode):
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


def test_writes_to_shown_weights_are_not_seen(mode):
    x, layer = image(), conv(bias=False)
    shown = layer.weight.physical
    y = layer(x)
    shown.zero_()
    assert bool(y.to_dense().any()) and not bool(layer(x).to_dense().any())


def test_writes_to_a_plain_image_are_not_seen(mode):
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
def test_writes_of_compiled_code_are_not_seen(mode, name):
    layer, function = conv(32, 32, 1), lambda x: x.mul_(0)
    COMPILED[name](torch.randn(2, 32, 1, 1).to(tb.blocked), function)  # compiles
    x = torch.randn(2, 32, 1, 1).to(tb.blocked)
    expected = F.relu(layer(x)).to_dense()
    y = layer(x)
    COMPILED[name](x, function)
    y = F.relu(y)
    torch.testing.assert_close(y.to_dense(), expected)
    assert not bool(x.to_dense().any())


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda objects: torch.load(_saved(objects), weights_only=True)}


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_share_memory(mode, name):
    x, layer = image(), conv()
    objects = COPIES[name]({"x": x, "physical": x.physical})
    y = layer(objects["x"])
    objects["physical"].zero_()
    torch.testing.assert_close(y.to_dense(), layer(x).to_dense())


def test_settings_are_those_of_the_call(mode):
    x, layer = image(64, 1, (12, 12)), conv(64, 64)
    with tb.winograd("f4"):
        y = layer(x)
    with tb.fuse("never"), tb.winograd("f4"):
        expected = layer(x)
    direct = layer(x)
    assert torch.equal(y.to_dense(), expected.to_dense()) and not torch.equal(y.to_dense(), direct.to_dense())


# ---- Whatever asks for the bytes

ASKS = {
    "to_dense": lambda y: y.to_dense(),
    "physical": lambda y: y.physical.clone(),
    "numpy": lambda y: y.numpy().sum(),
    "tolist": lambda y: y.tolist(),
    "item": lambda y: y.sum().item(),
    "repr": repr,
    "pickle": lambda y: torch.load(_saved(y), weights_only=True),
    "deepcopy": copy.deepcopy,
    "detach": lambda y: y.detach(),
    "clone": lambda y: y.clone(),
    "memory_desc": lambda y: y.memory_desc,
    "format": lambda y: y.format,
    "data_ptr": lambda y: y.data_ptr(),
    "parameter": nn.Parameter,
    "views": lambda y: y[0],
    "flatten": lambda y: [getattr(y, name).sum() for name in y.__tensor_flatten__()[0]],
    "pooling": lambda y: F.max_pool2d(y, 2),
    "view_strided": lambda y: F.adaptive_avg_pool2d(y, 1).view_strided(),
    "cat": lambda y: torch.cat([y, y], 1),
    "conversion": lambda y: y.to(memory_format=torch.channels_last),
    "another dtype": lambda y: y.double(),
    "compiled": torch.compile(lambda y: y * 2, backend="aot_eager"),
}


def _saved(y):
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("ask", ASKS)
def test_everything_that_asks_for_the_bytes(ask):
    def answer(how):
        torch.manual_seed(4)
        with torch.no_grad(), tb.fuse(how):
            x, layer = image(32), conv(32, 32)
            y = F.relu(layer(x))
            assert waits(y) == (how == "auto")
            result = ASKS[ask](y)
            assert ask == "data_ptr" or not waits(y)
            return result, y

    (one, y), (other, expected) = answer("auto"), answer("never")
    alike(y, expected)
    if isinstance(one, tb.BlockedTensor):
        alike(one, other)
    elif ask != "data_ptr":
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_swapping_a_tensor_that_waits(mode):
    x, layer = image(), conv()
    y, z = layer(x), torch.ones(2)
    expected = layer(x).to_dense()
    torch.utils.swap_tensors(y, z)
    torch.testing.assert_close(z.to_dense(), expected)
    assert torch.equal(y, torch.ones(2))


def test_swapping_what_a_convolution_waits_to_read(mode):
    x, layer, other = image(), conv(), image()
    expected = layer(x).to_dense()
    y = layer(x)
    torch.utils.swap_tensors(x, other)
    torch.testing.assert_close(y.to_dense(), expected)
    y = layer(other)
    other.data = torch.zeros(other.shape)
    torch.testing.assert_close(y.to_dense(), expected)


def test_assigning_one_that_waits_to_another(mode):
    x, layer = image(), conv()
    y = layer(x)
    z = y.relu()
    y.data = z
    expected = layer(x).to_dense().relu()
    torch.testing.assert_close(z.to_dense(), expected)
    torch.testing.assert_close(y.to_dense(), expected)


def test_assigning_to_a_tensor_that_waits(mode):
    x, layer = image(), conv()
    y = layer(x)
    y.data = image()
    expected = y.to_dense()
    x.exp()  # what waits runs
    assert torch.equal(y.to_dense(), expected)


# ---- Threads


def in_thread(call):
    """The answer of `call` in a thread that has ended."""
    answers = queue.Queue()
    thread = threading.Thread(target=lambda: answers.put(call()))
    thread.start()
    thread.join()
    return answers.get_nowait()


@torch.no_grad()
def _waiting(x, layer):
    return F.relu(layer(x))


def test_a_thread_that_ends():
    x, layer = image(), conv()
    y = in_thread(lambda: _waiting(x, layer))
    assert waits(y)
    alike(y, in_thread(lambda: _waiting(x, layer).clone()))


def test_another_thread_reads():
    x, layer = image(), conv()
    y = _waiting(x, layer)
    dense = in_thread(lambda: y.to_dense())
    assert torch.equal(dense, y.to_dense())


@pytest.mark.parametrize("write", ["mul_", "relu_", "fill_", "copy_", "foreach", "out", "a copied view"])
def test_another_thread_writes(write):
    """To what a convolution that waits in this one reads."""
    x, layer = image(), conv()
    view = x.view(2, -1)
    with tb.fuse("never"):
        expected = _waiting(x, layer)
    y = _waiting(x, layer)
    writes = {
        "mul_": lambda: x.mul_(2),
        "relu_": lambda: x.relu_(),
        "fill_": lambda: x.fill_(3),
        "copy_": lambda: x.copy_(torch.ones(x.shape)),
        "foreach": lambda: torch._foreach_mul_([x], 2.0),
        "out": lambda: torch.sigmoid(x.clone(), out=x),
        "a copied view": lambda: view.zero_(),
    }
    in_thread(torch.no_grad()(writes[write]))
    assert not waits(y)
    alike(y, expected)


def test_a_forked_process_knows_nothing_of_other_threads():
    """One of which runs a convolution that waited, and holds its lock."""
    script = """
import os, signal, threading, time
import torch, torch_blocked as tb

torch.set_num_threads(1)
layer, stop = torch.nn.Conv2d(64, 64, 3, padding=1).to(tb.blocked), threading.Event()
x, other = (torch.randn(8, 64, 56, 56).to(tb.blocked) for _ in range(2))

@torch.no_grad()
def work():
    while not stop.is_set():
        layer(x).relu_().sum()

thread = threading.Thread(target=work)
thread.start()
time.sleep(0.3)
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with torch.no_grad():
            other.add_(1)
        os._exit(0)
    failed = os.waitpid(child, 0)[1]
    if failed:
        break
stop.set()
thread.join()
assert not failed
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_code_called_meanwhile_may_ask_for_the_answer():
    """What records that weights were reordered, or is told that a tensor is gone."""
    with torch.no_grad():
        x, layer, asked = image(), conv(), []
        layer.weight.data = layer.weight.data.to(tb.OIhw8o8i)  # reordered at each call
        y = layer(x)

        class Handler(logging.Handler):
            def emit(self, record):
                asked.append(y.physical.clone())

        handler, logger = Handler(), logging.getLogger("torch_blocked")
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.DEBUG)
        try:
            expected = y.to_dense()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        assert asked and all(torch.equal(one, y.physical) for one in asked) and bool(expected.any())

        buffer, layer = image(), conv()
        weakref.finalize(x, lambda: buffer.zero_())
        y = layer(x)
        del x
        y.to_dense()
        assert not bool(buffer.to_dense().any())


def test_many_threads_share_a_model():
    model, xs = nn.Sequential(conv(), norm(), nn.ReLU(), conv(), norm(), nn.ReLU6(inplace=True)), []
    with torch.no_grad():
        xs = [image() for _ in range(4)]
        expected = [model(x).to_dense() for x in xs]
    wrong = []

    def serve(i):
        with torch.inference_mode(i % 2 == 0), torch.no_grad():
            for _ in range(50):
                if not torch.equal(model(xs[i]).to_dense(), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- Memory and errors


def test_nothing_is_kept(mode):
    x, layer, bn = image(), conv(), norm()
    for hold in (False, True):
        y = layer(x)
        held = y if hold else None
        y = bn(y)
        y = F.relu_(y)
        gone = weakref.ref(y)
        source = weakref.ref(vars(x)["_physical"])
        y = y.exp()  # what waits runs
        del held
        gc.collect()
        assert gone() is None
        assert source() is not None
    x = layer.weight  # the last to be read
    y = layer(image())
    del y, x
    image().exp()
    gc.collect()
    assert source() is None


@pytest.mark.parametrize("wrong", ["channels", "filter", "dtype"])
def test_errors_are_raised_by_the_call(mode, wrong):
    x, layer = image(), conv()
    calls = {
        "channels": lambda: layer(image(21)),
        "filter": lambda: F.conv2d(x, layer.weight, None, 1, 0, 5),
        "dtype": lambda: layer(image(dtype=torch.float64)),
    }

    def error(how):
        with tb.fuse(how), pytest.raises(RuntimeError) as raised:
            calls[wrong]()
        return str(raised.value)

    assert error("auto") == error("never")


def test_out_of_memory_is_raised_where_the_answer_is_needed(mode):
    layer = nn.Conv2d(16, 16, 1, bias=False, padding=1 << 21).to(tb.blocked)
    x = image(16, 1, (1, 1))
    y = layer(x)  # 2**46 pixels
    assert waits(y)
    for _ in range(2):  # each time
        with pytest.raises(RuntimeError, match="allocate memory"):
            y.to_dense()
    assert waits(y)
    del y
    torch.testing.assert_close(x.exp().to_dense(), x.to_dense().exp())
    del hold_free_memory()[:]


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


def test_padding(mode):
    y = norm()(conv()(image()))
    assert waits(y) and padding_is_zero(y)
