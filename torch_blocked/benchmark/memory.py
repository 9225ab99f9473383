"""`bench memory`: the peak memory of plain, eager models and of the same ones blocked and compiled.

Each is measured in a process of its own (apart.py), by this file run as a program.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import nn

import torch_blocked as tb
from torch_blocked.benchmark import apart
from torch_blocked.benchmark.model import (
    Case,
    add_case_arguments,
    case_of,
    cases_of,
    growth,
    made,
    settled_memory,
    words_of,
)
from torch_blocked.benchmark.report import Column, Row, UsageError, add_options, progress, run_cases

COLUMNS = (
    Column("name", "model", -16),
    Column("n", "N", 3),
    Column("parameters_mb", "parameters", 10, ".1f"),
    Column("plain_mb", "plain", 8, ".1f"),
    Column("traced_mb", "traced", 8, ".1f"),
    Column("inductor_mb", "Inductor", 9, ".1f"),
    Column("never_mb", "never", 8, ".1f"),
    Column("never_vs_plain", "/plain", 7, ".2f"),
    Column("auto_mb", "auto", 8, ".1f"),
)


class Kind(NamedTuple):
    """The backend that the model is compiled with, if any, and `winograd`'s mode, for a blocked model."""

    backend: str | None = None
    winograd: str | None = None


_KINDS = {
    "plain": Kind(),
    "traced": Kind("eager"),
    "inductor": Kind("inductor"),
    "never": Kind("torch_blocked", "never"),
    "auto": Kind("torch_blocked", "auto"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench memory`."""
    add_case_arguments(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    """Measures each model and batch, in 1e6 bytes; what a compiled one needs beside tensors is among them.

    "parameters" are those of the model. "plain" is the most that the process grows by from before the model is made to
    a later call. "traced" is the same of torch.compile with a backend that only runs what was traced, which every
    backend begins with, and "inductor" with its own, which shows what compiled models keep beside tensors. "never" and
    "auto" are those of the model blocked and compiled without Winograd's algorithms and with them: what they add is
    their weights. Compiling itself, of the first call, does not count. With --before, "/before" is "never" over that of
    the earlier run, and "auto's" the same of "auto": below 1, this one takes less.
    """
    run_cases(cases_of(args), measure, COLUMNS, args)


def measure(case: Case, rounds: int) -> Row:
    """The row of one case, of the peaks of `rounds` calls. UsageError where the model does not take the images."""
    row = case.which()
    for kind in _KINDS:
        progress(f"{case.name} N={case.n}: {kind}")
        try:
            row |= apart.measured(__name__, kind, rounds, *words_of(case))
        except UsageError as error:
            raise UsageError(f"{case.name}, {kind}: {error}") from None
    if "plain_mb" in row:
        row["never_vs_plain"] = row["never_mb"] / row["plain_mb"]
    return row


def peak_of(kind: str, case: Case, calls: int) -> Row:
    """The row of one kind, measured in this process: "parameters_mb", and "<kind>_mb" where the system tells."""
    backend, mode = _KINDS[kind]
    with torch.inference_mode():  # the compiler's own modules are there before a model is
        torch.compile(nn.Conv2d(3, 3, 3).eval(), backend=backend or "torch_blocked")(torch.randn(1, 3, 9, 9))
    torch._dynamo.reset()
    before = settled_memory()
    model, images = made(case)
    if mode is not None:
        model = model.to(tb.blocked)
    if backend is not None:
        model = torch.compile(model, backend=backend)
    with torch.inference_mode(), tb.winograd(mode or "auto"):
        grown = growth(before, lambda: model(images), calls)
    row = {"parameters_mb": sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6}
    return row if grown is None else row | {f"{kind}_mb": grown}


if __name__ == "__main__":
    apart.answer(lambda kind, calls, *case: peak_of(kind, case_of(*case), int(calls)))
