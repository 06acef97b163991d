"""The state of a pipeline, distributed over its devices, and the optimizer step on each device.

A device holds the parameters of its layers, their optimizer state, and copies of arrays on other devices that are tied
to its layers, all packed into arrays of the same shapes on every device. `step` and `key` are replicated.
"""

from collections.abc import Callable, Mapping, Sequence
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
from jaxpar.core.leaf_paths import LeafPath, leaf_paths
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.exchange.clip import already_clipped
from jaxpar.exchange.exchange import AllReduce
from jaxpar.launch import processes
from jaxpar.layout import Holders, Layout, LeafLayout
from jaxpar.strategies.pipeline.executor.branches import OF_KIND
from jaxpar.strategies.pipeline.executor.packing import Packed, Packing
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.tasks import Sums


class PackedState(NamedTuple):
    """A State in packed form. Arrays of `params` and `optimizer` have a leading dim over the devices of the stage axis.

    `private` is the private state of the gradient exchange on each replica; its arrays have leading dims over the
    devices of the stage axis and over the replicas.
    """

    step: Any
    key: Any
    params: Any
    optimizer: Any
    private: Any = ()


class StagedTree:
    """A tree with one or several arrays per parameter, distributed over the devices of a pipeline."""

    def __init__(self, axes: Mapping[str, int], function: Callable[[Any], Any], stages: Stages):
        """function: parameters -> tree. Each array of a layer must depend on the parameters of that layer alone."""
        shapes = stages.model.shapes
        like = jax.eval_shape(function, shapes)
        held = [stages.select(shapes, device) for device in stages.examples]
        # packing of each device's part of the tree, by kind of device
        self.packing = Packing([jax.eval_shape(function, params) for params in held])
        self.packed = layout.per_replica(axes, tuple(self.packing.shapes), STAGE)  # layout of the packed arrays
        number = {leaf: i for i, leaf in enumerate(leaf_paths(function, shapes))}
        # By device: the numbers of the canonical leaves that it holds, in the order of the local tree.
        self._numbers: list[list[int]] = []
        of_kinds = [leaf_paths(function, params) for params in held]
        for device, kind in enumerate(stages.kinds):
            names = stages.local_names(device)
            self._numbers.append([number[_of_device(leaf, names)] for leaf in of_kinds[kind]])
        self._kinds, self._structure = stages.kinds, jax.tree.structure(like)
        self._num_leaves = len(number)
        holders = self._find_holders([leaf.layer for leaf in number], stages)
        leaves = [
            LeafLayout(leaf.shape, leaf.dtype, holders=of_leaf)
            for leaf, of_leaf in zip(jax.tree.leaves(like), holders, strict=True)
        ]
        # layout of the canonical tree: the devices that hold each leaf
        self.layout = Layout(axes, jax.tree.unflatten(self._structure, leaves))

    def _find_holders(self, layers: Sequence[str | None], stages: Stages) -> list[Holders | None]:
        """Return the devices that hold each leaf, its owner first; None for leaves on all devices, such as a counter.

        The owner is the device with the leaf's layer, or the first of its replicas.

        Args:
          layers: layer of each leaf; None for leaves that belong to no layer.
          stages: the stages.
        """
        owners: list[list[int]] = [[] for _ in layers]
        others: list[list[int]] = [[] for _ in layers]
        for device, numbers in enumerate(self._numbers):
            names = set(stages.layer_names(device))
            for leaf in numbers:
                (owners if layers[leaf] in names else others)[leaf].append(device)
        devices = [first + rest for first, rest in zip(owners, others, strict=True)]
        return [None if layer is None else Holders(STAGE, tuple(of)) for layer, of in zip(layers, devices, strict=True)]

    def is_owner(self, device: int) -> list[bool]:
        """Return, for each leaf on a device, whether the device owns it. The other leaves are copies."""
        return [self.layout.owner_of(leaf) == device for leaf in self._numbers[device]]

    def split(self, tree: Any) -> list[Any]:
        """Return each device's part of a canonical tree, as NumPy arrays, named as on the example of its kind."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        structures = [jax.tree.structure(self.packing.tree(kind)) for kind in self._kinds]
        return [
            jax.tree.unflatten(structure, [leaves[i] for i in numbers])
            for structure, numbers in zip(structures, self._numbers, strict=True)
        ]

    def scatter(self, tree: Any) -> list[Packed]:
        """Return each device's part of a canonical tree, packed, as NumPy arrays."""
        parts = zip(self._kinds, self.split(tree), strict=True)
        return [self.packing.pack(kind, held, np) for kind, held in parts]

    def distribute(self, tree: Any, mesh: Mesh) -> Packed:
        """Return the packed arrays of a canonical tree, distributed over the mesh."""
        arrays = zip(*self.scatter(tree), self.packed.abstract(mesh), strict=True)
        return tuple(_on_mesh(by_device, like) for *by_device, like in arrays)

    def collect(self, packed: Sequence[np.ndarray]) -> Any:
        """Return the canonical tree of packed global arrays."""
        kinds = enumerate(self._kinds)
        return self.assemble([self.packing.unpack(kind, [array[device] for array in packed]) for device, kind in kinds])

    def assemble(self, parts: Sequence[Any]) -> Any:
        """Return the canonical tree, with each leaf taken from the device that owns it. The inverse of `split`."""
        leaves: list[Any] = [None] * self._num_leaves
        for device, (numbers, held) in enumerate(zip(self._numbers, parts, strict=True)):
            for i, leaf in zip(numbers, jax.tree.leaves(held), strict=True):
                if self.layout.owner_of(i) == device:
                    leaves[i] = leaf
        return jax.tree.unflatten(self._structure, leaves)


def _of_device(path: LeafPath, names: Mapping[str, str]) -> LeafPath:
    """Translate the path of a leaf on the representative device of a kind.

    names: a device's layer names, keyed by those of the representative device.
    """
    return path if path.layer is None else path._replace(layer=names[path.layer])


class StagedState:
    """The distribution of a problem's state over the devices of a pipeline. It can be computed without devices.

    Attributes:
      problem: the problem; its optimizer clips nothing if `all_reduce` has a clip_norm.
      stages: the stages.
      params: distribution of the parameters.
      optimizer: distribution of the optimizer state.
      all_reduce: the gradient exchange between replicas.
      private: layout of the private state of `all_reduce`.
      layouts: the devices that hold each leaf of the canonical state, and the layout of the private state.
      packed_layouts: layouts of the parts of a PackedState.
      packed: layout of a PackedState.
    """

    def __init__(self, axes: Mapping[str, int], problem: Problem, stages: Stages, all_reduce: AllReduce):
        if all_reduce.clip_norm:
            problem = problem._replace(optimizer=already_clipped(problem.optimizer))
        self.problem, self.stages, self.all_reduce = problem, stages, all_reduce
        self.params = StagedTree(axes, lambda params: params, stages)
        self.optimizer = StagedTree(axes, problem.optimizer.init, stages)
        self.private = layout.made_by_replicas(axes, self._init_private, DATA, STAGE)
        like = states.abstract_state(problem.model, problem.optimizer)
        step, key = layout.replicated(axes, like.step), layout.replicated(axes, like.key)
        self.layouts = PackedState(step, key, self.params.layout, self.optimizer.layout, self.private)
        self.packed_layouts = PackedState(step, key, self.params.packed, self.optimizer.packed, self.private)
        self.packed = layout.join(self.packed_layouts)

    @property
    def memory(self) -> Mapping[str, Layout]:
        """Layouts of the state by purpose, for `state_memory`. Each device needs as much as the one with most."""
        layouts: dict[str, Layout] = self.packed_layouts._asdict()
        return layouts

    def init(self, key: jax.Array, mesh: Mesh) -> PackedState:
        """Return the state at step 0. Each device initializes only its own part."""
        params_of, optimizer_of = self.params.packing, self.optimizer.packing

        def on_device(key: jax.Array) -> PackedState:
            device = jax.lax.axis_index(STAGE)
            init_key, run_key = states.split(key)
            shifts = jnp.asarray(self.stages.shifts)[device]

            def of_kind(kind: int) -> tuple[Packed, Packed]:
                params = self.stages.init(init_key, kind, shifts)
                return params_of.pack(kind, params), optimizer_of.pack(kind, self.problem.optimizer.init(params))

            kinds = [partial(of_kind, kind) for kind in range(len(self.stages.examples))]
            params, optimizer = jax.lax.switch(jnp.asarray(self.stages.kinds)[device], kinds)
            state = PackedState(jnp.zeros((), jnp.int32), run_key, params, optimizer, self._init_private())
            return self.packed.out(state)

        specs = {"in_specs": PartitionSpec(), "out_specs": self.packed.specs}
        return jax.jit(jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs))(key)

    def init_private(self, mesh: Mesh) -> Any:
        """Return the private state at step 0."""

        def on_device() -> Any:
            return self.private.out(self._init_private())

        specs = {"in_specs": (), "out_specs": self.private.specs}
        return jax.jit(jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs))()

    def distribute(self, state: State, private: Canonical | None, mesh: Mesh) -> PackedState:
        """Distribute a canonical state over the mesh.

        Args:
          state: the canonical state; leaves may be NumPy arrays, or arrays on any device.
          private: private state of the exchange, in canonical form; None or empty: as at step 0.
          mesh: the mesh.
        """
        shardings = self.packed.shardings(mesh)
        step, key = jax.device_put((state.step, state.key), (shardings.step, shardings.key))
        params, optimizer = self.params.distribute(state.params, mesh), self.optimizer.distribute(state.optimizer, mesh)
        if private:
            tree = serialization.from_state_dict(self.private.shapes, private)
            return PackedState(step, key, params, optimizer, jax.device_put(tree, shardings.private))
        return PackedState(step, key, params, optimizer, self.init_private(mesh))

    def newest(self, state: PackedState) -> PackedState:
        """Return the state with the newest weights alone: the state itself."""
        return state

    def private_state(self, state: PackedState) -> Canonical:
        """Return the private state of the exchange."""
        private: Canonical = serialization.to_state_dict(state.private) if jax.tree.leaves(state.private) else {}
        return private

    def gather(self, state: PackedState) -> State:
        """Return the canonical state, as NumPy arrays."""
        step, key, params, optimizer = processes.fetch(state[:4])
        return State(step, key, self.params.collect(params), self.optimizer.collect(optimizer))

    def _init_private(self) -> Any:
        return self.all_reduce.init(self.params.packing.shapes)


def _on_mesh(by_device: Sequence[np.ndarray], like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the global array that stacks the devices' arrays along dim 0. like: its shape, dtype and sharding."""

    def of_devices(index: Any) -> np.ndarray:
        return np.stack(by_device[index[0]])

    return jax.make_array_from_callback(like.shape, like.sharding, of_devices)


class StageUpdate:
    """The optimizer step on one device's part of the state: one branch per kind of device, as their layers differ.

    For use inside `shard_map`. Parameters and gradients are packed.
    """

    def __init__(self, staged: StagedState, device: jax.Array):
        """device: index of this device on the stage axis."""
        self._problem, stages = staged.problem, staged.stages
        self._params, self._optimizer = staged.params.packing, staged.optimizer.packing
        self._copies = [{(tie.source, tie.source_name) for tie in stages.copies(d)} for d in stages.examples]
        self._is_owner = [staged.params.is_owner(d) for d in stages.examples]
        self._kind = jnp.asarray(stages.kinds)[device]
        # Replicas of a stage hold the same gradient, of which one counts.
        self._groups = stages.groups
        self._counts = jnp.asarray([stages.is_first(d) for d in range(len(stages.kinds))])[device]
        # tied arrays that several devices hold, as (layer, name)
        self.copied: list[tuple[str, str]] = sorted(set().union(*self._copies))

    def over_replicas(self, grads: Packed) -> Packed:
        """Return the sum of the gradients of the replicas of a stage, each of which has some of the microbatches."""
        if not self._groups:
            return grads
        return tuple(jax.lax.psum(array, STAGE, axis_index_groups=self._groups) for array in grads)

    def part(self, array: tuple[str, str], grads: Packed) -> jax.Array:
        """Return this device's contribution to the gradient of an array; zeros if the device does not hold it."""
        layer, name = array

        def of_kind(kind: int, grads: Packed) -> jax.Array:
            held = self._params.unpack(kind, grads)
            return held[layer][name] if name in held.get(layer, ()) else jnp.zeros_like(self._shape(array))

        return self.counted(self._switch(of_kind, grads))

    def replace(self, array: tuple[str, str], grads: Packed, total: jax.Array) -> Packed:
        """Return the gradients with that of an array replaced by `total`, if the device holds the array."""
        layer, name = array

        def of_kind(kind: int, grads: Packed, total: jax.Array) -> Packed:
            held = self._params.unpack(kind, grads)
            if name not in held.get(layer, ()):
                return grads
            return self._params.pack(kind, {**held, layer: {**held[layer], name: total}})

        return self._switch(of_kind, grads, total)

    def squares(self, grads: Packed) -> jax.Array:
        """Return the sum of squared gradients, without copies, so that the sum over devices counts each array once."""

        def of_kind(kind: int, grads: Packed) -> jax.Array:
            leaves = zip(jax.tree.leaves(self._params.unpack(kind, grads)), self._is_owner[kind], strict=True)
            return sum((jnp.sum(jnp.square(leaf)) for leaf, is_owner in leaves if is_owner), jnp.zeros(()))

        return self.counted(self._switch(of_kind, grads))

    def norm_part(self, grads: Packed) -> jax.Array:
        """Return the sum of squared gradients, with copies, so that the sum over devices counts each stage once."""
        return self.counted(optax.tree.norm(grads) ** 2)

    def counted(self, x: jax.Array) -> jax.Array:
        """Return a value of the first replica of each stage, and zeros on the others, so that a sum counts it once."""
        return jnp.where(self._counts, x, jnp.zeros_like(x)) if self._groups else x

    def __call__(
        self, state: PackedState, grads: Packed, sums: Sums, grad_norm: jax.Array
    ) -> tuple[PackedState, Metrics]:
        """Take one optimizer step. sums and grad_norm: those of the whole model and the global batch."""
        params, optimizer = self._params, self._optimizer

        def of_kind(kind: int, state: PackedState, grads: Packed) -> tuple[PackedState, Metrics]:
            held = State(
                state.step, state.key, params.unpack(kind, state.params), optimizer.unpack(kind, state.optimizer)
            )
            held, metrics = steps.update(self._problem, held, params.unpack(kind, grads), sums, grad_norm)
            packed = params.pack(kind, held.params), optimizer.pack(kind, held.optimizer)
            return PackedState(held.step, held.key, *packed), metrics

        return self._switch(of_kind, state, grads)

    def _shape(self, array: tuple[str, str]) -> jax.ShapeDtypeStruct:
        return self._problem.model.shapes[array[0]][array[1]]

    def _switch(self, of_kind: Callable[..., Any], *operands: Any) -> Any:
        kinds = range(len(self._copies))
        with jax.named_scope(OF_KIND):
            return jax.lax.switch(self._kind, [partial(of_kind, kind) for kind in kinds], *operands)
