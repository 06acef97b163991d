"""Measures when the devices of a pipeline act in a step of a run, and draws it under what the table plans."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.executor.lowering import Actions
from jaxpar.pipeline.tables.simulate import Simulation, Span, Times, simulate_table
from jaxpar.pipeline.tables.table import BW, PHASE_OF_KIND, B, F, Table, W


class Timeline:
    """Takes the time at both ends of every action of the first replica, by callbacks to the host.

    Each callback takes time itself, which the measured actions and gaps contain. The step before the measured one runs
    the same program, so that nothing is done for the first time in the measured one.
    """

    def __init__(self, step: int):
        """step: number of the one to measure, counted from the start of training; 0: none."""
        self._step, self._now = step, 0
        self._times: dict[tuple[int, ...], list[float]] = {}  # by device, phase, microbatch and chunk

    def steps_before(self, number: int) -> None:
        """Continue training after that many steps."""
        self._now = number

    def next_step(self) -> bool:
        """Count a step, and return whether it is run by the program with callbacks."""
        self._now += 1
        if self._now == self._step:
            jax.effects_barrier()  # those of the step before
            self._times.clear()
        return self._step > 0 and self._now in (self._step - 1, self._step)

    def begin(self, phase: int, action: Actions) -> Actions:
        """Return the action, once its begin is noted; for the engine, inside `shard_map`, as `end`."""
        tick = self._note(phase, action, jnp.zeros(()))
        return jax.lax.optimization_barrier((action, tick))[0]

    def end(self, phase: int, action: Actions, results: Any) -> Any:
        """Return the results, whose end is noted."""
        results = jax.lax.optimization_barrier(results)
        self._note(phase, action, [leaf.ravel()[0] for leaf in jax.tree.leaves(results)])
        return results

    def _note(self, phase: int, action: Actions, after: Any) -> jax.Array:
        def note(replica: Any, device: Any, microbatch: Any, chunk: Any, _after: Any) -> np.ndarray:
            if replica == 0:
                key = (int(device), phase, int(microbatch), int(chunk))
                self._times.setdefault(key, []).append(time.perf_counter())
            return np.zeros((), np.float32)

        place = jax.lax.axis_index(DATA), jax.lax.axis_index(STAGE)
        return io_callback(note, jax.ShapeDtypeStruct((), jnp.float32), *place, action.microbatch, action.chunk, after)

    def spans(self, table: Table) -> list[Span]:
        """Return the measured actions of a step of `table`, in seconds from the first one's start."""
        jax.effects_barrier()
        first = min(min(times) for times in self._times.values())
        spans = []
        for device, kind, microbatch, chunk in table.actions[["device", "kind", "microbatch", "chunk"]].tolist():
            start, end = self._times[device, PHASE_OF_KIND[kind], microbatch, chunk]
            spans.append(Span(device, kind, microbatch, chunk, start - first, end - first))
        return spans

    def save(self, path: Path, schedule: str, table: Table) -> None:
        """Draw the table, planned with the measured times of actions, and the measured timeline under it.

        Prints a line instead where the step was not run.
        """
        if not self._times or self._now < self._step:
            print(f"timeline  none: step {self._step} was not in this run")
            return
        from jaxpar.pipeline.tables import draw  # matplotlib, which takes time to load

        measured = self.spans(table)
        planned = simulate_measured(table, measured)
        rates = [f"bubble {rate:.1%}" for rate in (planned.bubble_rate, measured_bubble_rate(measured))]
        in_lock_step = 1 - (1 - planned.bubble_rate) * planned.cost / planned.lockstep
        title = f"{schedule}, step {self._step}"
        charts = [
            (
                f"{title}, planned with its actions' times: {rates[0]} (in lock step {in_lock_step:.1%})",
                planned.timeline,
            ),
            (f"{title}, measured: {rates[1]}", measured),
        ]
        draw.save_charts(path, charts)
        print(f"timeline  {path}: planned {rates[0]} (in lock step {in_lock_step:.1%}), measured {rates[1]}")


def simulate_measured(table: Table, measured: Sequence[Span]) -> Simulation:
    """Simulate the table with the median times that each device's actions took."""

    def times(kind: int) -> list[float]:
        of_device = [[span.end - span.start for span in measured if span[:2] == (d, kind)] for d in devices]
        return [float(np.median(lengths or 0.0)) * table.num_chunks for lengths in of_device]

    devices = range(table.num_devices)
    backward = BW if any(span.kind == BW for span in measured) else B
    return simulate_table(table, Times(times(F), times(backward), times(W)))


def measured_bubble_rate(timeline: Sequence[Span]) -> float:
    """Return Simulation.bubble_rate of it: the share of its span in which the device with the longest one waits."""
    rates = []
    for device in {span.device for span in timeline}:
        own = [span for span in timeline if span.device == device]
        cost = max(span.end for span in own) - min(span.start for span in own)
        rates.append((cost, 1 - sum(span.end - span.start for span in own) / cost))
    return max(rates)[1]
