"""The colours of calls in pictures, by what they are."""

from __future__ import annotations

from torch_blocked.explain.record import Call

COLOURS = {
    "fallback": "#d62728",
    "reorder": "#ff7f0e",
    "convolution": "#1f77b4",
    "other blocked": "#7fb2d9",
    "plain": "#9a9a9a",
}


def kind(call: Call) -> str:
    """The name of a call's colour."""
    if call.fallback:
        return "fallback"
    if call.operator == "reorder":
        return "reorder"
    if not call.is_blocked:
        return "plain"
    return "convolution" if call.is_convolution else "other blocked"


def colour(call: Call) -> str:
    return COLOURS[kind(call)]
