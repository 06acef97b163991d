"""The exchanges of PyTorch's DDP, Horovod and BytePS. named.py has their options.

All but Adasum average gradients and wrap no optimizer, so pipelines can use them, too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange import reduce
from jaxpar.exchange.compress import FLOAT8, Compressor, error_feedback, float8
from jaxpar.exchange.compress import momentum as with_momentum
from jaxpar.exchange.exchange import AllReduce, DistributedState, Exchange, ExchangeUpdate
from jaxpar.exchange.fuse import by_size, flat, fused
from jaxpar.exchange.reduce import Axis, Reducer
from jaxpar.exchange.scatter_gather import in_groups, scatter_gather
from jaxpar.layout import PER_REPLICA, Tree


def adasum(axis: Axis, optimizer: optax.GradientTransformation) -> Exchange:
    """Return Adasum: each replica's optimizer steps on its local gradient, and the steps are combined in pairs.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 7 and section 3.5. It
    combines updates instead of gradients, each array separately. In round k a replica is paired with the one whose
    number differs in bit k. Both compute the same result, so that all replicas have the same update after log2(n)
    rounds.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    rounds = [1 << bit for bit in range(axis.size.bit_length() - 1)]

    def update(grads: Tree, state: DistributedState, params: Tree, **extra: Any) -> ExchangeUpdate:
        updates, inner = optimizer.update(grads, state.optimizer, params, **extra)
        for bit in rounds:
            to_partner = [(i, i ^ bit) for i in range(axis.size)]
            vector, unflatten = flat(updates)
            others = unflatten(jax.lax.ppermute(vector, axis.name, to_partner))
            is_first = (jax.lax.axis_index(axis.name) & bit) == 0  # so that both compute bitwise the same result

            def pair(a: jax.Array, b: jax.Array, is_first: jax.Array = is_first) -> jax.Array:
                x, y = a.astype(jnp.float32), b.astype(jnp.float32)
                return combine(jnp.where(is_first, x, y), jnp.where(is_first, y, x)).astype(a.dtype)

            updates = jax.tree.map(pair, updates, others)
        return ExchangeUpdate(updates, DistributedState(inner, ()), None)

    def traffic(params: Tree, _num_microbatches: int) -> list[Traffic]:
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return [Traffic("collective-permute", "float32", axis.name, len(rounds) * 4 * size, messages=len(rounds))]

    return Exchange(lambda params: DistributedState(optimizer.init(params), ()), update, traffic, optimizer=PER_REPLICA)


def combine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: the sum of orthogonal vectors, the mean of equal ones.

    Each vector is first scaled by its largest element, so that squares neither overflow nor underflow while the sum is
    in range, however different the two magnitudes are.
    """

    def scaled(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest = jnp.max(jnp.abs(x), initial=0.0)
        unit = x / jnp.where(largest > 0, largest, 1)
        square = jnp.vdot(unit, unit)
        return largest, unit, jnp.where(square > 0, 2 * square, 1)

    (largest_a, x, xx), (largest_b, y, yy) = scaled(a), scaled(b)
    dot = jnp.vdot(x, y)
    return (a - dot / xx * largest_b * x) + (b - dot / yy * largest_a * y)


FIRST_BYTES = 2**20  # of DDP's first bucket, as in PyTorch
FLOAT8_BLOCK = 4096  # elements that share a scale


def ddp(axis: Axis, *, bucket_bytes: int, wire_dtype: str, algorithm: str, group: int) -> AllReduce:
    """Return the exchange of PyTorch's DistributedDataParallel: gradients in buckets, the last layers first.

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020. Gradients are divided by
    the number of replicas before they are summed, in the dtype in which they are sent, as by PyTorch's fp16 hook. As in
    PyTorch, the first bucket is smaller, so that sending starts early, and a bucket is closed once it is full.
    """
    reducer = _in_dtype(axis, algorithm, group, wire_dtype, predivide=axis.size)
    return fused(reducer, bucket_bytes, first_bytes=min(FIRST_BYTES, bucket_bytes), overfull=True)


def horovod(
    axis: Axis, *, bucket_bytes: int, wire_dtype: str, algorithm: str, group: int, predivide: float
) -> AllReduce:
    """Return the exchange of Horovod's DistributedOptimizer: ring all-reduce of fused tensors.

    Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
    """
    return fused(_in_dtype(axis, algorithm, group, wire_dtype, predivide), bucket_bytes)


def byteps(axis: Axis, *, bucket_bytes: int, wire_dtype: str = "") -> AllReduce:
    """Return BytePS: partitions are pushed to servers and pulled from them, the first layers first."""
    return fused(_in_dtype(axis, "push_pull", 1, wire_dtype), bucket_bytes, cut=True, backwards=False)


def compressed_byteps(
    axis: Axis,
    compressor: Compressor,
    *,
    bucket_bytes: int,
    group: int,
    min_compress_bytes: int,
    momentum: float,
    seed: int = 0,
) -> AllReduce:
    """Return BytePS with a compressor and error feedback for arrays of at least `min_compress_bytes` bytes.

    momentum: of the gradients, before compression.
    """
    server = error_feedback(compressor)
    worker = with_momentum(server, momentum) if momentum else server
    reducer = lossy(axis, group, worker, server)
    large = fused(reducer, bucket_bytes, cut=True, backwards=False, seed=seed)
    return by_size(byteps(axis, bucket_bytes=bucket_bytes), large, min_compress_bytes) if min_compress_bytes else large


def lossy(axis: Axis, group: int, worker: Compressor, server: Compressor) -> Reducer:
    """Return the reducer that is exact within groups of `group` replicas, and compresses what it sends between them."""
    if group == axis.size > 1:  # nothing is sent between groups
        return reduce.psum(axis)
    if group > 1:
        return in_groups(axis, group, lambda between: scatter_gather(between, worker, server))
    return scatter_gather(axis, worker, server)


def _in_dtype(axis: Axis, algorithm: str, group: int, wire_dtype: str, predivide: float = 1.0) -> Reducer:
    """Return the reducer that sends `wire_dtype`, and sums in it. A float8 is too coarse for sums: they are float32."""
    if wire_dtype in FLOAT8:
        return lossy(axis, group, float8(wire_dtype, FLOAT8_BLOCK), float8(wire_dtype, FLOAT8_BLOCK))
    dtype = wire_dtype or None
    if group > 1:
        return reduce.hierarchical(axis, group, predivide=predivide, dtype=dtype)
    algorithms = {"psum": reduce.psum, "ring": reduce.ring, "push_pull": reduce.push_pull}
    return algorithms[algorithm](axis, predivide=predivide, dtype=dtype)
