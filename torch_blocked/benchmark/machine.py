"""What the figures were measured on."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch

import torch_blocked as tb
from torch_blocked import library

_PROCESS = Path("/proc/self")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CPUINFO = Path("/proc/cpuinfo")

# glibc takes larger blocks from the system, each anew, unless its heap has a free place for them: the upper limit of
# M_MMAP_THRESHOLD, see mallopt(3).
LARGEST_HEAP_BLOCK = 32 << 20

# What the CPU must have for a tier of kernels, as /proc/cpuinfo calls it; "default" needs nothing.
TIERS = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "amx": ("amx_tile", "amx_bf16"),
}


def describe() -> dict[str, str | int]:
    """Versions, the CPU's model, its caches (of the first core; absent where unknown), ISA tier, block, threads."""
    return {
        "torch_blocked": tb.__version__,
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "isa": tb.isa(),
        "block": library.isa_block(),
        "threads": torch.get_num_threads(),
        **_caches(),
    }


def faster_tier() -> str:
    """What a faster tier of kernels than the present one would need."""
    faster = list(TIERS)[("default", *TIERS).index(tb.isa()) :]
    if not faster:
        return "none: amx is the fastest"
    flags = (_field(_CPUINFO, "flags") or "").split()
    possible = list(itertools.takewhile(lambda tier: set(TIERS[tier]) <= set(flags), faster))
    if not possible:
        missing = [flag for flag in TIERS[faster[0]] if flag not in flags]
        return f"{faster[0]} needs a CPU with {', '.join(missing)}"
    return f"{possible[-1]}: unset ATEN_CPU_CAPABILITY" + ("; Linux 5.16 or later" if possible[-1] == "amx" else "")


def round_trip_ns() -> float | None:
    """Nanoseconds that a cache line takes from one of the cores to another and back, see `library.core_round_trip`.

    Virtual cores may move while a process runs: what is measured is so at this moment. None on one thread.
    """
    seconds = library.core_round_trip() if torch.get_num_threads() > 1 else None
    return seconds and 1e9 * seconds


def available_bytes() -> int | None:
    """Bytes of memory that can be allocated without swapping; None where unknown."""
    value = _field(Path("/proc/meminfo"), "MemAvailable")
    return int(value.split()[0]) * 1024 if value else None


def resident_memory() -> int | None:
    """Bytes of memory that this process occupies; None where unknown."""
    return _kilobytes("VmRSS")


def peak_memory() -> int | None:
    """The most bytes that it occupied since `reset_peak_memory`, or ever; None where unknown."""
    return _kilobytes("VmHWM")


def reset_peak_memory() -> None:
    """Lets `peak_memory` begin anew, where the system can."""
    with contextlib.suppress(OSError):
        _PROCESS.joinpath("clear_refs").write_text("5")


def trim_memory() -> None:
    """Gives memory that the C library keeps after it was freed back to the system, where it can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Inside the ``with`` block memory of more than `LARGEST_HEAP_BLOCK` bytes comes fresh from the system.

    So it does in a new process. In one that freed much before, glibc's heap may happen to have such a place, whose
    pages are there already: PyTorch's 51 MB of output took 4 ms in one run and 18 in the next. Here such places are
    occupied first, in the main thread's heap. Nothing is done where the C library is another; where it was told to map
    no blocks, this changes nothing for them.
    """
    try:
        libc: ctypes.CDLL | None = _libc()
    except AttributeError:
        libc = None
    occupied: list[int] = []
    try:
        if libc:
            _occupy_large_places(libc, occupied)
        yield
    finally:
        for block in occupied:
            libc.free(block)


def _occupy_large_places(libc: ctypes.CDLL, occupied: list[int]) -> None:
    """Allocates until a block is mapped, which is freed again: at most one more than the heap has free bytes for."""
    for _ in range(libc.mallinfo2().fordblks // LARGEST_HEAP_BLOCK + 1):
        mapped, block = libc.mallinfo2().hblks, libc.malloc(LARGEST_HEAP_BLOCK)
        if not block:
            break
        if libc.mallinfo2().hblks > mapped:
            libc.free(block)
            break
        occupied.append(block)


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2, see mallinfo(3): fordblks are bytes that are free, hblks blocks that are mapped."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _libc() -> ctypes.CDLL:
    """glibc's allocator; AttributeError where the C library is another or older."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallocInfo
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    return libc


def _kilobytes(name: str) -> int | None:
    value = _field(_PROCESS / "status", name)
    return int(value.split()[0]) * 1024 if value else None


def _cpu_model() -> str:
    return _field(_CPUINFO, "model name") or "unknown"


def _field(path: Path, name: str) -> str | None:
    """The first "name: value" of a file of such lines; None where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)


def _caches() -> dict[str, str]:
    """Level, as "L1d", "L2" or "L3" -> size as the system gives it, such as "48K"."""
    sizes = {}
    for index in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes[f"L{level}{'d' if kind == 'Data' else ''}"] = size
    return sizes
