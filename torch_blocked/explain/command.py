"""`python -m torch_blocked explain`."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import torch_blocked as tb
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.benchmark.models import build, factory
from torch_blocked.benchmark.networks import MODELS
from torch_blocked.benchmark.report import UsageError, first_line, output_file, positive, write_json
from torch_blocked.explain.report import Report

EXAMPLES = """examples:
  python -m torch_blocked explain --model resnet50
  python -m torch_blocked explain --model unet --input 1x3x256x256 --plain
  python -m torch_blocked explain --model package.module:make_model --input 8x3x64x64 --json report.json
  python -m torch_blocked explain --model mobilenet_v2 --compile
"""


def size(text: str) -> tuple[int, ...]:
    """A size of the command line, such as 1x3x224x224."""
    parts = text.split("x")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 1x3x224x224")
    return tuple(map(int, parts))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    known = f"{', '.join(MODELS)}, or package.module:factory, which gives a torch.nn.Module"
    parser.add_argument("--model", required=True, metavar="NAME", help=known)
    help_of_input = "size of a float32 input, one for each that the model takes (default 1x3x224x224)"
    parser.add_argument("--input", type=size, nargs="+", default=[(1, 3, 224, 224)], metavar="SIZE", help=help_of_input)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--blocked", action="store_true", help="after model.to(tb.blocked), the default")
    which.add_argument("--plain", action="store_true", help="the model as it is")
    parser.add_argument("--compile", action="store_true", help='torch.compile(model, backend="torch_blocked")')
    parser.add_argument(
        "--train", action="store_true", help="in training mode, with gradients (default: eval, without)"
    )
    parser.add_argument("--threads", type=positive, help="threads (default: PyTorch's)")
    parser.add_argument("--whole", action="store_true", help="rows that take next to no time, too")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the report to FILE")


def run(args: argparse.Namespace) -> None:
    """Prints the report. UsageError for a model that cannot be made or does not take inputs of these sizes."""
    torch.manual_seed(0)
    model = build(args.model, factory(args.model)).train(args.train)
    if not args.plain:
        _make_blocked(args.model, model)
    if args.compile:
        model = torch.compile(model, backend="torch_blocked")
    with num_threads(args.threads), torch.set_grad_enabled(args.train):
        report = _explained(model, args.input)
    print(report.table(args.whole))
    if args.json:
        write_json(args.json, report.to_dict())


def _make_blocked(name: str, model: nn.Module) -> None:
    try:
        model.to(tb.blocked)
    except Exception as error:  # of a model whose parameters have no sizes yet, for one
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{name} cannot be made blocked: {what}; --plain explains it as it is") from error


def _explained(model: nn.Module, sizes: list[tuple[int, ...]]) -> Report:
    try:
        return tb.explain(model, *map(torch.randn, sizes))
    except Exception as error:  # of the user's own model
        what = ", ".join("x".join(map(str, size)) for size in sizes)
        raise UsageError(f"the model does not run on {what}: {type(error).__name__}: {first_line(error)}") from error
