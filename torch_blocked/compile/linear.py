"""Linear layers of few images: their product is as slow as memory gives the weights, by the operator `linear`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from torch_blocked import library

aten = torch.ops.aten

MOST_IMAGES = 4  # for which there are kernels (csrc/kernels/linear.h)


def multiply_few_rows(gm: fx.GraphModule) -> None:
    """Gives products of a few rows and a transposed matrix, + bias or not, to that operator, in place."""
    for target, operands in _products().items():
        for node in gm.graph.find_nodes(op="call_function", target=target):
            arguments = None if node.kwargs else operands(*node.args)
            values = fx.map_arg(arguments, lambda n: _value(gm, n))
            if values is None or not _fits(*values):
                continue
            with gm.graph.inserting_before(node):
                product = gm.graph.call_function(library.linear_op, arguments)
            product.meta = {"val": node.meta["val"], "eager_input_vals": (values, {})}
            node.replace_all_uses_with(product)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


Operands = tuple[fx.Node, fx.Node, fx.Node | None]  # src, the matrix that is not transposed, bias


def _products() -> dict[object, Callable[..., Operands | None]]:
    """Operator -> its operands from its arguments, or None where the matrix is none that was transposed."""
    products = {aten.addmm.default: _of_addmm, aten.mm.default: lambda src, matrix: _of_addmm(None, src, matrix)}
    if torch._C.has_mkl:  # what freezing makes of them, which is slower for few rows
        products[torch.ops.mkl._mkl_linear] = lambda src, packed, matrix, bias, rows: (src, matrix, bias)
    return products


def _of_addmm(bias: fx.Node | None, src: fx.Node, matrix: fx.Node) -> Operands | None:
    return (src, matrix.args[0], bias) if _is_transposed(matrix) else None


def _is_transposed(node: fx.Node) -> bool:
    """Whether it is the transpose of a dense matrix."""
    is_transpose = node.target is aten.t.default or (
        node.target is aten.permute.default and list(node.args[1]) in ([1, 0], [-1, 0], [1, -2], [-1, -2])
    )
    return is_transpose and node.args[0].meta["val"].is_contiguous()


def _fits(src: Tensor, matrix: Tensor, bias: Tensor | None) -> bool:
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    few = optimization_hint(src.shape[0]) <= MOST_IMAGES
    is_vector = bias is None or bias.dim() == 1
    return few and is_vector and src.dim() == 2 and src.dtype is torch.float32 and src.device.type == "cpu"


def _value(gm: fx.GraphModule, node: fx.Node) -> Tensor:
    """What stands for it in the graph, or of a constant that was folded the tensor itself."""
    return node.meta["val"] if "val" in node.meta else getattr(gm, node.target)
