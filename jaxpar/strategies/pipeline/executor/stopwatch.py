"""Measures when every action of a dispatched step runs: threads wait for the results, as the host waits for none.

The devices of a column run what is enqueued for them one after the other. So an action starts when the one before it
has ended and its inputs have arrived, or when it is enqueued, if that is later.
"""

import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.layout import Tree
from jaxpar.strategies.pipeline.executor.enqueue import DEVICES, Program

SWITCH_SECONDS = 1e-4


class _Timed(NamedTuple):
    """An array that an action made, or that was sent after that."""

    array: "weakref.ref[Any]"  # a weak reference to it, because ids are used again
    action: int  # number of the action
    arrived: Future[float] | None  # when it was there, if it was sent


class _Action(NamedTuple):
    mesh: Mesh
    enqueued: float
    inputs: list[_Timed]
    done: Future[float]


class Stopwatch:
    """A host (enqueue.py) that measures the calls of programs that are actions. A context manager."""

    def __init__(self) -> None:
        # One thread waits for the results of a mesh, and one for what a mesh sends to another: these come in order.
        self._waiting: dict[tuple[Any, ...], ThreadPoolExecutor] = {}
        self._timed: dict[int, _Timed] = {}  # by id
        self._actions: list[_Action] = []

    def __enter__(self) -> Self:
        # By default, a thread of Python waits up to 5 ms for the one that enqueues.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self._waiting.values():
            executor.shutdown()
        sys.setswitchinterval(self._interval)

    def call(self, program: Program, *args: Any) -> Any:
        """Enqueue a program, and return its results. The last result of an action is an array that nothing donates."""
        enqueued = time.perf_counter()
        results = program.jitted(*args)
        if program.is_action:
            inputs = [timed for x in jax.tree.leaves(args) if (timed := self._find(x))]
            done = self._thread(program.mesh).submit(_ready, results[-1])
            for x in jax.tree.leaves(results):
                self._timed[id(x)] = _Timed(weakref.ref(x), len(self._actions), None)
            self._actions.append(_Action(program.mesh, enqueued, inputs, done))
        return results

    def send(self, tree: Tree, sharding: NamedSharding) -> Any:
        """Return arrays on other devices."""
        sent = DEVICES.send(tree, sharding)
        for x, arriving in zip(jax.tree.leaves(tree), jax.tree.leaves(sent), strict=True):
            if timed := self._find(x):
                thread = self._thread(self._actions[timed.action].mesh, sharding.mesh)
                self._timed[id(arriving)] = _Timed(weakref.ref(arriving), timed.action, thread.submit(_ready, arriving))
        return sent

    def times(self) -> Sequence[tuple[float, float]]:
        """Return the start and the end of each action, in the order of the calls, after waiting for them.

        On busy processors, threads may notice too late that an array is ready: then an action that was made of it and
        was noticed before has no length.
        """
        free: dict[jax.Device, float] = {}
        intervals: list[tuple[float, float]] = []
        for mesh, enqueued, inputs, done in self._actions:
            start = max([enqueued, *(free.get(device, 0.0) for device in mesh.devices.flat)])
            for timed in inputs:
                arrived = timed.arrived.result() if timed.arrived else 0.0
                start = max(start, intervals[timed.action][1], arrived)
            end = max(start, done.result())
            free |= dict.fromkeys(mesh.devices.flat, end)
            intervals.append((start, end))
        return intervals

    def _find(self, x: Any) -> _Timed | None:
        timed = self._timed.get(id(x))
        return timed if timed is not None and timed.array() is x else None

    def _thread(self, *meshes: Any) -> ThreadPoolExecutor:
        return self._waiting.setdefault(meshes, ThreadPoolExecutor(1))


def _ready(x: jax.Array) -> float:
    """Return when an array is ready, after waiting for it."""
    jax.block_until_ready(x)
    return time.perf_counter()
