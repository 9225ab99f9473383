"""The report: the verdict first, then a table of what ran, and totals."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from torch_blocked import library
from torch_blocked.explain.findings import WORTH, Finding, is_wasteful
from torch_blocked.explain.record import Call

WIDTH = 100
FOLDED = 0.005  # rows below this share of the time are left out, where there is nothing to say of them

# Heading, width (negative: to the left).
COLUMNS = (
    ("module", -21), ("operator", -18), ("format", -17), ("size", -14), ("algorithm", -12), ("ms", 7), ("%", 5),
)  # fmt: skip


# How a plain model ran -> what makes it blocked, and the convolutions that this takes.
REMEDIES = {
    "eager": ("model.to(tb.blocked)", "float32 or of half precision"),
    "compiled": ('torch.compile(model, backend="torch_blocked")', "float32"),
}


@dataclass
class Run:
    """What was measured.

    Attributes:
        how: "eager" or "compiled".
        seconds: the median of whole runs, not recorded.
        calls: the operators' calls in order.
        peak_bytes: the most that tensors made in a run held at one time; None where it was not followed.
        graphs: of a compiled model, a line of facts about each graph.
    """

    how: str
    seconds: float
    calls: list[Call]
    peak_bytes: int | None = None
    graphs: list[str] = field(default_factory=list)

    @property
    def whole(self) -> float:
        """The seconds that shares are of: those of a run, or of its recorded calls where these took longer."""
        return max(self.seconds, sum(call.seconds for call in self.calls))


@dataclass
class Report:
    """What `torch_blocked.explain` found: print it, or take `to_dict`, `plot`, or a notebook's display.

    Attributes:
        run: what was measured, `run.calls` the calls of operators.
        findings: what can be mended, the dearest first; the verdict has those worth a hundredth of the time.
    """

    run: Run
    findings: list[Finding]
    packed_weights_bytes: int = field(default_factory=library.packed_weights_bytes)
    cached_bytes: int = field(default_factory=library.cached_bytes)

    @property
    def verdict(self) -> str:
        """What it comes to: a line of costs, then one a finding; "nothing to mend" where there is none."""
        if not any(call.is_blocked for call in self.run.calls):
            return self._plain_verdict()
        worth = [f for f in self.findings if f.share >= WORTH]
        timed = (
            "no reorders, no fallbacks" if self.run.how == "eager" else "no reorder, no fallback of a time of its own"
        )
        head = "; ".join(self._costs()) or timed
        if not worth:
            return f"{head}: nothing to mend."
        return "\n".join([f"{head}. To mend:", *map(sentence, worth)])

    def _costs(self) -> list[str]:
        """How many reorders and fallbacks there are, and what they cost where it is known."""
        totals, within = self.totals(), self._within()
        timed = {"reorder": totals["reorders"]["count"] - within, "fallback": totals["fallbacks"]["count"]}
        costs = [f"{count(n, name)} cost {self._part(totals[name + 's']['ms']):.1%}" for name, n in timed.items() if n]
        return costs + ([f"{count(within, 'reorder')} within operators"] if within else [])

    def _within(self) -> int:
        """The number of reorders that operators do within, whose time is a part of theirs."""
        return sum(r.seconds is None for call in self.run.calls for r in call.reorders)

    def _plain_verdict(self) -> str:
        convolutions = [call for call in self.run.calls if call.is_convolution]
        if not convolutions:
            return "No tensor is blocked, and there is no convolution: nothing to mend."
        seconds = sum(call.seconds for call in convolutions)
        forward = [call for call in convolutions if not call.is_gradient] or convolutions
        remedy, takes = REMEDIES[self.run.how]
        return (
            f"No tensor is blocked. {remedy} makes its {count(len(forward), 'convolution')} "
            f"({self._part(1e3 * seconds):.0%} of the time) blocked where they are {takes}."
        )

    @property
    def _ms(self) -> float:
        return self.run.seconds * 1e3

    def _part(self, ms: float) -> float:
        return ms / (1e3 * self.run.whole) if self.run.whole else 0.0

    def totals(self) -> dict[str, dict[str, float]]:
        """Reorders, fallbacks, convolutions and calls -> their number ("count") and milliseconds ("ms")."""
        calls = self.run.calls
        reorders = [r for call in calls for r in call.reorders]
        parts = {
            "calls": [call.seconds for call in calls],
            "convolutions": [call.seconds for call in calls if call.is_convolution],
            "fallbacks": [call.seconds for call in calls if call.fallback],
            "reorders": [r.seconds or 0.0 for r in reorders],
        }
        found = {name: {"count": len(part), "ms": 1e3 * sum(part)} for name, part in parts.items()}
        found["convolutions"]["count"] = sum(call.convolutions for call in calls)  # a call may be a chain of them
        found["reorders"]["bytes"] = sum(r.nbytes for r in reorders)
        return found

    def to_dict(self) -> dict[str, object]:
        """Everything as dicts, lists, numbers and strings, which `json.dumps` takes. Times are in seconds or ms."""
        return {
            "verdict": self.verdict,
            "how": self.run.how,
            "ms": self._ms,
            "totals": self.totals(),
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "graphs": self.run.graphs,
            "calls": [self._call_as_dict(call) for call in self.run.calls],
            "peak_bytes": self.run.peak_bytes,
            "packed_weights_bytes": self.packed_weights_bytes,
            "cached_bytes": self.cached_bytes,
        }

    def _call_as_dict(self, call: Call) -> dict[str, object]:
        row = dataclasses.asdict(call)
        for name in ("inputs", "outputs"):
            row[name] = [x._asdict() for x in getattr(call, name)]
        row["fallback"] = call.fallback._asdict() if call.fallback else None
        row["share"] = self.share(call)
        return row

    def share(self, call: Call) -> float:
        """The part of the whole time that a call took."""
        return call.seconds / self.run.whole if self.run.whole else 0.0

    def __str__(self) -> str:
        return self.table()

    def table(self, whole: bool = False) -> str:
        """The report as text, 100 columns wide; `whole`: with the rows that take next to no time."""
        verdict = [part for line in self.verdict.splitlines() for part in wrapped(line)]
        rows, left_out = self.rows(whole)
        lines = [*verdict, "", " ".join(align(name, width) for name, width in COLUMNS)]
        for call in rows:
            cells = zip(self.cells(call), COLUMNS, strict=True)
            lines.append(" ".join(align(text, width) for text, (_, width) in cells))
            lines += [part for note in notes(call) for part in wrapped(note, "    ")]
        summary = [part for line in self.summary() for part in wrapped(line)]
        return "\n".join([*lines, *left_out, "", *summary])

    def rows(self, whole: bool = False) -> tuple[list[Call], list[str]]:
        """The calls that have a row, all where `whole`, and a line on the others, where there are any."""
        rows, left = [], []
        for call in self.run.calls:
            (rows if whole or self.is_notable(call) else left).append(call)
        ms = 1e3 * sum(call.seconds for call in left)
        line = f"... and {count(len(left), 'call')} of {ms:.3f} ms in all: report.table(whole=True)"
        return rows, [line] if left else []

    def is_notable(self, call: Call) -> bool:
        """Whether a call takes its part of the time, or has something to say."""
        if call.fallback or self.share(call) >= FOLDED:
            return True
        return sum(r.seconds or 0.0 for r in call.reorders) >= FOLDED * self.run.whole > 0

    def cells(self, call: Call) -> list[str]:
        """The texts of a row, one a column."""
        module = call.module if len(call.module) <= 21 else "…" + call.module[-20:]
        size = "x".join(map(str, call.outputs[0].size)) if call.outputs else ""
        by = "fallback" if call.fallback else call.algorithm
        return [module, call.operator, formats(call), size, by, f"{1e3 * call.seconds:.3f}", f"{self.share(call):.1%}"]

    def summary(self) -> list[str]:
        """The lines after the table."""
        totals = self.totals()
        lines = [f"{self.run.how}: {self._ms:.3f} ms a run, of it {totals['calls']['ms']:.3f} ms in operators"]
        parts = {name: part for name, part in totals.items() if name != "calls"}
        lines += [f"{count(part['count'], name[:-1])}: {self._sum(name, part)}" for name, part in parts.items()]
        lines += self.run.graphs
        if self.run.peak_bytes is not None:
            lines.append(f"peak memory of tensors made in a run: {megabytes(self.run.peak_bytes)}")
        lines.append(
            f"in this process: packed weights {megabytes(self.packed_weights_bytes)}, "
            f"freed outputs kept for reuse {megabytes(self.cached_bytes)}"
        )
        return lines

    def _sum(self, name: str, part: dict[str, float]) -> str:
        """What all reorders, fallbacks or convolutions take."""
        time = f"{part['ms']:.3f} ms, {self._part(part['ms']):.1%}"
        if name != "reorders":
            return time
        within = self._within()
        if within:
            time = f"{within} within operators" + (f", the others {time}" if part["count"] > within else "")
        return f"{time}, {megabytes(part['bytes'])} read and written"

    def _repr_html_(self) -> str:
        from torch_blocked.explain.html import page

        return page(self)

    def plot(self, path: str | Path) -> None:
        """Draws the calls along the time, coloured by what they are, into a file that matplotlib can write.

        Raises: ImportError where matplotlib is not installed.
        """
        from torch_blocked.explain.plot import draw

        draw(self, path)


def sentence(finding: Finding) -> str:
    """A finding as one line."""
    modules = [m or "the model's own forward" for m in finding.modules]
    where = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    cost = f"{'at most ' if finding.at_most else ''}{1e3 * finding.seconds:.3f} ms, {finding.share:.1%}"
    return f"- {finding.kind} in {where} ({cost}): {finding.what}: {finding.why}; {finding.remedy}."


def formats(call: Call) -> str:
    """The format of what comes in and of what goes out; one where they are the same."""
    src, dst = (x[0].format if x else "" for x in (call.inputs, call.outputs))
    return src if src == dst or not dst else f"{src} -> {dst}"


def notes(call: Call) -> list[str]:
    """What there is to say of a call, a line each."""
    lines = [f"{call.fallback.why}; {call.fallback.remedy}"] if call.fallback else []
    for r in call.reorders:
        speed = f" in {1e3 * r.seconds:.3f} ms, {r.nbytes / r.seconds / 1e9:.1f} GB/s" if r.seconds else " within"
        lines.append(f"reorder {r.src} -> {r.dst}, {megabytes(r.nbytes)}{speed}")
    for x in [x for x in call.outputs[:1] if is_wasteful(x)]:
        lines.append(f"{x.size[1]} channels in blocks of {x.block}: {x.padding:.1f}x as large")
    return lines


def align(text: str, width: int) -> str:
    """A cell, cut where it is too long."""
    text = text if len(text) <= abs(width) else text[: abs(width) - 1] + "…"
    return text.ljust(-width) if width < 0 else text.rjust(width)


def wrapped(line: str, indent: str = "") -> list[str]:
    """A line in parts of `WIDTH`, those after the first indented further."""
    return textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e4 else f"{nbytes} bytes"
