"""Checks PyTorch's whole operator database on blocked tensors and prints what runs natively: `make opinfo`.

Each operator is checked in a process of its own, so that one that crashes is a line of the table. The columns are the
checks of opinfo.py; "native" are samples without any fallback, "-" no sample that a blocked tensor is part of.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

import torch
from opinfo import CHECKS, OPS, Report, check
from opinfo_exceptions import EXCEPTIONS

SECONDS = 120


def checked_apart(names: list[str], limit: int, processes: int) -> Iterator[tuple[str, Report]]:
    """The report of each operator as it is done; one that crashes or hangs has that as its failure."""
    fork, waiting, running = multiprocessing.get_context("fork"), list(reversed(names)), {}
    while waiting or running:
        while waiting and len(running) < processes:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_send_report, args=(sender, waiting[-1], limit))
            process.start()
            sender.close()
            running[receiver] = waiting.pop(), process, time.monotonic()
        for receiver in wait(list(running), timeout=1):
            name, process, _ = running.pop(receiver)
            try:
                report = receiver.recv()
            except EOFError:
                process.join()
                report = Report(failures=[f"the process ended with code {process.exitcode}"])
            process.join()
            yield name, report
        for name, process, started in running.values():
            if time.monotonic() - started > SECONDS:
                print(f"{name}: more than {SECONDS} s, stopped")
                process.kill()


def _send_report(sender: Connection, name: str, limit: int) -> None:
    sender.send(check(name, limit))


def state(name: str, what: str, report: Report) -> str:
    """One cell of the table."""
    ran, native = report.ran[what], report.native[what]
    if any(f.startswith(what) for f in report.failures):
        return "FAILED"
    if (name, what) in EXCEPTIONS:
        return "excepted"
    if not ran:
        return "-"
    return "native" if native == ran else f"{native}/{ran}" if native else "fallback"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="", help="only operators whose name holds this")
    parser.add_argument("--limit", type=int, default=10**9, help="samples of each dtype, all by default")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(1)  # a process that has run parallel loops cannot fork
    names = [name for name in OPS if options.match in name]
    reports, began = {}, time.monotonic()
    for name, report in checked_apart(names, options.limit, options.processes):
        reports[name] = report
        print(f"\r{len(reports)}/{len(names)} {name:60}", end="", file=sys.stderr)
    print(file=sys.stderr)
    print_table(reports)
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(any(report.failures for report in reports.values()))


def print_table(reports: dict[str, Report]) -> None:
    """One row an operator, then the failures, what fell back most, and the totals."""
    print(f"{'operator':52}" + "".join(f"{what:>11}" for what in CHECKS) + "  what fell back")
    totals: dict[str, Counter] = {what: Counter() for what in CHECKS}
    for name, report in sorted(reports.items()):
        cells = {what: state(name, what, report) for what in CHECKS}
        for what, cell in cells.items():
            totals[what]["partly native" if "/" in cell else cell] += 1
        fell_back = ", ".join(overload.removeprefix("aten.") for overload, _ in report.fallbacks.most_common(4))
        print(f"{name:52}" + "".join(f"{cell:>11}" for cell in cells.values()) + f"  {fell_back}")
    for name, report in sorted(reports.items()):
        for failure in report.failures[:6]:
            print(f"{name}: {failure}")
    print("\ntotals, operators")
    states = ("native", "partly native", "fallback", "excepted", "FAILED", "-")
    for s in states:
        print(
            f"{s.replace('-', 'not applicable') if s == '-' else s:52}" + "".join(f"{totals[w][s]:>11}" for w in CHECKS)
        )
    failed = sum(bool(report.failures) for report in reports.values())
    print(
        f"{len(reports)} operators, {failed} failed, {sum(sum(r.ran.values()) for r in reports.values())} samples run"
    )


if __name__ == "__main__":
    main()
