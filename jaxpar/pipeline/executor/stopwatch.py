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
        # One thread waits for the results of a mesh, and one for what a mesh sends to another: these come in order.
        self._waiting: dict[tuple[Any, ...], ThreadPoolExecutor] = {}
        self._sent: dict[int, tuple[int, Future[float]]] = {}  # by the id of an array: its action, and its arrival
        self._actions: list[tuple[Mesh, float, list[tuple[int, Future[float]]], Future[float]]] = []

    def call(self, program: Program, *args: Any) -> Any:
        """Enqueue a program, and return its results. The last result of an action is an array that nothing donates."""
        enqueued = time.perf_counter()
        results = program.jitted(*args)
        if program.is_action:
            inputs = [self._sent[id(x)] for x in jax.tree.leaves(args) if id(x) in self._sent]
            done = self._thread(program.mesh).submit(_ready, results[-1])
            self._actions.append((program.mesh, enqueued, inputs, done))
        return results

    def send(self, tree: Tree, sharding: NamedSharding) -> Any:
        """Return arrays on other devices. What an action made is sent right after its call."""
        sent = DEVICES.send(tree, sharding)
        made = len(self._actions) - 1
        sender = self._actions[made][0] if self._actions else sharding.mesh
        for x in jax.tree.leaves(sent):
            self._sent[id(x)] = made, self._thread(sender, sharding.mesh).submit(_ready, x)
        return sent

    def _thread(self, *meshes: Any) -> ThreadPoolExecutor:
        return self._waiting.setdefault(meshes, ThreadPoolExecutor(1))

    def times(self) -> Sequence[tuple[float, float]]:
        """Return the start and the end of each action, in the order of the calls, after waiting for them.

        On busy processors, threads may notice too late that an array is ready: then an action that was made of it and
        was noticed before has no length.
        """
        free: dict[jax.Device, float] = {}
        intervals: list[tuple[float, float]] = []
        for mesh, enqueued, inputs, done in self._actions:
            start = max([enqueued, *(free.get(device, 0.0) for device in mesh.devices.flat)])
            for made, arrived in inputs:
                start = max(start, arrived.result(), intervals[made][1] if made >= 0 else 0.0)
            end = max(start, done.result())
            free |= dict.fromkeys(mesh.devices.flat, end)
            intervals.append((start, end))
        for executor in self._waiting.values():
            executor.shutdown()
        sys.setswitchinterval(self._interval)
        return intervals


def _ready(x: jax.Array) -> float:
    """Return when an array is ready, after waiting for it."""
    jax.block_until_ready(x)
    return time.perf_counter()
