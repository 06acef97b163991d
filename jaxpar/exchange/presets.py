"""The named exchanges. Each is one function; its keyword arguments are its options in config.exchange_options.

ddp, horovod, byteps, ..        agree on gradients: GRADIENTS, which pipelines can use too
horovod_adasum, bagua_qadam, .. are around an optimizer: AROUND
dp                              is a program for the master device (jaxpar/strategies/master.py)
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from jaxpar.exchange import gossip, reduce
from jaxpar.exchange.adam import momentum_exchange
from jaxpar.exchange.adasum import adasum
from jaxpar.exchange.compress import Compressor, dithering, error_feedback, min_max_uint8, momentum, onebit
from jaxpar.exchange.compress import randomk as random_k
from jaxpar.exchange.compress import topk as top_k
from jaxpar.exchange.exchange import Exchange, averaged, every
from jaxpar.exchange.fuse import AllReduce, fused
from jaxpar.exchange.reduce import Axis, Reducer
from jaxpar.exchange.scatter_gather import scatter_gather
from jaxpar.exchange.zero import zero

MIB = 2**20
BYTEPS_PARTITION = 4_096_000
BLOCK = 2048  # elements that share a scale of one-bit codes


class Rule(NamedTuple):
    """What is around which an exchange may be put.

    Attributes:
      optimizer: any of optax.
      params: the parameters, or their shapes: for what is decided by them.
      adamw: where the optimizer is optax.adamw: the arguments of `momentum_exchange` that say which.
    """

    optimizer: optax.GradientTransformation
    params: Any
    adamw: Mapping[str, Any] | None = None


# ---- on gradients -------------------------------------------------------------------------------


def ddp(
    axis: Axis, *, bucket_bytes: int = 25 * MIB, wire_dtype: str = "", algorithm: str = "psum", group: int = 1
) -> AllReduce:
    """PyTorch's DistributedDataParallel: gradients in buckets, the last layers' first.

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """
    return fused(_exact(axis, algorithm, group, wire_dtype), bucket_bytes)


def horovod(
    axis: Axis,
    *,
    bucket_bytes: int = 128 * MIB,
    wire_dtype: str = "",
    algorithm: str = "ring",
    group: int = 1,
    predivide: float = 1.0,
) -> AllReduce:
    """Horovod's DistributedOptimizer: ring all-reduce of fused tensors.

    Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
    """
    reducer = _exact(axis, algorithm, group)
    reducer = reducer if predivide == 1 else reduce.predivide(reducer, predivide)
    return fused(reduce.cast(reducer, wire_dtype) if wire_dtype else reducer, bucket_bytes)


def byteps(axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, wire_dtype: str = "") -> AllReduce:
    """BytePS: partitions are pushed to servers and pulled from them, those of earlier layers first."""
    reducer = reduce.push_pull(axis)
    reducer = reduce.cast(reducer, wire_dtype) if wire_dtype else reducer
    return fused(reducer, bucket_bytes, cut=True, backwards=False)


def byteps_onebit(
    axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, block: int = BLOCK, momentum: float = 0.0
) -> AllReduce:
    """BytePS with signs on the wire, and a scale for each `block` elements."""
    return _byteps(axis, onebit(block=block), bucket_bytes, momentum)


def byteps_topk(
    axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, ratio: float = 0.01, momentum: float = 0.0
) -> AllReduce:
    """BytePS with the largest values on the wire."""
    return _byteps(axis, top_k(ratio), bucket_bytes, momentum)


def byteps_randomk(
    axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, ratio: float = 0.05, momentum: float = 0.0
) -> AllReduce:
    """BytePS with random values on the wire."""
    return _byteps(axis, random_k(ratio), bucket_bytes, momentum)


def byteps_dithering(
    axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, levels: int = 127, momentum: float = 0.0
) -> AllReduce:
    """BytePS with values on the wire that are rounded at random."""
    return _byteps(axis, dithering(levels), bucket_bytes, momentum)


def bagua_bytegrad(axis: Axis, *, bucket_bytes: int = 10 * MIB) -> AllReduce:
    """Bagua's ByteGrad: a byte for each element."""
    return fused(scatter_gather(axis, min_max_uint8(), min_max_uint8()), bucket_bytes)


def _exact(axis: Axis, algorithm: str, group: int, wire_dtype: str = "") -> Reducer:
    if group > 1:
        reducer = reduce.hierarchical(axis, group)
    else:
        reducer = {"psum": reduce.psum, "ring": reduce.ring}[algorithm](axis)
    return reduce.cast(reducer, wire_dtype) if wire_dtype else reducer


def _byteps(axis: Axis, code: Compressor, bucket_bytes: int, mu: float) -> AllReduce:
    server = error_feedback(code)
    worker = momentum(server, mu) if mu else server
    return fused(scatter_gather(axis, worker, server), bucket_bytes, cut=True, backwards=False)


# ---- around an optimizer ------------------------------------------------------------------------


def horovod_adasum(axis: Axis, rule: Rule) -> Exchange:
    """Horovod with op=Adasum."""
    return adasum(axis, rule.optimizer)


def bagua_qadam(axis: Axis, rule: Rule, *, bucket_bytes: int = 10 * MIB, warmup: float = 0.2) -> Exchange:
    """Bagua's QAdam: momentum in bytes after the warm-up."""
    lossy = fused(scatter_gather(axis, min_max_uint8(), min_max_uint8()), bucket_bytes)
    return _adam(axis, rule, lossy, bucket_bytes, warmup)


def onebit_adam(
    axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, warmup: float = 0.2, block: int = BLOCK
) -> Exchange:
    """DeepSpeed's 1-bit Adam: momentum in signs after the warm-up, with error feedback of workers and servers."""
    code = error_feedback(onebit("l2", block))
    return _adam(axis, rule, fused(scatter_gather(axis, code, code), bucket_bytes), bucket_bytes, warmup)


def bagua_decentralized(axis: Axis, rule: Rule) -> Exchange:
    """Bagua's decentralized algorithm: the mean of two replicas' weights, of other two each step."""
    return gossip.decentralized(axis, rule.optimizer)


def bagua_low_precision_decentralized(axis: Axis, rule: Rule) -> Exchange:
    """Bagua's low-precision decentralized algorithm: a byte for each weight to both neighbours of a ring."""
    return gossip.low_precision_decentralized(axis, rule.optimizer, min_max_uint8())


def bagua_model_average(axis: Axis, rule: Rule, *, bucket_bytes: int = 10 * MIB, interval: int = 8) -> Exchange:
    """Replicas train alone, and every `interval` steps go on from the mean of their weights."""
    return gossip.model_average(axis, rule.optimizer, fused(reduce.psum(axis), bucket_bytes), interval)


def zero1(axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, offload: bool = False) -> Exchange:
    """DeepSpeed's ZeRO stage 1: a replica has 1/n of the optimizer's state."""
    return zero(axis, 1, rule.optimizer, rule.params, bucket_bytes, offload=offload)


def zero2(axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, offload: bool = False) -> Exchange:
    """Stage 2: and of the gradients that are added up over microbatches."""
    return zero(axis, 2, rule.optimizer, rule.params, bucket_bytes, offload=offload)


def zero3(axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, offload: bool = False) -> Exchange:
    """Stage 3: and of the parameters, which are gathered layer by layer."""
    return zero(axis, 3, rule.optimizer, rule.params, bucket_bytes, offload=offload)


def _adam(axis: Axis, rule: Rule, lossy: AllReduce, bucket_bytes: int, warmup: float) -> Exchange:
    assert rule.adamw is not None
    exact = fused(reduce.psum(axis), bucket_bytes)
    return momentum_exchange(axis, exact, lossy, rule.optimizer, warmup=warmup, **rule.adamw)


# ---- by name ------------------------------------------------------------------------------------

GRADIENTS: dict[str, Callable[..., AllReduce]] = {
    function.__name__: function
    for function in (
        *(ddp, horovod, byteps, byteps_onebit, byteps_topk, byteps_randomk, byteps_dithering),
        bagua_bytegrad,
    )
}
AROUND: dict[str, Callable[..., Exchange]] = {
    function.__name__: function
    for function in (
        *(horovod_adasum, bagua_qadam, bagua_decentralized, bagua_low_precision_decentralized, bagua_model_average),
        *(zero1, zero2, zero3, onebit_adam),
    )
}
NAMES = ("ddp", "dp", *(name for name in (*GRADIENTS, *AROUND) if name != "ddp"))
PASSES = "backward_passes_per_step"  # an option of Horovod's, whichever its reduction


def options(name: str) -> dict[str, Any]:
    """The options of an exchange and their defaults."""
    function = {**GRADIENTS, **AROUND}.get(name)
    parameters = inspect.signature(function).parameters.values() if function else ()
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return own | ({PASSES: 1} if name.startswith("horovod") else {})


def build(name: str, axis: Axis, rule: Rule, **given: Any) -> Exchange:
    """The named exchange around an optimizer; `given`: options. Not dp."""
    passes = given.pop(PASSES, 1)
    if name in GRADIENTS:
        exchange = averaged(axis, GRADIENTS[name](axis, **given), rule.optimizer)
    else:
        exchange = AROUND[name](axis, rule, **given)
    return exchange if passes == 1 else every(axis, passes, exchange)
