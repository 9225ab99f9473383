"""The pool of freed memory: what it reuses, cuts, joins and gives back."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import hold_free_memory

import torch_blocked as tb
from torch_blocked import library

HUGE_PAGE = 2 << 20  # small blocks are cut from one


@pytest.fixture(autouse=True)
def empty_pool():
    """What outputs of other tests, still in use, leave free of their segments is held meanwhile."""
    held = hold_free_memory()  # noqa: F841
    assert library.cached_bytes() == 0
    yield


def test_pool_reuses_and_gives_back():
    assert library.cached_bytes() == 0
    x = torch.randn(1, 64, 56, 56)
    y = x.to(tb.nChw16c)
    address = y.physical.data_ptr()
    assert library.cached_bytes() + y.physical.nbytes <= HUGE_PAGE
    del y
    assert library.cached_bytes() == HUGE_PAGE
    assert x.to(tb.nChw16c).physical.data_ptr() == address
    tb.empty_cache()
    assert library.cached_bytes() == 0


def blocked_output(channels):
    """An output of 56x56 pixels, in the pool's memory."""
    return torch.empty(1, channels, 1, 1).expand(1, channels, 56, 56).to(tb.nChw16c).physical


@pytest.mark.parametrize("channels, reused", [(256, True), (240, True), (128, True), (16, True), (272, False)])
def test_pool_serves_smaller_outputs(channels, reused):
    """A block of 256 channels serves whatever fits into it, down to a sixteenth."""
    y = blocked_output(256)
    address = y.data_ptr()
    del y
    whole = library.cached_bytes()
    x = torch.randn(1, channels, 56, 56)
    z = x.to(tb.nChw16c)
    assert (z.physical.data_ptr() == address) == reused
    assert (library.cached_bytes() < whole) == reused
    assert torch.equal(z.to(tb.nchw), x)


def test_small_outputs_hold_no_large_memory():
    blocked_output(256)
    kept = torch.randn(1, 16, 8, 8).to(tb.nChw16c)
    tb.empty_cache()
    assert library.cached_bytes() == 0
    assert kept.shape == (1, 16, 8, 8)


def test_pool_cuts_what_it_holds_and_joins_it_again():
    whole = blocked_output(256)
    address = whole.data_ptr()
    del whole
    cached = library.cached_bytes()
    parts = [blocked_output(64) for _ in range(4)]
    addresses = [part.data_ptr() for part in parts]
    assert addresses[0] == address and addresses == sorted(addresses)
    assert all(b - a >= parts[0].nbytes for a, b in itertools.pairwise(addresses))
    assert library.cached_bytes() == 0
    del parts[1:3]  # neighbours
    middle = blocked_output(128)
    assert middle.data_ptr() == addresses[1]
    del middle, parts
    assert library.cached_bytes() == cached
    assert blocked_output(256).data_ptr() == address
    tb.empty_cache()
    assert library.cached_bytes() == 0


def test_memory_of_a_segment_in_use_stays():
    """What is left of it is given back with its last block."""
    blocked_output(256)
    first = torch.randn(1, 64, 56, 56).to(tb.nChw16c)
    expected = first.to(tb.nchw).clone()  # not in the pool
    tb.empty_cache()
    assert library.cached_bytes() > 0
    assert torch.equal(first.to(tb.nchw), expected)
    del first
    tb.empty_cache()
    assert library.cached_bytes() == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_outputs_of_a_pool_never_overlap(threads):
    """Outputs of random sizes are kept for random times, by several threads: each holds what was put into it."""

    def worker(seed):
        random = Random(seed)
        kept = []
        for step in range(400):
            value = seed * 1000 + step
            x = torch.full((1, 16 * random.randint(1, 24), random.randint(1, 40), random.randint(1, 40)), float(value))
            kept.append((x, x.to(tb.nChw16c)))
            if random.random() < 0.7:
                x, y = kept.pop(random.randrange(len(kept)))
                assert torch.equal(y.to(tb.nchw), x)
        return all(torch.equal(y.to(tb.nchw), x) for x, y in kept)

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(worker, range(1, threads + 1)))
    tb.empty_cache()
    assert library.cached_bytes() == 0


def test_pool_takes_the_best_fit():
    freed = [blocked_output(channels) for channels in (512, 384, 256)]
    address = freed[1].data_ptr()
    freed.clear()
    assert blocked_output(352).data_ptr() == address


def test_small_outputs_share_a_page():
    outputs = [blocked_output(32) for _ in range(4)]
    addresses = [output.data_ptr() for output in outputs]
    assert addresses[0] % HUGE_PAGE == 0 and max(addresses) < addresses[0] + HUGE_PAGE
    tiny = torch.randn(1, 16, 8, 8).to(tb.nChw16c).physical
    assert not addresses[0] <= tiny.data_ptr() < addresses[0] + HUGE_PAGE  # of which it would hold the rest


def memory_limit():
    """Bytes that the machine has, or that its container may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists() and path.read_text().strip().isdigit():
            limits.append(int(path.read_text()))
    return min(limits)


def test_pool_is_bounded():
    before = library.set_cache_limit(1 << 26)
    assert before == memory_limit() // 4
    kept = [torch.empty(1, 16, 1, 1).expand(1, 16, 512, 256).to(tb.nChw16c) for _ in range(10)]
    del kept
    assert 0 < library.cached_bytes() <= 1 << 26
    assert library.set_cache_limit(before) == 1 << 26
    tb.empty_cache()
    with pytest.raises(ValueError, match="not negative"):
        library.set_cache_limit(-1)
