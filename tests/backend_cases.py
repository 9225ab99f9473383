"""What the tests of the backend of torch.compile share: fixtures, models, and the graphs that Inductor is given."""

import pytest
import torch
import torch.nn.functional as F
from conftest import compiled_anew, dense
from torch import nn

from torch_blocked import library
from torch_blocked.compile import fusion

both = pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])


@pytest.fixture(autouse=True)
def fresh():
    with compiled_anew():
        yield


class Graphs(list):
    """What Inductor was given to compile: the graphs of a test, in order, whether each asserts sizes, and which ran."""

    def __init__(self):
        super().__init__()
        self.size_asserts, self.ran = [], []

    def nodes(self, target):
        return [node for gm in self for node in gm.graph.nodes if node.target is target]

    def count(self, target):
        return len(self.nodes(target))

    def post_ops(self):
        """(batch normalization, residual, activation) of each convolution."""
        ops = [fusion.post_ops(n) for gm in self for n in gm.graph.nodes if n.target in fusion.CONVOLUTIONS]
        for node in self.nodes(library.convolution_chain_op):
            scales, shifts, activations, alphas, *residual = node.args[10:]
            each = zip(scales, shifts, activations.split(","), alphas, strict=True)
            ops += [fusion.PostOps(s, t, None, activation, alpha) for s, t, activation, alpha in each]
            ops[-1] = ops[-1]._replace(residual=residual[0], residual_last=residual[1])
        last = {False: "", True: " then residual"}
        return sorted((p.scale is not None, p.residual is not None, p.activation + last[p.residual_last]) for p in ops)


def compiled(model, **options):
    return torch.compile(model, backend="torch_blocked", fullgraph=True, **options)


def assert_close(actual, expected):
    """Equal to 1e-4 of the largest value; a compiled graph's blocked output may be blocked."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (dense(actual) - dense(expected)).abs().max()
    assert error <= 1e-4 * dense(expected).abs().max().clamp(min=1e-6), error


def randomized(model):
    """The model in eval mode, its statistics and affine parameters anything but zeros and ones."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, -1, 1)
                nn.init.uniform_(module.bias, -1, 1)
    return model.eval()


class Lambda(nn.Module):
    """A model of named layers and a function of them and of x."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, *xs):
        return self.function(self.layers, *xs)


def conv(ic, oc, kernel_size=3, **options):
    return nn.Conv2d(ic, oc, kernel_size, **{"padding": kernel_size // 2} | options)


def block():
    """A residual block: 17 channels, so that weights are packed and padded."""
    layers = {"a": conv(3, 17), "n": nn.BatchNorm2d(17), "b": conv(17, 17), "m": nn.BatchNorm2d(17)}
    return randomized(Lambda(lambda m, x: (lambda y: F.relu(m.m(m.b(y)) + y))(F.relu(m.n(m.a(x)))), **layers))


class Block(nn.Module):
    """ConvNeXt's block; `inside`: the factors of the channels are applied before the way back."""

    def __init__(self, channels, inside=False, activation=F.gelu):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand, self.project = nn.Linear(channels, 3 * channels), nn.Linear(3 * channels, channels, bias=False)
        self.scale = nn.Parameter(torch.randn(channels))
        self.inside, self.activation = inside, activation

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = F.dropout(self.project(self.activation(self.expand(y))), 0.3, self.training)
        if self.inside:
            return x + (self.scale * y).permute(0, 3, 1, 2)
        return x + self.scale[:, None, None] * y.permute(0, 3, 1, 2)


def network(channels, **how):
    return randomized(nn.Sequential(conv(3, channels), Block(channels, **how), Block(channels, **how)))
