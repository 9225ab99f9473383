"""Figures that a process of its own measures: what one model frees, or a library keeps, another would occupy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import torch

from torch_blocked.benchmark.report import Row, UsageError


def measured(module: str, *arguments: object) -> Row:
    """The row that `module` finds, run as a program by the present number of threads: it calls `answer`.

    UsageError, in one line, where it fails.
    """
    command = [sys.executable, "-m", module, str(torch.get_num_threads()), *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode != 0:
        raise UsageError(child.stderr.strip().rpartition("\n")[2] or f"exit status {child.returncode}")
    return json.loads(child.stdout.rpartition("\n")[2])


def answer(find: Callable[..., Row]) -> None:
    """In that process: prints what `find` gives of the arguments."""
    threads, *arguments = sys.argv[1:]
    torch.set_num_threads(int(threads))
    try:
        row = find(*arguments)
    except UsageError as error:
        sys.exit(str(error))
    print(json.dumps(row), end="")
