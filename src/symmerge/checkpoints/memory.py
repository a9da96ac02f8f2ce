"""How much memory is free, and what glibc does with freed memory: back to the system, or kept."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

UNKNOWN_MEMORY = 8 << 30  # assumed free where the system does not say
M_MMAP_THRESHOLD = -3
# Gets a mapping of its own, which goes back when it is freed. A huge page: mappings below get pages
# of 4 kB, and assigning 4,096 units in blocks of 1 MB met 400,000 new ones instead of 70,000.
LARGE_TENSOR = 1 << 21
LARGEST_THRESHOLD = 32 << 20  # glibc takes no more

MOST_WORKERS = 8  # at a time on one checkpoint: each holds a tensor in float32

_returned = False


def workers() -> int:
    """How many tensors are computed side by side: two, or half of the processors."""
    return max(2, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))


def return_freed_memory() -> None:
    """Give freed memory back to the system: for processes that stream a checkpoint and end.

    Large tensors get their own mappings. In glibc's heap the holes that aligned tensors leave
    are often too small for the next ones: streaming 2 GB filled 1.7 GB.
    """
    global _returned
    _returned = True
    _set_threshold(LARGE_TENSOR)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep it: every step of a learned run needs the same tensors, and new pages take as long."""
    _set_threshold(LARGEST_THRESHOLD)
    try:
        yield
    finally:
        if _returned:
            _set_threshold(LARGE_TENSOR)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # counts what the system caches
            sizes = dict(line.split(":") for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        known = "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {})
        pages = os.sysconf("SC_AVPHYS_PAGES") if known else 0
        return pages * os.sysconf("SC_PAGE_SIZE") if known else UNKNOWN_MEMORY


def _set_threshold(size: int) -> None:
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_MMAP_THRESHOLD, size)
