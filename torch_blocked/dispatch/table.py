"""The operators that have a handler, as a table for people: `python -m torch_blocked operators`."""

from __future__ import annotations

import torch

from torch_blocked.dispatch.registry import HANDLERS, look_up

WHAT_IT_GIVES = {
    True: "a view at block borders, else a copy that is kept the same as what it was taken of",
    False: "a blocked answer, or a plain one where no block fits it",
}


def markdown_table() -> str:
    """Families of operators, what they give, and their names, overloads and in-place forms together."""
    families: dict[tuple[str, bool], set[str]] = {}
    for func in {*HANDLERS, *_pointwise()}:
        if func.namespace == "aten":
            handler = HANDLERS.get(func) or look_up(func)
            family = handler.__module__.rpartition(".")[2].replace("_", " ")
            families.setdefault((family, func.is_view), set()).add(func._opname.rstrip("_"))
    lines = ["| family | gives | operators of `torch.ops.aten` |", "| --- | --- | --- |"]
    for (family, view), names in sorted(families.items()):
        lines.append(f"| {family} | {WHAT_IT_GIVES[view]} | {' '.join(sorted(names))} |")
    return "\n".join(lines)


def _pointwise() -> set[torch._ops.OpOverload]:
    """Those that PyTorch tags so: a rule makes their handlers, on first use."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    found = set()
    for packet in (getattr(torch.ops.aten, name.removeprefix("aten::"), None) for name in names):
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found |= {f for f in (getattr(packet, o) for o in packet.overloads()) if torch.Tag.pointwise in f.tags}
    return {f for f in found if look_up(f).__module__.endswith("pointwise")}
