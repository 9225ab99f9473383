"""The guard in place of Dynamo's on a model's modules: it sees what they see, and asks them only after a change."""

import copy
import gc
import sys
import threading
import weakref

import pytest
import torch
from backend_cases import assert_close, block, both, compiled, conv, fresh  # noqa: F401
from conftest import dense
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._inductor import compile_fx

import torch_blocked as tb
from torch_blocked.compile import guards, lower

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="this CPython counts no changes of dicts")


@pytest.fixture(autouse=True)
def as_traced(monkeypatch):
    """Graphs run as Dynamo traced them: what Inductor makes of them is nothing to the guards, and takes seconds."""
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, example_inputs, **settings: gm.forward)


@pytest.fixture
def asked(monkeypatch):
    """One entry for each time that Dynamo's own guards were asked: whether they held."""
    answers, check = [], guards.Unchanged._check
    monkeypatch.setattr(guards.Unchanged, "_check", lambda self, m: answers.append(check(self, m)) or answers[-1])
    return answers


@pytest.fixture
def compilations(monkeypatch):
    """One entry for each graph with convolutions that the backend was given."""
    found, guard = [], lower.guard_by_versions
    monkeypatch.setattr(lower, "guard_by_versions", lambda call: found.append(1) or guard(call))
    return found


def images():
    return torch.randn(2, 3, 6, 5)


@both
@torch.no_grad()
def test_not_asked_without_a_change(blocked, asked, compilations):
    model, x = block(), images()
    model = model.to(tb.blocked) if blocked else model
    function = compiled(model)
    function(x)
    asked.clear()
    for _ in range(5):
        assert_close(function(x), dense(model(x)))
        model.layers.a.weight.mul_(1.5)
    assert asked == [] and len(compilations) == 1


@torch.no_grad()
@pytest.mark.parametrize("change", [lambda m: m.train().eval(), lambda m: setattr(m.layers.a, "name", "first")])
def test_asked_once_after_a_change(change, asked, compilations):
    """That they find nothing wrong with: the same code runs, as fast as before."""
    model, x = block(), images()
    function = compiled(model)
    function(x)
    asked.clear()
    change(model)
    for _ in range(4):
        assert_close(function(x), model(x))
    assert asked == [True] and len(compilations) == 1


@torch.no_grad()
def test_model_that_changes_from_call_to_call(asked, monkeypatch):
    """Its versions are taken ever less often, until it stops."""
    taken, versions = [], guards.ModuleVersions
    monkeypatch.setattr(guards, "ModuleVersions", lambda modules: taken.append(1) or versions(modules))
    model, x = block(), images()
    function = compiled(model)
    function(x)
    for calls, most in ((32, 8), (32, 1)):
        asked.clear()
        taken.clear()
        for _ in range(calls):
            if most > 1:
                model.layers.a.name = object()
            assert_close(function(x), model(x))
        assert all(asked) and len(taken) <= most
    asked.clear()
    for _ in range(4):
        function(x)
    assert asked == []
    model.layers.a.name = object()
    for _ in range(4):
        function(x)
    assert asked == [True]


@torch.no_grad()
def test_model_without_versions(asked, compilations, monkeypatch):
    """Such as one whose modules hold their parameters in no dict: Dynamo is asked each time."""

    def refuse(modules):
        raise TypeError

    monkeypatch.setattr(guards, "ModuleVersions", refuse)
    model, x = block(), images()
    function = compiled(model)
    for _ in range(3):
        assert_close(function(x), model(x))
    model.layers.n.eps = 3.0
    assert_close(function(x), model(x))
    assert asked.count(True) > 3 and len(compilations) == 2


class Doubled(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


CHANGES = {
    "training": lambda m: m.layers.n.train(),
    "stride": lambda m: setattr(m.layers.a, "stride", (2, 2)),
    "eps": lambda m: setattr(m.layers.n, "eps", 3.0),
    "parameter": lambda m: setattr(m.layers.b, "weight", nn.Parameter(m.layers.b.weight.to_dense() * 2)),
    "parameter to None": lambda m: setattr(m.layers.b, "bias", None),
    "buffer": lambda m: setattr(m.layers.n, "running_mean", torch.ones(17)),
    "module": lambda m: setattr(m.layers, "b", nn.Identity()),
    "module of other sizes": lambda m: setattr(m.layers, "b", conv(17, 17, 5)),
    "module of other groups": lambda m: setattr(m.layers, "b", conv(17, 17, groups=17)),
    "forward": lambda m: setattr(m.layers.b, "forward", lambda y: y * 2),
    "class": lambda m: setattr(m.layers.b, "__class__", Doubled),
    "function": lambda m: setattr(m, "function", lambda layers, x: layers.a(x)),
}


@both
@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change, blocked):
    model, x = block(), images()
    model = model.to(tb.blocked) if blocked else model
    function = compiled(model)
    before = dense(function(x)).clone()
    CHANGES[change](model)
    for _ in range(2):
        expected = dense(copy.deepcopy(model)(x))
        answer = dense(function(x)).clone()
        assert_close(answer, expected)
        assert answer.shape != before.shape or not torch.equal(answer, before)


class OtherParameter(nn.Parameter):
    pass


IN_PLACE = {
    "size": lambda m: setattr(m[0].weight, "data", torch.randn(17, 3, 5, 5)),
    "strides": lambda m: m.to(memory_format=torch.channels_last),
    "mark": lambda m: torch._dynamo.mark_static(m[0].bias),
    "class": lambda m: setattr(m[0].bias, "__class__", OtherParameter),
}


@torch.no_grad()
@pytest.mark.parametrize("change", IN_PLACE)
def test_what_no_dict_tells_of_a_parameter_is_seen(change, asked, compilations):
    model, x = nn.Sequential(conv(3, 17)), images()
    function = compiled(model)
    function(x)
    asked.clear()
    IN_PLACE[change](model)
    for _ in range(2):
        assert_close(function(x), model(x))
    assert asked and len(compilations) == 2


def test_gradient_of_a_parameter_that_needed_none(compilations):
    model, x = block().requires_grad_(False), images()
    function = compiled(model)
    assert not function(x).requires_grad
    model.layers.b.bias.requires_grad_(True)
    function(x).sum().backward()
    assert model.layers.b.bias.grad is not None and len(compilations) == 2


class Options(nn.Module):
    """What it reads is behind more than the dicts of modules."""

    factors, limit = 2, 3.0

    def __init__(self):
        super().__init__()
        self.conv, self.list, self.dict, self.object = conv(3, 8), [1, 2], {"add": 1}, type("O", (), {"add": 1})()
        self.hidden = [conv(8, 8)]

    @property
    def offset(self):
        return self.object.add

    def forward(self, x):
        y = self.hidden[0](self.conv(x))
        return y.clamp(max=self.limit) * self.factors + self.list[0] + self.dict["add"] + self.offset


def replace_class_attribute(m):
    type(m).factors = type(m).factors + 1


BEHIND = {
    "list": lambda m: m.list.__setitem__(0, 7),
    "dict": lambda m: m.dict.update(add=7),
    "object": lambda m: setattr(m.object, "add", 7),
    "module in a list": lambda m: setattr(m.hidden[0], "weight", nn.Parameter(m.hidden[0].weight * 2)),
    "stride of a module in a list": lambda m: setattr(m.hidden[0], "stride", (2, 2)),
    "other module in a list": lambda m: m.hidden.__setitem__(0, conv(8, 8)),
    "class": replace_class_attribute,
    "in front of the class": lambda m: setattr(m, "limit", 0.1),
}


@torch.no_grad()
@pytest.mark.parametrize("change", BEHIND)
def test_changes_behind_the_dicts_are_seen(change, monkeypatch):
    monkeypatch.setattr(Options, "factors", 2)
    model, x = Options(), images()
    function = compiled(model)
    before = function(x).clone()
    BEHIND[change](model)
    for _ in range(2):
        assert_close(function(x), model(x))
    assert model(x).shape != before.shape or not torch.equal(model(x), before)


@torch.no_grad()
def test_models_that_share_code_have_their_own_versions(asked, compilations):
    models, x = [block() for _ in range(3)], images()
    functions = [compiled(model) for model in models]
    for function in functions:
        function(x)
    asked.clear()
    for _ in range(2):
        for function, model in zip(functions, models, strict=True):
            assert_close(function(x), model(x))
    assert asked == [] and len(compilations) == 1
    models[1].layers.b.weight = nn.Parameter(models[1].layers.b.weight * 2)
    for _ in range(2):
        for function, model in zip(functions, models, strict=True):
            assert_close(function(x), model(x))
    assert asked == [True] and len(compilations) == 1


@torch.no_grad()
def test_other_model_of_the_class(compilations):
    """Of other layers: code of its own."""
    small, large = nn.Sequential(conv(3, 8), nn.ReLU()), nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 8))
    functions, x = [compiled(small), compiled(large)], images()
    for _ in range(3):
        for function, model in zip(functions, (small, large), strict=True):
            assert_close(function(x), model(x))
    assert len(compilations) == 2


GLOBAL = None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["argument", "closure", "global", "default", "two"])
def test_wherever_a_function_has_its_model(kind, asked, compilations, monkeypatch):
    model, x = block(), images()
    monkeypatch.setitem(globals(), "GLOBAL", model)
    functions = {
        "argument": lambda x, m: m(x),
        "closure": lambda x, _: model(x),
        "global": lambda x, _: GLOBAL(x),
        "default": lambda x, _, m=model: m(x),
        "two": lambda x, m: model(x) + m(x),
    }
    function = torch.compile(functions[kind], backend="torch_blocked", fullgraph=True)
    function(x, model)
    asked.clear()
    for _ in range(2):
        assert_close(function(x, model), functions[kind](x, model))
    assert asked == [] and len(compilations) == 1
    model.layers.n.eps = 3.0
    for _ in range(2):
        assert_close(function(x, model), functions[kind](x, model))
    assert len(compilations) == 2
    other = block()
    monkeypatch.setitem(globals(), "GLOBAL", other)
    for _ in range(2):
        assert_close(function(x, other), functions[kind](x, other))


@torch.no_grad()
def test_model_that_is_gone_is_freed(asked):
    x = images()
    for _ in range(3):
        model = block()
        gone = weakref.ref(model.layers.b.weight)
        assert_close(compiled(model)(x), model(x))
        del model
        gc.collect()
        assert gone() is None


class Counting(nn.Module):
    """Writes to itself in each call."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = conv(3, 8), torch.zeros(1)

    def forward(self, x):
        self.last = self.last + 1
        return self.conv(x) + self.last


@torch.no_grad()
def test_model_that_writes_to_itself(compilations):
    model, x = Counting(), images()
    like, function = copy.deepcopy(model), compiled(model)
    for _ in range(5):
        assert_close(function(x), like(x))
    assert model.last.item() == 5 and len(compilations) == 1


class Sharing(nn.Module):
    """Writes to a buffer that an argument may be."""

    def __init__(self):
        super().__init__()
        self.conv = conv(3, 3)
        self.register_buffer("seen", torch.zeros(2, 3, 6, 5))

    def forward(self, x):
        y = self.conv(x)
        self.seen.add_(1)
        return y + x


@torch.no_grad()
def test_argument_that_is_a_buffer(compilations):
    """What was compiled takes them for two, and would not see the one change with the other."""
    model = Sharing()
    like, function = copy.deepcopy(model), compiled(model)
    for _ in range(2):
        x = images()
        assert_close(function(x), like(x))
    assert len(compilations) == 1
    assert_close(function(model.seen), like(like.seen))
    assert len(compilations) == 2


def test_training(asked, compilations):
    """Training and evaluation take turns: each was compiled once, and asked about once a turn."""
    model, x = block(), images()
    like = copy.deepcopy(model)
    function = compiled(model)
    for _ in range(3):
        for m, f in ((model, function), (like, like)):
            m.train()
            for _ in range(3):
                f(x).square().mean().backward()
                torch.optim.SGD(m.parameters(), lr=0.01).step()
                m.zero_grad()
            m.eval()
        with torch.no_grad():
            for _ in range(3):
                assert_close(function(x), like(x))
    assert len(compilations) == 2 and asked.count(True) <= 2 + 2 * 3


@torch.no_grad()
def test_the_reason_of_a_recompilation_is_dynamos():
    model, x = block(), images()
    function = compiled(model)
    function(x)
    model.layers.n.eps = 3.0
    with dynamo_config.patch(error_on_recompile=True), pytest.raises(Exception, match=r"n.*\.eps == 1e-05"):
        function(x)


@torch.no_grad()
def test_filter_of_guards(asked):
    """The user's own is asked about each model; without its guard no change is seen."""
    model, x, names = block(), images(), []

    def keep(entries):
        names.extend(e.name for e in entries)
        return ["self" not in e.name and "model" not in e.name for e in entries]

    function = torch.compile(model, backend="torch_blocked", options={"guard_filter_fn": keep})
    before = function(x).clone()
    model.layers.n.eps = 3.0
    assert torch.equal(function(x), before)
    assert any("self" in name for name in names)


@torch.no_grad()
def test_filter_that_keeps_the_guards_on_tensors(compilations):
    """Those on arguments are none of ours, also in a list."""
    model, xs = block(), [images()]
    options = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    function = torch.compile(lambda m, xs: m(xs[0]), backend="torch_blocked", dynamic=False, options=options)
    assert_close(function(model, xs), model(xs[0]))
    xs = [torch.randn(1, 3, 9, 9)]
    assert_close(function(model, xs), model(xs[0]))
    assert len(compilations) == 2


@torch.no_grad()
def test_skipped_guards(asked):
    """The user promises that what was compiled fits."""
    model, x = block(), images()
    function = compiled(model)
    for _ in range(2):
        expected = function(x).clone()
    asked.clear()
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        for _ in range(2):
            assert torch.equal(function(x), expected)
    assert asked == []


@torch.no_grad()
def test_skipped_guards_tell_models_apart():
    models, x = [nn.Sequential(conv(3, 8)), nn.Sequential(conv(3, 8), nn.ReLU()), nn.Sequential(conv(3, 9))], images()
    functions = [compiled(model) for model in models]
    for _ in range(2):
        for function, model in zip(functions, models, strict=True):
            assert_close(function(x), model(x))
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        for function, model in zip(functions, models, strict=True):
            assert_close(function(x), model(x))


@torch.no_grad()
def test_guards_to_be_written_to_a_file_stay_dynamos(asked):
    model, x = block(), images()
    with dynamo_config.patch(caching_precompile=True):
        function = compiled(model)
        function(x)
        assert_close(function(x), model(x))
    assert asked == []


@torch.no_grad()
def test_changes_by_another_thread():
    model, x, stop = block(), images(), threading.Event()
    function = compiled(model)
    function(x)

    def change():
        while not stop.is_set():
            model.layers.a.name = object()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            assert_close(function(x), model(x))
    finally:
        stop.set()
        thread.join()
    model.layers.n.eps = 3.0
    assert_close(function(x), model(x))


@torch.no_grad()
def test_plain_inductor_keeps_its_guards(asked):
    """A graph without convolutions goes to Inductor with the guards it has."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    x = torch.randn(2, 3)
    assert_close(compiled(model)(x), model(x))
    assert asked == []
