"""The tensor axis: groups of neighbouring devices that compute each layer together (Shoeybi et al., "Megatron-LM", 2019).

A device has some columns of the kernels of the first products of a block and some rows of those of the second ones, as
jaxpar/models/group.py lists, and 1/t of the positions in between (Korthikanti et al., 2022, section 4.2): positions are
gathered before the first product, and scattered with the sum over the group after the second one.

All devices of a group compute the same loss, and each differentiates 1/t of it. JAX's derivatives of the collectives are
those of the sum of what the devices differentiate, which is the loss. So the gradient of an array that is split is
complete, and that of an array that all have is the sum of those of the devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.core.mesh import TENSOR
from jaxpar.core.plan import Traffic, ring_traffic
from jaxpar.core.state import State, nbytes
from jaxpar.core.step import Problem
from jaxpar.layout import DimSplit, Layout, LeafLayout, Tree, is_layout, pad, replicated
from jaxpar.models.model import Model


@jax.tree_util.register_static
@dataclass(frozen=True)
class TensorGroup:
    """The devices of a tensor axis, as `jaxpar.models.group.Group`. Its functions are called inside `shard_map`."""

    size: int

    def index(self) -> jax.Array:
        return jax.lax.axis_index(TENSOR)

    def total(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, TENSOR)

    def maximum(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(jax.lax.stop_gradient(x), TENSOR)

    def columns(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True)

    def whole(self, x_BTD: jax.Array, number: int) -> jax.Array:
        return jax.lax.all_gather(x_BTD, TENSOR, axis=1, tiled=True)[:, :number]

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        padded = pad(x, self.size, dim=dim)
        share = padded.shape[dim] // self.size
        return jax.lax.dynamic_slice_in_dim(padded, self.index() * share, share, dim)

    def summed(self, x_BTD: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(pad(x_BTD, self.size, dim=1), TENSOR, scatter_dimension=1, tiled=True)

    def rows(self, table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        places_BT = indices_BT - self.index() * len(table_VD)
        is_own_BT = (places_BT >= 0) & (places_BT < len(table_VD))
        rows_BTD = table_VD[jnp.where(is_own_BT, places_BT, 0)]
        return self.summed(jnp.where(is_own_BT[..., None], rows_BTD, 0))


class TensorParallel:
    """What a strategy needs of the tensor axis: the problem of a device, and sums over the group."""

    def __init__(self, problem: Problem, axes: Mapping[str, int]):
        """problem: of the whole model. axes: with a tensor axis."""
        self.group, self._axes = TensorGroup(axes[TENSOR]), axes
        self.params = split_layout(axes, problem.model.shapes, problem.model)
        model = problem.model.in_group(self.group, self.params.local_shapes)
        self.problem = problem._replace(model=model)  # of the arrays that a device has
        self._is_split = jax.tree.map(lambda leaf: bool(leaf.splits), self.params.leaves, is_leaf=is_layout)

    def layouts(self, like: State) -> State:
        """Return the layouts of the parts of a canonical state of these shapes."""
        step, key = replicated(self._axes, like.step), replicated(self._axes, like.key)
        optimizer = split_layout(self._axes, like.optimizer, self.problem.model)
        return State(step, key, self.params, optimizer)  # type: ignore[arg-type]

    def reduced(self, grads: Tree) -> Tree:
        """Return the gradients after summing those of arrays that all devices of the group have."""
        leaves, structure = jax.tree.flatten(grads)
        is_split = jax.tree.leaves(self._is_split)
        summed = jax.lax.psum([x for x, split in zip(leaves, is_split, strict=True) if not split], TENSOR)
        others = iter(summed)
        return jax.tree.unflatten(structure, [x if s else next(others) for x, s in zip(leaves, is_split, strict=True)])

    def norm(self, tree: Tree) -> jax.Array:
        """Return the norm of a tree like the parameters, of whose split arrays each device has a part."""
        share = 1 / math.sqrt(self.group.size)
        mine = jax.tree.map(lambda x, split: x if split else x * share, tree, self._is_split)
        return jnp.sqrt(jax.lax.psum(optax.tree.norm(mine) ** 2, TENSOR))

    def traffic(self) -> list[Traffic]:
        """Return what a device sends on the tensor axis in a step."""
        return []


def split_layout(axes: Mapping[str, int], like: Tree, model: Model) -> Layout:
    """Return the layout of the parameters of a model, or of an optimizer state for them, over the tensor axis."""
    assert model.tensor is not None
    dims, layers = model.tensor.dims, {layer.name for layer in model.layers}

    def leaf_layout(path: Sequence[Any], leaf: LeafLayout) -> LeafLayout:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        dim = dims.get(tuple(names[-1:] if names[-2:-1] and names[-2] in layers else names[-2:]))
        return leaf if dim is None else leaf._replace(splits=(DimSplit(dim, TENSOR),))

    whole = replicated(axes, like).leaves
    return Layout(axes, jax.tree_util.tree_map_with_path(leaf_layout, whole, is_leaf=is_layout))
