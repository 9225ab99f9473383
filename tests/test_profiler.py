"""Blocked models under PyTorch's profiler and its counter of operations."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_blocked as tb


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
