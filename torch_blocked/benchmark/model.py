"""`bench model`: whole networks in eval mode, blocked and compiled, against PyTorch, Inductor and other runtimes.

All contestants (contestants.py) start from the same weights, get the same random images and are timed in turn in one
process. A row is one contestant on one model and batch. Their memory is measured in processes of their own (apart.py).
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.benchmark import apart, machine
from torch_blocked.benchmark.contestants import CONTESTANTS, Answer
from torch_blocked.benchmark.measure import medians
from torch_blocked.benchmark.models import build, factory, settle
from torch_blocked.benchmark.networks import MODELS
from torch_blocked.benchmark.report import (
    Column,
    Row,
    UsageError,
    add_options,
    first_line,
    geometric_mean,
    output_file,
    positive,
    progress,
    run_cases,
)
from torch_blocked.compile.facts import Facts
from torch_blocked.counting import listen

COLUMNS = (
    Column("name", "model", -16),
    Column("n", "N", 3),
    Column("contestant", "contestant", -17),
    Column("ms", "ms", 9, ".2f"),
    Column("images_per_s", "images/s", 9, ".1f"),
    Column("vs_best", "/best", 6, ".2f"),
    Column("peak_mb", "peak MB", 8, ".0f"),
    Column("difference", "differs", 8, ".0e"),
    Column("compile_s", "compile s", 9, ".1f"),
)


class Case(NamedTuple):
    """A model, made by `make`, and a batch of n images of size (c, h, w)."""

    name: str
    make: Callable[[], nn.Module]
    n: int
    size: tuple[int, ...]

    @property
    def input(self) -> str:
        """The size as --input takes it."""
        return "x".join(map(str, self.size))

    def which(self) -> Row:
        """The part of a row that says of what its figures are."""
        return {"name": self.name, "n": self.n, "input": self.input}


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which cases there are."""
    known = ", ".join(MODELS)
    help_of_model = f"{known}, or package.module:factory, which gives a torch.nn.Module (default: the names)"
    parser.add_argument("--model", nargs="+", default=list(MODELS), metavar="NAME", help=help_of_model)
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 16], metavar="N", help="(default 1 16)")
    help_of_input = "channels, height and width of an image (default 3x224x224)"
    parser.add_argument("--input", type=image_size, default=(3, 224, 224), metavar="CxHxW", help=help_of_input)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench model`."""
    add_case_arguments(parser)
    usual = [name for name, contestant in CONTESTANTS.items() if contestant.usual]
    help_of_contestants = f"what is timed: {', '.join(CONTESTANTS)} (default: all but the last)"
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=usual, metavar="NAME", help=help_of_contestants
    )
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw the ratios as bars (needs matplotlib)")
    add_options(parser)


def image_size(text: str) -> tuple[int, ...]:
    """(channels, height, width) of "3x224x224"."""
    size = tuple(map(positive, text.split("x")))
    if len(size) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not CxHxW, such as 3x224x224")
    return size


def words_of(case: Case) -> tuple[object, ...]:
    """The arguments of `case_of`, in another process."""
    return case.name, case.n, case.input


def case_of(name: str, n: str, size: str) -> Case:
    """The case of a name that `factory` knows, a batch and a size as `image_size` takes it."""
    return Case(name, factory(name), int(n), image_size(size))


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Each model with each batch."""
    return [Case(name, factory(name), n, args.input) for name, n in product(args.model, args.batch)]


def run(args: argparse.Namespace) -> None:
    """Measures each model and batch; "/best" is the best peer's median over the contestant's: above 1, it is faster."""
    if args.plot:
        load_pyplot()
    cases = cases_of(args)
    contestants, text = [name for name in args.contestants if CONTESTANTS[name].installed()], missing(args.contestants)
    if not contestants:
        raise UsageError(text)
    if text:
        print(text)
    rows = run_cases(cases, lambda case, rounds: with_peaks(measure(contestants, case, rounds), case), COLUMNS, args)
    print(*summaries(rows), sep="\n")
    if args.plot:
        plot(rows, args.plot)


def missing(contestants: Sequence[str]) -> str:
    """One line that names those that are not installed; empty where all are."""
    names = [name for name in contestants if not CONTESTANTS[name].installed()]
    return f"not installed, left out: {', '.join(names)} (pip install torch_blocked[bench])" if names else ""


# ---- Measuring


def measure(contestants: Sequence[str], case: Case, rounds: int) -> list[Row]:
    """A row of each contestant; one that fails has a note that says why instead of times.

    Each of ours has weights of its own, and may keep as many transformed ones as alone in a process.
    """
    torch._dynamo.reset()  # the code of another batch would be made for both
    model, images = made(case)
    with torch.inference_mode():
        expected = expected_answer(case, model, images)
    with tb.winograd("auto", max_bytes=sum(CONTESTANTS[name].ours for name in contestants) * kept_alone(model)):
        return timed(contestants, case, rounds, model, images, expected)


def kept_alone(model: nn.Module) -> int:
    """The default of `tb.winograd`'s max_bytes in a process that runs one copy of the model."""
    weights = [m.weight for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    return max(2 * sum(w.numel() * w.element_size() for w in weights), 256 << 20)


def timed(
    contestants: Sequence[str], case: Case, rounds: int, model: nn.Module, images: Tensor, expected: Tensor
) -> list[Row]:
    """The rows of `measure`."""
    rows, answers = [], {}
    for name in contestants:
        progress(f"{case.name} N={case.n}: making {name}")
        row = case.which() | {"contestant": name}
        rows.append(row)
        try:
            answers[name], found = first_call(name, model, images, expected)
            row |= found
        except Exception as error:  # of the contestant's own converter
            row["note"] = f"{type(error).__name__}: {first_line(error)}"
    progress(f"{case.name} N={case.n}: timing {len(answers)} contestants, {rounds} rounds")
    times = medians(answers, rounds)
    best = min((t for name, t in times.items() if not CONTESTANTS[name].ours), default=None)
    for row in rows:
        if seconds := times.get(row["contestant"]):
            row |= {"ms": 1e3 * seconds, "images_per_s": case.n / seconds, "vs_best": best and best / seconds}
    return rows


def with_peaks(rows: list[Row], case: Case) -> list[Row]:
    """The rows of contestants that were timed, with their "peak_mb"."""
    for row in rows:
        if "ms" in row:
            progress(f"{case.name} N={case.n}: memory of {row['contestant']}")
            try:
                row |= apart.measured(__name__, row["contestant"], *words_of(case))
            except UsageError as error:
                row.setdefault("note", f"memory: {error}")
    return rows


def peak_of(name: str, case: Case) -> Row:
    """The part of a contestant's row that is measured in this process: "peak_mb", where the system tells.

    It is what the process grows by from before the contestant is made to the peak of a call after the first, 1e6 bytes.
    """
    small = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 9, 9)
    with torch.inference_mode():  # the modules that make it are there before
        CONTESTANTS[name].prepared(*small)()
    torch._dynamo.reset()
    model, images = made(case)
    before = settled_memory()
    answer = CONTESTANTS[name].prepared(model, images)
    with torch.inference_mode():
        grown = growth(before, answer)
    return {} if grown is None else {"peak_mb": grown}


def growth(before: int | None, call: Callable[[], object], calls: int = 1) -> float | None:
    """What the process grows by from `before` bytes to the peak of calls after the first, 1e6 bytes."""
    call()
    settled_memory()
    machine.reset_peak_memory()
    for _ in range(calls):
        call()
    peak = machine.peak_memory()
    return None if before is None or peak is None else (peak - before) / 1e6


def made(case: Case) -> tuple[nn.Module, Tensor]:
    """The model in eval mode and its images, from seed 0. UsageError where the one does not take the others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, images = build(case.name, case.make).eval(), torch.randn(case.n, *case.size)
        if case.name in MODELS:
            with _refusal_of(case):
                settle(model, torch.randn(2, *case.size))
        return model, images


@contextmanager
def _refusal_of(case: Case) -> Iterator[None]:
    """What a model raises is a UsageError: it does not take such images."""
    try:
        yield
    except Exception as error:  # of the user's own model
        raise UsageError(f"{case.name} does not take {case.input} images: {first_line(error)}") from error


def expected_answer(case: Case, model: nn.Module, images: Tensor) -> Tensor:
    """The plain model's answer. UsageError where it gives none."""
    with _refusal_of(case):
        answer = model(images)
    if not isinstance(answer, Tensor):
        raise UsageError(f"{case.name} gives {type(answer).__name__}, not one tensor")
    return answer


def first_call(name: str, model: nn.Module, images: Tensor, expected: Tensor) -> tuple[Answer, Row]:
    """Makes a contestant and calls it; what is known of it but its speed.

    "compile_s": seconds until the first answer. "difference": the largest from `expected`, relative to that's largest
    value.
    """
    breaks = sum(dynamo_counters["graph_break"].values())
    start = perf_counter()
    answer = CONTESTANTS[name].prepared(model, images)
    traced = Facts()
    with torch.inference_mode(), tb.count() as counts, listen(traced):
        actual = answer()
    row: Row = {"compile_s": perf_counter() - start}
    row["difference"] = float((actual - expected).abs().max() / expected.abs().max())
    if CONTESTANTS[name].counted:
        row |= costs(name, answer, counts, traced)
        row["graph_breaks"] = sum(dynamo_counters["graph_break"].values()) - breaks
        fallbacks = ", ".join(sorted(row["fallbacks"])) or "none"
        row["note"] = f"reorders {row['reorders']}, fallbacks {fallbacks}, graph breaks {row['graph_breaks']}"
    return answer, row


def settled_memory() -> int | None:
    """Bytes that the process holds once what is free went back to the system; None where unknown."""
    gc.collect()
    tb.empty_cache()
    machine.trim_memory()
    return machine.resident_memory()


def costs(name: str, answer: Answer, counts: tb.Counters, traced: Facts) -> Row:
    """Reorders of activations in a call, and fallbacks: of the first call, what ran and what was traced.

    The first eager call also moves what later ones keep.
    """
    if name == "blocked":
        with torch.inference_mode(), tb.count() as counts:
            answer()
        traced = Facts()
    activation = f"{library.isa_block()}b"  # weights are blocked by other axes
    reorders = sum(n for sides, n in counts.reorders.items() if activation in sides.split(" -> "))
    fallbacks = dict.fromkeys(traced.fallbacks, 1) | counts.fallbacks
    return {"reorders": reorders + traced.reorders.total(), "fallbacks": fallbacks}


# ---- Reporting


def summaries(rows: Sequence[Row]) -> list[str]:
    """The geometric mean over models of each contestant's "/best", a line each, a column each batch."""
    batches = sorted({row["n"] for row in rows})
    lines = ["", f"{'geometric mean of /best':26}" + "".join(f"{f'N={n}':>9}" for n in batches)]
    for name in CONTESTANTS:
        means = [mean(row for row in rows if (row["contestant"], row["n"]) == (name, n)) for n in batches]
        if any(means):
            lines.append(f"{name:26}" + "".join(f"{m:9.2f}" if m else f"{'-':>9}" for m in means))
    return lines


def mean(rows: Iterator[Row]) -> float | None:
    """The geometric mean of the rows' "vs_best"; None where there is none."""
    found = [row["vs_best"] for row in rows if row.get("vs_best")]
    return geometric_mean(found) if found else None


def load_pyplot():  # noqa: ANN201 - a module of an optional package
    """matplotlib's pyplot, drawing into files. UsageError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draws "/best" as bars, a group each model and batch, a colour each contestant. UsageError if it cannot."""
    pyplot = load_pyplot()
    groups = [(f"{name}\nN={n}", {r["contestant"]: r for r in group}) for (name, n), group in groupby(rows, _model)]
    names = [name for name in CONTESTANTS if any(name in group for _, group in groups)]
    figure, axis = pyplot.subplots(figsize=(2 + 1.2 * len(groups), 5))
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        heights = [group.get(name, {}).get("vs_best") or 0 for _, group in groups]
        axis.bar([g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))], heights, width, label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(groups)), [label for label, _ in groups])
    axis.set_ylabel("times as fast as the best peer")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars
    figure.tight_layout()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no image format
        raise UsageError(f"--plot: {first_line(error)}") from None


def _model(row: Row) -> tuple[str, int]:
    return row["name"], row["n"]


if __name__ == "__main__":
    apart.answer(lambda name, *case: peak_of(name, case_of(*case)))
