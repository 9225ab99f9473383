"""The report for notebooks: one table, a bar of the time in each row."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torch_blocked.explain.palette import colour

if TYPE_CHECKING:
    from torch_blocked.explain.record import Call
    from torch_blocked.explain.report import Report


def page(report: Report) -> str:
    """The report as an HTML fragment."""
    from torch_blocked.explain.report import COLUMNS

    head = "".join(f"<th>{escape(name)}</th>" for name, _ in COLUMNS)
    longest = max((call.seconds for call in report.run.calls), default=0.0)
    calls, left_out = report.rows()
    rows = "".join(_row(report, call, longest) for call in calls)
    verdict = "<br>".join(map(escape, report.verdict.splitlines()))
    summary = "<br>".join(map(escape, [*left_out, *report.summary()]))
    table = f"<table><thead><tr>{head}<th></th></tr></thead><tbody>{rows}</tbody></table>"
    return f"<div><p>{verdict}</p>{table}<p>{summary}</p></div>"


def _row(report: Report, call: Call, longest: float) -> str:
    from torch_blocked.explain.report import notes

    cells = [call.module, *report.cells(call)[1:]]
    said = "".join(f"<br><small>{escape(note)}</small>" for note in notes(call))
    width = round(120 * call.seconds / longest) if longest else 0
    bar = f'<div style="width:{width}px;height:10px;background:{colour(call)}"></div>'
    first, *others = map(escape, cells)
    return f"<tr><td>{first}{said}</td>{''.join(f'<td>{cell}</td>' for cell in others)}<td>{bar}</td></tr>"
