"""Checkpoints of blocked and of plain models, and those that need no torch_blocked."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from conftest import assert_same, dense, one_line
from torch import nn

import torch_blocked as tb


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


def test_dicts_of_all_kinds():
    """They stay what they are: a Counter counts what it is made of, a defaultdict is made of a function."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    assert tb.dense_state_dict(scheduler)["milestones"] == scheduler.milestones == Counter([2, 4])
    assert tb.dense_state_dict({"scheduler": scheduler.state_dict()})["scheduler"] == scheduler.state_dict()
    blocked = torch.randn(1, 17, 2, 2).to(tb.blocked)
    state = defaultdict(dict, {0: {"exp_avg": blocked}})
    dense_state = tb.dense_state_dict(state)
    assert type(dense_state[0]["exp_avg"]) is torch.Tensor and dense_state[1] == {} and state[0]["exp_avg"] is blocked
    constant = tb.dense_state_dict(MappingProxyType({"x": blocked}))
    assert type(constant["x"]) is torch.Tensor


class Named(NamedTuple):
    weight: torch.Tensor
    step: int


class Listed(list):
    pass


def test_sequences_of_all_kinds():
    """They stay what they are, and so do those that hold no tensor."""
    blocked = torch.randn(1, 17, 2, 2).to(tb.blocked)
    listed = Listed([blocked])
    listed.name = "kept"
    state = {
        "list": [blocked],
        "tuple": (blocked, 1),
        "named": Named(blocked, 1),
        "listed": listed,
        "deque": deque([blocked], maxlen=3),
        "returned": torch.max(blocked, 2),
        "nested": [Named(deque([blocked]), 1)],
    }
    dense_state = tb.dense_state_dict(state)
    for key, values in state.items():
        assert type(dense_state[key]) is type(values) and len(dense_state[key]) == len(values)
    for key in ("list", "tuple", "named", "listed", "deque"):
        assert type(dense_state[key][0]) is torch.Tensor and state[key][0] is blocked
        assert_same(dense_state[key][0], dense(blocked))
    assert all(type(t) is torch.Tensor for t in dense_state["returned"])
    assert type(dense_state["nested"][0].weight[0]) is torch.Tensor
    assert (dense_state["deque"].maxlen, dense_state["listed"].name, dense_state["named"].step) == (3, "kept", 1)
    size = torch.Size([1, 2])
    assert tb.dense_state_dict({"size": size})["size"] == size


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


def test_a_blocked_checkpoint_goes_through_a_file():
    file = io.BytesIO()
    torch.save(Tied().to(tb.blocked).state_dict(), file)
    file.seek(0)
    assert not any(Tied().load_state_dict(torch.load(file), strict=True))


class Computed(Mapping):
    """Makes its tensors when they are asked for."""

    def __getitem__(self, key):
        return torch.full((2,), float(key))

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


def test_tensors_that_are_made_when_asked_for():
    assert [int(x[0]) for x in tb.dense_state_dict(Computed()).values()] == list(range(8))
