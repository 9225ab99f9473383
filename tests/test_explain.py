"""`tb.explain`: what ran is what is told, faults are named, and the model is as it was."""

from __future__ import annotations

import copy
import json
import re
import sys
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from explain_cases import Fallback, Plain, Three, explained, network
from torch import nn

import torch_blocked as tb
from torch_blocked.benchmark.models import make_model
from torch_blocked.explain import algorithms, palette, passes
from torch_blocked.explain import report as reports
from torch_blocked.explain.record import Call, Reorder
from torch_blocked.reorder import to_dense

pytestmark = pytest.mark.usefixtures("two_passes")


# Part of a network -> the kind of finding, its modules, and what the verdict says of it.
FAULTS = {
    "fallback": (Fallback(), ["part.0"], r"cummax: it runs along the blocked axis"),
    "padding": (Three(), ["part.0.narrow", "part.0.widen"], r"3 channels in blocks of \d+, [\d.]+x as large"),
    "lost format": (Plain(), ["part.0"], r"a conversion makes it nchw: convolution in last brings it back"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named(kind, isa):
    part, modules, text = FAULTS[kind]
    report = explained(network(copy.deepcopy(part)))
    (finding,) = report.findings
    assert (finding.kind, finding.modules) == (kind, modules)
    assert finding.seconds > 0
    finding.share = 1.0
    verdict = " ".join(report.verdict.split())
    assert f"- {kind} in {', '.join(modules)} (" in verdict and re.search(text, verdict)


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_remedy_of_padding_fills_all_blocks(blocks):
    block = tb.blocked.resolve((1, 16, 8, 8)).blocking.block(1)
    model, x = nn.Conv2d(16, (blocks - 1) * block + 1, 3).to(tb.blocked), torch.randn(1, 16, 8, 8).to(tb.blocked)
    (finding,) = explained(model, x).findings
    assert (finding.kind, finding.remedy) == ("padding", f"{blocks * block} channels take no longer")


def test_all_faults_at_once():
    report = explained(network(*(copy.deepcopy(part) for part, *_ in FAULTS.values())))
    assert {f.kind for f in report.findings} == set(FAULTS)


def test_the_cost_of_a_fallback_has_the_reorder_back_in_it():
    report = explained(network(Fallback()))
    fallback = next(c for c in report.run.calls if c.fallback)
    (back,) = (r for c in report.run.calls for r in c.reorders if r.origin is not None)
    assert report.findings[0].seconds == fallback.seconds + back.seconds
    assert [r.dst for r in fallback.reorders] == ["nchw"] and back.src == "nchw"


def test_the_cost_of_a_conversion_has_the_python_around_it():
    def lost(x):
        return x.contiguous().to(tb.blocked).relu()

    report = explained(lost, torch.randn(1, 32, 4, 4).to(tb.blocked))
    away, back = (c for c in report.run.calls if c.operator == "reorder")
    assert report.findings[0].kind == "lost format"
    assert report.findings[0].seconds == away.seconds + back.seconds
    assert all(c.seconds > c.reorders[0].seconds for c in (away, back))


def test_nothing_to_mend():
    report = explained(network(nn.ReLU(), nn.BatchNorm2d(32)))
    assert report.findings == []
    assert report.verdict == "no reorders, no fallbacks: nothing to mend."


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calls_have_modules_formats_and_algorithms(how):
    model, x = network(nn.ReLU()), torch.randn(2, 3, 12, 12)
    with how():
        report = tb.explain(model, x)
    block = tb.blocked.resolve(x.shape).tag
    rows = [(c.module, c.operator, c.outputs[0].format) for c in report.run.calls if c.outputs and c.is_blocked]
    names = "conv2d" if how is torch.inference_mode else "convolution"
    assert [row for row in rows if row[1] != "detach"] == [
        ("first", names, block), ("part.0", "relu", block), ("last", names, block)
    ]  # fmt: skip
    first, last = (c for c in report.run.calls if c.is_convolution)
    assert (first.algorithm, last.algorithm) == ("first", "direct")
    assert last.why and last.outputs[0].size == (2, 32, 8, 8) and last.inputs[0].dtype == "float32"


# What `inference_mode` delivers whole: batched or not, transposed, with a padding by name.
WHOLE = {
    **{f"{name}{d}d": (f"{name}{d}d", d, {}) for name in ("Conv", "ConvTranspose") for d in (1, 2, 3)},
    **{f"same {d}d": (f"Conv{d}d", d, {"padding": "same"}) for d in (1, 2, 3)},
    "valid": ("Conv2d", 2, {"padding": "valid", "stride": 2}),
    "same, an odd number in all": ("Conv2d", 2, {"padding": "same", "kernel_size": 4, "dilation": (1, 2)}),
}


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (2,)])
@pytest.mark.parametrize("case", WHOLE)
def test_convolutions_have_their_algorithms_under_inference_mode(case, batch, blocked):
    name, d, window = WHOLE[case]
    model = getattr(nn, name)(16, 16, **{"kernel_size": 3, **window})
    model = model.to(tb.blocked) if blocked else model
    x, found = torch.randn(*batch, 16, *[9, 10, 11][:d]), []
    for how in (torch.no_grad, torch.inference_mode):
        with how():
            (call,) = (c for c in tb.explain(model, x).run.calls if c.is_convolution)
        found.append((call.algorithm, call.why, call.fallback))
    assert found[0][0] and found[0] == found[1]


def test_a_question_that_fails_does_not_end_the_report(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("as planned")

    monkeypatch.setattr(algorithms, "algorithm", fail)
    first, last = (c for c in explained(network()).run.calls if c.is_convolution)
    assert (first.algorithm, last.algorithm) == ("", "") and "as planned" in first.why


def test_reorders_are_those_that_are_counted():
    model = network(Fallback(), Plain())
    x = torch.randn(1, 3, 12, 12)
    with torch.no_grad(), tb.count() as counts:
        model(x)
    report = explained(model, x)
    found = [r for c in report.run.calls for r in c.reorders]
    assert len(found) == counts.reorders.total() and sum(r.nbytes for r in found) == counts.reorder_bytes
    assert sum(1 for c in report.run.calls if c.fallback) == counts.fallbacks.total()
    assert report.totals()["reorders"]["bytes"] == counts.reorder_bytes


def test_weights_that_are_packed_on_every_call():
    class Functional(nn.Module):
        def forward(self, x):
            return F.conv2d(x, torch.ones(32, 32, 1, 1))

    (finding,) = explained(network(Functional())).findings
    assert finding.kind == "weights" and finding.at_most and finding.modules == ["part.0"]


def test_no_figure_is_told_of_what_operators_do_within():
    report = explained(lambda x: F.conv2d(x, torch.ones(32, 32, 1, 1)), torch.ones(1, 32, 8, 8).to(tb.blocked))
    assert report.verdict.startswith("1 reorder within operators. To mend:")
    assert f"1 reorder: 1 within operators, {4 * 2 * 32 * 32} bytes read and written" in report.summary()
    report = explained(
        lambda x: F.conv2d(x + x.to_dense(), torch.ones(8, 8, 1, 1)), torch.ones(1, 8, 8, 8).to(tb.blocked)
    )
    assert re.match(r"2 reorders cost [\d.]+%; 1 reorder within operators. To mend:", report.verdict)
    assert any(re.match(r"3 reorders: 1 within operators, the others [\d.]+ ms, ", line) for line in report.summary())


def test_a_plain_input_and_a_plain_parameter():
    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = nn.Parameter(torch.ones(1, 32, 10, 10))

        def forward(self, x):
            return x + self.position

    model = network(Embedding())
    model.part[0].position.data = model.part[0].position.data.to_dense()
    (finding,) = explained(model).findings
    assert finding.kind == "reorder" and "part.0.position is plain" in finding.why
    (finding,) = explained(nn.Conv2d(32, 32, 1).to(tb.blocked), torch.randn(1, 32, 4, 4)).findings
    assert finding.kind == "reorder" and finding.remedy == "give it as x.to(tb.blocked)"


@pytest.mark.parametrize(
    "model, text",
    [
        (make_model("squeezenet1_1"), r"^No tensor is blocked. model.to\(tb.blocked\) makes its 26 convolutions"),
        (nn.Flatten(), "nothing to mend"),
    ],
)
def test_a_plain_model(model, text):
    report = explained(model.eval(), torch.randn(1, 3, 64, 64))
    assert re.search(text, report.verdict) and report.findings == []
    assert all(c.outputs[0].format == "nchw" for c in report.run.calls if c.is_convolution)


def test_a_function():
    x = torch.randn(1, 17, 4, 4).to(tb.blocked)
    report = explained(lambda x, power: (x**power).sum(), x, power=3)
    assert [c.operator for c in report.run.calls] == ["pow", "sum"] and {c.module for c in report.run.calls} == {""}


def test_a_keyword_argument_may_have_any_name():
    report = explained(lambda x, model, self, inputs: x * model, torch.ones(2), model=2, self=None, inputs=None)
    assert [c.operator for c in report.run.calls] == ["mul"]


def test_a_lazy_model():
    report = explained(nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d()), torch.ones(1, 3, 8, 8))
    assert "makes its 1 convolution " in report.verdict


def test_the_gradients_of_a_convolution_are_no_convolutions_of_the_model():
    model = nn.Conv2d(3, 8, 3)
    report = tb.explain(lambda x: model(x).sum().backward(), torch.ones(1, 3, 9, 9))
    assert {"convolution", "convolution_backward"} <= {c.operator for c in report.run.calls}
    assert "makes its 1 convolution " in report.verdict


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("blocked", [False, True])
def test_the_model_is_as_it_was(blocked, fails):
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen = self.seen + x.numel()
            if fails and int(self.seen[0]) >= 1:
                raise RuntimeError("as planned")
            return F.dropout(x)

    model = network(nn.BatchNorm2d(32), Stateful()).train()
    if not blocked:
        model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 12, 12, requires_grad=True)
    buffers, state = {k: b for k, b in model.named_buffers()}, copy.deepcopy(model.state_dict())
    before, random, policy = x.detach().clone(), torch.get_rng_state(), copy.copy(tb.dispatch.fallback._State.policy)
    hooks = nn.modules.module
    if fails:
        with pytest.raises(RuntimeError, match="as planned"):
            tb.explain(model, x)
    else:
        tb.explain(model, x)
    assert torch.equal(x, before) and x.grad is None and torch.equal(torch.get_rng_state(), random)
    assert model.training and tb.dispatch.fallback._State.policy == policy and not tb.counting._listeners
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert all(m._forward_hooks == {} and m._forward_pre_hooks == {} for m in model.modules())
    assert all(b is buffers[k] for k, b in model.named_buffers())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_an_input_that_the_model_writes_to():
    x = torch.randn(1, 3, 12, 12)
    before = x.clone()
    explained(nn.Sequential(nn.ReLU(inplace=True)), x)
    assert torch.equal(x, before)


def test_backward():
    model, x = network(Fallback()), torch.randn(1, 3, 12, 12)
    report = tb.explain(lambda x: model(x).sum().backward(), x)
    operators = [c.operator for c in report.run.calls]
    assert operators.count("convolution_backward") == 2 and "cummax" in operators


def test_peak_memory():
    size = 4 * 1024
    report = explained(lambda x: ((x + 1) + 1).sum(), torch.zeros(1024))
    assert 2 * size <= report.run.peak_bytes <= 2 * size + 64
    report = explained(lambda x: x.view(2, 512).sum(), torch.zeros(1024))
    assert report.run.peak_bytes <= 64


@pytest.mark.parametrize("model", [3, None, "resnet18"])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match="explain takes a module or a function"):
        tb.explain(model)


def test_tensors_of_other_layouts():
    report = explained(lambda x: torch.sparse.mm(x.to_sparse(), x).to_mkldnn().to_dense(), torch.eye(4))
    assert report.run.calls


class Holding(nn.Module):
    """Has a buffer, and does something to it."""

    def __init__(self, buffer, change=lambda model: None):
        super().__init__()
        self.register_buffer("buffer", buffer)
        self.change = change

    def forward(self, x):
        self.change(self)
        return x + 1


# Buffers whose values are not compared nor written.
BUFFERS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(2, 3, 4, 4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, device="meta"),
    "expanded": lambda: torch.full((1,), float("nan")).expand(4),
    "lazy": lambda: nn.UninitializedBuffer(),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_other_kinds_are_left(kind):
    model = Holding(BUFFERS[kind]())
    before = model.buffer
    assert explained(model, torch.ones(2)).run.calls and model.buffer is before


def storage(x):
    return getattr(x, "_physical", x).untyped_storage()


# What a model does to a buffer of ones.
CHANGES = {
    "resized": lambda model: model.buffer.resize_(2, 40, 3, 3).zero_(),
    "given other data": lambda model: setattr(model.buffer, "data", torch.zeros(3)),
    "replaced": lambda model: setattr(model, "buffer", model.buffer + 1),
    "removed": lambda model: setattr(model, "buffer", None),
    "added": lambda model: model.register_buffer("other", torch.ones(1)),
    "freed": lambda model: storage(model.buffer).resize_(0),
    "written": lambda model: model.buffer.fill_(float("nan")),
}


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last, tb.blocked])
@pytest.mark.parametrize("how", CHANGES)
def test_buffers_are_what_they_were(how, fmt):
    if how == "given other data" and fmt is tb.blocked:
        pytest.skip("a blocked tensor takes no plain data")
    ones = torch.ones(2, 17, 3, 3)
    buffer = ones.to(fmt) if fmt is tb.blocked else ones.to(memory_format=fmt)
    model = Holding(buffer, CHANGES[how])
    strides = getattr(buffer, "_physical", buffer).stride()
    explained(model, torch.ones(2))
    assert model.buffer is buffer and list(model._buffers) == ["buffer"]
    assert buffer.shape == ones.shape and torch.equal(to_dense(buffer), ones)
    assert getattr(buffer, "_physical", buffer).stride() == strides


def test_the_models_own_exception_is_told(monkeypatch):
    def fail(model):
        raise KeyError("its own")

    monkeypatch.setattr(torch, "equal", mock.Mock(side_effect=RuntimeError("cannot be restored")))
    with pytest.raises(KeyError, match="its own") as found:
        explained(Holding(torch.ones(3), fail), torch.ones(2))
    assert found.value.__context__ is None


def test_a_model_of_torchscript():
    model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 17, 3), nn.BatchNorm2d(17)))
    before = copy.deepcopy(dict(model.named_buffers()))
    report = tb.explain(model, torch.randn(1, 3, 8, 8))
    assert report.run.calls
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


@pytest.mark.parametrize("of_inference", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_copies_of_inputs_are_inference_tensors_where_the_inputs_are(mode, of_inference):
    with torch.inference_mode(of_inference):
        x = torch.ones(2)
    seen = []
    with torch.inference_mode(mode):
        tb.explain(lambda x: seen.append(x.is_inference()), x)
    assert set(seen) == {of_inference}


# ---- What is made of it


@pytest.fixture(scope="module")
def report():
    with tb.fallback("allow"):
        return explained(network(Fallback(), Three(), Plain()))


@pytest.mark.parametrize("whole", [False, True])
def test_the_table_is_for_a_terminal_of_100_columns(report, whole):
    lines = report.table(whole).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert str(report) == report.table() and lines[0] in report.verdict
    if whole:
        assert sum(line.startswith(c.module[:21]) for c in report.run.calls for line in lines) >= len(report.run.calls)


def test_long_names_are_cut():
    model = nn.Sequential()
    model.add_module("a_module_of_a_very_long_name", nn.Conv2d(3, 32, 1))
    assert "…" in str(explained(model.to(tb.blocked)))


def test_to_dict_is_json(report):
    found = json.loads(json.dumps(report.to_dict()))
    assert found["verdict"] == report.verdict and len(found["calls"]) == len(report.run.calls)
    assert {f["kind"] for f in found["findings"]} == {f.kind for f in report.findings}
    row = next(c for c in found["calls"] if c["fallback"])
    assert row["module"] == "part.0" and row["reorders"][0]["nbytes"] > 0 and row["fallback"]["why"]


def test_html(report, monkeypatch):
    page = report._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") > 4 and "part.0" in page and "&lt;" not in page.split("<table>")[0]
    monkeypatch.setattr(reports, "FOLDED", 2.0)
    assert "... and" in report.table() and "... and" in report._repr_html_()


def test_plot(report, tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_bars_of_a_plot_follow_one_another(report, tmp_path, monkeypatch):
    figure = types.SimpleNamespace(Figure=mock.MagicMock())  # instead of matplotlib's, which may not be installed
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    report.plot(tmp_path / "report.png")
    axes = figure.Figure().subplots()
    bars = [(bar.args[0], bar.kwargs["left"], bar.args[1]) for bar in axes.barh.call_args_list]
    lanes = axes.set_yticks.call_args.args[1]
    assert [lanes[lane] for lane, *_ in bars] == [palette.kind(call) for call in report.run.calls]
    ends = [0.0, *(left + width for _, left, width in bars)]
    assert [left for _, left, _ in bars] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(report.totals()["calls"]["ms"])
    figure.Figure().savefig.assert_called_once_with(tmp_path / "report.png")


def test_a_plot_has_names_as_they_are(tmp_path, monkeypatch):
    figure = types.SimpleNamespace(Figure=mock.MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    run = reports.Run("eager", 1.0, [Call("$cost$_of", "convolution", seconds=1.0)])
    reports.Report(run, []).plot(tmp_path / "report.png")
    (text,) = figure.Figure().subplots().text.call_args_list
    assert text.args[2] == r"\$cost\$_of convolution"  # between two dollars matplotlib sees mathematics


def test_plot_without_matplotlib(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^report.plot needs matplotlib: pip install matplotlib$"):
        report.plot(tmp_path / "report.png")


def test_what_is_no_convolution():
    names = ("convolution", "conv_transpose2d", "_convolution", "_convert_indices_from_csr_to_coo")
    assert [Call("", name).is_convolution for name in names] == [True, True, True, False]


def test_times_are_merged_of_runs_that_did_the_same():
    def run(seconds, *reorders):
        return [Call("", "convolution", reorders=list(reorders), seconds=seconds)]

    moved, packed = Reorder("nchw", "nChw16c", 8, 3.0), Reorder("oihw", "packed", 8, None)
    first = run(9.0, copy.copy(moved))
    (call,) = passes.merged([first, run(1.0, moved), run(5.0, packed), run(7.0, packed), run(3.0, moved)])
    assert (call.seconds, call.reorders) == (2.0, [moved])


def test_inputs_that_are_one_tensor_stay_one():
    same = []
    tb.explain(lambda x, y, z: same.append((x is y, x is z)), *[torch.ones(2)] * 2, z=torch.ones(2))
    assert set(same) == {(True, False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_can_be_blocked(dtype):
    report = tb.explain(nn.Conv2d(16, 16, 3).to(dtype), torch.ones(1, 16, 8, 8, dtype=dtype))
    assert "blocked where they are float32 or of half precision" in " ".join(report.verdict.split())
