"""A small network, its batches and steps, for the tests of training."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from conftest import assert_same, padding_is_zero
from torch import nn

import torch_blocked as tb


class Net(nn.Module):
    """Everything that a small residual network has; channel counts beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20)
        self.conv2, self.bn2 = nn.Conv2d(20, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20)
        self.pool = nn.MaxPool2d(2)
        self.conv3, self.bn3 = nn.Conv2d(20, 33, 3, 2, bias=False), nn.BatchNorm2d(33)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(33, 10))

    def body(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = x + self.bn2(self.conv2(x))
        return F.relu(self.bn3(self.conv3(self.pool(F.relu(x)))))

    def forward(self, x):
        return self.head(self.body(x))


def batches(count, n=8):
    """Noisy pictures of ten classes; the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(10, 3, 9, 11, generator=generator)
    for _ in range(count):
        target = torch.randint(0, 10, (n,), generator=generator)
        yield pictures[target] + torch.randn(n, 3, 9, 11, generator=generator), target


def pair():
    """A plain model and a blocked one of the same weights."""
    model = Net()
    return model, copy.deepcopy(model).to(tb.blocked)


def train(model, optimizer, steps, step=None):
    """Losses of the steps; `step(model, x, target)` computes and differentiates one."""
    losses = []
    for x, target in batches(steps):
        optimizer.zero_grad()
        losses.append(float((step or plain_step)(model, x, target)))
        optimizer.step()
    return losses


def plain_step(model, x, target):
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    return loss.detach()


def sgd(model):
    # Slow enough that a ReLU which rounding makes flip does not send the curves apart.
    return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)


def assert_alike(plain, blocked, optimizer=None, rtol=1e-3, atol=1e-4):
    """The parameters are right and blocked; their padding and that of gradients and state is zero."""
    for (name, p), q in zip(plain.named_parameters(), blocked.parameters(), strict=True):
        assert isinstance(q, tb.BlockedTensor) == (p.dim() == 4), name
        assert_same(q.detach(), p.detach(), rtol=rtol, atol=atol)
        assert (p.grad is None) == (q.grad is None) and padding_is_zero(q.grad), name
    for q, state in (optimizer.state if optimizer else {}).items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim():
                assert padding_is_zero(value), key
                assert isinstance(value, tb.BlockedTensor) == isinstance(q, tb.BlockedTensor), key
