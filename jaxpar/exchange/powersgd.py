"""PowerSGD: replicas average low-rank factors of their gradients instead of the gradients.

The factors of the replicas can be added, unlike signs or indices, so they are averaged by ordinary all-reduces.

Dims: an array is treated as a matrix M [m, n]; its factors have R columns, P [m, R] and Q [n, R].
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.core.plan import Traffic
from jaxpar.exchange.exchange import AllReduce, Exchange, Rule, shared
from jaxpar.exchange.fuse import averaged, divide_leaves, fused, in_layer_order, rejoin_leaves
from jaxpar.exchange.reduce import Axis, psum
from jaxpar.layout import Tree

WARMUP = "powersgd_warmup"  # name of the conditional in compiled programs
SAVING = 2  # an array is compressed only if its factors are more than SAVING times smaller


class PowerState(NamedTuple):
    """State of `low_rank` on a replica."""

    steps: jax.Array  # number of steps so far
    residuals: list[jax.Array]  # the gradient that was not sent, [m, n] for each compressed array
    factors: list[jax.Array]  # Q of the last step, [n, R] for each compressed array; equal on all replicas


def powersgd(axis: Axis, rule: Rule, *, bucket_bytes: int, rank: int, warmup: float, seed: int) -> Exchange:
    """Return PowerSGD: low-rank factors of the gradients, with error feedback, after a warm-up.

    The optimizer clips the approximate mean, as after PyTorch's hook: clipping each replica's gradient before it is
    compressed lost more accuracy.
    """
    warmup_steps = round(warmup * rule.num_steps)
    share = min(1.0, warmup_steps / rule.num_steps)
    exact = fused(psum(axis), bucket_bytes)
    lossy = low_rank(exact, rank=rank, warmup_steps=warmup_steps, seed=seed)
    exchange = averaged(in_layer_order(lossy, rule.layers), rule.optimizer, rule.norm)

    def traffic(params: Tree, _num_microbatches: int) -> list[Traffic]:
        warm = in_layer_order(exact, rule.layers).traffic(params)
        return shared(warm, share) + shared(lossy.traffic(params), 1 - share)

    return exchange._replace(traffic=traffic, branches={WARMUP: (1 - share, share)} if warmup_steps else {})


def low_rank(exact: AllReduce, *, rank: int, warmup_steps: int, seed: int) -> AllReduce:
    """Return PowerSGD (Vogels et al., 2019, algorithms 1 and 2), with error feedback and warm start.

    Each step is one power iteration that starts from the Q of the last step:
    M = gradient + residual; P = orthonormal basis of mean(M Q); Q = mean(M^T P); the mean of the gradients is
    approximated by P Q^T, and the new residual is M - P Q^T.

    Biases and other arrays that cannot be compressed by more than a factor of SAVING are averaged exactly.

    exact: an all-reduce without state; it averages the factors, and everything in the first `warmup_steps` steps.
    rank: R, the rank of the approximation. seed: of the first Q.
    """

    def belongs(leaf: Any) -> bool:
        return is_compressed(leaf.shape, rank)

    def exact_mean(tree: Tree) -> Tree:
        return exact.mean(tree, exact.init(tree))[0]

    def init(tree: Tree) -> PowerState:
        shapes = [matrix_shape(leaf.shape) for leaf in divide_leaves(tree, belongs)[0]]
        keys = jax.random.split(jax.random.key(seed), max(len(shapes), 1))
        factors = [jax.random.normal(key, (n, rank)) for key, (_, n) in zip(keys, shapes, strict=False)]
        return PowerState(jnp.zeros((), jnp.int32), [jnp.zeros(shape) for shape in shapes], factors)

    def mean(tree: Tree, state: PowerState) -> tuple[Tree, PowerState]:
        if not warmup_steps:
            means, after = approximate(tree, state)
        else:
            with jax.named_scope(WARMUP):
                is_warm = state.steps < warmup_steps
                means, after = jax.lax.cond(is_warm, average, approximate, tree, state)
        return means, after._replace(steps=state.steps + 1)

    def average(tree: Tree, state: PowerState) -> tuple[Tree, PowerState]:
        return exact_mean(tree), state

    def approximate(tree: Tree, state: PowerState) -> tuple[Tree, PowerState]:
        large, others = divide_leaves(tree, belongs)
        matrices = [
            leaf.reshape(residual.shape).astype(jnp.float32) + residual
            for leaf, residual in zip(large, state.residuals, strict=True)
        ]
        projected = [m @ q for m, q in zip(matrices, state.factors, strict=True)]
        others, projected = exact_mean((others, projected))
        bases = [jnp.linalg.qr(p)[0] for p in projected]
        factors = exact_mean([m.T @ p for m, p in zip(matrices, bases, strict=True)])
        sent = [p @ q.T for p, q in zip(bases, factors, strict=True)]
        residuals = [m - s for m, s in zip(matrices, sent, strict=True)]
        means = [s.reshape(leaf.shape).astype(leaf.dtype) for s, leaf in zip(sent, large, strict=True)]
        return rejoin_leaves(tree, belongs, means, others), PowerState(state.steps, residuals, factors)

    def traffic(tree: Tree) -> list[Traffic]:
        large, others = divide_leaves(tree, belongs)
        shapes = [matrix_shape(leaf.shape) for leaf in large]
        p = [jax.ShapeDtypeStruct((m, rank), jnp.float32) for m, _ in shapes]
        q = [jax.ShapeDtypeStruct((n, rank), jnp.float32) for _, n in shapes]
        return exact.traffic((others, p)) + exact.traffic(q)

    return AllReduce(init, mean, traffic, is_lossy=True)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape [m, n] of an array as a matrix: the last split of its dims with the smallest m + n."""
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in reversed(range(len(shape) + 1))]
    return min(splits, key=sum)


def is_compressed(shape: Sequence[int], rank: int) -> bool:
    """Return whether the factors of an array of this shape are more than SAVING times smaller than the array."""
    m, n = matrix_shape(shape)
    return SAVING * rank * (m + n) < m * n


def largest_rank(tree: Tree) -> int:
    """Return the largest rank with which any array of the tree is compressed; 0: none is."""
    shapes = [matrix_shape(leaf.shape) for leaf in jax.tree.leaves(tree)]
    return max(((m * n - 1) // (SAVING * (m + n)) for m, n in shapes), default=0)
