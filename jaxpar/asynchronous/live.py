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

from jaxpar.asynchronous.programs import Arrival, Chunk, Cures, Programs, Server, leaves, new_totals, with_leaves
from jaxpar.asynchronous.table import COLUMNS, TIMES, Table
from jaxpar.models.model import Params
from jaxpar.state import Canonical, State
from jaxpar.step import Metrics, Problem


class Run:
    """Workers and their server. What they share is read and written under `_changed` alone."""

    def __init__(self, programs: Programs, state: State, devices: Sequence[jax.Device], bound: float, slowdown: float):
        """As `Engine`."""
        self._programs, self._devices, self._bound, self._slowdown = programs, devices, bound, slowdown
        self.key, self.params, self.num_steps = state.key, state.params, int(state.step)
        optimizer = jax.device_put(state.optimizer, devices[0], may_alias=False)
        self.server: Server = programs.server(state.params, optimizer, devices[0], is_grouped=False)
        self.rows: list[tuple[float, ...]] = []  # of the table: as COLUMNS
        self._changed = threading.Condition()
        self._chunks = deque[tuple[int, Chunk]]()
        self._completed = [0] * programs.num_workers  # gradients of each
        self._num_hungry = self._num_computing = 0  # workers that wait for a part of a batch; that have one
        self._is_over, self._error = False, list[BaseException]()
        self._begin, self._threads = time.perf_counter(), list[threading.Thread]()

    def step(self, batch: Mapping[str, np.ndarray]) -> Metrics:
        """Gives out a batch; the figures are of the gradients that have come since the last one was."""
        with self._changed:
            if self._is_over:
                raise RuntimeError("this live run is over: another one has begun")
            if not self._threads:
                workers = range(self._programs.num_workers)
                self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in workers]
                for thread in self._threads:
                    thread.start()
            self._chunks.extend(self._programs.chunks(self.num_steps, batch, self._devices[0]).items())
            self.num_steps += 1
            self._changed.notify_all()
            self._wait_for(lambda: not self._chunks and self._num_hungry > 0)
            metrics = self._programs.metrics(self.server.totals)
            self.server = self.server._replace(totals=new_totals(self._devices[0]))
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
            self._changed.wait_for(lambda: self._is_over or ahead - min(self._completed) <= self._bound)
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
        device = self._devices[worker % len(self._devices)]
        read = jax.device_put(params, device)
        given = jax.device_put((self.key, np.int32(chunk.step), chunk.rows, chunk.weight), device)
        made = jax.block_until_ready(self._programs.gradient(read, *given))
        if worker == self._programs.num_workers - 1 and self._completed[worker]:  # the first one compiles
            time.sleep((self._slowdown - 1) * (self._now() - start))
        sent = jax.device_put((*made, params if self._programs.cures.needs_read else None), self._devices[0])
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


class Engine:
    """Live workers."""

    is_grouped = False

    def __init__(
        self,
        problem: Problem,
        cures: Cures,
        num_workers: int,
        devices: Sequence[jax.Device],
        *,
        bound: float = math.inf,
        slowdown: float = 1.0,
    ):
        """devices: of the workers, the first the server's too; bound: of ssp; slowdown: of the last worker."""
        self.programs, self.num_workers = Programs(problem, cures, num_workers), num_workers
        self._devices, self._bound, self._slowdown = devices, bound, slowdown
        self._run: Run | None = None

    def start(self, state: State) -> Run:
        """Of a canonical state. A run that this engine has begun before is over."""
        if self._run is not None:
            self._run.stop()
        self._run = Run(self.programs, state, self._devices, self._bound, self._slowdown)
        return self._run

    def step(self, run: Run, batch: Mapping[str, np.ndarray]) -> tuple[Run, Metrics]:
        """Gives out a batch."""
        return run, run.step(batch)

    def params(self, run: Run) -> Params:
        """The weights with all that workers have sent, on the first device."""
        run.settle()
        return run.params

    def canonical(self, run: Run) -> State:
        """Of what all workers have sent."""
        run.settle()
        server = jax.tree.map(jnp.copy, run.server.optimizer)  # the run goes on, and donates its own
        return State(jnp.int32(run.num_steps), run.key, run.params, server)

    def private(self, run: Run) -> Canonical:
        """What cures remember, and the table."""
        run.settle()
        private = leaves(jax.tree.map(jnp.copy, run.server.cures))
        for column, values in zip(COLUMNS, zip(*run.rows, strict=True), strict=False):
            private[column] = np.array(values, np.float64).view(np.uint32)  # checkpoints have no float64
        return private

    def restored(self, run: Run, private: Canonical) -> Run:
        """A run that `start` has begun, with what `private` had."""
        run.server = run.server._replace(cures=with_leaves(run.server.cures, private))
        columns = [np.asarray(private[column]).view(np.float64).tolist() for column in COLUMNS if column in private]
        run.go_on_from(list(zip(*columns, strict=True)))
        return run

    def table(self) -> Table:
        """What workers did, at the end of the run."""
        assert self._run is not None
        self._run.settle()
        self._run.stop()
        columns = [np.array(values) for values in zip(*self._run.rows, strict=True)]
        typed = [x.astype("f8" if name in TIMES else "i4") for name, x in zip(COLUMNS, columns, strict=True)]
        return Table(self.num_workers, *typed)
