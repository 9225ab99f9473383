"""Training: curves of blocked and plain models, optimizers and their state, what is done around a training step."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import assert_same, dense, padding_is_zero
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import torch_blocked as tb
from torch_blocked.benchmark.measure import num_threads
from torch_blocked.benchmark.models import BasicBlock, ResNet


@pytest.fixture(autouse=True)
def one_thread():
    """On tensors this small threads wait for each other more than they work."""
    with num_threads(1):
        yield


class Net(nn.Module):
    """Everything that a small residual network has; channel counts beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20)
        self.conv2, self.bn2 = nn.Conv2d(20, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20)
        self.pool = nn.MaxPool2d(2)
        self.conv3, self.bn3 = nn.Conv2d(20, 33, 3, 2, bias=False), nn.BatchNorm2d(33)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(33, 10))

    def body(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = x + self.bn2(self.conv2(x))
        return F.relu(self.bn3(self.conv3(self.pool(F.relu(x)))))

    def forward(self, x):
        return self.head(self.body(x))


def batches(count, n=8):
    """Noisy pictures of ten classes; the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(10, 3, 9, 11, generator=generator)
    for _ in range(count):
        target = torch.randint(0, 10, (n,), generator=generator)
        yield pictures[target] + torch.randn(n, 3, 9, 11, generator=generator), target


def pair():
    """A plain model and a blocked one of the same weights."""
    model = Net()
    return model, copy.deepcopy(model).to(tb.blocked)


def train(model, optimizer, steps, step=None):
    """Losses of the steps; `step(model, x, target)` computes and differentiates one."""
    losses = []
    for x, target in batches(steps):
        optimizer.zero_grad()
        losses.append(float((step or plain_step)(model, x, target)))
        optimizer.step()
    return losses


def plain_step(model, x, target):
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    return loss.detach()


def sgd(model):
    # Slow enough that a ReLU which rounding makes flip does not send the curves apart.
    return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)


def assert_alike(plain, blocked, optimizer=None, rtol=1e-3, atol=1e-4):
    """The parameters are right and blocked; their padding and that of gradients and state is zero."""
    for (name, p), q in zip(plain.named_parameters(), blocked.parameters(), strict=True):
        assert isinstance(q, tb.BlockedTensor) == (p.dim() == 4), name
        assert_same(q.detach(), p.detach(), rtol=rtol, atol=atol)
        assert (p.grad is None) == (q.grad is None) and padding_is_zero(q.grad), name
    for q, state in (optimizer.state if optimizer else {}).items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim():
                assert padding_is_zero(value), key
                assert isinstance(value, tb.BlockedTensor) == isinstance(q, tb.BlockedTensor), key


# ---- Curves


@pytest.mark.parametrize("winograd", ["never", "auto"])
def test_loss_curves(isa, winograd):
    with tb.winograd(winograd):
        curves = [train(model, sgd(model), 200) for model in pair()]
    assert curves[0][-1] < 0.3 * curves[0][0]
    for plain, blocked in zip(*curves, strict=True):
        assert blocked == pytest.approx(plain, rel=0.01)


def gradients(model, x, target):
    F.cross_entropy(model(x), target).backward()
    return [dense(p.grad).double() for p in model.parameters()]


# Winograd's algorithms round more: F(4x4) about five times as much as oneDNN's direct convolution.
@pytest.mark.parametrize("winograd, factor", [("never", 3), ("auto", 8)])
def test_gradients_are_as_exact_as_plain_ones(isa, winograd, factor):
    """Of a residual network against float64; relative to each gradient's largest."""
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=10)
    x, target = torch.randn(4, 3, 64, 64), torch.arange(4)
    exact = gradients(copy.deepcopy(model).double(), x.double(), target)
    plain = gradients(copy.deepcopy(model), x, target)
    with tb.winograd(winograd):
        blocked = gradients(model.to(tb.blocked), x, target)
    for e, p, b in zip(exact, plain, blocked, strict=True):
        errors = [float((g - e).abs().max() / e.abs().max()) for g in (p, b)]
        assert errors[1] <= factor * errors[0]


def test_a_step_of_a_resnet_does_not_fall_back():
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=10).to(tb.blocked)
    optimizer = sgd(model)
    with tb.count() as counts:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.arange(2)).backward()
            optimizer.step()
    assert not counts.fallbacks


# ---- Optimizers

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-3, "amsgrad": True, "maximize": False}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-3, "momentum": 0.9, "centered": True}),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, foreach):
    make, options = OPTIMIZERS[name]
    options = options | {"foreach": foreach} | ({} if make is torch.optim.RMSprop else {"fused": False})
    plain, blocked = pair()
    optimizer = make(blocked.parameters(), **options)
    expected = train(plain, make(plain.parameters(), **options), 10)
    assert train(blocked, optimizer, 10) == pytest.approx(expected, rel=1e-3)
    assert_alike(plain, blocked, optimizer)


@pytest.mark.parametrize("source", ["plain", "blocked"])
@pytest.mark.parametrize("target", ["plain", "blocked"])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_state_goes_between_plain_and_blocked_models(source, target, name):
    """Training goes on as if nothing had happened; state stays in the format that it was made in."""
    make, options = OPTIMIZERS[name]
    models = {"plain": (a := pair())[0], "blocked": a[1]}
    resumed = copy.deepcopy(models[target])
    first, second = (make(m.parameters(), **options) for m in (models[source], resumed))
    train(models[source], first, 4)
    state = copy.deepcopy({"model": models[source].state_dict(), "optimizer": first.state_dict()})
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    expected = train(models[source], first, 4)
    assert train(resumed, second, 4) == pytest.approx(expected, rel=1e-3)
    for p, q in zip(models[source].parameters(), resumed.parameters(), strict=True):
        assert isinstance(q, tb.BlockedTensor) == (target == "blocked" and p.dim() == 4)
        assert_same(q.detach(), dense(p.detach()), rtol=1e-3, atol=1e-4)
    assert all(padding_is_zero(value) for value in second.state.values())


def test_copies_of_model_and_optimizer_train_alone():
    _, model = pair()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 2)
    other, others = copy.deepcopy((model, optimizer))
    expected = train(model, optimizer, 3)
    assert train(other, others, 3) == expected
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(dense(p.detach()), dense(q.detach())) and p.data_ptr() != q.data_ptr()


# ---- What is done around a step


def clipped(clip: Callable, **options) -> Callable:
    def step(model, x, target):
        loss = plain_step(model, x, target)
        clip(model.parameters(), 0.05, **options)
        return loss

    return step


def accumulated(model, x, target):
    parts = zip(x.split(4), target.split(4), strict=True)
    return sum(plain_step(model, *part) for part in parts)


def autocast(model, x, target):
    with torch.amp.autocast("cpu", torch.bfloat16):
        y = model(x)
    loss = F.cross_entropy(y.float(), target)
    loss.backward()
    return loss.detach()


def checkpointed(reentrant: bool) -> Callable:
    def step(model, x, target):
        y = checkpoint(model.body, x.requires_grad_(reentrant), use_reentrant=reentrant)
        loss = F.cross_entropy(model.head(y), target)
        loss.backward()
        return loss.detach()

    return step


def functional(model, x, target):
    """By torch.func.grad of functional_call; the buffers stay as they were."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(parameters):
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        return F.cross_entropy(functional_call(model, (parameters, buffers), (x,)), target)

    grads, loss = torch.func.grad_and_value(loss_of)(parameters)
    for name, p in model.named_parameters():
        p.grad = grads[name]
    return loss


def penalized(model, x, target):
    """Gradient penalty: the gradient of a gradient."""
    x.requires_grad_()
    loss = F.cross_entropy(model(x), target)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + 10 * grad.square().sum((1, 2, 3)).mean()
    loss.backward()
    return loss.detach()


def evaluated(mode: Callable) -> Callable:
    """Evaluation between the steps."""

    def step(model, x, target):
        with mode():
            model.eval()(x)
            model.train()
        return plain_step(model, x, target)

    return step


def kept_gradients(model, x, target):
    """zero_grad(set_to_none=False): the gradients' memory is used again."""
    before = [p.grad for p in model.parameters()]
    for grad in before:
        if grad is not None:
            grad.zero_()
    model.zero_grad(set_to_none=False)
    loss = plain_step(model, x, target)
    assert all(old is None or p.grad is old for p, old in zip(model.parameters(), before, strict=True))
    return loss


class KeepingGradients(torch.optim.SGD):
    """Leaves zeroing to the step."""

    def zero_grad(self, set_to_none=True):
        pass


# name -> what computes and differentiates the loss, and how far parameters may be apart after three steps
STEPS = {
    "clip_grad_norm_": (clipped(nn.utils.clip_grad_norm_), 1e-4),
    "clip_grad_norm_ one by one": (clipped(nn.utils.clip_grad_norm_, foreach=False), 1e-4),
    "clip_grad_norm_ foreach": (clipped(nn.utils.clip_grad_norm_, foreach=True), 1e-4),
    "clip_grad_norm_ largest": (clipped(nn.utils.clip_grad_norm_, norm_type=float("inf")), 1e-4),
    "clip_grad_value_": (clipped(nn.utils.clip_grad_value_), 1e-4),
    "clip_grad_value_ foreach": (clipped(nn.utils.clip_grad_value_, foreach=True), 1e-4),
    "accumulated": (accumulated, 1e-4),
    "autocast": (autocast, 1e-2),
    "checkpoint": (checkpointed(False), 1e-4),
    "reentrant checkpoint": (checkpointed(True), 1e-4),
    "functional_call": (functional, 1e-4),
    "gradient penalty": (penalized, 1e-4),
    "no_grad": (evaluated(torch.no_grad), 1e-4),
    "inference_mode": (evaluated(torch.inference_mode), 1e-4),
    "zero_grad(set_to_none=False)": (kept_gradients, 1e-4),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    step, atol = STEPS[name]
    plain, blocked = pair()
    make = KeepingGradients if step is kept_gradients else torch.optim.SGD
    optimizers = [make(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, blocked)]
    expected = train(plain, optimizers[0], 3, step)
    assert train(blocked, optimizers[1], 3, step) == pytest.approx(expected, rel=10 * atol)
    assert_alike(plain, blocked, optimizers[1], rtol=0, atol=atol)
    for (key, p), q in zip(plain.named_parameters(), blocked.parameters(), strict=True):
        assert q.grad.dtype is p.grad.dtype and isinstance(q.grad, tb.BlockedTensor) == (p.dim() == 4), key
        assert_same(q.grad, p.grad, rtol=0, atol=100 * atol * max(0.01, float(p.grad.abs().max())))
    for p, q in zip(plain.buffers(), blocked.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=10 * atol)


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["mean", "ema"])
def test_averaged_model(options):
    averages = []
    for model in pair():
        average, optimizer = AveragedModel(model, **options), sgd(model)
        for _ in range(3):
            train(model, optimizer, 1)
            average.update_parameters(model)
        averages.append(average.module)
    assert_alike(*averages)


@pytest.mark.parametrize("axis", ["examples", "models"])
def test_vmap(axis):
    """Gradients of each example, answers of several models."""
    answers = []
    x, target = next(batches(1))
    for model in pair():
        state = {name: p.detach() for name, p in model.eval().named_parameters()}

        def loss_of(state, x, target, model=model):
            return F.cross_entropy(functional_call(model, state, (x,)), target)

        if axis == "examples":
            grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(state, x[:, None], target[:, None])
            answers.append([grads[name].to_dense() for name in ("conv1.weight", "conv3.weight", "head.2.bias")])
        else:
            several = {name: torch.stack([t, 2 * t]) for name, t in state.items()}
            answers.append(torch.func.vmap(loss_of, in_dims=(0, None, None))(several, x, target).to_dense())
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-3, atol=1e-4)


# ---- Between processes


class Pictures(Dataset):
    """Eight pictures; `blocked` ones are blocked by the worker that loads them."""

    def __init__(self, blocked: bool) -> None:
        self.blocked = blocked

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.full((17, 3, 4), float(i))
        return x.to(tb.blocked) if self.blocked else x


def blocked_batch(pictures):
    return torch.stack(pictures).to(tb.blocked)


@pytest.mark.parametrize("blocked, collate", [(False, blocked_batch), (True, None)])
def test_workers_of_a_loader(blocked, collate):
    loader = DataLoader(Pictures(blocked), 4, num_workers=2, collate_fn=collate, timeout=60)
    found = list(loader)
    assert all(isinstance(x, tb.BlockedTensor) for x in found) or blocked  # PyTorch stacks those as it likes
    expected = torch.arange(8.0).view(2, 4, 1, 1, 1).expand(2, 4, 17, 3, 4)
    for x, right in zip(found, expected, strict=True):
        assert_same(x, right)


def add_one(x, queue):
    x.add_(1)
    queue.put(x * 2)
    queue.get()  # what was sent lives until it is received


def test_sharing_with_a_process():
    context = torch.multiprocessing.get_context("fork")
    there, x = context.SimpleQueue(), torch.arange(34.0).view(1, 17, 1, 2).to(tb.blocked).share_memory_()
    process = context.Process(target=add_one, args=(x, there), daemon=True)
    process.start()
    doubled = there.get()
    there.put(None)
    process.join(60)
    expected = torch.arange(34.0).view(1, 17, 1, 2) + 1
    assert process.exitcode == 0 and x.is_shared() and isinstance(doubled, tb.BlockedTensor)
    assert_same(x, expected)
    assert_same(doubled, 2 * expected)


def test_sharing_a_model_with_a_process():
    _, model = pair()
    model.share_memory()
    before = dense(model.conv2.weight.detach()).clone()
    process = torch.multiprocessing.get_context("fork").Process(target=one_step, args=(model,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0 and padding_is_zero(list(model.parameters()))
    assert not torch.equal(dense(model.conv2.weight.detach()), before)


def one_step(model):
    torch.set_num_threads(1)  # the pool of the parent's threads did not come along
    train(model, sgd(model), 1)


# ---- DistributedDataParallel

# name -> whether the parameters are blocked (else the images are), DistributedDataParallel's options
DDP = {
    "activations": (False, {}),
    "parameters": (True, {}),
    "bucket views": (True, {"gradient_as_bucket_view": True}),
    "static graph": (True, {"static_graph": True}),
    "unused parameters": (True, {"find_unused_parameters": True}),
}


def for_ddp(seed):
    """A model whose answers do not depend on how a batch is split: normalization keeps its first statistics."""
    torch.manual_seed(seed)
    model = Net()
    for name in ("bn1", "bn2", "bn3"):
        setattr(model, name, Frozen(getattr(model, name).num_features))
    return model


class Frozen(nn.BatchNorm2d):
    """Batch normalization that is in eval mode always."""

    def train(self, mode=True):
        return super().train(False)


def ddp_worker(rank, world, store, answers):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    with tb.fallback("allow"), tb.winograd("never"):
        found = {name: ddp_losses(rank, world, *case) for name, case in DDP.items()}
    if rank == 0:
        torch.save(found, answers)
    dist.destroy_process_group()


def ddp_losses(rank, world, blocked, options):
    """Losses of the joined batches; the fallbacks; whether all ranks hold the same parameters."""
    model = for_ddp(seed=rank).train()  # rank 0's weights are sent to all
    ddp = DistributedDataParallel(model.to(tb.blocked) if blocked else model, **options)
    optimizer, losses = sgd(ddp), []
    with tb.count() as counts:
        for x, target in batches(5):
            x, target = x[rank::world], target[rank::world]
            optimizer.zero_grad()
            loss = plain_step(ddp, x if blocked else x.to(tb.blocked), target)
            optimizer.step()
            dist.all_reduce(loss)
            losses.append(float(loss) / world)
    flat = torch.cat([dense(p.detach()).flatten() for p in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(every, flat)
    assert padding_is_zero(list(model.parameters()))
    return losses, dict(counts.fallbacks), all(torch.equal(flat, other) for other in every)


@pytest.fixture(scope="module")
def ddp_answers(tmp_path_factory):
    """What two processes found, by the names of `DDP`."""
    folder = tmp_path_factory.mktemp("ddp")
    context = torch.multiprocessing.spawn(
        ddp_worker, (2, folder / "store", folder / "answers"), nprocs=2, join=False, daemon=True
    )
    try:
        deadline = time.monotonic() + 240
        while not context.join(timeout=5):  # True when all have ended
            assert time.monotonic() < deadline, "the processes did not end in time"
    finally:
        for process in context.processes:
            process.kill()
    return torch.load(folder / "answers")


@pytest.mark.parametrize("name", DDP)
def test_ddp_is_training_on_the_joined_batch(ddp_answers, name):
    losses, fallbacks, same = ddp_answers[name]
    model = for_ddp(seed=0).train()
    assert losses == pytest.approx(train(model, sgd(model), 5), rel=1e-4)
    assert same and not fallbacks


@contextlib.contextmanager
def one_process(folder):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_ddp_of_a_model_that_has_gradients(tmp_path):
    """They are made plain when the model is wrapped, and what comes is added to them."""
    models = pair()
    with one_process(tmp_path):
        for model in models:
            batch = next(batches(1))
            plain_step(model, *batch)
            plain_step(DistributedDataParallel(model), *batch)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert type(q.grad) is torch.Tensor
        assert_same(q.grad, p.grad, rtol=1e-3, atol=1e-4)


def test_a_model_in_ddp_is_not_converted(tmp_path):
    """DistributedDataParallel holds its parameters: it would not notice that they are others."""
    with one_process(tmp_path):
        ddp = DistributedDataParallel(pair()[0])
        with pytest.raises(RuntimeError, match="swap"):
            ddp.to(tb.blocked)
