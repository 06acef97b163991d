"""The devices of each stage of a dispatched pipeline, and views of arrays on some of them, without copies.

A *column* of the mesh is one index of the stage axis, with all its replicas on the data axis. The columns of a
replicated stage form a *group*; other columns are groups of their own. Arrays have one of four forms:

    ON_ALL       P()              equal on all devices: parameters, optimizer state, scalars
    DIVIDED      P(None, data)    [m, B, ..] microbatches, whose examples are divided among the replicas
    BY_REPLICA   P(data)          [data] a scalar of each replica
    LOCAL        P(data, stage)   [data, stage, ..] different on each device: activations, stashes, gradients
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.core.mesh import DATA, STAGE
from jaxpar.layout import Tree
from jaxpar.strategies.pipeline.executor.enqueue import arrivals_of, made

ON_ALL, DIVIDED = PartitionSpec(), PartitionSpec(None, DATA)
BY_REPLICA, LOCAL = PartitionSpec(DATA), PartitionSpec(DATA, STAGE)


class MeshColumns:
    """The columns of a mesh, and their groups."""

    def __init__(self, mesh: Mesh, groups: Sequence[Sequence[int]]):
        """groups: see the attribute; empty: each column is a group."""
        columns = range(mesh.shape[STAGE])
        self.mesh = mesh  # the mesh of all devices
        # the columns of each group, in the order of the stages
        self.groups = [list(group) for group in groups] or [[column] for column in columns]
        # group of each column
        self.group_of = {column: number for number, group in enumerate(self.groups) for column in group}
        self.of_column = [submesh(mesh, [column]) for column in columns]  # mesh of each column
        self.of_group = [submesh(mesh, group) for group in self.groups]  # mesh of each group

    def split(self, tree: Tree) -> list[Tree]:
        """Return a tree on the whole mesh as it is on each column."""
        return [restricted(tree, column) for column in self.of_column]

    def split_group(self, group: int, tree: Tree) -> dict[int, Tree]:
        """Return a tree on a group as it is on each of its columns."""
        return {column: restricted(tree, self.of_column[column]) for column in self.groups[group]}

    def joined(self, group: int, trees: Sequence[Tree]) -> Tree:
        """Return trees on the columns of a group, in the form LOCAL, as one tree on the group."""
        if len(trees) == 1:
            return trees[0]
        mesh = self.of_group[group]

        def join(*parts: Any) -> Any:
            num_data, _, *rest = parts[0].shape
            return _assembled(parts, (num_data, len(parts), *rest), NamedSharding(mesh, LOCAL))

        return jax.tree.map(join, *trees)


def without_leading(tree: Tree) -> Tree:
    """Return arrays of the form LOCAL as a device sees them inside `shard_map`: without their leading dims."""
    return jax.tree.map(lambda x: x[0, 0], tree)


def with_leading(tree: Tree) -> Tree:
    """Return arrays with the leading dims of the form LOCAL. The inverse of `without_leading`."""
    return jax.tree.map(lambda x: x[None, None], tree)


def submesh(mesh: Mesh, columns: Sequence[int]) -> Mesh:
    """Return the mesh of some columns."""
    return Mesh(mesh.devices[:, list(columns)], mesh.axis_names, axis_types=mesh.axis_types)


def restricted(tree: Tree, mesh: Mesh) -> Tree:
    """Return arrays that are equal on all columns as they are on some of them."""
    return jax.tree.map(
        lambda x: x if x.sharding.mesh == mesh else _assembled([x], x.shape, NamedSharding(mesh, x.sharding.spec)), tree
    )


def _assembled(parts: Sequence[Any], shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the array whose shards are those of `parts` on its devices; of shapes, the shape."""
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        arrivals = {call: nbytes for part in parts for call, nbytes in arrivals_of(part).items()}
        return made(jax.ShapeDtypeStruct(shape, parts[0].dtype), sharding, arrivals)
    shards: Mapping[Any, Any] = {shard.device: shard.data for part in parts for shard in part.addressable_shards}
    in_order = [shards[device] for device in sharding.mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, in_order, dtype=parts[0].dtype)
