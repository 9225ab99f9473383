"""`bench model`: its rows, what it counts, its summaries and plot; the models themselves."""

from __future__ import annotations

import logging
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from test_benchmark import tiny

import torch_blocked as tb
from torch_blocked.__main__ import main
from torch_blocked.benchmark import apart, machine, model, models, networks, report
from torch_blocked.benchmark.contestants import CONTESTANTS, Contestant, blocked, nchw


@pytest.fixture
def peaks(monkeypatch):
    """What is measured in processes of its own: here nothing is. test_benchmark_memory.py starts some."""
    asked = []
    monkeypatch.setattr(apart, "measured", lambda *arguments: asked.append(arguments) or {"peak_mb": len(asked)})
    return asked


def test_model(bench, graphs, peaks):
    # Others' compilers take seconds.
    names = ["nchw", "channels_last", "blocked", "blocked compiled", "blocked dynamic"]
    text, found = bench("model", "--model", "test_benchmark:tiny", "--batch", "1", "3", "--input", "3x9x8",
                        "--contestants", *names)  # fmt: skip
    rows = found["rows"]
    assert [(row["n"], row["contestant"]) for row in rows] == [(n, name) for n in (1, 3) for name in names]
    assert [row["peak_mb"] for row in rows] == list(range(1, 11))
    assert peaks[-1] == (model.__name__, "blocked dynamic", "test_benchmark:tiny", 3, "3x9x8")
    for row in rows:
        best = min(r["ms"] for r in rows if r["n"] == row["n"] and not CONTESTANTS[r["contestant"]].ours)
        assert row["vs_best"] == pytest.approx(best / row["ms"])
        assert row["images_per_s"] == pytest.approx(1e3 * row["n"] / row["ms"])
        assert row["difference"] < 1e-5 and row["compile_s"] > 0 and row["input"] == "3x9x8"
        if CONTESTANTS[row["contestant"]].counted:
            assert (row["fallbacks"], row["graph_breaks"]) == ({}, 0)
            assert f"reorders {row['reorders']}, fallbacks none, graph breaks 0" in text
    assert re.search(r"geometric mean of /best +N=1 +N=3\nnchw +\d", text)


def test_dynamic_and_compiled_run_code_of_their_own(graphs):
    """Dynamo, which shares the code of models of one class, would give both the one or the other."""
    torch._dynamo.reset()
    made = model.made(model.Case("tiny", tiny, 2, (3, 9, 8)))
    answers = [CONTESTANTS[name].prepared(*made) for name in ("blocked compiled", "blocked dynamic")]
    with torch.inference_mode():
        for answer in answers * 2:
            answer()
    sizes = [{str(n.meta["val"]) for n in gm.graph.nodes if "val" in n.meta} for gm in graphs.ran[-2:]]
    assert [any(size.startswith("s") for size in of_graph) for of_graph in sizes] == [False, True]


@pytest.mark.slow
def test_package(monkeypatch):
    programs = []
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package",
                        lambda program, package_path: programs.append(program) or package_path)  # fmt: skip
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda file: programs[-1].module())
    case = model.Case("unet", networks.MODELS["unet"], 1, (3, 32, 32))
    rows = model.measure(["nchw", "blocked package"], case, rounds=1)
    assert len(programs) == 1 and rows[1]["difference"] < 1e-5 and "reorders" not in rows[1]


def test_model_counts(graphs):
    """A reorder, a fallback and a graph break are those of the blocked model."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Conv2d(3, 17, 3), torch.nn.Conv2d(17, 5, 3)

        def forward(self, x):
            x = F.fractional_max_pool2d(self.first(x), 2, 5, _random_samples=torch.full((len(x), 17, 2), 0.5))
            torch._dynamo.graph_break()
            return self.second(x).flatten(1)

    with tb.fallback("allow"):
        rows = model.measure(["nchw", "blocked", "blocked compiled"], model.Case("odd", Odd, 2, (3, 12, 12)), rounds=1)
    found = {row["contestant"]: row for row in rows}
    for name in ("blocked", "blocked compiled"):
        assert any("fractional_max_pool2d" in op for op in found[name]["fallbacks"]), name
        assert found[name]["reorders"] == 3 and found[name]["difference"] < 1e-5
    assert (found["blocked"]["graph_breaks"], found["blocked compiled"]["graph_breaks"]) == (0, 1)


def test_model_with_a_contestant_that_fails(bench, peaks, monkeypatch):
    def fails(model, images):
        raise NotImplementedError("no such operator\nand more")

    monkeypatch.setitem(CONTESTANTS, "openvino", Contestant(fails))
    monkeypatch.setitem(CONTESTANTS, "onnxruntime", Contestant(nchw, modules=("no_such_module",)))
    text, found = bench("model", "--model", "test_benchmark:tiny", "--batch", "1", "--input", "3x9x8",
                        "--contestants", "nchw", "onnxruntime", "openvino")  # fmt: skip
    assert "not installed, left out: onnxruntime (pip install torch_blocked[bench])\n" in text
    assert [row["contestant"] for row in found["rows"]] == ["nchw", "openvino"]
    assert "ms" not in found["rows"][1] and found["rows"][1]["note"] == "NotImplementedError: no such operator"
    assert len(peaks) == 1 and "peak_mb" not in found["rows"][1]


def test_each_of_ours_keeps_the_weights_that_it_would_alone(monkeypatch):
    """Two copies of a convolution whose transformed weights are 151 MB: by one algorithm their answers are the same."""
    answers = []

    def ours(model, images):
        call = blocked(model, images)
        return lambda: answers.append(call()) or answers[-1]

    for name in ("onnxruntime", "openvino"):
        monkeypatch.setitem(CONTESTANTS, name, Contestant(ours, ours=True))
    case = model.Case("wide", lambda: torch.nn.Conv2d(1024, 1024, 3, padding=1), 1, (1024, 16, 16))
    with tb.winograd("auto"):
        rows = model.measure(["onnxruntime", "openvino"], case, 1)
    assert all(row["ms"] > 0 for row in rows)
    assert len(answers) > 2 and all(torch.equal(answer, answers[0]) for answer in answers)


def test_model_whose_memory_cannot_be_measured(bench, monkeypatch):
    def measured(*arguments):
        raise report.UsageError("killed")

    monkeypatch.setattr(apart, "measured", measured)
    _, found = bench("model", "--model", "test_benchmark:tiny", "--batch", "1", "--input", "3x9x8",
                     "--contestants", "nchw")  # fmt: skip
    assert found["rows"][0]["note"] == "memory: killed" and found["rows"][0]["ms"] > 0


def test_model_whose_contestants_all_fail(bench, monkeypatch):
    monkeypatch.setitem(CONTESTANTS, "openvino", Contestant(lambda model, images: 1 / 0))
    _, found = bench("model", "--model", "test_benchmark:tiny", "--batch", "1", "--input", "3x9x8",
                     "--contestants", "openvino")  # fmt: skip
    assert [row["note"] for row in found["rows"]] == ["ZeroDivisionError: division by zero"]


def test_making_a_contestant_leaves_logging_as_it_was():
    logging.disable(logging.ERROR)
    try:
        CONTESTANTS["nchw"].prepared(torch.nn.Identity(), torch.ones(1))
        assert logging.root.manager.disable == logging.ERROR
    finally:
        logging.disable(logging.NOTSET)


def test_model_without_a_contestant(error_of, monkeypatch):
    monkeypatch.setitem(CONTESTANTS, "openvino", Contestant(nchw, modules=("no_such_module",)))
    command = "bench model --model test_benchmark:tiny --batch 1 --input 3x9x8 --contestants openvino"
    assert "not installed, left out: openvino" in error_of(command)


def test_model_summaries():
    rows = [
        {"name": "m", "n": n, "contestant": name, "vs_best": r}
        for name, n, r in (("nchw", 1, 0.5), ("nchw", 1, 2), ("nchw", 16, 1), ("blocked", 16, 3))
    ]
    assert [line.split() for line in model.summaries([*rows, {"n": 1, "contestant": "blocked"}])[2:]] == [
        ["nchw", "1.00", "1.00"],
        ["blocked", "-", "3.00"],
    ]


def test_model_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"name": "m", "n": n, "contestant": name, "vs_best": 1.5} for n in (1, 2) for name in ("nchw", "blocked")]
    model.plot([*rows, {"name": "m", "n": 2, "contestant": "openvino"}], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(report.UsageError, match="--plot"):
        model.plot(rows, tmp_path / "bars.nothing")


def test_model_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main("bench model --plot bars.png".split())
    assert capsys.readouterr().err.endswith("error: --plot needs matplotlib: pip install matplotlib\n")


def test_peak_memory():
    machine.trim_memory()  # else what other tests freed may serve
    machine.reset_peak_memory()
    before = machine.peak_memory()
    if before is None:
        pytest.skip("the system does not tell")
    torch.zeros(16 << 20)
    grown = machine.peak_memory() - before
    assert grown > 60e6 and machine.resident_memory() <= machine.peak_memory()


# The parameters of torchvision's models of these names (U-Net: of the usual one with two classes), and some names.
PARAMETERS = {
    "resnet18": (11_689_512, "layer2.0.downsample.0.weight layer4.1.bn2.running_var fc.bias"),
    "resnet50": (25_557_032, "layer1.2.conv3.weight layer3.0.downsample.1.bias"),
    "vgg16_bn": (138_365_992, "features.40.weight features.41.running_mean classifier.3.weight classifier.6.bias"),
    "mobilenet_v2": (
        3_504_872,
        "features.1.conv.1.weight features.17.conv.3.bias features.18.1.bias",
    ),
    "densenet121": (7_978_856, "features.denseblock3.denselayer24.conv2.weight features.transition1.norm.bias"),
    "squeezenet1_1": (1_235_496, "features.12.expand3x3.bias classifier.1.weight"),
    "efficientnet_b0": (5_288_548, "features.1.0.block.1.fc1.bias features.6.3.block.3.1.weight classifier.1.weight"),
    "convnext_tiny": (
        28_589_128,
        "features.1.0.layer_scale features.7.2.block.5.bias classifier.2.bias",
    ),
    "unet": (31_037_698, "up.0.weight head.bias"),
    "deeplabv3_resnet50": (
        39_638_869,
        "backbone.layer4.0.downsample.1.bias classifier.0.convs.4.1.weight classifier.0.project.1.bias",
    ),
}


def test_models_have_torchvisions_parameters():
    assert list(PARAMETERS) == list(networks.MODELS)
    for name, (count, names) in PARAMETERS.items():
        with torch.device("meta"):
            model = networks.MODELS[name]()
            size = model.eval()(torch.empty(2, 3, 64, 96)).shape
        assert sum(p.numel() for p in model.parameters()) == count, name
        assert set(names.split()) <= set(model.state_dict()), name
        assert size == {"unet": (2, 2, 64, 96), "deeplabv3_resnet50": (2, 21, 64, 96)}.get(name, (2, 1000))


def test_models_are_seeded():
    state = torch.get_rng_state()
    one, same, other = (models.make_model("squeezenet1_1", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    parameters = zip(one.parameters(), same.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) and not torch.equal(p, r) for p, q, r in parameters if p.dim() > 1)


def test_answers_depend_on_the_images():
    net, images = model.made(model.Case("mobilenet_v2", models.factory("mobilenet_v2"), 2, (3, 64, 64)))
    with torch.inference_mode():
        one, other = net(images)
    assert not net.training and all(m.momentum == 0.1 for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d))
    assert (one - other).abs().max() > 0.1 * one.abs().max()
