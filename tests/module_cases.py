"""A network of all kinds of convolutions, what becomes blocked of it, and its training."""

import torch
from conftest import assert_same
from torch import nn

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.reorder import to_dense


class Net(nn.Module):
    """All kinds of 2-D convolutions, batch normalization, a linear layer, buffers of several ranks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 20, 3, padding=1)
        self.bn = nn.BatchNorm2d(20)
        self.depthwise = nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.grouped = nn.Conv2d(20, 40, 3, groups=4, bias=False)
        self.dense = nn.Conv2d(40, 17, 1)
        self.transposed = nn.ConvTranspose2d(17, 18, 2)
        self.fc = nn.Linear(18, 5)
        self.register_buffer("shift", torch.randn(1, 3, 1, 1))
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("codes", torch.arange(48).view(2, 24, 1, 1))
        self.register_buffer("temporary", torch.randn(1, 17, 1, 1), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        x = torch.relu(self.bn(self.first(x + self.shift)))
        x = self.dense(torch.relu(self.grouped(self.depthwise(x)))) * self.temporary
        return self.fc(self.transposed(x).mean((2, 3)))


BLOCK = library.isa_block()
DENSE = tb.format(f"OIhw{BLOCK}i{BLOCK}o")

# The formats of what becomes blocked.
BLOCKED = {
    "first.weight": f"Ohwi{BLOCK}o",
    "depthwise.weight": f"Oihw{BLOCK}o",
    "grouped.weight": f"Ohwi{BLOCK}o",
    "dense.weight": DENSE.tag,
    "transposed.weight": DENSE.tag,
    "shift": f"Ohwi{BLOCK}o",
    "temporary": DENSE.tag,
    "codes": DENSE.tag,
}


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same_tensors(model, expected, **tolerances):
    ours, theirs = tensors(model), tensors(expected)
    assert list(ours) == list(theirs)
    for name in ours:
        assert_same(ours[name].detach(), to_dense(theirs[name].detach()), **tolerances)
        assert ours[name].requires_grad == theirs[name].requires_grad


def assert_same_backward(model, expected, inputs, answers, **tolerances):
    """Gradients of two models' parameters and inputs, of the same weighed sum of their answers."""
    weights = torch.randn(answers[1].shape)
    for answer in answers:
        (answer * weights).sum().backward()
    assert_same(inputs[0].grad, inputs[1].grad, **tolerances)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(p.grad, tb.BlockedTensor) == isinstance(p, tb.BlockedTensor)
        assert_same(p.grad, q.grad, **tolerances)


def train(model, optimizer, x, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
