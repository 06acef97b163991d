"""Measures when every action of one training step runs, and draws the measured timeline below a simulated one.

In lock step, callbacks to the host measure an action. Of a dispatched step, threads wait for the results of the
programs, as the host waits for none.
"""

import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding

from jaxpar.core.mesh import DATA, STAGE
from jaxpar.layout import Tree
from jaxpar.strategies.pipeline.executor.enqueue import Host, Program
from jaxpar.strategies.pipeline.tables.periodic import num_in_flight, unroll
from jaxpar.strategies.pipeline.tables.simulate import Span, Times, simulate_table, steady_bubble_rate
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, BW, B, F, Table, W

SWITCH_SECONDS = 1e-4


class ActionNumbers(NamedTuple):
    """The phase, the microbatch (as in Actions) and the chunk of an action."""

    phase: Any
    microbatch: Any
    chunk: Any


class Timeline:
    """Records the start and end times of every action of one step.

    In lock step, callbacks to the host measure those of the first replica (`begin` and `end`), and the actions and gaps
    include their time. Those of a dispatched step are recorded after it (`record`). The step before the measured one
    runs the same program, so the measured step includes no compilation or other one-time work.
    """

    def __init__(self, step: int, schedule: str, table: Table):
        """step: number of the step to measure, from 1 at the start of training; 0: none. schedule: for titles."""
        self._step, self._now, self._schedule, self._table = step, 0, schedule, table
        self._times: dict[tuple[int, ...], list[float]] = {}  # by device, phase, microbatch and chunk

    def steps_before(self, number: int) -> None:
        """Set the number of steps taken so far, when a run resumes."""
        self._now = number

    @property
    def is_measured(self) -> bool:
        """Whether the step to measure has run."""
        return bool(self._times) and self._now >= self._step

    def next_step(self) -> bool:
        """Count one step, and return whether it must run the program with callbacks."""
        self._now += 1
        if self._now == self._step:
            jax.effects_barrier()  # wait for the callbacks of the previous step
            self._times.clear()
        return self._step > 0 and self._now in (self._step - 1, self._step)

    def begin(self, of_action: ActionNumbers, inputs: Any) -> Any:
        """Record the start of an action, and return its inputs. The engine calls this inside `shard_map`.

        The returned inputs depend on the callback, so the action cannot start before it.
        """
        return jax.lax.optimization_barrier((inputs, self._note(of_action, inputs)))[0]

    def end(self, of_action: ActionNumbers, results: Any) -> Any:
        """Record the end of an action, and return its results. The engine calls this inside `shard_map`."""
        results = jax.lax.optimization_barrier(results)
        self._note(of_action, results)
        return results

    def record(self, device: int, of_action: ActionNumbers, start: float, end: float) -> None:
        """Record an action that ran from `start` to `end`, in seconds of any one clock. Its microbatch: as in Table."""
        microbatch = self._number(of_action.microbatch)
        self._times[device, of_action.phase, microbatch, of_action.chunk] = [start, end]

    def _number(self, microbatch: int) -> int:
        """Return the number that stands for a microbatch of the table in `Actions`."""
        m = self._table.num_microbatches
        return -(microbatch // m) * m + microbatch % m

    def _note(self, of_action: ActionNumbers, after: Any) -> jax.Array:
        """Note the time when the arrays `after` are there, and return a number that depends on the callback."""

        def note(replica: Any, device: Any, phase: Any, microbatch: Any, chunk: Any, _after: Any) -> np.ndarray:
            if replica == 0:
                key = (int(device), int(phase), int(microbatch), int(chunk))
                self._times.setdefault(key, []).append(time.perf_counter())
            return np.zeros((), np.float32)

        place = jax.lax.axis_index(DATA), jax.lax.axis_index(STAGE)
        elements = [leaf.ravel()[0] for leaf in jax.tree.leaves(after)]
        return io_callback(note, jax.ShapeDtypeStruct((), jnp.float32), *place, *of_action, elements)

    def spans(self) -> list[Span]:
        """Return the measured actions of a step, in seconds since the start of the first action."""
        jax.effects_barrier()
        first = min(min(times) for times in self._times.values())
        spans = []
        for device, kind, microbatch, chunk in self._table.actions[["device", "kind", "microbatch", "chunk"]].tolist():
            key = device, ACTION_KINDS[kind].phase, self._number(microbatch), chunk
            if self._table.period and key not in self._times:
                continue  # the pipeline is filling, and the microbatch belongs to a batch before the first one
            start, end = self._times[key]
            spans.append(Span(device, kind, microbatch, chunk, start - first, end - first))
        return spans

    def charts(self) -> dict[str, Sequence[Span]]:
        """Return, by title, the simulated actions of a step, and the measured ones if the step has run."""
        simulated = simulate_table(_with_filling(self._table), Times(1, 1, 1)).timeline
        planned = f"{self._schedule}, planned, if F, B and W take equal time"
        if not self._table.period:  # otherwise, the timeline contains the filling
            planned += f": {_bubble(simulated)}"
        titles: dict[str, Sequence[Span]] = {planned: simulated}
        if self.is_measured:
            measured = self.spans()
            seconds = float(max(span.end for span in measured))
            title = f"{self._schedule}, measured in step {self._step}: {seconds:.3g} s, {_bubble(measured)}"
            titles[title] = measured
        return titles

    def report(self, _state: Any, workdir: Path) -> dict[str, Any]:
        """Draw workdir/timeline.png: simulated with the measured times of the actions, and below it as measured.

        If the step has not run, print a line about it instead; if none is to be measured, do nothing. A function for
        `Strategy.report`.
        """
        if not self._step:
            return {}
        if not self.is_measured:
            print(f"timeline  none: this run did not include step {self._step}")
            return {}
        from jaxpar.strategies.pipeline.tables import draw  # imports matplotlib, which is slow to load

        path, measured = workdir / "timeline.png", self.spans()
        times = measured_times(self._table, measured)
        simulated = simulate_table(_with_filling(self._table), times)
        rates = [describe_simulated(self._table, times), _bubble(measured)]
        title = f"{self._schedule}, step {self._step}"
        charts = [
            (f"{title}, planned from the measured action times: {rates[0]}", simulated.timeline),
            (f"{title}, measured: {rates[1]}", measured),
        ]
        draw.save_charts(path, charts, axis="seconds")
        print(f"timeline  {path}: planned {rates[0]}, measured {rates[1]}")
        return {}


def _with_filling(table: Table) -> Table:
    """Return the table of a step; of a pipeline that never drains, with the steps in which it fills."""
    return unroll(table, num_in_flight(table) + 1) if table.period else table


def measured_times(table: Table, measured: Sequence[Span]) -> Times:
    """Return the measured times of each device's actions: the sum of the medians of its chunks."""

    def times(kind: int) -> list[float]:
        lengths: dict[tuple[int, int], list[float]] = defaultdict(list)  # by device and chunk
        for span in measured:
            if span.kind == kind:
                lengths[span.device, span.chunk].append(float(span.end - span.start))
        return [sum(float(np.median(lengths[d, c] or 0.0)) for c in range(table.num_chunks)) for d in devices]

    devices = range(table.num_devices)
    backward = BW if any(span.kind == BW for span in measured) else B
    return Times(times(F), times(backward), times(W))


def describe_simulated(table: Table, times: Times) -> str:
    """Return the bubble rate of a table, and its rate in lockstep; of a periodic table, that of a full pipeline."""
    if table.period:  # its devices are not in lockstep, because a clock has only its own transfers
        return f"bubble {steady_bubble_rate(table, times):.1%} without updates"
    simulated = simulate_table(table, times)
    in_lock_step = float(1 - (1 - simulated.bubble_rate) * simulated.cost / simulated.lockstep)
    return f"bubble {simulated.bubble_rate:.1%} (in lockstep {in_lock_step:.1%})"


def bubble_rate(timeline: Sequence[Span]) -> float:
    """Return the bubble rate of a timeline: the fraction of the longest device span in which that device waits."""
    rates = []
    for device in {span.device for span in timeline}:
        own = [span for span in timeline if span.device == device]
        cost = max(span.end for span in own) - min(span.start for span in own)
        rates.append((cost, 1 - sum(span.end - span.start for span in own) / cost))
    return max(rates)[1]


def _bubble(timeline: Sequence[Span]) -> str:
    return f"bubble {bubble_rate(timeline):.1%}"


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


class Stopwatch(Host):
    """A host that measures the calls of programs that are actions. A context manager.

    The devices of a column run what is enqueued for them one after the other. So an action starts when the one before
    it has ended and its inputs have arrived, or when it is enqueued, if that is later.
    """

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
        results = super().call(program, *args)
        if program.is_action:
            inputs = [timed for x in jax.tree.leaves(args) if (timed := self._find(x))]
            done = self._thread(program.mesh).submit(_ready, results[-1])
            for x in jax.tree.leaves(results):
                self._timed[id(x)] = _Timed(weakref.ref(x), len(self._actions), None)
            self._actions.append(_Action(program.mesh, enqueued, inputs, done))
        return results

    def send(self, tree: Tree, sharding: NamedSharding) -> Any:
        """Return arrays on other devices."""
        sent = super().send(tree, sharding)
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
