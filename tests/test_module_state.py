"""What survives `module.to(format)`: optimizers, gradients, tied weights, copies; checkpoints."""

import copy
import io

import pytest
import torch
from conftest import assert_same
from module_cases import BLOCK, BLOCKED, DENSE, Net, assert_same_tensors, tensors, train
from torch import nn

import torch_blocked as tb
from torch_blocked.reorder import to_dense

SIZE = (2, 3, 8, 9)


@pytest.fixture
def plain():
    return Net()


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
        assert m.a.weight.format == DENSE
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
    assert model.weight.format == DENSE
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
    other = 24 - BLOCK
    model, source = copy.deepcopy(plain).to(tb.format(f"nChw{other}c")), changed(plain).to(tb.blocked)
    model.load_state_dict(source.state_dict())
    assert model.dense.weight.format == tb.format(f"OIhw{other}i{other}o")
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
