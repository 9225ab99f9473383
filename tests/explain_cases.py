"""Networks that `tb.explain` has something to say of."""

from __future__ import annotations

import torch
from torch import nn

import torch_blocked as tb


class Fallback(nn.Module):
    def forward(self, x):
        return x.cummax(1).values


class Plain(nn.Module):
    def forward(self, x):
        return x.contiguous()


class Three(nn.Module):
    """Three channels in the middle."""

    def __init__(self):
        super().__init__()
        self.narrow, self.widen = nn.Conv2d(32, 3, 3, padding=1), nn.Conv2d(3, 32, 3, padding=1)

    def forward(self, x):
        return self.widen(self.narrow(x))


def network(*middle: nn.Module) -> nn.Module:
    """Convolutions around a part; blocked, for inference."""
    parts = {"first": nn.Conv2d(3, 32, 3), "part": nn.Sequential(*middle), "last": nn.Conv2d(32, 32, 3)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model.eval().to(tb.blocked)


@torch.no_grad()
def explained(model, /, *inputs, **kwargs):
    return tb.explain(model, *(inputs or [torch.randn(1, 3, 12, 12)]), **kwargs)
