"""What tests/opinfo.py does not ask of blocked tensors, and why: (operator, check) -> reason."""

from __future__ import annotations

# The answer's elements are whatever lies in memory: only shape, dtype and padding are compared.
UNINITIALIZED = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("contiguous", "views"): "the plain tensor, so always a copy",
}
