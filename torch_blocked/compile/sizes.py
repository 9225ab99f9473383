"""Sizes that vary, as arithmetic on the graph's inputs and their sizes: then no size of an answer needs the answer.

Where AOTAutograd asks a convolution's answer for its height, the answer has one reader more, and what comes after the
question cannot move before it. Every size is an expression over those that are inputs, so it is computed from these.
For training, copies are laid out before their views: Inductor cannot put strides of such sizes in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    import sympy

aten = torch.ops.aten

# What lies between a copy and an answer that is a view of it, as a reorder to a plain tensor makes them.
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.clone.default)


class Sizes:
    """Writes sizes into a graph, each once, before all that computes."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        inputs = graph.find_nodes(op="placeholder")
        self._last = inputs[-1] if inputs else next(iter(graph.nodes))
        for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
            if node.args[0].op == "placeholder":
                self._last.append(node)
                self._last = node
                inputs.append(node)
        sizes = [node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)]
        self._inputs = {node.meta["val"].node.expr: fx.Proxy(node) for node in sizes}
        self._known: dict[sympy.Expr, fx.Node] = {}

    def node(self, size: int | torch.SymInt) -> int | fx.Node | None:
        """The number, or a node whose value it is; None where the inputs do not tell it."""
        if not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr
        if expr.is_Integer:
            return int(expr)
        if not expr.free_symbols.issubset(self._inputs):
            return None
        if expr not in self._known:
            self._known[expr] = self._write(expr)
        return self._known[expr]

    def _write(self, expr: sympy.Expr) -> fx.Node:
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        end = self._last.next
        with self._graph.inserting_before(end):
            result = sympy_interp(PythonReferenceAnalysis, self._inputs, expr).node
        while self._last.next is not end:
            self._last = self._last.next
            values = fx.map_arg(self._last.args, lambda node: node.meta["val"])
            self._last.meta["val"] = self._last.target(*values)
        return result


def sizes_from_inputs(gm: fx.GraphModule) -> None:
    """Replaces every size that is asked of a tensor, in place."""
    sizes = Sizes(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        size = sizes.node(node.meta["val"])
        if size not in (None, node):
            node.replace_all_uses_with(size)
            gm.graph.erase_node(node)
    gm.recompile()


def realize_returned_copies(gm: fx.GraphModule) -> None:
    """Makes Inductor lay out the copies that the graph returns views of, where sizes vary, before it makes the view.

    Of a view without a layout it finds the strides by its indices, multiplies them out, and cannot put products of
    sums such as ((h - 1) // 2 + 1) * ((w - 1) // 2 + 1) in order (ValueRangeError).
    """
    (output,) = gm.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        while node.target in _VIEWS:
            if node.target is aten.clone.default:
                node.meta["inductor_realize_to_strides"] = True
            node = node.args[0]
