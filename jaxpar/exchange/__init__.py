"""Exchanges: how replicas agree. A chain of small transformations, around any optimizer of optax.

    fuse.py            trees to vectors: buckets, partitions
    reduce.py          vectors to their mean: psum, ring, push and pull, hierarchical; casts
    compress.py        vectors to codes: bytes, bits, the largest; error feedback, momentum
    scatter_gather.py  vectors to about their mean, with codes alone on the wire
    exchange.py        the contract of what is around an optimizer; adasum.py, adam.py, gossip.py, zero.py: such
    presets.py         the names: ddp, horovod, byteps, bagua_bytegrad, zero3, onebit_adam, ..

For one's own `shard_map` step there is `distributed_optimizer`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.exchange.exchange import DistributedState, Exchange, ExchangeUpdate
from jaxpar.exchange.presets import AROUND, EXCHANGES, GRADIENTS, Rule, make_exchange, obstacle
from jaxpar.exchange.reduce import Axis
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
    optimizer: optax.GradientTransformation, axis_name: str, exchange: str = "horovod", **given: Any
) -> optax.GradientTransformationExtraArgs:
    """An optimizer for one's own step, for use inside `shard_map(.., check_vma=False)` over the replicas' axis.

    Its `init` and `update` are to be called there, `update(grads, state, params)` with the gradient of the mean loss
    over the replica's own share of the batch; what else it is given, it gives to the optimizer. The specs of its state,
    for `shard_map`, are `state_specs`: arrays that belong to a replica have a leading dim for it. Replicas begin with
    the same parameters (`broadcast`). With the bagua exchanges of weights they come to have parameters of their own.

    Args:
      optimizer: of optax, as on one device.
      axis_name: of the mesh axis.
      exchange: one of the gradients' exchanges (ddp, horovod, byteps, byteps_onebit, ..., bagua_bytegrad), or
        horovod_adasum, bagua_decentralized, bagua_low_precision_decentralized, bagua_model_average.
      given: options of the exchange: see jaxpar/exchange/presets.py. A dtype may be given by its name or as itself.

    Raises:
      ValueError: there is no such exchange; and, where it is used: it has no such option, it cannot be over so many
        replicas, or `shard_map` checks what varies over the axis, so that jax.grad has added gradients up already.
    """
    has_own_optimizer = state_specs(axis_name, exchange).optimizer != PartitionSpec()
    if not isinstance(given.get("wire_dtype", ""), str):
        given["wire_dtype"] = getattr(given["wire_dtype"], "__name__", None) or str(given["wire_dtype"])

    def local(state: DistributedState) -> DistributedState:
        inner = _first(state.optimizer) if has_own_optimizer else state.optimizer
        return DistributedState(inner, _first(state.private))

    def out(state: DistributedState) -> DistributedState:
        inner = _one(state.optimizer) if has_own_optimizer else state.optimizer
        return DistributedState(inner, _one(state.private))

    def built() -> Exchange:
        if axis_name in jax.typeof(jax.lax.axis_index(axis_name)).manual_axis_type.varying:
            raise ValueError("distributed_optimizer is for shard_map(.., check_vma=False): else jax.grad adds up, too")
        axis = Axis(axis_name, jax.lax.axis_size(axis_name))
        if reason := obstacle(exchange, axis.size, given):
            raise ValueError(" ".join(reason))
        return make_exchange(exchange, axis, Rule(optimizer, None), **given)

    def init(params: Any) -> DistributedState:
        return out(built().init(params))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        made = built().update(grads, local(state), params, **extra)
        return made.updates, out(made.state)

    return optax.GradientTransformationExtraArgs(init, update)


def state_specs(axis_name: str, exchange: str = "horovod") -> DistributedState:
    """Where the state of a `distributed_optimizer` is: specs of its parts, for `shard_map`.

    What belongs to a replica is divided over the axis: `state.private`, and with horovod_adasum and the bagua exchanges
    of weights also `state.optimizer`. Raises ValueError where there is no such exchange.
    """
    if exchange not in (*GRADIENTS, *WHOLE):
        others = "; its state is divided, or its optimizer its own" if exchange in AROUND else ""
        raise ValueError(f"exchange is {exchange!r}{others}; it must be {', '.join((*GRADIENTS, *WHOLE))}")
    each = PartitionSpec(axis_name)
    return DistributedState(each if exchange in WHOLE else PartitionSpec(), each)


def broadcast(tree: Any, axis_name: str) -> Any:
    """The arrays of replica 0 on all of them: Horovod's broadcast_parameters. For use inside `shard_map`."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis_name)[0], tree)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _one(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
