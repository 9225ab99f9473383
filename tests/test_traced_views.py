"""Views that are copies, where no eager copy can stand: in compiled functions, hooks and recomputed forwards."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import dense
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_blocked as tb
from torch_blocked.dispatch import registry

pytestmark = pytest.mark.filterwarnings("ignore::torch_blocked.FallbackWarning")


def write_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1)[:5].mul_(3.0)
    return y + 1


def write_the_tensor(x: Tensor) -> Tensor:
    y = x * 2
    flat = y.view(-1)
    y.mul_(3.0)
    return flat + 1


def write_the_input(x: Tensor) -> Tensor:
    flat = x.view(-1)
    flat.mul_(2.0)
    return flat + 1


def write_a_part(x: Tensor) -> Tensor:
    y = x * 2
    first, second = y.split(10, 1)[:2]
    first.add_(second)
    return y


def write_a_view_of_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y.flatten(1).t()[3].zero_()
    return y.sum(1)


def write_both(x: Tensor) -> Tensor:
    y = x * 2
    flat = y.view(-1)
    flat.mul_(3.0)
    y.add_(1.0)
    flat[::7] = 0.0
    return y * flat.view(y.shape)


def write_what_is_returned(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1)[1] = 7.0
    return y


def write_after_the_result(x: Tensor) -> Tensor:
    y = x.view(-1)
    z = x + 1
    y.mul_(2.0)
    return z


WRITES = (
    write_a_view,
    write_the_tensor,
    write_the_input,
    write_a_part,
    write_a_view_of_a_view,
    write_both,
    write_what_is_returned,
    write_after_the_result,
)


def write_two_parts(x: Tensor) -> Tensor:
    y = x * 2
    first, second = y[:, :10], y[:, 10:]
    first.tanh_()
    second.sigmoid_()
    return y + 1


def write_a_block_and_more(x: Tensor) -> Tensor:
    y = x * 2
    first, second = y[:, :14], y[:, 14:]
    whole, rest = y[:, :3], y[:, 16:]
    first.tanh_()
    second.sigmoid_()
    rest.mul_(2)
    return y + whole.sum()


def write_a_later_part(x: Tensor) -> Tensor:
    y = x * 2
    y.split(5, 1)[3].mul_(10)
    return y + 1


def read_parts_of_what_is_written(x: Tensor) -> Tensor:
    y = x * 2 - 1
    first, second = y.chunk(2, 1)
    y.relu_()
    return first[:, :8] + second[:, :8]


def write_parts_that_overlap(x: Tensor) -> Tensor:
    y = x * 2
    first, second = y[:, :12], y[:, 5:15]
    first.add_(1)
    return second * 1


SEVERAL = [
    write_two_parts, write_a_block_and_more, write_a_later_part, read_parts_of_what_is_written,
    write_parts_that_overlap,
]  # fmt: skip


# What reads the bytes below the dispatcher, after a write to a copy.
READS = {
    "to_dense": lambda y: y.to_dense(),
    "contiguous": lambda y: y.contiguous(),
    "channels_last": lambda y: y.contiguous(memory_format=torch.channels_last),
    "plain format": lambda y: y.to(tb.format("nchw"), copy=True),
    "another format": lambda y: y.to(tb.nChw8c),
    "a write to an item": lambda y: y.__setitem__((slice(None), 1), 0.0) or y + 1,
    "a write by a list": lambda y: y.__setitem__((slice(None), [1, 3]), 2.0) or y + 1,
}
COPIED = {"channels": lambda y: y[:, 3:20], "flat": lambda y: y.view(-1)[:5], "in a block": lambda y: y[:, :3]}


@pytest.mark.parametrize("part", COPIED)
@pytest.mark.parametrize("read", READS)
def test_a_conversion_sees_the_writes(read, part):
    def function(x: Tensor) -> Tensor:
        y = x * 2
        COPIED[part](y).mul_(3)
        return READS[read](y) if isinstance(y, tb.BlockedTensor) else plain_read(y)

    def plain_read(y: Tensor) -> Tensor:
        return READS[read](y) if "write" in read else y

    torch._dynamo.reset()
    x = torch.randn(2, 40, 3, 4)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(dense(compiled(x.to(tb.nChw16c))), function(x.clone()))


@pytest.mark.parametrize("channels", [20, 24, 32, 40])
@pytest.mark.parametrize("write", SEVERAL, ids=lambda f: f.__name__)
def test_parts_of_one_tensor_are_parts_of_one_copy(write, channels):
    torch._dynamo.reset()
    x = torch.randn(2, channels, 3, 4)
    blocked = x.to(tb.nChw16c)
    compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(dense(compiled(blocked)), write(x))
    torch.testing.assert_close(blocked.to_dense(), x)


def test_writes_to_views_of_a_tensor_and_of_its_permutation_are_refused():
    """Between operators on blocked tensors nobody brings their copies level."""

    def write(x: Tensor) -> Tensor:
        y = x * 2
        first, second = y[:, :10], y.permute(0, 2, 3, 1)[..., 10:]
        first.tanh_()
        second.sigmoid_()
        return y + 1

    torch._dynamo.reset()
    with pytest.raises(Exception, match="written to one after the other"):
        torch.compile(write, backend="aot_eager", fullgraph=True)(torch.randn(2, 20, 3, 4).to(tb.nChw16c))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_a_compiled_function_sees_the_writes(write, backend):
    torch._dynamo.reset()
    x = torch.randn(2, 20, 3, 3)
    blocked = x.to(tb.blocked)
    compiled = torch.compile(write, backend=backend, fullgraph=backend != "eager")
    actual, expected = compiled(blocked), write(x)
    torch.testing.assert_close(dense(actual), expected)
    torch.testing.assert_close(blocked.to_dense(), x)  # the input, written to or not


@pytest.mark.parametrize("write", [write_a_view, write_the_tensor, write_both], ids=lambda f: f.__name__)
def test_a_compiled_function_differentiates_through_the_writes(write):
    torch._dynamo.reset()
    x = torch.randn(2, 20, 3, 3)
    grads = []
    for leaf, function in (
        (x.clone().requires_grad_(), write),
        (x.to(tb.blocked).requires_grad_(), torch.compile(lambda x: dense(write(x)), backend="aot_eager")),
    ):
        function(leaf).square().sum().backward()
        grads.append(dense(leaf.grad))
    torch.testing.assert_close(grads[1], grads[0])


def test_nothing_of_a_trace_is_left():
    torch._dynamo.reset()
    torch.compile(write_a_view, backend="aot_eager")(torch.randn(2, 20, 3, 3).to(tb.blocked))
    gc.collect()
    assert registry.LEVEL == []


def leaf_of(x: Tensor, fmt: object) -> Tensor:
    return (x.clone() if fmt is None else x.to(fmt)).requires_grad_()


def gradients(x: Tensor, loss) -> list[Tensor]:
    """The gradient of a plain and of a blocked leaf under `loss`."""
    leaves = [leaf_of(x, fmt) for fmt in (None, tb.blocked)]
    for leaf in leaves:
        loss(leaf).backward()
    return [dense(leaf.grad) for leaf in leaves]


def test_a_hook_writes_to_a_view_of_the_gradient():
    x, weight = torch.randn(2, 20, 3, 3), torch.randn(2, 20, 3, 3)

    def hook(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[:5].mul_(3.0)
        return grad

    def loss(leaf: Tensor) -> Tensor:
        y = leaf * 2
        y.register_hook(hook)
        return (y * weight.to(tb.blocked if isinstance(leaf, tb.BlockedTensor) else None)).sum()

    plain, blocked = gradients(x, loss)
    assert not torch.equal(plain, 2 * weight)
    torch.testing.assert_close(blocked, plain)


def test_a_recomputed_forward_writes_to_a_view():
    x = torch.randn(2, 20, 3, 3)

    def loss(leaf: Tensor) -> Tensor:
        return checkpoint(lambda x: dense(write_a_view(x)).square(), leaf, use_reentrant=False).sum()

    plain, blocked = gradients(x, loss)
    torch.testing.assert_close(blocked, plain)


def test_gradients_are_ordinary_tensors():
    """Autograd's own views of gradients do not become views that write to others."""
    leaf = torch.randn(2, 360).requires_grad_()
    (leaf.view(2, 40, 3, 3).to(tb.blocked) * 2).view(2, 360).square().sum().backward()
    assert type(leaf.grad) is Tensor
