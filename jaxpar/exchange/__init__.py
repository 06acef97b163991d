"""Exchanges: algorithms that combine the gradients or weights of replicas, around any optax optimizer.

Each is a chain of small transformations:

    fuse.py            averages trees as vectors: buckets, partitions
    reduce.py          averages a vector over replicas: psum, ring, push and pull, hierarchical; in any dtype
    compress.py        compresses a vector: 8-bit, float8, 1-bit, top-k, random-k, dithering; error feedback, momentum
    clip.py            clips the gradient of a replica before it is compressed with error feedback
    scatter_gather.py  averages a vector approximately, compressed in both directions
    exchange.py        the contracts of an exchange; adasum.py, adam.py, gossip.py, powersgd.py and zero.py implement it
    gradients.py       the exchanges that only average gradients: DDP, Horovod, BytePS
    fetch.py           models whose layers fetch their arrays from the shards of replicas, for zero.py
    named.py           the table of all exchanges by name: how each is made, its options, and what it needs

To use an exchange in your own `shard_map` step, wrap the optimizer in `distributed_optimizer`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.core.plan import Traffic
from jaxpar.exchange.exchange import DistributedState, Exchange, Rule
from jaxpar.exchange.named import EXCHANGES, check_options, make_exchange
from jaxpar.exchange.reduce import Axis
from jaxpar.layout import Tree

__all__ = [
    "EXCHANGES",
    "Axis",
    "Exchange",
    "Traffic",
    "broadcast",
    "distributed_optimizer",
    "state_specs",
]


def distributed_optimizer(
    optimizer: optax.GradientTransformation, axis_name: str, exchange: str = "horovod", **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer` in an exchange, for your own training step inside `shard_map(.., check_vma=False)`.

    Call `init` and `update(grads, state, params)` inside a `shard_map` over the replicas' axis. `grads` is the gradient
    of the mean loss over the replica's shard of the batch; extra keyword arguments are passed to the optimizer.
    `state_specs` returns the specs of the state; arrays that differ between replicas have a leading dim for the
    replica. All replicas must start from the same parameters (see `broadcast`). If the exchange is one of Bagua's
    exchanges of weights, the replicas' parameters then diverge.

    Args:
      axis_name: name of the mesh axis of the replicas.
      exchange: an exchange of gradients (ddp, horovod, byteps, byteps_onebit, ..., bagua_bytegrad), horovod_adasum,
        bagua_decentralized, bagua_low_precision_decentralized or bagua_model_average.
      options: options of the exchange; see docs/reference/exchanges.md. A dtype may be given by name.

    Raises:
      ValueError: the exchange does not exist. `init` and `update` raise ValueError if an option is invalid, if the
        exchange does not support this number of replicas, and if `shard_map` runs with check_vma=True, under which
        jax.grad has summed the gradients already.
    """
    is_per_replica = state_specs(axis_name, exchange).optimizer != PartitionSpec()
    if not isinstance(dtype := options.get("wire_dtype", ""), str):
        options["wire_dtype"] = getattr(dtype, "__name__", None) or str(dtype)

    def each(state: DistributedState, change: Callable[[jax.Array], jax.Array]) -> DistributedState:
        """Change the arrays that differ between replicas."""
        inner = jax.tree.map(change, state.optimizer) if is_per_replica else state.optimizer
        return DistributedState(inner, jax.tree.map(change, state.private))

    def built() -> Exchange:
        if axis_name in jax.typeof(jax.lax.axis_index(axis_name)).manual_axis_type.varying:
            raise ValueError(
                "check_vma of shard_map is True; it must be False with distributed_optimizer, because jax.grad "
                "otherwise sums the gradients itself"
            )
        axis = Axis(axis_name, jax.lax.axis_size(axis_name))
        check_options(exchange, axis.size, options)
        return make_exchange(exchange, axis, Rule(optimizer, None), **options)

    def init(params: Tree) -> DistributedState:
        return each(built().init(params), lambda x: jnp.asarray(x)[None])

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        made = built().update(grads, each(state, lambda x: x[0]), params, **extra)
        return made.updates, each(made.state, lambda x: jnp.asarray(x)[None])

    return optax.GradientTransformationExtraArgs(init, update)


def state_specs(axis_name: str, exchange: str = "horovod") -> DistributedState:
    """Return the partition specs of the state of a `distributed_optimizer`, for `shard_map`.

    State that differs between replicas is sharded over the axis: `state.private` and, with horovod_adasum and the Bagua
    exchanges of weights, `state.optimizer`. Raises ValueError if the exchange does not exist.
    """
    names = [name for name, row in EXCHANGES.items() if row.averages or row.diverges]
    if exchange not in names:
        is_wrapper = exchange in EXCHANGES and EXCHANGES[exchange].make
        others = (
            ", which shards state, replaces the optimizer or depends on the length of the run" if is_wrapper else ""
        )
        raise ValueError(f"exchange is {exchange!r}{others}; it must be one of {', '.join(names)}")
    each = PartitionSpec(axis_name)
    return DistributedState(each if EXCHANGES[exchange].diverges else PartitionSpec(), each)


def broadcast(tree: Tree, axis_name: str) -> Tree:
    """Return replica 0's arrays on all replicas, like Horovod's broadcast_parameters. Call it inside `shard_map`."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis_name)[0], tree)
