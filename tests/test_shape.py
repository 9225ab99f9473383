"""Operators that change the shape: the plain answer in every format, and views of the same bytes."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from dispatch_cases import FORMATS, aten, cases, check, check_error, each_channels, formats, image
from torch import Tensor

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")

# Functions of (2, c, 4, 4).
SHAPES = {
    "flatten": lambda x: x.flatten(1),
    "flatten all": lambda x: x.flatten(),
    "flatten two": lambda x: x.flatten(2),
    "view": lambda x: x.view(2, -1),
    "view apart": lambda x: x.view(2, x.size(1), 2, 2, 4),
    "view as it is": lambda x: x.view(x.shape),
    "view as it is, one size unknown": lambda x: x.view(2, -1, 4, 4),
    "reshape": lambda x: x.reshape(-1, 8),
    "reshape as it is": lambda x: x.reshape(x.shape),
    "unflatten": lambda x: x.unflatten(1, (1, -1)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute all": lambda x: x.permute(3, -2, 1, 0),
    "transpose": lambda x: x.transpose(1, -1),
    "transpose nothing": lambda x: x.transpose(2, 2),
    "movedim": lambda x: x.movedim(1, 0),
    "swapaxes": lambda x: x.swapaxes(0, 3),
    "mT": lambda x: x.mT,
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze batch": lambda x: x[:1].squeeze(0),
    "squeeze channels": lambda x: x.squeeze(1),
    "squeeze nothing": lambda x: x.squeeze(2),
    "squeeze two": lambda x: x[:1, :, :1].squeeze((0, 2)),
    "squeeze all but two": lambda x: x[:, :, :1, :1].squeeze(),
    "squeeze to a vector": lambda x: x[:1, :, :1, :1].squeeze(),
    "squeeze to a scalar": lambda x: x[:1, :1, :1, :1].squeeze() if x.size(1) == 1 else x,
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "unsqueeze first and back": lambda x: x.unsqueeze(-5).squeeze(0),
    "rows": lambda x: x[:, :, 1:3],
    "last rows": lambda x: x[:, :, -2:],
    "every other column": lambda x: x[..., ::2],
    "every third column from one": lambda x: x[..., 1::3],
    "no rows": lambda x: x[:, :, 2:2],
    "rows that end before they begin": lambda x: x[:, :, 3:1],
    "more rows than there are": lambda x: x[:, :, 1:100],
    "whole channels": lambda x: x[:, 0:],
    "channels from 16": lambda x: x[:, 16:],
    "two blocks of channels": lambda x: x[:, 16:48],
    "slice of a slice": lambda x: x[:, 16:][:, 16:],
    "channels in a block": lambda x: x[:, 1:3],
    "every other channel": lambda x: x[:, ::2],
    "no channels": lambda x: x[:, :0],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "image": lambda x: x[1],
    "channel": lambda x: x[:, 0],
    "pixel": lambda x: x[..., 1, 2],
    "element": lambda x: x[1, 0, 3, 2],
    "new axis": lambda x: x[None, :, :, None],
    "list of rows": lambda x: x[:, :, [2, 0]],
    "mask": lambda x: x[x > 0],
    "expand": lambda x: x[:1].expand(3, -1, -1, -1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1, 3),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 3), (3, 1), 1),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "view of another dtype": lambda x: x.view(torch.int32),
    "contiguous": lambda x: x.permute(0, 2, 3, 1).contiguous(),
}  # fmt: skip


@each_channels
@cases(SHAPES)
def test_shape(isa, case, channels):
    for fmt in FORMATS:
        check(case, torch.randn(2, channels, 4, 4).to(fmt), expects=contextlib.nullcontext)


# Views of the same bytes of nChw16c: each keeps the storage, falls back on nothing, and is blocked.
BLOCKED_VIEWS = (
    "view as it is", "view as it is, one size unknown", "reshape as it is", "permute", "permute all", "transpose",
    "transpose nothing", "movedim", "swapaxes", "mT", "squeeze batch", "squeeze nothing", "unsqueeze", "unsqueeze last",
    "unsqueeze first and back", "rows", "last rows", "every other column", "every third column from one",
    "more rows than there are", "whole channels", "narrow",
)  # fmt: skip


@each_channels
@pytest.mark.parametrize("name", BLOCKED_VIEWS)
def test_views_share_the_bytes(isa, name, channels):
    for fmt in formats(isa):
        x = torch.randn(2, channels, 4, 4).to(fmt)
        if name == "squeeze batch" and 0 in x.blocking.axes:
            continue  # one image of a block of them
        y = check(SHAPES[name], x)
        assert isinstance(y, tb.BlockedTensor)
        assert y.physical.untyped_storage().data_ptr() == x.physical.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["channels from 16", "two blocks of channels", "slice of a slice"])
def test_channel_slices_at_block_borders_share_the_bytes(name):
    for fmt in (tb.nChw8c, tb.nChw16c, tb.format("nChw4c"), tb.format("aBcd2b8b")):
        x = image(53).to(fmt)
        y = check(SHAPES[name], x)
        assert y.physical.untyped_storage().data_ptr() == x.physical.untyped_storage().data_ptr()


def test_transpose_of_matrices():
    for size in ((17,), (3, 17), (0, 17), (17, 1)):
        y = check(torch.t, torch.randn(size).to(tb.blocked))
        assert isinstance(y, tb.BlockedTensor)


PLAIN_VIEWS = {
    "flatten of pixels": ((2, 32, 1, 1), lambda x: x.flatten(1)),
    "flatten of one pixel, odd channels": ((1, 17, 1, 1), lambda x: x.flatten(1)),
    "view of pixels": ((3, 16, 1, 1), lambda x: x.view(3, 4, 4)),
    "squeeze of pixels": ((2, 17, 1, 1), lambda x: x.squeeze()),
    "squeeze of one channel": ((2, 1, 3, 4), lambda x: x.squeeze(1)),
}


@cases(PLAIN_VIEWS)
def test_what_is_plain_already_is_not_copied(case):
    size, f = case
    x = torch.randn(size).to(tb.nChw16c)
    check(f, x)
    with tb.count() as counts:
        y = f(x)
    assert y.data_ptr() == x.physical.data_ptr()
    assert (counts.left, counts.reorders.total()) == (1, 0)


SHAPE_ERRORS = {
    "view": lambda x: x.view(3, 5),
    "view of two unknowns": lambda x: x.view(-1, -1),
    "permute twice": lambda x: x.permute(0, 1, 1, 2),
    "permute few": lambda x: x.permute(0, 1, 2),
    "permute over": lambda x: x.permute(0, 1, 2, 7),
    "permute under": lambda x: x.permute(0, 1, 2, -5),
    "transpose over": lambda x: x.transpose(0, 4),
    "t of four axes": lambda x: x.t(),
    "squeeze over": lambda x: x.squeeze(4),
    "squeeze under": lambda x: x.squeeze(-5),
    "squeeze twice": lambda x: x.squeeze((0, 0)),
    "unsqueeze over": lambda x: x.unsqueeze(6),
    "unsqueeze under": lambda x: x.unsqueeze(-6),
    "slice over": lambda x: aten.slice.Tensor(x, 4, 0, 1),
    "slice of no step": lambda x: aten.slice.Tensor(x, 2, 0, 1, 0),
    "slice backwards": lambda x: aten.slice.Tensor(x, 2, 3, 0, -1),
    "split over": lambda x: x.split(1, 4),
    "split of nothing": lambda x: x.split(0, 2),
    "split of a negative size": lambda x: x.split(-1, 2),
    "sizes": lambda x: x.split([1, 1], 2),
    "sizes over": lambda x: x.split([2, 2], -5),
    "negative sizes": lambda x: x.split([5, -1], 2),
    "chunk into none": lambda x: x.chunk(0, 2),
    "cat over": lambda x: torch.cat([x, x], 4),
    "cat under": lambda x: torch.cat([x, x], -5),
    "cat of other channels in the same block": lambda x: torch.cat([x, torch.ones(2, 18, 4, 4)], 0),
    "cat of other rows": lambda x: torch.cat([x, x[:, :, 1:]], 3),
    "cat of other ranks": lambda x: torch.cat([x, x[0]], 0),
    "sum over": lambda x: x.sum(4),
    "sum under": lambda x: x.sum(-5),
    "mean over": lambda x: x.mean((2, 6)),
    "amax over": lambda x: x.amax(4),
    "sum twice": lambda x: x.sum((2, -2)),
    "mean of integers": lambda x: x.int().mean((2, 3)),
    "amax of nothing": lambda x: x[:, :, :0].amax(2),
    "index": lambda x: x[2],
    "item": lambda x: x.item(),
    "bool": lambda x: bool(x),
    "expand": lambda x: x.expand(2, 18, 4, 4),
}  # fmt: skip


@cases(SHAPE_ERRORS)
def test_shape_refuses_what_pytorch_refuses(case):
    check_error(case, torch.randn(2, 17, 4, 4).to(tb.nChw16c))


@pytest.mark.parametrize(
    "name", [*BLOCKED_VIEWS, "flatten", "image", "squeeze channels", "view", "channels in a block"]
)
def test_views_in_inference_mode_of_tensors_made_outside(name):
    x = torch.randn(2, 17, 4, 4).to(tb.nChw16c)
    with torch.inference_mode():
        check(SHAPES[name], x, expects=contextlib.nullcontext)


OTHER_RANKS = {
    "sequence": (2, 17, 5),
    "volume": (2, 17, 2, 3, 2),
    "matrix": (3, 17),
    "vector": (17,),
    "six axes": (2, 17, 1, 2, 1, 2),
    "empty batch": (0, 17, 3, 3),
    "no channels": (2, 0, 3, 3),
    "no pixels": (2, 17, 0, 3),
}

ANY_RANK = {
    "add": lambda x: x + x,
    "broadcast": lambda x: x * torch.arange(float(x.size(-1))),
    "cos": torch.cos,
    "cos_": lambda x: x.cos_(),
    "sum of the last": lambda x: x.sum(-1),
    "mean of the first": lambda x: x.mean(0, keepdim=True),
    "flatten": lambda x: x.flatten(),
    "permute": lambda x: x.permute(*reversed(range(x.dim()))) + 1,
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1) - 1,
    "squeeze": lambda x: x.squeeze().exp(),
    "cat": lambda x: torch.cat([x, x], 0),
    "cat last": lambda x: torch.cat([x, x], -1),
    "chunk": lambda x: x.chunk(2, 0),
    "slice": lambda x: x[1:].exp(),
    "fill_": lambda x: x.fill_(3),
    "copy_": lambda x: x.copy_(torch.ones(x.size(-1))),
    "ones_like": torch.ones_like,
    "clone": torch.clone,
    "double": Tensor.double,
    "equal": lambda x: torch.equal(x, x + 0),
    "sigmoid of a slice": lambda x: x[..., :1].sigmoid(),
}


@pytest.mark.parametrize("size", list(OTHER_RANKS.values()), ids=list(OTHER_RANKS))
@cases(ANY_RANK)
def test_other_ranks_and_empty_tensors(isa, case, size):
    check(case, torch.randn(size).to(tb.blocked), expects=contextlib.nullcontext)
