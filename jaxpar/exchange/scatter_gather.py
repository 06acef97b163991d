"""Lossy collectives that send only compressed vectors.

Compressed vectors cannot be added, so XLA's all-reduce does not apply to them. Instead, replica i is the server of
shard i of the vector: it receives that shard from all replicas, decompresses and averages it in float32, and sends the
compressed mean to all.

Dims: n replicas.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.typing import DTypeLike

from jaxpar.core.plan import Traffic
from jaxpar.exchange.compress import Compressor, to_bytes
from jaxpar.exchange.reduce import EQUAL_ON_ALL, Axis, Groups, Reducer
from jaxpar.layout import Tree


def scatter_gather(axis: Axis, worker: Compressor, server: Compressor) -> Reducer:
    """Return a reducer that averages vectors, compressed in both directions.

    Bagua's ScatterReduce (Gan et al., 2021, section 3.3), and the compressed all-reduce of 1-bit Adam (Tang et al.,
    2021, section 5), where both compressors have error feedback. BytePS's compression is the same, with a server on
    each worker's machine. worker: compressor of what a replica sends to the servers, with a state for each shard.
    server: compressor of the mean that a server sends to all.
    """
    n = axis.size

    def init(length: int, key: jax.Array) -> Tree:
        replica, keys = axis.position(), jax.random.split(key, n)
        workers = jax.vmap(lambda key: worker.init(length // n, key, replica))(keys)
        return {"worker": workers, "server": server.init(length // n, keys[replica], n)}

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        length = len(x) // n
        payloads, workers = jax.vmap(worker.encode)(x.astype(jnp.float32).reshape(n, length), state["worker"])
        received = jax.lax.all_to_all(jax.vmap(to_bytes)(payloads), axis.name, 0, 0, axis_index_groups=axis.groups)
        mean = jnp.mean(jax.vmap(lambda sent: worker.decode_bytes(sent, length))(received), axis=0)
        payload, server_state = server.encode(mean, state["server"])
        to = "varying" if axis.groups else EQUAL_ON_ALL  # of groups, JAX has no types
        received = jax.lax.all_gather(to_bytes(payload), axis.name, axis_index_groups=axis.groups, to=to)
        whole = jax.vmap(lambda sent: server.decode_bytes(sent, length))(received).reshape(-1)
        return whole.astype(x.dtype), {"worker": workers, "server": server_state}

    def traffic(length: int, _dtype: DTypeLike) -> list[Traffic]:
        senders = {"all-to-all": worker, "all-gather": server}
        return [axis.traffic(kind, 1, n * sender.nbytes(length // n), "uint8") for kind, sender in senders.items()]

    return Reducer(init, mean, traffic, multiple=n)


def in_groups(axis: Axis, group: int, reducer: Reducer) -> Reducer:
    """Return a reducer that averages exactly within groups of `group` neighbours, and by `reducer` between the groups.

    BytePS and, with hierarchical=True, Bagua compress only between nodes too.

    reducer: a reducer over `axis.between(group)`.
    """
    groups = Groups(axis, group)

    def init(length: int, key: jax.Array) -> Tree:
        return reducer.init(length // group, jax.random.fold_in(key, axis.within(group).position()))

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        shard, state = reducer.mean(groups.shard_of_mean(x), state)
        return groups.whole(shard, len(x)), state

    def traffic(length: int, dtype: DTypeLike) -> list[Traffic]:
        return groups.traffic(length, dtype) + reducer.traffic(length // group, dtype)

    return Reducer(init, mean, traffic, multiple=group * reducer.multiple)


def all_gather_coded(axis: Axis, compressor: Compressor, vectors: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the vectors [L] of all replicas, [n, L], as the receivers decompress them.

    compressor: a compressor without state, which compresses each vector separately.
    """
    payloads = [compressor.encode(vector, ())[0] for vector in vectors]
    sent = jnp.concatenate([to_bytes(payload) for payload in payloads])
    received = jax.lax.all_gather(sent, axis.name, axis_index_groups=axis.groups)
    lengths = tuple(len(vector) for vector in vectors)
    return DECOMPRESS.bind(received, compressor=compressor, lengths=lengths)


def reduce_scatter_coded(axis: Axis, compressor: Compressor, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the sum over replicas of this replica's row [L] of arrays [n, L], as it decompresses them.

    compressor: a compressor without state, which compresses each row separately.
    """

    def encode(rows: list[jax.Array]) -> jax.Array:
        return jnp.concatenate([to_bytes(compressor.encode(row, ())[0]) for row in rows])

    received = jax.lax.all_to_all(jax.vmap(encode)(list(arrays)), axis.name, 0, 0, axis_index_groups=axis.groups)
    lengths = [x.shape[1] for x in arrays]
    return [rows.sum(0) for rows in _decode(received, compressor=compressor, lengths=lengths)]


def _decode(received: jax.Array, *, compressor: Compressor, lengths: Sequence[int]) -> list[jax.Array]:
    """Return the arrays [n, L] of several vectors from the bytes [n, ..] of their payloads."""
    offset, arrays = 0, []
    for length in lengths:
        end = offset + compressor.nbytes(length)
        decode = functools.partial(compressor.decode_bytes, length=length)
        arrays.append(jax.vmap(decode)(received[:, offset:end]))
        offset = end
    return arrays


# `_decode` as one primitive, which a policy of `jax.checkpoint` can distinguish from the arithmetic of a layer: the
# arrays are received and decompressed again for the backward pass.
DECOMPRESS = Primitive("decompress")
DECOMPRESS.multiple_results = True
DECOMPRESS.def_impl(_decode)
DECOMPRESS.def_abstract_eval(
    lambda received, *, lengths, **_: [jax.core.ShapedArray((received.shape[0], n), jnp.float32) for n in lengths]
)
mlir.register_lowering(DECOMPRESS, mlir.lower_fun(_decode, multiple_results=True))
