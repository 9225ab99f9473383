"""Views that are written to: the tensor they are of has changed too, whether they share its bytes or are a copy."""

import contextlib
import copy
import io

import pytest
import torch
from conftest import assert_same, dense
from dispatch_cases import SRC_VIEWS, cases, check, image

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")


@cases(SRC_VIEWS)
def test_in_place_of_views_reaches_the_tensor(isa, case):
    def write(x):
        case(x).add_(1).sigmoid_()
        case(x).relu_().mul_(case(torch.ones(3, 48, 5, 6)))
        case(x).zero_() if x.size(1) == 16 else case(x).fill_(3.0)
        return x

    for fmt in (tb.nChw8c, tb.nChw16c):
        check(write, torch.randn(3, 48, 5, 6).to(fmt))


def test_in_place_of_views_that_cut_the_padding():
    def write(x):
        x[:, 16:].add_(2).cos_()
        x[:1, 16:, ::2].fill_(5)
        x[:, 48:].copy_(torch.arange(5.0).view(5, 1, 1))
        x.transpose(1, 3)[..., 16:].sub_(1)
        return x

    check(write, image(53).to(tb.nChw16c))
    check(write, image(53).to(tb.nChw8c))


WRITTEN_VIEWS = {
    "image": lambda x: x[1],
    "channel": lambda x: x[:, 3],
    "row": lambda x: x.select(2, 1),
    "unbind": lambda x: x.unbind(0)[1],
    "channels in a block": lambda x: x[:, 3:5],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "split in a block": lambda x: x.split(3, 1)[1],
    "squeeze": lambda x: x[:, :, :1, :1].squeeze(),
    "squeeze to one axis": lambda x: x[:1, :, :1, :1].squeeze(),
    "t": lambda x: x[0, :, 0].t(),
    "detach": lambda x: x.detach(),
    "view_as": lambda x: x.view_as(x),
    "rows": lambda x: x[:, :, 1:3],
    "channels at the border": lambda x: x[:, 16:],
    "channels across blocks": lambda x: x[:, 3:17],
    "part across blocks": lambda x: x.chunk(2, 1)[1],
    "every other channel": lambda x: x[:, ::2],
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(2, -1),
    "reshape": lambda x: x.reshape(34, 16),
    "expand": lambda x: x[:, :, :1].expand(2, 17, 1, 4),
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3),
    "unfold": lambda x: x.unfold(1, 4, 4),
    "as bits": lambda x: x.view(torch.int32),
    "real": lambda x: torch.view_as_complex(x.view(2, 17, 4, 2, 2)),
    "view of a view": lambda x: x.view(2, -1)[:, 3:7],
    "split of a view": lambda x: x.view(2, -1).split(5, 1)[2],
    "select of a copy": lambda x: x[:, 3:17][:, 2],
    "view of true view": lambda x: x[1].flatten(),
}  # fmt: skip


@cases(WRITTEN_VIEWS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tag", ["nChw16c", "ABcd8b8a", "acdB8b"])
def test_a_write_to_a_view_reaches_the_tensor(case, mode, tag):
    with mode():
        plain = torch.randn(2, 17, 4, 4)
        x = plain.to(tb.format(tag))
        version = None if x.is_inference() else x.physical._version
        for part in (case(x), case(plain)):
            part.fill_(7)
        assert_same(x, plain)
        assert version is None or x.physical._version > version


@cases(WRITTEN_VIEWS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_view_shows_what_is_written_to_the_tensor(case, mode):
    with mode():
        plain = torch.randn(2, 17, 4, 4)
        x = plain.to(tb.nChw16c)
        parts = case(x), case(plain)
        for whole in (x, plain):
            whole.mul_(2)
            whole[1].add_(1)
        assert_same(parts[0].clone(), parts[1].clone())
        for whole, part in zip((x, plain), parts, strict=True):
            whole.neg_()
            part[0] = 3
        assert_same(x, plain)


DIFFERENTIABLE = {k: f for k, f in WRITTEN_VIEWS.items() if k not in ("as bits", "expand", "detach", "unbind")}


@cases({k: f for k, f in DIFFERENTIABLE.items() if "split" not in k and "part" not in k})
def test_the_gradient_of_a_write_to_a_view(case):
    grads = []
    for convert in (lambda x: x, lambda x: x.to(tb.nChw16c)):
        torch.manual_seed(0)
        leaf = torch.randn(2, 17, 4, 4, requires_grad=True)
        x = convert(leaf) * 2
        case(x).mul_(3)
        x.square().sum().backward()
        grads.append(leaf.grad)
    assert_same(grads[1], grads[0])
    assert type(grads[1]) is torch.Tensor


# Views of views, and views that report other strides than the bytes have.
WRITTEN_PARTS = {
    "row of a channel": lambda x: x[:, 0, 0],
    "row": lambda x: x[:, :, 0],
    "channels": lambda x: x[:, 1:3],
    "channel of channels": lambda x: x[:, 1:3][:, 0],
    "channels permuted": lambda x: x[:, 1:3].permute(0, 2, 3, 1),
    "channel transposed": lambda x: x[:, 0].transpose(1, 2),
    "diagonal of a channel": lambda x: x[:, 0].diagonal(dim1=1, dim2=2),
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3),
    "part of a pixel": lambda x: x[:, :, 1:2, 1:2].squeeze()[..., :3],
    "all of a channel": lambda x: x[:, 0][:],
}


@cases(WRITTEN_PARTS)
@pytest.mark.parametrize("channels", [3, 16, 17])
@pytest.mark.parametrize("transform", [False, True])
def test_the_gradient_of_a_write_to_a_view_of_a_view(case, channels, transform):
    leaf, weight = torch.randn(2, channels, 4, 4), torch.randn(2, channels, 4, 4)

    def loss(x):
        y = x * 1
        case(y).mul_(2)
        return (y * weight).sum()

    def gradient(x):
        return torch.func.grad(loss)(x) if transform else torch.autograd.grad(loss(x.requires_grad_()), x)[0]

    assert_same(gradient(leaf.to(tb.nChw16c)), gradient(leaf.clone()))


def test_views_of_an_inference_tensor_outside_of_inference_mode():
    with torch.inference_mode():
        plain = torch.randn(1, 17, 2, 3)
        x = plain.to(tb.nChw16c)
    views = (
        lambda x: x[0, 0],
        lambda x: x[:1, :1],
        lambda x: x[0][0],
        lambda x: x[0, :, 0, 0][3],
        lambda x: x[:, 3:17][:, 2],
        lambda x: x.flatten(1),
    )
    for view in views:
        assert_same(view(x).clone(), view(plain))
        assert view(x).is_inference()
    for write in (lambda x: x[:1].add_(1), lambda x: x[:1].requires_grad_()):
        for whole in (plain, x):
            with pytest.raises(RuntimeError, match="outside InferenceMode"):
                write(whole)


def test_a_copied_view_is_otherwise_an_ordinary_tensor():
    plain = torch.randn(2, 17, 4, 4)
    view, expected = plain.to(tb.nChw16c).flatten(1), plain.flatten(1)
    assert type(view) is not torch.Tensor and type(view + 1) is type(view.clone()) is torch.Tensor
    assert (view.numpy() == expected.numpy()).all() and view.tolist() == expected.tolist()
    assert view.stride() == expected.stride() and view.is_contiguous()
    saved = io.BytesIO()
    torch.save(view, saved)
    saved.seek(0)
    for same in (torch.load(saved), copy.deepcopy(view), torch.from_dlpack(view)):
        assert type(same) is torch.Tensor
        assert_same(same, expected)
    assert "tensor" in repr(view).lower() or "CopiedView" in repr(view)
    y = plain.to(tb.nChw16c)
    assert_same(y + y.view(2, 17, 16).view(2, 17, 4, 4), plain + plain)
    assert_same(torch.add(y[:, 1:], plain[:, 1:], out=torch.empty(0)), 2 * plain[:, 1:])


def test_an_array_of_a_copied_view_is_read_only():
    """As one of a blocked tensor is: a write would be lost."""
    x = torch.zeros(1, 17, 2, 2).to(tb.nChw16c)
    assert not x.flatten(1).numpy().flags.writeable
    x.flatten(1).numpy(force=True)[:] = 1
    assert not x.to_dense().any()


def test_several_parts_written_by_one_call():
    plain = torch.ones(1, 20, 2, 2)
    x = plain.to(tb.nChw16c)
    for whole in (x, plain):
        torch._foreach_mul_(list(whole.split(10, 1)), 3.0)
        torch._foreach_add_([whole[:, 2:5], whole[:, 14:18], whole.flatten(1)[:, -3:]], 1.0)
    assert_same(x, plain)
    version = x.physical._version
    torch._foreach_mul_([x[:, :3], x[:, 10:18]], 2.0)
    assert x.physical._version > version


def test_a_copied_view_whose_shape_changes():
    plain = torch.randn(2, 17, 4, 4)
    for change in (lambda v: v.unsqueeze_(1), lambda v: v.t_(), lambda v: v.transpose_(0, 1), lambda v: v.squeeze_()):
        x, whole = plain.to(tb.nChw16c), plain.clone()
        views = [t.flatten(1) for t in (x, whole)]
        for view in views:
            assert change(view) is view
            view[0] += 1
        assert views[0].shape == views[1].shape and views[0].stride() == views[1].stride()
        assert_same(views[0] + 0, views[1] + 0)
        assert_same(x, whole)


def test_a_copied_view_of_what_changes_its_shape():
    plain = torch.randn(1, 17, 4, 4)
    x = plain.to(tb.nChw16c)
    views = [t.flatten(1) for t in (x, plain)]
    for whole in (x, plain):
        whole.transpose_(2, 3)
    assert torch.equal(views[0], views[1])
    for view in views:
        view[:, 3:9] = 7
    assert torch.equal(views[0], views[1])
    assert_same(x, plain)


def test_gradients_are_never_copied_views():
    linear = torch.nn.Linear(17 * 16, 3)
    leaf = torch.randn(2, 17 * 16, requires_grad=True)
    x = torch.randn(2, 17, 4, 4).to(tb.nChw16c).requires_grad_()
    (linear((x * leaf.view(2, 17, 4, 4)).flatten(1)).sum() + leaf.sum()).backward()
    assert not any(type(t.grad).__name__ == "CopiedView" for t in (leaf, x, *linear.parameters()))


SET_ITEMS = {
    "pixel": lambda x: x.__setitem__((0, 3, 1, 2), 5.0),
    "image": lambda x: x.__setitem__(1, 5.0),
    "channel": lambda x: x.__setitem__((slice(None), 3), torch.arange(4.0)),
    "channels in a block": lambda x: x.__setitem__((slice(None), slice(3, 5)), 5.0),
    "channels across blocks": lambda x: x.__setitem__((slice(None), slice(3, 17)), torch.ones(4)),
    "channels at the border": lambda x: x.__setitem__((slice(None), slice(16, None)), 5.0),
    "every other row": lambda x: x.__setitem__((..., slice(None, None, 2), slice(None)), 5.0),
    "all": lambda x: x.__setitem__(..., 5.0),
    "list": lambda x: x.__setitem__((slice(None), [0, 16]), 5.0),
    "list of an image": lambda x: x.__setitem__((0, [1, 2]), 5.0),
    "list of rows of channels": lambda x: x.__setitem__((slice(None), slice(3, 5), [1, 2]), 5.0),
    "mask": lambda x: x.__setitem__(dense(x) > 0, 5.0),
    "blocked mask": lambda x: x.__setitem__(x > 0, 5.0),
    "blocked value": lambda x: x.__setitem__(0, x[1]),
    "augmented": lambda x: x.__setitem__((0, 16), x[0, 16] + 1),
}


@cases(SET_ITEMS)
def test_assignment_to_items(case):
    check(case, torch.randn(2, 17, 4, 4).to(tb.nChw16c), expects=contextlib.nullcontext)
