"""The build and the import: torch has one version, a machine without it is told what to do, imports are light."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_torch_is_pinned_in_one_place():
    files = [p for p in ROOT.iterdir() if p.suffix in (".toml", ".py", ".cfg", ".txt") or p.name == "Makefile"]
    pins = [p.name for p in files if re.search(r"torch *[=<>~]=* *\d", p.read_text())]
    assert pins == ["pyproject.toml"]


WITHOUT = {
    "torch": ("sys.modules['torch'] = None", "built against the installed torch, .*pip install torch=="),
    "Python.h": (
        "import sysconfig as s; paths = s.get_paths(); s.get_paths = lambda *_, **__: paths | {'include': '/nowhere'}",
        "Python's C API, and /nowhere has no Python.h: install ",
    ),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_building_without_what_it_needs_says_so(what, tmp_path):
    without, line = WITHOUT[what]
    code = (
        f"import sys; {without}; sys.argv = ['setup.py', 'build_ext', '--build-lib', sys.argv[1]]; "
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__file__': 'setup.py', '__name__': '__main__'})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(line, done.stderr.strip().splitlines()[-1])


HEAVY = tuple(f"torch.{m}" for m in "_dynamo _inductor _functorch fx distributed testing".split()) + ("sympy",)
IMPORT = """
import sys, torch
before = set(sys.modules)
import torch_blocked
print(*(set(sys.modules) - before))
"""


def test_import_is_clean_and_light():
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    loaded = done.stdout.split()
    assert "torch_blocked.tensor" in loaded
    assert not [name for name in loaded if name.startswith(HEAVY)]
