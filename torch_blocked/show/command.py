"""``python -m torch_blocked show FORMAT SIZE``: the picture of a format, on the terminal or in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_blocked.benchmark.report import UsageError
from torch_blocked.memory_desc import Dims
from torch_blocked.show.picture import show


def ints(text: str, separator: str, example: str) -> Dims:
    """``2x17x5x4`` as a tuple."""
    try:
        return tuple(int(n) for n in text.split(separator))
    except ValueError:
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is not of the form {example}") from None


def format_or_strides(text: str) -> str | Dims:
    """A format tag, or strides where there is no letter."""
    return ints(text, ",", "nChw8c or 340,20,4,1") if text[:1].isdigit() else text


def size(text: str) -> Dims:
    return ints(text, "x", "2x17x5x4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", type=format_or_strides, help="a format tag, nChw8c, or strides, 1000,60,6,1")
    parser.add_argument("size", type=size, help="the logical size, 2x17x5x4")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write FILE.svg or FILE.txt, print nothing")
    parser.epilog = "example: python -m torch_blocked show nChw8c 2x17x5x4 -o nChw8c.svg"


def run(args: argparse.Namespace) -> None:
    """Prints the text picture, or saves one. UsageError for a wrong format, size or path."""
    try:
        picture = show(args.format, args.size)
        if args.output is None:
            print(picture)
        else:
            picture.save(args.output)
    except BrokenPipeError:  # not wrong: what reads the output has read enough
        raise
    except (ValueError, OSError) as error:
        raise UsageError(" ".join(str(error).split())) from None
