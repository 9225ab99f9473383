"""What depends on parameters alone is computed once: packed weights, folded batch normalization.

The graph is cut in two: a prologue of everything that has no other inputs than parameters and buffers, and the rest,
which gets its results. The prologue runs, uncompiled, on the first call and again when a parameter has been written
to or replaced, which its version counter and memory tell.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, fx

from torch_blocked._python import Watch

# Never in the prologue: what is random or writes.
_EFFECTS = {torch.Tag.nondeterministic_seeded}


class Run(NamedTuple):
    """One call of a graph that is `Hoisted`.

    Attributes:
        graph: which.
        number: of what it had computed from the parameters.
        inputs, answers: what it was called with, and returned.
    """

    graph: Hoisted
    number: int
    inputs: list
    answers: Sequence


_recording = threading.local()


@contextmanager
def recorded(counters: Mapping[int, Tensor]) -> Iterator[list[Run]]:
    """Lists the runs in this thread inside the ``with`` block.

    counters: by the id of a parameter, a tensor a write to which means one to the parameter.
    """
    before, _recording.recorded = getattr(_recording, "recorded", None), ([], counters)
    try:
        yield _recording.recorded[0]
    finally:
        _recording.recorded = before


class Hoisted:
    """A compiled graph and its prologue, called as Inductor's graphs are: with one list of all inputs.

    Attributes:
        static, kept: the positions among all inputs of those that the prologue takes, and that `compiled` takes.
        compiled: the rest of the graph; it takes the prologue's results first.
    """

    _boxed_call = True

    def __init__(self, prologue: Callable, static: Sequence[int], kept: Sequence[int], compiled: Callable) -> None:
        self.static, self.kept = static, kept
        self.compiled, self._prologue = compiled, prologue
        self._watch = Watch()
        # By the watch's number: models of one class, and repeated layers compiled by themselves, share this graph.
        self._values: dict[int, tuple] = {}

    def __call__(self, inputs: list) -> object:
        runs, counters = getattr(_recording, "recorded", None) or (None, {})
        whole = None if runs is None else list(inputs)
        parameters = list(map(inputs.__getitem__, self.static))
        number = self._watch.number(parameters + [counters[id(p)] for p in parameters if id(p) in counters])
        values = self.values(number)
        if values is None:
            self._values = {n: kept for n, kept in self._values.items() if self._watch.holds(n)}
            # Inference tensors count no writes: nothing could be kept for them, such as Winograd's weights.
            with torch.inference_mode(False), torch.no_grad():
                values = self._values[number] = self._prologue(*parameters)
        given = [*values, *map(inputs.__getitem__, self.kept)]
        inputs.clear()
        answers = self.compiled(given)
        if runs is not None:
            runs.append(Run(self, number, whole, answers))
        return answers

    def values(self, number: int) -> tuple | None:
        """What was computed from the parameters; None after they have changed."""
        return self._values.get(number)


def hoist(gm: fx.GraphModule, static: set[int]) -> tuple[fx.GraphModule, list[int], list[int], list[fx.Node]] | None:
    """Takes what depends on the inputs `static` alone out of `gm`, in place.

    Returns the prologue, the positions of the inputs it takes and of those that `gm` still takes, and the nodes whose
    values are `gm`'s new first inputs; None where there is nothing to take out.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    parameters = [n for i, n in enumerate(inputs) if i in static and isinstance(n.meta.get("val"), Tensor)]
    written = {n for node in gm.graph.nodes for n in _written(node)}
    known, returned = {n for n in parameters if n not in written}, returned_nodes(gm)
    alone = []
    for node in gm.graph.nodes:
        if (
            node.op != "call_function"
            or node in returned
            or not node.all_input_nodes
            or not known.issuperset(node.all_input_nodes)
        ):
            continue
        if isinstance(node.target, torch._ops.OpOverload) and (
            node.target._schema.is_mutable or _EFFECTS.intersection(node.target.tags)
        ):
            continue
        known.add(node)
        alone.append(node)
    values = [n for n in alone if isinstance(n.meta.get("val"), Tensor) and any(u not in known for u in n.users)]
    if not values:
        return None
    prologue, used = _prologue(gm, inputs, alone, values)
    _replace(gm, values)
    gm.graph.eliminate_dead_code()
    kept = []
    for i, node in enumerate(inputs):
        if node.users or node not in parameters:
            kept.append(i)
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return prologue, used, kept, values


def _written(node: fx.Node) -> list[fx.Node]:
    """The inputs that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    return [a for s, a in arguments if s.alias_info and s.alias_info.is_write and isinstance(a, fx.Node)]


def returned_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """The outputs and what they are views of: the caller may write to them, so each call makes its own."""
    (output,) = gm.graph.find_nodes(op="output")
    found, todo = set(), list(output.all_input_nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            is_view = node.target is operator.getitem or getattr(node.target, "is_view", False)
            todo += node.all_input_nodes if is_view else []
    return found


def _prologue(
    gm: fx.GraphModule, inputs: list[fx.Node], nodes: list[fx.Node], values: list[fx.Node]
) -> tuple[fx.GraphModule, list[int]]:
    graph, copies = fx.Graph(), {}
    needed = {a for n in nodes for a in n.all_input_nodes}
    used = [i for i, node in enumerate(inputs) if node in needed]
    for i in used:
        copies[inputs[i]] = graph.placeholder(inputs[i].name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.target is torch.ops.aten.view.default:  # of a copy that was dropped: Inductor's views are reshapes
            copies[node].target = torch.ops.aten.reshape.default
    graph.output(tuple(copies[v] for v in values))
    graph.eliminate_dead_code()
    return fx.GraphModule(gm, graph), used


def _replace(gm: fx.GraphModule, values: list[fx.Node]) -> None:
    """Makes an input of each node."""
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        for node in values:
            argument = gm.graph.placeholder(f"hoisted_{node.name}")
            argument.meta = dict(node.meta)
            node.replace_all_uses_with(argument)
    for node in values:
        if not node.users:
            gm.graph.erase_node(node)
