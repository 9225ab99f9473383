"""Copies and pickles of blocked tensors: format, what they share and their gradients as those of plain ones."""

import copy
import functools
import io
import pickle

import pytest
import torch
from conftest import assert_same, one_line
from tensor_cases import SIZE, TAGS, same_memory, save_and_load
from torch import nn

import torch_blocked as tb

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "pickle 2": lambda y: pickle.loads(pickle.dumps(y, protocol=2)),
    "torch.save": save_and_load,
    "torch.save legacy": functools.partial(save_and_load, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("kind", ["tensor", "requires grad", "parameter", "frozen parameter", "bfloat16", "empty"])
def test_copies(x, way, tag, kind):
    x = x[:0] if kind == "empty" else x
    y = x.to(tb.format(tag))
    y = {
        "requires grad": lambda: y.requires_grad_(),
        "parameter": lambda: nn.Parameter(y),
        "frozen parameter": lambda: nn.Parameter(y, requires_grad=False),
        "bfloat16": lambda: y.bfloat16(),
    }.get(kind, lambda: y)()
    z = COPIES[way](y)
    assert type(z) is tb.BlockedTensor and z is not y
    assert isinstance(z, nn.Parameter) == ("parameter" in kind)
    assert z.requires_grad == y.requires_grad and z.is_leaf and z.dtype == y.dtype
    assert z.memory_desc == y.memory_desc and z.format == y.format
    assert_same(z.detach(), y.detach().to_dense(), rtol=0, atol=0)
    if kind != "empty":
        assert same_memory(z.physical, y.physical) == (way == "copy")


@pytest.mark.parametrize("wrap", [torch.Tensor.requires_grad_, nn.Parameter], ids=["tensor", "parameter"])
def test_deepcopy_takes_the_gradient_along_as_a_plain_one_does(x, wrap):
    plain, y = wrap(x.clone()), wrap(x.to(tb.nChw16c))
    plain.grad, y.grad = x * 2, (x * 2).to(tb.nChw8c)
    expected, z = copy.deepcopy(plain).grad, copy.deepcopy(y).grad
    assert (z is None) == (expected is None)
    if z is not None:
        assert z.format == tb.nChw8c and not same_memory(z.physical, y.grad.physical)
        assert_same(z, expected)
    y.grad = None
    assert copy.deepcopy(y).grad is None


@pytest.mark.parametrize("wrap", [torch.Tensor.detach, nn.Parameter], ids=["tensor", "parameter"])
def test_deepcopy_parts_parameters_as_that_of_plain_ones_does(x, wrap):
    """Two parameters on the same memory."""
    shared = []
    for value in (x, x.to(tb.nChw16c)):
        a, b = copy.deepcopy([wrap(value), wrap(value)])
        with torch.no_grad():
            a.zero_()
        shared.append(not b.to_dense().any() if isinstance(b, tb.BlockedTensor) else not b.any())
    assert shared[0] == shared[1]


def test_deepcopy_of_what_has_a_grad_fn(x):
    y = x.requires_grad_().to(tb.nChw16c)
    with pytest.raises(RuntimeError) as error:
        copy.deepcopy(y)
    assert one_line(error)
    assert_same(copy.deepcopy(y.detach()), x.detach())


@pytest.mark.parametrize("way", [n for n in COPIES if n != "copy"])
def test_copies_keep_what_is_shared(x, way):
    y = x.to(tb.nChw16c)
    a, b, c = COPIES[way]([y, y, y.detach()])
    assert a is b and a is not c
    if "pickle" not in way:  # PyTorch's own tensors part company there too
        assert same_memory(a.physical, c.physical)


def test_pickles_with_plain_tensors_and_parts(x):
    y = x.to(tb.nChw16c)
    loaded = save_and_load({"blocked": y, "part": y[1:], "plain": x, "list": [y]})
    assert_same(loaded["blocked"], x) or assert_same(loaded["part"], x[1:])
    assert loaded["list"][0] is loaded["blocked"] and torch.equal(loaded["plain"], x)
    assert same_memory(loaded["part"].physical, loaded["blocked"].physical)


def test_load_to_another_device(x):
    file = io.BytesIO()
    torch.save(x.to(tb.nChw16c), file)
    file.seek(0)
    y = torch.load(file, map_location="meta", weights_only=True)
    assert type(y) is tb.BlockedTensor and y.device.type == y.physical.device.type == "meta" and y.shape == SIZE
