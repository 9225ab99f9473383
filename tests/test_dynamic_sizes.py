"""Operators on tensors whose batch, height and width are symbolic: right, and one graph for all sizes."""

import pytest
import torch
import torch.nn.functional as F
from conftest import dense
from torch._dynamo.testing import CompileCounterWithBackend

import torch_blocked as tb

# name -> a function of a blocked tensor of 32 channels
CALLS = {
    "relu, add": lambda x: x.relu() + x,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "foreach": lambda x: torch._foreach_add([x, x], 1)[0],
    "slice": lambda x: x[..., ::2],
    "slice at the end": lambda x: x[:, :, 1:-1],
    "slice of channels": lambda x: x[:, 16:],
    "slice across blocks": lambda x: x[:, 5:20],
    "select": lambda x: x[0],
    "split": lambda x: x.split(16, 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "cat, channels": lambda x: torch.cat([x, x], 1),
    "cat, batch": lambda x: torch.cat([x, x], 0),
    "cat off the borders": lambda x: torch.cat([x[:, :5], x], 1),
    "cat of parts": lambda x: torch.cat(x.split(16, 1)[::-1], 1),
    "stack": lambda x: torch.stack([x, x], 0),
    "stack, channels": lambda x: torch.stack([x, x], 1),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 1]), x[:2]),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 1])),
    "gather": lambda x: x.gather(2, torch.zeros_like(x, dtype=torch.int64)),
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(3),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "expand": lambda x: x.expand(2, *x.shape),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "flatten": lambda x: x.flatten(1),
    "view of groups": lambda x: x.view(x.size(0), 2, 16, *x.shape[2:]).transpose(1, 2).reshape(x.shape),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear to another's size": lambda x: F.interpolate(x, size=x[:, :, 1:].shape[2:], mode="bilinear"),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "group_norm": lambda x: F.group_norm(x, 4),
    "instance_norm": lambda x: F.instance_norm(x),
    "mean, product": lambda x: x * x.mean((2, 3), keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "max over channels": lambda x: x.max(1).values,
    "einsum": lambda x: torch.einsum("nchw,ndhw->ncd", x, x),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def image(n, h, w):
    x = torch.randn(n, 32, h, w)
    torch._dynamo.mark_dynamic(x, (0, 2, 3))  # an error where the graph is of one size only
    return x


@pytest.mark.parametrize("name", CALLS)
def test_values(name):
    function, counter = CALLS[name], CompileCounterWithBackend("eager")
    traced = torch.compile(lambda x: function(x.to(tb.nChw16c)), fullgraph=True, backend=counter)
    for size in ((3, 9, 8), (5, 7, 12)):
        x = image(*size)
        torch.testing.assert_close(dense(traced(x)), function(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["slice", "slice at the end", "slice of channels", "cat, channels", "pad", "bilinear"])
def test_gradients(name):
    function = {"bilinear": CALLS["bilinear to another's size"], **CALLS}[name]
    traced = torch.compile(lambda x: function(x.to(tb.nChw16c)).to_dense(), fullgraph=True, backend="aot_eager")
    for size in ((3, 9, 8), (5, 7, 12)):
        x, y = (image(*size).requires_grad_() for _ in range(2))
        with torch.no_grad():
            y.copy_(x)
        traced(x).square().sum().backward()
        function(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["convolution", "convolution and pooling"])
def test_training_that_ends_in_a_plain_tensor(layers):
    """By Inductor, which puts strides in order: products of such sizes, quotients and one more, it cannot."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, stride=2, padding=1))
    if layers == "convolution and pooling":
        model.append(torch.nn.MaxPool2d(3, 2, 1))
    weight = model[0].weight
    x = image(2, 9, 12)[:, :3].contiguous()
    traced = torch.compile(model, backend="torch_blocked", dynamic=True)
    (actual,) = torch.autograd.grad(traced(x).square().sum(), weight)
    (expected,) = torch.autograd.grad(model(x).square().sum(), weight)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_size_is_a_quotient():
    """No sum of one and another, see above: so other backends take blocked convolutions, too."""
    sizes = []

    def backend(gm, inputs):
        sizes.extend(n.meta["example_value"].size(2) for n in gm.graph.nodes if n.name.startswith("conv"))
        return gm.forward

    conv = torch.nn.Conv2d(32, 16, 3, stride=2, padding=1).to(tb.blocked)
    torch.compile(conv, backend=backend)(image(2, 9, 12))
    assert [type(size.node.expr).__name__ for size in sizes] == ["FloorDiv"]


class Attention(torch.nn.Module):
    """Between all pixels of an image: a matrix of them between two permutations."""

    def __init__(self):
        super().__init__()
        self.before, self.depthwise = torch.nn.Conv2d(20, 24, 3, padding=1), torch.nn.Conv2d(24, 24, 1, groups=24)
        self.queries_keys_values, self.after = torch.nn.Conv2d(24, 60, 1), torch.nn.Conv2d(20, 20, 1)

    def forward(self, x):
        q, k, v = self.queries_keys_values(self.depthwise(self.before(x)).relu()).flatten(2).chunk(3, 1)
        weights = (q.transpose(1, 2) @ k / 4).softmax(-1)
        return x + self.after((v @ weights.transpose(1, 2)).view(x.shape))


@pytest.mark.parametrize("blocked", [False, True])
@torch.no_grad()
def test_attention_of_one_image(blocked, graphs):
    model, x = Attention().eval(), torch.randn(1, 20, 6, 5)
    expected = model(x)
    traced = torch.compile(model.to(tb.blocked) if blocked else model, backend="torch_blocked", dynamic=True)
    torch.testing.assert_close(dense(traced(x)), expected, rtol=1e-4, atol=1e-4)
