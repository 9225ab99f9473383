"""Blocked tensors handed to NumPy, DLPack and mkldnn, and back."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.utils.mkldnn
from conftest import assert_same, one_line
from torch import nn

import torch_blocked as tb

SIZE = (2, 20, 3, 4)


# ---- NumPy

ARRAYS = {
    "asarray": np.asarray,
    "array": np.array,
    "array of doubles": lambda t: np.array(t, dtype=np.float64),
    "asarray of doubles": lambda t: np.asarray(t, dtype=np.float64),
    "numpy": lambda t: t.numpy(),
    "numpy(force)": lambda t: t.numpy(force=True),
    "stack": lambda t: np.stack([t, t]),
    "tolist": lambda t: np.array(t.tolist(), np.float32),
    "from_dlpack": np.from_dlpack,
    "from_dlpack(copy)": lambda t: np.from_dlpack(t, copy=True),
    "a part": lambda t: np.asarray(t[:, 3:18]),
    "a part by DLPack": lambda t: np.from_dlpack(t[0, 3]),
    "tensor": lambda t: torch.tensor(t).numpy(),
    "as_tensor": lambda t: torch.as_tensor(t, dtype=torch.float64).numpy(),
    "new_tensor": lambda t: torch.zeros(1).new_tensor(t).numpy(),
}


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:__array__ implementation")
@pytest.mark.parametrize("tag", ["nChw16c", "nChw8c", "OIhw4i16o4i"])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(x, name, tag):
    array, expected = ARRAYS[name](x.to(tb.format(tag))), ARRAYS[name](x)
    assert type(array) is np.ndarray and array.dtype == expected.dtype and np.array_equal(array, expected)


def test_arrays_that_lose_no_write(x):
    """A copy that stands for shared memory is read-only; one that was asked for is not."""
    y = x.to(tb.nChw16c)
    assert not np.asarray(y).flags.writeable and not y.numpy().flags.writeable
    assert np.array(y).flags.writeable and y.numpy(force=True).flags.writeable
    assert np.asarray(y, dtype=np.float64).flags.writeable
    y.physical.numpy()[...] = 0
    assert not y.any()


@pytest.mark.parametrize("name", ["numpy", "asarray", "from_dlpack"])
def test_what_requires_a_gradient_is_refused_as_plain(x, name):
    with pytest.raises((RuntimeError, BufferError)) as expected:
        ARRAYS[name](x.clone().requires_grad_())
    with pytest.raises(type(expected.value)) as error:
        ARRAYS[name](x.to(tb.nChw16c).requires_grad_())
    assert str(error.value) == str(expected.value)
    with torch.no_grad():  # enough for NumPy, not for DLPack
        if name == "from_dlpack":
            with pytest.raises(BufferError):
                ARRAYS[name](x.to(tb.nChw16c).requires_grad_())
        else:
            assert np.array_equal(ARRAYS[name](x.to(tb.nChw16c).requires_grad_()), x.numpy())


def test_no_copy_is_refused(x):
    y = x.to(tb.nChw16c)
    for make, kind in ((np.from_dlpack, BufferError), (torch.from_dlpack, BufferError), (np.array, ValueError)):
        with pytest.raises(kind):
            make(y, copy=False)


def test_item(x):
    y = x.to(tb.nChw16c)
    assert y[1, 17, 2, 3].item() == x[1, 17, 2, 3].item() and y[:1, :1, :1, :1].item() == x[0, 0, 0, 0].item()
    with pytest.raises(RuntimeError):
        y.item()


# ---- DLPack


def test_dlpack(x):
    assert torch.equal(torch.from_dlpack(x.to(tb.nChw16c)), x)
    assert x.to(tb.nChw16c).__dlpack_device__() == x.__dlpack_device__()


def test_dlpack_of_a_part_is_up_to_date(x):
    y = x.to(tb.nChw16c)
    part = y[:, 3:18]
    y.add_(1)
    assert torch.equal(torch.from_dlpack(part.to_dense() if type(part) is tb.BlockedTensor else part), x[:, 3:18] + 1)


def test_dlpack_of_a_part_is_a_copy(x):
    y = x.to(tb.nChw16c)
    part = y.flatten(1)
    torch.from_dlpack(part).add_(1)
    assert torch.equal(part.clone(), x.flatten(1)) and torch.equal(y.to_dense(), x)


def test_what_reaches_for_bytes_is_refused(x):
    y = x.to(tb.nChw16c)
    for reach in (torch.utils.dlpack.to_dlpack, torch.Tensor.data_ptr, torch.Tensor.__dlpack__):
        with pytest.raises(RuntimeError, match=r"\.to_dense\(\)") as error:
            reach(y)
        assert one_line(error)


# ---- mkldnn


def test_mkldnn(x):
    y = x.to(tb.nChw16c)
    assert y.to_mkldnn().layout == torch._mkldnn and torch.equal(y.to_mkldnn().to_dense(), x)
    back = x.to_mkldnn().to(tb.nChw16c)
    assert type(back) is tb.BlockedTensor
    assert_same(back, x, rtol=0, atol=0)
    leaf = x.clone().requires_grad_()
    (leaf.to_mkldnn().to(tb.blocked) * 2).sum().backward()
    assert_same(leaf.grad, torch.full(SIZE, 2.0))


def test_mkldnn_beside_blocked(x):
    weight = torch.randn(24, 20, 3, 3)
    answer = torch.conv2d(x.to_mkldnn(), weight.to(tb.blocked))
    assert_same(answer.to_dense(), torch.conv2d(x, weight), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"\.to_dense\(\)") as error:
        x.to_mkldnn() + x.to(tb.nChw16c)
    assert one_line(error)


def test_mkldnn_modules():
    plain = nn.Conv2d(20, 24, 3).eval()
    model, x = torch.utils.mkldnn.to_mkldnn(copy.deepcopy(plain).to(tb.blocked)), torch.randn(2, 20, 5, 5)
    assert_same(model(x.to_mkldnn()).to_dense(), plain(x), rtol=1e-4, atol=1e-4)
