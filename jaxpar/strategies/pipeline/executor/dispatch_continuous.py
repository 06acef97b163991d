"""A training step of a pipeline that never drains, whose stages are dispatched as programs of their own.

The table is periodic (jaxpar/strategies/pipeline/tables/periodic.py): in a step, a batch enters, and every stage works
on the batches that are in flight. A group (enqueue.py) is updated by an action of its own, U: one program, which
averages the gradient over the replicas of the pipeline and takes the optimizer step.

A version of the weights is one tree of arrays. Earlier versions are kept until their last action has been enqueued, and
what is in flight is what actions have made for later ones, so that nothing is copied between steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.core import step as steps
from jaxpar.core.loss_scale import LossScale, find_scale, least_scale, with_scale
from jaxpar.core.mesh import DATA
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics
from jaxpar.launch.processes import fetch_from_owners, put_on_devices
from jaxpar.layout import Tree
from jaxpar.models.model import Params
from jaxpar.strategies.pipeline.executor.dispatch import DispatchedAction, StageDispatcher, StepInputs, Work
from jaxpar.strategies.pipeline.executor.dispatch_update import DispatchedState, FlushedSteps
from jaxpar.strategies.pipeline.executor.enqueue import (
    LOCAL,
    ON_ALL,
    Host,
    MeshColumns,
    Program,
    program_on,
    restricted,
    sharding_on,
    with_leading,
    without_leading,
)
from jaxpar.strategies.pipeline.executor.stage_programs import StagePrograms
from jaxpar.strategies.pipeline.executor.state import StagedState, kept_if
from jaxpar.strategies.pipeline.tables.table import StageDevices
from jaxpar.strategies.placement import IN_PLACE
from jaxpar.tasks import Sums


class EnteredBatch(NamedTuple):
    """A batch that has entered the pipeline."""

    step: Sequence[Any]  # number of its step, by group
    inputs: Sequence[StepInputs]  # inputs of its actions, by column
    scaling: Sequence[LossScale | None]  # scale of its loss, by group


def entered_batch(columns: MeshColumns, step: Any, inputs: StepInputs) -> EnteredBatch:
    """Return a batch that enters. step, inputs: on all devices."""
    of_groups = [restricted((step, inputs.scaling), mesh) for mesh in columns.of_group]
    numbers, scalings = zip(*of_groups, strict=True)
    return EnteredBatch(numbers, columns.split(inputs), scalings)


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
    # of the update in this step, the squared norm of the gradient; 1.0 if it was not finite, otherwise 0.0; the scale
    # of its loss if it was not, otherwise inf; None: it was not scaled
    checks: Sequence[Any] = ()

    @property
    def newest(self) -> tuple[Params, Any, Tree]:
        """The newest parameters, with the state of the optimizer and of the exchange."""
        return self.versions[self.number], self.optimizer, self.residuals


class ContinuousSteps(FlushedSteps):
    """Enqueues the steps of a periodic table, and converts what is in flight between them."""

    def __init__(self, staged: StagedState, columns: MeshColumns, dispatcher: StageDispatcher, programs: StagePrograms):
        assert staged.stages.placement.shape[1] == 1, "these schedules have one chunk per device"
        self._programs, self._devices = programs, StageDevices(staged.stages.placement)
        self._m, self._order = dispatcher.num_microbatches, dispatcher.order
        self._columns, groups = columns, range(len(columns.groups))
        # All replicas of a stage have a U. The stage is updated at the last one.
        self._update_at = {columns.group_of[a.column]: i for i, a in enumerate(self._order) if a.is_update}
        self._age_of_update = {g: -(self._order[i].microbatch // self._m) for g, i in self._update_at.items()}
        # The oldest version that a group reads after its update, and after a step, if batch 0 enters in this step.
        self._read_after_update = {g: self._oldest_read(g, i) for g, i in self._update_at.items()}
        self._read_after_step = {g: self._oldest_read(g, len(self._order)) for g in groups}
        super().__init__(staged, columns, dispatcher)  # makes the programs, with `_make_update`

    def begin(self, state: DispatchedState) -> DispatchedState:
        """Return a state whose private state is that of step 0, with an empty pipeline."""
        return self._empty(super().begin(state))

    def abstract(self, state: DispatchedState) -> DispatchedState:
        """Return what `begin` returns, of shapes."""
        return self._empty(super().abstract(state))

    def _empty(self, state: DispatchedState) -> DispatchedState:
        versions: list[dict[int, Params]] = [{} for _ in state.params]
        flight = DispatchedFlight(np.zeros((), np.int32), state.private, versions, {}, Work({}, {}, {}, {}))
        return state._replace(private=flight)

    def actions(self, state: DispatchedState) -> list[DispatchedAction]:
        """Return the actions of the next step: those on batches that have entered, with one U for each group."""
        now = int(state.private.num_entered)
        return [a for i, a in enumerate(self._order) if a.microbatch // self._m + now >= 0 and self._runs(i)]

    def __call__(self, state: DispatchedState, inputs: StepInputs, host: Host) -> tuple[DispatchedState, Metrics]:
        """Enqueue a step. inputs: those of the batch that enters, on all devices.

        Returns the state with the old `step`, and the metrics: those of the microbatches that reached the last stage.
        Their gradient norm is that of the updates of this step, whose batches differ between stages.
        """
        flight: DispatchedFlight = state.private
        now, columns, weights = int(flight.num_entered), self._columns, self._weights(state)
        batches = {**flight.batches, now: entered_batch(columns, state.step, inputs)}
        work = Work(dict(flight.work.arrived), dict(flight.work.stashes), dict(flight.work.grads), {})
        for place, action in enumerate(self._order):
            batch, group = now + action.microbatch // self._m, columns.group_of[action.column]
            if batch < 0 or not self._runs(place):
                continue
            if action.is_update:
                self._update_group(group, batch, now, batches[batch], weights[group], work, host)
            else:
                parts = weights[group].parts[max(batch + action.version, 0)][action.column]
                absolute = action._replace(microbatch=now * self._m + action.microbatch)
                self._dispatcher.act(absolute, parts, batches[batch].inputs[action.column], work, host)
        checks = [of_group.checks for of_group in weights if of_group.checks]
        scalings = [find_scale(of_group.optimizer) for of_group in weights]
        metrics, scaling = self._agree_on(work, (checks, scalings, inputs.scaling), host)
        if scaling is not None:
            for g, of_group in enumerate(weights):
                of_group.optimizer = with_scale(of_group.optimizer, self._to(host, g, scaling))
        metrics = self._here(metrics, host)
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
        weights.versions[version], weights.parts[version] = params, self._dispatcher.parts(group, params)

    def _update_group(
        self, group: int, batch: int, now: int, entered: EnteredBatch, weights: GroupWeights, work: Work, host: Host
    ) -> None:
        """Enqueue the update of a group with the gradient of a batch. batch: its number; entered: the batch itself."""
        # Drop the versions that are not read any more before the update, which writes to the arrays of the newest one.
        oldest = min(now + self._read_after_update[group], batch + 1)
        newest = weights.newest
        for version in [v for v in weights.versions if v < oldest]:
            del weights.versions[version], weights.parts[version]
        grads = self._columns.joined(group, [work.grads.pop(column) for column in self._columns.groups[group]])
        step, scaling = entered.step[group], entered.scaling[group]
        results = self._alone(host, self._update[group], step, *newest, grads, scaling)
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
        reads = {
            i: action.microbatch // self._m + action.version
            for i, action in enumerate(self._order)
            if action.column in self._columns.groups[group] and not action.is_update
        }
        return min([1 + min(reads.values()), *(read for i, read in reads.items() if i > place)])

    def _agreed(self, sums: Sums, scalars: Any) -> tuple[Metrics, LossScale | None]:
        """Return the metrics, and the smallest scale, and number of updates, of all stages."""
        checks, scalings, entered = scalars
        squares, nonfinite, failed = zip(*checks, strict=True) if checks else ((), (), ())
        total = self._over_replicas(sums)
        is_finite = sum(nonfinite, jnp.zeros(())) == 0
        metrics = Metrics(total, jnp.sqrt(sum(squares, jnp.zeros(()))), is_finite & jnp.isfinite(total.loss))
        if entered is None:
            return metrics, None
        lowest = least_scale([jnp.float32(jnp.inf), *failed])
        metrics = metrics._replace(loss_scale=jnp.where(jnp.isinf(lowest), entered.scale, lowest))
        return metrics, least_scale(scalings)

    def _make_update(self, group: int) -> Program:
        problem = self._staged.problem

        def on_device(
            step: jax.Array,
            params: Params,
            optimizer: Any,
            residuals: Tree,
            of_chunks: list[Params],
            scaling: LossScale | None,
        ) -> tuple[Any, ...]:
            before, of_chunks = without_leading((residuals, of_chunks))
            grads = self._merged(group, of_chunks)
            of_stage = self._staged.group
            nonfinite = self._hidden_by_exchange(grads, (DATA, *of_stage.split_axes))
            grads, after = self._staged.exchanged(grads, before, of_stage.norm(grads))
            # With a gradient norm of NaN, the update changes nothing.
            norm = of_stage.norm(grads)
            state = State(step, jnp.zeros(()), params, optimizer)
            checked_norm = jnp.where(nonfinite == 0, norm, jnp.nan)
            scale = None if scaling is None else scaling.scale
            state, metrics = steps.update(problem, state, grads, problem.task.zeros(), checked_norm, scale)
            after = with_leading(kept_if(metrics.finite, after, before))
            failed = None if scale is None else jnp.where(metrics.finite, jnp.inf, scale)
            return state.params, state.optimizer, after, jnp.square(norm), 1.0 - metrics.finite, failed

        of_state = self._state_specs(group)
        specs, results = (ON_ALL, *of_state, LOCAL, LOCAL, ON_ALL), (*of_state, LOCAL, ON_ALL, ON_ALL, ON_ALL)
        kinds = ("inputs", "parameters", "optimizer", "private", "gradients", "inputs")
        is_read_later = self._read_after_update[group] <= -self._age_of_update[group]
        options: Any = {"donate_argnums": (2, 3) if is_read_later else (1, 2, 3), "compiler_options": IN_PLACE}
        program = program_on(self._columns.of_group[group], on_device, specs, results, kinds, **options)
        return program._replace(is_action=True)

    # ---- the private state in a checkpoint ----------------------------------------------------------

    def to_private(self, state: DispatchedState) -> Canonical:
        """Return the private state on the host.

        The canonical state lacks earlier versions and what is in flight. The optimizer's counters differ between
        groups, so its whole state is here too.
        """
        flight: DispatchedFlight = state.private
        stashes = {(*place, *key): values for place, of in flight.work.stashes.items() for key, values in of.items()}
        trees: dict[str, dict[Any, Any]] = {
            "residuals": {(g,): tree for g, tree in enumerate(flight.residuals)},
            "optimizer": {(g,): tree for g, tree in enumerate(state.optimizer)},
            "versions": {(g, v): params for g, of in enumerate(flight.versions) for v, params in of.items()},
            "batches": {(number,): (batch.step[0], batch.inputs[0]) for number, batch in flight.batches.items()},
            "arrived": flight.work.arrived,
            "stashes": stashes,
            "grads": {(column,): of_chunks for column, of_chunks in flight.work.grads.items()},
        }

        def leaves_of(tree: Tree) -> dict[str, Any]:
            return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))}

        named = {
            name: {" ".join(map(str, key)): leaves_of(tree) for key, tree in of.items()} for name, of in trees.items()
        }
        fetched: Canonical = fetch_from_owners({name: of for name, of in named.items() if of})
        return {"num_entered": flight.num_entered, **fetched}

    def from_private(self, state: DispatchedState, private: Canonical) -> DispatchedState:
        """Return a state of `begin`, whose pipeline is empty, with the private state that `to_private` returned."""
        columns, programs, flight = self._columns, self._programs, state.private
        on_column = [sharding_on(mesh, LOCAL) for mesh in columns.of_column]

        def put(tree: Tree, mesh: Mesh, specs: Tree) -> Tree:
            return jax.tree.map(lambda x, spec: put_on_devices(x, NamedSharding(mesh, spec)), tree, specs)

        def saved(name: str, like: Callable[..., Tree]) -> list[tuple[Any, Any]]:
            """Return the keys and trees of a name, on the host. like: key -> a tree of the same structure."""
            trees = []
            for text, leaves in private.get(name, {}).items():
                key = tuple(map(int, text.split()))
                structure = jax.tree.structure(like(*key))
                trees.append((key, jax.tree.unflatten(structure, [leaves[str(i)] for i in range(len(leaves))])))
            return trees

        def program(stage: int, microbatch: int) -> int:
            return int(programs.numbers[self._devices.device(stage, microbatch), 0])

        def of_stash(stage: int, microbatch: int, made: int, last: int) -> Tree:
            return programs.programs[program(stage, microbatch)].cut.saved[made, last]

        residuals, optimizer = list(flight.residuals), list(state.optimizer)
        for (g,), tree in saved("residuals", residuals.__getitem__):
            residuals[g] = put_on_devices(tree, sharding_on(columns.of_group[g], LOCAL))
        for (g,), tree in saved("optimizer", optimizer.__getitem__):
            optimizer[g] = put(tree, columns.of_group[g], self._state_specs(g)[1])
        for (g, version), tree in saved("versions", lambda g, _version: state.params[g]):
            flight.versions[g][version] = put(tree, columns.of_group[g], self._state_specs(g)[0])
        batches, work = {}, Work({}, {}, {}, {})
        on_all, specs = NamedSharding(columns.mesh, ON_ALL), self._dispatcher.input_specs.microbatches
        of_batch = 0, StepInputs(0, 0, dict(programs.programs[0].inputs.microbatch), self._staged.scaling)
        for (number,), (step, inputs) in saved("batches", lambda _number: of_batch):
            step, shared = put_on_devices((step, inputs._replace(microbatches={})), on_all)
            inputs = shared._replace(microbatches=put(inputs.microbatches, columns.mesh, specs))
            batches[number] = entered_batch(columns, step, inputs)
        for key, tree in saved("arrived", lambda phase, *at: programs.received(program(*at), phase)):
            work.arrived[key] = put_on_devices(tree, on_column[self._devices.device(*key[1:])])
        for (stage, microbatch, made, last), tree in saved("stashes", of_stash):
            stash = work.stashes.setdefault((stage, microbatch), {})
            stash[made, last] = put_on_devices(tree, on_column[self._devices.device(stage, microbatch)])
        parts = [self._dispatcher.parts(g, params) for g, params in enumerate(state.params)]
        for (column,), tree in saved("grads", lambda column: parts[columns.group_of[column]][column]):
            work.grads[column] = put_on_devices(tree, on_column[column])
        in_flight = DispatchedFlight(np.asarray(private["num_entered"]), residuals, flight.versions, batches, work)
        return state._replace(optimizer=tuple(optimizer), private=in_flight)
