"""Half precision: the answers of plain tensors, by the kernels, as the dtype rounds; training under autocast."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, dense, padding_is_zero
from dispatch_cases import cases, check, check_error, check_gradient, native
from torch import nn
from training_cases import sgd

import torch_blocked as tb
from torch_blocked import equivalents
from torch_blocked.benchmark.networks import BasicBlock, ResNet
from torch_blocked.formats import weight_format

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = [torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])


def tolerance(dtype):
    """Of values about one: a rounding of the answer, and of what PyTorch rounds in between."""
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}


# ---- Convolution

# (channels, window)
CONVOLUTIONS = {
    "3x3": (17, dict(weight=(33, 17, 3, 3), padding=1)),
    "stride": (17, dict(weight=(20, 17, 3, 3), stride=2, padding=1)),
    "pointwise": (32, dict(weight=(16, 32, 1, 1))),
    "pointwise, stride": (32, dict(weight=(16, 32, 1, 1), stride=2)),
    "first": (3, dict(weight=(20, 3, 7, 7), stride=2, padding=3)),
    "depthwise": (20, dict(weight=(20, 1, 3, 3), padding=1, groups=20)),
    "groups": (20, dict(weight=(30, 2, 3, 3), padding=1, groups=10)),
    "dilated": (16, dict(weight=(16, 16, 3, 3), dilation=2)),
    "transposed": (17, dict(weight=(17, 20, 3, 3), padding=1, transposed=True)),
    "transposed, stride": (17, dict(weight=(17, 20, 4, 4), stride=2, padding=1, transposed=True)),
    "transposed, unreached pixels": (17, dict(weight=(17, 20, 2, 2), stride=3, transposed=True)),
    "1-D": (17, dict(weight=(20, 17, 3), padding=1)),
    "3-D": (17, dict(weight=(20, 17, 3, 3, 3), padding=1)),
}


def convolution_of(weight, stride=1, padding=0, dilation=1, groups=1, transposed=False):
    dims = len(weight) - 2
    window = [stride] * dims, [padding] * dims, [dilation] * dims

    def f(x, w, b):
        return torch.convolution(x, w, b, *window, transposed, [0] * dims, groups)

    return f, torch.randn(weight) / 8, torch.randn(weight[1] * groups if transposed else weight[0])


@each_dtype
@cases(CONVOLUTIONS)
def test_convolution(isa, case, dtype):
    channels, how = case
    f, weight, bias = convolution_of(**how)
    x = torch.randn(3, channels, *[11, 9, 7][: weight.dim() - 2]).to(dtype)
    weight, bias = weight.to(dtype), bias.to(dtype)
    blocked = x if channels == 3 else x.to(tb.blocked)
    for w in (weight.to(tb.blocked), weight):
        if not isinstance(blocked, tb.BlockedTensor) and not isinstance(w, tb.BlockedTensor):
            continue
        y = check(f, blocked, w, bias, **tolerance(dtype))
        assert isinstance(y, tb.BlockedTensor) and y.dtype is dtype


@each_dtype
@cases(CONVOLUTIONS)
def test_gradients_of_a_convolution(isa, case, dtype):
    """Relative to the largest: sums of products cancel."""
    channels, how = case
    f, weight, bias = convolution_of(**how)
    x = torch.randn(3, channels, *[11, 9, 7][: weight.dim() - 2])
    exact = gradients(f, *(t.to(dtype).double() for t in (x, weight, bias)))
    with native():
        found = gradients(f, *(t.to(dtype).to(tb.blocked) for t in (x, weight)), bias.to(dtype))
    for g, e, like in zip(found, exact, (x, weight, bias), strict=True):
        assert g.dtype is dtype and isinstance(g, tb.BlockedTensor) == (like.dim() > 1) and padding_is_zero(g)
        error = (dense(g).double() - e).abs().max() / e.abs().max()
        assert error < torch.finfo(dtype).eps, f"error {error:.1e}"


def gradients(f, *args):
    """Of all arguments; the gradient that comes in is the same in every dtype."""
    leaves = [a.detach().requires_grad_() for a in args]
    y = f(*leaves)
    generator = torch.Generator().manual_seed(3)
    grad = torch.randint(-2, 3, y.shape, generator=generator).to(y.dtype)
    return torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("winograd", ["never", "f2", "f4"])
def test_kept_weights_follow_the_tensor(isa, winograd):
    x, weight = torch.randn(2, 17, 12, 12).bfloat16(), torch.randn(20, 17, 3, 3).bfloat16() / 8
    blocked = weight.to(tb.OIhw16i16o)
    with tb.winograd(winograd):
        for factor in (1, 2, 4):
            for _ in range(4):
                y = F.conv2d(x.to(tb.blocked), blocked, padding=1)
            assert_same(y, F.conv2d(x, weight * factor, padding=1), rtol=0.02, atol=0.05 * factor)
            blocked.mul_(2)


def test_weights_are_kept_in_float32_where_they_are_used_again():
    tb.library.empty_cache()
    before, nbytes = tb.library.packed_weights_bytes(), 64 * 64 * 9 * 4
    x, weight = (
        torch.randn(1, 64, 5, 6).bfloat16().to(tb.blocked),
        torch.randn(64, 64, 3, 3).bfloat16().to(weight_format((64, 64, 3, 3), tb.library.isa_block())),
    )
    F.conv2d(x, weight)
    assert tb.library.packed_weights_bytes() == before
    for _ in range(3):
        F.conv2d(x, weight)
    assert tb.library.packed_weights_bytes() == before + nbytes
    weight.mul_(2)
    F.conv2d(x, weight)
    assert tb.library.packed_weights_bytes() == before + nbytes
    del weight
    assert tb.library.packed_weights_bytes() == before


MIXED = {
    "weight": lambda x: F.conv2d(x.bfloat16(), torch.randn(5, 17, 3, 3)),
    "bias": lambda x: F.conv2d(x.bfloat16(), torch.randn(5, 17, 3, 3).bfloat16(), torch.randn(5)),
    "both halves": lambda x: F.conv2d(x.bfloat16(), torch.randn(5, 17, 3, 3).half()),
    "batch norm": lambda x: F.batch_norm(x.bfloat16(), torch.zeros(17), torch.ones(17), torch.ones(17).bfloat16()),
    "group norm": lambda x: F.group_norm(x.half(), 1, torch.ones(17).bfloat16(), torch.zeros(17).bfloat16()),
}


@cases(MIXED)
def test_mixtures_that_pytorch_refuses(case):
    check_error(case, torch.randn(2, 17, 5, 6).to(tb.blocked))


PHYSICAL = torch.randn(2, 4, 5, 4, 8)
VECTOR = torch.rand(32) + 0.5
WINDOW = [1, 1], [1, 1], [1, 1]
OPERATORS = {
    "convolution": (PHYSICAL, [1, 8], torch.randn(32, 32, 3, 3), [32, 32, 3, 3], [], VECTOR, *WINDOW, 1, 8),
    "convolution_weight_gradient": (PHYSICAL, [1, 8], PHYSICAL, [32, 32, 3, 3], [0, 1, 2, 3], [], *WINDOW, 1),
    "batch_norm_statistics": (PHYSICAL, 32),
}
WITH_VECTORS = {
    "batch_norm": (PHYSICAL, VECTOR, VECTOR, VECTOR, VECTOR, 1e-5),
    "batch_norm_backward": (PHYSICAL, PHYSICAL, VECTOR, VECTOR, VECTOR, True),
}


@each_dtype
@pytest.mark.parametrize("name", [*OPERATORS, *WITH_VECTORS])
def test_operators_and_their_shape_only_kernels(name, dtype):
    """Against float32 of the same values; what is read may be a view with gaps."""
    keep = (lambda a: a.dim() == 1) if name in WITH_VECTORS else (lambda a: False)
    args = [a.to(dtype) if isinstance(a, torch.Tensor) and not keep(a) else a for a in (OPERATORS | WITH_VECTORS)[name]]
    op = getattr(tb.library.ops, name).default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    wide = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
    spread = [torch.stack([a, a], 1)[:, 0] if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in args]
    for given in (args, spread):
        torch.testing.assert_close(op(*given), op(*wide), check_dtype=False, **tolerance(dtype))


TRANSPOSED = (
    PHYSICAL, [1, 8], torch.randn(32, 32, 3, 3), [32, 32, 3, 3], [], VECTOR, [1, 1], [1, 1], [0, 0], [1, 1], 1, 8,
)  # fmt: skip


@each_dtype
@pytest.mark.parametrize("bias_dtype", [torch.float32, None], ids=["float32 bias", "bias alike"])
@pytest.mark.parametrize("name", ["convolution", "convolution_transpose"])
def test_convolutions_with_a_bias(name, bias_dtype, dtype):
    """The operator, the same in ATen operations and the gradients, against float32 of the same values."""
    args = OPERATORS["convolution"] if name == "convolution" else TRANSPOSED
    args = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]
    args[5] = VECTOR.to(bias_dtype or dtype)
    positions = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    given = [a.requires_grad_() if i in positions else a for i, a in enumerate(args)]
    wide = [a.detach().float().requires_grad_() if i in positions else a for i, a in enumerate(args)]
    op, same = getattr(tb.library.ops, name).default, getattr(equivalents, f"{name}_aten")
    expected = op(*wide)
    for answer in (op(*given), same(*given)):
        torch.testing.assert_close(answer, expected.to(dtype), **tolerance(dtype))
        found = torch.autograd.grad(answer.sum(), [given[i] for i in positions])
        exact = torch.autograd.grad(expected.sum(), [wide[i] for i in positions], retain_graph=True)
        for g, e, i in zip(found, exact, positions, strict=True):
            torch.testing.assert_close(g, e.to(given[i].dtype), **tolerance(dtype))


# ---- Normalization

PARAMETERS = {"all half": None, "mixed": torch.float32}


@each_dtype
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels", [16, 53])
@cases(PARAMETERS)
def test_batch_norm(isa, case, channels, training, dtype):
    x = (torch.randn(3, channels, 9, 7) * 2 + 1).to(dtype)
    norm = nn.BatchNorm2d(channels).to(case or dtype).train(training)
    for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(t, 0.5, 2)
    twin = copy.deepcopy(norm)
    results = []
    for m, src, expects in ((twin, x, native), (norm, x.to(tb.blocked), native)):
        leaf = src.detach().requires_grad_()
        with expects():
            y = m(leaf)
            grads = torch.autograd.grad(
                y, [leaf, m.weight, m.bias], torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype)
            )
        results.append((y.detach(), *grads, *m.state_dict().values()))
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype is expected.dtype and padding_is_zero(actual)
        scale = max(1.0, float(expected.abs().max()))
        assert_same(actual, expected, rtol=0.02, atol=4 * torch.finfo(dtype).eps * scale)
    assert all(isinstance(results[1][i], tb.BlockedTensor) for i in (0, 1))


NORMS = {
    "eval whole": lambda x, w, v: F.batch_norm(x, v, v, w, v),
    "no statistics": lambda x, w, v: F.batch_norm(x, None, None, w, v, True),
    "group": lambda x, w, v: F.group_norm(x, 2, w, v),
    "instance": lambda x, w, v: F.instance_norm(x, None, None, w, v),
    "layer": lambda x, w, v: F.layer_norm(x, x.shape[2:], w.new_ones(x.shape[2:]), w.new_zeros(x.shape[2:])),
}


@each_dtype
@cases(PARAMETERS | {"inference": "inference"})
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, case, dtype):
    x, parameters = torch.randn(2, 32, 5, 6).to(dtype).to(tb.blocked), dtype if case in (None, "inference") else case
    w, v = torch.rand(32).add(0.5).to(parameters), torch.rand(32).add(0.5).to(parameters)
    if case == "inference":
        with torch.inference_mode():
            y = check(lambda x: NORMS[name](x, w, v), x.clone(), **tolerance(dtype))
    else:
        y = check(lambda x: NORMS[name](x, w, v), x, **tolerance(dtype))
        check_gradient(lambda x: NORMS[name](x, w, v), x, rtol=0.05, atol=0.03)
    assert isinstance(y, tb.BlockedTensor) and y.dtype is dtype


def test_dtypes_of_statistics():
    """Those of plain tensors, of the operators themselves."""
    op = torch.ops.aten.native_batch_norm.default
    for parameters in (torch.bfloat16, torch.float32):
        w, x = torch.ones(17, dtype=parameters), torch.randn(2, 17, 3, 4).bfloat16()
        for training in (True, False):
            found = [
                [y.dtype for y in op(src, w, w, w.clone(), w.clone(), training, 0.1, 1e-5)]
                for src in (x, x.to(tb.blocked))
            ]
            assert found[0] == found[1]


# ---- Pooling and resampling

POOLS = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest exact": lambda x: F.interpolate(x, size=(7, 5), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "linear": lambda x: F.interpolate(x[:, :, 0], scale_factor=2, mode="linear"),
}


@each_dtype
@cases(POOLS)
def test_pooling(isa, case, dtype):
    x = torch.randn(2, 17, 9, 8).to(dtype).to(tb.blocked)
    y = check(case, x, **tolerance(dtype))
    assert isinstance(y, tb.BlockedTensor) and y.dtype is dtype
    check_gradient(case, x, **tolerance(dtype))


# ---- Training


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("where", ["parameters", "images"])
def test_a_step_under_autocast_does_not_fall_back(where, cache):
    """By blocked parameters, or plain ones and a blocked image."""
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=10)
    twin, x, target = copy.deepcopy(model), torch.randn(4, 3, 64, 64), torch.arange(4)
    if where == "parameters":
        model.to(tb.blocked)
    blocked = x if where == "parameters" else x.to(tb.blocked)
    plain_loss = autocast_step(twin, x, target, cache)
    with native():
        loss = autocast_step(model, blocked, target, cache)
    torch.testing.assert_close(loss, plain_loss, rtol=0.02, atol=0.02)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert q.grad.dtype is torch.float32 and isinstance(q.grad, tb.BlockedTensor) == isinstance(q, tb.BlockedTensor)
        assert padding_is_zero(q.grad) and padding_is_zero(q.detach())
        # ReLUs near zero flip by rounding: directions are compared.
        assert F.cosine_similarity(dense(q.grad).flatten(), p.grad.flatten(), 0) > 0.98


def autocast_step(model, x, target, cache):
    optimizer = sgd(model)
    with torch.amp.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        y = model(x)
    assert y.dtype is torch.bfloat16
    loss = F.cross_entropy(y.float(), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


@each_dtype
def test_a_model_of_half_precision(dtype):
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=10).eval().to(dtype)
    x = torch.randn(2, 3, 64, 64).to(dtype)
    with torch.no_grad():
        expected = model(x)
        model.to(tb.blocked)
        with native():
            for _ in range(3):
                y = model(x)
    assert_same(y, expected, rtol=0.05, atol=0.1)
