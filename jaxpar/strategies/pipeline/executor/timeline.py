"""Measures when every action of one training step runs, and draws the measured timeline below the planned one."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxpar.core.mesh import DATA, STAGE
from jaxpar.strategies.pipeline.tables.periodic import num_in_flight, unroll
from jaxpar.strategies.pipeline.tables.simulate import Span, Times, simulate_table, steady_bubble_rate
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, BW, B, F, Table, W


class ActionNumbers(NamedTuple):
    """The phase, the microbatch (as in Actions) and the chunk of an action."""

    phase: Any
    microbatch: Any
    chunk: Any


class Timeline:
    """Records the start and end times of every action of one step.

    In lock step, callbacks to the host measure those of the first replica (`begin` and `end`), and the actions and gaps
    include their time. For dispatched stages, the host waits for the results (`record`, stopwatch.py). The step before
    the measured one runs the same program, so the measured step includes no compilation or other one-time work.
    """

    def __init__(self, step: int, schedule: str, table: Table):
        """Set what is measured.

        Args:
          step: number of the step to measure, counted from 1 at the start of training; 0: none.
          schedule: name of the schedule, for titles.
          table: the table.
        """
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
        tick = self._note(of_action, [leaf.ravel()[0] for leaf in jax.tree.leaves(inputs)])
        return jax.lax.optimization_barrier((inputs, tick))[0]

    def end(self, of_action: ActionNumbers, results: Any) -> Any:
        """Record the end of an action, and return its results. The engine calls this inside `shard_map`."""
        results = jax.lax.optimization_barrier(results)
        self._note(of_action, [leaf.ravel()[0] for leaf in jax.tree.leaves(results)])
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
        def note(replica: Any, device: Any, phase: Any, microbatch: Any, chunk: Any, _after: Any) -> np.ndarray:
            if replica == 0:
                key = (int(device), int(phase), int(microbatch), int(chunk))
                self._times.setdefault(key, []).append(time.perf_counter())
            return np.zeros((), np.float32)

        place = jax.lax.axis_index(DATA), jax.lax.axis_index(STAGE)
        return io_callback(note, jax.ShapeDtypeStruct((), jnp.float32), *place, *of_action, after)

    def spans(self) -> list[Span]:
        """Return the measured actions of a step, in seconds since the start of the first action.

        While a pipeline without a flush is filling, some actions of its table do not run.
        """
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
        """Return, by title, the planned actions of a step, and the measured ones if the step has run."""
        planned = simulate_table(with_filling(self._table), Times(1, 1, 1)).timeline
        titles: dict[str, Sequence[Span]] = {f"{self._schedule}, planned, if F, B and W take equal time": planned}
        if self.is_measured:
            measured = self.spans()
            seconds = float(max(span.end for span in measured))
            titles[f"{self._schedule}, measured in step {self._step}: {seconds:.3g} s"] = measured
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
        planned = simulate_table(with_filling(self._table), times)
        rates = [describe_planned(self._table, times), f"bubble {measured_bubble_rate(measured):.1%}"]
        title = f"{self._schedule}, step {self._step}"
        charts = [
            (f"{title}, planned from the measured action times: {rates[0]}", planned.timeline),
            (f"{title}, measured: {rates[1]}", measured),
        ]
        draw.save_charts(path, charts, axis="seconds")
        print(f"timeline  {path}: planned {rates[0]}, measured {rates[1]}")
        return {}


def with_filling(table: Table) -> Table:
    """Return the table of a step; of a pipeline that never drains, with the steps in which it fills."""
    return unroll(table, num_in_flight(table) + 1) if table.period else table


def measured_times(table: Table, measured: Sequence[Span]) -> Times:
    """Return the median measured times of each device's actions."""

    def times(kind: int) -> list[float]:
        of_device = [[span.end - span.start for span in measured if span[:2] == (d, kind)] for d in devices]
        return [float(np.median(lengths or 0.0)) * table.num_chunks for lengths in of_device]

    devices = range(table.num_devices)
    backward = BW if any(span.kind == BW for span in measured) else B
    return Times(times(F), times(backward), times(W))


def describe_planned(table: Table, times: Times) -> str:
    """Return the bubble rate of a table, and its rate in lockstep; of a periodic table, that of a full pipeline.

    The devices of a periodic table are not in lockstep, because a clock has only its own transfers.
    """
    if table.period:
        return f"bubble {steady_bubble_rate(table, times):.1%} without updates"
    planned = simulate_table(table, times)
    in_lock_step = float(1 - (1 - planned.bubble_rate) * planned.cost / planned.lockstep)
    return f"bubble {planned.bubble_rate:.1%} (in lockstep {in_lock_step:.1%})"


def measured_bubble_rate(timeline: Sequence[Span]) -> float:
    """Return the bubble rate of a timeline: the fraction of the longest device span in which that device waits."""
    rates = []
    for device in {span.device for span in timeline}:
        own = [span for span in timeline if span.device == device]
        cost = max(span.end for span in own) - min(span.start for span in own)
        rates.append((cost, 1 - sum(span.end - span.start for span in own) / cost))
    return max(rates)[1]
