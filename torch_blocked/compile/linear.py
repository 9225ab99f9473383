"""Linear layers of few images: their product is as slow as memory gives the weights, by the operator `linear`."""

from __future__ import annotations

import torch
from torch import fx

from torch_blocked import library

aten = torch.ops.aten

MOST_IMAGES = 4  # for which there are kernels (csrc/kernels/linear.h)


def multiply_few_rows(gm: fx.GraphModule) -> None:
    """Gives products of a few rows and a transposed matrix, + bias or not, to that operator, in place."""
    for target, first in ((aten.addmm.default, 1), (aten.mm.default, 0)):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            src, transposed = node.args[first : first + 2]
            if node.kwargs or not _is_transposed(transposed) or not _fits(src):
                continue
            bias = node.args[0] if first else None
            if bias is not None and bias.meta["val"].dim() != 1:
                continue
            arguments = src, transposed.args[0], bias
            with gm.graph.inserting_before(node):
                product = gm.graph.call_function(library.linear_op, arguments)
            values = fx.map_arg(arguments, lambda n: n.meta["val"])
            product.meta = {"val": node.meta["val"], "eager_input_vals": (values, {})}
            node.replace_all_uses_with(product)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _is_transposed(node: fx.Node) -> bool:
    """Whether it is the transpose of a dense matrix."""
    is_transpose = node.target is aten.t.default or (
        node.target is aten.permute.default and list(node.args[1]) in ([1, 0], [-1, 0], [1, -2], [-1, -2])
    )
    return is_transpose and node.args[0].meta["val"].is_contiguous()


def _fits(src: fx.Node) -> bool:
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    value = src.meta["val"]
    few = optimization_hint(value.shape[0]) <= MOST_IMAGES
    return few and value.dtype is torch.float32 and value.device.type == "cpu"
