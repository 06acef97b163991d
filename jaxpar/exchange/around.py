"""The exchanges that wrap an optimizer, by name. Each is one function, and its keyword arguments are its options.

They change the update, shard the state, or depend on the length of the run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange import gossip, reduce
from jaxpar.exchange.adam import momentum_exchange
from jaxpar.exchange.adasum import adasum
from jaxpar.exchange.compress import error_feedback, min_max_uint8, onebit
from jaxpar.exchange.exchange import AllReduce, Exchange, shared
from jaxpar.exchange.fuse import averaged, fused, in_layer_order
from jaxpar.exchange.gradients import BYTES_BLOCK, MIB
from jaxpar.exchange.powersgd import WARMUP, low_rank
from jaxpar.exchange.reduce import Axis
from jaxpar.exchange.scatter_gather import scatter_gather
from jaxpar.exchange.zero import Codes, zero
from jaxpar.layout import Tree

NODE = 8  # GPUs of most nodes
LAYER_BYTES = 1024 * MIB  # more than most layers have
BLOCK = 2048  # elements that share a scale (1-bit momentum), or a range (8-bit weights and gradients of ZeRO)


class Rule(NamedTuple):
    """An optimizer to be wrapped in an exchange, and its parameters.

    Attributes:
      optimizer: any optax optimizer.
      params: the parameters or their shapes, for exchanges that depend on them.
      adamw: if the optimizer is optax.adamw, the arguments of `momentum_exchange` that describe it.
      layers: if the parameters are {layer: ..}, the layers in order, so that the last layers' gradients are sent first.
      clip_norm: the norm to which `optimizer` clips the gradient; exchanges that clip to it themselves need it.
      num_steps: number of steps of the run, for exchanges with a warm-up.
    """

    optimizer: optax.GradientTransformation
    params: Tree
    adamw: Mapping[str, Any] | None = None
    layers: Sequence[str] = ()
    clip_norm: float = 0.0
    num_steps: int = 1

    def in_order(self, all_reduce: AllReduce) -> AllReduce:
        """Return the same all-reduce, with buckets in the order of the layers."""
        return in_layer_order(all_reduce, self.layers) if self.layers else all_reduce


def horovod_adasum(axis: Axis, rule: Rule) -> Exchange:
    """Return Horovod's exchange with op=Adasum."""
    return adasum(axis, rule.optimizer)


def bagua_qadam(
    axis: Axis, rule: Rule, *, bucket_bytes: int = 10 * MIB, warmup: float = 0.2, block: int = BYTES_BLOCK
) -> Exchange:
    """Return Bagua's QAdam: 8-bit momentum after the warm-up."""
    lossy = fused(scatter_gather(axis, min_max_uint8(block), min_max_uint8(block)), bucket_bytes)
    return _adam(axis, rule, lossy, bucket_bytes, warmup)


def onebit_adam(
    axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, warmup: float = 0.2, block: int = BLOCK
) -> Exchange:
    """Return DeepSpeed's 1-bit Adam: 1-bit momentum after the warm-up, with error feedback of workers and servers."""
    compressor = error_feedback(onebit("l2", block))
    lossy = fused(scatter_gather(axis, compressor, compressor), bucket_bytes)
    return _adam(axis, rule, lossy, bucket_bytes, warmup)


def powersgd(
    axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, rank: int = 4, warmup: float = 0.1, seed: int = 0
) -> Exchange:
    """Return PowerSGD: low-rank factors of the gradients, with error feedback, after a warm-up.

    The optimizer clips the approximate mean, as after PyTorch's hook: clipping each replica's gradient before it is
    compressed lost more accuracy.
    """
    warmup_steps = round(warmup * rule.num_steps)
    share = min(1.0, warmup_steps / rule.num_steps)
    exact = fused(reduce.psum(axis), bucket_bytes)
    lossy = low_rank(exact, rank=rank, warmup_steps=warmup_steps, seed=seed)
    exchange = averaged(rule.in_order(lossy), rule.optimizer)

    def traffic(params: Tree, _num_microbatches: int) -> list[Traffic]:
        return shared(rule.in_order(exact).traffic(params), share) + shared(lossy.traffic(params), 1 - share)

    return exchange._replace(traffic=traffic, branches={WARMUP: (1 - share, share)} if warmup_steps else {})


def bagua_decentralized(axis: Axis, rule: Rule, *, peers: str = "shift_one", interval: int = 1) -> Exchange:
    """Return Bagua's decentralized algorithm: pairs of replicas average their weights, with new pairs each time."""
    return gossip.decentralized(axis, rule.optimizer, peers=peers, interval=interval)


def bagua_low_precision_decentralized(axis: Axis, rule: Rule, *, block: int = BYTES_BLOCK) -> Exchange:
    """Return Bagua's low-precision decentralized algorithm: a byte for each weight to both neighbours on a ring."""
    return gossip.low_precision_decentralized(axis, rule.optimizer, min_max_uint8(block))


def bagua_model_average(axis: Axis, rule: Rule, *, bucket_bytes: int = 10 * MIB, interval: int = 8) -> Exchange:
    """Return Bagua's model average: replicas train independently, and average their weights every `interval` steps."""
    return gossip.model_average(axis, rule.optimizer, fused(reduce.psum(axis), bucket_bytes), interval)


def zero1(axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, offload: bool = False) -> Exchange:
    """Return DeepSpeed's ZeRO stage 1: each replica holds 1/n of the optimizer state."""
    return zero(axis, 1, rule.optimizer, rule.params, bucket_bytes, offload=offload)


def zero2(axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, offload: bool = False) -> Exchange:
    """Return ZeRO stage 2: each replica also holds only 1/n of the gradients accumulated over microbatches."""
    return zero(axis, 2, rule.optimizer, rule.params, bucket_bytes, offload=offload)


def zero3(
    axis: Axis,
    rule: Rule,
    *,
    bucket_bytes: int = 0,
    offload: bool = False,
    quantized_weights: bool = False,
    quantized_gradients: bool = False,
    block: int = BLOCK,
) -> Exchange:
    """Return ZeRO stage 3: each replica also holds only 1/n of the parameters, which are gathered layer by layer.

    bucket_bytes: size limit of a message; 0: 25 MiB within a node, and LAYER_BYTES for more than NODE replicas.
    """
    codes, bucket_bytes = (
        _codes(quantized_weights, quantized_gradients, block),
        bucket_bytes or layer_message_bytes(axis.size),
    )
    return zero(axis, 3, rule.optimizer, rule.params, bucket_bytes, offload=offload, codes=codes)


def hsdp(
    axis: Axis,
    rule: Rule,
    *,
    bucket_bytes: int = 0,
    group: int = 0,
    offload: bool = False,
    quantized_weights: bool = False,
    quantized_gradients: bool = False,
    block: int = BLOCK,
) -> Exchange:
    """Return hybrid sharding: ZeRO stage 3 within groups of replicas, each of which has a copy of all arrays.

    Args:
      axis: axis of the replicas.
      rule: the optimizer and its parameters.
      bucket_bytes: as in `zero3`, for the replicas of a group.
      group: replicas per group; 0: the greatest common divisor of the number of replicas and NODE.
      offload: whether the optimizer state is kept in host memory between updates.
      quantized_weights: whether parameters are sent with 8 bits per element.
      quantized_gradients: whether gradients are.
      block: elements that share a range.
    """
    group = group or math.gcd(axis.size, NODE)
    codes, bucket_bytes = (
        _codes(quantized_weights, quantized_gradients, block),
        bucket_bytes or layer_message_bytes(group),
    )
    return zero(axis, 3, rule.optimizer, rule.params, bucket_bytes, offload=offload, codes=codes, group=group)


def layer_message_bytes(num_replicas: int) -> int:
    """Return the default size limit of a message of ZeRO stage 3, in bytes.

    Between nodes the latency of a message is long, so a layer has one. Several messages need fewer copies.
    """
    return 25 * MIB if num_replicas <= NODE else LAYER_BYTES


def _codes(weights: bool, gradients: bool, block: int) -> Codes:
    coded = min_max_uint8(block)
    return Codes(coded if weights else None, coded if gradients else None)


def _adam(axis: Axis, rule: Rule, lossy: AllReduce, bucket_bytes: int, warmup: float) -> Exchange:
    assert rule.adamw is not None
    exact, lossy = (rule.in_order(one) for one in (fused(reduce.psum(axis), bucket_bytes), lossy))
    return momentum_exchange(exact, lossy, rule.optimizer, warmup=warmup, num_steps=rule.num_steps, **rule.adamw)


class AroundOptimizer(NamedTuple):
    """An exchange that wraps an optimizer, and its requirements on that optimizer.

    Attributes:
      make: (axis, rule, **options) -> the exchange.
      divides: it shards arrays, so the optimizer must be elementwise.
      has_adamw: it computes the AdamW update itself, from exchanged momentum, so the optimizer must be AdamW.
    """

    make: Callable[..., Exchange]
    divides: bool = False
    has_adamw: bool = False


AROUND = {
    "horovod_adasum": AroundOptimizer(horovod_adasum),
    "bagua_qadam": AroundOptimizer(bagua_qadam, has_adamw=True),
    "bagua_decentralized": AroundOptimizer(bagua_decentralized),
    "bagua_low_precision_decentralized": AroundOptimizer(bagua_low_precision_decentralized),
    "bagua_model_average": AroundOptimizer(bagua_model_average),
    "zero1": AroundOptimizer(zero1, divides=True),
    "zero2": AroundOptimizer(zero2, divides=True),
    "zero3": AroundOptimizer(zero3, divides=True),
    "hsdp": AroundOptimizer(hsdp, divides=True),
    "onebit_adam": AroundOptimizer(onebit_adam, has_adamw=True),
    "powersgd": AroundOptimizer(powersgd),
}
