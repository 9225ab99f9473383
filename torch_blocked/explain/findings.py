"""What to mend: each kind of finding is one function from the calls, in `KINDS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch_blocked import library
from torch_blocked.explain.record import Call, Operand, Reorder

WORTH = 0.01  # the share of the time from which on a finding is said
WASTEFUL = 1.5  # so many times as large by its padding, a tensor is worth a word


@dataclass
class Finding:
    """Something that costs time and can be mended.

    Attributes:
        kind: "fallback", "lost format", "reorder", "padding", "weights" or "plain convolution".
        what: one phrase.
        modules: the paths of the modules that it is in.
        seconds: what it costs; where `at_most`, what the calls take that it is a part of.
        share: of the whole time.
        why, remedy: a phrase each.
    """

    kind: str
    what: str
    modules: list[str]
    seconds: float
    why: str
    remedy: str
    at_most: bool = False
    share: float = 0.0


def find(calls: list[Call], whole: float) -> list[Finding]:
    """All findings, the dearest first. `whole` is the time in seconds that shares are of."""
    if not any(call.is_blocked for call in calls):
        return []
    found: dict[tuple[str, str, str], Finding] = {}
    for kind in KINDS:
        for finding in kind(calls):
            key = finding.kind, finding.what, finding.why
            same = found.setdefault(key, finding)
            if same is not finding:
                same.seconds += finding.seconds
                same.modules += [m for m in finding.modules if m not in same.modules]
    for finding in found.values():
        finding.share = finding.seconds / whole if whole else 0.0
    return sorted(found.values(), key=lambda finding: -finding.seconds)


def fallbacks(calls: list[Call]) -> Iterator[Finding]:
    """Operators on plain tensors, and the reorders of their answers back."""
    for i, call in enumerate(calls):
        if call.fallback:
            seconds = call.seconds + _cost(_returns(calls, i))
            yield Finding("fallback", call.operator, [call.module], seconds, *call.fallback)


def lost_formats(calls: list[Call]) -> Iterator[Finding]:
    """Blocked tensors that become plain and blocked again."""
    for i, call in enumerate(calls):
        returns = _returns(calls, i)
        if call.fallback or not returns:
            continue
        away = [(call, r) for r in call.reorders if _becomes_plain(r)]
        after = returns[0][0]
        name = "a conversion" if call.operator == "reorder" else call.operator
        where = after.module or "the model's own forward"
        yield Finding(
            "lost format",
            f"{name} makes it {call.outputs[0].format}",
            [call.module],
            _cost(away + returns),
            f"{after.operator} in {where} brings it back",
            "leave it out: operators take blocked tensors"
            if call.operator == "reorder"
            else "use an operator whose answer is blocked",
        )


def plain_sources(calls: list[Call]) -> Iterator[Finding]:
    """Plain tensors that were never blocked: inputs, parameters, what the model makes."""
    for call in calls:
        for reorder in call.reorders:
            if reorder.dst == "packed" or reorder.origin is not None or _is_blocked(reorder.src):
                continue
            source = reorder.source or "an input or a tensor made on the way"
            remedy = "model.to(tb.blocked)" if reorder.source else "give it as x.to(tb.blocked)"
            yield _of_reorder(call, reorder, f"{source} is plain", remedy)


def other_blocks(calls: list[Call]) -> Iterator[Finding]:
    """Reorders from one blocked format to another."""
    for call in calls:
        for reorder in call.reorders:
            if _is_blocked(reorder.src) and _is_blocked(reorder.dst):
                yield _of_reorder(call, reorder, "formats differ", "one format for all: .to(tb.blocked)")


def packed_weights(calls: list[Call]) -> Iterator[Finding]:
    """Plain weights, which a convolution packs on every call."""
    for call in calls:
        if any(r.dst == "packed" and not _is_blocked(r.src) for r in call.reorders):
            why = "its weight is not blocked"
            what = "weights packed on every call"
            yield Finding("weights", what, [call.module], call.seconds, why, "model.to(tb.blocked)", at_most=True)


def padding(calls: list[Call]) -> Iterator[Finding]:
    """Convolutions and all else on few channels in large blocks."""
    for call in calls:
        if call.fallback or call.operator == "reorder":
            continue
        wasteful = [x for x in (*call.inputs[:1], *call.outputs[:1]) if is_wasteful(x)]
        if wasteful:
            x = max(wasteful, key=lambda x: x.padding)
            what = f"{x.size[1]} channels in blocks of {x.block}, {x.padding:.1f}x as large"
            remedy = f"{math.ceil(x.size[1] / x.block) * x.block} channels take no longer"
            why = f"up to {1 - 1 / x.padding:.0%} of it is spent on padding"
            yield Finding("padding", what, [call.module], call.seconds, why, remedy)


def plain_convolutions(calls: list[Call]) -> Iterator[Finding]:
    """Convolutions that PyTorch does on plain tensors, beside blocked ones."""
    for call in calls:
        known = bool(call.inputs and call.inputs[0].format)  # not so of what runs beside compiled graphs
        if call.is_convolution and known and not call.is_blocked and not call.fallback:
            dtype = call.inputs[0].dtype
            can = dtype in {str(d)[6:] for d in library.KERNEL_DTYPES}
            remedy = "model.to(tb.blocked)" if can else "convolutions of float32 and half precision can be blocked"
            why = f"its input and its weight are plain {dtype}"
            yield Finding("plain convolution", call.algorithm, [call.module], call.seconds, why, remedy)


KINDS: tuple[Callable[[list[Call]], Iterator[Finding]], ...] = (
    fallbacks, lost_formats, plain_sources, other_blocks, packed_weights, padding, plain_convolutions,
)  # fmt: skip


def is_wasteful(x: Operand) -> bool:
    """Whether the channels of a tensor fill their blocks badly; vectors are too small to matter."""
    return len(x.size) > 2 and x.padding >= WASTEFUL and x.block > 1


def _of_reorder(call: Call, reorder: Reorder, why: str, remedy: str) -> Finding:
    what = f"{reorder.src} -> {reorder.dst}"
    return Finding("reorder", what, [call.module], _cost([(call, reorder)]), why, remedy)


def _returns(calls: list[Call], origin: int) -> list[tuple[Call, Reorder]]:
    """Those that bring back what the call at this position made plain, and the calls that they are in."""
    return [(call, r) for call in calls if not call.fallback for r in call.reorders if r.origin == origin]


def _cost(reorders: list[tuple[Call, Reorder]]) -> float:
    """What reorders take: those that were asked for with the Python around them, others as part of their calls."""
    return sum(call.seconds if call.operator == "reorder" else r.seconds or 0.0 for call, r in reorders)


def _becomes_plain(reorder: Reorder) -> bool:
    return _is_blocked(reorder.src) and not _is_blocked(reorder.dst)


def _is_blocked(tag: str) -> bool:
    return any(c.isdigit() for c in tag)
