"""The process that computes on CPU devices: its memory and its threads."""

import ctypes
import functools
import os
import sys
from itertools import pairwise

import jax

# malloc.h: M_TRIM_THRESHOLD (-1: nothing is trimmed; the largest int would trim 2 GiB) and M_MMAP_MAX keep freed memory
# in the process; M_ARENA_MAX shares it between threads.
GLIBC_MALLOC = {-1: -1, -4: 0, -8: 1}
COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event after a compilation
LONG_COMPILATION = 1.0  # seconds; a shorter one leaves few gaps
GAP, HOLE = 1 << 15, 1 << 18  # bytes: steps are slow because of many free blocks between these sizes
LARGEST = 1 << 24  # bytes of a block that `close_gaps` allocates
HEADER = 8  # bytes of a block that malloc_usable_size does not count


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [("others", ctypes.c_size_t * 9), ("keepcost", ctypes.c_size_t)]  # free bytes at the end of the heap


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, so that the next step reuses it at once.

    By default each step on a CPU returns its temporary buffers to the system and page-faults zeroed memory in again.
    For a 2-layer BERT on two virtual devices this took 40% of the time. Call before threads start.

    Memory that is kept has the gaps that a compilation leaves; see `close_gaps`.
    """
    libc = _libc()
    if libc is None:
        return
    for parameter, value in GLIBC_MALLOC.items():
        libc.mallopt(parameter, value)
    jax.monitoring.register_event_duration_secs_listener(_close_gaps_after)


def close_gaps() -> int:
    """Allocate the gaps in the heap, for good, and return their number.

    A compilation frees tens of thousands of blocks between others that stay. Steps would search their lists for a
    block that fits, all threads one after another: on 8 virtual devices, a step took twice as long in the process that
    had compiled it as in one that loaded it from the cache. Holes of at least HOLE bytes stay free for steps.
    """
    libc = _libc()
    if libc is None:
        return 0
    top = libc.sbrk(0) - libc.mallinfo2().keepcost  # where the heap can grow
    blocks, size = [], LARGEST
    while size >= GAP:
        while (block := libc.malloc(size)) and block < top:
            blocks.append(block)
        libc.free(block)
        size //= 2
    number, adjacent = 0, []
    for block, following in pairwise([*sorted(blocks), 0]):
        adjacent.append(block)
        end = block + libc.malloc_usable_size(block) + HEADER
        if end == following:
            continue
        if end - adjacent[0] < HOLE:
            number += 1
        else:
            for part in adjacent:
                libc.free(part)
        adjacent = []
    return number


def add_threads(number: int) -> None:
    """Let XLA start at least so many threads besides one for each core on which this process may run.

    Devices share the threads. With two devices on two cores, one that waits for the other in a collective would leave
    it only one thread. NPROC in the environment stays if it is larger. Call before JAX touches a device.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    given = os.environ.get("NPROC", "")
    if not given.isdecimal() or int(given) < cores + number:
        os.environ["NPROC"] = str(cores + number)


def _close_gaps_after(event: str, duration_secs: float, **_: str | int) -> None:
    if event == COMPILED and duration_secs >= LONG_COMPILATION:
        close_gaps()


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc 2.33 or later."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t]
    libc.free.argtypes = libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
    libc.malloc_usable_size.restype = ctypes.c_size_t
    return libc
