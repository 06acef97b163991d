"""The named exchanges. Each is one function, and its keyword arguments are its options in config.exchange_options.

ddp, horovod, byteps, ..         average gradients (GRADIENTS); pipelines can use them, too
horovod_adasum, bagua_qadam, ..  wrap an optimizer (AROUND)
dp                               is a program for the master device (jaxpar/strategies/master.py)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from jaxpar.exchange import gossip, reduce
from jaxpar.exchange.adam import momentum_exchange
from jaxpar.exchange.adasum import adasum
from jaxpar.exchange.compress import (
    FLOAT8,
    Compressor,
    dithering,
    error_feedback,
    float8,
    min_max_uint8,
    momentum,
    onebit,
)
from jaxpar.exchange.compress import randomk as random_k
from jaxpar.exchange.compress import topk as top_k
from jaxpar.exchange.exchange import Exchange, averaged, every, shared
from jaxpar.exchange.fuse import AllReduce, by_size, fused, in_layer_order
from jaxpar.exchange.powersgd import WARMUP, low_rank
from jaxpar.exchange.reduce import Axis, Reducer
from jaxpar.exchange.scatter_gather import in_groups, scatter_gather
from jaxpar.exchange.zero import Codes, zero
from jaxpar.layout import Tree
from jaxpar.plan import Traffic

MIB = 2**20
NODE = 8  # GPUs of most nodes
BYTEPS_PARTITION, MIN_COMPRESS_BYTES = 4_096_000, 65_536  # the defaults of BytePS
# Elements that share a scale (1-bit gradients, 1-bit momentum), and a range (8-bit). The gradient of most rows of an
# embedding is zero, so the scale of 1-bit gradients should be that of one row or less.
ROW_BLOCK, BLOCK, BYTES_BLOCK = 128, 2048, 4096


class Rule(NamedTuple):
    """An optimizer to be wrapped in an exchange, and its parameters.

    Attributes:
      optimizer: any optax optimizer.
      params: the parameters or their shapes, for exchanges that depend on them.
      adamw: if the optimizer is optax.adamw, the arguments of `momentum_exchange` that describe it.
      layers: if the parameters are {layer: ..}, the layers in order, so that the last layers' gradients are sent first.
      clip_norm: the norm to which `optimizer` clips the gradient; exchanges with error feedback clip to it themselves.
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


# ---- exchanges of gradients ---------------------------------------------------------------------


def ddp(
    axis: Axis, *, bucket_bytes: int = 25 * MIB, wire_dtype: str = "", algorithm: str = "psum", group: int = 1
) -> AllReduce:
    """Return the exchange of PyTorch's DistributedDataParallel: gradients in buckets, the last layers first.

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020. Gradients are divided by
    the number of replicas before they are summed, in the dtype in which they are sent, as by PyTorch's fp16 hook. As in
    PyTorch, the first bucket is smaller, so that sending starts early, and a bucket is closed once it is full.
    """
    reducer = _in_dtype(axis, algorithm, group, wire_dtype, predivide=axis.size)
    return fused(reducer, bucket_bytes, first_bytes=min(MIB, bucket_bytes), overfull=True)


def horovod(
    axis: Axis,
    *,
    bucket_bytes: int = 128 * MIB,
    wire_dtype: str = "",
    algorithm: str = "ring",
    group: int = 1,
    predivide: float = 1.0,
) -> AllReduce:
    """Return the exchange of Horovod's DistributedOptimizer: ring all-reduce of fused tensors.

    Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
    """
    return fused(_in_dtype(axis, algorithm, group, wire_dtype, predivide), bucket_bytes)


def byteps(axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, wire_dtype: str = "") -> AllReduce:
    """Return BytePS: partitions are pushed to servers and pulled from them, the first layers first."""
    return fused(_in_dtype(axis, "push_pull", 1, wire_dtype), bucket_bytes, cut=True, backwards=False)


def byteps_onebit(
    axis: Axis,
    *,
    bucket_bytes: int = BYTEPS_PARTITION,
    group: int = 1,
    min_compress_bytes: int = MIN_COMPRESS_BYTES,
    block: int = ROW_BLOCK,
    momentum: float = 0.0,
) -> AllReduce:
    """Return BytePS with 1-bit compression: signs, and a scale for each `block` elements."""
    return _byteps(axis, onebit(block=block), bucket_bytes, group, min_compress_bytes, momentum)


def byteps_topk(
    axis: Axis,
    *,
    bucket_bytes: int = BYTEPS_PARTITION,
    group: int = 1,
    min_compress_bytes: int = MIN_COMPRESS_BYTES,
    ratio: float = 0.01,
    momentum: float = 0.0,
) -> AllReduce:
    """Return BytePS with top-k compression: the largest values."""
    return _byteps(axis, top_k(ratio), bucket_bytes, group, min_compress_bytes, momentum)


def byteps_randomk(
    axis: Axis,
    *,
    bucket_bytes: int = BYTEPS_PARTITION,
    group: int = 1,
    min_compress_bytes: int = MIN_COMPRESS_BYTES,
    ratio: float = 0.25,
    momentum: float = 0.0,
    seed: int = 0,
) -> AllReduce:
    """Return BytePS with random-k compression: random values."""
    return _byteps(axis, random_k(ratio), bucket_bytes, group, min_compress_bytes, momentum, seed)


def byteps_dithering(
    axis: Axis,
    *,
    bucket_bytes: int = BYTEPS_PARTITION,
    group: int = 1,
    min_compress_bytes: int = MIN_COMPRESS_BYTES,
    levels: int = 127,
    momentum: float = 0.0,
    seed: int = 0,
) -> AllReduce:
    """Return BytePS with dithering: values rounded randomly."""
    return _byteps(axis, dithering(levels), bucket_bytes, group, min_compress_bytes, momentum, seed)


def bagua_bytegrad(axis: Axis, *, bucket_bytes: int = 10 * MIB, group: int = 1, block: int = BYTES_BLOCK) -> AllReduce:
    """Return Bagua's ByteGrad: a byte for each element, and a range for each `block` elements.

    Bagua's own block is 1/n of a bucket.
    """
    return fused(_lossy(axis, group, min_max_uint8(block), min_max_uint8(block)), bucket_bytes)


def _in_dtype(axis: Axis, algorithm: str, group: int, wire_dtype: str, predivide: float = 1.0) -> Reducer:
    """Return the reducer that sends `wire_dtype`, and sums in it. A float8 is too coarse for sums: they are float32."""
    if wire_dtype in FLOAT8:
        return _lossy(axis, group, float8(wire_dtype, BYTES_BLOCK), float8(wire_dtype, BYTES_BLOCK))
    dtype = wire_dtype or None
    if group > 1:
        return reduce.hierarchical(axis, group, predivide=predivide, dtype=dtype)
    algorithms = {"psum": reduce.psum, "ring": reduce.ring, "push_pull": reduce.push_pull}
    return algorithms[algorithm](axis, predivide=predivide, dtype=dtype)


def _lossy(axis: Axis, group: int, worker: Compressor, server: Compressor) -> Reducer:
    if group > 1:
        return in_groups(axis, group, lambda between: scatter_gather(between, worker, server))
    return scatter_gather(axis, worker, server)


def _byteps(
    axis: Axis, compressor: Compressor, bucket_bytes: int, group: int, min_bytes: int, mu: float, seed: int = 0
) -> AllReduce:
    """Return BytePS with a compressor for arrays of at least `min_bytes` bytes. mu: momentum before compression."""
    server = error_feedback(compressor)
    worker = momentum(server, mu) if mu else server
    reducer = _lossy(axis, group, worker, server)
    lossy = fused(reducer, bucket_bytes, cut=True, backwards=False, seed=seed)
    return by_size(byteps(axis, bucket_bytes=bucket_bytes), lossy, min_bytes) if min_bytes else lossy


# ---- exchanges that wrap an optimizer -----------------------------------------------------------


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
    """Return PowerSGD: low-rank factors of the gradients, with error feedback, after a warm-up."""
    warmup_steps = round(warmup * rule.num_steps)
    share = min(1.0, warmup_steps / rule.num_steps)
    exact = fused(reduce.psum(axis), bucket_bytes)
    lossy = low_rank(exact, rank=rank, warmup_steps=warmup_steps, seed=seed)
    exchange = averaged(rule.in_order(lossy)._replace(clip_norm=rule.clip_norm), rule.optimizer)

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
    bucket_bytes: int = 25 * MIB,
    offload: bool = False,
    quantized_weights: bool = False,
    quantized_gradients: bool = False,
    block: int = BLOCK,
) -> Exchange:
    """Return ZeRO stage 3: each replica also holds only 1/n of the parameters, which are gathered layer by layer."""
    codes = _codes(quantized_weights, quantized_gradients, block)
    return zero(axis, 3, rule.optimizer, rule.params, bucket_bytes, offload=offload, codes=codes)


def hsdp(
    axis: Axis,
    rule: Rule,
    *,
    bucket_bytes: int = 25 * MIB,
    group: int = 0,
    offload: bool = False,
    quantized_weights: bool = False,
    quantized_gradients: bool = False,
    block: int = BLOCK,
) -> Exchange:
    """Return hybrid sharding: ZeRO stage 3 within groups of replicas, each of which has a copy of all arrays.

    group: replicas per group; 0: the greatest common divisor of the number of replicas and NODE.
    """
    group = group or math.gcd(axis.size, NODE)
    codes = _codes(quantized_weights, quantized_gradients, block)
    return zero(axis, 3, rule.optimizer, rule.params, bucket_bytes, offload=offload, codes=codes, group=group)


def _codes(weights: bool, gradients: bool, block: int) -> Codes:
    coded = min_max_uint8(block)
    return Codes(coded if weights else None, coded if gradients else None)


def _adam(axis: Axis, rule: Rule, lossy: AllReduce, bucket_bytes: int, warmup: float) -> Exchange:
    assert rule.adamw is not None
    exact, lossy = (rule.in_order(one) for one in (fused(reduce.psum(axis), bucket_bytes), lossy))
    return momentum_exchange(exact, lossy, rule.optimizer, warmup=warmup, num_steps=rule.num_steps, **rule.adamw)


# ---- by name ------------------------------------------------------------------------------------

GRADIENTS: dict[str, Callable[..., AllReduce]] = {
    function.__name__: function
    for function in (
        *(ddp, horovod, byteps, byteps_onebit, byteps_topk, byteps_randomk, byteps_dithering),
        bagua_bytegrad,
    )
}


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
ERROR_FEEDBACK = ("byteps_onebit", "byteps_topk", "byteps_randomk", "byteps_dithering")
EXCHANGES = ("ddp", "dp", *(name for name in (*GRADIENTS, *AROUND) if name != "ddp"))
# How training with an exchange differs from a single device. Exchanges not listed here differ only by rounding.
DIFFERS = {
    "horovod_adasum": "combines updates with Adasum instead of averaging gradients",
    "powersgd": "sends low-rank approximations of gradients after its warm-up",
    **dict.fromkeys(("byteps_onebit", "bagua_bytegrad", "byteps_dithering"), "compresses gradients lossily"),
    **dict.fromkeys(("byteps_topk", "byteps_randomk"), "sends only part of the gradients in each step"),
    **dict.fromkeys(
        (name for name, one in AROUND.items() if one.has_adamw), "compresses momentum lossily after its warm-up"
    ),
    **dict.fromkeys(("bagua_decentralized", "bagua_model_average"), "has different weights on each replica"),
    "bagua_low_precision_decentralized": "has different weights on each replica",
}
AVERAGE = "average_aggregated_gradients"  # the other option of Horovod's passes
PASSES = "backward_passes_per_step"  # an option of Horovod, with any reduction


def exchange_differs(name: str, settings: Mapping[str, Any]) -> str:
    """Return how training with this exchange differs from a single device; '' if it differs only by rounding."""
    if name in DIFFERS:
        return f"{name} {DIFFERS[name]}"
    if settings.get(PASSES, 1) > 1:
        return f"{name} takes one optimizer step for every {settings[PASSES]} training steps"
    quantized = [what for what in ("weights", "gradients") if settings.get(f"quantized_{what}")]
    if quantized:
        return f"{name} sends {' and '.join(quantized)} with 8 bits per element"
    return f"{name} sends gradients in {settings['wire_dtype']}" if settings.get("wire_dtype") else ""


def make_all_reduce(name: str, axis: Axis, clip_norm: float, **settings: Any) -> AllReduce:
    """Return the named exchange of gradients with these options. clip_norm: as in `Rule`."""
    all_reduce = GRADIENTS[name](axis, **settings)
    return all_reduce._replace(clip_norm=clip_norm) if name in ERROR_FEEDBACK else all_reduce


def make_exchange(name: str, axis: Axis, rule: Rule, **settings: Any) -> Exchange:
    """Return the named exchange with these options, around an optimizer. dp is not supported."""
    passes, average = settings.pop(PASSES, 1), settings.pop(AVERAGE, False)
    if name in GRADIENTS:
        exchange = averaged(rule.in_order(make_all_reduce(name, axis, rule.clip_norm, **settings)), rule.optimizer)
    else:
        exchange = AROUND[name].make(axis, rule, **settings)
    return exchange if passes == 1 else every(passes, exchange, average=average)
