"""Blocked tensors and models in the rest of PyTorch and beside it: NumPy, DLPack, checkpoints, transforms, tools."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
import torch.utils.mkldnn
from conftest import assert_same, dense
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import fuse_conv_bn_eval, parametrizations, prune
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils.flop_counter import FlopCounterMode

import torch_blocked as tb

SIZE = (2, 20, 3, 4)


@pytest.fixture
def x():
    return torch.randn(SIZE)


def one_line(error):
    return 0 < len(str(error.value)) < 500 and "\n" not in str(error.value)


def net():
    layers = nn.Conv2d(20, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 5)).eval()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return model


@pytest.fixture
def models():
    """A plain model and the same blocked."""
    model = net()
    return model, copy.deepcopy(model).to(tb.blocked)


# ---- NumPy

ARRAYS = {
    "asarray": np.asarray,
    "array": np.array,
    "array of doubles": lambda t: np.array(t, dtype=np.float64),
    "asarray of doubles": lambda t: np.asarray(t, dtype=np.float64),
    "numpy": lambda t: t.numpy(),
    "numpy(force)": lambda t: t.numpy(force=True),
    "stack": lambda t: np.stack([t, t]),
    "tolist": lambda t: np.array(t.tolist(), np.float32),
    "from_dlpack": np.from_dlpack,
    "from_dlpack(copy)": lambda t: np.from_dlpack(t, copy=True),
    "a part": lambda t: np.asarray(t[:, 3:18]),
    "a part by DLPack": lambda t: np.from_dlpack(t[0, 3]),
    "tensor": lambda t: torch.tensor(t).numpy(),
    "as_tensor": lambda t: torch.as_tensor(t, dtype=torch.float64).numpy(),
    "new_tensor": lambda t: torch.zeros(1).new_tensor(t).numpy(),
}


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:__array__ implementation")
@pytest.mark.parametrize("tag", ["nChw16c", "nChw8c", "OIhw4i16o4i"])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(x, name, tag):
    array, expected = ARRAYS[name](x.to(tb.format(tag))), ARRAYS[name](x)
    assert type(array) is np.ndarray and array.dtype == expected.dtype and np.array_equal(array, expected)


def test_arrays_that_lose_no_write(x):
    """A copy that stands for shared memory is read-only; one that was asked for is not."""
    y = x.to(tb.nChw16c)
    assert not np.asarray(y).flags.writeable and not y.numpy().flags.writeable
    assert np.array(y).flags.writeable and y.numpy(force=True).flags.writeable
    assert np.asarray(y, dtype=np.float64).flags.writeable
    y.physical.numpy()[...] = 0
    assert not y.any()


@pytest.mark.parametrize("name", ["numpy", "asarray", "from_dlpack"])
def test_what_requires_a_gradient_is_refused_as_plain(x, name):
    with pytest.raises((RuntimeError, BufferError)) as expected:
        ARRAYS[name](x.clone().requires_grad_())
    with pytest.raises(type(expected.value)) as error:
        ARRAYS[name](x.to(tb.nChw16c).requires_grad_())
    assert str(error.value) == str(expected.value)
    with torch.no_grad():  # enough for NumPy, not for DLPack
        if name == "from_dlpack":
            with pytest.raises(BufferError):
                ARRAYS[name](x.to(tb.nChw16c).requires_grad_())
        else:
            assert np.array_equal(ARRAYS[name](x.to(tb.nChw16c).requires_grad_()), x.numpy())


def test_no_copy_is_refused(x):
    y = x.to(tb.nChw16c)
    for make, kind in ((np.from_dlpack, BufferError), (torch.from_dlpack, BufferError), (np.array, ValueError)):
        with pytest.raises(kind):
            make(y, copy=False)


def test_item(x):
    y = x.to(tb.nChw16c)
    assert y[1, 17, 2, 3].item() == x[1, 17, 2, 3].item() and y[:1, :1, :1, :1].item() == x[0, 0, 0, 0].item()
    with pytest.raises(RuntimeError):
        y.item()


# ---- DLPack


def test_dlpack(x):
    assert torch.equal(torch.from_dlpack(x.to(tb.nChw16c)), x)
    assert x.to(tb.nChw16c).__dlpack_device__() == x.__dlpack_device__()


def test_dlpack_of_a_part_is_up_to_date(x):
    y = x.to(tb.nChw16c)
    part = y[:, 3:18]
    y.add_(1)
    assert torch.equal(torch.from_dlpack(part.to_dense() if type(part) is tb.BlockedTensor else part), x[:, 3:18] + 1)


def test_what_reaches_for_bytes_is_refused(x):
    y = x.to(tb.nChw16c)
    for reach in (torch.utils.dlpack.to_dlpack, torch.Tensor.data_ptr, torch.Tensor.__dlpack__):
        with pytest.raises(RuntimeError, match=r"\.to_dense\(\)") as error:
            reach(y)
        assert one_line(error)


# ---- Comparing and printing


@pytest.mark.parametrize("fmt", [None, tb.nChw16c, tb.nChw8c], ids=repr)
def test_assert_close(x, fmt):
    y, other = x.to(tb.nChw16c), x if fmt is None else x.to(fmt)
    for a, b in ((y, other), (other, y), ([y], [other]), ({"a": other}, {"a": y}), (nn.Parameter(y), other)):
        torch.testing.assert_close(a, b)
    wrong = x.clone()
    wrong[1, 17, 2, 3] += 1
    wrong = wrong if fmt is None else wrong.to(fmt)
    for pair in ((y, wrong), (wrong, y)):
        with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 480[^$]*index \(1, 17, 2, 3\)"):
            torch.testing.assert_close(*pair)
    with pytest.raises(AssertionError, match="dtype"):
        torch.testing.assert_close(y, other.double())
    with pytest.raises(AssertionError, match="shape"):
        torch.testing.assert_close(y, other[:1])


def words(text):
    return text[text.index("[") : text.rindex("]") + 1].split()


@pytest.mark.parametrize("size", [SIZE, (1, 1, 1, 1), (3, 40, 9, 9), (7, 8, 7, 6), (300, 17, 1, 1)], ids=str)
@pytest.mark.parametrize("tag", ["nChw16c", "Chwn4c", "OIhw4i16o4i"])
@pytest.mark.parametrize("options", [{}, {"threshold": 5, "edgeitems": 1, "precision": 2}, {"sci_mode": True}], ids=str)
def test_values_print_as_plain_ones(size, tag, options):
    x = torch.randn(size)
    try:
        torch.set_printoptions(**options)
        with tb.count() as counts:
            assert words(repr(x.to(tb.format(tag)).permute(0, 1, 3, 2))) == words(repr(x.permute(0, 1, 3, 2)))
        assert sum(counts.reorders.values()) == 1  # the conversion; nothing for printing
        assert torch._tensor_str.PRINT_OPTS.sci_mode == options.get("sci_mode")
    finally:
        torch.set_printoptions(profile="default")


def test_printing_reads_what_it_shows():
    """64 GB of zeros that are one element."""
    data = torch.zeros(1).expand(1024, 16, 1024, 1024, 16)
    y = tb.BlockedTensor(data, tb.nChw16c.blocking, torch.Size((1024, 256, 1024, 1024)))
    assert len(repr(y)) < 20000 and "size=(1024, 256, 1024, 1024)" in repr(y)


def test_printing_inside_transforms(x):
    seen = []
    vmap(lambda t: seen.append(repr(t)) or t)(x.to(tb.nChw16c))
    grad(lambda t: seen.append(repr(t)) or t.sum())(x.to(tb.nChw16c))
    assert all("BlockedTensor(" in text and "format=nChw16c" in text for text in seen)


def test_printing_what_has_no_values(x):
    y = x.to(tb.nChw16c)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tb.BlockedTensor(mode.from_tensor(y.physical), y.blocking, y.shape)
    half = torch.Tensor._make_wrapper_subclass(tb.BlockedTensor, SIZE)
    for t in (fake, half, y.to("meta"), y.double().to("meta")):
        text = repr(t)
        assert text.startswith("BlockedTensor(") and text.count("(") == text.count(")") and f"size={SIZE}" in text


# ---- Checkpoints


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(17, 17, 3, padding=1, bias=False)
        self.second, self.bn = nn.Conv2d(17, 17, 3, padding=1), nn.BatchNorm2d(17)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.randn(1, 17, 4, 4))

    def forward(self, x):
        return self.bn(self.second(self.first(x))) * self.mask


def test_dense_state_dict():
    plain = Tied()
    model = copy.deepcopy(plain).to(tb.blocked).bfloat16()
    state, expected = tb.dense_state_dict(model), plain.bfloat16().state_dict()
    assert list(state) == list(expected) and type(state) is type(expected) and state._metadata == expected._metadata
    for key, tensor in state.items():
        assert type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.requires_grad
        assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key])
    assert state["first.weight"] is state["second.weight"]
    assert state["bn.running_mean"].data_ptr() == model.bn.running_mean.data_ptr()
    assert type(tb.dense_state_dict(model.state_dict())["first.weight"]) is torch.Tensor
    assert all(t.is_contiguous() for t in tb.dense_state_dict(plain.to(memory_format=torch.channels_last)).values())
    for bad in (3, None, torch.zeros(1)):
        with pytest.raises(TypeError) as error:
            tb.dense_state_dict(bad)
        assert one_line(error)


WITHOUT = """
import sys, torch
sys.modules["torch_blocked"] = None
state = torch.load(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Conv2d(17, 17, 3), torch.nn.BatchNorm2d(17)).eval()
optimizer = torch.optim.Adam(model.parameters())
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
model(state["x"]).sum().backward()
optimizer.step()
assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(model.parameters(), state["expected"]))
"""


def test_a_dense_checkpoint_needs_no_torch_blocked(tmp_path):
    model, x = nn.Sequential(nn.Conv2d(17, 17, 3), nn.BatchNorm2d(17)).eval().to(tb.blocked), torch.randn(2, 17, 5, 5)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    saved = {"model": tb.dense_state_dict(model), "optimizer": tb.dense_state_dict(optimizer), "x": x}
    saved = copy.deepcopy(saved)
    step()
    torch.save(saved | {"expected": [dense(p.detach()) for p in model.parameters()]}, tmp_path / "checkpoint.pt")
    subprocess.run([sys.executable, "-c", WITHOUT, tmp_path / "checkpoint.pt"], check=True, timeout=120)


@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_checkpoint_into_a_blocked_model(assign):
    """Copied, the values take the model's format; assigned, the model takes the checkpoint's."""
    source, model, x = Tied(), Tied().to(tb.blocked), torch.randn(2, 17, 4, 4)
    assert not any(model.load_state_dict(source.state_dict(), strict=True, assign=assign))
    assert (type(model.first.weight) is tb.BlockedTensor) == (not assign)
    assert_same(model.eval()(x), source.eval()(x), rtol=1e-4, atol=1e-4)


def test_a_blocked_checkpoint_goes_through_a_file(x):
    file = io.BytesIO()
    torch.save(Tied().to(tb.blocked).state_dict(), file)
    file.seek(0)
    assert not any(Tied().load_state_dict(torch.load(file), strict=True))


# ---- mkldnn


def test_mkldnn(x):
    y = x.to(tb.nChw16c)
    assert y.to_mkldnn().layout == torch._mkldnn and torch.equal(y.to_mkldnn().to_dense(), x)
    back = x.to_mkldnn().to(tb.nChw16c)
    assert type(back) is tb.BlockedTensor
    assert_same(back, x, rtol=0, atol=0)
    leaf = x.clone().requires_grad_()
    (leaf.to_mkldnn().to(tb.blocked) * 2).sum().backward()
    assert_same(leaf.grad, torch.full(SIZE, 2.0))


def test_mkldnn_beside_blocked(x):
    weight = torch.randn(24, 20, 3, 3)
    answer = torch.conv2d(x.to_mkldnn(), weight.to(tb.blocked))
    assert_same(answer.to_dense(), torch.conv2d(x, weight), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"\.to_dense\(\)") as error:
        x.to_mkldnn() + x.to(tb.nChw16c)
    assert one_line(error)


def test_mkldnn_modules():
    plain = nn.Conv2d(20, 24, 3).eval()
    model, x = torch.utils.mkldnn.to_mkldnn(copy.deepcopy(plain).to(tb.blocked)), torch.randn(2, 20, 5, 5)
    assert_same(model(x.to_mkldnn()).to_dense(), plain(x), rtol=1e-4, atol=1e-4)


# ---- torch.func

EXAMPLES = {
    "relu": lambda m, x: torch.relu(x),
    "conv": lambda m, x: m[0](x[None])[0],
    "bn": lambda m, x: nn.functional.batch_norm(x[None], x.mean((1, 2)), x.var((1, 2)))[0],
    "pool": lambda m, x: m[3](x[None])[0] + 1,
    "net": lambda m, x: m(x[None])[0],
    "to": lambda m, x: x.to(tb.nCw16c if x.dim() == 2 else tb.format("aBc16b")) * 2,
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("axis", [0, 3])
def test_vmap(models, name, axis):
    x = torch.randn(2, 20, 6, 6)
    function, answers = EXAMPLES[name], []
    for model, t in zip(models, (x, x.to(tb.blocked)), strict=True):
        t = t if axis == 0 else t.permute(1, 2, 3, 0)
        answers.append(vmap(lambda t, m=model: function(m, t), in_dims=axis)(t))
    assert_same(answers[1], dense(answers[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocked_input", [False, True])
def test_gradients_of_each_example(models, blocked_input):
    x, target, answers = torch.randn(3, 20, 6, 6), torch.tensor([1, 4, 0]), []
    for model in models:
        state = {name: p.detach() for name, p in model.named_parameters()}

        def loss(state, x, target, model=model):
            return nn.functional.cross_entropy(functional_call(model, state, (x[None],)), target[None])

        images = x.to(tb.blocked) if blocked_input and model is models[1] else x
        answers.append(vmap(grad(loss), in_dims=(None, 0, 0))(state, images, target))
    for name, expected in answers[0].items():
        assert_same(answers[1][name], expected, rtol=1e-4, atol=1e-4)


DERIVATIVES = {
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones(1, 5))[0],
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(models, name):
    plain, blocked = models
    x = torch.randn(1, 20, 5, 5)
    expected = DERIVATIVES[name](plain, x)
    for t in (x, x.to(tb.blocked)):
        assert_same(dense(DERIVATIVES[name](blocked, t)) + 0, expected, rtol=1e-4, atol=1e-4)
    converting = DERIVATIVES[name](lambda t: plain(t.to(tb.nChw16c).to(tb.nChw8c).to_dense()), x)
    assert_same(converting, expected, rtol=1e-4, atol=1e-4)


# ---- torch.fx and hooks


class Converting(nn.Module):
    def __init__(self, fmt):
        super().__init__()
        self.conv, self.fmt = nn.Conv2d(20, 24, 3), fmt

    def forward(self, x):
        return self.conv(x.to(self.fmt)).to(memory_format=self.fmt).relu().to_dense()


def test_symbolic_trace(models):
    plain, blocked = models
    x, traced = torch.randn(2, 20, 6, 6), torch.fx.symbolic_trace(blocked)
    for model in (traced, copy.deepcopy(traced)):
        assert_same(model(x.to(tb.blocked)), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fmt", [tb.blocked, tb.nChw8c], ids=repr)
def test_symbolic_trace_of_conversions(fmt):
    model, x = Converting(fmt), torch.randn(2, 20, 6, 6)
    traced = torch.fx.symbolic_trace(model)
    with tb.count() as counts:
        assert_same(traced(x), model(x))
    assert counts.left >= 2
    assert "torch_blocked" in traced.code


def seen_by_hooks(model, x):
    """What each kind of hook on the first layer sees, as sums, with values changed on the way."""
    seen, model, x = [], copy.deepcopy(model), x.requires_grad_()

    def note(name, *tensors):
        seen.append((name, [None if t is None else float(dense(t.detach()).double().sum()) for t in tensors]))

    layer = model[0]
    layer.register_forward_pre_hook(lambda m, inputs: note("pre", *inputs))
    layer.register_forward_hook(lambda m, inputs, output: note("forward", output) or output * 2)
    layer.register_full_backward_pre_hook(lambda m, grads: note("backward pre", *grads))
    layer.register_full_backward_hook(lambda m, to, grads: note("backward", *to, *grads) or tuple(3 * g for g in to))
    layer.weight.register_hook(lambda g: note("weight", g))
    layer.weight.register_post_accumulate_grad_hook(lambda p: note("accumulated", p.grad))
    hidden = layer(x)
    hidden.register_hook(lambda g: note("tensor", g) or g * 2)
    hidden.retain_grad()
    model[1:](hidden).square().sum().backward()
    note("gradients", hidden.grad, x.grad)
    return seen


@pytest.mark.parametrize("blocked_input", [False, True])
def test_hooks(models, blocked_input):
    x = torch.randn(2, 20, 6, 6)
    expected = seen_by_hooks(models[0], x.clone())
    seen = seen_by_hooks(models[1], x.to(tb.blocked) if blocked_input else x.clone())
    assert [name for name, _ in seen] == [name for name, _ in expected]
    for (name, actual), (_, right) in zip(seen, expected, strict=True):
        assert actual == pytest.approx(right, rel=1e-3, abs=1e-3), name


# ---- torch.nn.utils


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 2 + weight.flip(-1)


REWRITES = {
    "parametrization": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Scaled()),
    "weight_norm": parametrizations.weight_norm,
    "weight_norm of inputs": lambda m: parametrizations.weight_norm(m, dim=1),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "l1_unstructured": lambda m: prune.l1_unstructured(m, "weight", 0.3),
    "ln_structured": lambda m: prune.ln_structured(m, "weight", 0.5, 2, 0),
    "random_unstructured": lambda m: prune.random_unstructured(m, "weight", 0.3),
    "pruning removed": lambda m: prune.remove(prune.l1_unstructured(m, "weight", 0.3), "weight"),
    "weight_norm removed": lambda m: nn.utils.parametrize.remove_parametrizations(
        parametrizations.weight_norm(m), "weight"
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("name", REWRITES)
@pytest.mark.parametrize("order", ["blocked first", "blocked last"])
def test_rewritten_weights(name, order):
    plain, x, answers = nn.Conv2d(20, 24, 3), torch.randn(2, 20, 6, 6), []
    for blocked in (False, True):
        torch.manual_seed(1)
        model = copy.deepcopy(plain)
        if blocked and order == "blocked first":
            model.to(tb.blocked)
        with torch.no_grad():  # a graph would hold the parameters, which then cannot be converted
            REWRITES[name](model)
        if blocked and order == "blocked last":
            model.to(tb.blocked)
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().mean().backward()
        answers.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for actual, expected in zip(*reversed(answers), strict=True):
        assert_same(actual, expected, rtol=1e-3, atol=1e-4)


def test_fusion(models):
    x = torch.randn(2, 20, 6, 6)
    (conv, bn), (conv_blocked, bn_blocked) = (m[:2] for m in models)
    fused = fuse_conv_bn_eval(conv_blocked, bn_blocked)
    assert type(fused.weight) is tb.BlockedTensor
    assert_same(fused(x), bn(conv(x)), rtol=1e-4, atol=1e-4)
    statistics = bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias
    actual = fuse_conv_bn_weights(conv_blocked.weight, conv_blocked.bias, *statistics)
    expected = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics)
    assert_same(actual[0].detach(), expected[0].detach()) or assert_same(actual[1].detach(), expected[1].detach())


# ---- Tools


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_flops_are_counted_as_of_the_plain_model(models, context):
    counts = []
    for model, blocked_input in zip((*models, models[1]), (False, False, True), strict=True):
        x = torch.randn(2, 20, 6, 6)
        x = x.to(tb.blocked) if blocked_input else x
        with context(), FlopCounterMode(display=False) as flops:
            y = model(x)
            if y.requires_grad:
                y.sum().backward()
        counts.append(flops.get_total_flops())
    assert counts[0] > 0 and counts == counts[:1] * 3


def test_profiler_names_the_operators(models):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        models[1](torch.randn(2, 20, 6, 6).to(tb.blocked)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"torch_blocked::convolution", "torch_blocked::convolution_weight_gradient"} <= names


def test_profiler_records_shapes(models, capfd):
    options = dict(record_shapes=True, profile_memory=True, with_stack=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        models[1](torch.randn(2, 20, 6, 6).to(tb.blocked)).sum().backward()
    shapes = {event.key: event.input_shapes for event in profile.key_averages(group_by_input_shape=True)}
    assert shapes["aten::convolution"][:2] == [[2, 20, 6, 6], [24, 20, 3, 3]]
    assert "Exception" not in capfd.readouterr().err


def test_a_fallback_leaves_nothing_behind(x):
    """What it makes is freed when it is done, not when the garbage collector runs."""
    gc.collect()
    gc.disable()
    try:
        y = x.to(tb.nChw16c)
        alive = weakref.ref(y)
        torch.linalg.norm(y[:, 3:18].reshape(2, -1) @ torch.ones(180, 1))
        torch.fft.fft(y)
        del y
        assert alive() is None
    finally:
        gc.enable()


HEAVY = tuple(f"torch.{m}" for m in "_dynamo _inductor _functorch fx distributed testing".split()) + ("sympy",)
IMPORT = """
import sys, torch
before = set(sys.modules)
import torch_blocked
print(*(set(sys.modules) - before))
"""


def test_import_is_clean_and_light():
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    loaded = done.stdout.split()
    assert "torch_blocked.tensor" in loaded
    assert not [name for name in loaded if name.startswith(HEAVY)]
