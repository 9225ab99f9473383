"""Blocked tensors and models between processes: shared, loaded by workers, in DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import assert_same, dense, padding_is_zero
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from training_cases import Net, batches, pair, plain_step, sgd, train

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("one_thread")


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
        every = [None] * world
        dist.all_gather_object(every, collectives(rank))
        found["collectives"] = every
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
    """What two processes found, by the names of `DDP`, and "collectives": what each of them found."""
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


# ---- Collectives


def numbers(k):
    """Small integers, so that sums are exact."""
    return k * torch.arange(306.0).view(2, 17, 3, 3)


# name -> how many outputs, which are inputs too where it is in place, and the call by a rank; `send` makes an input.
COLLECTIVES = {
    "all_reduce": (1, lambda y, rank, send: dist.all_reduce(*y)),
    "all_reduce, later": (1, lambda y, rank, send: dist.all_reduce(*y, async_op=True).wait()),
    "all_reduce_coalesced": (2, lambda y, rank, send: dist.all_reduce_coalesced(y)),
    "functional": (1, lambda y, rank, send: functional_sum(*y)),
    "broadcast": (1, lambda y, rank, send: dist.broadcast(*y, 1)),
    "reduce": (1, lambda y, rank, send: dist.reduce(*y, 0)),
    "scatter": (1, lambda y, rank, send: dist.scatter(*y, [send(5), send(6)] if rank == 0 else None, 0)),
    "gather": (2, lambda y, rank, send: dist.gather(send(rank + 5), y if rank == 0 else None, 0)),
    "all_gather": (2, lambda y, rank, send: dist.all_gather(y, send(rank + 5))),
    "reduce_scatter": (1, lambda y, rank, send: dist.reduce_scatter(*y, [send(rank + 5), send(2 * rank + 7)])),
    "all_to_all": (2, lambda y, rank, send: dist.all_to_all(y, [send(rank + 5), send(rank + 7)])),
    "all_to_all_single": (1, lambda y, rank, send: dist.all_to_all_single(*y, send(rank + 5))),
}
# name -> whether inputs and outputs are blocked
BLOCKED = {"both": (True, True), "inputs": (True, False), "outputs": (False, True)}
# Errors: the dispatcher does not look for tensors in lists of lists. What is in those is plain, or all is blocked.
NESTED = {("scatter", "inputs"), ("reduce_scatter", "inputs"), ("gather", "outputs"), ("all_gather", "outputs")}
MIXTURES = [(name, which) for name in COLLECTIVES for which in BLOCKED if (name, which) not in NESTED]


def functional_sum(x):
    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_reduce_(x, "sum", dist.group.WORLD.group_name))


def collectives(rank):
    """What a rank finds: of each of `MIXTURES` whether the answers are those of plain tensors."""
    into = tb.nChw8c if rank == 0 else tb.nChw16c
    found = {}
    for name, which in MIXTURES:
        plain, blocked = after(name, rank, lambda x: x, lambda x: x), BLOCKED[which]
        made = after(name, rank, *((lambda x: x.to(into)) if b else (lambda x: x) for b in blocked))
        same = all(torch.equal(dense(y), right) for y, right in zip(made, plain, strict=True))
        kept = all(isinstance(y, tb.BlockedTensor) == blocked[1] for y in made) and padding_is_zero(made)
        found[name, which] = same and kept
    x = numbers(rank + 1).to(into)
    return found | {"weights": sent_weights(rank), "refused": refused(x), "arrived": sent_picture(rank, x)}


def after(name, rank, to_input, to_output):
    """The outputs of a collective."""
    count, call = COLLECTIVES[name]
    outputs = [to_output(numbers(rank + 1 + i)) for i in range(count)]
    call(outputs, rank, lambda k: to_input(numbers(k)))
    return outputs


def sent_weights(rank):
    """The parameters of a blocked layer, after rank 0's were sent to all by way of `.data`."""
    torch.manual_seed(rank)
    layer = nn.Conv2d(17, 17, 3).to(tb.blocked)
    for p in layer.parameters():
        dist.broadcast(p.data, 0)
    assert padding_is_zero(list(layer.parameters()))
    return [dense(p.detach()) for p in layer.parameters()]


def refused(x):
    """What receiving into a blocked tensor says; nothing is sent."""
    source, group = 1 - dist.get_rank(), dist.group.WORLD.group_name
    with pytest.raises(RuntimeError) as error:
        dist.recv(x, source)
    with pytest.raises(RuntimeError, match="receive into a plain one"):
        torch.ops._c10d_functional.irecv(x, source, 0, group)
    return str(error.value)


def sent_picture(rank, x):
    """What rank 1 gets of rank 0's blocked `x`."""
    if rank == 0:
        return dist.send(x, 1)
    plain = torch.empty(x.shape)
    dist.recv(plain, 0)
    return dense(x.copy_(plain))


@pytest.mark.parametrize("name, which", MIXTURES)
def test_collectives(ddp_answers, name, which):
    """Blocked tensors, of another format in each process, get what plain ones get."""
    assert [found[name, which] for found in ddp_answers["collectives"]] == [True, True]


def test_broadcast_of_weights(ddp_answers):
    torch.manual_seed(0)
    expected = [p.detach() for p in nn.Conv2d(17, 17, 3).parameters()]
    for found in ddp_answers["collectives"]:
        assert all(torch.equal(p, right) for p, right in zip(found["weights"], expected, strict=True))


def test_receiving(ddp_answers):
    """A blocked tensor can be sent; what arrives is received into a plain one."""
    for found in ddp_answers["collectives"]:
        assert "receive into a plain one, y.copy_(it)" in found["refused"] and "\n" not in found["refused"]
    assert torch.equal(ddp_answers["collectives"][1]["arrived"], numbers(1))


# ---- One process


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


COPIES = {
    "deep copy": copy.deepcopy,
    "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp)),
    "copy of a copy": lambda ddp: copy.deepcopy(pickle.loads(pickle.dumps(ddp))),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_ddp(how, tmp_path):
    """They train as what they are copies of, which goes on by itself."""
    with one_process(tmp_path):
        ddp = [DistributedDataParallel(model) for model in pair()]
        for p, q in zip(*trained_parameters([COPIES[how](d) for d in ddp]), strict=True):
            assert type(q.grad) is torch.Tensor
            assert_same(q.grad, p.grad, rtol=1e-3, atol=1e-4)
        assert all(p.grad is None for d in ddp for p in d.parameters())
        assert all(type(q.grad) is torch.Tensor for q in trained_parameters(ddp)[1])


def trained_parameters(models):
    """The parameters of each, after a backward pass."""
    for model in models:
        plain_step(model, *next(batches(1)))
    return [list(model.parameters()) for model in models]


def test_ddp_of_one_model_twice(tmp_path):
    """Its parameters get one hook."""
    _, model = pair()
    with one_process(tmp_path):
        for _ in range(2):
            plain_step(DistributedDataParallel(model), *next(batches(1)))
    assert len(model.conv2.weight._backward_hooks) == 1


def test_pickles_of_plain_models_in_ddp_do_not_need_us(tmp_path):
    with one_process(tmp_path):
        assert b"torch_blocked" not in pickle.dumps(DistributedDataParallel(nn.Linear(2, 2)))


def test_a_model_in_ddp_is_not_converted(tmp_path):
    """DistributedDataParallel holds its parameters: it would not notice that they are others."""
    with one_process(tmp_path):
        ddp = DistributedDataParallel(pair()[0])
        with pytest.raises(RuntimeError, match="swap"):
            ddp.to(tb.blocked)
