"""Asynchronous training for real: a thread for each worker, and a server that applies gradients as they come.

Workers take parts of batches from a queue, in order, and weights as they are at that time; nobody waits for others,
but where a bound on how far workers may be ahead of each other is asked for (ssp). What they did is a table in the end,
and jaxpar/asynchronous/server.py makes of that table the same weights, bitwise: they call the same programs.

A step ends when its batch is given out and a worker asks for more. Other workers may still compute then: what they
send belongs to the next step, or to this one where the state is asked for, for which all are waited for.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.asynchronous.programs import Arrival, Chunk, Mitigations, Programs, Server, leaves, with_leaves
from jaxpar.asynchronous.table import COLUMNS, TIMES, UpdateTable
from jaxpar.models.model import Params
from jaxpar.state import Canonical, State, nbytes
from jaxpar.step import Metrics, Problem


class LiveRun:
    """Workers and their server. What they share is read and written under `_changed` alone."""

    def __init__(self, engine: "LiveEngine", state: State):
        """Of an engine, from a canonical state."""
        self._engine, self._programs, self._at = engine, engine.programs, engine.at
        self.key, self.params, self.num_steps = state.key, state.params, int(state.step)
        optimizer = jax.device_put(state.optimizer, self._at, may_alias=False)
        self.server: Server = self._programs.server(state.params, optimizer, self._at, is_grouped=False)
        self.rows: list[tuple[float, ...]] = []  # of the table: as COLUMNS
        self._changed = threading.Condition()
        self._chunks = deque[tuple[int, Chunk]]()
        self._completed = [0] * engine.num_workers  # gradients of each
        self._num_hungry = self._num_computing = 0  # workers that wait for a part of a batch; that have one
        self._is_over, self._error = False, list[BaseException]()
        self._compiled = set[tuple[tuple[int, ...], ...]]()  # shapes of batches, by the worker that is slow
        self._begin, self._threads = time.perf_counter(), list[threading.Thread]()

    def step(self, batch: Mapping[str, np.ndarray]) -> Metrics:
        """Gives out a batch; the figures are of the gradients that have come since the last one was."""
        with self._changed:
            if self._is_over:
                raise RuntimeError("this live run is over: another one has begun")
            if not self._threads:
                for i in range(self._engine.num_workers):
                    self._threads.append(
                        threading.Thread(target=self._work, args=(i,), name=f"worker {i}", daemon=True)
                    )
                    self._threads[-1].start()
            self._chunks.extend(self._programs.chunks(self.num_steps, batch, self._at).items())
            self.num_steps += 1
            self._changed.notify_all()
            self._wait_for(lambda: not self._chunks and self._num_hungry > 0)
            if self.num_steps == self._engine.num_steps:  # what comes now is of this step or of none
                self.settle()
            metrics = self._programs.metrics(self.server.totals)
            self.server = self.server._replace(totals=self._programs.new_totals(self._at))
            return metrics

    def settle(self) -> None:
        """Waits for what workers compute."""
        with self._changed:
            self._wait_for(lambda: self._num_computing == 0)

    def stop(self) -> None:
        """Sends the workers home."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Raises what a worker has raised."""
        self._changed.wait_for(lambda: self._error or condition())
        if self._error:
            raise self._error[0]

    def _work(self, worker: int) -> None:
        """A worker's thread."""
        try:
            while (task := self._take(worker)) is not None:
                self._compute(worker, *task)
        except BaseException as error:  # for the thread that waits for this one
            with self._changed:
                self._error.append(error)
                self._changed.notify_all()

    def _take(self, worker: int) -> tuple[int, Chunk, int, Params, float] | None:
        """A part of a batch, the version of the weights and them, and the time; None: all is over."""
        with self._changed:
            ahead = self._completed[worker]
            self._changed.wait_for(lambda: self._is_over or ahead - min(self._completed) <= self._engine.bound)
            self._num_hungry += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self._chunks)
            self._num_hungry -= 1
            if self._is_over:
                return None
            self._num_computing += 1
            return *self._chunks.popleft(), len(self.rows), self.params, self._now()

    def _compute(self, worker: int, number: int, chunk: Chunk, version: int, params: Params, start: float) -> None:
        """A gradient, and its update."""
        device = self._engine.devices[worker % len(self._engine.devices)]
        read = jax.device_put(params, device)
        given = jax.device_put((self.key, np.int32(chunk.step), chunk.rows, chunk.weight), device)
        is_slow = worker == self._engine.num_workers - 1 and self._engine.slowdown > 1
        shapes = tuple(x.shape for x in chunk.rows.values())
        if is_slow and shapes not in self._compiled:  # what compiling takes is not slowed
            jax.block_until_ready(self._programs.gradient(read, *given))
            self._compiled.add(shapes)
        begin = self._now()
        made = jax.block_until_ready(self._programs.gradient(read, *given))
        if is_slow:
            time.sleep((self._engine.slowdown - 1) * (self._now() - begin))
        sent = jax.device_put((*made, params if self._programs.mitigations.needs_read else None), self._at)
        with self._changed:
            update = len(self.rows)
            staleness = np.float32(update - version)
            at = Arrival(staleness, staleness, np.float32(1), np.int32(self.num_steps - 1))
            self.params, self.server = self._programs.arrive(True, True, self.params, self.server, *sent, at)
            self.rows.append((worker, version, update, number, self.num_steps - 1, start, self._now()))
            self._completed[worker] += 1
            self._num_computing -= 1
            self._changed.notify_all()

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def go_on_from(self, rows: list[tuple[float, ...]]) -> None:
        """Where a run of these rows was stopped."""
        self.rows = rows
        self._completed = np.bincount([int(row[0]) for row in rows], minlength=len(self._completed)).tolist()
        self._begin -= rows[-1][-1] if rows else 0.0


class LiveEngine:
    """Live workers."""

    is_grouped = False

    def __init__(
        self,
        problem: Problem,
        mitigations: Mitigations,
        num_workers: int,
        devices: Sequence[jax.Device],
        *,
        at: jax.Device,
        bound: float = math.inf,
        slowdown: float = 1.0,
    ):
        """devices: of the workers; at: the server's, which may be one of them; bound: of ssp; slowdown: of the last."""
        self.programs, self.num_workers, self.num_steps = (
            Programs(problem, mitigations, num_workers),
            num_workers,
            problem.num_steps,
        )
        self.devices, self.at, self.bound, self.slowdown = devices, at, bound, slowdown
        self._run: LiveRun | None = None

    def start(self, state: State) -> LiveRun:
        """Of a canonical state. A run that this engine has begun before is over."""
        if self._run is not None:
            self._run.stop()
        self._run = LiveRun(self, state)
        return self._run

    def step(self, run: LiveRun, batch: Mapping[str, np.ndarray]) -> tuple[LiveRun, Metrics]:
        """Gives out a batch."""
        return run, run.step(batch)

    def memory(self, like: State) -> dict[jax.Device, dict[str, int]]:
        """Bytes by device; a worker has the weights that it has read, and the server too. like: abstract."""
        kept = [len(range(place, self.num_workers, len(self.devices))) for place in range(len(self.devices))]
        memory = self.programs.memory(like, self.devices, self.at, kept, is_grouped=self.is_grouped)
        memory[self.at]["history"] = self.num_workers * nbytes(like.params)
        return memory

    def sent(self) -> float:
        """Weights and gradients that go to the server's device and from it in a step, to and from workers of others."""
        elsewhere = sum(self.devices[worker % len(self.devices)] != self.at for worker in range(self.num_workers))
        return elsewhere * (3 if self.programs.mitigations.needs_read else 2)

    def params(self, run: LiveRun) -> Params:
        """The weights with all that workers have sent, on the server's device."""
        run.settle()
        return run.params

    def canonical(self, run: LiveRun) -> State:
        """Of what all workers have sent."""
        run.settle()
        server = jax.tree.map(jnp.copy, run.server.optimizer)  # the run goes on, and donates its own
        return State(jnp.int32(run.num_steps), run.key, run.params, server)

    def private(self, run: LiveRun) -> Canonical:
        """What mitigations remember, and the table."""
        run.settle()
        private = leaves(jax.tree.map(jnp.copy, run.server.mitigations))
        for column, values in zip(COLUMNS, zip(*run.rows, strict=True), strict=False):
            private[column] = np.array(values, np.float64).view(np.uint32)  # checkpoints have no float64
        return private

    def restored(self, run: LiveRun, private: Canonical) -> LiveRun:
        """A run that `start` has begun, with what `private` had."""
        run.server = run.server._replace(mitigations=with_leaves(run.server.mitigations, private))
        columns = [np.asarray(private[column]).view(np.float64).tolist() for column in COLUMNS if column in private]
        run.go_on_from(list(zip(*columns, strict=True)))
        return run

    def table(self, run: LiveRun) -> UpdateTable | None:
        """What workers did, at the end of the run; None where they did nothing."""
        run.settle()
        run.stop()
        if not run.rows:
            return None
        columns = [np.array(values) for values in zip(*run.rows, strict=True)]
        typed = [x.astype("f8" if name in TIMES else "i4") for name, x in zip(COLUMNS, columns, strict=True)]
        return UpdateTable(self.num_workers, *typed)
