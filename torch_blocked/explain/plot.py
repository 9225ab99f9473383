"""The report as a picture: calls along the time, one lane a kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_blocked.explain.palette import COLOURS, kind

if TYPE_CHECKING:
    from torch_blocked.explain.report import Report

BAR = 0.4  # of a lane; the names are in the rest
NAMED = 0.04  # calls of this share of the time have their module's name beside them


def draw(report: Report, path: str | Path) -> None:
    """Writes the picture to a file, its kind by the name's suffix. ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("report.plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    lanes, now = list(COLOURS), 0.0
    for call in report.run.calls:
        name, ms = kind(call), 1e3 * call.seconds
        lane = lanes.index(name)
        axes.barh(lane, ms, BAR, left=now, color=COLOURS[name], edgecolor="white", linewidth=0.3)
        if report.share(call) >= NAMED:
            label = f"{call.module} {call.operator}".strip().replace("$", r"\$")  # two of them are mathematics
            axes.text(now, lane - BAR / 2, label, fontsize=7, rotation=25, rotation_mode="anchor", va="bottom")
        now += ms
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -1)  # from above: room for the names over the first lane
    axes.set_xlabel("ms in operators")
    axes.set_title(report.verdict.splitlines()[0].removesuffix(" To mend:"), fontsize=9, loc="left")
    figure.savefig(path)
