"""The named exchanges. Each is one function; its keyword arguments are its options in config.exchange_options.

ddp, horovod, byteps, ..        agree on gradients: GRADIENTS, which pipelines can use too
horovod_adasum, bagua_qadam, .. are around an optimizer: AROUND
dp                              is a program for the master device (jaxpar/strategies/master.py)
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from jaxpar.exchange import gossip, reduce
from jaxpar.exchange.adam import momentum_exchange
from jaxpar.exchange.adasum import adasum
from jaxpar.exchange.compress import Compressor, dithering, error_feedback, min_max_uint8, momentum, onebit
from jaxpar.exchange.compress import randomk as random_k
from jaxpar.exchange.compress import topk as top_k
from jaxpar.exchange.exchange import Exchange, averaged, every
from jaxpar.exchange.fuse import AllReduce, fused, in_layer_order
from jaxpar.exchange.reduce import Axis, Reducer
from jaxpar.exchange.scatter_gather import scatter_gather
from jaxpar.exchange.zero import zero
from jaxpar.layout import Tree

MIB = 2**20
BYTEPS_PARTITION = 4_096_000
BLOCK, BYTES_BLOCK = 2048, 4096  # elements that share a scale of bits, and a range of bytes


class Rule(NamedTuple):
    """An optimizer and its parameters, around which an exchange is put.

    Attributes:
      optimizer: any of optax.
      params: the parameters, or their shapes: for what is decided by them.
      adamw: where the optimizer is optax.adamw: the arguments of `momentum_exchange` that say which.
      layers: where the parameters are {layer: ..}: these in order, so that the last ones' gradients go first.
    """

    optimizer: optax.GradientTransformation
    params: Tree
    adamw: Mapping[str, Any] | None = None
    layers: Sequence[str] = ()

    def in_order(self, all_reduce: AllReduce) -> AllReduce:
        """Return the same, with vectors in the order of the layers."""
        return in_layer_order(all_reduce, self.layers) if self.layers else all_reduce


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
    """BytePS that sends signs, and a scale for each `block` elements."""
    return _byteps(axis, onebit(block=block), bucket_bytes, momentum)


def byteps_topk(
    axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, ratio: float = 0.01, momentum: float = 0.0
) -> AllReduce:
    """BytePS that sends the largest values."""
    return _byteps(axis, top_k(ratio), bucket_bytes, momentum)


def byteps_randomk(
    axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, ratio: float = 0.05, momentum: float = 0.0, seed: int = 0
) -> AllReduce:
    """BytePS that sends random values."""
    return _byteps(axis, random_k(ratio), bucket_bytes, momentum, seed)


def byteps_dithering(
    axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, levels: int = 127, momentum: float = 0.0, seed: int = 0
) -> AllReduce:
    """BytePS that sends values rounded at random."""
    return _byteps(axis, dithering(levels), bucket_bytes, momentum, seed)


def bagua_bytegrad(axis: Axis, *, bucket_bytes: int = 10 * MIB, block: int = BYTES_BLOCK) -> AllReduce:
    """Bagua's ByteGrad: a byte for each element, and a range for each `block` of them. Bagua's block is 1/n bucket."""
    return fused(scatter_gather(axis, min_max_uint8(block), min_max_uint8(block)), bucket_bytes)


def _exact(axis: Axis, algorithm: str, group: int, wire_dtype: str = "") -> Reducer:
    if group > 1:
        reducer = reduce.hierarchical(axis, group)
    else:
        reducer = {"psum": reduce.psum, "ring": reduce.ring}[algorithm](axis)
    return reduce.cast(reducer, wire_dtype) if wire_dtype else reducer


def _byteps(axis: Axis, compressor: Compressor, bucket_bytes: int, mu: float, seed: int = 0) -> AllReduce:
    server = error_feedback(compressor)
    worker = momentum(server, mu) if mu else server
    return fused(scatter_gather(axis, worker, server), bucket_bytes, cut=True, backwards=False, seed=seed)


# ---- around an optimizer ------------------------------------------------------------------------


def horovod_adasum(axis: Axis, rule: Rule) -> Exchange:
    """Horovod with op=Adasum."""
    return adasum(axis, rule.optimizer)


def bagua_qadam(
    axis: Axis, rule: Rule, *, bucket_bytes: int = 10 * MIB, warmup: float = 0.2, block: int = BYTES_BLOCK
) -> Exchange:
    """Bagua's QAdam: momentum in bytes after the warm-up."""
    lossy = fused(scatter_gather(axis, min_max_uint8(block), min_max_uint8(block)), bucket_bytes)
    return _adam(axis, rule, lossy, bucket_bytes, warmup)


def onebit_adam(
    axis: Axis, rule: Rule, *, bucket_bytes: int = 25 * MIB, warmup: float = 0.2, block: int = BLOCK
) -> Exchange:
    """DeepSpeed's 1-bit Adam: momentum in signs after the warm-up, with error feedback of workers and servers."""
    compressor = error_feedback(onebit("l2", block))
    lossy = fused(scatter_gather(axis, compressor, compressor), bucket_bytes)
    return _adam(axis, rule, lossy, bucket_bytes, warmup)


def bagua_decentralized(axis: Axis, rule: Rule) -> Exchange:
    """Bagua's decentralized algorithm: the mean of two replicas' weights, of other two each step."""
    return gossip.decentralized(axis, rule.optimizer)


def bagua_low_precision_decentralized(axis: Axis, rule: Rule, *, block: int = BYTES_BLOCK) -> Exchange:
    """Bagua's low-precision decentralized algorithm: a byte for each weight to both neighbours of a ring."""
    return gossip.low_precision_decentralized(axis, rule.optimizer, min_max_uint8(block))


def bagua_model_average(axis: Axis, rule: Rule, *, bucket_bytes: int = 10 * MIB, interval: int = 8) -> Exchange:
    """Bagua's model average: replicas train apart; every `interval` steps they continue from their mean."""
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
    exact, lossy = (rule.in_order(one) for one in (fused(reduce.psum(axis), bucket_bytes), lossy))
    return momentum_exchange(exact, lossy, rule.optimizer, warmup=warmup, **rule.adamw)


# ---- by name ------------------------------------------------------------------------------------

GRADIENTS: dict[str, Callable[..., AllReduce]] = {
    function.__name__: function
    for function in (
        *(ddp, horovod, byteps, byteps_onebit, byteps_topk, byteps_randomk, byteps_dithering),
        bagua_bytegrad,
    )
}


class AroundOptimizer(NamedTuple):
    """An exchange around an optimizer, and what it asks of that.

    Attributes:
      make: (axis, rule, **options) -> the exchange.
      divides: it divides arrays, so the optimizer must be elementwise.
      has_adamw: it computes AdamW's update itself, from momentum that it exchanges, so the optimizer must be AdamW.
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
    "onebit_adam": AroundOptimizer(onebit_adam, has_adamw=True),
}
EXCHANGES = ("ddp", "dp", *(name for name in (*GRADIENTS, *AROUND) if name != "ddp"))
# How an exchange differs from a single device; those that are not here differ by rounding alone.
DIFFERS = {
    "horovod_adasum": "adds updates up by another rule",
    **dict.fromkeys(("byteps_onebit", "bagua_bytegrad", "byteps_dithering"), "compresses gradients with loss"),
    **dict.fromkeys(("byteps_topk", "byteps_randomk"), "sends some of the gradients in a step"),
    **dict.fromkeys(
        (name for name, one in AROUND.items() if one.has_adamw), "compresses momentum with loss after its warm-up"
    ),
    **dict.fromkeys(("bagua_decentralized", "bagua_model_average"), "has other weights on each replica"),
    "bagua_low_precision_decentralized": "has other weights on each replica",
}
PASSES = "backward_passes_per_step"  # an option of Horovod's, whichever its reduction
POSITIVE = ("bucket_bytes", "group", "predivide", PASSES, "interval")
CHOICES = {"wire_dtype": ("float16", "bfloat16"), "algorithm": ("psum", "ring")}
SHARES = ("ratio", "warmup")
RANGES = {"momentum": (0.0, 1.0), "levels": (1, 127), "block": (0, 2**31)}


def options(name: str) -> dict[str, Any]:
    """Return the options of an exchange and their defaults."""
    function = AROUND[name].make if name in AROUND else GRADIENTS.get(name)
    parameters = inspect.signature(function).parameters.values() if function else ()
    keywords = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return keywords | ({PASSES: 1} if name.startswith("horovod") else {})


def obstacle(name: str, num_replicas: int, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what makes an exchange impossible: the option, or "exchange", and what is wrong with it; None: nothing."""
    allowed = options(name)
    for key, value in settings.items():
        if key not in allowed:
            has = f"its options are {', '.join(allowed)}" if allowed else "it has none"
            return key, f"is {value!r}, which is not an option of exchange {name!r}; {has}"
        if isinstance(allowed[key], int) and not isinstance(value, int):
            return key, f"is {value!r}; it must be a whole number"
        if isinstance(allowed[key], float) and not isinstance(value, int | float):
            return key, f"is {value!r}; it must be a number"
        if key in CHOICES and value not in CHOICES[key]:
            return key, f"is {value!r}; it must be {', '.join(CHOICES[key])}"
        if key in POSITIVE and not 0 < value < math.inf:
            return key, f"is {value!r}; it must be {'finite and ' if isinstance(value, float) else ''}more than 0"
        if key in SHARES and not 0 < value <= 1:
            return key, f"is {value!r}; it must be more than 0 and at most 1"
        if key in RANGES and not RANGES[key][0] <= value <= RANGES[key][1]:
            return key, f"is {value!r}; it must be {RANGES[key][0]} to {RANGES[key][1]}"
    group = settings.get("group", 1)
    if num_replicas % group:
        return "group", f"is {group}; it must divide the {num_replicas} replicas"
    if group > 1 and settings.get("algorithm") == "ring":
        return "algorithm", f"is 'ring'; it must be 'psum' with groups of {group}"
    if name == "horovod_adasum" and num_replicas & (num_replicas - 1):
        return "exchange", f"is {name!r}, which needs 1, 2, 4, 8, .. replicas; there are {num_replicas}"
    if name == "bagua_decentralized" and num_replicas % 2:
        return "exchange", f"is {name!r}, which needs pairs of replicas; there are {num_replicas}"
    return None


def exchange_differs(name: str, settings: Mapping[str, Any]) -> str:
    """Return how an exchange with these options differs from a single device; empty: by rounding alone."""
    if name in DIFFERS:
        return f"{name} {DIFFERS[name]}"
    if settings.get(PASSES, 1) > 1:
        return f"{name} takes a step of the optimizer for every {settings[PASSES]} of the run"
    return f"{name} sends gradients in {settings['wire_dtype']}" if settings.get("wire_dtype") else ""


def make_exchange(name: str, axis: Axis, rule: Rule, **settings: Any) -> Exchange:
    """Return the named exchange, with these options, around an optimizer. Not dp."""
    passes = settings.pop(PASSES, 1)
    if name in GRADIENTS:
        exchange = averaged(rule.in_order(GRADIENTS[name](axis, **settings)), rule.optimizer)
    else:
        exchange = AROUND[name].make(axis, rule, **settings)
    return exchange if passes == 1 else every(passes, exchange)
