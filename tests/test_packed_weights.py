"""Weights as loops read them, kept between calls: made once, dropped by every write, bounded."""

from __future__ import annotations

import gc
import io
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import VECTORS, assert_same
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked import _python, library

# What keeps packed weights, each of 64 channels.
MODELS = {
    "Winograd": lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(64, 64, 3, stride=2, bias=False),
    "transposed, one phase": lambda: nn.ConvTranspose2d(64, 64, 3, dilation=2, bias=False),
    "transposed, Winograd": lambda: nn.ConvTranspose2d(64, 64, 3, padding=1, bias=False),
    "transposed, 3-D": lambda: nn.ConvTranspose3d(64, 64, (1, 3, 2), stride=(1, 2, 2), bias=False),
}


class Layer(NamedTuple):
    """A module whose weights are not packed yet, its blocked input, and the same module plain."""

    model: nn.Module
    x: Tensor
    plain: nn.Module

    def answer(self) -> Tensor:
        return self.model(self.x).detach().to_dense()

    def is_right(self) -> bool:
        with torch.no_grad():
            self.plain.weight.copy_(self.model.weight.to_dense())
            expected = self.plain(self.x.to_dense().double())
        return bool((self.answer() - expected).abs().max() < 6e-5 * expected.pow(2).mean().sqrt())


@pytest.fixture(params=MODELS)
def layer(request):
    tb.empty_cache()
    make = MODELS[request.param]
    model, plain = make().to(tb.blocked), make().double()
    with tb.winograd("f4"):
        yield Layer(model, torch.randn(1, 64, *[10] * (model.weight.dim() - 2)).to(tb.blocked), plain)


def another(weight):
    return torch.randn(weight.shape)


WRITES = {
    "in place": lambda m: m.weight.mul_(2),
    "copy_": lambda m: m.weight.copy_(another(m.weight)),
    "through .data": lambda m: m.weight.data.add_(1),
    "through a part of .data": lambda m: m.weight.data.narrow(0, 0, 16).zero_(),
    "through a detached view": lambda m: m.weight.detach().narrow(1, 16, 16).zero_(),
    "through a view's view": lambda m: m.weight.narrow(0, 0, 32).narrow(0, 0, 16).zero_(),
    "an element": lambda m: m.weight[3, 4].fill_(100.0),
    "a new .data": lambda m: setattr(m.weight, "data", another(m.weight).to(m.weight.format)),
    "the physical tensor": lambda m: m.weight.physical.mul_(2),
    "initialised": lambda m: torch.nn.init.uniform_(m.weight),
    "a checkpoint": lambda m: m.load_state_dict({"weight": another(m.weight)}),
    "a step": lambda m: (setattr(m.weight, "grad", torch.ones_like(m.weight)), torch.optim.SGD([m.weight], 1.0).step()),
    "a fused step": lambda m: (
        setattr(m.weight, "grad", torch.ones_like(m.weight)),
        torch.optim.SGD([m.weight], 1.0, fused=True).step(),
    ),
    "a fused list": lambda m: torch._foreach_mul_([m.weight], 3.0),
    "in inference mode": lambda m: torch.inference_mode()(m.weight.mul_)(2),
    "fallback": lambda m: m.weight.erfinv_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_drops_the_packed_weights(layer, write):
    with torch.no_grad():
        assert layer.is_right()
        assert library.packed_weights_bytes() > 0
        before = layer.answer()
        write(layer.model)
        assert not torch.equal(layer.answer(), before)
        assert layer.is_right()


def test_weights_in_shared_memory_are_not_kept(layer):
    """Another process counts its own writes."""
    physical = layer.model.share_memory().weight.physical
    elsewhere = torch.UntypedStorage._new_shared_fd_cpu(*physical.untyped_storage()._share_fd_cpu_())
    with torch.no_grad():
        assert layer.is_right() and library.packed_weights_bytes() == 0
        torch.empty(0).set_(elsewhere).mul_(2)
        assert layer.is_right()


def test_a_view_of_the_weights_sees_writes_to_them(layer):
    model, x, _ = layer
    part = nn.Parameter(model.weight.narrow(0, 0, 32), requires_grad=False)
    half = x if isinstance(model, nn.Conv2d) else x.narrow(1, 0, 32)
    with torch.no_grad():
        whole, model.weight = model.weight, part
        before = model(half).to_dense()
        whole.mul_(2)
        torch.testing.assert_close(model(half).to_dense(), before * 2)


def test_weights_are_packed_once(layer):
    with torch.no_grad(), tb.count() as counts:
        layer.answer()
        held, reorders = library.packed_weights_bytes(), counts.reorders.total()
        for _ in range(3):
            layer.answer()
    assert library.packed_weights_bytes() == held >= layer.model.weight.numel() * 4
    assert counts.reorders.total() == reorders + 3  # to_dense


@pytest.mark.parametrize("to", [lambda model: model, lambda model: model.to(tb.blocked)], ids=["plain", "blocked"])
def test_compiled_models_pack_weights_once(to, graphs):
    model, x = MODELS["transposed"](), torch.randn(1, 64, 8, 8)
    expected = model(x).detach()
    torch._dynamo.reset()
    compiled = torch.compile(to(model), backend="torch_blocked")
    with torch.inference_mode():
        for _ in range(2):
            compiled(x)
        before = _python.weight_reorders()
        assert_same(compiled(x), expected, rtol=1e-4, atol=1e-4)
        assert _python.weight_reorders() == before
        model.weight.mul_(2)
        assert_same(compiled(x), expected * 2, rtol=1e-4, atol=1e-4)
        assert _python.weight_reorders() > before


def test_packed_weights_go_with_the_tensor(layer):
    with torch.no_grad():
        layer.answer()
    layer.model.weight = None
    gc.collect()
    assert library.packed_weights_bytes() == 0


def test_packed_weights_are_not_saved(layer):
    before, after = io.BytesIO(), io.BytesIO()
    torch.save(layer.model.state_dict(), before)
    with torch.no_grad():
        layer.answer()
    torch.save(layer.model.state_dict(), after)
    assert len(after.getvalue()) == len(before.getvalue())


def test_weights_made_in_inference_mode_are_never_kept(layer):
    model, x, _ = layer
    with torch.inference_mode():
        model.weight = nn.Parameter(another(model.weight).to(model.weight.format), requires_grad=False)
        before = model(x).to_dense()
        model.weight.mul_(2)
        torch.testing.assert_close(model(x).to_dense(), before * 2)
    assert library.packed_weights_bytes() == 0


def test_plain_weights_are_never_kept(layer):
    model, x, _ = layer
    model.weight = nn.Parameter(another(model.weight), requires_grad=False)
    before = model(x).to_dense()
    model.weight.data.mul_(2)
    torch.testing.assert_close(model(x).to_dense(), before * 2)
    assert library.packed_weights_bytes() == 0


def test_without_room_weights_are_packed_on_every_call(layer):
    with torch.no_grad(), tb.winograd("auto", max_bytes=0), tb.count() as counts:
        for _ in range(2):
            assert layer.is_right()
    assert library.packed_weights_bytes() == 0
    packed = counts.reorders.total() - counts.left
    assert packed == (0 if isinstance(layer.model, nn.Conv2d) else 2)


@pytest.mark.parametrize("make", [MODELS["transposed"], lambda: nn.Conv2d(64, 64, 3, stride=2, bias=False)])
def test_training_keeps_none(make):
    """Weights that change after every call are not kept but the first time, which does not tell yet."""
    tb.empty_cache()
    model, x = make().to(tb.blocked), torch.randn(1, 64, 12, 12).to(tb.blocked).requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        plain = make()
        plain.load_state_dict({"weight": model.weight.detach().to_dense()})
        x.grad = None
        y, expected = model(x), plain(x.detach().to_dense().requires_grad_())
        assert_same(y.detach(), expected.detach(), rtol=1e-4, atol=1e-4)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:
            assert library.packed_weights_bytes() == 0


def test_weights_in_a_format_of_others_are_reordered_once():
    x, w = torch.randn(1, 64, 8, 8).to(tb.blocked), torch.randn(64, 64, 1, 1).to(tb.OIhw4i16o4i)
    with tb.count() as counts:
        before = [F.conv2d(x, w) for _ in range(3)][-1].to_dense()
    assert counts.reorders.total() == 1 + 1  # to_dense
    w.mul_(2)
    torch.testing.assert_close(F.conv2d(x, w).to_dense(), before * 2)


def test_one_tensor_serves_several_transposed_convolutions():
    """The taps of a phase depend on the stride: none takes what another has packed."""
    w, x = torch.randn(32, 32, 4), torch.randn(1, 32, 9)
    wei, src = w.to(tb.format("OIw16i16o")), x.to(tb.blocked)
    for _ in range(2):
        for stride in (2, 3, 4, 1):
            for dilation in (1, 2):
                window = {"stride": stride, "dilation": dilation}
                expected = F.conv_transpose1d(x, w, **window)
                assert_same(F.conv_transpose1d(src, wei, **window), expected, rtol=1e-4, atol=1e-4)


def test_one_physical_tensor_of_several_sizes():
    """As many input channels as are said to be in its block: they are laid out differently."""
    block = library.isa_block()
    x, w = torch.ones(1, 1, 4, 4, block), torch.ones(1, 1, 1, 1, block, block)
    for channels in (3, block - 1, 3, block):
        y = library.convolution_op(
            x, (1, block), w, (block, channels, 1, 1), (1, block, 0, block), None, [1, 1], [0, 0], [1, 1], 1, block
        )
        assert y.eq(channels).all()


@pytest.mark.skipif(VECTORS != "avx512", reason="two blocks have kernels on AVX-512 only")
def test_kept_weights_serve_each_block():
    model = torch.nn.Conv2d(32, 32, 3, bias=False).to(tb.blocked)
    x = torch.randn(1, 32, 12, 12)
    expected = F.conv2d(x, model.weight.detach().to_dense())
    with tb.winograd("f4"), torch.no_grad():
        for fmt in (tb.nChw16c, tb.nChw8c, tb.nChw16c):
            torch.testing.assert_close(model(x.to(fmt)).to_dense(), expected, rtol=1e-3, atol=1e-3)


def test_one_tensor_read_as_of_two_formats():
    """Its packed weights are those of the format that it is given in."""
    x, weight = torch.randn(1, 8, 14, 14, 8), torch.randn(8, 8, 3, 3, 8, 8)

    def run(weight, blocking):
        return library.convolution_op(x, [1, 8], weight, [64, 64, 3, 3], blocking, None, *[[1, 1]] * 3, 1, 8)

    for mode in ("f2", "f4"):
        with tb.winograd(mode):
            for blocking in ([1, 8, 0, 8], [0, 8, 1, 8]):
                assert torch.equal(run(weight, blocking), run(weight.clone(), blocking))
