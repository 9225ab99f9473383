"""The gradient of convolutions with respect to their weights: the operator at every ISA tier."""

from __future__ import annotations

import pytest
import torch
from test_convolutions import CONVOLUTIONS
from test_library import SHAPES, between_nans, check, guarded, pair  # noqa: F401

import torch_blocked as tb
from torch_blocked import library
from torch_blocked.formats import activation_format, weight_format

# (n, ic, oc, src, kernel, stride, padding, dilation, groups)
GRADIENTS = CONVOLUTIONS + [
    (n, ic, oc, (ih, iw), (kh, kw), pair(stride), pair(padding), pair(dilation), groups)
    for n, ic, oc, ih, iw, kh, kw, stride, padding, dilation, groups in SHAPES
]
GRADIENTS += [
    (3, 20, 33, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1),  # a chunk of several images
    (2, 33, 40, (40, 30), (3, 3), (1, 1), (1, 1), (1, 1), 1),  # several chunks an image
    (1, 300, 16, (9, 9), (1, 1), (1, 1), (0, 0), (1, 1), 1),  # more blocks of src than a tile has
    (2, 48, 96, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), 2),  # groups wider than a block that end inside one
    (2, 3, 17, (20, 21), (5, 5), (2, 2), (2, 2), (2, 2), 1),
]


def plain_gradient(x, diff_dst, size, stride, padding, dilation, groups):
    arguments = (stride, padding, dilation, False, [0] * (x.dim() - 2), groups, [False, True, False])
    return torch.ops.aten.convolution_backward(diff_dst, x, x.new_zeros(size), None, *arguments)[1]


def problem(shape, dtype=torch.float32):
    n, ic, oc, src, kernel, *window, groups = shape
    x, size = torch.randn(n, ic, *src, dtype=dtype), torch.Size([oc, ic // groups, *kernel])
    dst = torch.convolution(x, x.new_zeros(size), None, *window, False, [0] * len(src), groups)
    return x, torch.randn_like(dst), size, (*window, groups)


def blocked_gradient(src, diff_dst, size, arguments, fmt):
    """The operator's answer in `fmt`; src and diff_dst lie between NaNs."""
    blocked = isinstance(src, tb.BlockedTensor)
    physical = library.convolution_weight_gradient_op(
        between_nans(src.physical if blocked else src), sum(src.blocking, ()) if blocked else (),
        between_nans(diff_dst.physical), size, fmt.order, sum(fmt.blocking, ()), *arguments,
    )  # fmt: skip
    return tb.BlockedTensor(physical, fmt.blocking, size) if fmt.blocking else physical


@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_weight_gradient(isa, guarded, shape):  # noqa: F811
    x, diff_dst, size, arguments = problem(shape)
    expected = plain_gradient(x.double(), diff_dst.double(), size, *arguments)
    for block in library.kernel_blocks():
        fmt = activation_format(x.dim(), block)
        for src in [x.to(fmt)] + [x] * (arguments[-1] == 1):
            for wei_format in (weight_format(size, block), weight_format((17, 17, *size[2:]), 8)):
                gradient = blocked_gradient(src, diff_dst.to(fmt), size, arguments, wei_format)
                check(gradient, expected)


def test_bits_do_not_depend_on_threads():
    x, diff_dst, size, arguments = problem((3, 33, 40, (30, 20), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    fmt, wei_format = activation_format(4, library.isa_block()), weight_format(size, library.isa_block())
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            found.append(blocked_gradient(x.to(fmt), diff_dst.to(fmt), size, arguments, wei_format).physical)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("ic", [3, 17])
def test_infinities_stay_out_of_the_padding(isa, ic):
    x, diff_dst, size, arguments = problem((1, ic, 19, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    x[0, 1, 3, 3] = float("inf")
    diff_dst[0, 2, 3, 2] = float("nan")
    fmt, wei_format = activation_format(4, library.isa_block()), weight_format(size, library.isa_block())
    gradient = blocked_gradient(x.to(fmt), diff_dst.to(fmt), size, arguments, wei_format)
    rebuilt = gradient.to_dense().to(wei_format).physical  # whose padding is zero
    torch.testing.assert_close(gradient.physical, rebuilt, rtol=0, atol=0, equal_nan=True)
    expected = plain_gradient(x, diff_dst, size, *arguments)
    torch.testing.assert_close(gradient.to_dense(), expected, equal_nan=True)


def test_empty_batch():
    x, diff_dst, size, arguments = problem((0, 17, 20, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    fmt, wei_format = activation_format(4, library.isa_block()), weight_format(size, library.isa_block())
    gradient = blocked_gradient(x.to(fmt), diff_dst.to(fmt), size, arguments, wei_format)
    assert not gradient.physical.any()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    x, diff_dst, size, arguments = problem((1, 17, 18, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    fmt, wei_format = activation_format(4, library.isa_block()), weight_format(size, library.isa_block())
    tensors = [t.to(fmt).physical.requires_grad_(requires_grad) for t in (x, diff_dst)]
    blocking = sum(fmt.blocking, ())
    torch.library.opcheck(
        library.convolution_weight_gradient_op,
        (tensors[0], blocking, tensors[1], size, wei_format.order, sum(wei_format.blocking, ()), *arguments),
    )


# (what is wrong, what differs from a right call, the message)
BAD = [
    ("dtype", {"src": torch.randn(1, 2, 5, 4, 8, dtype=torch.float64)}, "float32 only"),
    ("shape of diff_dst", {"diff_dst": torch.randn(1, 2, 5, 5, 8)}, "diff_dst has dst's shape"),
    ("dims of diff_dst", {"diff_dst": torch.randn(1, 2, 5, 4)}, "is blocked"),
    ("blocking of src", {"src": torch.randn(1, 4, 5, 4, 4), "src_blocking": (1, 4)}, "in blocks of 8"),
    ("plain src in groups", {"src": torch.randn(1, 16, 5, 4), "src_blocking": (), "groups": 2}, "without groups"),
    ("order", {"weight_order": (0, 0, 1, 2)}, "names each of 4 axes once"),
    ("weight blocking", {"weight_blocking": (0, 0)}, "bad blocking"),
    ("stride", {"stride": (0, 1)}, "stride"),
]


@pytest.mark.parametrize("changed, message", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_arguments(changed, message):
    right = {
        "src": torch.randn(1, 2, 5, 4, 8), "src_blocking": (1, 8), "diff_dst": torch.randn(1, 2, 5, 4, 8),
        "weight_size": (16, 16 // changed.get("groups", 1), 3, 3), "weight_order": (0, 1, 2, 3),
        "weight_blocking": (0, 8), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        library.convolution_weight_gradient_op(*(right | changed).values())
