"""The tensor and context axes: neighbouring devices that compute each layer together.

A device of a tensor axis has some columns of the kernels of the first products of a block and some rows of those of the
second ones, as jaxpar/models/group.py lists (Shoeybi et al., "Megatron-LM", 2019), and 1/t of the positions in between
(Korthikanti et al., 2022, section 4.2): positions are gathered before the first product, and scattered with the sum
over the group after the second one.

All devices of a group compute the same loss, and each differentiates 1/t of it. JAX's derivatives of the collectives
are those of the sum of what the devices differentiate, which is the loss. So the gradient of an array that is split is
complete, and that of an array that all have is the sum of those of the devices.

The devices of a context axis have different positions of each text, and all arrays of the model (context.py).
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxpar.core.context import attend_in_context, gathered_texts, own_positions, padded_length
from jaxpar.core.mesh import CONTEXT, DATA, GROUP_AXES, TENSOR
from jaxpar.core.plan import Traffic, ring_traffic
from jaxpar.core.ring import RING_PASSES
from jaxpar.core.state import State
from jaxpar.core.step import Problem
from jaxpar.layout import DimSplit, Layout, LeafLayout, Tree, is_layout, pad, replicated
from jaxpar.models.model import Layer, Model, Params


@jax.tree_util.register_static
@dataclass(frozen=True)
class MeshGroup:
    """The devices of a tensor and a context axis, as `jaxpar.models.group.DeviceGroup`.

    Its functions are called inside `shard_map`.
    """

    size: int  # of the tensor axis
    context: int = 1

    def index(self) -> jax.Array:
        """Return the index of this device on the tensor axis."""
        return jax.lax.axis_index(TENSOR) if self.size > 1 else jnp.zeros((), jnp.int32)

    def total(self, x: jax.Array) -> jax.Array:
        """Return the sum over the tensor axis."""
        return jax.lax.psum(x, TENSOR) if self.size > 1 else x

    def maximum(self, x: jax.Array) -> jax.Array:
        """Return the maximum over the tensor axis, as a constant of the gradient."""
        x = jax.lax.stop_gradient(x)
        return jax.lax.pmax(x, TENSOR) if self.size > 1 else x

    def columns(self, x: jax.Array) -> jax.Array:
        """Return the columns of all devices of the tensor axis, along the last dim."""
        return jax.lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True) if self.size > 1 else x

    def whole(self, x_BTD: jax.Array, number: int) -> jax.Array:
        """Return all positions of an array of which each device of the tensor axis has its own."""
        return jax.lax.all_gather(x_BTD, TENSOR, axis=1, tiled=True)[:, :number] if self.size > 1 else x_BTD

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Return this device's positions of an array with all positions of the tensor axis."""
        if self.size == 1:
            return x
        padded = pad(x, self.size, dim=dim)
        share = padded.shape[dim] // self.size
        return jax.lax.dynamic_slice_in_dim(padded, self.index() * share, share, dim)

    def summed(self, x_BTD: jax.Array) -> jax.Array:
        """Return this device's positions of the sum over the tensor axis."""
        if self.size == 1:
            return x_BTD
        return jax.lax.psum_scatter(pad(x_BTD, self.size, dim=1), TENSOR, scatter_dimension=1, tiled=True)

    def rows(self, table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        """Return this device's positions of the rows of a table of which each device has some."""
        if self.size == 1:
            return table_VD[indices_BT]
        places_BT = indices_BT - self.index() * len(table_VD)
        is_own_BT = (places_BT >= 0) & (places_BT < len(table_VD))
        rows_BTD = table_VD[jnp.where(is_own_BT, places_BT, 0)]
        return self.summed(jnp.where(is_own_BT[..., None], rows_BTD, 0))

    def positions(self, number: int) -> jax.Array:
        """Return the positions in the text of the elements that this device has."""
        return own_positions(number, self.context) if self.context > 1 else jnp.arange(number)

    def texts(self, x: jax.Array) -> jax.Array:
        """Return whole texts, of which each device of the context axis has some positions."""
        return gathered_texts(x, self.context) if self.context > 1 else x

    @property
    def attend(self) -> Callable[..., jax.Array]:
        """The attention of this device's positions to all positions of the texts."""
        return partial(attend_in_context, context=self.context)


class InferenceGroup(MeshGroup):
    """The devices of a tensor axis that all have all positions, as in Megatron-LM (2019).

    A device that has some of them saves fewer activations for a backward pass, and inference has none. The next
    position of a text is a single one, which cannot be divided.
    """

    def whole(self, x_BTD: jax.Array, number: int) -> jax.Array:
        """Return the array, which has all positions."""
        return x_BTD

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Return the array, of which each device has all positions."""
        return x

    def summed(self, x_BTD: jax.Array) -> jax.Array:
        """Return all positions of the sum over the tensor axis."""
        return self.total(x_BTD)


class ReplicaGroup:
    """The devices that compute a replica together, which may be one: the problem of a device, and sums over all."""

    def __init__(self, problem: Problem, axes: Mapping[str, int]):
        """problem: of the whole model. axes: those of the mesh."""
        self.group, self._axes, self._model = MeshGroup(axes.get(TENSOR, 1), axes.get(CONTEXT, 1)), axes, problem.model
        self.axes = tuple(axis for axis in GROUP_AXES if axis in axes)
        self.params = self.layout(problem.model.shapes)
        if self.axes:
            problem = problem._replace(model=problem.model.in_group(self.group, self.params.local_shapes))
        self.problem = problem  # of the arrays that a device has
        # Whether examples have weights by position, so that each device of the context axis counts others. Otherwise
        # all of them count whole examples.
        self._counts_positions = problem.batch["weights"].ndim > 1

    def with_remat(self, remat: str) -> "ReplicaGroup":
        """Return the same group for another kind of rematerialization."""
        other = copy.copy(self)
        other.problem = self.problem._replace(model=self.problem.model.with_remat(remat))
        return other

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which the sums of a task are summed."""
        return (DATA, CONTEXT) if self.times_counted > 1 else (DATA,)

    @property
    def times_counted(self) -> int:
        """Number of times that a sum over `batch_axes` counts what the devices of a replica have in common."""
        return self.group.context if self._counts_positions else 1

    def divisor(self, weight: jax.Array) -> jax.Array:
        """Return what a device divides its loss by, for the weight of its part of the batch."""
        if not self.axes:
            return weight
        if self.times_counted > 1:
            return jax.lax.psum(weight, CONTEXT) * self.group.size
        return weight * (self.group.size * self.group.context)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes of the group."""
        return {axis: self._axes[axis] for axis in self.axes}

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes over which arrays of the model are split."""
        return tuple(axis for axis in self.axes if axis == TENSOR)

    def layout(self, tree: Tree) -> Layout:
        """Return the layout of parameters of some layers, or of an optimizer state for them, of canonical shapes."""
        return split_layout(self._axes, tree, self._model)

    def is_split(self, tree: Tree) -> Tree:
        """Return, for each array of a tree like the parameters of some layers, whether each device has a part of it."""
        return jax.tree.map(lambda leaf: bool(leaf.splits), self.layout(tree).leaves, is_leaf=is_layout)

    def layouts(self, like: State) -> dict[str, Layout]:
        """Return the layouts of the parts of a canonical state of these shapes."""
        return {part: self.layout(tree) for part, tree in like._asdict().items()}

    def reduced(self, grads: Tree) -> Tree:
        """Return the gradients after summing those of arrays that several devices of the group have."""
        if self.group.context > 1:
            grads = jax.lax.psum(grads, CONTEXT)
        if self.group.size == 1:
            return grads
        leaves, structure = jax.tree.flatten(grads)
        is_split = jax.tree.leaves(self.is_split(grads))
        vector, unravel = ravel_pytree([x for x, split in zip(leaves, is_split, strict=True) if not split])
        others = iter(unravel(jax.lax.psum(vector, TENSOR)))
        return jax.tree.unflatten(structure, [x if s else next(others) for x, s in zip(leaves, is_split, strict=True)])

    def norm(self, tree: Tree) -> jax.Array:
        """Return the norm of a tree like the parameters, of whose split arrays each device has a part."""
        norm: jax.Array = optax.tree.norm(self.counted(tree))
        return norm if self.group.size == 1 else jnp.sqrt(jax.lax.psum(norm**2, TENSOR))

    def counted(self, tree: Tree) -> Tree:
        """Return a tree like the parameters whose squares, summed over `split_axes`, count each array once."""
        if self.group.size == 1:
            return tree
        share = 1 / math.sqrt(self.group.size)
        return jax.tree.map(lambda x, split: x if split else x * share, tree, self.is_split(tree))

    def traffic(self, num_replicas: int, grads: Params, *, on_cpu: bool) -> list[Traffic]:
        """Return what a device sends on the tensor and context axes in a step.

        grads: the shapes of its parts of the gradients. on_cpu: whether XLA widens what is sent.
        """
        if not self.axes:
            return []
        group, x = self.group, self.problem.model.inputs(self.problem.batch)[1]
        size, positions, features = x.shape
        examples = size // num_replicas
        dtype, rows = np.dtype(np.float32 if on_cpu else x.dtype), list[SentArrays]()
        if group.context > 1:
            positions = padded_length(positions, group.context) // group.context
            rows += self._sent_on_context(examples * positions, features, dtype)
        if group.size > 1:
            rows += self._sent_on_tensor(examples, positions, features, dtype, on_cpu=on_cpu)
        rows += self.sums_of(grads)
        return [one.traffic(self._axes[one.axis]) for one in rows if one.number * one.size]

    def sums_of(self, grads: Params) -> "list[SentArrays]":
        """Return what `reduced` sends. grads: the shapes of what a device has of the gradients of some layers."""
        rows, leaves = list[SentArrays](), jax.tree.leaves(grads)
        if self.group.context > 1:
            rows += [SentArrays("all-reduce", CONTEXT, np.float32, sum(one.size for one in leaves), 1, 1)]
        if self.group.size > 1:
            is_split = jax.tree.leaves(self.is_split(grads))
            others = sum(one.size for one, split in zip(leaves, is_split, strict=True) if not split)
            rows += [SentArrays("all-reduce", TENSOR, np.float32, others, 1, 1)]
        return rows

    def _sent_on_tensor(
        self, examples: int, positions: int, features: int, dtype: Any, *, on_cpu: bool
    ) -> "list[SentArrays]":
        """Return the arrays of the layers and of the loss.

        For each pair of products, the positions are gathered before it and scattered after it, and in the backward pass
        the other way round. The head gathers them, too. The backward pass first gathers them again, unless XLA merges
        both; with rematerialization, it also scatters them again, but at the end of a layer only before a norm.
        """
        model, size = self.problem.model, self.group.size
        [first, *_, last], remat = model.layers, model.remat != "none"
        values = examples * -(-positions // size) * size * features
        pairs = [layer.num_applications * self._num_pairs(layer) for layer in model.layers]
        number, layers = sum(pairs), sum(map(bool, pairs))
        gathers = 3 * number + 1 + ("tokens" not in last.shapes)  # with tokens, the loss keeps the input of the head
        again = 0 if on_cpu else remat * (number - layers)  # in layers without a scan, XLA for CPUs merges both passes
        scatters, least = 2 * number + 1 + remat * number, 2 * number + 1 + again
        rows = [SentArrays("all-gather", TENSOR, dtype, values, gathers, 2 * number + 1)]
        rows += [SentArrays("reduce-scatter", TENSOR, dtype, values, scatters, least)]
        if "tokens" in first.shapes:  # the rows of the embedding
            of_gradient = np.float32 if "norm" in first.shapes else dtype
            rows += [SentArrays("reduce-scatter", TENSOR, np.float32, values, 1 + remat, 1)]
            rows += [SentArrays("all-gather", TENSOR, of_gradient, values, 1, 1)]
        if "tokens" in last.shapes:  # maxima and sums of the loss; the most likely words
            rows += [SentArrays("all-reduce", TENSOR, np.float32, examples * positions, 3, 3)]
            rows += [SentArrays("all-reduce", TENSOR, np.int32, examples * positions, 1, 1)]
        return rows

    def _sent_on_context(self, tokens: int, features: int, dtype: Any) -> "list[SentArrays]":
        """Return the keys and values, and what heads of whole texts read. The backward pass gathers them again.

        That is, unless XLA merges both. Masks are gathered by each layer, or by some of them.
        """
        layers, tokens, rows = self.problem.model.layers, tokens * self.group.context, list[SentArrays]()
        columns = [_num_columns(layer, "key") for layer in layers]
        arrays = Counter[int]()  # numbers of arrays, by their columns
        for layer, width in zip(layers, columns, strict=True):
            arrays[width] += 2 * layer.num_applications
        arrays[features] += not self._counts_positions
        for width, number in arrays.items():
            rows += [SentArrays("all-gather", CONTEXT, dtype, tokens * width, 2 * number, number)] * (width > 0)
            rows += [SentArrays("reduce-scatter", CONTEXT, dtype, tokens * width, number, number)] * (width > 0)
        if "mask" in self.problem.batch:
            rows += [SentArrays("all-gather", CONTEXT, np.bool_, tokens, 2 * sum(map(bool, columns)) + 2, 0)]
        return rows

    def _num_pairs(self, layer: Layer) -> int:
        """Return how many pairs of products a layer has: the second one splits the rows of its kernel."""
        paths = jax.tree_util.tree_leaves_with_path(self.params.leaves[layer.name], is_leaf=is_layout)
        dims = [[split.dim for split in leaf.splits] for path, leaf in paths if "kernel" in jax.tree_util.keystr(path)]
        return dims.count([0])


class SentArrays(NamedTuple):
    """Arrays that the devices of an axis send in a collective."""

    kind: str
    axis: str
    dtype: Any
    size: int  # elements of an array, before it is divided between the devices
    number: int  # of arrays
    least: float  # arrays that are sent even if XLA can merge some of them

    def widened(self) -> "SentArrays":
        """Return what XLA for CPUs sends, which has no collectives of narrower floats than float32."""
        return self._replace(dtype=np.float32) if jnp.issubdtype(self.dtype, jnp.floating) else self

    def traffic(self, num_devices: int) -> Traffic:
        """Return what a device sends."""
        dtype = np.dtype(self.dtype)
        nbytes, passes = self.number * self.size * dtype.itemsize, RING_PASSES[self.kind]
        sent = ring_traffic(self.kind, passes, self.axis, num_devices, nbytes, dtype.name, num_vectors=self.number)
        return sent._replace(required=self.least / self.number)


def _num_columns(layer: Layer, name: str) -> int:
    """Return how many columns the kernels called `name` of a layer have on a device."""
    leaves = jax.tree_util.tree_leaves_with_path(layer.shapes)
    return sum(leaf.shape[1] for path, leaf in leaves if jax.tree_util.keystr(path[-2:]) == f"['{name}']['kernel']")


def split_layout(axes: Mapping[str, int], like: Tree, model: Model) -> Layout:
    """Return the layout of the parameters of a model, or of an optimizer state for them, over the tensor axis."""
    dims = model.tensor.dims if model.tensor and TENSOR in axes else {}
    layers = {layer.name for layer in model.layers}

    def leaf_layout(path: Sequence[Any], leaf: LeafLayout) -> LeafLayout:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        dim = dims.get(tuple(names[-1:] if names[-2:-1] and names[-2] in layers else names[-2:]))
        return leaf if dim is None else leaf._replace(splits=(DimSplit(dim, TENSOR),))

    whole = replicated(axes, like).leaves
    return Layout(axes, jax.tree_util.tree_map_with_path(leaf_layout, whole, is_leaf=is_layout))
