"""The state of a pipeline, distributed over its devices, and the optimizer step on each device.

A device holds the parameters of its layers, their optimizer state, and copies of arrays on other devices that are tied
to its layers, all packed into arrays of the same shapes on every device. `step` and `key` are replicated. If replicas
shard arrays (zero1), a device packs its shards of the optimizer state and of the mean gradient. If several devices
compute a stage together (core/groups.py), each packs its parts of the arrays.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from jax.sharding import Mesh, PartitionSpec

from jaxpar import layout
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.loss_scale import LossScale, find_scale, with_scale
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.exchange.clip import already_clipped, clipped
from jaxpar.exchange.exchange import AllReduce
from jaxpar.exchange.fuse import apart
from jaxpar.exchange.reduce import EQUAL_ON_ALL
from jaxpar.launch import processes
from jaxpar.layout import Layout, Tree
from jaxpar.models.model import Params
from jaxpar.strategies.pipeline.executor.lowering import OF_KIND
from jaxpar.strategies.pipeline.executor.packing import Packed, Packing
from jaxpar.strategies.pipeline.executor.staged_tree import StagedTree, in_shards
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.tasks import Sums


class PackedState(NamedTuple):
    """A State in packed form. Arrays of `params` and `optimizer` have a leading dim over the devices of the stage axis.

    Before it are those over the axes that divide arrays. `private` is the private state of the gradient exchange on
    each replica; its arrays have leading dims over the devices of the stage axis, of a group, and over the replicas.
    """

    step: Any
    key: Any
    params: Any
    optimizer: Any
    private: Any = ()


class StagedState:
    """The distribution of a problem's state over the devices of a pipeline. It can be computed without devices."""

    def __init__(self, group: ReplicaGroup, problem: Problem, stages: Stages, all_reduce: AllReduce):
        """Distribute the state.

        group: the devices that compute a stage together. all_reduce: the exchange of gradients between replicas. The
        optimizer clips nothing if it has a clip_norm.
        """
        if all_reduce.clip_norm:
            problem = problem._replace(optimizer=already_clipped(problem.optimizer))
        self.problem, self.stages, self.group = problem, stages, group
        self.all_reduce = apart(all_reduce, self._is_split) if group.split_axes else all_reduce
        axes = group.params.axes
        shards = all_reduce.shards
        copies = shards.copies if shards else 0
        of_params = copies if shards and shards.stage == 3 else 0
        self.params = StagedTree(group, lambda params: params, stages, of_params, are_apart=all_reduce.is_lossy)
        self.optimizer = StagedTree(group, problem.optimizer.init, stages, copies)
        # by kind of device, the layout of its gradient after the exchange, and the packing of what a device has of it
        self.means = [in_shards(layout.replicated(axes, tree), copies) for tree in self.params.trees]
        self.mean_packing = Packing([part.local_shapes for part in self.means]) if shards else self.params.packing
        self.private = layout.made_by_replicas(axes, self._init_private, DATA, STAGE, *group.axes)
        like = states.abstract_state(problem.model, problem.optimizer)
        self.scaling = find_scale(like.optimizer)  # shapes of the scale of the loss; None if it is not scaled
        step, key = layout.replicated(axes, like.step), layout.replicated(axes, like.key)
        # the devices that hold each leaf of the canonical state, and the layout of the private state
        self.layouts = PackedState(step, key, self.params.layout, self.optimizer.layout, self.private)
        self.packed_layouts = PackedState(step, key, self.params.packed, self.optimizer.packed, self.private)
        self.packed = layout.join(self.packed_layouts)  # layout of a PackedState
        # layouts by purpose, for `state_memory`. Each device needs as much as the one with most.
        self.purposes: Mapping[str, Layout] = self.packed_layouts._asdict()

    def init(self, key: jax.Array, mesh: Mesh) -> PackedState:
        """Return the state at step 0. Each device initializes only its own part."""

        def on_device(key: jax.Array) -> PackedState:
            device = jax.lax.axis_index(STAGE)
            init_key, run_key = states.split(key)
            shifts = jnp.asarray(self.stages.shifts)[device]

            def of_kind(kind: int) -> tuple[Packed, Packed]:
                part = (lambda params: self.group.layout(params).own(params)) if self.group.split_axes else None
                params = self.stages.init(init_key, kind, shifts, part)
                shards = self.all_reduce.shards
                moments = self.problem.optimizer.init(shards.local(params) if shards else params)
                return self.params.packing.pack(kind, params), self.optimizer.packing.pack(kind, moments)

            kinds = [partial(of_kind, kind) for kind in range(len(self.stages.examples))]
            params, optimizer = jax.lax.switch(jnp.asarray(self.stages.kinds)[device], kinds)
            state = PackedState(jnp.zeros((), jnp.int32), run_key, params, optimizer, self._init_private())
            return self.packed.out(state)

        specs = {"in_specs": PartitionSpec(), "out_specs": self.packed.specs}
        return jax.jit(jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs))(key)

    def distribute(self, state: State, private: Canonical | None, mesh: Mesh) -> PackedState:
        """Distribute a canonical state over the mesh.

        private: private state of the exchange, in canonical form; None or empty: as at step 0.
        """
        shardings = self.packed.shardings(mesh)
        step, key = jax.device_put((state.step, state.key), (shardings.step, shardings.key))
        params, optimizer = self.params.distribute(state.params, mesh), self.optimizer.distribute(state.optimizer, mesh)
        if private:
            tree = serialization.from_state_dict(self.private.shapes, private)
            return PackedState(step, key, params, optimizer, jax.device_put(tree, shardings.private))
        specs = {"in_specs": (), "out_specs": self.private.specs}
        init = jax.shard_map(lambda: self.private.out(self._init_private()), mesh=mesh, check_vma=False, **specs)
        return PackedState(step, key, params, optimizer, jax.jit(init)())

    def newest(self, state: PackedState) -> PackedState:
        """Return the state with the newest weights alone: the state itself."""
        return state

    def private_state(self, state: PackedState) -> Canonical:
        """Return the private state of the exchange."""
        return serialization.to_state_dict(state.private) if jax.tree.leaves(state.private) else {}

    def gather(self, state: PackedState) -> State:
        """Return the canonical state, as NumPy arrays."""
        step, key, params, optimizer = processes.fetch(state[:4])
        return State(step, key, self.params.collect(params), self.optimizer.collect(optimizer))

    def find_scale(self, optimizer: Packed) -> LossScale | None:
        """Return the scale in a device's optimizer state.

        Its arrays are the first scalars of their dtypes in the trees of all kinds, so that all have them in one place.
        """
        return find_scale(self.optimizer.packing.unpack(0, optimizer))

    def with_scale(self, optimizer: Packed, scaling: LossScale) -> Packed:
        """Return a device's optimizer state with another scale."""
        packing = self.optimizer.packing
        packed = packing.pack(0, with_scale(packing.unpack(0, optimizer), scaling))
        return tuple(old if old.ndim else new for old, new in zip(optimizer, packed, strict=True))

    def mean_of(self, layer: str, name: str) -> jax.ShapeDtypeStruct:
        """Return the shape of what a device has of the gradient of an array after the exchange."""
        trees = (part.local_shapes for part in self.means)
        return next(tree[layer][name] for tree in trees if name in tree.get(layer, ()))

    def exchanged(self, grads: Any, residuals: Any, norm: jax.Array | None) -> tuple[Any, Any]:
        """Return the mean gradient of the replicas, and the residuals after it. For `shard_map`.

        norm: that of the replica's gradient, if the exchange clips by it.
        """
        if self.all_reduce.clip_norm:
            assert norm is not None
            grads = clipped(grads, norm, self.all_reduce.clip_norm)
        return self.all_reduce.mean(grads, residuals)

    def _is_split(self, tree: Params | Packed) -> Tree:
        """Return which gradients of a device are split in its group: by array, or packed."""
        return self.group.is_split(tree) if isinstance(tree, dict) else self.params.packing.is_marked

    def _init_private(self) -> Any:
        return self.all_reduce.init(self.params.packing.shapes)


def kept_if(is_finite: jax.Array, new: Any, old: Any) -> Any:
    """Return the new residuals, or the old ones after a step that changes nothing."""
    return jax.tree.map(lambda after, before: jnp.where(is_finite, after, before), new, old)


class StageUpdate:
    """The optimizer step on one device's part of the state: one branch per kind of device, as their layers differ.

    For use inside `shard_map`. Parameters and gradients are packed.
    """

    def __init__(self, staged: StagedState, device: jax.Array):
        """device: index of this device on the stage axis."""
        self._staged, self._problem, self._stages = staged, staged.problem, staged.stages
        self._params, self._optimizer = staged.params.packing, staged.optimizer.packing
        self._mean, self._means, self._shards = staged.mean_packing, staged.means, staged.all_reduce.shards
        self._group = staged.group
        self._is_owner = [staged.params.is_owner(example) for example in self._stages.examples]
        self._kind = jnp.asarray(self._stages.kinds)[device]
        # Replicas of a stage hold the same gradient, of which one counts.
        firsts = [group[0] for group in self._stages.groups]
        self._counts = jnp.asarray([d in firsts for d in range(len(self._stages.kinds))])[device]

    def over_copies(self, grads: Packed) -> Packed:
        """Return the sum of the gradients of the devices that hold the same arrays of a replica of the pipeline.

        They are devices that compute a stage together, and the replicas of a stage, which have different microbatches.
        """
        if self._group.axes:

            def of_kind(kind: int, grads: Packed) -> Packed:
                return self._params.pack(kind, self._group.reduced(self._params.unpack(kind, grads)))

            grads = self._switch(of_kind, grads)
        if not self._stages.has_replicas:
            return grads
        return tuple(jax.lax.psum(array, STAGE, axis_index_groups=self._stages.groups) for array in grads)

    def part(self, array: tuple[str, str], grads: Packed) -> jax.Array:
        """Return this device's contribution to the gradient of an array; zeros if the device does not hold it."""
        layer, name = array
        shape = self._staged.mean_of(layer, name)

        def of_kind(kind: int, grads: Packed) -> jax.Array:
            held = self._mean.unpack(kind, grads)
            if name in held.get(layer, ()):
                return held[layer][name]
            return jax.lax.pcast(jnp.zeros_like(shape), self.summed_over, to="varying")

        return self.counted(self._switch(of_kind, grads))

    def replace(self, array: tuple[str, str], grads: Packed, total: jax.Array) -> Packed:
        """Return the gradients with that of an array replaced by `total`, if the device holds the array."""
        layer, name = array

        def of_kind(kind: int, grads: Packed, total: jax.Array) -> Packed:
            held = self._mean.unpack(kind, grads)
            if name not in held.get(layer, ()):
                return grads
            return self._mean.pack(kind, {**held, layer: {**held[layer], name: total}})

        # The same type as that of the gradients, which differ between stages.
        return self._switch(of_kind, grads, jax.lax.pcast(total, STAGE, to="varying"))

    def squares(self, grads: Packed) -> jax.Array:
        """Return the sum of squared gradients, without copies, so that the sum over devices counts each array once.

        The sum over devices is one over `summed_over`.
        """
        size = jax.lax.axis_size(DATA) if self._shards else 1

        def of_kind(kind: int, grads: Packed) -> jax.Array:
            mine = self._group.counted(self._mean.unpack(kind, grads))
            leaves = zip(jax.tree.leaves(mine), self._is_owner[kind], strict=True)
            own = [leaf if leaf.ndim else leaf / np.sqrt(size) for leaf, is_owner in leaves if is_owner]
            return sum((jnp.sum(jnp.square(leaf)) for leaf in own), jnp.zeros(()))

        return self.counted(self._switch(of_kind, grads))

    @property
    def summed_over(self) -> tuple[str, ...]:
        """The axes over which devices have different parts of the mean gradient."""
        return (STAGE, *self._group.split_axes, *((DATA,) if self._shards else ()))

    def norm(self, grads: Packed) -> jax.Array:
        """Return the norm of the gradient of this device's stage, with copies of arrays of other stages."""
        if not self._group.split_axes:
            return optax.tree.norm(grads)

        def of_kind(kind: int, grads: Packed) -> jax.Array:
            return optax.tree.norm(self._group.counted(self._params.unpack(kind, grads))) ** 2

        # Outside of the branches, because on CPUs nothing orders their collectives relative to others.
        return jnp.sqrt(jax.lax.psum(self._switch(of_kind, grads), self._group.split_axes))

    def scattered(self, grads: Packed) -> Packed:
        """Return this replica's shards of the mean gradient, whose collectives are outside of all branches."""

        def of_kind(kind: int, grads: Packed) -> Packed:
            whole = self._means[kind].to_global(self._params.unpack(kind, grads))
            shards = [self._mean.pack(kind, shard) for shard in self._means[kind].shards(whole, DATA, jnp)]
            return tuple(jnp.stack(of_replicas) for of_replicas in zip(*shards, strict=True))

        rows = self._switch(of_kind, grads)
        return tuple(jax.lax.psum_scatter(array, DATA) / len(array) for array in rows)

    def _gathered(self, params: Packed) -> Packed:
        """Return the parameters of this device from the shards of all replicas. The inverse of `scattered`."""

        def of_kind(kind: int, *of_replicas: Packed) -> Packed:
            shards = [self._mean.unpack(kind, packed) for packed in of_replicas]
            joined = self._means[kind].joined(shards, DATA, jnp)
            return self._params.pack(kind, self._means[kind].to_canonical(joined))

        gathered = [jax.lax.all_gather(array, DATA, to=EQUAL_ON_ALL) for array in params]
        return self._switch(of_kind, *zip(*gathered, strict=True))

    def counted(self, x: jax.Array) -> jax.Array:
        """Return a value of the first replica of each stage, and zeros on the others, so that a sum counts it once."""
        return jnp.where(self._counts, x, jnp.zeros_like(x)) if self._stages.has_replicas else x

    def __call__(
        self, state: PackedState, grads: Packed, sums: Sums, grad_norm: jax.Array, loss_scale: jax.Array | None = None
    ) -> tuple[PackedState, Metrics]:
        """Take one optimizer step. sums and grad_norm: those of the whole model and the global batch.

        loss_scale: as in `steps.update`.
        """
        params, optimizer = self._params, self._optimizer

        def of_kind(kind: int, state: PackedState, grads: Packed) -> tuple[PackedState, Metrics]:
            held = params.unpack(kind, state.params)
            held = self._shards.local(held) if self._shards else held
            before = State(state.step, state.key, held, optimizer.unpack(kind, state.optimizer))
            mean = self._mean.unpack(kind, grads)
            after, metrics = steps.update(self._problem, before, mean, sums, grad_norm, loss_scale)
            packed = self._mean.pack(kind, after.params), optimizer.pack(kind, after.optimizer)
            return PackedState(after.step, after.key, *packed), metrics

        after, metrics = self._switch(of_kind, state, grads)
        return after._replace(params=self._gathered(after.params)) if self._shards else after, metrics

    def _switch(self, of_kind: Callable[..., Any], *operands: Any) -> Any:
        with jax.named_scope(OF_KIND):
            branches = [partial(of_kind, kind) for kind in range(len(self._stages.examples))]
            return jax.lax.switch(self._kind, branches, *operands)
