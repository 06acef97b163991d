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
    """One of the compiled programs that a step runs."""

    compiled: jax.stages.Compiled  # the compiled program
    # how often parts of the program run: for each named conditional, the fraction of steps in which each of its
    # branches is taken; for each named loop whose trip count varies, its mean alone
    frequencies: Mapping[str, tuple[float, ...]] = {}
    # the keys of Plan.memory that the first arguments belong to, if each argument is one part of the state
    arguments: tuple[str, ...] = ()
    # the branches that the devices take, for each named conditional in which they differ. The devices wait for each
    # other at the end of a clock
    branches: Mapping[str, DeviceBranches] = {}
    calls: tuple[ProgramCall, ...] = ()  # in a step; empty: one call, after the programs before it in the list
    mesh: Mesh | None = None  # its mesh; None: that of the plan

    @property
    def runs(self) -> int:
        """Number of times that a step runs the program."""
        return len(self.calls) or 1


class FromCanonical(Protocol[S_co]):
    """The function that converts a canonical state to the form of a strategy."""

    def __call__(self, tree: Canonical, private: Canonical | None = None, /) -> S_co:
        """Return the state on devices. The leaves of `tree` may be NumPy arrays.

        private: from `Strategy.to_private`; None or empty: initial private state. Raises UserError if the strategy
        cannot resume at this step without it.
        """


class Strategy(NamedTuple, Generic[S]):
    """The functions that train a problem on devices.

    `state` is in the form of the strategy, and `batch` is the result of `place`.
    """

    plan: Plan[object]  # the plan that it was built from
    devices: tuple[jax.Device, ...]  # those that it uses, in mesh order: stages of one replica are next to each other
    init: Callable[[jax.Array], S]  # key -> state
    place: Callable[[Mapping[str, np.ndarray]], Any]  # this host's examples of a batch -> batch on devices
    # (state, batch) -> (state, metrics); donates the state, unless plan.keeps_previous
    step: Callable[[S, Any], tuple[S, Metrics]]
    evaluate: Callable[[S, Any], Sums]  # (state, batch) -> metric sums
    to_canonical: Callable[[S], Canonical]  # state -> canonical state
    from_canonical: FromCanonical[S]  # (canonical state, private=None) -> state
    # () -> the programs of a step, compiled from shapes for the problem's batch, without running them
    compile: Callable[[], list[CompiledProgram]]
    to_private: Callable[[S], Canonical] = lambda _state: {}  # state -> private state, which the canonical state lacks
    # state -> number of the last batches whose gradients are not in all weights yet
    num_in_flight: Callable[[S], int] = lambda _state: 0
    # state -> metrics of the last step, after waiting for gradients that arrive late; None if none can be late
    drain: Callable[[S], Metrics | None] = lambda _state: None
    # (state, workdir) -> results for result.json; called at the end of a run, it may write files to workdir
    report: Callable[[S, Path], Mapping[str, Any]] = lambda _state, _workdir: {}
    # (state, completed steps, workdir) -> (state, completed steps) at which a run begins or continues. Called once,
    # before the first step. A run that joins others can begin later than at step 0
    begin: Callable[[S, int, Path], tuple[S, int]] = lambda state, step, _workdir: (state, step)
    # () -> {title: actions of a step by device}, planned and, if a step was measured, measured; for charts
    timelines: Callable[[], Mapping[str, Sequence[Span]]] = lambda: {}


class StrategyModule(Protocol[Source, Details]):
    """A module of this package that implements a strategy."""

    def decide(self, config: ConfigDict, cluster: Cluster, model: Model | None, /) -> Decision[Source]:
        """Decide on the mesh and the batch divisor, before any data is read. Pure, but reads the files of the config.

        model: a model with the layers of the run, of which only names, order and ties matter; None if not known yet.

        Raises UserError if this strategy cannot run the config on this cluster.
        """

    def plan(
        self, config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[Source], /
    ) -> Plan[Details]:
        """Plan the strategy from its decision and the shapes, without touching a device or compiling anything.

        Raises UserError if this strategy cannot train these shapes.
        """

    def build(self, plan: Plan[Details], problem: Problem, devices: Sequence[jax.Device], /) -> Strategy[Any]:
        """Build the strategy on the first plan.num_devices devices, without compiling anything yet."""
