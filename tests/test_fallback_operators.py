"""Operators that run on plain tensors give those's answers: in place, with `out=`, of lists, composite."""

import faulthandler
import multiprocessing
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, dense
from dispatch_cases import cases, from_seed
from fallback_cases import FORMATS, WEIGHT, check, image
from torch import nn

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- What is written to

IN_PLACE = {
    "cumsum": lambda x: x.cumsum_(1),
    "masked_fill": lambda x: x.masked_fill_(torch.arange(5) > 2, 3.0),
    "masked_fill by a blocked mask": lambda x: x.masked_fill_(x > 0, 3.0),
    "index_fill": lambda x: x.index_fill_(1, torch.tensor([0, 16]), 2.0),
    "index_add": lambda x: x.index_add_(1, torch.tensor([3]), torch.ones(2, 1, 4, 5)),
    "index_put": lambda x: x.index_put_((torch.tensor([0]), torch.tensor([16])), torch.tensor(5.0)),
    "scatter": lambda x: x.scatter_(1, torch.full((2, 1, 4, 5), 16), 9.0),
    "tril": lambda x: x.tril_(),
    "hardshrink": lambda x: x.lerp_(F.hardshrink(x), 0.5),
    "renorm": lambda x: x.renorm_(2, 0, 1.0),
    "rrelu": lambda x: F.rrelu(x, inplace=True),
    "prelu": lambda x: x.copy_(F.prelu(x, torch.full((17,), 0.3))),
    "floor_divide by keyword": lambda x: x.div_(other=x.abs() + 1, rounding_mode="floor"),
    "sub by keyword": lambda x: x.sub_(other=torch.ones(5)),
    "index_copy": lambda x: x.index_copy_(2, torch.tensor([1]), torch.ones(2, 17, 1, 5)),
    "put": lambda x: x.put_(torch.tensor([1, 400]), torch.tensor([3.0, 4.0])),
    "erfinv of bounded": lambda x: x.tanh_().erfinv_(),
    "sqrt": lambda x: x.abs_().sqrt_(),
    "resize to the same size": lambda x: x.resize_(x.shape),
    "requires_grad": lambda x: x.requires_grad_().requires_grad_(False),
}


@cases(IN_PLACE)
def test_in_place_writes_into_the_blocked_tensor(case):
    for fmt in FORMATS:
        x = image(fmt=fmt)
        physical, version = x.physical, x.physical._version
        y = check(case, x)
        if y.shape == x.shape:
            assert y is x
        assert x.physical is physical
        assert x.format == image(fmt=fmt).format
        if case not in (IN_PLACE["requires_grad"], IN_PLACE["resize to the same size"]):
            assert x.physical._version > version


@cases(
    {
        "transpose": lambda x: x.transpose_(2, 3),
        "transpose of a view": lambda x: (x[:, :, :3, :3].transpose_(2, 3), x)[1],
        "swapaxes": lambda x: x.swapaxes_(-1, -2),
        "squeeze nothing": lambda x: x.squeeze_(2),
    }
)
def test_in_place_change_of_shape_moves_no_values(case):
    """Or is refused; of a view it leaves the tensor that it is of."""
    x = torch.randn(2, 17, 4, 4).to(tb.nChw16c)
    alias, before = x.detach(), x.to_dense()
    try:
        check(case, x)
    except RuntimeError:
        assert_same(x, before)
    assert_same(alias, before)


def test_in_place_of_a_view_reaches_the_tensor():
    def write(x):
        x[:, 16:].cumsum_(2)
        x[1:, :, ::2].masked_fill_(torch.ones(5) > 0, 7.0)
        return x

    check(write, image())


OUTS = {
    "add": lambda x, out: torch.add(x, 1, out=out),
    "mul of plain ones": lambda x, out: torch.mul(dense(x), 2, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 1, out=out),
    "onto itself": lambda x, out: torch.exp(out, out=out),
    "onto its input": lambda x, out: torch.cumsum(x, 1, out=x),
    "clamp": lambda x, out: torch.clamp(x, 0, 1, out=out),
    "cat": lambda x, out: torch.cat([x[:1], x[1:]], out=out),
    "where": lambda x, out: torch.where(x > 0, x, out, out=out),
    "sigmoid": lambda x, out: torch.sigmoid(x, out=out),
    "promoted": lambda x, out: torch.add(x.int(), 1, out=out),
    "avg_pool": lambda x, out: torch._C._nn.avg_pool2d(x, 1, out=out),
}


@cases(OUTS)
def test_out_writes_into_the_blocked_tensor(case):
    for fmt in FORMATS:
        x, out = image(), image(fmt=fmt)
        physical, version = out.physical, out.physical._version
        y = check(case, x, out)
        assert y is (x if case is OUTS["onto its input"] else out)
        assert out.physical is physical
        assert (out.physical._version > version) == (y is out)


@cases({name: f for name, f in OUTS.items() if name != "onto itself"})
def test_plain_out_of_blocked_inputs(case):
    x, out = image(), torch.randn(2, 17, 4, 5)
    assert not isinstance(check(case, x, out), tb.BlockedTensor) or case is OUTS["onto its input"]


def test_several_outs():
    def sort(x, values, indices):
        return torch.sort(x, 1, out=(values, indices))

    x, values, indices = image(), image(), image().long()
    y = check(sort, x, values, indices)
    assert y[0] is values
    assert y[1] is indices

    x, values, indices = image(), torch.zeros(2, 4, 5), torch.zeros(2, 4, 5).to(tb.nCw16c).long()
    check(lambda x, v, i: torch.max(x, 1, out=(v, i)), x, values, indices)


def test_out_of_another_size_is_refused():
    x, out = image(), image(16)
    before = out.to_dense()
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="resize"):
        warnings.simplefilter("ignore")
        torch.cumsum(x, 1, out=out)
    assert_same(out, before)
    for write in (lambda: x.resize_(3, 4), lambda: x.unsqueeze_(0), lambda: x.transpose_(1, 2), lambda: x.squeeze_(0)):
        before = x.to_dense()
        try:
            write()
        except RuntimeError:
            assert_same(x, before)
        else:
            assert x.physical.shape == x.blocking.physical_shape(tuple(x.shape))


# ---- Lists

LISTS = {
    "foreach add": lambda *xs: torch._foreach_add(list(xs), 1.0),
    "foreach add of lists": lambda *xs: torch._foreach_add(list(xs), list(reversed(xs)), alpha=2),
    "foreach add in place": lambda *xs: torch._foreach_add_(list(xs), 1.0),
    "foreach mul in place": lambda *xs: torch._foreach_mul_(list(xs), [1.0, 2.0, 3.0]),
    "foreach zero": lambda *xs: torch._foreach_zero_(list(xs)),
    "foreach copy": lambda *xs: torch._foreach_copy_(list(xs), list(reversed(xs))),
    "foreach lerp": lambda *xs: torch._foreach_lerp_(list(xs), [x + 1 for x in xs], 0.3),
    "foreach norm": lambda *xs: torch._foreach_norm(list(xs)),
    "stack": lambda *xs: torch.stack(xs),
    "stack of channels": lambda *xs: torch.stack(xs, 2),
    "block_diag": lambda *xs: torch.block_diag(*(x[0, 0] for x in xs)),
    "einsum": lambda *xs: torch.einsum("nchw,nchw,nchw->nc", *xs),
    "dstack": lambda *xs: torch.dstack(xs),
    "broadcast_tensors": lambda *xs: torch.broadcast_tensors(*xs),
    "meshgrid": lambda *xs: torch.meshgrid(*(x[0, 0, 0] for x in xs), indexing="ij"),
    "index by blocked tensors": lambda *xs: xs[0][xs[1] > 0],
    "index by some": lambda *xs: xs[0][:, torch.tensor([1, 16]), None, torch.tensor([0, 2])],
    "index_put": lambda *xs: xs[0].index_put_((xs[1] > 0,), torch.tensor(3.0)),
    "parameters to vector": lambda *xs: nn.utils.parameters_to_vector(xs),
    "clip_grad_norm": lambda *xs: nn.utils.get_total_norm(list(xs)),
    "cdist": lambda *xs: torch.cdist(xs[0], xs[1]),
    "histogram": lambda *xs: torch.histogram(xs[0], torch.linspace(-2, 2, 5)),
    "split and cat": lambda *xs: torch.cat([*xs[0].split(3, 1), *xs[1].split(2, 1)], 1),
}


@cases(LISTS)
def test_lists_of_tensors(case):
    check(case, image(), image(fmt=tb.nChw8c), torch.randn(2, 17, 4, 5))
    check(case, torch.randn(2, 17, 4, 5), image(), image())


def test_a_list_that_holds_a_tensor_twice():
    x = image()
    check(lambda x, y: torch._foreach_add_([x, y, x], 1.0), x, image())


# ---- Composite operators: inference_mode delivers them whole


COMPOSITES = {
    "conv2d": lambda x: F.conv2d(x, WEIGHT, padding=1),
    "conv2d same": lambda x: F.conv2d(x, WEIGHT, padding="same"),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, WEIGHT),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(17), torch.ones(17)),
    "batch_norm train": lambda x: F.batch_norm(x, torch.zeros(17), torch.ones(17), training=True),
    "instance_norm": lambda x: F.instance_norm(x),
    "group_norm": lambda x: F.group_norm(x, 17),
    "layer_norm": lambda x: F.layer_norm(x, (4, 5)),
    "linear": lambda x: F.linear(x, torch.ones(3, 5)),
    "matmul": lambda x: x @ torch.ones(5, 2),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x, 0.5),
    "flatten": lambda x: x.flatten(1),
    "reshape": lambda x: x.reshape(-1, 5),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "relu6": F.relu6,
    "selu": F.selu,
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "chunk": lambda x: x.chunk(2, 1),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "contiguous": lambda x: x.contiguous(),
    "std": lambda x: x.std(),
    "softmax": lambda x: x.softmax(1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, 4, 5).long()),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones(2, 17, 4, 5)),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[..., :4], 2),
    "to": lambda x: x.to(torch.float64),
    "ones_like": torch.ones_like,
    "item": lambda x: x.sum().item() * 0,
    "square": torch.square,
    "in place": lambda x: x.square_().add_(1),
    "set item": lambda x: x.__setitem__((slice(None), 3), 5.0),
}


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made outside"])
@cases(COMPOSITES)
def test_composites_in_inference_mode(case, inside):
    for fmt in FORMATS:
        x = image(fmt=fmt)
        with torch.inference_mode():
            check(from_seed(case), x.clone() if inside else x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_composites_of_a_network_do_not_fall_back(mode):
    names = (
        "conv2d",
        "batch_norm",
        "dropout",
        "flatten",
        "reshape",
        "max_pool2d",
        "adaptive_avg_pool2d",
        "relu6",
        "selu",
    )
    with mode(), tb.fallback("error"):
        for name in names:
            COMPOSITES[name](image())


# ---- What reads memory itself, past the dispatcher

READERS = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "numpy function": lambda x: np.add(x, 1),
    "array on the right": lambda x: x + np.ones(5, dtype=np.float32),
    "dlpack": lambda x: torch.from_dlpack(x),
    "numpy by dlpack": lambda x: np.from_dlpack(x),
    "apply_": lambda x: x.apply_(lambda v: v + 1),
    "map_": lambda x: x.map_(x, lambda a, b: a + b),
    "share_memory_": lambda x: x.share_memory_(),
    "share_memory of a module": lambda x: nn.Conv2d(17, 17, 1).to(tb.blocked).share_memory() and x,
    "tensor_split at a tensor": lambda x: x.tensor_split(torch.tensor([1, 2]), 1),
    "tensor_split at a blocked tensor": lambda x: x.tensor_split(torch.tensor([1, 2]).to(tb.blocked), 1),
    "item of a storage": lambda x: x.untyped_storage()[0] is not None and x,
    "memoryview": lambda x: memoryview(x),
}


@cases(READERS)
def test_what_reads_memory_itself_answers_or_refuses(case):
    """Never a crash: it runs in a child."""

    def run():
        faulthandler.disable()
        try:
            check(lambda x: list(y) if isinstance(y := case(x), tuple) else torch.as_tensor(y), image())
        except (RuntimeError, TypeError, NotImplementedError, BufferError, IndexError) as error:
            assert str(error)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    assert child.exitcode == 0


# ---- Autocast


def test_autocast_runs_convolutions_in_bfloat16():
    x = image()
    with torch.autocast("cpu"):
        y = check(lambda x: F.conv2d(x, WEIGHT, padding=1), x)
    assert y.dtype == torch.bfloat16
