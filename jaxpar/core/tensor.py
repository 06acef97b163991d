"""The tensor axis: groups of neighbouring devices that compute each layer together (Shoeybi et al., 2019, Megatron-LM).

A device has some columns of the kernels of the first products of a block and some rows of those of the second ones, as
jaxpar/models/group.py lists, and 1/t of the positions in between (Korthikanti et al., 2022, section 4.2): positions are
gathered before the first product, and scattered with the sum over the group after the second one.

All devices of a group compute the same loss, and each differentiates 1/t of it. JAX's derivatives of the collectives
are those of the sum of what the devices differentiate, which is the loss. So the gradient of an array that is split is
complete, and that of an array that all have is the sum of those of the devices.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxpar.core.mesh import TENSOR
from jaxpar.core.plan import Traffic, ring_traffic
from jaxpar.core.ring import RING_PASSES
from jaxpar.core.state import State
from jaxpar.core.step import Problem
from jaxpar.layout import DimSplit, Layout, LeafLayout, Tree, is_layout, pad, replicated
from jaxpar.models.model import Layer, Model


@jax.tree_util.register_static
@dataclass(frozen=True)
class TensorGroup:
    """The devices of a tensor axis, as `jaxpar.models.group.DeviceGroup`. For use inside `shard_map`."""

    size: int

    def index(self) -> jax.Array:
        """Return the index of this device in the group."""
        return jax.lax.axis_index(TENSOR)

    def total(self, x: jax.Array) -> jax.Array:
        """Return the sum over the group."""
        return jax.lax.psum(x, TENSOR)

    def maximum(self, x: jax.Array) -> jax.Array:
        """Return the maximum over the group, as a constant of the gradient."""
        return jax.lax.pmax(jax.lax.stop_gradient(x), TENSOR)

    def columns(self, x: jax.Array) -> jax.Array:
        """Return the columns of all devices, along the last dim."""
        return jax.lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True)

    def whole(self, x_BTD: jax.Array, number: int) -> jax.Array:
        """Return all positions of an array of which each device has its own."""
        return jax.lax.all_gather(x_BTD, TENSOR, axis=1, tiled=True)[:, :number]

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Return this device's positions of an array with all positions."""
        padded = pad(x, self.size, dim=dim)
        share = padded.shape[dim] // self.size
        return jax.lax.dynamic_slice_in_dim(padded, self.index() * share, share, dim)

    def summed(self, x_BTD: jax.Array) -> jax.Array:
        """Return this device's positions of the sum over the group."""
        return jax.lax.psum_scatter(pad(x_BTD, self.size, dim=1), TENSOR, scatter_dimension=1, tiled=True)

    def rows(self, table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        """Return this device's positions of the rows of a table of which each device has some."""
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

    def with_remat(self, remat: str) -> "TensorParallel":
        """Return the same for another kind of rematerialization."""
        other = copy.copy(self)
        other.problem = self.problem._replace(model=self.problem.model.with_remat(remat))
        return other

    def layouts(self, like: State) -> dict[str, Layout]:
        """Return the layouts of the parts of a canonical state of these shapes."""
        return {part: split_layout(self._axes, tree, self.problem.model) for part, tree in like._asdict().items()}

    def reduced(self, grads: Tree) -> Tree:
        """Return the gradients after summing those of arrays that all devices of the group have."""
        leaves, structure = jax.tree.flatten(grads)
        is_split = jax.tree.leaves(self._is_split)
        vector, unravel = ravel_pytree([x for x, split in zip(leaves, is_split, strict=True) if not split])
        others = iter(unravel(jax.lax.psum(vector, TENSOR)))
        return jax.tree.unflatten(structure, [x if s else next(others) for x, s in zip(leaves, is_split, strict=True)])

    def norm(self, tree: Tree) -> jax.Array:
        """Return the norm of a tree like the parameters, of whose split arrays each device has a part."""
        share = 1 / math.sqrt(self.group.size)
        mine = jax.tree.map(lambda x, split: x if split else x * share, tree, self._is_split)
        return jnp.sqrt(jax.lax.psum(optax.tree.norm(mine) ** 2, TENSOR))

    def traffic(self, num_replicas: int, grads: Layout, *, on_cpu: bool) -> list[Traffic]:
        """Return what a device sends on the tensor axis in a step.

        For each pair of products, the positions are gathered before it and scattered after it, and in the backward pass
        the other way round. The head gathers them, too. The backward pass first gathers them again, unless XLA merges
        both; with rematerialization, it also scatters them again, but at the end of a layer only before a norm.

        grads: the layout of the gradients. on_cpu: whether XLA widens what is sent.
        """
        model, size = self.problem.model, self.group.size
        x, [first, *_, last] = model.inputs(self.problem.batch)[1], model.layers
        examples, remat = x.shape[0] // num_replicas, model.remat != "none"
        dtype = np.float32 if on_cpu else x.dtype
        values = examples * -(-x.shape[1] // size) * size * x.shape[2]
        pairs = [layer.num_applications * self._num_pairs(layer) for layer in model.layers]
        number, layers = sum(pairs), sum(map(bool, pairs))
        # (kind, dtype, elements of an array, number of arrays, those of them that are sent in any case)
        most, least = 3 * number + 1 + ("tokens" not in last.shapes), 2 * number + 1  # tokens: the loss keeps its input
        rows = [("all-gather", dtype, values, most, least)]
        most, least = 2 * number + 1 + remat * number, 2 * number + 1 + remat * (number - layers)
        rows += [("reduce-scatter", dtype, values, most, least)]
        if "tokens" in first.shapes:  # the rows of the embedding
            of_gradient = np.float32 if "norm" in first.shapes else dtype
            rows += [("reduce-scatter", np.float32, values, 1 + remat, 1), ("all-gather", of_gradient, values, 1, 1)]
        if "tokens" in last.shapes:  # maxima and sums of the loss, and its derivative; the most likely words
            tokens = examples * x.shape[1]
            rows += [("all-reduce", np.float32, tokens, 5, 3), ("all-reduce", np.int32, tokens, 1, 1)]
        shapes, is_split = jax.tree.leaves(grads.local_shapes), jax.tree.leaves(self._is_split)
        both = [one for one, split in zip(shapes, is_split, strict=True) if not split]
        rows += [("all-reduce", np.float32, sum(one.size for one in both), 1, 1)]
        return [
            ring_traffic(
                kind,
                RING_PASSES[kind],
                TENSOR,
                size,
                sent * length * np.dtype(dtype).itemsize,
                np.dtype(dtype).name,
                num_vectors=sent,
            )._replace(required=least / sent)
            for kind, dtype, length, sent, least in rows
        ]

    def _num_pairs(self, layer: Layer) -> int:
        """Return how many pairs of products a layer has: the second one splits the rows of its kernel."""
        paths = jax.tree_util.tree_leaves_with_path(self.params.leaves[layer.name], is_leaf=is_layout)
        dims = [[split.dim for split in leaf.splits] for path, leaf in paths if "kernel" in jax.tree_util.keystr(path)]
        return dims.count([0])


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
