"""ZeRO: each replica holds and updates 1/n of what the others would only repeat.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Stage 1 divides the
optimizer's state, 2 also the gradients that are added up, 3 also the parameters.

An array is divided along its longest dim, padded to a multiple of n; so a shard has as many dims as the array. Arrays
without dims stay whole on each replica, and their gradients are added up with the metrics.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.exchange.exchange import DistributedState, Exchange, ExchangeUpdate
from jaxpar.exchange.fuse import buckets
from jaxpar.exchange.reduce import Axis, ring_traffic
from jaxpar.layout import REPLICATED, SHARDED, Tree, pad, shard_shape, split_dim, unpad
from jaxpar.plan import Traffic


class Shards:
    """The arrays of a tree and their shards, for use inside `shard_map`."""

    def __init__(self, axis: Axis, tree: Tree, num_bytes: int):
        """tree: of full arrays, or their shapes; num_bytes: of what is sent at once."""
        self._axis = axis
        self._leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [shard_shape(leaf.shape, axis.size) for leaf in self._leaves]
        plan = buckets(self._leaves, num_bytes, cut=False, backwards=True)
        divided = [[piece.leaf for piece in bucket if self._shapes[piece.leaf]] for bucket in plan]
        self._buckets = [bucket for bucket in divided if bucket]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are divided, with their padding."""
        sizes = [math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(self._shapes, self._leaves, strict=True)]
        return self._axis.size * sum(sizes[number] for bucket in self._buckets for number in bucket)

    @property
    def num_vectors(self) -> int:
        """Collectives in which all arrays are scattered, or gathered, once."""
        return len(self._buckets)

    def local(self, tree: Tree) -> Tree:
        """This replica's shards of full arrays."""
        replica = jax.lax.axis_index(self._axis.name)
        leaves = dict(enumerate(jax.tree.leaves(tree)))
        for number in [number for bucket in self._buckets for number in bucket]:
            shard = jax.lax.dynamic_index_in_dim(self._flat_shards(leaves[number]), replica, keepdims=False)
            leaves[number] = self._shard(shard, number)
        return jax.tree.unflatten(self._structure, leaves.values())

    def add_up_whole(self, tree: Tree) -> Tree:
        """The sum over replicas of the arrays that stay whole, next to the others' shards as they are."""
        return jax.tree.map(lambda x: x if x.ndim else jax.lax.psum(x, self._axis.name), tree)

    def norm(self, tree: Tree) -> jax.Array:
        """The norm of arrays of which replicas have shards."""
        local = [x if x.ndim else x / math.sqrt(self._axis.size) for x in jax.tree.leaves(tree)]
        return jnp.sqrt(jax.lax.psum(optax.tree.norm(local) ** 2, self._axis.name))

    def scatter(self, tree: Tree) -> Tree:
        """This replica's shards of the sum over replicas of full arrays."""
        leaves = jax.tree.leaves(self.add_up_whole(tree))
        for bucket in self._buckets:
            vectors = jnp.concatenate([self._flat_shards(leaves[number]) for number in bucket], axis=1)
            shards = self._split(jax.lax.psum_scatter(vectors, self._axis.name), bucket)
            for number, shard in zip(bucket, shards, strict=True):
                leaves[number] = self._shard(shard, number)
        return jax.tree.unflatten(self._structure, leaves)

    def gather(self, tree: Tree) -> Tree:
        """Full arrays of all replicas' shards. What `jax.grad` makes of it is `scatter`, but for `add_up_whole`."""
        leaves = jax.tree.leaves(tree)
        for bucket in self._buckets:
            vector = jnp.concatenate([_front(leaves[number], self._dim(number)).reshape(-1) for number in bucket])
            gathered = self._split(jax.lax.all_gather(vector, self._axis.name), bucket)
            for number, shards in zip(bucket, gathered, strict=True):
                leaves[number] = self._full(shards, number)
        return jax.tree.unflatten(self._structure, leaves)

    def _dim(self, number: int) -> int:
        dim = split_dim(self._leaves[number].shape)
        assert dim is not None, number
        return dim

    def _flat_shards(self, x: jax.Array) -> jax.Array:
        """A full array as [n, elements of a shard]; in a shard the divided dim comes first."""
        return _front(pad(x, self._axis.size), split_dim(x.shape) or 0).reshape(self._axis.size, -1)

    def _split(self, x: jax.Array, bucket: list[int]) -> list[jax.Array]:
        """The arrays of a bucket, apart: their elements follow each other along the last dim."""
        sizes = [math.prod(self._shapes[number]) for number in bucket]
        return jnp.split(x, np.cumsum(sizes)[:-1], axis=-1)

    def _shard(self, flat_shard: jax.Array, number: int) -> jax.Array:
        """One of `_flat_shards` in the shape of a shard."""
        dim, shape = self._dim(number), self._shapes[number]
        return _back(flat_shard.reshape(shape[dim], *shape[:dim], *shape[dim + 1 :]), dim)

    def _full(self, flat_shards: jax.Array, number: int) -> jax.Array:
        """The array of which these are the `_flat_shards`."""
        dim, shape = self._dim(number), self._shapes[number]
        whole = flat_shards.reshape(self._axis.size * shape[dim], *shape[:dim], *shape[dim + 1 :])
        return unpad(_back(whole, dim), self._leaves[number].shape)


def zero(
    axis: Axis,
    stage: int,
    optimizer: optax.GradientTransformation,
    tree: Tree,
    num_bytes: int,
    *,
    offload: bool = False,
) -> Exchange:
    """The stages of ZeRO around an optimizer that computes each element of an update from that element alone.

    Stage 1 takes full gradients. Stages 2 and 3 take shards of their sum over replicas: the `scatter` of the exchange
    makes them of each microbatch's. In stage 3 parameters are shards, and `fetch` gathers those of a layer.

    Args:
      axis: of the replicas.
      stage: 1, 2 or 3.
      optimizer: its update is given grad_norm, of the whole gradient.
      tree: of the parameters, or their shapes.
      num_bytes: of what is sent at once.
      offload: the optimizer's state is in the host's memory between its updates.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    shards = Shards(axis, tree, num_bytes)

    def init(params: Tree) -> DistributedState:
        return DistributedState(optimizer.init(params if stage == 3 else shards.local(params)), ())

    def update(grads: Tree, state: DistributedState, params: Tree, **extra: Any) -> ExchangeUpdate:
        if stage != 2:  # whose gradients come scattered
            grads = shards.scatter(grads) if stage == 1 else shards.add_up_whole(grads)
        grads = jax.tree.map(lambda g: g / axis.size, grads)
        grad_norm = shards.norm(grads)
        local = params if stage == 3 else shards.local(params)
        updates, inner = optimizer.update(grads, state.optimizer, local, **{"grad_norm": grad_norm, **extra})
        updates = updates if stage == 3 else shards.gather(updates)
        return ExchangeUpdate(updates, DistributedState(inner, ()), grad_norm)

    def fetch(shapes: Tree, local: Tree) -> Tree:
        return Shards(axis, shapes, num_bytes).gather(local)

    def traffic(params: Tree, num_microbatches: int = 1) -> list[Traffic]:
        nbytes = Shards(axis, params, num_bytes).nbytes
        together = list(params.values()) if stage == 3 else [params]  # what is scattered, or gathered, at once
        num_vectors = sum(Shards(axis, tree, num_bytes).num_vectors for tree in together)

        def ring(kind: str, times: int) -> Traffic:
            return ring_traffic(kind, times, axis.name, axis.size, nbytes, "float32", num_vectors=num_vectors)

        scatter = ring("reduce-scatter", 1 if stage == 1 else num_microbatches)
        gather = ring("all-gather", 2 * num_microbatches if stage == 3 else 1)
        # XLA on CPUs drops the barriers that keep apart what forward and backward gather of a layer.
        return [scatter, gather._replace(required=0.5 if stage == 3 else 1.0)]

    return Exchange(
        init,
        update,
        traffic,
        params=SHARDED if stage == 3 else REPLICATED,
        optimizer=SHARDED,
        scatter=shards.scatter if stage == 2 else None,
        fetch=fetch if stage == 3 else None,
        offload=offload,
    )


def _front(x: jax.Array, dim: int) -> jax.Array:
    return jnp.moveaxis(x, dim, 0)


def _back(x: jax.Array, dim: int) -> jax.Array:
    return jnp.moveaxis(x, 0, dim)
