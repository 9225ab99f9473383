"""The C++ operators by PyTorch's own checks, their shape-only kernels, and the same in ATen operations."""

import pytest
import torch
from reorder_cases import flat, reorder
from torch._subclasses import FakeTensorMode

from torch_blocked import equivalents


def conv_case(x, src_tag, weight, wei_tag, *, groups=1, block=16, **options):
    """Arguments of `torch_blocked::convolution` from plain tensors."""
    src = reorder(x, tuple(x.shape), "abcde"[: x.dim()], src_tag)
    wei = reorder(weight, tuple(weight.shape), "abcde"[: weight.dim()], wei_tag)
    given = dict(bias=None, stride=[1, 1], padding=[0, 0], dilation=[1, 1]) | options
    first = [given.pop(k) for k in ("bias", "stride", "padding", "dilation")]
    return [src, flat(src_tag), wei, list(weight.shape), flat(wei_tag), *first, groups, block], given


def conv_cases():
    r = torch.randn
    vectors = dict(bias=r(20), scale=r(20), shift=r(20))
    yield "blocked", conv_case(r(2, 17, 5, 6), "nChw16c", r(20, 17, 3, 3), "OIhw16i16o", bias=r(20))
    yield "first", conv_case(r(2, 3, 5, 6), "nchw", r(20, 3, 3, 3), "Ohwi16o", stride=[2, 1], padding=[1, 2])
    yield "depthwise", conv_case(r(2, 20, 5, 6), "nChw16c", r(20, 1, 3, 3), "Oihw16o", groups=20, padding=[1, 1])
    yield "grouped", conv_case(r(1, 32, 5, 6), "nChw8c", r(16, 16, 1, 1), "OIhw8i8o", groups=2, block=8)
    yield "plain weight", conv_case(r(1, 17, 7, 6), "nChw16c", r(20, 17, 3, 2), "oihw", dilation=[2, 1])
    post_ops = dict(residual=r(2, 2, 3, 4, 16), activation="relu")
    post_ops["residual"][:, 1, ..., 4:] = 0
    yield "post-ops", conv_case(r(2, 17, 5, 6), "nChw16c", r(20, 17, 3, 3), "OIhw16i16o", **vectors, **post_ops)
    yield "relu6", conv_case(r(0, 17, 5, 6), "nChw16c", r(20, 17, 3, 3), "OIhw16i16o", activation="relu6")

    yield "one dim", conv_case(r(2, 17, 9), "nCw16c", r(20, 17, 3), "oiw", stride=[2], padding=[1], dilation=[1])
    window = dict(stride=[1, 2, 1], padding=[1, 0, 1], dilation=[1, 1, 1])
    yield "three dims", conv_case(r(1, 17, 3, 5, 4), "nCdhw16c", r(20, 17, 3, 3, 3), "OIdhw16i16o", **window)


def transposed_cases():
    r = torch.randn
    for name, x, tag, w, wei_tag, window in (
        ("blocked", r(2, 17, 5, 6), "nChw8c", r(17, 20, 4, 4), "OIhw16i16o", ([2, 2], [1, 1], [0, 0], [1, 1], 1)),
        ("uneven", r(1, 17, 5, 6), "nChw8c", r(17, 20, 3, 2), "Ohwi8o", ([1, 3], [1, 0], [0, 2], [1, 2], 1)),
        ("one dim", r(2, 17, 9), "nCw8c", r(17, 20, 3), "oiw", ([2], [1], [1], [1], 1)),
        ("groups", r(2, 20, 3, 4), "nChw8c", r(20, 2, 3, 3), "oihw", ([2, 1], [1, 1], [1, 0], [1, 1], 10)),
    ):
        src = reorder(x, tuple(x.shape), "abcd"[: x.dim()], tag)
        wei = reorder(w, tuple(w.shape), "abcd"[: w.dim()], wei_tag)
        yield name, ([src, flat(tag), wei, w.shape, flat(wei_tag), r(20), *window, 8], {})


def batch_norm_cases():
    r = torch.randn
    yield (
        "affine",
        ([reorder(r(2, 20, 3, 4), (2, 20, 3, 4), "nchw", "nChw16c"), r(20), r(20), r(20), r(20) ** 2, 1e-5], {}),
    )
    yield "plain", ([reorder(r(2, 20, 5), (2, 20, 5), "ncw", "nCw8c"), None, None, r(20), r(20) ** 2 + 1, 1e-3], {})


def reorder_cases():
    r = torch.randn
    yield "to blocked", ([r(2, 17, 3, 4), (2, 17, 3, 4), [], [0, 1, 2, 3], [1, 16]], {})
    yield "to plain", ([r(2, 2, 3, 4, 16), (2, 17, 3, 4), [1, 16], [0, 2, 3, 1], []], {})
    yield "split twice", ([r(18, 17, 3, 3), (18, 17, 3, 3), [], [0, 1, 2, 3], [1, 4, 0, 16, 1, 4]], {})
    yield "dtype", ([r(2, 17, 3), (2, 17, 3), [], [2, 1, 0], [1, 8]], dict(dtype=torch.float64))
    yield "strided", ([r(2, 17, 3, 4).transpose(1, 3), (2, 4, 3, 17), [], [0, 1, 2, 3], [3, 8]], {})
    yield "empty", ([r(0, 17), (0, 17), [], [1, 0], [1, 8]], {})


OPERATORS = {
    "reorder": reorder_cases,
    "convolution": conv_cases,
    "convolution_transpose": transposed_cases,
    "batch_norm": batch_norm_cases,
}
OPERATOR_CASES = [(name, case) for name, cases in OPERATORS.items() for case, _ in cases()]


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize(("name", "case"), OPERATOR_CASES)
def test_opcheck(name, case, requires_grad):
    args, kwargs = dict(OPERATORS[name]())[case]
    if requires_grad:
        args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_leaf else a for a in args]
        kwargs = {k: v.requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    torch.library.opcheck(getattr(torch.ops.torch_blocked, name).default, args, kwargs)


@pytest.mark.parametrize(("name", "case"), OPERATOR_CASES)
def test_fake_operator_has_the_real_shape_and_strides(name, case):
    args, kwargs = dict(OPERATORS[name]())[case]
    op = getattr(torch.ops.torch_blocked, name)
    real = op(*args, **kwargs)
    with FakeTensorMode() as mode:

        def fake(value):
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        shape_only = op(*map(fake, args), **{k: fake(v) for k, v in kwargs.items()})
    assert (shape_only.shape, shape_only.stride(), shape_only.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(("name", "case"), [c for c in OPERATOR_CASES if c[0] != "reorder"])
def test_operator_against_aten_operations(isa, name, case):
    args, kwargs = dict(OPERATORS[name]())[case]
    actual = getattr(torch.ops.torch_blocked, name)(*args, **kwargs)
    expected = getattr(equivalents, f"{name}_aten")(*args, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert actual.stride() == expected.stride()


def test_convolution_without_blockings():
    """None is a plain tensor's blocking, as an empty list is, in the gradients too."""
    args, _ = conv_case(torch.randn(2, 3, 5, 6), "nchw", torch.randn(20, 3, 3, 3), "oihw")
    tensors = [args[i].requires_grad_() for i in (0, 2)]
    found = []
    for blocking in ([], None):
        args[1] = args[4] = blocking
        y = torch.ops.torch_blocked.convolution(*args)
        found.append((y, *torch.autograd.grad(y.sum(), tensors)))
    assert all(map(torch.equal, *found))


def test_vectors_with_gaps():
    """Bias, scale and shift, the statistics: any strides."""
    for name, case in (("convolution", "post-ops"), ("batch_norm", "affine")):
        args, kwargs = dict(OPERATORS[name]())[case]
        op = getattr(torch.ops.torch_blocked, name)
        expected = op(*args, **kwargs)

        def gaps(v):
            is_vector = isinstance(v, torch.Tensor) and v.dim() == 1
            return torch.stack([v, torch.full_like(v, torch.nan)], 1)[:, 0] if is_vector else v

        actual = op(*map(gaps, args), **{k: gaps(v) for k, v in kwargs.items()})
        assert torch.equal(actual, expected)
