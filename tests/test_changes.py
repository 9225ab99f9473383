"""What tells that parameters and modules changed."""

import copy
import gc
import sys
import weakref

import pytest
import torch
from torch import nn

import torch_blocked as tb
from torch_blocked._python import Contents, ModuleVersions, Watch
from torch_blocked.benchmark.measure import num_threads

counted = pytest.mark.skipif(sys.version_info >= (3, 12), reason="this CPython counts no changes of dicts")


def model():
    m = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    m[1].table = torch.zeros(3)
    return m


class OtherConv(nn.Conv2d):
    pass


CHANGES = {
    "attribute": lambda m: setattr(m[0], "stride", (2, 2)),
    "attribute, equal": lambda m: setattr(m[0], "stride", tuple([*m[0].stride])),
    "new attribute": lambda m: setattr(m, "new", 1),
    "no attribute": lambda m: delattr(m[0], "stride"),
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "parameter to None": lambda m: setattr(m[0], "bias", None),
    "buffer": lambda m: setattr(m[1][0], "running_mean", torch.zeros(3)),
    "new buffer": lambda m: m[0].register_buffer("mask", torch.ones(1)),
    "module": lambda m: setattr(m[1], "1", nn.ReLU()),
    "new module": lambda m: m.append(nn.ReLU()),
    "forward": lambda m: setattr(m[1][1], "forward", lambda x: x),
    "training": lambda m: m.train(not m.training),
    "class": lambda m: setattr(m[0], "__class__", OtherConv),
    "__dict__": lambda m: setattr(m[0], "__dict__", dict(vars(m[0]))),
    "dict of parameters": lambda m: setattr(m[0], "_parameters", dict(m[0]._parameters)),
    "data of another size": lambda m: setattr(m[0].weight, "data", torch.ones(3, 2, 3, 3)),
    "data of other strides": lambda m: setattr(m[0].weight, "data", torch.ones(2, 3, 1, 1).transpose(0, 1)),
    "dtype": lambda m: m.double(),
    "requires_grad": lambda m: m[0].weight.requires_grad_(False),
    "attribute of a parameter": lambda m: setattr(m[0].weight, "note", 1),
    "resized buffer": lambda m: m[1][0].running_mean.resize_(2),
    "tensor attribute": lambda m: m[1].table.resize_(2),
    "swapped": lambda m: torch.utils.swap_tensors(m[0].bias, nn.Parameter(torch.ones(3))),
    "cleared": lambda m: m[0]._parameters.clear(),
}


@counted
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change):
    m = model()
    versions = ModuleVersions(list(m.modules()))
    assert versions.hold(m) and versions.hold(m) and versions.alive()
    m(torch.randn(1, 2, 3, 3))
    with torch.no_grad():
        m.eval()[0].weight.add_(1)
    versions = ModuleVersions(list(m.modules()))
    assert versions.hold(m)
    CHANGES[change](m)
    assert not versions.hold(m) and versions.alive()
    assert ModuleVersions(list(m.modules())).hold(m)


@counted
@pytest.mark.parametrize("threads", (1, 2, 3))
def test_a_change_anywhere_in_a_large_model_is_seen(threads):
    m = nn.Sequential(*[nn.Linear(1, 1) for _ in range(150)])
    weights = [layer.weight for layer in m]
    with num_threads(threads), torch.no_grad():
        for i in (0, 1, 31, 32, 49, 74, 75, 100, 148, 149):
            versions, contents = ModuleVersions(list(m.modules())), Contents(weights)
            assert versions.hold_with(m, contents) == (True, True)
            weights[i].add_(1)
            assert versions.hold_with(m, contents) == (True, False)
            m[i].in_features = 2
            assert versions.hold_with(m, contents) == (False, False)


@counted
def test_the_same_object_is_no_change():
    m = model()
    versions = ModuleVersions(list(m.modules()))
    m[1][1].inplace, m[0].weight, m[0].bias.grad = False, m[0].weight, torch.ones(3)
    m[0].weight.data = m[0].weight.data * 2
    m.train().requires_grad_(True)
    assert versions.hold(m)


@counted
def test_only_of_the_first_module():
    m = model()
    versions = ModuleVersions(list(m.modules()))
    for other in (m[0], copy.deepcopy(m), None, 3, "m"):
        assert not versions.hold(other)
    assert not ModuleVersions([]).hold(m) and not ModuleVersions([]).alive()


@pytest.mark.slow
@counted
def test_models_that_are_gone_are_not_kept_nor_taken_for_others():
    """New modules lie where the old ones lay."""
    for _ in range(10):
        m = model()
        versions, gone = ModuleVersions(list(m.modules())), weakref.ref(m[1][0])
        assert versions.hold(m)
        del m
        gc.collect()
        assert gone() is None and not versions.alive()
        assert not any(versions.hold(other) for other in [model() for _ in range(5)])


@counted
def test_part_that_is_gone():
    m = model()
    versions = ModuleVersions([m, m[0]])
    del m._modules["0"]
    gc.collect()
    assert not versions.hold(m) and versions.alive()


def test_arguments():
    for wrong in ([1], [object()], [None], [nn.Module], 3, None, [type("Plain", (), {})()]):
        with pytest.raises(TypeError):
            ModuleVersions(wrong)
    other = nn.Module()
    other.__dict__["_buffers"] = [1]
    with pytest.raises(TypeError, match="a module without dicts"):
        ModuleVersions([other])
    del other.__dict__["_buffers"]
    with pytest.raises(TypeError, match="a module without dicts"):
        ModuleVersions([other])


def test_watch_of_lists_of_any_length():
    watch, tensors = Watch(), [torch.zeros(2) for _ in range(3)]
    numbers = [watch.number(tensors[:n]) for n in (0, 1, 3, 2, 1, 3)]
    assert numbers == [0, 1, 2, 3, 1, 2]
    tensors[0].add_(1)
    assert watch.number(tensors) == 4 and [watch.holds(n) for n in range(5)] == [True, False, False, False, True]
    for wrong in ([1], [tensors[0], None], 3):
        with pytest.raises(TypeError):
            watch.number(wrong)


def test_watch_of_tensors_without_memory_of_their_own():
    watch = Watch()
    for wrong in (torch.sparse_coo_tensor(size=(2, 2)), torch.randn(1, 16, 2, 2).to(tb.blocked)):
        with pytest.raises(RuntimeError):
            watch.number([wrong])
    assert watch.number([torch.empty(3, device="meta")]) == 0


def test_watch_of_tensors_that_are_gone():
    """New ones lie where the old ones lay."""
    watch, numbers = Watch(), set()
    for _ in range(50):
        tensors = [torch.zeros(100) for _ in range(3)]
        numbers.add(watch.number(tensors))
        assert watch.number(tensors) in numbers
        del tensors
    assert len(numbers) == 50


def test_watch_of_inference_tensors():
    """Nothing tells that they were written to."""
    with torch.inference_mode():
        watch, tensors = Watch(), [torch.zeros(2)]
    assert watch.number(tensors) != watch.number(tensors)


@counted
def test_tensors_among_the_attributes_of_a_tensor():
    """Such as a blocked one's physical; a tensor may also be an attribute of itself."""
    m = model()
    m[0].weight.inner = torch.ones(3)
    m[0].weight.own = m[0].weight
    versions = ModuleVersions(list(m.modules()))
    assert versions.hold(m)
    m[0].weight.inner.resize_(2)
    assert not versions.hold(m)


@counted
def test_contents():
    m = model()
    versions, contents = ModuleVersions(list(m.modules())), Contents([m[0].weight, m[0].bias])
    assert versions.hold_with(m, contents) == (True, True) and versions.hold_with(m, None) == (True, False)
    with torch.no_grad():
        m[0].bias.add_(1)
    assert versions.hold_with(m, contents) == (True, False)
    m[0].bias = None
    assert versions.hold_with(m, contents) == (False, False)
    with pytest.raises(TypeError, match="not a tensor"):
        Contents([m[0].weight, None])
