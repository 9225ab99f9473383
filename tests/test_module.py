"""`module.to(format)`: what becomes blocked, what survives it, and the way back."""

import copy
import io

import pytest
import torch
from conftest import assert_same
from torch import nn

import torch_blocked as tb
from torch_blocked.reorder import to_dense


@pytest.fixture(autouse=True)
def wide_blocks():
    """The names of formats here are those of AVX-512; test_formats has the other tiers."""
    if tb.isa() != "avx512":
        pytest.skip("blocks of 16 are the fastest on AVX-512 only")


class Net(nn.Module):
    """All kinds of 2-D convolutions, batch normalization, a linear layer, buffers of several ranks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 20, 3, padding=1)
        self.bn = nn.BatchNorm2d(20)
        self.depthwise = nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.grouped = nn.Conv2d(20, 40, 3, groups=4, bias=False)
        self.dense = nn.Conv2d(40, 17, 1)
        self.transposed = nn.ConvTranspose2d(17, 18, 2)
        self.fc = nn.Linear(18, 5)
        self.register_buffer("shift", torch.randn(1, 3, 1, 1))
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("codes", torch.arange(48).view(2, 24, 1, 1))
        self.register_buffer("temporary", torch.randn(1, 17, 1, 1), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        x = torch.relu(self.bn(self.first(x + self.shift)))
        x = self.dense(torch.relu(self.grouped(self.depthwise(x)))) * self.temporary
        return self.fc(self.transposed(x).mean((2, 3)))


BLOCKED = {
    "first.weight": "Ohwi16o",
    "depthwise.weight": "Oihw16o",
    "grouped.weight": "Ohwi16o",
    "dense.weight": "OIhw16i16o",
    "transposed.weight": "OIhw16i16o",
    "shift": "Ohwi16o",
    "temporary": "OIhw16i16o",
    "codes": "OIhw16i16o",
}


@pytest.fixture
def plain():
    return Net()


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 9)


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same_tensors(model, expected, **tolerances):
    ours, theirs = tensors(model), tensors(expected)
    assert list(ours) == list(theirs)
    for name in ours:
        assert_same(ours[name].detach(), to_dense(theirs[name].detach()), **tolerances)
        assert ours[name].requires_grad == theirs[name].requires_grad


def train(model, optimizer, x, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


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
    weights = torch.randn(right.shape)
    (answer * weights).sum().backward()
    (right * weights).sum().backward()
    assert_same(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same(p.grad, q.grad, rtol=1e-4, atol=1e-4)


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


# ---- What survives


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_made_before_survives(plain, x, momentum, foreach):
    model, expected = copy.deepcopy(plain), plain
    options = dict(lr=0.1, momentum=momentum, foreach=foreach, weight_decay=0.01)
    optimizers = [torch.optim.SGD(m.parameters(), **options) for m in (model, expected)]
    for m, optimizer in zip((model, expected), optimizers, strict=True):
        train(m, optimizer, x)  # state made while plain
    parameters = list(model.parameters())
    model.to(tb.blocked)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(optimizers[0].param_groups[0]["params"], parameters, strict=True))
    for m, optimizer in zip((model, expected), optimizers, strict=True):
        train(m, optimizer, x)
    assert_same_tensors(model, expected, rtol=1e-3, atol=1e-4)
    model.zero_grad()
    model.to(memory_format=torch.channels_last)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for m, optimizer in zip((model, expected), optimizers, strict=True):
        train(m, optimizer, x)
    assert_same_tensors(model, expected, rtol=1e-3, atol=1e-4)


OPTIMIZERS = {
    "Adam": dict(lr=1e-3, eps=1e-3),
    "AdamW": dict(lr=1e-3, eps=1e-3, amsgrad=True, foreach=True),
    "AdamW fused": dict(lr=1e-3, eps=1e-3, fused=True),
    "RMSprop": dict(lr=1e-3, eps=1e-2),
    "Adagrad": dict(lr=1e-3, eps=1e-2),
    "SGD fused": dict(lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_their_state(plain, x, name):
    model, expected = copy.deepcopy(plain).to(tb.blocked), plain
    make = getattr(torch.optim, name.split()[0])
    ours, theirs = (make(m.parameters(), **OPTIMIZERS[name]) for m in (model, expected))
    train(model, ours, x)
    train(expected, theirs, x)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    again = make(model.parameters(), **OPTIMIZERS[name])
    again.load_state_dict(torch.load(file, weights_only=True))
    train(model, again, x)
    train(expected, theirs, x)
    assert_same_tensors(model, expected, rtol=1e-3, atol=1e-4)


def test_gradients_survive(plain, x):
    model, expected = copy.deepcopy(plain), plain
    for m in (model, expected):
        m(x).sum().backward()
    model.to(tb.blocked)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same(p.grad, q.grad)
    for m in (model, expected):
        m(x).sum().backward()  # accumulates
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same(p.grad, q.grad, rtol=1e-3, atol=1e-4)


def test_frozen_parameters_stay_frozen(plain):
    plain.dense.requires_grad_(False)
    model = copy.deepcopy(plain).to(tb.blocked)
    assert not model.dense.weight.requires_grad and model.first.weight.requires_grad
    model.to(memory_format=torch.channels_last)
    assert not model.dense.weight.requires_grad and model.first.weight.requires_grad
    assert_same_tensors(model, plain, rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(17, 17, 3, padding=1), nn.Conv2d(17, 17, 3, padding=1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def test_tied_weights(plain):
    plain, y = Tied(), torch.randn(2, 17, 4, 4)
    model = copy.deepcopy(plain).to(tb.blocked)
    for m in (model, copy.deepcopy(model)):
        assert m.a.weight is m.b.weight and len(list(m.parameters())) == 3
        assert m.a.weight.format == tb.OIhw16i16o
        assert_same(m(y), plain(y), rtol=1e-4, atol=1e-4)
    for m in (model, plain):
        m(y).sum().backward()
    assert_same(model.a.weight.grad, plain.a.weight.grad, rtol=1e-3, atol=1e-3)
    model.zero_grad()
    model.to(memory_format=torch.channels_last)
    assert model.a.weight is model.b.weight and type(model.a.weight) is nn.Parameter


def test_parameters_in_use_are_not_swapped(plain, x):
    """PyTorch cannot swap a parameter that a graph holds: an error, and nothing lost."""
    model = copy.deepcopy(plain)
    y = model(x)
    with pytest.raises(RuntimeError):
        model.to(tb.blocked)
    y.sum().backward()
    assert_same_tensors(model, model)
    assert model.first.weight.grad is not None


def test_deepcopy(plain, x):
    model = copy.deepcopy(plain).to(tb.blocked)
    for m in (model, plain):
        m(x).sum().backward()
    twin = copy.deepcopy(model)
    with_gradients = copy.deepcopy(plain).first.weight.grad is not None
    assert_same_tensors(twin, model, rtol=0, atol=0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert type(p) is type(q) and p is not q and isinstance(q, nn.Parameter)
        assert (q.grad is not None) == with_gradients
        if name in BLOCKED:
            assert q.format == p.format and q.physical.data_ptr() != p.physical.data_ptr()
    with torch.no_grad():
        twin.dense.weight.zero_()
    assert model.dense.weight.count_nonzero() > 0


INITIALIZERS = "zeros_ ones_ normal_ trunc_normal_ kaiming_normal_ kaiming_uniform_ xavier_uniform_ dirac_ orthogonal_"


@pytest.mark.parametrize("name", INITIALIZERS.split())
def test_initialization(name):
    init = getattr(nn.init, name)
    model = nn.Conv2d(20, 17, 3).to(tb.blocked)
    torch.manual_seed(3)
    expected = init(torch.empty(17, 20, 3, 3))
    torch.manual_seed(3)
    assert init(model.weight) is model.weight
    assert model.weight.format == tb.OIhw16i16o
    assert_same(model.weight.detach(), expected, rtol=1e-4, atol=1e-5)


def test_reset_parameters():
    model = nn.Conv2d(20, 17, 3).to(tb.blocked)
    torch.manual_seed(3)
    model.reset_parameters()
    torch.manual_seed(3)
    assert_same_tensors(model, nn.Conv2d(20, 17, 3), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(wrap):
    plain = getattr(nn.utils.parametrizations, wrap)(nn.Conv2d(20, 17, 3)).eval()
    model = copy.deepcopy(plain).to(tb.blocked)
    y = torch.randn(2, 20, 4, 4)
    assert_same(model(y), plain(y), rtol=1e-4, atol=1e-4)


def test_functional_call_with_blocked_weights(x):
    model = nn.Conv2d(3, 20, 3)
    blocked = {k: v.detach().to(tb.blocked) for k, v in model.named_parameters()}
    assert_same(torch.func.functional_call(model, blocked, (x,)), model(x), rtol=1e-4, atol=1e-4)


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


# ---- Checkpoints


def changed(plain):
    """Another model of the same kind, all tensors other."""
    model = copy.deepcopy(plain)
    with torch.no_grad():
        for tensor in tensors(model).values():
            tensor.add_(1)
    return model


def test_plain_checkpoint_into_a_blocked_model(plain, x):
    model, source = copy.deepcopy(plain).to(tb.blocked), changed(plain)
    parameters = dict(model.named_parameters())
    assert not any(model.load_state_dict(source.state_dict(), strict=True))
    assert all(tensors(model)[name] is parameters[name] for name in parameters)
    assert all(type(tensors(model)[name]) is tb.BlockedTensor for name in BLOCKED)
    model.temporary = source.temporary
    assert_same_tensors(model, source, rtol=0, atol=0)
    assert_same(model(x), source(x), rtol=1e-4, atol=1e-4)


def test_blocked_checkpoint_into_a_plain_model(plain, x):
    model, source = copy.deepcopy(plain), changed(plain).to(tb.blocked)
    assert not any(model.load_state_dict(source.state_dict(), strict=True))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(type(b) is torch.Tensor for b in model.buffers())
    model.temporary = source.temporary.to_dense()
    assert_same_tensors(model, source, rtol=0, atol=0)
    assert_same(model(x), source(x), rtol=1e-4, atol=1e-4)


def test_blocked_checkpoint_into_a_blocked_model_of_another_format(plain):
    model, source = copy.deepcopy(plain).to(tb.nChw8c), changed(plain).to(tb.blocked)
    model.load_state_dict(source.state_dict())
    assert model.dense.weight.format == tb.OIhw8i8o
    model.temporary = source.temporary
    assert_same_tensors(model, source, rtol=0, atol=0)


@pytest.mark.parametrize("blocked_model", [False, True])
def test_assigned_checkpoint(plain, x, blocked_model):
    """`assign=True` takes the checkpoint's tensors as they are, as in PyTorch."""
    model, source = copy.deepcopy(plain), changed(plain)
    (model if blocked_model else source).to(tb.blocked)
    model.load_state_dict(source.state_dict(), assign=True)
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter) and (type(p) is tb.BlockedTensor) == (name in BLOCKED and not blocked_model)
    assert_same(to_dense(model.dense.weight.detach()), to_dense(source.dense.weight.detach()))
    model(x).sum().backward()


def test_checkpoints_on_disk(plain, x):
    source = changed(plain).to(tb.blocked)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    for into_blocked in (False, True):
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert list(state) == list(plain.state_dict())
        assert all((type(v) is tb.BlockedTensor) == (k in BLOCKED) for k, v in state.items())
        model = copy.deepcopy(plain)
        model = model.to(tb.blocked) if into_blocked else model
        assert not any(model.load_state_dict(state, strict=True))
        model.temporary = source.temporary
        assert_same(model(x), source(x), rtol=1e-4, atol=1e-4)
    file = io.BytesIO()
    torch.save(source, file)
    file.seek(0)
    assert_same_tensors(torch.load(file, weights_only=False), source, rtol=0, atol=0)


def test_strict_keys_and_sizes(plain):
    model = copy.deepcopy(plain).to(tb.blocked)
    assert list(model.state_dict()) == list(plain.state_dict())
    state = plain.state_dict()
    del state["dense.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*dense\.weight"):
        model.load_state_dict(state)
    assert model.load_state_dict(state | {"more": torch.zeros(1)}, strict=False) == (["dense.weight"], ["more"])
    before = model.dense.weight.detach().to_dense()
    for wrong in (torch.zeros(17, 41, 1, 1), torch.zeros(17, 48, 1, 1).to(tb.blocked), torch.zeros(2, 3)):
        with pytest.raises(RuntimeError, match=r"size mismatch for dense\.weight"):
            model.load_state_dict(plain.state_dict() | {"dense.weight": wrong})
    assert_same(model.dense.weight.detach(), before)


def test_state_dict_shares_memory(plain):
    model = plain.to(tb.blocked)
    state = model.state_dict()
    assert not any(v.requires_grad for v in state.values())
    assert state["dense.weight"].physical.data_ptr() == model.dense.weight.physical.data_ptr()
    with torch.no_grad():
        model.dense.weight.fill_(3)
    assert (state["dense.weight"].to_dense() == 3).all()


def test_averaged_models(plain, x):
    """Exponential moving averages work in place on copies."""
    results = []
    for model in (copy.deepcopy(plain).to(tb.blocked), plain):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            train(model, optimizer, x, steps=1)
            average.update_parameters(model)
        results.append(average.module)
    assert_same_tensors(*results, rtol=1e-3, atol=1e-4)
