"""The API reference, from the docstrings: `python -m torch_blocked reference` prints docs/reference.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import torch_blocked as tb
from torch_blocked import library


def markdown() -> str:
    """Every public name with its signature and docstring, and the C++ operators."""
    named = [(name, getattr(tb, name)) for name in sorted(tb.__all__, key=str.lower)]
    described = [(name, thing) for name, thing in named if inspect.isroutine(thing) or inspect.isclass(thing)]
    formats = [(name, thing) for name, thing in named if isinstance(thing, tb.Format)]
    parts = [
        "# API reference",
        "From the docstrings, by `python -m torch_blocked reference`. `tb` is `torch_blocked`.",
        *(part for name, thing in described for part in _of(f"tb.{name}", thing, "##")),
        "## Formats",
        "`tb.blocked` is the fastest format for this CPU, by the shape of what is converted. Constants of `tb.Format`:",
        ", ".join(f"`tb.{name}`" for name, _ in formats),
        "## Operators",
        _text(library),
    ]
    return "\n\n".join(parts)


def _of(name: str, thing: object, heading: str) -> Iterator[str]:
    """The section of a function or class; of a class those of its own public members too."""
    yield f"{heading} {name}"
    if not (inspect.isclass(thing) and issubclass(thing, Warning)):
        yield f"```python\n{name}{_signature(thing)}\n```"
    yield _text(thing)
    for attribute, member in sorted(vars(thing).items()) if inspect.isclass(thing) else ():
        member = getattr(member, "__func__", member)
        if attribute.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            yield f"**`.{attribute}`**"
            yield _text(member)
        elif inspect.isroutine(member):
            yield f"**`.{attribute}{_signature(member, bound=True)}`**"
            yield _text(member)


def _signature(thing: object, bound: bool = False) -> str:
    signature = inspect.signature(thing)
    parameters = [p.replace(annotation=_named(p.annotation)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters[1:] if bound else parameters)).replace("'", "")


def _named(annotation: object) -> object:
    """The annotations of named tuples are kept as references to names."""
    return getattr(annotation, "__forward_arg__", annotation)


def _text(thing: object) -> str:
    """A docstring as Markdown: attributes become a list."""
    text = re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(thing) or "")
    return re.sub(r"^    (\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
