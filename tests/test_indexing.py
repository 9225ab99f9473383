"""What moves elements along axes: the plain tensor's answer and gradient, no fallback."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import CHANNELS, assert_same
from dispatch_cases import cases, check, check_error, check_gradient, images

import torch_blocked as tb

INDEX = torch.tensor([1, 0, 1])


def places(x):
    return (x.detach() > 0).long()


# Functions of a (2, channels, 4, 5) image.
MOVES = {
    "flip": lambda x: x.flip(2),
    "flip of channels": lambda x: x.flip(1),
    "flip of all": lambda x: x.flip(0, 1, 2, 3),
    "roll": lambda x: x.roll(3, -1),
    "roll of channels": lambda x: x.roll((5, -2), (1, 0)),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "repeat of channels": lambda x: x.repeat(1, 3, 2, 1),
    "repeat to a new axis": lambda x: x.repeat(2, 1, 1, 2, 1),
    "tile": lambda x: x.tile(2, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 3),
    "expand": lambda x: x[:, :, :1].expand(-1, -1, 3, -1),
    "expand to a new axis": lambda x: x.expand(3, -1, -1, -1, -1),
    "expand of a mean": lambda x: x - x.mean((2, 3), keepdim=True).expand_as(x),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3)),
    "pad that cuts": lambda x: F.pad(x, (-1, 2, 1, -2)),
    "pad of ones": lambda x: F.pad(x, (1, 0, 2, 1), value=1),
    "pad of channels": lambda x: F.pad(x, (0, 0, 1, 0, 0, 20)),
    "reflection": lambda x: F.pad(x, (4, 2, 0, 3), mode="reflect"),
    "replication": lambda x: F.pad(x, (9, 2, 0, 3), mode="replicate"),
    "replication of a sequence": lambda x: F.pad(x[0], (9, 2), mode="replicate"),
    "reflection of a volume": lambda x: F.pad(x.unsqueeze(2), (4, 2, 0, 3, 0, 0), mode="reflect"),
    "index_select": lambda x: x.index_select(2, INDEX),
    "list of rows": lambda x: x[:, :, [2, 0, -1]],
    "index_add": lambda x: x.index_add(3, INDEX, x[..., :3]),
    "index_add of infinities": lambda x: x.index_add(3, INDEX, x[..., :3].abs() + 1, alpha=math.inf),
    "gather": lambda x: x.gather(2, places(x)),
    "scatter_add": lambda x: x.scatter_add(3, places(x), x * 2),
    "stack": lambda x: torch.stack([x, x * 2], 2),
    "tril": lambda x: x.tril(-1),
    "triu": lambda x: x.triu(1),
    "diagonal": lambda x: x.diagonal(1, 2, 3),
    "image": lambda x: x[1],
    "row": lambda x: x.select(2, -1),
    "channel": lambda x: x[:, 0],
    "every other column": lambda x: x[..., 1::2],
    "whole channels": lambda x: x[:, 0:16],
    "chunk": lambda x: x.chunk(2, 2)[1],
    "unbind": lambda x: x.unbind(2)[1],
    "axes of one": lambda x: x.view(2, 1, -1, 4, 1, 5) * 2,
    "cat": lambda x: torch.cat([x, x.flip(2)], 3),
}


@cases(MOVES)
def test_move(isa, case):
    for channels in CHANNELS:
        for x in images(channels):
            check(case, x)


@cases(MOVES)
def test_gradient_of_a_move(case):
    for channels in (1, 17, 53):
        for x in images(channels):
            check_gradient(case, x)


ERRORS = {
    "flip twice": lambda x: x.flip(1, 1),
    "roll of more than the axes": lambda x: x.roll((1, 2), (1,)),
    "repeat of few": lambda x: x.repeat(2, 2),
    "expand of many": lambda x: x.expand(2, 18, 4, 5),
    "expand to a new axis unknown": lambda x: x.expand(-1, 2, 17, 4, 5),
    "pad that cuts all": lambda x: F.pad(x, (-3, -3)),
    "reflection from afar": lambda x: F.pad(x, (5, 0, 0, 0), mode="reflect"),
    "index over": lambda x: x.index_select(2, torch.tensor([4])),
    "index of channels over": lambda x: x.index_select(1, torch.tensor([17])),
    "index of inner blocks": lambda x: torch.ops.aten.index(x, [None, None, None, None, torch.tensor([0])]),
    "gather over": lambda x: x.gather(2, places(x) + 4),
    "gather of other channels in the same block": lambda x: x.gather(2, torch.zeros(2, 18, 2, 5).long()),
    "scatter of another dtype": lambda x: x.scatter(2, places(x), x.double()),
    "stack of other sizes": lambda x: torch.stack([x, x[:1]]),
    "gradient of another select": lambda x: torch.ops.aten.select_backward(x, [2, 18, 3, 4, 5], 2, 2),
}


@cases(ERRORS)
def test_refuses_what_pytorch_refuses(case):
    check_error(case, images(17)[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_axes_changed_in_place(mode):
    with mode():
        for x in images(17):
            expected = x.to_dense()
            for f in (lambda x: x.unsqueeze_(-1), lambda x: x.transpose_(2, 3), lambda x: x.squeeze_(-1)):
                assert f(x) is x
                assert_same(x, f(expected))
        assert isinstance(x, tb.BlockedTensor)


SHUFFLES = {
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 3), (2, 153, 4, 5)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (2, 17, 4, 6)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 3), (2, 51, 4, 5)),
}


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles(name):
    f, size = SHUFFLES[name]
    x = torch.randn(size)
    for fmt in (tb.nChw16c, tb.nChw8c):
        check(f, x.to(fmt))


@pytest.mark.parametrize("name", ["pixel_shuffle", "pixel_unshuffle"])
def test_gradients_of_shuffles(name):
    f, size = SHUFFLES[name]
    x = torch.randn(size)
    grads = []
    for leaf in (x.clone().requires_grad_(), x.to(tb.nChw16c).requires_grad_()):
        f(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert_same(grads[1], grads[0])


def test_shuffles_refuse_what_pytorch_refuses():
    for f in (lambda x: F.pixel_shuffle(x, 2), lambda x: F.pixel_unshuffle(x, 3), lambda x: F.channel_shuffle(x, 2)):
        with pytest.raises(RuntimeError):
            f(torch.randn(1, 17, 4, 5).to(tb.nChw16c))
