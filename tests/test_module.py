"""`module.to(format)`: what becomes blocked, its answers, and the way back."""

import copy

import pytest
import torch
from conftest import assert_same
from module_cases import BLOCKED, Net, assert_same_backward, assert_same_tensors, tensors
from torch import nn

import torch_blocked as tb
from torch_blocked.reorder import to_dense

SIZE = (2, 3, 8, 9)


@pytest.fixture
def plain():
    return Net()


# ---- What becomes blocked


def test_which_tensors_become_blocked(plain):
    model = copy.deepcopy(plain)
    assert model.to(tb.blocked) is model
    for name, tensor in tensors(model).items():
        is_parameter = name in dict(model.named_parameters())
        assert isinstance(tensor, nn.Parameter) == is_parameter and tensor.is_leaf
        if name not in BLOCKED:
            assert type(tensor) is (nn.Parameter if is_parameter else torch.Tensor)
            continue
        assert type(tensor) is tb.BlockedTensor and tensor.memory_desc.matches(BLOCKED[name])
    assert_same_tensors(model, plain, rtol=0, atol=0)
    assert model.absent is None and model.codes.dtype == torch.int64


OTHERS = {
    "conv1d": nn.Conv1d(16, 16, 3),
    "linear": nn.Linear(16, 16),
    "embedding": nn.Embedding(16, 16),
    "batch_norm3d": nn.BatchNorm3d(16),
    "lstm": nn.LSTM(16, 16),
    "attention": nn.MultiheadAttention(16, 2),
    "prelu": nn.PReLU(16),
    "no parameters": nn.ReLU(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_modules_that_stay_plain(name):
    model = copy.deepcopy(OTHERS[name])
    before = dict(model.named_parameters())
    model.to(tb.blocked)
    after = dict(model.named_parameters())
    assert all(after[k] is before[k] and type(after[k]) is nn.Parameter for k in before)
    assert_same_tensors(model, OTHERS[name], rtol=0, atol=0)


RUNS = {
    "conv1d": (nn.Conv1d(3, 20, 3, stride=2), (2, 3, 9)),
    "conv2d": (nn.Conv2d(20, 33, 3, padding="same", dilation=2), (2, 20, 7, 6)),
    "one channel": (nn.Conv2d(1, 1, 1), (1, 1, 3, 3)),
    "circular": (nn.Conv2d(20, 17, 3, padding=1, padding_mode="circular"), (2, 20, 5, 5)),
    "unbatched": (nn.Conv2d(20, 17, 3), (20, 5, 5)),
    "transposed": (nn.ConvTranspose2d(20, 17, 3, stride=2, output_padding=1), (2, 20, 5, 5)),
    "transposed, grouped": (nn.ConvTranspose2d(20, 20, 3, groups=20), (2, 20, 5, 5)),
    "conv3d": (nn.Conv3d(3, 20, 2), (1, 3, 4, 4, 4)),
    "sequence": (
        nn.Sequential(nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20), nn.PReLU(20), nn.Conv2d(20, 5, 1)),
        (2, 3, 6, 6),
    ),
    "to a linear layer": (
        nn.Sequential(nn.Conv2d(3, 20, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 5)),
        (2, 3, 6, 6),
    ),
    "bilinear": (nn.Sequential(nn.Conv2d(3, 20, 3), nn.Upsample(scale_factor=2, mode="bilinear")), (2, 3, 6, 6)),
}


@pytest.mark.parametrize("name", RUNS)
def test_answers_and_gradients(name):
    model, size = RUNS[name]
    expected, model = copy.deepcopy(model), copy.deepcopy(model).to(tb.blocked)
    ours, theirs = (torch.randn(size).requires_grad_() for _ in "ab")
    ours.data.copy_(theirs.data)
    answer, right = model(ours), expected(theirs)
    assert_same(answer, right, rtol=1e-4, atol=1e-5)
    assert_same_backward(model, expected, (ours, theirs), (answer, right), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("source", ["plain", "channels_last", "blocked", "nChw8c"])
def test_model_takes_any_format(plain, x, mode, source):
    expected, model = copy.deepcopy(plain), copy.deepcopy(plain).to(tb.blocked)
    for m in (model, expected):
        getattr(m, mode)()
        assert m.training == (mode == "train")
    src = {
        "plain": x,
        "channels_last": x.to(memory_format=torch.channels_last),
        "blocked": x.to(tb.blocked),
        "nChw8c": x.to(tb.nChw8c),
    }[source]
    assert_same(model(src), expected(x), rtol=1e-4, atol=1e-4)
    assert_same_tensors(model, expected, rtol=1e-4, atol=1e-4)  # running statistics too


WAYS = {
    "to(fmt)": (lambda m: m.to(tb.blocked), torch.float32),
    "to(memory_format=)": (lambda m: m.to(memory_format=tb.blocked), torch.float32),
    "to(dtype, fmt)": (lambda m: m.to(torch.float64, tb.blocked), torch.float64),
    "to(fmt, dtype)": (lambda m: m.to(tb.blocked, torch.float64), torch.float64),
    "to(fmt, dtype=)": (lambda m: m.to(tb.blocked, dtype=torch.float64), torch.float64),
    "to(dtype=, memory_format=)": (lambda m: m.to(dtype=torch.float64, memory_format=tb.blocked), torch.float64),
    "to(device, dtype, memory_format=)": (
        lambda m: m.to("cpu", torch.float64, memory_format=tb.blocked),
        torch.float64,
    ),
    "to(tensor, memory_format=)": (
        lambda m: m.to(torch.zeros(1, dtype=torch.float64), memory_format=tb.blocked),
        torch.float64,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_handing_the_format(plain, way):
    call, dtype = WAYS[way]
    model = copy.deepcopy(plain)
    assert call(model) is model
    assert all(type(tensors(model)[name]) is tb.BlockedTensor for name in BLOCKED)
    assert model.codes.dtype == torch.int64 and {p.dtype for p in model.parameters()} == {dtype}
    assert_same_tensors(model, plain.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fmt", "tag"),
    [
        ("nChw16c", "OIhw16i16o"),
        ("nChw8c", "OIhw8i8o"),
        ("nCdhw8c", "OIhw8i8o"),
        ("OIhw16o16i", "OIhw16o16i"),
        ("OIhw4i16o4i", "OIhw4i16o4i"),
        ("Oihw8o", "Oihw8o"),
    ],
)
def test_formats_that_are_named(plain, fmt, tag):
    """One of activations: the weights that go with that block. One of weights: itself."""
    model = copy.deepcopy(plain).to(tb.format(fmt))
    assert model.dense.weight.format == tb.format(tag) and type(model.fc.weight) is nn.Parameter
    assert_same_tensors(model, plain, rtol=0, atol=0)


def test_formats_of_five_axes():
    plain = nn.Sequential(nn.Conv3d(20, 17, 2), nn.Conv2d(17, 20, 2))
    model = copy.deepcopy(plain).to(tb.format("OIdhw16i16o"))
    assert model[0].weight.format == tb.format("OIdhw16i16o") and type(model[1].weight) is nn.Parameter
    assert_same_tensors(model, plain, rtol=0, atol=0)
    assert_same(model[0](torch.ones(1, 20, 3, 3, 3)), plain[0](torch.ones(1, 20, 3, 3, 3)))


def test_twice_is_once(plain):
    model = plain.to(tb.blocked)
    before = {name: tensor.physical for name, tensor in tensors(model).items() if name in BLOCKED}
    model.to(tb.blocked)
    assert all(tensors(model)[name].physical.data_ptr() == before[name].data_ptr() for name in before)


# ---- The way back

BACK = {
    "channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "contiguous": lambda m: m.to(memory_format=torch.contiguous_format),
    "nchw": lambda m: m.to(tb.nchw),
    "nhwc": lambda m: m.to(tb.nhwc),
    "chwn": lambda m: m.to(memory_format=tb.chwn),
}

EXPECTED = {"channels_last": "acdb", "contiguous": "abcd", "nchw": "abcd", "nhwc": "acdb", "chwn": "bcda"}


@pytest.mark.parametrize("way", BACK)
@pytest.mark.parametrize("grads", ["no gradients", "gradients", "plain gradients"])
def test_the_way_back(plain, x, way, grads):
    model, expected = copy.deepcopy(plain).to(tb.blocked), plain
    if grads != "no gradients":
        for m in (model, expected):
            m(x).sum().backward()
    if grads == "plain gradients":
        for p in model.parameters():
            p.grad = to_dense(p.grad)
    parameters = dict(model.named_parameters())
    BACK[way](model)
    for name, tensor in tensors(model).items():
        if name in parameters:
            assert type(tensor) is nn.Parameter and tensor is parameters[name] and tensor.requires_grad
        else:
            assert type(tensor) is torch.Tensor
        if tensor.dim() == 4:
            assert tb.MemoryDesc.of(tensor).matches(EXPECTED[way])
    exact = grads == "no gradients"
    assert_same_tensors(model, expected, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        if grads == "no gradients":
            assert p.grad is None
        else:
            assert type(p.grad) is torch.Tensor
            assert_same(p.grad, q.grad, rtol=1e-3, atol=1e-4)
    assert_same(model(x), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grads", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("way", ["double", "bfloat16", "half", "float", "cpu", "requires_grad_"])
def test_conversions_keep_the_format(plain, x, way, grads):
    model, expected = copy.deepcopy(plain).to(tb.blocked), plain
    parameters = list(model.parameters())
    for m in (model, expected):
        if grads:
            m(x).sum().backward()
        getattr(m, way)()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for name, tensor in tensors(model).items():
        assert (type(tensor) is tb.BlockedTensor) == (name in BLOCKED)
        assert isinstance(tensor, nn.Parameter) == (name in dict(model.named_parameters()))
    assert_same_tensors(model, expected, rtol=1e-2 if grads else 0, atol=1e-5 if grads else 0)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert (p.grad is not None) == grads
        if grads:
            assert p.grad.dtype == p.dtype
            assert_same(p.grad.double(), q.grad.double(), rtol=1e-1, atol=1e-1)
    dtype = model.fc.weight.dtype
    tolerance = 1e-4 if dtype.itemsize >= 4 else 5e-2
    assert_same(model(x.to(dtype)).float(), expected(x.to(dtype)).float(), rtol=tolerance, atol=tolerance)


def test_to_meta_and_to_empty(plain, x):
    model = copy.deepcopy(plain).to(tb.blocked).to("meta")
    assert model.dense.weight.device.type == "meta" and model.dense.weight.shape == (17, 40, 1, 1)
    model = model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    model.temporary = plain.temporary
    assert_same_tensors(model, plain, rtol=0, atol=0)
    assert_same(model(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "setting", ["set_swap_module_params_on_conversion", "set_overwrite_module_params_on_conversion"]
)
def test_conversion_modes_of_pytorch(plain, x, setting):
    model = copy.deepcopy(plain)
    set_mode = getattr(torch.__future__, setting)
    set_mode(True)
    try:
        model.to(tb.blocked)
        assert type(model.dense.weight) is tb.BlockedTensor and isinstance(model.dense.weight, nn.Parameter)
        model(x).sum().backward()
        model.double().float()
        assert type(model.dense.weight) is tb.BlockedTensor and model.dense.weight.grad is not None
        model.to(memory_format=torch.channels_last)
        assert type(model.dense.weight) is nn.Parameter and model.dense.weight.grad is not None
        model.load_state_dict(copy.deepcopy(plain).to(tb.blocked).state_dict())
    finally:
        set_mode(False)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(to_dense(p), q)
