"""The model in place of its parameters: a call reads none of them, and sees every change of them."""

import copy
import ctypes
import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Lambda, assert_close, block, both, compiled, conv, fresh, randomized  # noqa: F401
from conftest import dense
from torch import nn
from torch._dynamo import lookup_backend
from torch.testing._internal.two_tensor import TwoTensor

import torch_blocked as tb
from torch_blocked._python import Entry
from torch_blocked.compile import lower, model_input

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="this CPython counts no changes of dicts")


@pytest.fixture
def reads(monkeypatch):
    """One entry for each call that read the parameters."""
    found, read = [], model_input.ModelCall._read
    monkeypatch.setattr(model_input.ModelCall, "_read", lambda *args: found.append(1) or read(*args))
    return found


def images(n=2):
    return torch.randn(n, 3, 6, 5)


def classifier():
    """Convolutions, and linear layers, whose weights the graph takes as they are."""
    layers = {"c": conv(3, 17), "n": nn.BatchNorm2d(17), "l": nn.Linear(17, 5), "k": nn.Linear(5, 4)}
    return randomized(Lambda(lambda m, x: m.k(F.gelu(m.l(F.relu(m.n(m.c(x))).mean((2, 3))))), **layers)).requires_grad_(
        False
    )


@pytest.mark.parametrize(
    "make, blocked, expected",
    [
        (block, False, 1),
        (classifier, False, 1),
        (classifier, True, 1),
        (block, True, 4),
    ],  # AOTAutograd makes a blocked answer
)
@torch.no_grad()
def test_read_once(make, blocked, expected, reads):
    model = make()
    model = model.to(tb.blocked) if blocked else model
    function = compiled(model)
    for _ in range(4):
        x = images()
        assert_close(function(x), dense(model(x)))
    assert len(reads) == expected


@torch.no_grad()
def test_called_without_the_wrapper_of_inductor(monkeypatch):
    """But where a profiler runs, which gets the graph's name from there."""
    calls, call = [], lower.BelowAutograd.__call__
    monkeypatch.setattr(lower.BelowAutograd, "__call__", lambda *args: calls.append(1) or call(*args))
    model, x = classifier(), images()
    function = compiled(model)
    for _ in range(3):
        assert_close(function(x), model(x))
    assert len(calls) == 1
    with torch.profiler.profile() as profile:
        assert_close(function(x), model(x))
    assert len(calls) == 2 and any("CompiledFxGraph" in event.name for event in profile.events())
    gradient = torch.enable_grad()(lambda: function(x))()
    assert not gradient.requires_grad and gradient.is_leaf


@torch.no_grad()
def test_numbers_in_the_models_code():
    """The graph takes them after its inputs."""
    model, x = Lambda(lambda m, x: m.c(x).mean((2, 3)) + torch.tensor([[0.0, 1, 2, 3] * 4]), c=conv(3, 16)), images()
    function = compiled(model)
    for _ in range(4):
        assert_close(function(x), model(x))


def test_what_an_entry_does_not_take():
    for others in ([], [torch.ones(1), torch.ones(1)], [None]):
        with pytest.raises(TypeError, match="Entry: "):
            Entry(0, (torch.ones(1),), 1, 1)(others)
    with pytest.raises(TypeError, match="Entry: "):
        Entry(0, (torch.ones(1), 2), 1, 1)


def test_an_entry_gives_back_what_it_holds():
    """It counts itself at its values for many calls at once, also for those that never come."""
    value = torch.ones(3)
    pointers = ctypes.POINTER(ctypes.c_void_p)

    @ctypes.CFUNCTYPE(None, pointers, pointers)
    def run(inputs, answers):
        answers[0] = inputs[0]

    count = value._use_count()
    entry = Entry(ctypes.cast(run, ctypes.c_void_p).value, (value,), 0, 1)
    for _ in range(100):
        (answer,) = entry([])
        assert answer is value
    assert value._use_count() > count
    del entry
    assert value._use_count() == count


def _replace(model):
    model.layers.c.weight = nn.Parameter(torch.randn_like(dense(model.layers.c.weight)), requires_grad=False)


CHANGES = {
    "in place": lambda m: m.layers.c.bias.add_(1),
    "in place, blocked or not": lambda m: m.layers.c.weight.mul_(2),
    "of the values in a view": lambda m: m.layers.c.bias[1:3].fill_(3.0),
    "by .data": lambda m: setattr(m.layers.c.bias, "data", torch.randn(17)),
    "of statistics": lambda m: m.layers.n.running_mean.add_(1),
    "of statistics, in training mode": lambda m: (m.layers.n.train()(torch.randn(2, 17, 6, 5)), m.eval()),
    "of what the graph takes as it is": lambda m: m.layers.l.weight.mul_(-1),
    "another of what it takes": lambda m: setattr(m.layers.l, "weight", nn.Parameter(torch.randn(5, 17), False)),
    "another parameter": _replace,
    "load_state_dict": lambda m: m.load_state_dict({k: dense(v).clone() + 1 for k, v in m.state_dict().items()}),
    "load_state_dict, assigned": lambda m: m.load_state_dict(
        {k: v.clone() + 1 for k, v in m.state_dict().items()}, assign=True
    ),
    "another module": lambda m: m.layers.update({"c": copy.deepcopy(m.layers.c).requires_grad_(False)}),
    "all made anew": lambda m: setattr(m, "layers", copy.deepcopy(m.layers)),
}


@both
@torch.no_grad()
def test_changes_are_seen(blocked, reads):
    model, x = classifier(), images()
    model = model.to(tb.blocked) if blocked else model
    function = compiled(model)
    for name, change in CHANGES.items():
        for _ in range(2):
            function(x)
        reads.clear()
        change(model)
        for _ in range(3):
            assert_close(function(x), dense(model(x)))
        assert 1 <= len(reads) <= 2, name


@torch.no_grad()
def test_every_step_of_an_optimizer_is_seen(reads):
    model, x = classifier(), images()
    function = compiled(model)
    for _ in range(5):
        torch._foreach_add_(list(model.parameters()), 0.1)
        assert_close(function(x), model(x))
    assert len(reads) == 5
    assert_close(function(x), model(x))
    assert len(reads) == 5


@both
@torch.no_grad()
def test_a_model_in_something_else(blocked):
    """An object or a dict holds it, and is passed in place of the parameters."""
    model, x = block().to(tb.blocked) if blocked else block(), images()
    trainer = type("Trainer", (), {"step": lambda self, x: self.model(x)})()
    trainer.model, models = model, {"m": model}
    for function in (trainer.step, lambda x: models["m"](x)):
        function = torch.compile(function, backend="torch_blocked")
        for _ in range(2):
            assert_close(function(x), dense(model(x)))
            model.layers.b.bias.add_(1)


@both
@torch.no_grad()
def test_models_of_one_class(blocked, reads):
    """They share the code and one convolution, and have the rest for themselves."""
    models, x = [classifier() for _ in range(3)], images()
    models[1].layers.c = models[0].layers.c
    models = [model.to(tb.blocked) if blocked else model for model in models]
    function = torch.compile(lambda m, x: m(x), backend="torch_blocked", fullgraph=True)
    for _ in range(3):
        for model in models:
            assert_close(function(model, x), dense(model(x)))
    assert len(reads) == 3
    models[0].layers.l.weight.mul_(2)
    models[2].layers.c.bias.add_(1)
    for _ in range(2):
        for model in models:
            assert_close(function(model, x), dense(model(x)))
    assert len(reads) == 5


@torch.no_grad()
def test_without_guards_the_model_still_counts():
    """As `torch.compiler.set_stance` may have it."""
    models, x = [classifier() for _ in range(2)], images()
    function = torch.compile(lambda m, x: m(x), backend="torch_blocked", fullgraph=True)
    for model in models * 2:
        function(model, x)
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        for model in models * 2:
            assert_close(function(model, x), model(x))
            model.layers.l.weight.mul_(2)
            assert_close(function(model, x), model(x))


OTHERS = {  # name -> a function of layers and x, which the graph alone does not answer, and how often it is read
    "writes to a buffer": (lambda m, x: m.n.running_mean.add_(1) + m.n(m.c(x)).mean((0, 2, 3)), 3),
    "returns a view of its argument": (lambda m, x: (m.c(x), x[0]), 3),
    "returns a view of a parameter": (lambda m, x: (m.c(x), m.c.bias[1:]), 3),
    "computes nothing from parameters alone": (lambda m, x: F.conv2d(x, m.c.weight * x.mean(), m.c.bias * x.mean()), 3),
    "returns its argument, by Dynamo": (lambda m, x: (m.c(x), x), 1),
    "returns a parameter, by Dynamo": (lambda m, x: (m.c(x), m.c.bias), 1),
    "returns numbers, by Dynamo": (lambda m, x: (m.c(x), x.shape[0]), 1),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_graphs_that_do_more(name, reads):
    function, expected = OTHERS[name]
    model, x = randomized(Lambda(function, c=conv(3, 17), n=nn.BatchNorm2d(17))), images()
    other = copy.deepcopy(model)
    function = compiled(model)
    for _ in range(3):
        got, want = (y if isinstance(y, tuple) else (y,) for y in (function(x), other(x)))
        for actual, answer in zip(got, want, strict=True):
            if isinstance(answer, torch.Tensor):
                assert_close(actual, answer)
            else:
                assert actual == answer
        assert (got[-1] is x) == (want[-1] is x)
        assert (got[-1] is model.layers.c.bias) == (want[-1] is other.layers.c.bias)
    assert len(reads) == expected


@both
@torch.no_grad()
def test_sizes_that_vary(blocked, reads):
    model = classifier()
    model = model.to(tb.blocked) if blocked else model
    function = compiled(model, dynamic=True)
    for n in (2, 3, 5, 7):
        x = torch.randn(n, 3, 6 + n, 9)
        assert_close(function(x), dense(model(x)))
    assert len(reads) == (4 if blocked else 1)


@torch.no_grad()
def test_parameters_of_another_class(reads):
    """Of which nothing is known: they are read each time."""
    model, x = classifier(), images()
    weights = [torch.randn(5, 17), torch.randn(5, 17)]
    model.layers.l.weight = nn.Parameter(TwoTensor(*weights), requires_grad=False)
    function = compiled(model)
    for _ in range(3):
        assert_close(function(x).a, model(x).a)
        weights[0].mul_(2)
    assert len(reads) == 3


@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@torch.no_grad()
def test_sparse_parameters(to_sparse):
    """Dynamo leaves them out of the graph, and the model in it."""
    model = Lambda(lambda m, x: m.s.weight @ m.c(x).flatten(1).view(17, -1), c=conv(3, 17), s=nn.Linear(17, 17))
    model.layers.s.weight = nn.Parameter(to_sparse(torch.eye(17)), requires_grad=False)
    function, x = torch.compile(model.eval(), backend="torch_blocked"), images(1)
    for _ in range(3):
        assert_close(function(x), model(x))
        model.layers.c.bias.add_(1)


@torch.no_grad()
def test_autocast(reads):
    """AOTAutograd turns it off around the graph, which has it inside."""
    model, x = classifier(), images()
    function = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            got, want = function(x), model(x)
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    assert len(reads) == 3


@torch.no_grad()
def test_blocked_images(reads):
    model = block().to(tb.blocked)
    function = compiled(model)
    for _ in range(3):
        x = images().to(tb.blocked)
        assert_close(function(x), model(x))
    assert len(reads) == 3


@torch.no_grad()
def test_graph_break(reads):
    """Each part has a call of its own, and the same model."""
    layers = {"a": conv(3, 17), "b": conv(17, 5), "n": nn.BatchNorm2d(17)}
    model = randomized(Lambda(lambda m, x: m.b(_apart(F.relu(m.n(m.a(x))))), **layers))
    function, x = torch.compile(model, backend="torch_blocked"), images()
    for changed, expected in ((None, 2), ("a", 1), ("b", 1)):
        if changed is not None:
            model.layers[changed].bias.add_(1)
        reads.clear()
        for _ in range(3):
            assert_close(function(x), model(x))
        assert len(reads) == expected


@torch._dynamo.disable
def _apart(x):
    return x


@torch.no_grad()
def test_two_models_of_one_function(reads):
    """There is no single one to pass."""
    a, b, x = classifier(), classifier(), images()
    function = compiled(lambda x: a(x) + b(x))
    for _ in range(3):
        assert_close(function(x), a(x) + b(x))
        b.layers.c.bias.add_(1)
    assert reads == []


def test_gradients(reads):
    """Training takes the parameters."""
    model, x = Lambda(lambda m, x: m.c(x), c=conv(3, 17)), images()
    other = copy.deepcopy(model)
    for m in (compiled(model), other):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    assert reads == []


@torch.no_grad()
def test_another_backend_sees_the_parameters(reads):
    seen = []

    def backend(gm, example_inputs):
        inner = lookup_backend("torch_blocked")(gm, example_inputs)
        return lambda *args: seen.append(args) or inner(*args)

    model, x = block(), images()
    function = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_close(function(x), model(x))
    assert all(isinstance(a, torch.Tensor) for args in seen for a in args) and len(seen) == 2 and reads == []


@torch.no_grad()
def test_weights_made_in_inference_mode(reads):
    """Nothing counts what is written to them."""
    with torch.inference_mode():
        model, x = classifier(), images()
        function = compiled(model)
        for _ in range(3):
            assert_close(function(x), model(x))
            model.layers.c.bias.add_(1)
    assert len(reads) == 3


@torch.no_grad()
def test_model_that_is_gone_is_freed():
    model, x = classifier(), images()
    function = torch.compile(lambda m, x: m(x), backend="torch_blocked", fullgraph=True)
    for _ in range(3):
        function(model, x)
    gone = weakref.ref(model), *(weakref.ref(p) for p in model.parameters())
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    other = classifier()
    assert_close(function(other, x), other(x))


@torch.no_grad()
def test_parameters_that_other_threads_write_and_replace():
    """Each answer is by one of the two parameters; the last by the last."""
    model, x = classifier(), images()
    function, layer = compiled(model), model.layers.l
    choices = [torch.randn(5), torch.randn(5)]
    wanted = []
    for choice in choices:
        layer.bias.copy_(choice)
        wanted.append(model(x))
    function(x)
    stop, errors = threading.Event(), []

    def call():
        with torch.no_grad():
            while not stop.is_set():
                answer = function(x)
                if not any(torch.allclose(answer, want, rtol=1e-3, atol=1e-3) for want in wanted):
                    errors.append(answer)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(400):
        layer.bias = nn.Parameter(choices[i % 2].clone(), requires_grad=False)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert_close(function(x), model(x))
