"""What the benchmarks share: options, the loop over cases, the table, the JSON file, means."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torch_blocked as tb
from torch_blocked.benchmark import machine
from torch_blocked.benchmark.measure import num_threads

Row = dict[str, Any]


class UsageError(ValueError):
    """What was asked for cannot be done; the message is one line for the user."""


def first_line(error: BaseException) -> str:
    """The first line of its message; its type's name where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class Column(NamedTuple):
    """One column of the printed table: the key in a row, the heading, the width (negative: to the left), the format."""

    key: str
    heading: str
    width: int
    spec: str = ""

    def align(self, text: str) -> str:
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)

    def show(self, row: Row) -> str:
        """The cell of a row; "-" where the row has no such value."""
        value = row.get(self.key)
        return self.align("-" if value is None else format(value, self.spec))


# The slower of before a row was measured and after: what one core wrote is slow to read for another that is far away.
ROUND_TRIP = Column("round_trip_ns", "trip ns", 8, ".0f")
# With --before, of a table that has such a column: the time of that run over this one's, and of the runs of oneDNN's
# operator; the memory of this run over that one's, without and with Winograd's algorithms.
BEFORE = {
    "ms": Column("vs_before", "/before", 8, ".2f"),
    "vs_mkldnn": Column("mkldnn_vs_before", "mkldnn's", 9, ".2f"),
    "never_mb": Column("never_vs_before", "/before", 8, ".2f"),
    "auto_mb": Column("auto_vs_before", "auto's", 8, ".2f"),
}
# Rows of two runs that have the same of these, or lack the same, are figures of the same.
SAME = ("set", "name", "n", "contestant", "input", "image", "autocast")

# What PyTorch's own messages say of sizes that no memory has or that int64 does not hold.
_TOO_LARGE = (
    "DefaultCPUAllocator",
    "calculation overflowed",
    "numel: integer multiplication overflow",
    "bad_alloc",
)


def positive(text: str) -> int:
    """A positive number of the command line, such as C++ takes."""
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number below 2**31")
    return int(text)


def output_file(text: str) -> Path:
    """A file to be written at the end, refused now where that could not work."""
    path = Path(text)
    folder = path.absolute().parent
    try:
        path.stat()
        changed = path
    except (FileNotFoundError, NotADirectoryError):
        changed = folder
    except OSError as error:  # such as a name that is too long
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    if path.is_dir() or not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    if not os.access(changed, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {os.strerror(errno.EACCES)}")
    return path


def write_json(file: Path, found: object) -> None:
    """Writes what was found to the file of --json. UsageError where that fails."""
    try:
        file.write_text(json.dumps(found, indent=1) + "\n")
    except BrokenPipeError:  # a pipe, whose reader has read enough
        raise
    except OSError as error:
        raise UsageError(f"--json: {first_line(error)}") from None


def rows_file(text: str) -> list[Row]:
    """The rows of a file that --json wrote."""
    try:
        return [dict(row) for row in json.loads(Path(text).read_text())["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file that --json wrote") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark."""
    parser.add_argument("--match", default="", metavar="TEXT", help="only the rows whose name contains TEXT")
    parser.add_argument("--rounds", type=positive, default=9, help="samples of each contestant (default 9)")
    parser.add_argument("--threads", type=positive, help="threads (default: PyTorch's)")
    help_of_before = "compare with the rows of FILE, which --json wrote on other threads or of another version"
    parser.add_argument("--before", type=rows_file, default=[], metavar="FILE", help=help_of_before)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write rows and machine to FILE")


def run_cases(
    cases: Iterable[Any],
    measure: Callable[[Any, int], Row | list[Row]],
    columns: Sequence[Column],
    args: argparse.Namespace,
) -> list[Row]:
    """Measures the cases whose `name` matches, prints their rows as they come, writes the JSON file.

    On several threads each row tells how far the cores are from each other.

    `measure(case, rounds)` gives a row or several. Fallbacks are silent here: rows say which they are. UsageError
    where no case matches, where one does not fit into memory, and where the file cannot be written.
    """
    cases = [case for case in cases if args.match in case.name]
    if not cases:
        raise UsageError(f"no row's name contains {args.match!r}")
    rows = []
    with num_threads(args.threads), tb.fallback("allow"):
        about = machine.describe()
        print(f"{about['cpu']}, {about['isa']}, {about['threads']} threads, torch {about['torch']}\n")
        shown = compared_columns(columns) if args.before else ()
        columns = (*columns, *shown, *([ROUND_TRIP] if about["threads"] > 1 else []))
        print(*(column.align(column.heading) for column in columns))
        for case in cases:
            before = machine.round_trip_ns()
            found = rows_of(case, measure, args.rounds)
            trips = [ns for ns in (before, machine.round_trip_ns()) if ns is not None]
            for row in found:
                row |= {ROUND_TRIP.key: max(trips)} if trips else {}
                row |= compared(row, args.before)
                rows.append(row)
                print(*(column.show(row) for column in columns), row.get("note", ""), flush=True)
    if args.json:
        write_json(args.json, {"machine": about, "rows": rows})
    return rows


def rows_of(case: Any, measure: Callable[[Any, int], Row | list[Row]], rounds: int) -> list[Row]:
    """What `measure` finds of one case. UsageError where that needs more memory than there is."""
    try:
        found = measure(case, rounds)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        batch = f", N={case.n}" if hasattr(case, "n") else ""
        raise UsageError(f"{case.name}{batch} does not fit into memory: {first_line(error)}") from error
    finally:
        progress("")
    return found if isinstance(found, list) else [found]


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, or the size of one was not even a number of bytes."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or any(words in str(error) for words in _TOO_LARGE)


def compared_columns(columns: Sequence[Column]) -> list[Column]:
    """What a table of these columns shows of an earlier run."""
    return [BEFORE[column.key] for column in columns if column.key in BEFORE]


def compared(row: Row, before: Sequence[Row]) -> Row:
    """What a row shows of the same one of an earlier run; {} where there is none."""
    same = [r for r in before if all(r.get(key) == row.get(key) for key in SAME)]
    return {**times_as_fast(row, same), **times_the_memory(row, same)}


def times_as_fast(row: Row, same: Sequence[Row]) -> Row:
    """How many times as fast a row is as the first of the `same` that was timed, and oneDNN's operator."""
    earlier = next((r for r in same if "ms" in r), None)
    if earlier is None or "ms" not in row:
        return {}
    ours, peer = earlier["ms"] / row["ms"], "vs_mkldnn"
    peers = {BEFORE[peer].key: ours * earlier[peer] / row[peer]} if peer in row and peer in earlier else {}
    return {BEFORE["ms"].key: ours, **peers}


def times_the_memory(row: Row, same: Sequence[Row]) -> Row:
    """How many times as much memory a row's blocked models take as those of the first of the `same` that has such."""
    earlier = next((r for r in same if "never_mb" in r), {})
    # A small model may have taken nothing that the system counts.
    keys = [key for key in ("never_mb", "auto_mb") if key in row and earlier.get(key)]
    return {BEFORE[key].key: row[key] / earlier[key] for key in keys}


def progress(text: str) -> None:
    """Says what is under way on the terminal's last line, in place of what it said before; nothing into a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def ratios(times: dict[str, float]) -> dict[str, float]:
    """How many times as fast "blocked" is as each other: "vs_<name>" -> its time / ours."""
    return {f"vs_{name}": seconds / times["blocked"] for name, seconds in times.items() if name != "blocked"}


def throughput(times: dict[str, float], nbytes: int) -> Row:
    """Times in seconds, bytes read plus written -> ours in milliseconds and GB/s (1e9 bytes), ratios to each peer."""
    ours = times["blocked"]
    return {"ms": 1e3 * ours, "gbytes_per_s": nbytes / ours / 1e9, **ratios(times)}


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
