"""A lossy all-reduce of which only compressed vectors are on the wire.

A sum of codes is no code, so XLA's all-reduce cannot take them. Instead replica i is the server of the i-th part of
the vector: it takes everybody's code of that part, adds them up in float32, and sends the code of the mean to all.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.exchange.compress import Compressor, from_bytes, payload_nbytes, to_bytes
from jaxpar.exchange.reduce import Axis, Reducer
from jaxpar.plan import Traffic


def scatter_gather(axis: Axis, worker: Compressor, server: Compressor) -> Reducer:
    """The mean by codes both ways.

    Bagua's ScatterReduce (Gan et al., 2021, section 3.3), and the compressed all-reduce of 1-bit Adam (Tang et al.,
    2021, section 5), where both compressors have error feedback. BytePS's compression is the same with its servers on
    the machines of the workers.

    Args:
      axis: of the replicas.
      worker: of what a replica sends to the servers; its state is by part.
      server: of the mean that a server sends to all.
    """
    n = axis.size

    def init(length: int, key: jax.Array) -> Any:
        rank, keys = jax.lax.axis_index(axis.name), jax.random.split(key, n)
        parts = jax.vmap(lambda key: worker.init(length // n, key, rank))(keys)
        return {"worker": parts, "server": server.init(length // n, keys[rank], n)}

    def mean(x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        length = len(x) // n

        def decode(compressor: Compressor, code: jax.Array) -> jax.Array:
            return compressor.decode(from_bytes(code, compressor.payload(length)), length)

        payloads, workers = jax.vmap(worker.encode)(x.astype(jnp.float32).reshape(n, length), state["worker"])
        codes = jax.lax.all_to_all(jax.vmap(to_bytes)(payloads), axis.name, 0, 0)
        mean = jnp.mean(jax.vmap(lambda code: decode(worker, code))(codes), axis=0)
        payload, of_server = server.encode(mean, state["server"])
        codes = jax.lax.all_gather(to_bytes(payload), axis.name)
        whole = jax.vmap(lambda code: decode(server, code))(codes).reshape(-1)
        return whole.astype(x.dtype), {"worker": workers, "server": of_server}

    def traffic(length: int, _dtype: Any) -> list[Traffic]:
        sizes = {"all-to-all": worker, "all-gather": server}
        return [
            Traffic(kind, "uint8", axis.name, (n - 1) * payload_nbytes(compressor.payload(length // n)))
            for kind, compressor in sizes.items()
        ]

    return Reducer(init, mean, traffic, multiple=n)
