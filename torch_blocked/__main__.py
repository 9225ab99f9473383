"""The command line: ``python -m torch_blocked`` and one of `COMMANDS`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from torch_blocked import reference
from torch_blocked.benchmark import conv, machine, memory, model, pool, reduce, reorder, train
from torch_blocked.benchmark.report import UsageError
from torch_blocked.dispatch.table import markdown_table
from torch_blocked.explain import command as explain
from torch_blocked.show import command as show


class Command(NamedTuple):
    """One subcommand: a line of help, what adds its options, what runs it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def info(args: argparse.Namespace) -> None:
    """Prints versions, CPU, caches, tier, block, threads, the cores' distance and what a faster tier would need."""
    trip = machine.round_trip_ns()
    distance = "unknown" if trip is None else f"{trip:.0f} ns from core to core and back"
    for name, value in {**machine.describe(), "round trip": distance, "faster tier": machine.faster_tier()}.items():
        print(f"{name:14s} {value}")


def operators(args: argparse.Namespace) -> None:
    """Prints which operators have a blocked implementation, as a Markdown table."""
    print(markdown_table())


def api_reference(args: argparse.Namespace) -> None:
    """Prints docs/reference.md."""
    print(reference.markdown())


COMMANDS = {
    "info": Command("versions, CPU, caches, ISA tier, block, threads", lambda parser: None, info),
    "operators": Command("which operators run blocked, as a Markdown table", lambda parser: None, operators),
    "reference": Command("the API reference from the docstrings, as Markdown", lambda parser: None, api_reference),
    "explain": Command("what a model ran, what it cost, what to mend", explain.add_arguments, explain.run),
    "show": Command("how a format lies in memory, as text or SVG", show.add_arguments, show.run),
    "bench conv": Command("convolutions against F.conv2d and oneDNN's operator", conv.add_arguments, conv.run),
    "bench reorder": Command("reorders against memcpy and .contiguous()", reorder.add_arguments, reorder.run),
    "bench pool": Command("pooling and up-sampling against F on plain tensors", pool.add_arguments, pool.run),
    "bench reduce": Command("reductions and softmax against plain tensors", reduce.add_arguments, reduce.run),
    "bench model": Command("whole networks against Inductor and other runtimes", model.add_arguments, model.run),
    "bench memory": Command("peak memory of whole networks against eager mode", memory.add_arguments, memory.run),
    "bench train": Command("training steps against NCHW and channels_last", train.add_arguments, train.run),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser() -> Parser:
    """One parser a word of the commands' names."""
    parser = Parser(prog="python -m torch_blocked", description="Blocked tensors for PyTorch.")
    groups = {"": parser.add_subparsers(required=True, metavar="command")}
    for name, command in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            groups[group] = (
                groups[""]
                .add_parser(group, help="speed against PyTorch's own operators")
                .add_subparsers(required=True, metavar="what")
            )
        leaf = groups[group].add_parser(word, help=command.help, description=command.help)
        command.add_arguments(leaf)
        leaf.set_defaults(run=command.run, parser=leaf)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; `argv` as ``sys.argv[1:]``. SystemExit(2) after one line on stderr for what is wrong in it."""
    args = make_parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except UsageError as error:
        args.parser.error(str(error))
    except BrokenPipeError:  # `... | head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains as it ends
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
