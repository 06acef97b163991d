"""The process that computes on CPU devices: its memory and its threads."""

import ctypes
import functools
import os
import sys
import threading
from itertools import pairwise

import jax

# malloc.h: M_TRIM_THRESHOLD (-1: nothing is trimmed; the largest int would trim 2 GiB) and M_MMAP_MAX keep freed memory
# in the process; M_ARENA_MAX shares it between threads.
GLIBC_MALLOC = {-1: -1, -4: 0, -8: 1}
# JAX's events before and after a compilation, and the seconds of one that leaves many gaps. Lowering is part of them.
LOWERED, COMPILED = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"
LONG_SECONDS = {LOWERED: 0.1, COMPILED: 1.0}
LEAST_GAP, LEAST_HOLE = 1 << 15, 1 << 18  # bytes: steps are slow because of many free blocks between these sizes
LARGEST_BLOCK = 1 << 24  # bytes of a block that `close_gaps` allocates
USERS_NPROC = "JAXPAR_USERS_NPROC"  # environment variable: NPROC as it was before `add_threads`
BLOCK_HEADER = 8  # bytes of a block that malloc_usable_size does not count


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h: the free bytes of the heap, and those at its end, where it grows."""

    _fields_ = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, so that the next step reuses it at once.

    By default each step on a CPU returns its temporary buffers to the system and page-faults zeroed memory in again.
    For a 2-layer BERT on two virtual devices this took 40% of the time. Call before threads start.

    After each long compilation, its gaps are closed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:  # musl lacks it
        return
    for parameter, value in GLIBC_MALLOC.items():
        mallopt(parameter, value)
    if (libc := _glibc()) is not None:
        jax.monitoring.register_event_duration_secs_listener(Gaps(libc).follow)


class Gaps:
    """The gaps in the heap, which are closed by allocating them, except while a program is compiled.

    A compilation frees tens of thousands of blocks between others that stay. Steps would search their lists for a
    block that fits, all threads one after another: on 8 virtual devices, a step took twice as long in the process that
    had compiled it as in one that loaded it from the cache.
    """

    def __init__(self, libc: ctypes.CDLL):
        """libc: glibc, with the types of its functions."""
        self._libc = libc
        self._blocks: list[int] = []  # addresses of those that close gaps
        self._lock = threading.Lock()
        self._were_opened = False  # since they were closed last

    def follow(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Open the gaps before a compilation of many seconds, and close them afterwards. event: JAX's."""
        if event not in LONG_SECONDS or jax.default_backend() != "cpu":
            return
        is_long = duration_secs >= LONG_SECONDS[event]
        if event == LOWERED and is_long and self._blocks:
            self.open()
        elif event == COMPILED and (is_long or self._were_opened):
            self.close()

    def open(self) -> None:
        """Free the gaps."""
        with self._lock:
            self._were_opened = True
            while self._blocks:
                self._libc.free(self._blocks.pop())

    def close(self) -> None:
        """Allocate the gaps. Holes of at least LEAST_HOLE bytes stay free for steps."""
        with self._lock:
            self._were_opened = False
            blocks: list[int] = []
            try:
                self._allocate(blocks)
                self._blocks += self._in_gaps(sorted(blocks))
            finally:
                for block in set(blocks).difference(self._blocks):
                    self._libc.free(block)

    def _allocate(self, blocks: list[int]) -> None:
        """Allocate what is free below the end of the heap, in blocks of LARGEST_BLOCK to LEAST_GAP bytes."""
        info = self._libc.mallinfo2()
        top, left, size = self._libc.sbrk(0) - info.keepcost, info.fordblks - info.keepcost, LARGEST_BLOCK
        while size >= LEAST_GAP:
            block = self._libc.malloc(size) if left >= size else None
            if block is not None and block < top:
                blocks.append(block)
                left -= size
            else:
                self._libc.free(block)
                size //= 2

    def _in_gaps(self, blocks: list[int]) -> list[int]:
        """Return the blocks that are not in holes. blocks: in the order of addresses."""
        found, adjacent = [], []
        for block, following in pairwise([*blocks, 0]):
            adjacent.append(block)
            end = block + self._libc.malloc_usable_size(block) + BLOCK_HEADER
            if end != following:
                if end - adjacent[0] < LEAST_HOLE:
                    found += adjacent
                adjacent = []
        return found


def add_threads(number: int) -> None:
    """Let XLA start this many threads in addition to one for each core on which this process may run.

    Devices share the threads. With two devices on two cores, one that waits for the other in a collective would leave
    it only one thread. NPROC in the environment, which XLA reads, is the number of cores if the user sets it. Call
    before JAX touches a device; the last call counts, also for processes that this one starts, until theirs.
    """
    given = os.environ.setdefault(USERS_NPROC, os.environ.get("NPROC", ""))
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    os.environ["NPROC"] = str((int(given) if given.isdecimal() else cores) + max(number, 0))


def _glibc() -> ctypes.CDLL | None:
    """Return the C library, with types, if it is glibc 2.33 or later, and if malloc is its own."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallinfo2"):
        return None
    own = ctypes.CDLL("libc.so.6").malloc
    if ctypes.cast(libc.malloc, ctypes.c_void_p).value != ctypes.cast(own, ctypes.c_void_p).value:
        return None
    libc.mallinfo2.restype = _Mallinfo2
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t]
    libc.free.argtypes = libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
    libc.malloc_usable_size.restype = ctypes.c_size_t
    return libc
