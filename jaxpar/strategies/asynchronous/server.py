"""Workers that send gradients to a server: sync, async, ssp, softsync.

The server holds the weights. It applies gradients in the order in which a transport delivers them, and publishes the
updated weights. Only the transport differs between emulated and live workers (transport.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core.loss_scale import find_scale
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.layout import Tree
from jaxpar.models.model import Params
from jaxpar.strategies.asynchronous.layouts import DeviceNumbers
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.programs import Arrival, Programs, Server, leaves, with_leaves
from jaxpar.strategies.asynchronous.table import UpdateTable
from jaxpar.strategies.asynchronous.transport import BeginTransport, Delivery, InFlight, Transport, Workers


@dataclass
class ServerRun:
    """State of training at a step. It is modified in place."""

    step: int  # the step, on the host
    key: jax.Array  # key of the run
    params: Params  # the newest weights, on the server's device
    server: Server  # the rest of the server's state, also on its device
    transport: Transport  # the transport to the workers


class ServerEngine:
    """Workers, and the server whose weights they update. It has the same methods as `LocalEngine` (local.py)."""

    def __init__(
        self,
        problem: Problem,
        mitigations: Mitigations,
        numbers: DeviceNumbers,
        devices: Sequence[jax.Device],
        at: jax.Device,
        begin: BeginTransport,
        *,
        is_grouped: bool,
    ):
        """devices: of the workers; at: the server's, which may be one of them; is_grouped: as in `Programs.server`."""
        self._problem, self._numbers, self._devices, self._at, self._begin = problem, numbers, devices, at, begin
        self._programs, self._is_grouped = Programs(problem, mitigations, numbers.num_workers), is_grouped
        self._run: ServerRun | None = None

    def start(self, state: State, private: Canonical | None = None) -> ServerRun:
        """Start a run from a canonical state on the server's device, which invalidates any earlier run.

        private: the result of `private` in this state, as arrays of any kind; None: nothing is in flight.
        """
        if self._run is not None:
            self._run.transport.close()
            self._run = None  # before the new run takes memory
        optimizer = jax.device_put(state.optimizer, self._at, may_alias=False)  # steps donate this copy
        server = self._programs.server(state.params, optimizer, self._at, is_grouped=self._is_grouped)
        workers = Workers(self._programs, self._numbers, self._devices, self._at, state.key)
        run = ServerRun(int(state.step), state.key, state.params, server, self._begin(workers, state))
        if private is not None:
            weights, waiting, mitigations = with_leaves(_arrays(run), private)
            run.server = server._replace(waiting=waiting, mitigations=mitigations)
            run.transport.restore(InFlight(weights, private))
        self._run = run
        return run

    def step(self, run: ServerRun, batch: Mapping[str, np.ndarray]) -> tuple[ServerRun, Metrics]:
        """Train on a batch, [B, ..] on the host, and return metrics of the gradients that arrived. `run` is donated."""
        chunks = self._programs.chunks(run.step, batch, self._at, find_scale(run.server.optimizer))
        run.server = run.server._replace(totals=self._programs.new_totals(self._at))
        run.step += 1
        is_last = run.step == self._problem.num_steps  # no later step could take the remaining gradients
        self._apply(run, run.transport.deliver(chunks, drain=is_last))
        return run, self._metrics(run)

    def _apply(self, run: ServerRun, deliveries: Iterator[Delivery]) -> None:
        for row, sent in deliveries:
            staleness, mean_share, size = map(np.float32, (row.staleness, row.mean_share, row.size))
            at = Arrival(staleness, mean_share, size, np.int32(run.step - 1))
            run.params, run.server = self._programs.arrive(row.is_first, row.is_last, run.params, run.server, sent, at)
            if row.is_last:
                run.transport.publish(run.params)

    def drain(self, run: ServerRun) -> Metrics:
        """Wait for in-flight gradients, as all methods below do, and return the last step's metrics with them."""
        self._apply(run, run.transport.deliver({}, drain=True))
        return self._metrics(run)

    def _metrics(self, run: ServerRun) -> Metrics:
        return self._programs.metrics(run.server.totals, find_scale(run.server.optimizer))

    def params(self, run: ServerRun) -> Params:
        """Return the weights to evaluate, on the server's device."""
        self.drain(run)
        return run.params

    def canonical(self, run: ServerRun) -> State:
        """Return the canonical state. It lacks gradients that the transport delivers only in a step."""
        self.drain(run)
        return State(jnp.int32(run.step), run.key, run.params, run.server.optimizer)

    def private(self, run: ServerRun) -> Canonical:
        """Return older weights, gradients that wait for their update, states of mitigations, and the record."""
        self.drain(run)
        return leaves(jax.device_put(_arrays(run), self._at)) | run.transport.in_flight().record

    def table(self, run: ServerRun) -> UpdateTable | None:
        """End the run and return the table of its updates; None if it made no step."""
        self.drain(run)
        run.transport.close()
        return run.transport.table()

    def lower(self, like: State) -> list[jax.stages.Lowered]:
        """Lower the programs of a step: the worker's on each device, and the server's. The weights come first."""
        return self._programs.lower(like, self._devices, [self._at], is_grouped=self._is_grouped)


def _arrays(run: ServerRun) -> tuple[Tree, Tree, Tree]:
    return run.transport.in_flight().weights, run.server.waiting, run.server.mitigations
