"""`tb.export`: the program is fused, takes and gives what the model does, and runs as a package."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from backend_cases import network
from torch import nn
from torch.testing import assert_close

import torch_blocked as tb

ops = torch.ops.torch_blocked


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20)
        self.second, self.up = nn.Conv2d(20, 20, 3, padding=1), nn.ConvTranspose2d(20, 8, 2, stride=2)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x, *, scale=None):
        y = torch.relu(self.norm(self.first(x)))
        y = nn.functional.silu(self.second(y) + y)
        up = self.up(y)
        return {"up": up if scale is None else up * scale, "mean": y.mean((2, 3))}


class Concatenating(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, 16, k, padding=k // 2) for k in (1, 3, 5))

    def forward(self, x):
        return torch.cat([torch.relu(branch(x)) for branch in self.branches], 1).amax((2, 3))


BATCH = {0: torch.export.Dim("batch", min=1, max=9)}


def called(program: torch.export.ExportedProgram) -> Counter:
    return Counter(node.target for node in program.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_program_is_fused_and_gives_the_answer(blocked, dynamic):
    model, images = Residual().eval(), [torch.randn(n, 3, 9, 7) for n in ((2, 5) if dynamic else (2,))]
    with torch.no_grad():
        expected = [model(x) for x in images]
    if blocked:
        model.to(tb.blocked)
    before = copy.deepcopy(model.state_dict())
    program = tb.export(model, (images[0],), dynamic_shapes={"x": BATCH} if dynamic else None)
    counts = called(program)
    assert counts[ops.convolution.default] == 2 and counts[ops.convolution_transpose.default] == 1
    names = " ".join(map(str, counts))
    assert not any(name in names for name in ("batch_norm", "relu", "sigmoid", "rsqrt", "add", "conv2d", "reorder"))
    assert_close([program.module()(x) for x in images], expected)
    after = model.state_dict()
    assert all(type(after[name]) is type(x) and torch.equal(after[name], x) for name, x in before.items())
    assert not model._forward_hooks


class Scaled(nn.Module):
    """With an operand of fewer axes, whose first size is one that the batch may have."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 7, 3), nn.Parameter(torch.randn(7, 1, 1))

    def forward(self, x):
        return torch.relu(self.conv(x) * self.scale) + self.scale


def test_sizes_of_other_ranks_are_no_constraints():
    model, x = Scaled().eval(), torch.randn(2, 3, 9, 8)
    program = tb.export(model, (x,), dynamic_shapes={"x": BATCH})
    for n in (2, 7):
        x = torch.randn(n, 3, 9, 8)
        assert_close(program.module()(x), model(x))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 17, 3)

    def forward(self, x):
        return self.conv(torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (x,)))


def test_branches():
    model, x = Branching().eval(), torch.randn(2, 3, 9, 8)
    program = tb.export(model, (x,))
    for src in (x.abs(), -x.abs()):
        assert_close(program.module()(src), model(src))


def test_keyword_arguments():
    model, x, scale = Residual().eval(), torch.randn(1, 3, 8, 8), torch.randn(8, 1, 1)
    program = tb.export(model, (x,), {"scale": scale})
    assert_close(program.module()(x, scale=scale), model(x, scale=scale))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 16, 3)

    def forward(self, x, *xs):
        return self.c(x) + self.c(xs[0]) + self.c(xs[1])


@pytest.mark.parametrize("by_name", [False, True])
def test_dynamic_sizes_of_several_arguments(by_name):
    model, examples = Several().eval(), [torch.randn(2, 3, 8, 8) for _ in range(3)]
    shapes = {"x": BATCH, "xs": (BATCH, BATCH)}
    program = tb.export(model, tuple(examples), dynamic_shapes=shapes if by_name else tuple(shapes.values()))
    images = [torch.randn(5, 3, 8, 8) for _ in range(3)]
    assert_close(program.module()(*images), model(*images))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("blocked", [False, True])
def test_linear_layers_of_permuted_images_are_convolutions(blocked, inside):
    model, images = network(19, inside=inside), [torch.randn(n, 3, 9, 7) for n in (2, 5)]
    model.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(19, 5)))
    with torch.no_grad():
        expected = [model(x) for x in images]
    linears = {type(m) for m in model.modules()}
    program = tb.export(model.to(tb.blocked) if blocked else model, (images[0],), dynamic_shapes=({0: BATCH[0]},))
    counts = called(program)
    assert counts[ops.convolution.default] == 7 and counts[ops.layer_norm_channels.default] == 2
    assert not {"aten.mul.Tensor", "aten.add.Tensor", "aten.erf.default", "aten.mm.default"} & {*map(str, counts)}
    assert_close([program.module()(x) for x in images], expected)
    assert {type(m) for m in model.modules()} == linears
    assert all(node.users for node in program.graph.find_nodes(op="placeholder"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_concatenation_without_a_copy(dynamic):
    model, x = Concatenating().eval(), torch.randn(3, 3, 10, 6)
    program = tb.export(model, (x,), dynamic_shapes=({**BATCH, 2: torch.export.Dim.AUTO},) if dynamic else None)
    counts = called(program)
    assert counts[ops.convolution_out.default] == 3 and torch.ops.aten.cat.default not in counts
    for images in (x, torch.randn(7, 3, 12, 6)) if dynamic else (x,):
        assert_close(program.module()(images), model(images))


def test_without_inputs():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.seed, self.up = nn.Parameter(torch.randn(1, 20, 4, 4)), nn.ConvTranspose2d(20, 8, 2, stride=2)

        def forward(self):
            return torch.relu(self.up(self.seed))

    model = Generator().eval()
    assert_close(tb.export(model, ()).module()(), model())


class Converting(nn.Module):
    """Makes its tensors and its weight blocked, and the answer plain."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 17, 3, 3))

    def forward(self, x):
        y = nn.functional.conv2d(x.to(tb.blocked) + 1, self.weight.to(tb.OIhw16i16o))
        return y.contiguous(memory_format=tb.nChw8c).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("export", ["not strict", "strict", "tb.export"])
def test_formats_made_in_the_model(export):
    model, x = Converting().eval(), torch.randn(2, 17, 5, 6)
    if export == "tb.export":
        program = tb.export(model, (x,))
    else:
        program = torch.export.export(model, (x,), strict=export == "strict")
        assert ops.to_format.default in called(program)
        program = program.run_decompositions()
    assert ops.to_format.default not in called(program)
    assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsampled_answers_are_plain(mode):
    model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.Upsample(size=(11, 9), mode=mode)).eval()
    x = torch.randn(2, 3, 6, 5)
    assert_close(tb.export(model, (x,)).module()(x), model(x))


def test_saved_and_loaded(tmp_path):
    model, x = Residual().eval(), torch.randn(1, 3, 8, 8)
    torch.export.save(tb.export(model, (x,)), tmp_path / "program.pt2")
    assert_close(torch.export.load(tmp_path / "program.pt2").module()(x), model(x))


@pytest.mark.slow
def test_package(tmp_path):
    """Weights are packed once, in inference_mode too; a part of what is concatenated is written in place."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.wide = Concatenating(), nn.Conv2d(3, 64, 3, padding=1)
            self.last = nn.Conv2d(64, 64, 3, padding=1)

        def forward(self, x):
            return self.stem(x), self.last(torch.relu(self.wide(x)))

    model, x = Model().eval(), torch.randn(2, 3, 40, 40)
    program = tb.export(model, (x,), dynamic_shapes=(BATCH,))
    file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    package = torch._inductor.aoti_load_package(file)
    for images in (x, torch.randn(5, 3, 40, 40)):
        with torch.inference_mode():
            package(images)
            with tb.count() as counts:
                answer = package(images)
        assert not counts.reorders and not counts.fallbacks
        assert_close(answer, model(images))


def test_refused():
    model, x = Residual(), torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"training mode: call model.eval\(\)"):
        tb.export(model, (x,))
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module and got function"):
        tb.export(called, (x,))
    with pytest.raises(ValueError, match=r"plain example inputs and one is blocked"):
        tb.export(model.eval(), (x.to(tb.blocked),))

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.first(x) * self.calls

    with pytest.raises(ValueError, match=r"the model writes to calls: use torch\.export"):
        tb.export(Counting().eval(), (x,))
