"""The transport of live runs: each worker is a thread that computes on its device. Gradients are applied on arrival.

A step ends when all its shards are assigned and a worker is ready for more. Other workers may still be computing; their
gradients belong to the next step, unless the run is drained. The run is recorded as a table, and virtual time
(virtual_time.py) computes bitwise the same weights from that table, because the programs are the same.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from queue import SimpleQueue

import jax

from jaxpar.core.state import State
from jaxpar.models.model import Params
from jaxpar.strategies.asynchronous.programs import Chunk, SentGradient
from jaxpar.strategies.asynchronous.transport import Assignment, Delivery, LiveTransport, Workers


class Threads(LiveTransport):
    """A `Transport`. Only the server's thread accesses the queue; workers receive assignments and return results."""

    def __init__(self, workers: Workers, state: State, *, bound: float, slowdown: float):
        """Start no threads yet. slowdown: factor on the time of the last worker, at least 1."""
        super().__init__(workers, state, bound=bound)
        self._slowdown = slowdown
        self._assignments = [SimpleQueue[tuple[Assignment, Params] | None]() for _ in self._completed]
        # results: the gradient on the server's device, or the error that the worker raised
        self._answers = SimpleQueue[tuple[Assignment, SentGradient | BaseException]]()
        self._has_begun = False
        self._compiled = set[tuple[tuple[int, ...], ...]]()  # shapes of shards compiled by the slow worker
        self._is_closed = False
        self._error: BaseException | None = None

    def deliver(self, chunks: Mapping[int, Chunk], *, drain: bool) -> Iterator[Delivery]:
        """Yield gradients as they arrive. Raises the error of a worker."""
        if chunks:
            if self._is_closed:
                raise RuntimeError("this live run is over, because another one has started")
            if not self._has_begun:
                self._has_begun = True
                for worker in range(len(self._completed)):
                    threading.Thread(target=self._work, args=(worker,), name=f"worker {worker}", daemon=True).start()
            self.give_out(chunks)
        while True:
            if self._answers.empty():  # otherwise newer weights are about to be published
                while (assignment := self.assign()) is not None:
                    self._assignments[assignment.worker].put((assignment, self._params))
                if self.is_over(drain=drain):
                    return
            if self._error is not None:
                raise self._error
            assignment, sent = self._answers.get()
            if isinstance(sent, BaseException):
                self._error = sent
                raise sent
            yield self.arrived(assignment), sent
            self.applied(assignment)

    def close(self) -> None:
        """End the threads."""
        self._is_closed = True
        for assignments in self._assignments:
            assignments.put(None)

    def _work(self, worker: int) -> None:
        while (assigned := self._assignments[worker].get()) is not None:
            try:
                sent: SentGradient | BaseException = self._compute(*assigned)
            except BaseException as error:  # the server's thread raises it
                sent = error
            self._answers.put((assigned[0], sent))

    def _compute(self, assignment: Assignment, params: Params) -> SentGradient:
        """Return a gradient, on the server's device. params: on the server's device, too."""
        worker, chunk = assignment.worker, assignment.chunk
        read = jax.device_put(params, self._workers.device_of(worker))
        is_slow = worker == len(self._completed) - 1 and self._slowdown > 1
        shapes = tuple(x.shape for x in chunk.examples.values())
        if is_slow and shapes not in self._compiled:  # compile first, so that compilation is not slowed down
            jax.block_until_ready(self._workers.compute(worker, read, chunk))
            self._compiled.add(shapes)
        begin = time.perf_counter()
        made = jax.block_until_ready(self._workers.compute(worker, read, chunk))
        if is_slow:
            time.sleep((self._slowdown - 1) * (time.perf_counter() - begin))
        return self._workers.send(made, params)
