"""The examples run, and so does every Python block of the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_conv_relu_chain():
    assert "the same answer as plain" in run("examples/conv_relu_chain.py")


def test_overhead():
    assert re.search(r"\nrelu +[\d.]+ +[\d.]+ +[-\d.]+\n", run("examples/overhead.py"))


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_resnet50(tmp_path, with_checkpoint):
    arguments = ["examples/resnet50.py", "--rounds", "1"]
    if with_checkpoint:
        sys.path.insert(0, str(ROOT / "examples"))
        import resnet50

        torch.save(resnet50.make_model(None, seed=7).state_dict(), tmp_path / "resnet50.pth")
        arguments += ["--weights", str(tmp_path / "resnet50.pth")]
    text = run(*arguments)
    rows = re.findall(r"class +(\d+) +[-\d.]+ +class +(\d+)", text)
    assert len(rows) == 5 and all(plain == blocked for plain, blocked in rows)
    assert float(re.search(r"largest difference: (\S+)", text)[1]) < 1e-4
    assert "reorders 0, fallbacks 0, tensors that left the blocked format 1" in text
    assert all(f"\n{name} " in text for name in ("plain", "channels_last", "blocked"))


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_readme(block):
    exec("import torch\nimport torch_blocked as tb\n" + "\n".join(BLOCKS[: block + 1]), {})
