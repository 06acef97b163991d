"""Measures when every action of a dispatched step runs: threads wait for the results, as the host waits for none.

The devices of a column run what is enqueued for them one after the other. So an action starts when the one before it
has ended and its inputs have arrived, or when it is enqueued, if that is later.
"""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.layout import Tree
from jaxpar.pipeline.executor.enqueue import DEVICES, Program

SWITCH_SECONDS = 1e-4


class Stopwatch:
    """A host (enqueue.py) that measures the calls of programs that are actions."""

    def __init__(self) -> None:
        # By default, a thread of Python waits up to 5 ms for the one that enqueues.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._waiting: dict[Mesh, ThreadPoolExecutor] = {}  # one thread for the results of each mesh
        self._sending = ThreadPoolExecutor()
        self._sent: dict[int, Future[float]] = {}  # when an array arrives, by its id
        self._actions: list[tuple[Mesh, float, list[Future[float]], Future[float]]] = []  # enqueued, inputs, end

    def call(self, program: Program, *args: Any) -> Any:
        """Enqueue a program, and return its results. The last result of an action is an array that nothing donates."""
        enqueued = time.perf_counter()
        results = program.jitted(*args)
        if program.is_action:
            inputs = [self._sent[id(x)] for x in jax.tree.leaves(args) if id(x) in self._sent]
            thread = self._waiting.setdefault(program.mesh, ThreadPoolExecutor(1))
            self._actions.append((program.mesh, enqueued, inputs, thread.submit(_ready, results[-1])))
        return results

    def send(self, tree: Tree, sharding: NamedSharding) -> Any:
        """Return arrays on other devices. What an action made is sent right after its call."""
        sent = DEVICES.send(tree, sharding)
        made = self._actions[-1][-1] if self._actions else None
        for x in jax.tree.leaves(sent):
            self._sent[id(x)] = self._sending.submit(_ready, x, made)
        return sent

    def times(self) -> Sequence[tuple[float, float]]:
        """Return the start and the end of each action, in the order of the calls, after waiting for them."""
        free: dict[Mesh, float] = {}
        intervals = []
        for mesh, enqueued, inputs, done in self._actions:
            start = max([enqueued, free.get(mesh, 0.0), *(arrived.result() for arrived in inputs)])
            free[mesh] = done.result()
            intervals.append((min(start, free[mesh]), free[mesh]))
        for executor in (self._sending, *self._waiting.values()):
            executor.shutdown()
        sys.setswitchinterval(self._interval)
        return intervals


def _ready(x: jax.Array, made: Future[float] | None = None) -> float:
    """Return when an array is ready, which is after it was made. Another thread may have noticed that later."""
    jax.block_until_ready(x)
    now = time.perf_counter()
    return max(now, made.result()) if made else now
