"""Gradients and training through operators that run on plain tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same
from dispatch_cases import cases, from_seed
from fallback_cases import WEIGHT, image
from torch import nn

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- Gradients


def small_network(channels=17, dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.Hardswish(),
        nn.Dropout(dropout),
        nn.Conv2d(2 * channels, 2 * channels, 3, groups=2 * channels, stride=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 5),
    )


def assert_same_parameters(actual, expected, **tolerances):
    for (name, a), (_, e) in zip(actual.state_dict().items(), expected.state_dict().items(), strict=True):
        assert_same(a, e, msg=lambda m: f"{name}: {m}", **tolerances)  # noqa: B023


def assert_same_gradients(actual, expected, **tolerances):
    for (name, a), e in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert a.grad is not None, name
        assert_same(a.grad, e.grad, msg=lambda m: f"{name}: {m}", **tolerances)  # noqa: B023


CLOSE = dict(rtol=1e-4, atol=1e-5)  # gradients of sums in another order, through several layers


@pytest.mark.parametrize("channels", [1, 15, 16, 17])
@pytest.mark.parametrize("fmt", [tb.blocked, tb.nChw8c, tb.nChw16c], ids=repr)
def test_gradients_of_a_network(isa, fmt, channels):
    plain = small_network(channels)
    model = copy.deepcopy(plain).to(fmt)
    x = torch.randn(4, 3, 12, 12)
    inputs = []
    for net, convert in ((plain, False), (model, True)):
        leaf = x.clone().requires_grad_()
        F.cross_entropy(net(leaf.to(fmt) if convert else leaf), torch.tensor([0, 1, 2, 3])).backward()
        inputs.append(leaf)
    assert isinstance(model[4].weight, tb.BlockedTensor)
    assert_same(inputs[1].grad, inputs[0].grad, **CLOSE)
    assert_same_gradients(model, plain, **CLOSE)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
}


@pytest.mark.parametrize("built", ["before", "after"])
@cases(OPTIMIZERS)
def test_optimizer_steps(case, built):
    """In double precision: Adam divides by the size of gradients, and so enlarges differences of order of summation."""
    plain = small_network().double()
    model = copy.deepcopy(plain)
    early = case(model.parameters())
    model.to(tb.nChw16c)
    optimizers = {plain: case(plain.parameters()), model: early if built == "before" else case(model.parameters())}
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(4, 3, 12, 12).double(), torch.randint(5, (4,))
        for net, optimizer in optimizers.items():
            optimizer.zero_grad(set_to_none=step != 1)
            F.cross_entropy(net(x), target).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    assert isinstance(model[4].weight, tb.BlockedTensor)
    assert_same_parameters(model, plain)


def test_sgd_step_moves_the_version_of_the_weights():
    model = small_network().to(tb.nChw16c)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight = model[4].weight
    version = weight.physical._version
    model(torch.randn(2, 3, 12, 12)).sum().backward()
    optimizer.step()
    assert weight.physical._version > version


def test_training_with_dropout_in_single_precision():
    plain = small_network(dropout=0.3)
    model = copy.deepcopy(plain).to(tb.nChw16c)
    x, target = torch.randn(4, 3, 12, 12), torch.tensor([0, 1, 2, 3])
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        torch.manual_seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(x), target).backward()
            optimizer.step()
    assert_same_parameters(model, plain, rtol=1e-3, atol=1e-4)
    plain.eval(), model.eval()
    assert_same(model(x), plain(x), rtol=1e-3, atol=1e-3)


GRADIENTS = {
    "convolution": lambda x: F.conv2d(x, WEIGHT, padding=1),
    "convolution in groups": lambda x: F.conv2d(x, WEIGHT[:, :1], groups=17),
    "batch_norm": lambda x: F.batch_norm(x, None, None, torch.linspace(0.5, 2, 17), training=True),
    "batch_norm eval": lambda x: F.batch_norm(x, torch.zeros(17), torch.full((17,), 2.0)),
    "relu": F.relu,
    "relu in place": lambda x: (x * 1).relu_(),
    "relu6": lambda x: F.relu6(x * 5),
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": lambda x: F.hardswish(x * 3),
    "hardsigmoid": lambda x: F.hardsigmoid(x * 3),
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "pow": lambda x: x.abs().pow(1.5),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "dropout": from_seed(lambda x: F.dropout(x, 0.4)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, 1, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive_avg_pool2d of all": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "add": lambda x: x + x * 2,
    "a value a channel": lambda x: x * torch.linspace(0, 1, 17).view(17, 1, 1),
    "itself broadcast": lambda x: x * x.mean((2, 3), keepdim=True),
    "div": lambda x: x / (x.abs() + 1),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "maximum": lambda x: torch.maximum(x, -x * 0.3),
    "cat": lambda x: torch.cat([x, x[:, :16]], 2 if x.size(1) == 16 else 1),
    "cat of rows": lambda x: torch.cat([x, x * 2], 2),
    "split": lambda x: x.split(16, 1)[1],
    "chunk": lambda x: x.chunk(2, 2)[0] * x.chunk(2, 2)[1],
    "slice": lambda x: x[:, 16:, ::2],
    "slice in a block": lambda x: x[:, 1:3],
    "image": lambda x: x[1],
    "flatten": lambda x: x.flatten(1),
    "permute": lambda x: x.permute(0, 2, 3, 1) * torch.linspace(0, 1, 17),
    "transpose": lambda x: x.transpose(2, 3),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "mean": lambda x: x.mean((2, 3)),
    "sum of channels": lambda x: x.sum(1),
    "amax": lambda x: x.amax((2, 3)),
    "amax of all": lambda x: x.amax(),
    "softmax": lambda x: x.softmax(1),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 2),
    "mse_loss of a blocked sum": lambda x: F.mse_loss(x, x.detach() * 2, reduction="sum"),
    "l1_loss": lambda x: F.l1_loss(x, x.detach() * 2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, 4, 4).long()),
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "copy in place": lambda x: torch.zeros_like(x).copy_(x),
    "written slice": lambda x: written(x * 1),
    "written rows": lambda x: written(x * 1, 2, 1),
    "multiplied in place": lambda x: (x * 1).mul_(x.sigmoid()),
    "zeroed slice": lambda x: written(x * 1, value=0),
}


def written(x, dim=1, start=16, value=3):
    """`x` with a part multiplied in place."""
    x.narrow(dim, start, x.size(dim) - start).mul_(value)
    return x


@pytest.mark.parametrize("leaf", ["plain", "blocked"])
@cases(GRADIENTS)
def test_gradient(case, leaf):
    for fmt in (tb.nChw16c, tb.nChw8c, tb.format("acdB4b")):
        x = torch.randn(2, 17, 4, 4)
        weights, grads = None, []
        for is_blocked in (False, True):
            torch.manual_seed(5)
            start = (x.to(fmt) if is_blocked and leaf == "blocked" else x).detach().clone().requires_grad_()
            y = case(start.to(fmt) if is_blocked else start)
            weights = torch.randn(y.shape, dtype=y.dtype) if weights is None else weights
            (y * weights).sum().backward()
            grads.append(start.grad)
        assert_same(grads[1], grads[0], rtol=1e-5, atol=1e-5)


def test_gradient_of_a_gradient():
    x = torch.randn(2, 17, 4, 4)
    answers = []
    for is_blocked in (False, True):
        start = x.clone().requires_grad_()
        y = F.silu(F.conv2d(start.to(tb.nChw16c) if is_blocked else start, WEIGHT, padding=1)).sum()
        (grad,) = torch.autograd.grad(y, start, create_graph=True)
        answers.append(torch.autograd.grad(grad.square().sum(), start)[0])
    assert_same(answers[1], answers[0], **CLOSE)


def test_gradient_accumulates_and_is_of_the_leaf():
    x = image().requires_grad_()
    for n in (1, 2):
        (x * 3).sum().backward()
        assert x.grad.shape == x.shape
        assert_same(x.grad, torch.full((2, 17, 4, 5), 3.0 * n))


def test_in_place_on_a_leaf_that_needs_a_gradient_is_refused():
    x = image().requires_grad_()
    before = x.detach().to_dense()
    for write in (lambda: x.add_(1), lambda: x.cumsum_(1), lambda: x.relu_(), lambda: x.__setitem__(0, 1.0)):
        with pytest.raises(RuntimeError, match="leaf"):
            write()
    assert_same(x.detach(), before)
    with torch.no_grad():
        x.add_(1)
    assert_same(x.detach(), before + 1)


def test_what_is_needed_for_a_gradient_may_not_be_written():
    x = image().requires_grad_()
    y = (x * 1).sigmoid()
    z = y.sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_parts_of_a_tensor_that_needs_a_gradient_may_not_be_written():
    """As for plain tensors: several views made at once."""
    x = image(32).requires_grad_()
    for parts in (lambda: (x * 1).split(16, 1), lambda: (x * 1).chunk(2, 2)):
        with pytest.raises(RuntimeError, match="view"):
            parts()[0].mul_(2)
