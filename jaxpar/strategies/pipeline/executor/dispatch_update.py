"""The end of a step of a dispatched pipeline: gradients are exchanged, and every group takes its optimizer step.

    merge      8.    if the exchange clips: one program for each group (enqueue.py), for the norm of each replica
    reduce     8.    one program for each group: averages its gradients over the replicas by the exchange
    ties       9.    gradients of tied arrays: sent to one of the groups that hold them, summed, and sent back
    agree      9.    metric sums, global norm and finiteness: scalars of all groups, sent to the last one and back
    update    10.    one program for each group: the optimizer step

A group is reduced as soon as its devices have computed its last gradient, while other groups still compute.
"""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import serialization
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar import layout
from jaxpar.core import mesh as meshes
from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics
from jaxpar.exchange.exchange import AllReduce
from jaxpar.launch import processes
from jaxpar.layout import Layout, Tree
from jaxpar.models.model import Params
from jaxpar.strategies.pipeline.executor.dispatch import DispatchedAction, StageDispatcher, StepInputs, Work
from jaxpar.strategies.pipeline.executor.enqueue import (
    BY_REPLICA,
    DEVICES,
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
from jaxpar.strategies.pipeline.executor.stages import sum_over_stages
from jaxpar.strategies.pipeline.executor.state import StagedState, kept_if
from jaxpar.strategies.pipeline.tables.table import StageDevices
from jaxpar.strategies.placement import IN_PLACE
from jaxpar.tasks import Sums


class DispatchedState(NamedTuple):
    """The state of a dispatched pipeline. `params`, `optimizer` and `private` are tuples over groups.

    Layers are named as on the example of the kind of their device. `step` and `key` are on all devices.
    """

    step: Any
    key: Any
    params: Any
    optimizer: Any
    private: Any


def private_layout(axes: Mapping[str, int], all_reduce: AllReduce, params: Params) -> Layout:
    """Return the layout of the private state of a group, as in LOCAL. axes: those of the group's mesh.

    params: what a device has of the parameters.
    """
    like = layout.made_by_replicas(axes, lambda: all_reduce.init(params), DATA)
    return layout.per_replica(axes, like.local_shapes, *axes)


class FlushedSteps:
    """Enqueues the steps of a table with a flush, and converts the private state of the exchange."""

    def __init__(self, staged: StagedState, columns: MeshColumns, dispatcher: StageDispatcher):
        self._staged, self._columns, self._dispatcher = staged, columns, dispatcher
        self._shards = staged.all_reduce.shards
        # by group, the partition specs of its mean gradient
        self._specs = [staged.means[staged.stages.kinds[group[0]]].specs for group in columns.groups]
        stages, groups, on_group = staged.stages, range(len(columns.groups)), columns.of_group
        self._ties = {array: self._holders(*array) for array in stages.copied}
        # On virtual CPU devices, programs with collectives must not run at the same time (mesh.one_at_a_time).
        self._has_collectives = columns.mesh.size > columns.mesh.shape[STAGE] or stages.has_replicas
        self._last = columns.group_of[StageDevices(stages.placement).of(stages.num_stages - 1)[0]]  # of the last stage
        scalars = ("inputs",)
        own = [g for g in groups if any(x.process_index == jax.process_index() for x in on_group[g].devices.flat)]
        self._own = self._last if self._last in own or not own else own[0]  # a group with devices of this process
        self._merge = [self._make_merge(g) for g in groups]
        self._reduce = [self._make_reduce(g) for g in groups]
        self._update = [self._make_update(g) for g in groups]
        self._sum = {array: self._make_sum(array) for array in self._ties}
        self._add = [program_on(mesh, self._added, (LOCAL,), LOCAL, scalars) for mesh in columns.of_column]
        self._root = program_on(on_group[0], _root_of_sum, (BY_REPLICA,), BY_REPLICA, scalars)
        self._total = program_on(on_group[self._last], self._over_replicas, (LOCAL,), ON_ALL, scalars)
        self._agree = program_on(on_group[self._last], self._agreed, (LOCAL, ON_ALL), ON_ALL, 2 * scalars)

    def begin(self, state: DispatchedState) -> DispatchedState:
        """Return a state whose private state is that of step 0."""

        def on_device(held: Params) -> Tree:
            return with_leading(self._staged.all_reduce.init(held))

        specs = [(self._state_specs(g)[0],) for g in range(len(self._columns.groups))]
        meshes_and_specs = zip(self._columns.of_group, specs, strict=True)
        programs = [program_on(mesh, on_device, spec, LOCAL, ()) for mesh, spec in meshes_and_specs]
        private = tuple(program.jitted(held) for program, held in zip(programs, state.params, strict=True))
        return state._replace(private=private)

    def abstract(self, state: DispatchedState) -> DispatchedState:
        """Return what `begin` returns, of shapes with shardings."""
        of_groups = []
        for mesh, columns in zip(self._columns.of_group, self._columns.groups, strict=True):
            held = self._staged.params.trees[self._staged.stages.kinds[columns[0]]]
            private = private_layout(dict(mesh.shape), self._staged.all_reduce, held)
            of_groups.append(steps.with_shardings(private.shapes, sharding_on(mesh, LOCAL)))
        return state._replace(private=tuple(of_groups))

    def actions(self, _state: DispatchedState) -> list[DispatchedAction]:
        """Return the actions of the next step."""
        return self._dispatcher.order

    def to_private(self, state: DispatchedState) -> Canonical:
        """Return the private state on the host."""
        private: Canonical = serialization.to_state_dict(processes.fetch_from_owners(state.private))
        return private if jax.tree.leaves(private) else {}

    def from_private(self, state: DispatchedState, private: Canonical) -> DispatchedState:
        """Return a state of `begin` with the private state that `to_private` returned."""
        saved = serialization.from_state_dict(state.private, private)
        put = jax.tree.map(lambda x, like: processes.put_on_devices(x, like.sharding), saved, state.private)
        return state._replace(private=put)

    def __call__(self, state: DispatchedState, inputs: StepInputs, host: Host) -> tuple[DispatchedState, Metrics]:
        """Enqueue a step. inputs: on all devices. Returns the state with the old `step`, and the metrics."""
        columns, groups = self._columns, range(len(self._columns.groups))
        work = self._dispatcher.run(state.params, columns.split(inputs), host)
        grads = [columns.joined(g, [work.grads[column] for column in group]) for g, group in enumerate(columns.groups)]
        norms: Sequence[Any] = [None] * len(grads)  # of the gradient of each replica, if the exchange clips by it
        if self._staged.all_reduce.clip_norm:
            merged = [self._alone(host, self._merge[g], grads[g]) for g in groups]
            grads, squares = [list(of_all) for of_all in zip(*merged, strict=True)]
            root = host.call(self._root, self._to(host, 0, squares, BY_REPLICA))
            norms = [self._to(host, g, root, BY_REPLICA) for g in groups]
        reduced = [self._alone(host, self._reduce[g], grads[g], state.private[g], norms[g]) for g in groups]
        means, residuals, of_groups, nonfinite = zip(*reduced, strict=True)
        squares = list(of_groups)
        for (layer, name), holders in self._ties.items():
            spec = self._specs[holders[0]][layer][name]
            parts = [self._to(host, holders[0], means[g][layer][name], spec) for g in holders]
            total, square = self._alone(host, self._sum[layer, name], parts)
            squares.append(square)
            for g in holders:
                means[g][layer][name] = self._to(host, g, total, spec)
        agreed = self._agree_on(work, (squares, list(nonfinite)), host)
        updated = []
        for g in groups:
            step, before = restricted(state.step, columns.of_group[g]), (state.params[g], state.optimizer[g])
            arguments = (step, *before, state.private[g], means[g], residuals[g], *self._to(host, g, agreed))
            updated.append(self._alone(host, self._update[g], *arguments))
        params, optimizer, private, metrics = zip(*updated, strict=True)
        return state._replace(params=params, optimizer=optimizer, private=private), metrics[self._own]

    def sums(self, work: Work) -> Sums:
        """Return the metric sums over all microbatches and replicas."""
        return self._here(self._alone(DEVICES, self._total, self._local_sums(work, DEVICES)), DEVICES)

    def _agree_on(self, work: Work, scalars: Any, host: Host) -> Any:
        """Call `_agreed` of the last group on the metric sums of a step, and on scalars of some groups."""
        return self._alone(host, self._agree, self._local_sums(work, host), self._to(host, self._last, scalars))

    def _here(self, tree: Tree, host: Host) -> Any:
        """Return scalars of the last group on devices of this process."""
        if jax.process_count() == 1:
            return tree
        return [self._to(host, g, tree) for g in range(len(self._columns.groups))][self._own]

    def _alone(self, host: Host, program: Program, *args: Any) -> Any:
        """Call a program that may have collectives."""
        results = host.call(program, *(meshes.settled(args) if self._has_collectives else args))
        return meshes.settled(results) if self._has_collectives else results

    def _to(self, host: Host, group: int, tree: Tree, spec: PartitionSpec = ON_ALL) -> Any:
        return host.send(tree, NamedSharding(self._columns.of_group[group], spec))

    def _holders(self, layer: str, name: str) -> list[int]:
        """Return the groups that hold an array, its owner first."""
        stages, firsts = self._staged.stages, [group[0] for group in self._columns.groups]
        held = [stages.select(stages.model.shapes, column) for column in firsts]
        holders = [g for g, params in enumerate(held) if name in params.get(layer, ())]
        return sorted(holders, key=lambda g: layer not in stages.layer_names(firsts[g]))

    def _local_sums(self, work: Work, host: Host) -> Sums:
        columns = self._columns.groups[self._last]
        added = [host.call(self._add[column], work.sums.get(column, [])) for column in columns]
        return self._columns.joined(self._last, added)

    def _added(self, trees: list[Sums]) -> Sums:
        # In the first steps of a pipeline that never drains, no microbatch reaches the last stage.
        return reduce(partial(jax.tree.map, jnp.add), trees or [with_leading(self._staged.problem.task.zeros())])

    def _merged(self, group: int, of_chunks: Sequence[Params]) -> Params:
        """Return the gradient of a device, summed over its chunks and devices with the same arrays. For `shard_map`.

        These are the replicas of its stage, and devices that compute it together.
        """
        held = self._staged.group.reduced(sum_over_stages(of_chunks))
        return jax.lax.psum(held, STAGE) if len(self._columns.groups[group]) > 1 else held

    def _agreed(self, sums: Sums, scalars: Any) -> Any:
        squares, nonfinite = scalars
        # With a gradient norm of NaN, nothing is updated.
        return self._over_replicas(sums), jnp.where(sum(nonfinite) == 0, _root_of_sum(squares), jnp.nan)

    def _over_replicas(self, sums: Sums) -> Sums:
        """Return the sum of metric sums of all columns of a group. For `shard_map`."""
        return jax.lax.psum(without_leading(sums), (*self._staged.group.batch_axes, STAGE))

    def _state_specs(self, group: int) -> tuple[Any, Any]:
        """Return the partition specs of the parameters and the optimizer state of a group."""
        kind = self._staged.stages.kinds[self._columns.groups[group][0]]
        return self._staged.params.of_kinds[kind].specs, self._staged.optimizer.of_kinds[kind].specs

    def _make_merge(self, group: int) -> Program:
        """Return the program that merges the gradients of a replica, and squares their norm, for `reduce` to clip."""

        def on_device(of_chunks: list[Params]) -> tuple[Params, jax.Array]:
            grads = self._merged(group, without_leading(of_chunks))
            return with_leading(grads), self._staged.group.norm(grads)[None] ** 2

        mesh, results, donated = self._columns.of_group[group], (LOCAL, BY_REPLICA), self._donated_grads
        return program_on(mesh, on_device, (LOCAL,), results, ("gradients",), donate_argnums=donated)

    @property
    def _donated_grads(self) -> Any:
        # Chunks that share a tied array have more arrays than their sum, so that JAX could not use all of them.
        return 0 if self._staged.stages.placement.shape[1] == 1 else ()

    def _make_sum(self, array: tuple[str, str]) -> Program:
        """Return the program that sums the gradients of a tied array on the group of its owner."""
        owner, (layer, name) = self._ties[array][0], array
        spec = self._specs[owner][layer][name]

        def on_device(parts: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            total = sum(parts[1:], parts[0])
            return total, self._square_of({layer: {name: total}})

        return program_on(self._columns.of_group[owner], on_device, (spec,), (spec, ON_ALL), ("gradients",))

    def _square_of(self, means: Params) -> jax.Array:
        """Return the sum of squares of mean gradients, of which a device may have parts. For `shard_map`."""
        group = self._staged.group
        means = group.counted(means)
        if self._shards:
            square = self._shards.square(means)
        else:
            square = sum((jnp.sum(jnp.square(x)) for x in jax.tree.leaves(means)), jnp.zeros(()))
        return jax.lax.psum(square, group.split_axes) if group.split_axes else square

    def _hidden_by_exchange(self, grads: Any, axes: tuple[str, ...]) -> jax.Array:
        """Return on how many devices gradients are not finite, if the exchange can hide that; otherwise 0."""
        if not self._staged.all_reduce.is_lossy:
            return jnp.zeros(())
        return jax.lax.psum(steps.nonfinite_count(grads), axes)

    def _make_reduce(self, group: int) -> Program:
        apart = {array for array, holders in self._ties.items() if group in holders}

        def on_device(grads: Any, private: Tree, norm: jax.Array | None) -> tuple[Any, ...]:
            grads, private = without_leading((grads, private))
            nonfinite = self._hidden_by_exchange(grads, (DATA, STAGE, *self._staged.group.axes))
            grads = self._merged(group, grads) if norm is None else grads
            grads, residuals = self._staged.exchanged(grads, private, None if norm is None else norm[0])
            whole = {
                layer: {name: x for name, x in arrays.items() if (layer, name) not in apart}
                for layer, arrays in grads.items()
            }
            return grads, with_leading(residuals), self._square_of(whole), nonfinite

        results = self._specs[group], LOCAL, ON_ALL, ON_ALL
        # JAX could not use whole arrays for shards.
        donated = () if self._shards and self._shards.stage == 1 else self._donated_grads
        specs, kinds = (LOCAL, LOCAL, BY_REPLICA), ("gradients", "private", "inputs")
        return program_on(self._columns.of_group[group], on_device, specs, results, kinds, donate_argnums=donated)

    def _make_update(self, group: int) -> Program:
        def on_device(
            step: jax.Array,
            params: Params,
            optimizer: Any,
            private: Tree,
            grads: Params,
            residuals: Tree,
            sums: Sums,
            norm: jax.Array,
        ) -> tuple[Params, Any, Tree, Metrics]:
            held = shards.local(params) if shards else params
            before = State(step, jnp.zeros(()), held, optimizer)
            after, metrics = steps.update(self._staged.problem, before, grads, sums, norm)
            held = shards.gather(params, after.params) if shards else after.params
            return held, after.optimizer, kept_if(metrics.finite, residuals, private), metrics

        # if each replica has whole parameters, but updates shards of them
        shards = self._shards if self._shards and self._shards.stage < 3 else None
        of_params, of_optimizer = self._state_specs(group)
        state = ("inputs", ON_ALL), ("parameters", of_params), ("optimizer", of_optimizer), ("private", LOCAL)
        others = ("gradients", self._specs[group]), ("residuals", LOCAL), ("inputs", ON_ALL), ("inputs", ON_ALL)
        kinds, specs = zip(*state, *others, strict=True)  # of the arguments of `on_device`
        mesh, donated, results = self._columns.of_group[group], (1, 2, 3), (of_params, of_optimizer, LOCAL, ON_ALL)
        return program_on(mesh, on_device, specs, results, kinds, compiler_options=IN_PLACE, donate_argnums=donated)


def _root_of_sum(squares: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(squares[1:], squares[0]))
