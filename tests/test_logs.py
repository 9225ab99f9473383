"""Logging: reorders and fallbacks with the user's line, and the switch in the environment."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_blocked as tb

# What happens, level and topic, and what the message says.
CASES = [
    (
        lambda x: x.to(tb.nChw8c),
        ("DEBUG", "reorders"),
        "nchw 2x17x4x4 float32 -> nChw8c 2x3x4x4x8 float32, 5248 bytes",
    ),
    (
        lambda x: x.to(tb.nChw8c).to(memory_format=torch.channels_last),
        ("DEBUG", "reorders"),
        "nChw8c 2x3x4x4x8 float32 -> nhwc 2x17x4x4 float32, 5248 bytes",
    ),
    (
        lambda x: F.conv2d(x.to(tb.nChw8c), torch.ones(32, 17, 1, 1)),
        ("DEBUG", "reorders"),
        "nchw 32x17x1x1 float32 -> packed by the operator, 4352 bytes",
    ),
    (
        lambda x: x.to(tb.nChw8c).cummax(1),
        ("INFO", "fallbacks"),
        "aten.cummax.default(nChw8c 2x17x4x4 float32 2176 bytes, 1)",
    ),
    (
        lambda x: torch.cat([x.to(tb.nChw8c).double(), x.int()], 1),
        ("INFO", "fallbacks"),
        "aten.cat.default([nChw8c 2x17x4x4 float64 4352 bytes, nchw 2x17x4x4 int32 2176 bytes], 1)",
    ),
]


@pytest.fixture
def log_from():
    """Sets the level of the logger; returns the list of what is logged from then on."""
    logger, handler, records = tb.logs.LOGGER, logging.Handler(), []
    handler.emit, before = records.append, logger.level

    def set_level(level):
        logger.setLevel(level)
        return records

    logger.addHandler(handler)
    yield set_level
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.parametrize("run, where, text", CASES)
def test_what_is_logged(run, where, text, log_from):
    records = log_from(logging.DEBUG)
    run(torch.randn(2, 17, 4, 4))
    level, topic = where
    found = [r for r in records if r.levelname == level and r.name == f"torch_blocked.{topic}"]
    messages = [r.getMessage() for r in found if text in r.getMessage()]
    assert len(messages) == 1, [r.getMessage() for r in found]
    assert messages[0].endswith(f", at {__file__}:{run.__code__.co_firstlineno}")


def test_nothing_is_made_for_a_log_that_is_off(monkeypatch, log_from):
    records = log_from(logging.WARNING)
    monkeypatch.setattr(tb.logs, "user_line", lambda: pytest.fail("asked for the line"))
    torch.randn(1, 17, 2, 2).to(tb.nChw8c).cummax(1)
    assert not records


def leave(x):
    return (x.cummax(1).values + 1).to_dense()


@pytest.mark.parametrize("backend", ["torch_blocked", "aot_eager"])
def test_tracing_is_no_run(backend, log_from):
    records, x = log_from(logging.DEBUG), torch.randn(2, 17, 4, 4).to(tb.nChw16c)
    records.clear()
    torch._dynamo.reset()
    with tb.count() as counts:
        torch.compile(leave, backend=backend)(x)
    assert counts == tb.Counters()
    assert not [r for r in records if r.name == "torch_blocked.reorders"]
    with tb.count() as counts:
        leave(x)
    assert counts.left == 1 and counts.fallbacks and [r for r in records if r.name == "torch_blocked.reorders"]


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_what_has_no_bytes_is_not_reordered(kind):
    with FakeTensorMode() if kind == "fake" else torch.device("meta"), tb.count() as counts:
        leave(torch.randn(2, 17, 4, 4).to(tb.nChw16c))
    assert not counts.reorders and counts.reorder_bytes == counts.left == 0


CODE = "import torch, torch_blocked as tb; tb.fallback('allow'); torch.ones(1, 17, 2, 2).to(tb.nChw8c).cummax(1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "topics, names",
    [
        ("", []),
        ("fallbacks", ["fallbacks"]),
        ("reorders", ["reorders", "reorders"]),
        (" reorders, fallbacks ,", ["reorders", "fallbacks", "reorders"]),
    ],
)
def test_the_switch(topics, names):
    environment = {**os.environ, "TORCH_BLOCKED_LOGS": topics}
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True)
    lines = ran.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"torch_blocked.{name}" for name in names]
    assert all(line.endswith(", at <string>:1") for line in lines)


def test_an_unknown_topic_is_one_line():
    environment = {**os.environ, "TORCH_BLOCKED_LOGS": "reoders,fallbacks"}
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True)
    first, *others = ran.stderr.splitlines()
    assert first == "torch_blocked: TORCH_BLOCKED_LOGS: unknown topic 'reoders', known: reorders, fallbacks"
    assert len(others) == 1
