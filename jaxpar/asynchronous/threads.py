"""The transport of live runs: a thread for each worker, each with its device; the first gradient that is there comes.

A step ends when its chunks are given out and a worker asks for more. Others may still compute then: what they send
belongs to the next step, unless the run is drained. What workers did is a table in the end, and virtual time
(virtual_time.py) makes of that table the same weights, bitwise: the programs are the same.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import NamedTuple

import jax

from jaxpar.asynchronous.live_schedule import Assignment
from jaxpar.asynchronous.programs import Chunk
from jaxpar.asynchronous.transport import Delivery, LiveTransport, SentGradient, Workers
from jaxpar.models.model import Params
from jaxpar.state import State


class Answer(NamedTuple):
    """The answer of a worker's thread: its assignment, and the gradient on the server's device, or the error."""

    assignment: Assignment
    sent: SentGradient | BaseException


class Threads(LiveTransport):
    """A `Transport`. The server's thread alone sees the schedule; workers get assignments and send answers."""

    def __init__(self, workers: Workers, state: State, *, bound: float, slowdown: float):
        """bound: iterations that a worker may be ahead of the slowest; slowdown: of the last worker, at least 1."""
        super().__init__(workers, state, bound=bound)
        self._slowdown = slowdown
        self._assignments = [SimpleQueue[tuple[Assignment, Params] | None]() for _ in range(workers.number)]
        self._answers = SimpleQueue[Answer]()
        self._threads: list[threading.Thread] = []
        self._compiled = set[tuple[tuple[int, ...], ...]]()  # shapes of chunks, by the slow worker
        self._is_closed = False
        self._error: BaseException | None = None

    def deliver(self, chunks: Mapping[int, Chunk], *, drain: bool) -> Iterator[Delivery]:
        """Yield gradients as they come. Raises what a worker has raised."""
        if chunks:
            if self._is_closed:
                raise RuntimeError("this live run is over: another one has started")
            self._start()
            self._schedule.give_out(chunks)
        while True:
            if self._answers.empty():  # else the weights are about to be newer
                self._assign()
                if self._schedule.is_over(drain=drain):
                    return
            assignment, sent = self._receive()
            yield Delivery(self._schedule.arrived(assignment), *sent)
            self._schedule.applied(assignment)

    def close(self) -> None:
        """End the threads."""
        self._is_closed = True
        for assignments in self._assignments:
            assignments.put(None)

    def _start(self) -> None:
        if not self._threads:
            for worker in range(self._workers.number):
                thread = threading.Thread(target=self._work, args=(worker,), name=f"worker {worker}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _assign(self) -> None:
        while (assignment := self._schedule.assign()) is not None:
            self._assignments[assignment.worker].put((assignment, self._params))

    def _receive(self) -> tuple[Assignment, SentGradient]:
        if self._error is None:
            assignment, sent = self._answers.get()
            if not isinstance(sent, BaseException):
                return assignment, sent
            self._error = sent
        raise self._error

    def _work(self, worker: int) -> None:
        """A worker's thread."""
        while (assigned := self._assignments[worker].get()) is not None:
            try:
                sent: SentGradient | BaseException = self._compute(*assigned)
            except BaseException as error:  # for the server's thread, which raises it
                sent = error
            self._answers.put(Answer(assigned[0], sent))

    def _compute(self, assignment: Assignment, params: Params) -> SentGradient:
        """Return a gradient, on the server's device. params: as the server has them."""
        worker, chunk = assignment.worker, assignment.chunk
        read = jax.device_put(params, self._workers.device_of(worker))
        is_slow = worker == self._workers.number - 1 and self._slowdown > 1
        shapes = tuple(x.shape for x in chunk.examples.values())
        if is_slow and shapes not in self._compiled:  # compiling is not slowed
            jax.block_until_ready(self._workers.compute(worker, read, chunk))
            self._compiled.add(shapes)
        begin = time.perf_counter()
        made = jax.block_until_ready(self._workers.compute(worker, read, chunk))
        if is_slow:
            time.sleep((self._slowdown - 1) * (time.perf_counter() - begin))
        return self._workers.send(made, params)
