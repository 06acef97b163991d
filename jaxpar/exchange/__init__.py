"""Exchanges: how replicas agree. A chain of small transformations, around any optimizer of optax.

    fuse.py            trees to vectors: buckets, partitions
    reduce.py          vectors to their mean: psum, ring, push and pull, hierarchical; casts
    compress.py        vectors to fewer bytes: bytes, bits, the largest; error feedback, momentum
    scatter_gather.py  vectors to about their mean, compressed on both ways
    exchange.py        the contract of what is around an optimizer; adasum.py, adam.py, gossip.py, zero.py: such
    presets.py         the names: ddp, horovod, byteps, bagua_bytegrad, zero3, onebit_adam, ..

For a `shard_map` step that you write there is `distributed_optimizer`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.exchange.exchange import DistributedState, Exchange, ExchangeUpdate
from jaxpar.exchange.presets import AROUND, EXCHANGES, GRADIENTS, Rule, make_exchange, obstacle
from jaxpar.exchange.reduce import Axis
from jaxpar.layout import Tree
from jaxpar.plan import Traffic

__all__ = [
    "EXCHANGES",
    "Axis",
    "Exchange",
    "ExchangeUpdate",
    "Traffic",
    "broadcast",
    "distributed_optimizer",
    "state_specs",
]

WHOLE = ("horovod_adasum", "bagua_decentralized", "bagua_low_precision_decentralized", "bagua_model_average")


def distributed_optimizer(
    optimizer: optax.GradientTransformation, axis_name: str, exchange: str = "horovod", **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer for a step that you write, inside `shard_map(.., check_vma=False)` over the replicas' axis.

    Its `init` and `update` are to be called there, `update(grads, state, params)` with the gradient of the mean loss
    over the replica's share of the batch; it passes other arguments to the optimizer. The specs of its state, for
    `shard_map`, are `state_specs`: arrays that differ by replica have a leading dim for it. Replicas begin with the
    same parameters (`broadcast`). With the bagua exchanges of weights, parameters come to differ by replica.

    Args:
      optimizer: of optax, as on one device.
      axis_name: of the mesh axis.
      exchange: one of the gradients' exchanges (ddp, horovod, byteps, byteps_onebit, ..., bagua_bytegrad), or
        horovod_adasum, bagua_decentralized, bagua_low_precision_decentralized, bagua_model_average.
      options: of the exchange: see jaxpar/exchange/presets.py. A dtype is one, or its name.

    Raises:
      ValueError: there is no such exchange; and, where it is used: it has no such option, it cannot be over so many
        replicas, or `shard_map` checks what varies over the axis, so that jax.grad has added gradients up already.
    """
    is_per_replica = state_specs(axis_name, exchange).optimizer != PartitionSpec()
    if not isinstance(dtype := options.get("wire_dtype", ""), str):
        options["wire_dtype"] = getattr(dtype, "__name__", None) or str(dtype)

    def local(state: DistributedState) -> DistributedState:
        inner = _first(state.optimizer) if is_per_replica else state.optimizer
        return DistributedState(inner, _first(state.private))

    def out(state: DistributedState) -> DistributedState:
        inner = _one(state.optimizer) if is_per_replica else state.optimizer
        return DistributedState(inner, _one(state.private))

    def built() -> Exchange:
        if axis_name in jax.typeof(jax.lax.axis_index(axis_name)).manual_axis_type.varying:
            raise ValueError("distributed_optimizer is for shard_map(.., check_vma=False): else jax.grad adds up, too")
        axis = Axis(axis_name, jax.lax.axis_size(axis_name))
        if reason := obstacle(exchange, axis.size, options):
            raise ValueError(" ".join(reason))
        return make_exchange(exchange, axis, Rule(optimizer, None), **options)

    def init(params: Tree) -> DistributedState:
        return out(built().init(params))

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        made = built().update(grads, local(state), params, **extra)
        return made.updates, out(made.state)

    return optax.GradientTransformationExtraArgs(init, update)


def state_specs(axis_name: str, exchange: str = "horovod") -> DistributedState:
    """Return the specs of the state of a `distributed_optimizer`, for `shard_map`.

    What differs by replica is divided over the axis: `state.private`, and with horovod_adasum and the bagua exchanges
    of weights also `state.optimizer`. Raises ValueError where there is no such exchange.
    """
    if exchange not in (*GRADIENTS, *WHOLE):
        others = "; its state is divided, or its optimizer per replica" if exchange in AROUND else ""
        raise ValueError(f"exchange is {exchange!r}{others}; it must be {', '.join((*GRADIENTS, *WHOLE))}")
    each = PartitionSpec(axis_name)
    return DistributedState(each if exchange in WHOLE else PartitionSpec(), each)


def broadcast(tree: Tree, axis_name: str) -> Tree:
    """Return the arrays of replica 0 on all replicas: Horovod's broadcast_parameters. For use inside `shard_map`."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis_name)[0], tree)


def _first(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], tree)


def _one(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
