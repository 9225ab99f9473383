"""Builds torch_blocked/_C.so, the C++ operators, and torch_blocked/_python, which needs Python's C API, with ninja.

Every file of csrc/kernels is compiled once per ISA tier, each with its own flags and never with -march=native, so that
one build serves every CPU; the tier is chosen at run time (csrc/isa.h).
"""

import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# GCC names `omp_*` and `GOMP_*` are left to torch's own libgomp, found through libtorch_cpu: no -lgomp, so that the
# process holds one OpenMP runtime. NDEBUG as torch is built: else its inlined functions and pybind11's check themselves
# at every call.
COMPILE = (
    "-std=c++20 -O3 -DNDEBUG -g1 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math "
    "-Wall -Wextra -Wno-maybe-uninitialized -Icsrc"
)
X86 = platform.machine().lower() in ("x86_64", "amd64")
TIERS = {"default": "-DCPU_CAPABILITY=DEFAULT -DCPU_CAPABILITY_DEFAULT"}
if X86:
    TIERS["avx2"] = "-mavx2 -mfma -mf16c -DCPU_CAPABILITY=AVX2 -DCPU_CAPABILITY_AVX2"
    TIERS["avx512"] = (
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512 "
        "-mamx-tile -mamx-bf16 "  # for kernels that say so: no compiler uses tiles by itself
        "-DCPU_CAPABILITY=AVX512 -DCPU_CAPABILITY_AVX512"
    )


def torch_paths() -> tuple[list[str], Path]:
    """Torch's include folders and its library folder; one clear line where torch is missing."""
    try:
        import torch
        from torch.utils.cpp_extension import include_paths
    except ImportError:
        raise SystemExit(
            "torch_blocked is built against the installed torch, and none is here: "
            f"`pip install {pinned_torch()} numpy 'setuptools>=70.1' ninja`, "
            "then `pip install --no-build-isolation .`"
        ) from None
    return include_paths(), Path(torch.__file__).parent / "lib"


def pinned_torch() -> str:
    """The torch requirement as pyproject.toml, the one place that pins it, gives it."""
    import tomllib

    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(d for d in dependencies if d.startswith("torch"))


def python_headers() -> str:
    """The folder of Python.h; one clear line where it is missing."""
    folder = sysconfig.get_paths()["include"]
    if not (Path(folder) / "Python.h").exists():
        raise SystemExit(
            f"torch_blocked is built against Python's C API, and {folder} has no Python.h: "
            "install Python's headers (python3-dev, python3-devel)"
        )
    return folder


def escape(path: str | Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ")


def ninja_file(operators: Path, python: Path, folder: str) -> str:
    """The text of build.ninja: one object per source and tier under `folder`, then the two shared libraries."""
    includes, libraries = torch_paths()
    flags = f"{COMPILE} {' '.join(f'-isystem {escape(path)}' for path in includes)} {os.environ.get('CXXFLAGS', '')}"
    lines = [
        f"builddir = {folder}",
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"flags = {flags}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags $tier -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx -shared $in -o $out -L{escape(libraries)} $libraries {os.environ.get('LDFLAGS', '')}",
    ]

    def compile_room(room: str, tier: str = "", flags: str = "") -> list[str]:
        objects = []
        for source in sorted(Path(room).glob("*.cpp")):
            objects.append("/".join(filter(None, [folder, tier, str(source.relative_to("csrc").with_suffix(".o"))])))
            lines.extend([f"build {objects[-1]}: compile {source}", f"  tier = {flags}"])
        return objects

    def link(target: Path, objects: list[str], torch_libraries: str) -> None:
        lines.extend([f"build {escape(target)}: link {' '.join(objects)}", f"  libraries = {torch_libraries}"])

    # The baseline's objects come first: where an inline function is left out of line, the linker keeps the first copy
    # it sees, and that one must run on every CPU.
    objects = [name for room in ("csrc", "csrc/conv", "csrc/library") for name in compile_room(room)]
    for tier, flags in TIERS.items():
        objects += compile_room("csrc/kernels", tier, f"{flags} -DTORCH_BLOCKED_TIER={tier}")
    link(operators, objects, "-ltorch_cpu -lc10")
    link(
        python,
        compile_room("csrc/python", flags=f"-isystem {escape(python_headers())}"),
        "-ltorch_python -ltorch_cpu -lc10",
    )
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """`build_ext` that writes one ninja file and runs it; a second run compiles only what changed."""

    def build_extensions(self) -> None:
        os.chdir(ROOT)
        targets = [Path(self.get_ext_fullpath(ext.name)).resolve() for ext in EXTENSIONS]
        targets[0].parent.mkdir(parents=True, exist_ok=True)
        folder = os.environ.get("BUILD_FOLDER", "build/ninja")
        script = ROOT / folder / "build.ninja"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(ninja_file(*targets, folder))
        jobs = os.environ.get("MAX_JOBS")
        command = [sys.executable, "-m", "ninja", "-f", str(script), *(["-j", jobs] if jobs else [])]
        if subprocess.run(command).returncode:
            raise SystemExit("torch_blocked: the C++ build failed; the compiler's own messages are above")

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] != "_C":
            return super().get_ext_filename(fullname)
        # No Python API inside, so no interpreter tag in the name.
        return fullname.replace(".", os.sep) + sysconfig.get_config_var("SHLIB_SUFFIX")


EXTENSIONS = [Extension(f"torch_blocked.{name}", sources=[]) for name in ("_C", "_python")]

setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": NinjaBuild})
