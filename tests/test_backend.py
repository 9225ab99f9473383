"""The backend of torch.compile: convolutions fused; answers, gradients and training as in eager mode."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Lambda, assert_close, block, both, compiled, conv, fresh, randomized  # noqa: F401
from conftest import assert_same, dense
from torch import nn
from torch._inductor import compile_fx

import torch_blocked as tb
from torch_blocked.compile import hoist

REORDER = torch.ops.torch_blocked.reorder.default


# ---- Sizes


@both
@pytest.mark.parametrize("how", ["automatic", "marked", "dynamic=True"])
@torch.no_grad()
def test_dynamic_sizes(how, blocked, graphs):
    model = block()
    want = copy.deepcopy(model)
    function = compiled(model.to(tb.blocked) if blocked else model, dynamic=True if how == "dynamic=True" else None)
    for n, h, w in ((2, 6, 5), (3, 9, 8), (5, 12, 17), (7, 15, 11)):
        x = torch.randn(n, 3, h, w)
        if how == "marked":
            for dim in (0, 2, 3):
                torch._dynamo.mark_dynamic(x, dim)
        assert_close(function(x), want(x))
    # With dynamic=True Dynamo traces twice: it takes eps for a dynamic number until AOTAutograd finds that it is none.
    # What takes time, Inductor, runs once.
    assert len(graphs) == (2 if how == "automatic" else 1)


# ---- Training


def gradients(model, function, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = dense(function(x))
    y.square().sum().backward()
    return [y.detach(), x.grad, *(dense(p.grad) for p in model.parameters())]


@both
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_gradients(blocked, training, graphs):
    plain, x = block().train(training), torch.randn(2, 3, 6, 5)
    model = copy.deepcopy(plain)
    model = model.to(tb.blocked) if blocked else model
    function = compiled(Lambda(lambda m, x: m.model(x).to(memory_format=torch.contiguous_format), model=model))
    for actual, expected in zip(gradients(model, function, x), gradients(plain, plain, x), strict=True):
        error = (actual - expected).abs().max()
        assert error <= 1e-4 * expected.abs().max() + 1e-4, error


# What the gradient of a blocked answer is: PyTorch's own of a sum, plain ones and blocked ones of any format.
GIVEN = {
    "sum": lambda y, g: y.sum().backward(),
    "square": lambda y, g: y.square().sum().backward(),
    "plain": lambda y, g: y.backward(g),
    "channels_last": lambda y, g: y.backward(g.to(memory_format=torch.channels_last)),
    "its format": lambda y, g: y.backward(g.to(y.format)),
    "another format": lambda y, g: y.backward(g.to(tb.nChw4c)),
    "twice": lambda y, g: (y.backward(g, retain_graph=True), y.mean().backward()),
}


@pytest.mark.parametrize("backend", ["torch_blocked", "aot_eager"])
@pytest.mark.parametrize("blocked_input", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_gradients_of_a_blocked_answer(name, blocked_input, backend):
    """The answer leaves the compiled code blocked, and is differentiated in eager mode."""
    plain = nn.Sequential(nn.Conv2d(3, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 17, 3))
    model = copy.deepcopy(plain).to(tb.blocked)
    function = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):  # with gradients beside it the second time
        x = torch.randn(2, 3, 7, 6, requires_grad=True)
        y, expected = function(x.to(tb.nChw8c) if blocked_input else x), plain(copied := x.detach().requires_grad_())
        assert isinstance(y, tb.BlockedTensor)
        assert_same(y.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        g = torch.randn_like(expected)
        GIVEN[name](y, g)
        GIVEN["plain" if "format" in name else name](expected, g)
        for p, q in zip((x, *model.parameters()), (copied, *plain.parameters()), strict=True):
            assert_same(p.grad, q.grad, rtol=1e-3, atol=1e-4)


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


def losses(model, function, optimizer, steps):
    """Of a classifier of random images, step by step."""
    torch.manual_seed(1)
    x, target = torch.randn(4, 3, 8, 6), torch.tensor([0, 1, 2, 3])
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(function(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


@both
@pytest.mark.parametrize("backend", ["torch_blocked", "aot_eager"])  # Inductor's own: test_compile.py
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training(name, backend, blocked, graphs):
    """Images and logits are plain; the loss falls as that of the plain model in eager mode does."""
    plain = nn.Sequential(block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(17, 5)).train()
    model = copy.deepcopy(plain)
    model = model.to(tb.blocked) if blocked else model
    function = torch.compile(model, backend=backend, fullgraph=True)
    expected = losses(plain, plain, OPTIMIZERS[name](plain), steps=5)
    torch.testing.assert_close(
        losses(model, function, OPTIMIZERS[name](model), steps=5), expected, rtol=2e-3, atol=1e-4
    )
    assert expected[-1] < expected[0]
    weight = model[0].layers.b.weight
    assert type(weight.grad) is (tb.BlockedTensor if blocked else torch.Tensor)
    assert not blocked or weight.grad.format == weight.format


# ---- Memory


@both
@torch.no_grad()
def test_weights_are_kept_once(blocked, graphs, monkeypatch):
    """A blocked model's are its own; of a plain one's the packed ones lie beside them."""
    made, init = [], hoist.Hoisted.__init__
    monkeypatch.setattr(hoist.Hoisted, "__init__", lambda self, *args: init(self, *args) or made.append(self))
    model = nn.Sequential(conv(16, 64), nn.BatchNorm2d(64), conv(64, 64)).eval()
    compiled(model.to(tb.blocked) if blocked else model)(torch.randn(1, 16, 6, 5))
    kept = sum(v.untyped_storage().nbytes() for values in made[0]._values.values() for v in values if v.dim() > 1)
    assert kept == (0 if blocked else 4 * 9 * (16 * 64 + 64 * 64))


MEMORY = """
import copy, gc, sys, torch, torch_blocked as tb
from torch import nn
from torch_blocked.benchmark import machine
torch.set_num_threads(1)
tb.winograd("never")
with torch.no_grad():
    torch.compile(nn.Conv2d(16, 16, 1), backend="torch_blocked")(torch.randn(1, 16, 4, 4))  # what compilers take once
    x = torch.randn(1, 1024, 4, 4)
    gc.collect(), machine.trim_memory(), machine.reset_peak_memory()
    before = machine.resident_memory()
    model = nn.Sequential(*(nn.Conv2d(1024, 1024, 3, padding=1) for _ in range(8)))  # 302 MB
    if sys.argv[1] == "blocked":
        model = torch.compile(model.to(tb.blocked), backend="torch_blocked")
    model(x)
    gc.collect(), machine.trim_memory(), machine.reset_peak_memory()  # without what compiling took
    for _ in range(3):
        model(x)
    print(machine.peak_memory() - before)
"""


@pytest.mark.slow
def test_memory_of_a_blocked_model():
    """Once compiled it takes at most a tenth more than the plain model in eager mode."""
    peaks = [
        int(subprocess.run([sys.executable, "-c", MEMORY, how], capture_output=True, text=True, check=True).stdout)
        for how in ("plain", "blocked")
    ]
    assert peaks[1] < 1.1 * peaks[0], peaks


# ---- In processes of their own: ISA tiers, no compiler

SMALL = """
import sys, torch, torch_blocked as tb
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 17, 3), nn.BatchNorm2d(17), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(17, 20, 3),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
x = torch.randn(2, 3, 12, 12)
with getattr(torch, sys.argv[1])():
    torch.testing.assert_close(torch.compile(model, backend="torch_blocked")(x), model(x), rtol=1e-4, atol=1e-5)
print(tb.isa())
"""


def run_small(mode, **environment):
    return subprocess.run(
        [sys.executable, "-c", SMALL, mode], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.mark.slow
def test_tiers_take_nothing_from_each_other_s_cache(tmp_path):
    for tier in ("avx2", "default"):
        done = run_small("inference_mode", ATEN_CPU_CAPABILITY=tier, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0 and done.stdout.strip() == tier, done.stderr[-2000:]


@pytest.mark.slow
def test_without_a_compiler(tmp_path):
    done = run_small("no_grad", CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    message = "RuntimeError: torch.compile needs a C++ compiler and /no/such/compiler is none that works: install g++"
    assert any(line.startswith(message) for line in done.stderr.splitlines()), done.stderr[-2000:]


# ---- What stays as it was


def test_without_convolutions(monkeypatch):
    """The graph goes to Inductor whole."""
    given = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, inputs, **how: given.append(how) or gm.forward)
    model, x = nn.Sequential(nn.Linear(5, 7), nn.ReLU()), torch.randn(3, 5)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert given == [{"config_patches": {}}]


OUTPUTS = {
    "convolution": lambda m, x: m.a(x),
    "mean": lambda m, x: m.a(x).mean((2, 3)),
    "one pixel": lambda m, x: m.a(x)[:, :, 0, 0],
    "one image": lambda m, x: m.a(x)[0],
    "flat": lambda m, x: m.a(x).flatten(1),
    "axes last": lambda m, x: m.a(x).permute(0, 2, 3, 1),
    "its input": lambda m, x: (x, m.a(x))[1],
    "softmax": lambda m, x: m.a(x).softmax(1),
    "argmax": lambda m, x: m.a(x).argmax(1),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", OUTPUTS)
@torch.no_grad()
def test_outputs(name, memory_format, graphs):
    model = Lambda(OUTPUTS[name], a=conv(3, 17))
    x = torch.randn(2, 3, 6, 5).to(memory_format=memory_format)
    want, got = model(x), compiled(model)(x)
    assert type(got) is torch.Tensor and got.stride() == torch.empty_like(want).stride()
    assert_close(got.float(), want.float())


# ---- Convolutions of all kinds: name -> (module, shape of src)

KINDS = {
    "grouped": (lambda: nn.Conv2d(32, 64, 3, groups=2), (2, 32, 6, 5)),
    "groups of less than a block": (lambda: nn.Conv2d(12, 20, 3, groups=4), (2, 12, 6, 5)),
    "depthwise": (lambda: nn.Conv2d(17, 17, 3, groups=17), (2, 17, 6, 5)),
    "depthwise of two": (lambda: nn.Conv2d(17, 34, 3, groups=17), (2, 17, 6, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(17, 20, 3, 2, output_padding=1), (2, 17, 6, 5)),
    "transposed, grouped": (lambda: nn.ConvTranspose2d(32, 32, 3, 2, groups=2), (2, 32, 6, 5)),
    "1-D": (lambda: nn.Conv1d(17, 20, 3, padding=1), (2, 17, 9)),
    "3-D": (lambda: nn.Conv3d(17, 20, 3, padding=1), (2, 17, 4, 6, 5)),
    "transposed 1-D": (lambda: nn.ConvTranspose1d(17, 20, 3), (2, 17, 9)),
    "transposed 3-D": (lambda: nn.ConvTranspose3d(17, 20, 3), (2, 17, 4, 6, 5)),
    "same": (lambda: nn.Conv2d(17, 20, 4, padding="same"), (2, 17, 6, 5)),
    "circular": (lambda: nn.Conv2d(17, 20, 3, padding=1, padding_mode="circular"), (2, 17, 6, 5)),
    "dilated": (lambda: nn.Conv2d(17, 20, 3, stride=2, dilation=2), (2, 17, 9, 8)),
    "no batch": (lambda: nn.Conv2d(17, 20, 3), (17, 6, 5)),
    "empty batch": (lambda: nn.Conv2d(17, 20, 3), (0, 17, 6, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_kinds_of_convolution(name, dtype, graphs):
    make, shape = KINDS[name]
    model, x = nn.Sequential(make(), nn.ReLU()).to(dtype), torch.randn(shape, dtype=dtype)
    want, got = model(x), compiled(model)(x)
    assert got.dtype == want.dtype and got.stride() == want.stride()
    torch.testing.assert_close(got, want)


@torch.no_grad()
def test_autocast(graphs):
    model, x = block(), torch.randn(2, 3, 6, 5)

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    want, got = function(x), compiled(function)(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)


# ---- Whole parts of networks stay blocked


def dense_layer(m, x):
    y = F.relu(m.a(x))
    return m.c(F.relu(m.n(torch.cat([y, m.b(y)], 1))))


def squeeze_excite(m, x):
    y = F.silu(m.a(x))
    return m.d(y * torch.sigmoid(m.c(F.silu(m.b(F.adaptive_avg_pool2d(y, 1))))))


def u_net(m, x):
    y = F.relu(m.a(x))
    return m.d(torch.cat([y, m.c(F.relu(m.b(F.max_pool2d(y, 2))))], 1))


NETWORKS = {
    "residual block": block,
    "dense layer": lambda: Lambda(dense_layer, a=conv(3, 32), b=conv(32, 16), n=nn.BatchNorm2d(48), c=conv(48, 20, 1)),
    "squeeze and excitation": lambda: Lambda(
        squeeze_excite, a=conv(3, 24), b=conv(24, 6, 1), c=conv(6, 24, 1), d=conv(24, 20, 1)
    ),
    "U-Net": lambda: Lambda(u_net, a=conv(3, 16), b=conv(16, 32), c=nn.ConvTranspose2d(32, 16, 2, 2), d=conv(32, 17)),
}


@both
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_no_fallback_and_no_reorder(name, blocked, graphs):
    model, x = randomized(NETWORKS[name]()), torch.randn(2, 3, 8, 6)
    want = model(x)
    with tb.fallback("error"):
        got = compiled(model.to(tb.blocked) if blocked else model)(x)
    assert_close(got, want)
    assert len(graphs) == 1 and graphs.count(REORDER) == 0


@both
@torch.no_grad()
def test_compiled_by_inductor(blocked):
    """The rest of the file runs graphs as they are; here their code is generated, of dynamic sizes."""
    model = block()
    want = copy.deepcopy(model)
    function = compiled(model.to(tb.blocked) if blocked else model, dynamic=True)
    for n, h, w in ((2, 6, 5), (3, 9, 8)):
        x = torch.randn(n, 3, h, w)
        for _ in range(2):
            assert_close(function(x), want(x))
    for m in (model, want):
        m.layers.b.weight.mul_(2)
    assert_close(function(x), want(x))


@pytest.mark.slow
def test_training_compiled_by_inductor():
    plain, x = block().train(), torch.randn(2, 3, 6, 5)
    model = copy.deepcopy(plain)
    for actual, expected in zip(gradients(model, compiled(model), x), gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
