"""The examples run, and so does every Python block of the README."""

from __future__ import annotations

import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import torch_blocked as tb
from torch_blocked import reference
from torch_blocked.dispatch.table import markdown_table

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-9000:]}"
    return done.stdout


def test_conv_relu_chain():
    assert "the same answer as plain" in run("examples/conv_relu_chain.py")


@pytest.mark.slow
def test_overhead():
    lines = run("examples/overhead.py").splitlines()[1:]
    assert lines[0].startswith("relu ") and lines[-1].startswith("conv, bn, relu ")
    for line in lines:
        plain, blocked, overhead, cold_plain, cold_blocked, cold_overhead = map(float, line[14:].split())
        assert overhead == pytest.approx(blocked - plain, abs=0.02)
        assert cold_overhead == pytest.approx(cold_blocked - cold_plain, abs=0.2)
        assert cold_plain > plain and cold_blocked > blocked


@pytest.mark.slow
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


@pytest.mark.slow
def test_train_digits():
    text = run("examples/train_digits.py", "--epochs", "6")
    curves = re.findall(r"\n +(\d+) +([\d.]+) +[\d.]+%\W+([\d.]+) +[\d.]+%", text)
    assert [int(epoch) for epoch, *_ in curves] == list(range(1, 7))
    for _, plain, blocked in curves[:3]:
        assert float(blocked) == pytest.approx(float(plain), rel=0.1)
    for name in ("plain", "blocked"):
        assert len(re.findall(rf"^{name} +epoch", text, re.MULTILINE)) == 6
        assert float(re.search(rf"\n{name}: ([\d.]+)%", text)[1]) >= 98


def test_train_digits_without_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "examples/train_digits.py", "--plot", str(tmp_path / "curves.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr == "--plot needs matplotlib: pip install matplotlib\n"


def test_digits_are_what_their_text_says():
    with numpy.load(ROOT / "examples/digits.npz") as file:
        images, labels = file["images"], file["labels"]
    assert images.shape == (1797, 8, 8) and images.dtype == labels.dtype == numpy.uint8
    assert (images.min(), images.max()) == (0, 16) and set(labels) == set(range(10))
    assert "CC BY 4.0" in (ROOT / "examples/digits.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("blocked", ["parameters", "activations"])
def test_train_ddp(blocked):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text = run(*torchrun, "examples/train_ddp.py", "--epochs", "4", "--blocked", blocked)
    epochs = re.findall(r"epoch +\d/4 +loss ([\d.]+) +test +([\d.]+)%", text)
    assert len(epochs) == 4 and float(epochs[3][0]) < 0.1 and float(epochs[3][1]) > 90


@pytest.mark.slow
def test_deploy(tmp_path):
    text = run("examples/deploy.py", "--package", str(tmp_path / "model.pt2"))
    assert float(re.search(r"another process, largest difference: (\S+)", text)[1]) < 1e-5
    assert (tmp_path / "model.pt2").stat().st_size > 10_000


def test_train_ddp_without_torchrun():
    done = subprocess.run([sys.executable, "examples/train_ddp.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "torchrun --standalone" in done.stderr and done.stderr.count("\n") == 1


@functools.cache
def names_after(block: int) -> dict[str, object]:
    """What is defined when the README has been run up to a block, each one once."""
    names = {"torch": torch, "tb": tb} if block == 0 else dict(names_after(block - 1))
    exec(BLOCKS[block], names)
    return names


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_readme(block):
    names_after(block)


def test_the_reference_is_that_of_the_docstrings():
    assert (ROOT / "docs" / "reference.md").read_text() == reference.markdown() + "\n", (
        "python -m torch_blocked reference"
    )


def test_every_public_name_is_described():
    undescribed = [name for name in tb.__all__ if not inspect.getdoc(getattr(tb, name))]
    assert undescribed == []


def test_readme_lists_the_operators():
    assert markdown_table() in (ROOT / "README.md").read_text(), "python -m torch_blocked operators"
