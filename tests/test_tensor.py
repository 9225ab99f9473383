"""`BlockedTensor` as an object: what it looks like, writes to its parts, printing, numpy, threads."""

import concurrent.futures
import copy
import functools
import itertools
import json
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import assert_same, padding_is_zero
from tensor_cases import SIZE, TAGS, same_memory, save_and_load
from torch import nn

import torch_blocked as tb
from torch_blocked.reorder import to_dense

# ---- What it is


@pytest.mark.parametrize("tag", TAGS)
def test_looks_like_the_plain_tensor(x, tag):
    y = x.to(tb.format(tag))
    assert isinstance(y, torch.Tensor) and y.shape == x.shape and y.dtype == x.dtype and y.device == x.device
    assert (y.dim(), y.numel(), y.layout, y.stride()) == (x.dim(), x.numel(), x.layout, x.stride())
    assert y.is_floating_point() and not y.requires_grad and y.is_leaf and len(y) == 3
    assert y.format == tb.format(tag) and y.blocking == tb.format(tag).blocking
    assert type(y.physical) is torch.Tensor and not y.physical.requires_grad
    assert tuple(y.physical.shape) == y.blocking.physical_shape(SIZE)


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_descriptor_finds_each_element(x, tag, dtype):
    y = (x * 100).to(dtype).to(tb.format(tag))
    desc = y.memory_desc
    assert desc == tb.MemoryDesc(SIZE, dtype, tag) == tb.MemoryDesc.of(y) and desc.matches(tag)
    assert desc.nbytes == y.physical.untyped_storage().nbytes()
    memory = torch.empty(0, dtype=dtype).set_(y.physical.untyped_storage())
    dense = y.to_dense()
    for _ in range(200):
        index = tuple(random.randrange(n) for n in SIZE)
        assert memory[desc.offset(index)] == dense[index]
    inside = {desc.offset(index) for index in itertools.product(*map(range, SIZE))}
    assert all(memory[i] == 0 for i in set(range(len(memory))) - inside)


PARTS = {
    "batch": lambda y: y[1:],
    "rows": lambda y: y[:, :, 1:2],
    "columns": lambda y: y[..., ::2],
    "blocks": lambda y: y[:, 16:],
    "permuted": lambda y: y.permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_descriptor_of_a_part(name):
    x = torch.randn(3, 37, 2, 4)
    part, expected = PARTS[name](x.to(tb.nChw16c)), PARTS[name](x)
    assert type(part) is tb.BlockedTensor
    desc, physical = part.memory_desc, part.physical
    assert desc.dims == tuple(expected.shape) and desc.offset0 == physical.storage_offset()
    memory = torch.empty(0).set_(physical.untyped_storage())
    for index in itertools.product(*map(range, expected.shape)):
        assert memory[desc.offset(index)] == expected[index]
    assert_same(part, expected)


def test_descriptor_of_plain_tensors(x):
    of = tb.MemoryDesc.of
    assert of(x).tag == "abcd" and of(x).matches("nchw") and of(x).offset0 == 0
    assert of(x.to(memory_format=torch.channels_last)).tag == "acdb"
    assert of(x.to(tb.chwn)).tag == "bcda"
    assert of(torch.randn(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d)).tag == "acdeb"
    part = torch.randn(5, 30, 2, 8)[1:4, 9:, :, ::2]
    desc = of(part)
    assert desc.dims == SIZE and desc.strides == part.stride() == (480, 16, 8, 2) and desc.offset0 == 480 + 9 * 16
    assert desc.tag is None and not desc.blocking
    memory = torch.empty(0).set_(part.untyped_storage())
    assert all(memory[desc.offset(i)] == part[i] for i in itertools.product(*map(range, SIZE)))
    assert of(x[:1].expand(SIZE)).strides == (0, 8, 4, 1)


def test_attributes_cannot_be_assigned(x):
    y = x.to(tb.nChw16c)
    for name in ("physical", "blocking", "format", "memory_desc"):
        with pytest.raises(AttributeError):
            setattr(y, name, getattr(y, name))


def test_physical_shares_memory(x):
    y = x.to(tb.nChw16c)
    y.physical[2, 1, 1, 3, 4] = 50  # channel 16 + 4
    assert y.to_dense()[2, 20, 1, 3] == 50
    y.mul_(2)
    assert y.physical[2, 1, 1, 3, 4] == 100 and padding_is_zero(y)
    assert same_memory(y.detach().physical, y.physical) and same_memory(y.data.physical, y.physical)
    assert not same_memory(y.clone().physical, y.physical)


WRITES = {
    "element": lambda x: x.__setitem__((2, 20, 1, 3), 5),
    "image": lambda x: x.__setitem__(1, 5),
    "channel": lambda x: x.__setitem__((slice(None), 20), 5),
    "channels": lambda x: x.__setitem__((slice(None), slice(3, 18)), 5),
    "block of channels": lambda x: x.__setitem__((slice(None), slice(0, 16)), torch.arange(4.0)),
    "column": lambda x: x.__setitem__((..., 2), torch.arange(3.0).view(3, 1, 1)),
    "mask": lambda x: x.__setitem__(x > 0, 5),
    "indices": lambda x: x.__setitem__((torch.tensor([0, 2]), torch.tensor([20, 3])), 5),
    "whole": lambda x: x.__setitem__(slice(None), 5),
}

WRITES_TO_VIEWS = {
    "select": lambda x: x.select(1, 20).fill_(5),
    "narrow": lambda x: x.narrow(1, 2, 3).mul_(2),
    "slice of rows": lambda x: x[:, :, 1:].add_(1),
    "unbind": lambda x: x.unbind(1)[20].zero_(),
    "permute": lambda x: x.permute(1, 0, 2, 3)[20].zero_(),
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3).zero_(),
    "view": lambda x: x.view(3, -1).zero_(),
    "chunk": lambda x: x.chunk(2, 1)[1].zero_(),
}


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        *itertools.product(WRITES, ["nChw16c", "nChw8c", "OIhw4i16o4i"]),
        *itertools.product(WRITES_TO_VIEWS, ["nChw16c", "OIhw4i16o4i"]),
    ],
)
def test_writing_to_a_part_writes_to_the_whole(x, name, tag):
    y, expected = x.to(tb.format(tag)), x.clone()
    write = {**WRITES, **WRITES_TO_VIEWS}[name]
    write(expected)
    assert not torch.equal(expected, x)
    write(y)
    assert_same(y, expected)


def test_gradients_through_writes():
    """`y[index] = value`: none for what was overwritten, and the value has its own."""
    results = []
    for make in (lambda t: t * 1, lambda t: (t * 1).to(tb.nChw16c)):
        torch.manual_seed(1)
        a, b = torch.randn(SIZE, requires_grad=True), torch.randn(3, 5, 2, 4, requires_grad=True)
        y = make(a)
        y[:, 14:19] = b * 3
        y[0] += 1
        y[1:][..., 2] = 7
        (to_dense(y) ** 2).sum().backward()
        results.append((to_dense(y).detach(), a.grad, b.grad))
    for actual, expected in zip(*results[::-1], strict=True):
        assert_same(actual, expected)


def test_writing_blocked_values_into_parts(x):
    y, plain, value = x.to(tb.nChw16c), x.clone(), torch.randn(3, 5, 2, 4)
    y[:, 16:21] = value.to(tb.nChw8c)
    plain[:, 16:21] = value
    assert_same(y, plain)
    x[:, 16:21] = value.to(tb.nChw8c)
    assert torch.equal(x, plain)


def test_writing_to_a_part_of_a_leaf_is_refused(x):
    y = x.to(tb.nChw16c).requires_grad_()
    with pytest.raises(RuntimeError):
        y[0] = 1
    assert_same(y.detach(), x)
    with torch.no_grad():
        y[0] = 1
    assert y.requires_grad and y.is_leaf and (y.detach().to_dense()[0] == 1).all()


@pytest.mark.parametrize("index", [3, (0, 21), (0, 0, 0, 0, 0), "a", (slice(None), torch.tensor([21]))], ids=str)
def test_writing_out_of_range(x, index):
    y = x.to(tb.nChw16c)
    with pytest.raises((IndexError, TypeError)):
        y[index] = 1
    with pytest.raises((IndexError, TypeError)):
        y[index]
    assert_same(y, x)


class Named(torch.Tensor):
    """A subclass that does nothing of its own."""


def test_beside_a_plain_subclass(x):
    y, named = x.to(tb.nChw16c), x.clone().as_subclass(Named)
    for answer, expected in (
        (y + named, x + x),
        (torch.cat([y, named]), torch.cat([x, x])),
        (nn.Conv2d(21, 8, 2).to(tb.blocked).requires_grad_(False)(named), None),
    ):
        assert type(answer) is tb.BlockedTensor
        assert expected is None or torch.equal(answer.to_dense(), expected)
    assert y.add_(named) is y and torch.equal(y.to_dense(), x + x)
    z = y
    z += named
    assert z is y and torch.equal(y.to_dense(), x + x + x)


# ---- Printing


def test_repr_shows_values_format_and_padding():
    y = torch.arange(6.0).view(2, 3).to(tb.format("nC16c"))
    assert repr(y) == str(y)
    text = " ".join(repr(y).split())
    assert text.startswith("BlockedTensor([[0., 1., 2.], [3., 4., 5.]]")
    assert "nC16c" in text and "padded_dims=(2, 16)" in text and text.count("size=(2, 3)") == 1
    assert "grad" not in text


@pytest.mark.parametrize(
    "y",
    [
        torch.zeros(0, 3, 2, 2).to(tb.nChw16c),
        torch.zeros(2, 3, 2, 2, device="meta").to(tb.nChw16c),
        torch.zeros(2, 3, 2, 2).to(tb.nChw16c),
        torch.zeros(2, 3, 2, 2).bool().to(tb.nChw16c),
    ],
    ids=["empty", "meta", "float", "bool"],
)
def test_repr_says_each_thing_once(y):
    text = repr(y)
    assert text.startswith("BlockedTensor(") and text.endswith(")") and text.count("(") == text.count(")")
    assert f"size={tuple(y.shape)}" in text
    for word in ("size=", "format=", "padded_dims=", "dtype=", "device="):
        assert text.replace("padded_dims", "padded").count(word.replace("padded_dims", "padded")) <= 1


def test_repr_of_dtype_and_grad(x):
    assert "dtype=torch.float64" in repr(x.to(torch.float64, tb.nChw16c))
    leaf = x.to(tb.nChw16c).requires_grad_()
    assert repr(leaf).count("requires_grad=True") == 1 and "grad_fn" not in repr(leaf)
    assert repr(leaf * 2).count("grad_fn=<") == 1 and "requires_grad" not in repr(leaf * 2)
    assert "requires_grad=True" in repr(nn.Parameter(x.to(tb.nChw16c)))


def test_repr_of_a_huge_tensor_is_short():
    assert len(repr(torch.ones(300, 700, 3, 3).to(tb.nChw16c))) < 4000


def test_format_strings(x):
    y = x.to(tb.nChw16c)
    assert f"{y}" == repr(y) and f"{y[0, 0, 0, 0]:.2f}" == f"{x[0, 0, 0, 0]:.2f}"


# ---- numpy


@pytest.mark.parametrize("tag", TAGS)
def test_numpy(x, tag):
    y = x.to(tb.format(tag))
    array = np.asarray(y.to_dense())
    assert array.dtype == np.float32 and array.shape == SIZE and np.array_equal(array, x.numpy())
    assert y.physical.numpy().ctypes.data == y.physical.data_ptr()


def test_numpy_of_the_blocked_tensor_is_right_or_refused(x):
    y = x.to(tb.nChw16c)
    for convert in (np.asarray, lambda y: y.numpy(), lambda y: np.array(y.tolist(), np.float32)):
        try:
            array = convert(y)
        except (RuntimeError, TypeError) as error:
            assert "\n" not in str(error)
        else:
            assert np.array_equal(array, x.numpy())


# ---- None of this runs on plain tensors behind the user's back

NO_FALLBACKS = {
    "to": lambda y: y.to(tb.nChw8c).to(tb.nhwc),
    "to(dtype)": lambda y: y.double().to(torch.int8),
    "to_dense": lambda y: y.to_dense(),
    "clone": lambda y: y.clone().clone(memory_format=torch.channels_last),
    "detach": lambda y: y.detach().data,
    "repr": repr,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "torch.save": save_and_load,
    "parameter": nn.Parameter,
    "zeros_like": torch.zeros_like,
    "copy_": lambda y: y.copy_(torch.zeros(SIZE)).copy_(y),
    "data": lambda y: setattr(y, "data", y.to(tb.nChw8c)),
    "plain data": lambda y: setattr(y, "data", y.to_dense()),
    "module": lambda y: nn.Conv2d(16, 16, 3).to(tb.blocked).double().to(memory_format=torch.channels_last),
    "load_state_dict": lambda y: nn.Conv2d(16, 16, 3).to(tb.blocked).load_state_dict(nn.Conv2d(16, 16, 3).state_dict()),
    "state_dict": lambda y: nn.Conv2d(16, 16, 3).load_state_dict(nn.Conv2d(16, 16, 3).to(tb.blocked).state_dict()),
}


@pytest.mark.parametrize("name", NO_FALLBACKS)
def test_no_fallbacks(x, name):
    y = x.to(tb.nChw16c)
    with tb.fallback("error"), tb.count() as counts:
        NO_FALLBACKS[name](y)
    assert not counts.fallbacks


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_apply_where_a_gradient_is_required(x, mode):
    """Refused under `no_grad` too, in PyTorch's words, and nothing is written."""
    y = x.to(tb.nChw16c).requires_grad_()
    messages = []
    with mode():
        for leaf in (x.clone().requires_grad_(), y):
            with pytest.raises(RuntimeError) as error:
                leaf.apply_(lambda v: v + 1)
            messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert_same(y.detach(), x)
    assert_same(y.detach().apply_(lambda v: v + 1), x + 1)


# ---- What could reach for the bytes that a wrapper does not have: each in a process of its own

SURVIVES = {
    "share_memory_": "z = y.share_memory_(); assert z is y; assert y.is_shared(); check(y)",
    "from_dlpack": "check(torch.from_dlpack(y))",
    "numpy from_dlpack": "check(torch.from_numpy(numpy.from_dlpack(y)))",
    "to_dlpack": "check(torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)))",
    "apply_": "z = y.apply_(lambda v: v); check(z)",
    "data_ptr": "assert y.data_ptr() == y.physical.data_ptr()",
    "plain.data = blocked": "p = x.clone(); p.data = y; check(p)",
    "parameter.data = blocked": "p = torch.nn.Parameter(x); p.data = y; check(p.detach())",
    "module.share_memory": "torch.nn.Conv2d(20, 20, 3).to(tb.blocked).share_memory()",
    "set_": "z = x.clone(); z.set_(y); check(z)",
    "as_strided": "assert torch.equal(y.as_strided((2, 3), (1, 2), 5), x.as_strided((2, 3), (1, 2), 5))",
    "resize_": "y.resize_(2, 3)",
    "storage": "y.untyped_storage().tolist()",
    "queue": "q = torch.multiprocessing.SimpleQueue(); q.put(y); check(q.get())",
}

SURVIVOR = """
import json, os, sys
import numpy, torch, torch.multiprocessing, torch_blocked as tb
tb.fallback("allow")
x = torch.randn(2, 20, 3, 3)
y = x.to(tb.nChw16c)
def check(z):
    assert torch.equal(z.to_dense() if type(z) is tb.BlockedTensor else z, x), "wrong values"
for name, code in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            exec(code)
            answer = "right"
        except (RuntimeError, TypeError, BufferError, NotImplementedError) as error:
            answer = "refused"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        print(json.dumps(f"crash, status {status}"))
"""


@functools.cache
def survivors():
    command = [sys.executable, "-W", "ignore", "-c", SURVIVOR, json.dumps(SURVIVES)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    return dict(zip(SURVIVES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", SURVIVES)
def test_reaching_for_the_bytes_is_right_or_refused(name):
    assert survivors()[name] in ("right", "refused")


# ---- Threads


def test_many_threads_at_once():
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for i in range(15):
            size = [int(torch.randint(1, 40, (), generator=generator)) for _ in range(4)]
            x = torch.randn(size, generator=generator)
            y = x.to(tb.format(TAGS[(seed + i) % len(TAGS)]))
            z = y.to(tb.format(TAGS[(seed + 3 * i) % len(TAGS)]))
            if not (torch.equal(z.to_dense(), x) and padding_is_zero(z) and torch.equal((y + 1).to_dense(), x + 1)):
                return size
        return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(24))) == [None] * 24


def test_backward_in_many_threads():
    x = torch.randn(4, 33, 8, 8)

    def work(scale):
        leaf = x.clone().requires_grad_()
        (leaf.to(tb.nChw16c) * scale).to_dense().sum().backward()
        return torch.equal(leaf.grad, torch.full_like(x, scale))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))
