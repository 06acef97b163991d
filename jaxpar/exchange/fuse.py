"""Averages the gradients of replicas as vectors: small arrays share a vector, and large ones may be split."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange.clip import already_clipped, clipped
from jaxpar.exchange.exchange import AllReduce, DistributedState, Exchange, ExchangeUpdate
from jaxpar.exchange.reduce import Reducer
from jaxpar.layout import Tree

Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct


class Piece(NamedTuple):
    """Elements start to stop of a flattened leaf."""

    leaf: int
    start: int
    stop: int


def fused(
    reducer: Reducer,
    num_bytes: int,
    *,
    cut: bool = False,
    backwards: bool = True,
    first_bytes: int | None = None,
    overfull: bool = False,
    seed: int = 0,
) -> AllReduce:
    """Return an all-reduce that applies the reducer to buckets of up to `num_bytes` bytes each.

    A bucket depends only on its leaves, so that its transfer can start as soon as the backward pass has computed them.

    Args:
      num_bytes: size limit of a bucket; a larger leaf gets a bucket of its own, or is split if `cut`.
      backwards: start with the last leaf, whose gradient is ready first.
      first_bytes: size limit of the first bucket; None: `num_bytes`.
      overfull: close a bucket only once its size has reached the limit, so that its last leaf may exceed it.
      seed: seed of the random compressors.
    """

    def plan(leaves: Sequence[Leaf]) -> list[list[Piece]]:
        return buckets(leaves, num_bytes, cut=cut, backwards=backwards, first_bytes=first_bytes, overfull=overfull)

    def padded(bucket: Sequence[Piece]) -> int:
        length = sum(stop - start for _, start, stop in bucket)
        return -(-length // reducer.multiple) * reducer.multiple

    def init(tree: Tree) -> Tree:
        lengths = [padded(bucket) for bucket in plan(jax.tree.leaves(tree))]
        keys = jax.random.split(jax.random.key(seed), max(len(lengths), 1))
        return tuple(reducer.init(length, key) for length, key in zip(lengths, keys, strict=False))

    def mean(tree: Tree, state: Tree) -> tuple[Tree, Tree]:
        leaves, structure = jax.tree.flatten(tree)
        pieces: list[list[jax.Array]] = [[] for _ in leaves]
        states = []
        for bucket, private in zip(plan(leaves), state, strict=True):
            vector = jnp.concatenate([leaves[leaf].reshape(-1)[start:stop] for leaf, start, stop in bucket])
            vector, private = reducer.mean(jnp.pad(vector, (0, padded(bucket) - len(vector))), private)
            states.append(private)
            offset = 0
            for leaf, start, stop in bucket:  # in the order of each leaf's elements
                pieces[leaf].append(vector[offset : offset + stop - start])
                offset += stop - start
        of_leaves = zip(pieces, leaves, strict=True)
        shaped = [jnp.concatenate(some).reshape(leaf.shape) if some else leaf for some, leaf in of_leaves]
        return jax.tree.unflatten(structure, shaped), tuple(states)

    def traffic(tree: Tree) -> list[Traffic]:
        leaves = jax.tree.leaves(tree)
        sent = [reducer.traffic(padded(bucket), leaves[bucket[0].leaf].dtype) for bucket in plan(leaves)]
        return list(itertools.chain.from_iterable(sent))

    return AllReduce(init, mean, traffic)


def averaged(
    all_reduce: AllReduce,
    optimizer: optax.GradientTransformation,
    norm: Callable[[Tree], jax.Array] = optax.tree.norm,
) -> Exchange:
    """Return an exchange that averages gradients, after which each replica takes the same step. norm: as in `Rule`."""
    optimizer = already_clipped(optimizer) if all_reduce.clip_norm else optax.with_extra_args_support(optimizer)

    def update(grads: Tree, state: DistributedState, params: Tree, **extra: Any) -> ExchangeUpdate:
        if all_reduce.clip_norm:
            grads = clipped(grads, norm(grads), all_reduce.clip_norm)
        grads, private = all_reduce.mean(grads, state.private)
        grad_norm = norm(grads)
        updates, inner = optimizer.update(grads, state.optimizer, params, **{"grad_norm": grad_norm, **extra})
        return ExchangeUpdate(updates, DistributedState(inner, private), grad_norm)

    return Exchange(
        lambda params: DistributedState(optimizer.init(params), all_reduce.init(params)),
        update,
        lambda params, _num_microbatches: all_reduce.traffic(params),
        shows_nonfinite=not all_reduce.is_lossy,
    )


def by_size(small: AllReduce, large: AllReduce, num_bytes: int) -> AllReduce:
    """Return an all-reduce that applies `small` to leaves of less than `num_bytes` bytes, and `large` to the others."""

    def is_small(leaf: Leaf) -> bool:
        return leaf.size * leaf.dtype.itemsize < num_bytes

    def init(tree: Tree) -> Tree:
        few, many = divide_leaves(tree, is_small)
        return small.init(few), large.init(many)

    def mean(tree: Tree, state: Tree) -> tuple[Tree, Tree]:
        few, many = divide_leaves(tree, is_small)
        few, small_state = small.mean(few, state[0])
        many, large_state = large.mean(many, state[1])
        return rejoin_leaves(tree, is_small, few, many), (small_state, large_state)

    def traffic(tree: Tree) -> list[Traffic]:
        few, many = divide_leaves(tree, is_small)
        return small.traffic(few) + large.traffic(many)

    return AllReduce(init, mean, traffic)


def divide_leaves(tree: Tree, belongs: Callable[[Leaf], bool]) -> tuple[list[Any], list[Any]]:
    """Return the leaves that belong, and the others."""
    leaves = jax.tree.leaves(tree)
    return [leaf for leaf in leaves if belongs(leaf)], [leaf for leaf in leaves if not belongs(leaf)]


def rejoin_leaves(tree: Tree, belongs: Callable[[Leaf], bool], first: list[Any], others: list[Any]) -> Tree:
    """Return a tree like `tree` with these leaves, in the order of `divide_leaves`."""
    next_first, next_other = iter(first), iter(others)
    return jax.tree.map(lambda leaf: next(next_first if belongs(leaf) else next_other), tree)


def in_layer_order(all_reduce: AllReduce, layers: Sequence[str]) -> AllReduce:
    """Return the same all-reduce for a tree {layer: ..}, with buckets in the order of `layers`, not of their names.

    Without layers, it can be any tree.
    """
    if not layers:
        return all_reduce

    def ordered(tree: Tree) -> list[Tree]:
        return [tree[layer] for layer in layers]

    def mean(tree: Tree, state: Tree) -> tuple[Tree, Tree]:
        means, state = all_reduce.mean(ordered(tree), state)
        return dict(zip(layers, means, strict=True)), state

    return all_reduce._replace(
        init=lambda tree: all_reduce.init(ordered(tree)),
        mean=mean,
        traffic=lambda tree: all_reduce.traffic(ordered(tree)),
    )


def numbers_in_order(tree: Tree, layers: Sequence[str]) -> list[int]:
    """Return the numbers of the leaves of a tree {layer: ..} in the order of `layers`; of any other tree, 0, 1, 2, ..

    JAX numbers them in the order of the names, in which layer 10 comes before layer 2.
    """
    ranks = {jax.tree_util.DictKey(layer): rank for rank, layer in enumerate(layers)}
    of_leaves = [ranks.get(path[0], 0) if path else 0 for path, _ in jax.tree.leaves_with_path(tree)]
    return sorted(range(len(of_leaves)), key=of_leaves.__getitem__)


def after(arrays: Sequence[jax.Array], before: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return the arrays of a message, which is then sent only after the one with the result `before`, and `before`.

    The smallest array waits for it. Otherwise XLA may send those first whose gradients the backward pass computes last.
    """
    some = list(arrays)
    smallest = min(range(len(some)), key=lambda number: some[number].size)  # XLA can fuse the others
    some[smallest], before = jax.lax.optimization_barrier((some[smallest], before))
    return some, before


def apart(all_reduce: AllReduce, is_split: Callable[[Tree], Tree]) -> AllReduce:
    """Return the same all-reduce with vectors of either split arrays or whole ones, unless it is exact.

    Devices that compute a layer together have different parts of an array that is split, but the same whole ones. In a
    vector of both, a lossy compressor would change whole arrays differently on each device.

    is_split: returns for each array of a tree whether it is split.
    """
    if not all_reduce.is_lossy:
        return all_reduce

    def divide(tree: Tree) -> list[Tree]:
        marks = is_split(tree)
        parts = jax.tree.map(lambda x, split: x if split else None, tree, marks)
        return [parts, jax.tree.map(lambda x, split: None if split else x, tree, marks)]

    def mean(tree: Tree, state: Tree) -> tuple[Tree, Tree]:
        means, states = zip(*map(all_reduce.mean, divide(tree), state), strict=True)
        return jax.tree.map(lambda a, b: b if a is None else a, *means, is_leaf=lambda x: x is None), states

    return all_reduce._replace(
        init=lambda tree: tuple(map(all_reduce.init, divide(tree))),
        mean=mean,
        traffic=lambda tree: [one for half in divide(tree) for one in all_reduce.traffic(half)],
    )


def buckets(
    leaves: Sequence[Leaf],
    num_bytes: int,
    *,
    cut: bool,
    backwards: bool,
    first_bytes: int | None = None,
    overfull: bool = False,
) -> list[list[Piece]]:
    """Return the pieces of leaves in each bucket. A bucket has consecutive pieces of one dtype. See `fused`."""
    result: list[list[Piece]] = []
    used, limit, dtype = 0, 0, None
    for number in reversed(range(len(leaves))) if backwards else range(len(leaves)):
        leaf, start = leaves[number], 0
        while start < leaf.size:
            is_full = used >= limit or (used + leaf.size > limit and not (cut or overfull))
            if is_full or leaf.dtype != dtype:
                size, width = num_bytes if result or first_bytes is None else first_bytes, leaf.dtype.itemsize
                used, limit, dtype = 0, -(-size // width) if overfull else max(1, size // width), leaf.dtype
                result.append([])
            stop = min(leaf.size, start + limit - used) if cut else leaf.size
            result[-1].append(Piece(number, start, stop))
            used, start = used + stop - start, stop
    return result


def flat(tree: Tree) -> tuple[jax.Array, Callable[[jax.Array], Tree]]:
    """Return the leaves as one float32 vector, and the function that restores the tree."""
    leaves, structure = jax.tree.flatten(tree)
    offsets = [sum(leaf.size for leaf in leaves[:i]) for i in range(1, len(leaves))]

    def unflatten(vector: jax.Array) -> Tree:
        flat_leaves = zip(jnp.split(vector, offsets), leaves, strict=True)
        shaped = [flat_leaf.reshape(leaf.shape).astype(leaf.dtype) for flat_leaf, leaf in flat_leaves]
        return jax.tree.unflatten(structure, shaped)

    return jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in leaves]), unflatten


def flat_size(tree: Tree) -> int:
    """Return the length of the vector of `flat`, also for a tree of shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
