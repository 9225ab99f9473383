"""`python -m torch_blocked explain`, `info`'s faster tier, and the example."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from torch_blocked.__main__ import main
from torch_blocked.benchmark import machine
from torch_blocked.explain import passes

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Tests look at what is told, not at times: two passes do."""
    monkeypatch.setattr(passes, "PASSES", 2)


def test_command(capsys, tmp_path):
    main(["explain", "--model", "squeezenet1_1", "--input", "1x3x32x32", "--json", str(tmp_path / "r.json")])
    assert "convolution" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["how"] == "eager"


def make_linear():
    return nn.Linear(4, 5)


def make_lazy():
    return nn.LazyConv2d(8, 3)


def fail():
    raise ValueError("two\nlines")


# Arguments -> what the one line on stderr says.
WRONG = {
    "--model nope": "unknown model 'nope'",
    "--model test_explain_command:fail": "ValueError: two",
    "--model test_explain_command:re": "is no function that makes a model",
    "--model test_explain_command:make_lazy": "make_lazy cannot be made blocked: ValueError: Attempted to use",
    "--model builtins:int": "makes int, no torch.nn.Module",
    "--model squeezenet1_1 --input 3x4": "the model does not run on 3x4: RuntimeError",
    "--model squeezenet1_1 --input 1x3x99999999x99999999": "the model does not run on 1x3x99999999x99999999: Runtime",
    "--model squeezenet1_1 --input 1x3x99999999999999999999": "TypeError",
    "--model .:f": "a relative import",
    "--model squeezenet1_1 --threads 99999999999": "'99999999999' is not a positive number",
    "--model squeezenet1_1 --input 1xx3": "is no size such as 1x3x224x224",
    "--model squeezenet1_1 --plain --blocked": "not allowed with",
    "--model squeezenet1_1 --json no/such/folder": "is not a file in a folder that exists",
    "": "required: --model",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_commands_end_in_one_line(arguments, error_of):
    assert WRONG[arguments] in error_of(f"explain {arguments}")


def test_command_of_a_model_of_ones_own(capsys):
    main(["explain", "--model", "test_explain_command:make_linear", "--input", "2x4", "--whole", "--train"])
    assert "addmm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "tier, flags, text",
    [
        ("amx", "", "none: amx is the fastest"),
        ("avx512", "avx2", "amx needs a CPU with amx_tile, amx_bf16"),
        ("avx512", "avx2 amx_tile amx_bf16", "amx: unset ATEN_CPU_CAPABILITY; Linux 5.16 or later"),
        ("avx2", "avx2 fma f16c", "avx512 needs a CPU with avx512f, avx512bw, avx512vl, avx512dq"),
        ("avx2", "avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "avx512: unset ATEN_CPU_CAPABILITY"),
        ("default", "fma f16c", "avx2 needs a CPU with avx2"),
        ("default", "avx2 fma", "avx2 needs a CPU with f16c"),
        ("default", "avx2 fma f16c", "avx2: unset ATEN_CPU_CAPABILITY"),
    ],
)
def test_info_tells_of_a_faster_tier(tier, flags, text, monkeypatch, tmp_path, capsys):
    (tmp_path / "cpuinfo").write_text(f"model name\t: some\nflags\t\t: {flags}\n")
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.tb, "isa", lambda: tier)
    main(["info"])
    assert capsys.readouterr().out.splitlines()[-1] == f"faster tier    {text}"


@pytest.mark.slow
def test_example():
    command = [sys.executable, "examples/explain_model.py", "--rounds", "1"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout
    rows = re.findall(r"^(fallback|padding|lost format) +[\d.]+ +[\d.]+ +[\d.]+$", text, re.MULTILINE)
    assert rows == ["fallback", "padding", "lost format"]
