"""torch.compile on blocked tensors: one graph, the same answers, no recompilation for each size."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, compiled_anew
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.reorder import to_dense

SIZE = (2, 3, 10, 9)


@pytest.fixture(autouse=True)
def fresh():
    tb.reset_counters()
    with compiled_anew():
        yield
    tb.reset_counters()


FIRST, SECOND = torch.randn(20, 3, 3, 3), torch.randn(17, 20, 3, 3)
FIRST_BLOCKED, SECOND_BLOCKED = FIRST.to(tb.Ohwi16o), SECOND.to(tb.OIhw16i16o)


def two_convolutions(x):
    return F.conv2d(F.relu(F.conv2d(x, FIRST_BLOCKED)), SECOND_BLOCKED)


def two_convolutions_plain(x):
    return F.conv2d(F.relu(F.conv2d(x, FIRST)), SECOND)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


# ---- Answers


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_convolutions_of_a_blocked_tensor(x, backend):
    y = compiled(two_convolutions, backend)(x.to(tb.blocked))
    assert type(y) is tb.BlockedTensor and y.format == two_convolutions(x.to(tb.blocked)).format
    assert_same(y, two_convolutions_plain(x), rtol=1e-4, atol=1e-4)


INSIDE = {
    "in": lambda x: x.to(tb.blocked),
    "in and out": lambda x: (x.to(tb.blocked) * 2).to_dense(),
    "channels_last": lambda x: (x.to(memory_format=tb.nChw8c) + 1).to(memory_format=torch.channels_last),
    "contiguous": lambda x: (x.to(tb.nChw8c) + 1).contiguous(),
    "contiguous(channels_last)": lambda x: (x.to(tb.nChw8c) + 1).contiguous(memory_format=torch.channels_last),
    "memory_format=contiguous": lambda x: (x.to(tb.nChw8c) + 1).to(memory_format=torch.contiguous_format),
    "chwn": lambda x: (x.to(tb.nChw8c) + 1).to(tb.chwn),
    "blocked to blocked": lambda x: (x.to(tb.nChw8c) + 1).to(tb.OIhw4i16o4i),
    "in it already": lambda x: (x.to(tb.nChw8c).to(tb.nChw8c) + 1).to(tb.nChw8c),
    "clone": lambda x: x.clone(memory_format=tb.nChw8c).relu().clone(memory_format=torch.channels_last),
    "dtype": lambda x: x.to(torch.float64, tb.nChw8c).exp(),
    "factory": lambda x: torch.zeros_like(x, memory_format=tb.nChw8c) + x,
    "is_contiguous": lambda x: x.to(tb.nChw8c) if not x.is_contiguous(memory_format=tb.nChw8c) else x,
    "in place": lambda x: x.to(tb.nChw8c).add_(1).mul_(2),
    "mixed": lambda x: x.to(tb.nChw8c) * x + x.to(tb.nChw16c),
}


@pytest.mark.parametrize("source", ["plain", "blocked"])
@pytest.mark.parametrize("name", INSIDE)
def test_formats_inside_a_graph(x, name, source):
    x = x.to(tb.nChw16c) if source == "blocked" else x
    expected = INSIDE[name](x.clone())
    actual = compiled(INSIDE[name])(x)
    assert type(actual) is type(expected) and actual.stride() == expected.stride()
    assert_same(actual, to_dense(expected))
    if type(actual) is tb.BlockedTensor:
        assert actual.format == expected.format


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_backends(x, backend):
    function = INSIDE["in and out"]
    torch.testing.assert_close(compiled(function, backend)(x), function(x))


FRESH = """
import torch, torch_blocked as tb
x = torch.randn(2, 3, 5, 4)
y = torch.compile(lambda x: x.to({fmt}).relu(), backend="aot_eager", fullgraph=True)(x)
assert type(y) is tb.BlockedTensor and torch.equal(y.to_dense(), x.relu())
"""


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["tb.blocked", 'tb.format("Chwn4c")'])
def test_first_of_all_in_a_process(fmt):
    """Nothing was called before that could have filled a cache."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRESH.format(fmt=fmt)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_writes_show_outside(x):
    y = x.to(tb.nChw8c)
    compiled(lambda y: y.add_(1).mul_(2))(y)
    assert_same(y, (x + 1) * 2)


def test_each_format_is_a_graph_of_its_own(x):
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(lambda x: x.relu() + 1, counter)
    fmts = (tb.nChw16c, tb.nChw8c, tb.nchw, tb.format("nhwC16c"), tb.nChw16c, tb.nChw8c)
    for fmt in fmts:
        y = function(x.to(fmt))
        assert tb.MemoryDesc.of(y).matches(fmt.tag)
        assert_same(y, x.relu() + 1)
    assert counter.frame_count <= 4


# ---- Sizes that change


@pytest.mark.parametrize("source", ["plain", "blocked"])
def test_dynamic_batch(source):
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(lambda x: two_convolutions(x.to(tb.blocked)), counter)
    for n in (2, 3, 5, 7):
        x = torch.randn(n, 3, 10, 9)
        given = x.to(tb.blocked) if source == "blocked" else x
        torch._dynamo.mark_dynamic(given, 0)
        assert_same(function(given), two_convolutions_plain(x), rtol=1e-4, atol=1e-4)
    # Dynamo marks the physical tensor of a wrapper itself only where it has as many axes.
    assert counter.frame_count <= (2 if source == "blocked" else 1)


def test_dynamic_images():
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(lambda x: two_convolutions(x.to(tb.blocked)).to_dense(), counter, dynamic=True)
    for n in (5, 6, 7):  # no size is one of the weights': Dynamo would take them for the same number
        x = torch.randn(n, 3, 8 + n, 17 - n)
        torch.testing.assert_close(function(x), two_convolutions_plain(x), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_dynamic_channels():
    function = compiled(lambda x: (x.to(tb.nChw16c).relu() + 1).to_dense(), dynamic=True)
    for n in (3, 5, 16, 33):
        x = torch.randn(2, n, 3, 4)
        torch.testing.assert_close(function(x), x.relu() + 1)


def test_tracing_leaves_the_counters_alone():
    x = torch.randn(5, 3, 10, 9)
    torch._dynamo.mark_dynamic(x, 0)
    with tb.count() as counts:
        compiled(lambda x: (x.to(tb.nChw8c) * 2).to_dense())(x)
    for seen in (counts, tb.counters()):
        assert {type(n) for n in (seen.reorder_bytes, seen.left, *seen.reorders.values())} == {int}


# ---- Gradients


@pytest.mark.parametrize("source", ["plain", "blocked"])
def test_gradient_of_the_input(x, source):
    leaf = (x.to(tb.blocked) if source == "blocked" else x).requires_grad_()
    compiled(lambda x: (x.to(tb.blocked).square() * 3).to_dense())(leaf).sum().backward()
    assert source == "blocked" or type(leaf.grad) is torch.Tensor
    assert_same(leaf.grad, 6 * x.detach())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.bn, self.second = nn.Conv2d(3, 20, 3, padding=1), nn.BatchNorm2d(20), nn.Conv2d(20, 17, 3)
        self.fc = nn.Linear(17, 4)

    def forward(self, x):
        return self.fc(self.second(F.relu(self.bn(self.first(x)))).mean((2, 3)))


def test_model_in_eval(x):
    plain = Net().eval()
    model = copy.deepcopy(plain).to(tb.blocked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), plain(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training(x, backend):
    """The region ends in plain tensors; its parameters are blocked."""
    plain = Net()
    model = copy.deepcopy(plain).to(tb.blocked)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    function = compiled(model, backend)
    for _ in range(3):
        for f, optimizer in zip((function, plain), optimizers, strict=True):
            optimizer.zero_grad()
            f(x).square().mean().backward()
            optimizer.step()
    assert type(model.second.weight) is tb.BlockedTensor and type(model.second.weight.grad) is tb.BlockedTensor
    for p, q in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert_same(p, q, rtol=1e-3, atol=1e-4)


def test_a_whole_training_step_with_graph_breaks(x):
    plain = Net()
    model = copy.deepcopy(plain).to(tb.blocked)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for m, f in ((model, torch.compile(step, backend="aot_eager")), (plain, step)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            f(m, optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(p.detach(), q.detach(), rtol=1e-3, atol=1e-4)


BROKEN = {
    "view_blocked": lambda x: tb.view_strided(
        tb.view_blocked(x.mean((2, 3), True).repeat(1, 16, 1, 1), tb.nChw16c) + 1
    ),
    "from_physical": lambda x: tb.from_physical(x[..., None].repeat(1, 1, 1, 1, 8), (2, 24, 10, 9), tb.nChw8c) + 1,
    "deepcopy": lambda x: copy.deepcopy(x.to(tb.nChw8c)) + 1,
    "backward": lambda x: (x.to(tb.nChw8c) ** 2).sum().backward(inputs=[x]) or x.grad * 1,
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_graph_still_works(x, name):
    a, b = x.clone().requires_grad_(name == "backward"), x.clone().requires_grad_(name == "backward")
    actual, expected = torch.compile(BROKEN[name], backend="aot_eager")(a), BROKEN[name](b)
    assert_same(actual, to_dense(expected))


def test_export(x):
    model = Net().eval().to(tb.blocked)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch_blocked", "inductor"])
def test_the_cache_on_disk_is_of_one_build(tmp_path, monkeypatch, backend):
    """What Inductor compiled is taken again by the same build, and not by another: its operators may differ."""
    model = nn.Conv2d(3, 17, 3).to(tb.blocked)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for build in ("one", "one", "another"):
        monkeypatch.setattr(library, "fingerprint", lambda build=build: build)
        torch._dynamo.reset()
        counters.clear()
        with (
            torch.no_grad(),
            inductor_config.patch(fx_graph_cache=True),
            functorch_config.patch(enable_autograd_cache=False),  # it is asked first, and has no build of its own
            torch.compiler.config.patch(cache_key_tag="the user's"),
        ):
            if backend == "inductor":
                library.tag_caches()
            torch.compile(model, backend=backend)(torch.randn(1, 3, 6, 5))
        assert counters["inductor"]["fxgraph_cache_bypass"] == 0
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits == [0, 1, 0]


def test_importing_tags_the_caches_on_disk():
    assert library.fingerprint() in torch.compiler.config.cache_key_tag
