"""Distributes the arrays of a tree, such as the parameters, over the devices of a pipeline."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar import layout
from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.leaf_paths import leaf_paths
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.layout import Holders, Layout
from jaxpar.strategies.pipeline.executor.packing import Packed, Packing
from jaxpar.strategies.pipeline.executor.stages import Stages


class StagedTree:
    """A tree with one or several arrays per parameter, distributed over the devices of a pipeline."""

    def __init__(
        self,
        group: ReplicaGroup,
        function: Callable[[Any], Any],
        stages: Stages,
        copies: int = 0,
        *,
        are_apart: bool = False,
    ):
        """Distribute the arrays of a tree.

        Args:
          group: the devices that compute a stage together.
          function: parameters -> tree. Each array of a layer must depend on the parameters of that layer alone.
          copies: if the arrays are sharded over the replicas, the number of groups that each hold all shards; 0: each
            replica holds whole arrays.
          are_apart: whether arrays that are split in a group are packed into vectors of their own.
        """
        shapes, axes = stages.model.shapes, group.params.axes
        self._split_over = (*group.split_axes, *((DATA,) if copies else ()))
        held = [stages.select(shapes, device) for device in stages.examples]
        of_group = [group.layout(jax.eval_shape(function, params)) for params in held]
        self.trees = [part.local_shapes for part in of_group]  # what a replica's device has of them, by kind of device
        # by kind of device, the layout of its part of the tree over the group and the replicas
        self.of_kinds = [in_shards(part, copies) for part in of_group]
        # packing of what each device holds of its part of the tree, by kind of device; marked: arrays that are apart
        marks = [[are_apart and bool(leaf.splits) for leaf in part.flat] for part in of_group]
        self.packing = Packing([part.local_shapes for part in self.of_kinds], marks)
        self.packed = layout.per_replica(axes, self.packing.shapes, *self._split_over, STAGE)  # packed arrays
        number = {leaf: i for i, leaf in enumerate(leaf_paths(function, shapes))}
        self._kinds, self._num_leaves = stages.kinds, len(number)
        # By device: the numbers of the canonical leaves that it holds, in the order of the local tree. The paths of
        # that tree have the layer names of the example of its kind, so they are translated to those of the device.
        self._numbers: list[list[int]] = []
        of_kinds = [leaf_paths(function, params) for params in held]
        for device, kind in enumerate(stages.kinds):
            names = stages.local_names(device)
            own = [leaf if leaf.layer is None else leaf._replace(layer=names[leaf.layer]) for leaf in of_kinds[kind]]
            self._numbers.append([number[leaf] for leaf in own])
        # By leaf: the devices that hold it, its owner first, which is the device with the leaf's layer, or the first of
        # its replicas. Leaves of no layer, such as a counter, are on all devices.
        owners: list[list[int]] = [[] for _ in number]
        others: list[list[int]] = [[] for _ in number]
        layers = [leaf.layer for leaf in number]
        for device, numbers in enumerate(self._numbers):
            on_device = set(stages.layer_names(device))
            for i in numbers:
                (owners if layers[i] in on_device else others)[i].append(device)
        holders = [
            None if layer is None else Holders(STAGE, (*first, *rest))
            for layer, first, rest in zip(layers, owners, others, strict=True)
        ]
        canonical = group.layout(jax.eval_shape(function, shapes))
        self._structure = jax.tree.structure(canonical.shapes)
        leaves = [leaf._replace(holders=of) for leaf, of in zip(canonical.flat, holders, strict=True)]
        # layout of the canonical tree: the devices that hold each leaf
        self.layout = in_shards(Layout(axes, jax.tree.unflatten(self._structure, leaves)), copies)

    def is_owner(self, device: int) -> list[bool]:
        """Return, for each leaf on a device, whether the device owns it. The other leaves are copies."""
        return [self.layout.owner_of(leaf) == device for leaf in self._numbers[device]]

    def split(self, tree: Any) -> list[Any]:
        """Return each device's part of a canonical tree, as NumPy arrays, named as on the example of its kind."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        structures = [jax.tree.structure(self.trees[kind]) for kind in self._kinds]
        parts = zip(structures, self._numbers, strict=True)
        return [jax.tree.unflatten(structure, [leaves[i] for i in numbers]) for structure, numbers in parts]

    def assemble(self, parts: Sequence[Any]) -> Any:
        """Return the canonical tree, with each leaf taken from the device that owns it. The inverse of `split`."""
        leaves: list[Any] = [None] * self._num_leaves
        for device, (numbers, held) in enumerate(zip(self._numbers, parts, strict=True)):
            for i, leaf in zip(numbers, jax.tree.leaves(held), strict=True):
                if self.layout.owner_of(i) == device:
                    leaves[i] = leaf
        return jax.tree.unflatten(self._structure, leaves)

    def distribute(self, tree: Any, mesh: Mesh) -> Packed:
        """Return the packed arrays of a canonical tree, distributed over the mesh."""
        parts: dict[tuple[int, ...], Packed] = {}  # by the leading dims of the packed arrays
        for device, (kind, held) in enumerate(zip(self._kinds, self.split(tree), strict=True)):
            of_kind = self.of_kinds[kind]
            shards: dict[tuple[int, ...], Any] = {(): of_kind.to_global(held, np)}
            for axis in self._split_over:
                shards = {(*i, j): x for i, of in shards.items() for j, x in enumerate(of_kind.shards(of, axis))}
            parts |= {(*i, device): self.packing.pack(kind, shard, np) for i, shard in shards.items()}

        def stacked(like: jax.ShapeDtypeStruct, number: int) -> jax.Array:
            def of_devices(index: Any) -> np.ndarray:
                places = [range(size)[part] for size, part in zip(self._leading, index, strict=False)]
                stack = np.stack([parts[place][number] for place in itertools.product(*places)])
                return stack.reshape(*map(len, places), *stack.shape[1:])

            return jax.make_array_from_callback(like.shape, like.sharding, of_devices)

        return tuple(stacked(like, number) for number, like in enumerate(self.packed.abstract(mesh)))

    def collect(self, packed: Sequence[np.ndarray]) -> Any:
        """Return the canonical tree of packed global arrays."""
        held = []
        for device, kind in enumerate(self._kinds):

            def part(*index: int, device: int = device, kind: int = kind) -> Any:
                """Return what the devices at these indices of the axes hold together."""
                if len(index) == len(self._split_over):
                    return self.packing.unpack(kind, [array[*index, device] for array in packed])
                shards = [part(*index, i) for i in range(self._leading[len(index)])]
                return self.of_kinds[kind].joined(shards, self._split_over[len(index)])

            held.append(self.of_kinds[kind].to_canonical(part()))
        return self.assemble(held)

    @property
    def _leading(self) -> tuple[int, ...]:
        """The leading dims of the packed global arrays."""
        return (*(self.packed.axes[axis] for axis in self._split_over), len(self._kinds))


def in_shards(tree: Layout, copies: int) -> Layout:
    """Return a layout in which `copies` groups of replicas each hold all shards of its arrays; 0: whole arrays."""
    return tree.sharded(DATA, copies) if copies else tree
