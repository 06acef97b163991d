"""The contracts of strategies: the module that plans and builds a strategy, and the strategy once it is built."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core.plan import Decision, Plan
from jaxpar.core.state import Canonical
from jaxpar.core.step import Metrics, Problem
from jaxpar.models.model import Model
from jaxpar.strategies.pipeline.executor.enqueue import ProgramCall
from jaxpar.strategies.pipeline.executor.lowering import DeviceBranches
from jaxpar.strategies.pipeline.tables.simulate import Span
from jaxpar.tasks import Sums

S = TypeVar("S")  # a state, in the form of the strategy
S_co = TypeVar("S_co", covariant=True)
Source = TypeVar("Source")  # passed from `decide` to `plan`
Details = TypeVar("Details")  # passed from `plan` to `build`


class CompiledProgram(NamedTuple):
    """One of the compiled programs that a step runs.

    Attributes:
      compiled: the compiled program.
      frequencies: how often parts of the program run: for each named conditional, the fraction of steps in which each
        of its branches is taken; for each named loop whose trip count varies, its mean alone.
      arguments: the keys of Plan.memory that the first arguments belong to, if each argument is one part of the state.
      branches: the branches that the devices take, for each named conditional in which they differ. The devices wait
        for each other at the end of a clock.
      calls: the calls of the program in a step; empty: one call, after the programs before it in the list.
      mesh: its mesh; None: that of the plan.
    """

    compiled: jax.stages.Compiled
    frequencies: Mapping[str, tuple[float, ...]] = {}
    arguments: tuple[str, ...] = ()
    branches: Mapping[str, DeviceBranches] = {}
    calls: tuple[ProgramCall, ...] = ()
    mesh: Mesh | None = None

    @property
    def runs(self) -> int:
        """Number of times that a step runs the program."""
        return len(self.calls) or 1


class FromCanonical(Protocol[S_co]):
    """The function that converts a canonical state to the form of a strategy."""

    def __call__(self, tree: Canonical, private: Canonical | None = None, /) -> S_co:
        """Return the state on devices.

        Args:
          tree: the canonical state; leaves may be NumPy arrays.
          private: private state from `Strategy.to_private`; None or empty: initial private state.

        Raises:
          UserError: the strategy cannot resume at this step without its private state.
        """


class Strategy(NamedTuple, Generic[S]):
    """The functions that train a problem on devices.

    `state` is in the form of the strategy, and `batch` is the result of `place`.

    Attributes:
      plan: the plan that it was built from.
      devices: the devices that it uses, in mesh order: stages of one replica are next to each other.
      init: key -> state.
      place: this host's examples of a batch -> batch on devices.
      step: (state, batch) -> (state, metrics); the old state is donated.
      evaluate: (state, batch) -> metric sums.
      to_canonical: state -> canonical state.
      from_canonical: (canonical state, private=None) -> state.
      compile: () -> the programs of a step, compiled from shapes for the problem's batch, without running them.
      to_private: state -> the private state, which the canonical state lacks.
      num_in_flight: state -> number of the last batches whose gradients are not in all weights yet.
      drain: state -> metrics of the last step, after waiting for gradients that arrive late; None if none can be late.
      report: (state, workdir) -> results for result.json; called at the end of a run, it may write files to workdir.
      timelines: () -> {title: actions of a step by device}, planned and, if a step was measured, measured; for charts.
    """

    plan: Plan[object]
    devices: tuple[jax.Device, ...]
    init: Callable[[jax.Array], S]
    place: Callable[[Mapping[str, np.ndarray]], Any]
    step: Callable[[S, Any], tuple[S, Metrics]]
    evaluate: Callable[[S, Any], Sums]
    to_canonical: Callable[[S], Canonical]
    from_canonical: FromCanonical[S]
    compile: Callable[[], list[CompiledProgram]]
    to_private: Callable[[S], Canonical] = lambda _state: {}
    num_in_flight: Callable[[S], int] = lambda _state: 0
    drain: Callable[[S], Metrics | None] = lambda _state: None
    report: Callable[[S, Path], Mapping[str, Any]] = lambda _state, _workdir: {}
    timelines: Callable[[], Mapping[str, Sequence[Span]]] = lambda: {}


class StrategyModule(Protocol[Source, Details]):
    """A module of this package that implements a strategy."""

    def decide(self, config: ConfigDict, cluster: Cluster, model: Model | None, /) -> Decision[Source]:
        """Decide on the mesh and the batch divisor, before any data is read.

        The function is pure, except that it reads each file that the config names once.

        Args:
          config: the config of the run.
          cluster: the cluster to run on.
          model: a model with the layers of the run, of which only the names, order and ties matter; None if not known
            yet.

        Raises:
          UserError: this strategy cannot run the config on this cluster.
        """

    def plan(
        self, config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[Source], /
    ) -> Plan[Details]:
        """Plan the strategy, without touching a device or compiling anything.

        Args:
          config: the config of the run.
          shapes: the problem: shapes of the model and the batch, the optimizer and the task.
          cluster: the cluster to run on.
          decision: result of `decide` for this config and cluster.

        Raises:
          UserError: this strategy cannot train these shapes.
        """

    def build(self, plan: Plan[Details], problem: Problem, devices: Sequence[jax.Device], /) -> Strategy[Any]:
        """Build the strategy on the first plan.num_devices devices, without compiling anything yet."""
