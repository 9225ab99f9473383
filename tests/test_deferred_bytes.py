"""Convolutions that wait for their post-ops: all that asks for the bytes, threads, memory, errors.

Winograd's algorithms are off here (conftest.py): which one runs does not depend on the post-ops.
"""

import copy
import gc
import logging
import queue
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import hold_free_memory
from deferred_cases import alike, conv, image, norm, saved, waits
from torch import nn

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- Whatever asks for the bytes

ASKS = {
    "to_dense": lambda y: y.to_dense(),
    "physical": lambda y: y.physical.clone(),
    "numpy": lambda y: y.numpy().sum(),
    "tolist": lambda y: y.tolist(),
    "item": lambda y: y.sum().item(),
    "repr": repr,
    "pickle": lambda y: torch.load(saved(y), weights_only=True),
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


def test_swapping_a_tensor_that_waits(no_gradients):
    x, layer = image(), conv()
    y, z = layer(x), torch.ones(2)
    expected = layer(x).to_dense()
    torch.utils.swap_tensors(y, z)
    torch.testing.assert_close(z.to_dense(), expected)
    assert torch.equal(y, torch.ones(2))


def test_swapping_what_a_convolution_waits_to_read(no_gradients):
    x, layer, other = image(), conv(), image()
    expected = layer(x).to_dense()
    y = layer(x)
    torch.utils.swap_tensors(x, other)
    torch.testing.assert_close(y.to_dense(), expected)
    y = layer(other)
    other.data = torch.zeros(other.shape)
    torch.testing.assert_close(y.to_dense(), expected)


def test_assigning_one_that_waits_to_another(no_gradients):
    x, layer = image(), conv()
    y = layer(x)
    z = y.relu()
    y.data = z
    expected = layer(x).to_dense().relu()
    torch.testing.assert_close(z.to_dense(), expected)
    torch.testing.assert_close(y.to_dense(), expected)


def test_assigning_to_a_tensor_that_waits(no_gradients):
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


FORKING = """
import os, signal, threading, time
import torch, torch_blocked as tb

torch.set_num_threads(1)
stop = threading.Event()
x, other = (torch.randn(8, 64, 56, 56).to(tb.blocked) for _ in range(2))
{setup}

@torch.no_grad()
def work():
    while not stop.is_set():
        {work}

thread = threading.Thread(target=work)
thread.start()
time.sleep(0.3)
for _ in range(20):
    time.sleep(0.005)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with torch.no_grad():
            {child}
        os._exit(0)
    failed = os.waitpid(child, 0)[1]
    if failed:
        break
stop.set()
thread.join()
assert not failed
"""
# What another thread does at the moment, and what the forked process does first.
FORKS = {
    "a convolution that waited": dict(
        setup="layer = torch.nn.Conv2d(64, 64, 3, padding=1).to(tb.blocked)",
        work="layer(x).relu_().sum()",
        child="other.add_(1)",
    ),
    "weights are reordered": dict(
        setup="tb.fuse('never').__enter__(); tb.winograd('never').__enter__()\n"
        "small, weight = torch.randn(1, 512, 3, 3).to(tb.blocked), torch.randn(512, 512, 3, 3).to(tb.OIhw4i16o4i)",
        work="tb.empty_cache(); torch.nn.functional.conv2d(small, weight)",
        child="tb.library.packed_weights_bytes()",
    ),
}


@pytest.mark.parametrize("meanwhile", FORKS)
def test_a_forked_process_knows_nothing_of_other_threads(meanwhile):
    """One of which runs, and holds a lock."""
    script = FORKING.format(**FORKS[meanwhile])
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


def test_nothing_is_kept(no_gradients):
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
def test_errors_are_raised_by_the_call(no_gradients, wrong):
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


def test_out_of_memory_is_raised_where_the_answer_is_needed(no_gradients):
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
