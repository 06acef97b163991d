"""The contract of asynchronous training: what the strategy asks of an engine, whatever its policy and transport."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

import jax
import numpy as np

from jaxpar.asynchronous.table import UpdateTable
from jaxpar.models.model import Params
from jaxpar.state import Canonical, State
from jaxpar.step import Metrics

EngineRun = TypeVar("EngineRun")


class UpdateEngine(Protocol[EngineRun]):
    """Workers and what they update, on devices. `EngineRun` is training at a step, in the engine's form.

    `ServerEngine` (server.py) has one set of weights, which gradients reach by a transport: virtual time, threads or
    another (transport.py). `LocalEngine` (local.py) has a set of weights for each worker.
    """

    def start(self, state: State, private: Canonical | None = None) -> EngineRun:
        """Start a run. One that this engine has started before is over.

        Args:
          state: canonical, on the server's device; all workers begin with it.
          private: what `private` returned for a run in this state, as arrays of any kind; None: nothing is in flight.
        """

    def step(self, run: EngineRun, batch: Mapping[str, np.ndarray]) -> tuple[EngineRun, Metrics]:
        """Train on a batch, [B, ..] on the host, and return metrics of the gradients that have arrived in this step.

        The old run is void.

        Raises:
          RuntimeError: another run has started.
        """

    def params(self, run: EngineRun) -> Params:
        """Return the weights to evaluate, on the server's device."""

    def canonical(self, run: EngineRun) -> State:
        """Return the canonical state. What is in flight is not in it, unless the transport lets it arrive first."""

    def private(self, run: EngineRun) -> Canonical:
        """Return what is not in the canonical state: what is in flight, states of mitigations, and the record."""

    def table(self, run: EngineRun) -> UpdateTable | None:
        """End the run and return who did what in it; None where it made no step."""

    def lower(self, like: State) -> list[jax.stages.Lowered]:
        """Lower the programs of a step from shapes: a worker's on each device, and those that update weights.

        Their first arguments are the weights.

        Args:
          like: the state, abstract.
        """
