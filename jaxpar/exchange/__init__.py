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
import optax

from jaxpar.exchange.exchange import Exchange, Update
from jaxpar.exchange.presets import AROUND, GRADIENTS, NAMES, Rule, build, obstacle
from jaxpar.exchange.reduce import Axis, Traffic

__all__ = ["NAMES", "Axis", "Exchange", "Traffic", "Update", "distributed_optimizer"]

WHOLE = ("horovod_adasum", "bagua_decentralized", "bagua_low_precision_decentralized", "bagua_model_average")


def distributed_optimizer(
    optimizer: optax.GradientTransformation, axis_name: str, exchange: str = "horovod", **given: Any
) -> optax.GradientTransformation:
    """An optimizer for one's own step, for use inside `shard_map(.., check_vma=False)` or pmap over the replicas' axis.

    Its `init` and `update` are to be called there, `update(grads, state, params)` with the gradient of the mean loss
    over the replica's own share of the batch. Replicas begin with the same parameters. State that belongs to a replica
    is in `state.own`: give it a place on each device (a `PartitionSpec` of the axis for leaves with a new leading dim);
    the rest is the same on all of them. With horovod_adasum and the bagua exchanges of weights, `state.optimizer`
    belongs to the replica too; with the latter, so do the parameters.

    Args:
      optimizer: of optax, as on one device.
      axis_name: of the mesh axis.
      exchange: one of the gradients' exchanges (ddp, horovod, byteps, byteps_onebit, ..., bagua_bytegrad), or
        horovod_adasum, bagua_decentralized, bagua_low_precision_decentralized, bagua_model_average.
      given: options of the exchange: see jaxpar/exchange/presets.py.

    Raises:
      ValueError: there is no such exchange; and, where it is used: it has no such option, it cannot be over so many
        replicas, or `shard_map` checks what varies over the axis, so that jax.grad has added gradients up already.
    """
    if exchange not in (*GRADIENTS, *WHOLE):
        others = "; its state is divided, or its optimizer its own" if exchange in AROUND else ""
        raise ValueError(f"exchange is {exchange!r}{others}; it may be {', '.join((*GRADIENTS, *WHOLE))}")

    def built() -> Exchange:
        if axis_name in jax.typeof(jax.lax.axis_index(axis_name)).manual_axis_type.varying:
            raise ValueError("distributed_optimizer is for shard_map(.., check_vma=False): else jax.grad adds up, too")
        axis = Axis(axis_name, jax.lax.axis_size(axis_name))
        if reason := obstacle(exchange, axis.size, given):
            raise ValueError(" ".join(reason))
        return build(exchange, axis, Rule(optimizer, None), **given)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        made = built().update(grads, state, params)
        return made.updates, made.state

    return optax.GradientTransformation(lambda params: built().init(params), update)
