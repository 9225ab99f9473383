"""What a benchmark's peers find in memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from torch_blocked.benchmark import machine

HEAP_WITH_A_LARGE_PLACE = """
from torch_blocked.benchmark import machine
libc, size = machine._libc(), machine.LARGEST_HEAP_BLOCK
libc.free(libc.malloc(size - 2**20))  # now glibc takes smaller ones from its heap
places = [libc.malloc(size // 2) for _ in range(6)]
libc.malloc(2**20)  # else their memory is given back
for place in places:
    libc.free(place)

def is_mapped():
    before = libc.mallinfo2().hblks
    block = libc.malloc(size + 2**20)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after > before

print(is_mapped())
with machine.large_blocks_mapped():
    print(is_mapped(), is_mapped())
print(is_mapped())
"""


def run_in_a_large_heap(**environment):
    command = [sys.executable, "-c", HEAP_WITH_A_LARGE_PLACE]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=env).stdout.split()


has_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")


@has_glibc
def test_large_blocks_come_from_the_system():
    """Also where the heap of a process has a free place as large, which is free again after."""
    assert run_in_a_large_heap() == ["False", "True", "True", "False"]


@has_glibc
def test_large_blocks_where_none_is_mapped():
    """No more is allocated than the heap has free."""
    assert run_in_a_large_heap(MALLOC_MMAP_MAX_="0") == ["False"] * 4


def test_another_c_library_has_no_such_blocks(monkeypatch):
    def missing():
        raise AttributeError("mallinfo2")

    occupied = []
    monkeypatch.setattr(machine, "_libc", missing)
    monkeypatch.setattr(machine, "_occupy_large_places", lambda *places: occupied.append(places))
    with machine.large_blocks_mapped():
        assert not occupied
