"""Squeeze and excitation: what scales the channels of a convolution's src scales its weights instead.

A large src is then neither read nor written for it (operator `convolution`, src_scale).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from torch_blocked import library
from torch_blocked.compile.fusion import CONVOLUTIONS, post_ops
from torch_blocked.compile.nodes import keep_strides
from torch_blocked.physical import same_size

aten = torch.ops.aten


def scale_weights(gm: fx.GraphModule) -> int:
    """Does so, in place, wherever there is less to multiply; how many products of whole tensors went away."""
    products = 0
    for convolution in gm.graph.find_nodes(op="call_function", target=library.convolution_op):
        product = convolution.args[0]
        factors = _factors(product)
        reads_once = len(product.users) == 1 and product not in convolution.args[1:]  # a residual it may be, too
        if factors is None or not reads_once or not _pays(convolution):
            continue
        src, scale = factors
        own = convolution.args[1 : CONVOLUTIONS[convolution.target]]
        convolution.args = (src, *own, *post_ops(convolution), scale)
        keep_strides(convolution)
        gm.graph.erase_node(product)
        products += 1
    gm.recompile()
    return products


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """A blocked image in float32 and the number that each of its channels is multiplied by."""
    if product.target is not aten.mul.Tensor or not all(_is_float32(node) for node in (product, *product.args)):
        return None
    size = product.meta["val"].shape
    for src, scale in (product.args, product.args[::-1]):
        one_each = (*size[:2], *[1] * (len(size) - 3), size[-1])
        if same_size(src.meta["val"].shape, size) and same_size(scale.meta["val"].shape, one_each):
            return src, scale
    return None


def _is_float32(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype is torch.float32


def _pays(convolution: fx.Node) -> bool:
    """Whether src has more numbers a channel, by far, than the weights, which are scaled anew for every image."""
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    src_blocking, size, weight_blocking, groups, block = (convolution.args[i] for i in (1, 3, 4, 9, 10))
    pixels = math.prod(map(optimization_hint, convolution.args[0].meta["val"].shape[2:-1]))
    in_order = list(src_blocking) == [1, block] and list(weight_blocking) == [1, block, 0, block]
    return groups == 1 and in_order and pixels >= 2 * size[0] * math.prod(size[2:])
