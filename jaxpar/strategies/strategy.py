"""The contracts of a strategy: the module that plans and builds it, and what it is once it is built."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.errors import Refusals
from jaxpar.models.model import Model
from jaxpar.plan import Decision, Plan
from jaxpar.state import Canonical
from jaxpar.step import Metrics, Problem
from jaxpar.tasks import Sums

S = TypeVar("S")  # a state, in the strategy's own form
S_co = TypeVar("S_co", covariant=True)
Source = TypeVar("Source")  # what `decide` hands on to `plan`
Details = TypeVar("Details")  # and `plan` to `build`


class CompiledProgram(NamedTuple):
    """A compiled program of a step.

    Attributes:
      compiled: what XLA made of it.
      branches: by the name of a conditional, in which share of the steps each of its branches is taken.
      arguments: kinds of bytes, as in Plan.memory, of its first arguments, where these are parts of a state on their
        own.
    """

    compiled: jax.stages.Compiled
    branches: Mapping[str, tuple[float, ...]] = {}
    arguments: tuple[str, ...] = ()


class FromCanonical(Protocol[S_co]):
    """What makes a strategy's state of a canonical one."""

    def __call__(self, tree: Canonical, private: Canonical | None = None, /) -> S_co:
        """Return the state on devices.

        Args:
          tree: canonical; leaves may be NumPy arrays.
          private: what `Strategy.to_private` returned for such a state; None or empty: fresh.

        Raises:
          UserError: the strategy cannot go on from this step without its private state.
        """


class Strategy(NamedTuple, Generic[S]):
    """How a problem is trained on some devices. `state` has the strategy's own form; `batch` is what `place` returns.

    Attributes:
      plan: that it was built of.
      devices: that it uses, in the order of the mesh: stages of one replica next to each other.
      init: key -> state.
      place: this host's examples of a batch -> batch on devices.
      step: (state, batch) -> (state, metrics); the old state is donated.
      evaluate: (state, batch) -> sums.
      to_canonical: state -> canonical state.
      from_canonical: (canonical state, private=None) -> state.
      compile: () -> a step's programs, for the problem's batch, from shapes alone, without running them.
      to_private: state -> what of it is not in the canonical state.
      report: (state, workdir) -> results for result.json; writes what it has to show at the end of a run.
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
    report: Callable[[S, Path], Mapping[str, Any]] = lambda _state, _workdir: {}


class StrategyModule(Protocol[Source, Details]):
    """A module of this package: one file a strategy."""

    def decide(self, config: ConfigDict, cluster: Cluster, model: Model | None, /) -> Refusals[Decision[Source]]:
        """Decide what can be decided before data is read. Pure; reads each file that the config names once.

        Refuses a config that this strategy cannot run on this cluster.

        Args:
          config: of the run.
          cluster: to run on.
          model: of the run's layers, whatever its sizes; None where it is not known yet.
        """

    def plan(
        self, config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[Source], /
    ) -> Refusals[Plan[Details]]:
        """Plan the strategy: no device is touched, nothing is compiled.

        Refuses shapes that this strategy cannot train.

        Args:
          config: of the run.
          shapes: what is trained: a model and a batch in shapes, and an optimizer.
          cluster: to run on.
          decision: what `decide` returned for this config and cluster.
        """

    def build(self, plan: Plan[Details], problem: Problem, devices: Sequence[jax.Device], /) -> Strategy[Any]:
        """Build the strategy on the first plan.num_devices devices. Compiles nothing yet."""
