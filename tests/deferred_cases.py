"""What the tests of convolutions that wait for their post-ops share."""

import io

import torch
from conftest import assert_same
from torch import nn

import torch_blocked as tb


def waits(x):
    """Whether the bytes of a blocked tensor are still to come."""
    return "_physical" not in vars(x)


def image(channels=20, n=2, size=(7, 6), dtype=torch.float32):
    return torch.randn(n, channels, *size).to(dtype).to(tb.blocked)


def conv(ic=20, oc=20, kernel=3, dtype=torch.float32, **kwargs):
    """A convolution that keeps the size."""
    return nn.Conv2d(ic, oc, kernel, padding=kernel // 2, **kwargs).to(dtype).to(tb.blocked)


def norm(channels=20):
    """A batch normalization by running statistics, all of its vectors drawn."""
    layer = nn.BatchNorm2d(channels).eval()
    for vector in (layer.weight, layer.bias, layer.running_mean):
        nn.init.normal_(vector)
    nn.init.uniform_(layer.running_var, 0.5, 2)
    return layer


def runs(call):
    """How often `call` runs the operator."""
    with torch.profiler.profile() as profile:
        call()
    return sum(event.name == "torch_blocked::convolution" for event in profile.events())


def alike(y, expected):
    """Whether two answers are the same in all that users see, once looked at."""
    assert type(y) is type(expected) is tb.BlockedTensor
    assert_same(y, expected.to_dense(), rtol=1e-5, atol=1e-5)
    assert y.memory_desc == expected.memory_desc and y.is_inference() == expected.is_inference()
    assert y.is_inference() or y._version == expected._version == y.physical._version
    assert vars(y).keys() - {"_storage"} == vars(expected).keys() - {"_storage"}
    keys = torch._C._dispatch_keys
    assert keys(y) == keys(expected) and keys(y.physical) == keys(expected.physical)


def saved(y):
    """A file with `y` in it."""
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    return file
