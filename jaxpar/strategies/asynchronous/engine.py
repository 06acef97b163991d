"""The contract between the strategy of asynchronous training and its engines, for any policy and transport."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

import jax
import numpy as np

from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics
from jaxpar.models.model import Params
from jaxpar.strategies.asynchronous.table import UpdateTable

EngineRun = TypeVar("EngineRun")


class UpdateEngine(Protocol[EngineRun]):
    """Workers, and the weights that they update, on devices. `EngineRun` is the engine's state of training at a step.

    `ServerEngine` (server.py) has one set of weights, which gradients reach by a transport: virtual time, threads or
    another (transport.py). `LocalEngine` (local.py) has a set of weights for each worker.
    """

    def start(self, state: State, private: Canonical | None = None) -> EngineRun:
        """Start a run. Starting a new run invalidates any earlier run of this engine.

        Args:
          state: canonical, on the server's device; all workers start from it.
          private: the result of `private` for a run in this state, as arrays of any kind; None: nothing is in flight.
        """

    def step(self, run: EngineRun, batch: Mapping[str, np.ndarray]) -> tuple[EngineRun, Metrics]:
        """Train on a batch, [B, ..] on the host, and return metrics of the gradients that arrived in this step.

        The run that was passed is no longer valid.

        Raises:
          RuntimeError: another run has started.
        """

    def drain(self, run: EngineRun) -> Metrics | None:
        """Wait for in-flight gradients, and return the last step's metrics, which count them.

        None if no gradient can be in flight. The other methods that read the run drain it, too, but return no metrics.
        """

    def params(self, run: EngineRun) -> Params:
        """Return the weights to evaluate, on the server's device."""

    def canonical(self, run: EngineRun) -> State:
        """Return the canonical state. It excludes in-flight gradients, unless the transport delivers them first."""

    def private(self, run: EngineRun) -> Canonical:
        """Return the state that is not canonical: in-flight work, states of mitigations, and the record of the run."""

    def table(self, run: EngineRun) -> UpdateTable | None:
        """End the run and return the table of its updates; None if it made no step."""

    def lower(self, like: State) -> list[jax.stages.Lowered]:
        """Lower the programs of a step from shapes: the worker's on each device, and those that update weights.

        The first argument of each program is the weights.

        Args:
          like: the state, abstract.
        """
