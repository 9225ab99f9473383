"""A model as a package that runs without its Python code: tb.export, then AOTInductor.

    python examples/deploy.py [--package FILE]

The package holds the compiled code, fused as by torch.compile, and the packed weights. The process that loads it,
Python or C++, first loads torch_blocked/_C.so, whose operators the code calls: here by `torch.ops.load_library`, in C++
by linking it or dlopen.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_blocked as tb
from torch_blocked import library

LOAD = """
import sys, torch
operators, package, images, answer = sys.argv[1:]
torch.ops.load_library(operators)
model = torch._inductor.aoti_load_package(package)
torch.save(model(torch.load(images)), answer)
assert "torch_blocked" not in sys.modules
"""


def make_model() -> nn.Module:
    """A small classifier of (n, 3, 32, 32) images."""
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 40, 3)]
    return nn.Sequential(*features, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10)).eval()


def package(model: nn.Module, images: torch.Tensor, file: Path) -> None:
    """Compiles `model` for batches of any size up to 64 of images like these, into `file`."""
    batch = torch.export.Dim("batch", min=1, max=64)
    program = tb.export(model, (images,), dynamic_shapes=({0: batch},))
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))


def run_elsewhere(file: Path, images: torch.Tensor, folder: Path) -> torch.Tensor:
    """The package's answer, from a process that does not import torch_blocked."""
    torch.save(images, folder / "images.pt")
    paths = [str(p) for p in (library.PATH, file, folder / "images.pt", folder / "answer.pt")]
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True)
    return torch.load(folder / "answer.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, metavar="FILE", help="keep the package as FILE, *.pt2")
    args = parser.parse_args()
    model = make_model()
    images, more = torch.randn(2, 3, 32, 32), torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        expected = model(more)
    with tempfile.TemporaryDirectory() as folder:
        file = args.package or Path(folder) / "model.pt2"
        package(model, images, file)
        print(f"package: {file.stat().st_size / 1e6:.1f} MB")
        answer = run_elsewhere(file, more, Path(folder))
    print(f"batch of {len(more)} in another process, largest difference: {(answer - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
