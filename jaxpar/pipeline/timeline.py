"""What the devices of a pipeline really did when: measured in a step of a run, drawn under what its table plans."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline import draw
from jaxpar.pipeline.lowering import Actions
from jaxpar.pipeline.simulate import Simulation, Span, Times, simulate
from jaxpar.pipeline.table import BW, ORDER_IN_CLOCK, B, F, Table, W


class Timeline:
    """Takes the time at both ends of every action of the first replica, by callbacks to the host.

    Each callback takes time itself, which the measured actions and gaps contain.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, ...], list[float]] = {}  # by device, rank, microbatch and chunk

    def begin(self, rank: int, action: Actions) -> Actions:
        """The action, once its begin is noted; for the engine, inside `shard_map`, as `end`."""
        tick = self._note(rank, action, jnp.zeros(()))
        return jax.lax.optimization_barrier((action, tick))[0]

    def end(self, rank: int, action: Actions, results: Any) -> Any:
        """The results, whose end is noted."""
        results = jax.lax.optimization_barrier(results)
        self._note(rank, action, [leaf.ravel()[0] for leaf in jax.tree.leaves(results)])
        return results

    def _note(self, rank: int, action: Actions, after: Any) -> jax.Array:
        def note(replica: Any, device: Any, microbatch: Any, chunk: Any, after: Any) -> np.ndarray:
            if replica == 0:
                key = (int(device), rank, int(microbatch), int(chunk))
                self._times.setdefault(key, []).append(time.perf_counter())
            return np.zeros((), np.float32)

        place = jax.lax.axis_index(DATA), jax.lax.axis_index(STAGE)
        return io_callback(note, jax.ShapeDtypeStruct((), jnp.float32), *place, action.microbatch, action.chunk, after)

    def spans(self, table: Table) -> list[Span]:
        """The measured actions of a step of `table`, in seconds from the first one's start."""
        jax.effects_barrier()
        first = min(min(times) for times in self._times.values())
        spans = []
        for device, kind, microbatch, chunk in table.actions[["device", "kind", "microbatch", "chunk"]].tolist():
            start, end = self._times[device, ORDER_IN_CLOCK[kind], microbatch, chunk]
            spans.append(Span(device, kind, microbatch, chunk, start - first, end - first))
        return spans

    def save(self, path: Path, title: str, table: Table) -> None:
        """Draws the table, planned with the measured times of actions, and the measured timeline under it.

        Says so where no step was measured.
        """
        if not self._times:
            print(f"timeline  none: the run ended before {title.rpartition(', ')[2]}")
            return
        measured = self.spans(table)
        planned = plan(table, measured)
        rates = [f"bubble {bubble_rate(timeline):.1%}" for timeline in (planned.timeline, measured)]
        charts = [
            (f"{title}, planned with the measured times of actions: {rates[0]}", planned.timeline),
            (f"{title}, measured: {rates[1]}", measured),
        ]
        draw.save(path, charts)
        print(f"timeline  {path}: planned {rates[0]}, measured {rates[1]}")


def plan(table: Table, measured: Sequence[Span]) -> Simulation:
    """The table, simulated with the median times that each device's actions took."""

    def times(kind: int) -> list[float]:
        of_device = [[span.end - span.start for span in measured if span[:2] == (d, kind)] for d in devices]
        return [float(np.median(lengths or 0.0)) * table.num_chunks for lengths in of_device]

    devices = range(table.num_devices)
    backward = BW if any(span.kind == BW for span in measured) else B
    return simulate(table, Times(times(F), times(backward), times(W)))


def bubble_rate(timeline: Sequence[Span]) -> float:
    """The share of the devices' time, from the first start to the last end, in which they run no action."""
    makespan = max(span.end for span in timeline) - min(span.start for span in timeline)
    num_devices = 1 + max(span.device for span in timeline)
    return 1 - sum(span.end - span.start for span in timeline) / (makespan * num_devices)
