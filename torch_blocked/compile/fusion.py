"""Fusion: what follows a convolution becomes its post-ops, so that nothing passes through memory in between.

A pattern is one entry of PATTERNS: the operator that follows a convolution, alone, and a function that gives the
convolution's new post-ops, or None where it does not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from torch_blocked import library
from torch_blocked.compile.nodes import call, insert, keep_strides, values
from torch_blocked.equivalents import batch_norm_aten
from torch_blocked.physical import same_size

aten = torch.ops.aten

# The convolutions, and how many arguments they have before the post-ops.
CONVOLUTIONS = {library.convolution_op: 11, library.convolution_transpose_op: 12}


class PostOps(NamedTuple):
    """The last arguments of a convolution, applied in this order but for a residual that comes last."""

    scale: fx.Node | None = None
    shift: fx.Node | None = None
    residual: fx.Node | None = None
    activation: str = "none"
    alpha: float = 0.0
    residual_last: bool = False


def post_ops(convolution: fx.Node) -> PostOps:
    """Those that the convolution has."""
    first = CONVOLUTIONS[convolution.target]
    return PostOps(*convolution.args[first : first + len(PostOps._fields)])


def batch_norm(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """(x - mean) / sqrt(var + eps) * weight + bias, as a scale and a shift a channel."""
    src, weight, bias, mean, var, eps = node.args
    if src is not convolution or post_ops(convolution) != PostOps():
        return None

    scale = call(graph, aten.rsqrt.default, call(graph, aten.add.Tensor, var, eps))
    scale = scale if weight is None else call(graph, aten.mul.Tensor, scale, weight)
    shift = call(graph, aten.neg.default, call(graph, aten.mul.Tensor, mean, scale))
    shift = shift if bias is None else call(graph, aten.add.Tensor, shift, bias)
    return PostOps(scale, shift)


def add(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """Of a tensor laid out as the answer, before or after the activation."""
    before = post_ops(convolution)
    if len(node.args) != 2 or node.kwargs or before.residual is not None:
        return None
    others = [a for a in node.args if a is not convolution]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    value, own = others[0].meta.get("val"), convolution.meta["val"]
    if not isinstance(value, Tensor) or not same_size(value.shape, own.shape) or value.dtype != own.dtype:
        return None
    return before._replace(residual=others[0], residual_last=before.activation != "none")


def channel_scale(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """A factor for each channel of all images."""
    own = convolution.meta["val"]
    factors = next((a for a in node.args if a is not convolution), None)
    value = values(factors)
    one_each = (1, own.shape[1], *[1] * (own.dim() - 3), own.shape[-1])
    fits = isinstance(factors, fx.Node) and isinstance(value, Tensor) and tuple(value.shape) == one_each
    if not fits or value.dtype != own.dtype or post_ops(convolution) != PostOps():
        return None
    vector = call(graph, aten.reshape.default, factors, [-1])
    return PostOps(scale=call(graph, aten.slice.Tensor, vector, 0, 0, _channels(convolution)))


def activate(convolution: fx.Node, name: str, alpha: float = 0.0) -> PostOps | None:
    """The convolution's post-ops with this activation after them."""
    before = post_ops(convolution)
    return before._replace(activation=name, alpha=alpha) if before.activation == "none" else None


# The operators of one tensor that are an activation, and which: of the node, the name and the parameter.
ACTIVATIONS: dict[object, Callable[[fx.Node], tuple]] = {
    aten.relu.default: lambda node: ("relu",),
    aten.sigmoid.default: lambda node: ("sigmoid",),
    aten.silu.default: lambda node: ("silu",),
    aten.hardsigmoid.default: lambda node: ("hardsigmoid",),
    aten.hardswish.default: lambda node: ("hardswish",),
    aten.leaky_relu.default: lambda node: ("leaky_relu", float((*node.args, 0.01)[1])),
    aten.gelu.default: lambda node: ("gelu" if node.kwargs.get("approximate", "none") == "none" else "gelu_tanh",),
}


def activation(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """One of ACTIVATIONS."""
    of_a_size = any(isinstance(a, fx.Node) for a in node.args[1:])  # as a slope
    return None if of_a_size else activate(convolution, *ACTIVATIONS[node.target](node))


def clamp_min(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """max(x, 0), the first half of a relu6 as it comes."""
    return activate(convolution, "relu") if node.args[1] == 0 else None


def clamp_max(graph: fx.Graph, convolution: fx.Node, node: fx.Node) -> PostOps | None:
    """min(relu(x), 6), the second half."""
    before = post_ops(convolution)
    fits = before.activation == "relu" and not before.residual_last and node.args[1] == 6
    return before._replace(activation="relu6") if fits else None


PATTERNS: dict[object, Callable[[fx.Graph, fx.Node, fx.Node], PostOps | None]] = {
    library.batch_norm_op: batch_norm,
    aten.add.Tensor: add,
    aten.mul.Tensor: channel_scale,
    **dict.fromkeys(ACTIVATIONS, activation),
    aten.clamp_min.default: clamp_min,
    aten.clamp_max.default: clamp_max,
}


def fuse(gm: fx.GraphModule) -> int:
    """Fuses all that PATTERNS finds, in place; how many operators went into convolutions."""
    fused = 0
    for node in list(gm.graph.nodes):
        pattern = PATTERNS.get(node.target) if node.op == "call_function" else None
        # The later of two: its other operand is there when it runs.
        for convolution in reversed([a for a in node.all_input_nodes if a.target in CONVOLUTIONS] if pattern else []):
            if len(convolution.users) > 1:
                continue
            with gm.graph.inserting_before(node):
                found = pattern(gm.graph, convolution, node)
                if found is None:
                    continue
                arguments = (*convolution.args[: CONVOLUTIONS[convolution.target]], *found)
                whole = gm.graph.call_function(convolution.target, arguments)
            whole.meta["val"] = node.meta["val"]
            keep_strides(whole)
            for replaced in (*_clearing(convolution, node), node, convolution):
                replaced.replace_all_uses_with(whole)
                gm.graph.erase_node(replaced)
            fused += 1
            break
    gm.recompile()
    return fused


def _clearing(convolution: fx.Node, node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that zero the padding of `node`, which has as many channels as the convolution; the last comes first.

    Where f(0) is not 0 they follow, as
    select_scatter(node, slice_scatter(select(node, 1, -1), zeros, -1, channels), 1, -1).
    A convolution's own padding is zero, whatever its activation.
    """
    shape = node.meta["val"].shape
    blocks, block = shape[1], shape[-1]
    for last in node.users:
        if last.target is not aten.select_scatter.default or last.args[0] is not node:
            continue
        _, part, *where = last.args
        if part.target is not aten.slice_scatter.default or where != [1, blocks - 1]:
            continue
        selected, zeros, dim, start, *_ = part.args
        if (
            (selected.target, selected.args) == (aten.select.int, (node, 1, blocks - 1))
            and (zeros.target is aten.full.default and zeros.args[1] == 0)
            and (dim == len(shape) - 2 and start >= block - (-_channels(convolution)) % block)
            and len(part.users) == len(selected.users) == 1
        ):
            return last, part, selected
    return ()


def _channels(convolution: fx.Node) -> int:
    size = convolution.args[3]
    if convolution.target is library.convolution_op:
        return size[0]
    return size[1] * convolution.args[CONVOLUTIONS[convolution.target] - 2]


# ---- Activations come whole, to be found


def decompositions() -> dict:
    """Inductor's, without those of ACTIVATIONS."""
    from torch._inductor.decomposition import select_decomp_table

    return {op: function for op, function in select_decomp_table().items() if op not in ACTIVATIONS}


def decompose(gm: fx.GraphModule, inference: bool) -> None:
    """Decomposes, in place, what no convolution took: activations and, for inference, batch normalization."""
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), **({library.batch_norm_op: batch_norm_aten} if inference else {})}
    for node in gm.graph.nodes:
        if node.target not in PATTERNS or node.target not in table:
            continue
        whole = insert(node, functools.partial(_call, node), node.all_input_nodes, table)
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)
    gm.recompile()


def _call(node: fx.Node, *inputs: Tensor) -> Tensor:
    given = dict(zip(node.all_input_nodes, inputs, strict=True))
    args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
    return node.target(*args, **kwargs)
