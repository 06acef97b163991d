"""A training step of a pipeline that never drains, whose stages are dispatched as programs of their own.

The table is periodic (jaxpar/strategies/pipeline/tables/periodic.py): in a step, a batch enters, and every stage works
on the batches that are in flight. A group (columns.py) is updated by an action of its own, U: one program, which
averages the gradient over the replicas of the pipeline and takes the optimizer step. The numbers are those of
continuous.py.

A version of the weights is one tree of arrays. Earlier versions are kept until their last action has been enqueued, and
what is in flight is what actions have made for later ones, so that nothing is copied between steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics
from jaxpar.launch import processes
from jaxpar.layout import Tree
from jaxpar.models.model import Params
from jaxpar.strategies.pipeline.executor.columns import (
    DIVIDED,
    LOCAL,
    ON_ALL,
    MeshColumns,
    restricted,
    with_leading,
    without_leading,
)
from jaxpar.strategies.pipeline.executor.dispatch import DispatchedAction, StageDispatcher, StepInputs, Work, no_work
from jaxpar.strategies.pipeline.executor.dispatch_update import DispatchedState, StageUpdates, kept_if, over_replicas
from jaxpar.strategies.pipeline.executor.enqueue import Host, Program, program_on
from jaxpar.strategies.pipeline.executor.stage_programs import StagePrograms
from jaxpar.strategies.pipeline.executor.state import StagedState
from jaxpar.strategies.pipeline.tables.table import StageDevices
from jaxpar.tasks import Sums


class EnteredBatch(NamedTuple):
    """A batch that has entered the pipeline."""

    step: Sequence[Any]  # number of its step, by group
    inputs: Sequence[StepInputs]  # inputs of its actions, by column


class DispatchedFlight(NamedTuple):
    """The private state: what is in flight between two steps."""

    num_entered: np.ndarray  # number of batches that have entered the pipeline since it was empty; the host holds it
    residuals: Sequence[Tree]  # private state of the gradient exchange, by group
    # earlier versions of the parameters that are still needed, by group and version
    versions: Sequence[Mapping[int, Params]]
    batches: Mapping[int, EnteredBatch]  # the batches that are still needed, by number
    work: Work  # what actions have made for later ones. Microbatches are counted from the first batch.


@dataclass
class GroupWeights:
    """The weights of a group during a step."""

    number: int  # number of the newest version of the parameters
    versions: dict[int, Params]  # the versions
    parts: dict[int, dict[int, list[Params]]]  # the parameters of each chunk, by version and column
    optimizer: Any  # state of the optimizer
    residuals: Tree  # private state of the gradient exchange
    # of the update in this step, the squared norm of the gradient, and 1.0 if it was not finite, otherwise 0.0
    checks: Sequence[Any] = ()

    @property
    def newest(self) -> tuple[Params, Any, Tree]:
        """The newest parameters, with the state of the optimizer and of the exchange."""
        return self.versions[self.number], self.optimizer, self.residuals


class ContinuousSteps:
    """Enqueues the steps of a periodic table, and converts what is in flight between them."""

    def __init__(
        self,
        staged: StagedState,
        columns: MeshColumns,
        programs: StagePrograms,
        dispatcher: StageDispatcher,
        updates: StageUpdates,
        options: Mapping[str, Any],
    ):
        """Make the programs.

        Args:
          staged: distribution of the state, and the exchange of gradients.
          columns: the columns and groups of the mesh.
          programs: the programs of the stages.
          dispatcher: enqueues the actions of the periodic table.
          updates: adds the gradients and metric sums of columns.
          options: compiler options of the updates.
        """
        assert staged.stages.placement.shape[1] == 1, "these schedules have one chunk per device"
        self._staged, self._columns, self._dispatcher, self._updates = staged, columns, dispatcher, updates
        self._programs, self._devices = programs, StageDevices(staged.stages.placement)
        self._m, self._order = dispatcher.num_microbatches, dispatcher.order
        groups = range(len(columns.groups))
        # All replicas of a stage have a U. The stage is updated at the last one.
        self._update_at = {columns.group_of[a.column]: i for i, a in enumerate(self._order) if a.is_update}
        self._age_of_update = {g: -(self._order[i].microbatch // self._m) for g, i in self._update_at.items()}
        # The oldest version that a group reads after its update, and after a step, if batch 0 enters in this step.
        self._read_after_update = {g: self._oldest_read(g, i) for g, i in self._update_at.items()}
        self._read_after_step = {g: self._oldest_read(g, len(self._order)) for g in groups}
        self._update = [self._make_update(g, options) for g in groups]
        mesh, spec = columns.of_group[updates.last], (LOCAL, ON_ALL, ON_ALL)
        self._metrics = program_on(mesh, self._agree, spec, ON_ALL, ("inputs", "inputs", "inputs"))

    def begin(self, state: DispatchedState) -> DispatchedState:
        """Return a state whose private state is that of step 0, with an empty pipeline."""
        return self._empty(state, self._updates.init_private(state.params))

    def abstract(self, state: DispatchedState) -> DispatchedState:
        """Return what `begin` returns, of shapes."""
        return self._empty(state, self._updates.abstract_private(state.params))

    def _empty(self, state: DispatchedState, residuals: Sequence[Tree]) -> DispatchedState:
        versions: list[dict[int, Params]] = [{} for _ in state.params]
        return state._replace(private=DispatchedFlight(np.zeros((), np.int32), residuals, versions, {}, no_work()))

    def actions(self, state: DispatchedState) -> list[DispatchedAction]:
        """Return the actions of the next step: those on batches that have entered, with one U for each group."""
        now = int(state.private.num_entered)
        return [a for i, a in enumerate(self._order) if a.microbatch // self._m + now >= 0 and self._runs(i)]

    def __call__(self, state: DispatchedState, inputs: StepInputs, host: Host) -> tuple[DispatchedState, Metrics]:
        """Enqueue a step.

        Args:
          state: the state.
          inputs: inputs of the batch that enters, on all devices.
          host: enqueues the programs.

        Returns:
          The state with the old `step`, and the metrics: those of the microbatches that reached the last stage. Their
          gradient norm is that of the updates of this step, whose batches differ between stages.
        """
        flight: DispatchedFlight = state.private
        now, columns, weights = int(flight.num_entered), self._columns, self._weights(state)
        entered = EnteredBatch([restricted(state.step, mesh) for mesh in columns.of_group], columns.split(inputs))
        batches = {**flight.batches, now: entered}
        work = Work(dict(flight.work.arrived), dict(flight.work.stashes), dict(flight.work.grads), {})
        for place, action in enumerate(self._order):
            batch, group = now + action.microbatch // self._m, columns.group_of[action.column]
            if batch < 0 or not self._runs(place):
                continue
            if action.is_update:
                self._update_group(group, batch, now, batches[batch].step[group], weights[group], work, host)
            else:
                parts = weights[group].parts[max(batch + action.version, 0)][action.column]
                absolute = action._replace(microbatch=now * self._m + action.microbatch)
                self._dispatcher.act(absolute, parts, batches[batch].inputs[action.column], work, host)
        squares, nonfinite = ([of_group.checks[i] for of_group in weights if of_group.checks] for i in (0, 1))
        metrics = self._updates.here(self._updates.agreed(self._metrics, work, squares, nonfinite, host), host)
        params, optimizer, residuals = zip(*(of.newest for of in weights), strict=True)
        versions = [
            {v: of for v, of in of_group.versions.items() if now + self._read_after_step[g] <= v < of_group.number}
            for g, of_group in enumerate(weights)
        ]
        first_batch = now + 1 + min(action.microbatch // self._m for action in self._order)
        batches = {number: batch for number, batch in batches.items() if number >= first_batch}
        private = DispatchedFlight(np.asarray(now + 1, np.int32), residuals, versions, batches, work._replace(sums={}))
        return state._replace(params=params, optimizer=optimizer, private=private), metrics

    def _weights(self, state: DispatchedState) -> list[GroupWeights]:
        """Return the weights of each group before a step."""
        flight: DispatchedFlight = state.private
        weights = []
        for g, earlier in enumerate(flight.versions):
            number = max(int(flight.num_entered) - self._age_of_update[g], 0)
            of_group = GroupWeights(number, {}, {}, state.optimizer[g], flight.residuals[g])
            for version, params in {**earlier, number: state.params[g]}.items():
                self._add_version(g, of_group, version, params)
            weights.append(of_group)
        return weights

    def _add_version(self, group: int, weights: GroupWeights, version: int, params: Params) -> None:
        split = self._columns.split_group(group, params)
        weights.versions[version] = params
        weights.parts[version] = {column: self._dispatcher.parts(column, held) for column, held in split.items()}

    def _update_group(
        self, group: int, batch: int, now: int, step: Any, weights: GroupWeights, work: Work, host: Host
    ) -> None:
        """Enqueue the update of a group with the gradient of a batch."""
        oldest = min(now + self._read_after_update[group], batch + 1)
        params, optimizer, residuals = weights.newest
        for version in [v for v in weights.versions if v < oldest]:
            del weights.versions[version], weights.parts[version]
        grads = self._columns.joined(group, [work.grads.pop(column) for column in self._columns.groups[group]])
        results = self._updates.alone(host, self._update[group], step, params, optimizer, residuals, grads)
        params, weights.optimizer, weights.residuals, *weights.checks = results
        weights.number = batch + 1
        self._add_version(group, weights, batch + 1, params)

    def _runs(self, place: int) -> bool:
        """Return whether an action is none of the U of the other columns of a group."""
        action = self._order[place]
        return not action.is_update or place == self._update_at[self._columns.group_of[action.column]]

    def _oldest_read(self, group: int, place: int) -> int:
        """Return the oldest version that a group reads after a place in the order, in a step or a later one.

        Counted as if batch 0 enters in this step.
        """

        def reads(places: Sequence[int]) -> list[int]:
            actions = [self._order[i] for i in places]
            return [
                action.microbatch // self._m + action.version
                for action in actions
                if action.column in self._columns.groups[group] and not action.is_update
            ]

        all_places = range(len(self._order))
        return min([1 + min(reads(all_places)), *reads(all_places[place + 1 :])])

    def _make_update(self, group: int, options: Mapping[str, Any]) -> Program:
        problem = self._staged.problem
        is_read_later = self._read_after_update[group] <= -self._age_of_update[group]

        def on_device(
            step: jax.Array, params: Params, optimizer: Any, residuals: Tree, of_chunks: list[Params]
        ) -> tuple[Any, ...]:
            before, of_chunks = without_leading((residuals, of_chunks))
            # A compressor may hide infinities and NaNs, so count them before the exchange.
            grads = self._updates.merged(group, of_chunks)
            nonfinite = jax.lax.psum(steps.nonfinite_count(grads), DATA)
            grads, after = self._updates.exchanged(grads, before, optax.tree.norm(grads))
            # With a gradient norm of NaN, the update changes nothing.
            norm = optax.tree.norm(grads)
            state = State(step, jnp.zeros(()), params, optimizer)
            checked_norm = jnp.where(nonfinite == 0, norm, jnp.nan)
            state, metrics = steps.update(problem, state, grads, problem.task.zeros(), checked_norm)
            after = with_leading(kept_if(metrics.finite, after, before))
            return state.params, state.optimizer, after, jnp.square(norm), 1.0 - metrics.finite

        specs, results = (ON_ALL, ON_ALL, ON_ALL, LOCAL, LOCAL), (ON_ALL, ON_ALL, LOCAL, ON_ALL, ON_ALL)
        kinds = ("inputs", "parameters", "optimizer", "private", "gradients")
        jitting = {"donate_argnums": (2, 3) if is_read_later else (1, 2, 3), "compiler_options": options}
        program = program_on(self._columns.of_group[group], on_device, specs, results, kinds, **jitting)
        return program._replace(is_action=True)

    def _agree(self, sums: Sums, squares: list[jax.Array], nonfinite: list[jax.Array]) -> Metrics:
        total = over_replicas(sums)
        is_finite = sum(nonfinite, jnp.zeros(())) == 0
        return Metrics(total, jnp.sqrt(sum(squares, jnp.zeros(()))), is_finite & jnp.isfinite(total.loss))

    # ---- the private state in a checkpoint ----------------------------------------------------------

    def to_private(self, state: DispatchedState) -> Canonical:
        """Return the private state on the host.

        The canonical state lacks earlier versions and what is in flight. The optimizer's counters differ between
        groups, so its whole state is here too.
        """
        flight: DispatchedFlight = state.private
        stashes = {(*place, *key): values for place, of in flight.work.stashes.items() for key, values in of.items()}
        trees: dict[str, dict[Any, Any]] = {
            "residuals": dict(enumerate(flight.residuals)),
            "optimizer": dict(enumerate(state.optimizer)),
            "versions": {(g, v): params for g, of in enumerate(flight.versions) for v, params in of.items()},
            "batches": {number: (batch.step[0], batch.inputs[0]) for number, batch in flight.batches.items()},
            "arrived": flight.work.arrived,
            "stashes": stashes,
            "grads": flight.work.grads,
        }
        named = {name: {_to_name(key): _leaves(tree) for key, tree in of.items()} for name, of in trees.items()}
        fetched: Canonical = processes.fetch_from_owners({name: of for name, of in named.items() if of})
        return {"num_entered": flight.num_entered, **fetched}

    def from_private(self, state: DispatchedState, private: Canonical) -> DispatchedState:
        """Return a state with the private state that `to_private` returned.

        Args:
          state: a state with an empty pipeline, from `begin`.
          private: the private state.
        """
        columns, programs, flight = self._columns, self._programs, state.private
        on_group = [NamedSharding(mesh, ON_ALL) for mesh in columns.of_group]

        def saved(name: str) -> dict[tuple[int, ...], list[Any]]:
            of_name = private.get(name, {})
            return {_from_name(key): [leaves[str(i)] for i in range(len(leaves))] for key, leaves in of_name.items()}

        def put(leaves: Sequence[Any], like: Tree, sharding: NamedSharding) -> Any:
            return processes.put_on_devices(jax.tree.unflatten(jax.tree.structure(like), leaves), sharding)

        def local(column: int) -> NamedSharding:
            return NamedSharding(columns.of_column[column], LOCAL)

        like: Tree
        residuals, optimizer = list(flight.residuals), list(state.optimizer)
        for (g,), leaves in saved("residuals").items():
            residuals[g] = put(leaves, residuals[g], NamedSharding(columns.of_group[g], LOCAL))
        for (g,), leaves in saved("optimizer").items():
            optimizer[g] = put(leaves, optimizer[g], on_group[g])
        for (g, version), leaves in saved("versions").items():
            flight.versions[g][version] = put(leaves, state.params[g], on_group[g])
        batches, work = {}, no_work()
        of_batch = 0, StepInputs(0, 0, dict(programs.programs[0].inputs.microbatch))
        on_all, divided = (NamedSharding(columns.mesh, spec) for spec in (ON_ALL, DIVIDED))
        for (number,), leaves in saved("batches").items():
            step, inputs = jax.tree.unflatten(jax.tree.structure(of_batch), leaves)
            step, key_data, weight = processes.put_on_devices((step, inputs.key, inputs.weight), on_all)
            inputs = StepInputs(key_data, weight, processes.put_on_devices(inputs.microbatches, divided))
            of_groups = [restricted(step, mesh) for mesh in columns.of_group]
            batches[number] = EnteredBatch(of_groups, columns.split(inputs))
        for (phase, stage, microbatch), leaves in saved("arrived").items():
            column = self._devices.device(stage, microbatch)
            like = programs.received(int(programs.numbers[column, 0]), phase)
            work.arrived[phase, stage, microbatch] = put(leaves, like, local(column))
        for (stage, microbatch, made, last), leaves in saved("stashes").items():
            column = self._devices.device(stage, microbatch)
            like = programs.programs[int(programs.numbers[column, 0])].cut.saved[made, last]
            work.stashes.setdefault((stage, microbatch), {})[made, last] = put(leaves, like, local(column))
        for (column,), leaves in saved("grads").items():
            like = self._dispatcher.parts(column, state.params[columns.group_of[column]])
            work.grads[column] = put(leaves, like, local(column))
        in_flight = DispatchedFlight(np.asarray(private["num_entered"]), residuals, flight.versions, batches, work)
        return state._replace(optimizer=tuple(optimizer), private=in_flight)


def _leaves(tree: Tree) -> dict[str, Any]:
    return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _to_name(key: int | tuple[int, ...]) -> str:
    return " ".join(map(str, key if isinstance(key, tuple) else (key,)))


def _from_name(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split()))
