"""What the benchmarks share: options, the loop over cases, the table, the JSON file, means."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch_blocked as tb
from torch_blocked.benchmark import machine
from torch_blocked.benchmark.measure import num_threads

Row = dict[str, Any]


class UsageError(ValueError):
    """What was asked for cannot be done; the message is one line for the user."""


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
# With --before: the time of that run over this one's, and of the runs of oneDNN's operator.
BEFORE, MKLDNN_BEFORE = Column("vs_before", "/before", 8, ".2f"), Column("mkldnn_vs_before", "mkldnn's", 9, ".2f")


def positive(text: str) -> int:
    """A positive number of the command line, such as C++ takes."""
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number below 2**31")
    return int(text)


def output_file(text: str) -> Path:
    """A file to be written at the end, refused now where that could not work."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return path


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
    where no case matches.
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
            found = measure(case, args.rounds)
            trips = [ns for ns in (before, machine.round_trip_ns()) if ns is not None]
            progress("")
            for row in found if isinstance(found, list) else [found]:
                row |= {ROUND_TRIP.key: max(trips)} if trips else {}
                row |= compared(row, args.before)
                rows.append(row)
                print(*(column.show(row) for column in columns), row.get("note", ""), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return rows


def compared_columns(columns: Sequence[Column]) -> list[Column]:
    """What a table of these columns shows of an earlier run."""
    return [BEFORE, *(MKLDNN_BEFORE for column in columns if column.key == "vs_mkldnn")]


def compared(row: Row, before: Sequence[Row]) -> Row:
    """How many times as fast a row is as the same one of an earlier run, and oneDNN's operator; {} without such."""
    which = ("set", "name", "n", "contestant")
    earlier = next((r for r in before if "ms" in r and all(r.get(key) == row.get(key) for key in which)), None)
    if earlier is None or "ms" not in row:
        return {}
    ours, peer = earlier["ms"] / row["ms"], "vs_mkldnn"
    peers = {MKLDNN_BEFORE.key: ours * earlier[peer] / row[peer]} if peer in row and peer in earlier else {}
    return {BEFORE.key: ours, **peers}


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
