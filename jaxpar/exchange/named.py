"""The named exchanges of config.exchange: a row for each in EXCHANGES, and the values of options in OPTION_VALUES.

The checks of a config read the rows. scripts/reference.py writes them as docs/reference/exchanges.md.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import optax

from jaxpar.errors import UserError
from jaxpar.exchange.adam import momentum_exchange
from jaxpar.exchange.adasum import adasum
from jaxpar.exchange.compress import FLOAT8, dithering, error_feedback, min_max_uint8, onebit, randomk, topk
from jaxpar.exchange.exchange import AllReduce, Exchange, Rule, every
from jaxpar.exchange.fuse import apart, averaged, fused, in_layer_order
from jaxpar.exchange.gossip import decentralized, low_precision_decentralized, model_average
from jaxpar.exchange.gradients import byteps, compressed_byteps, ddp, horovod, lossy
from jaxpar.exchange.powersgd import powersgd
from jaxpar.exchange.reduce import Axis, psum
from jaxpar.exchange.zero import Codes, Order, reduced_to_shards, zero

MIB = 2**20
NODE = 8  # GPUs of most nodes
LAYER_BYTES = 1024 * MIB  # more than most layers have
BUCKET_BYTES = "bucket_bytes"
PASSES, AVERAGE = "backward_passes_per_step", "average_aggregated_gradients"  # Horovod's, with any reduction
ACCUMULATION = {PASSES: 1, AVERAGE: False}  # `make_exchange` adds it to an exchange
QUANTIZED = ("quantized_weights", "quantized_gradients")
INT32 = 2**31 - 1  # seeds and steps are int32


class Option(NamedTuple):
    """The values of an option, among those of the type of its default."""

    must: str  # the rule, as in "it must be greater than 0"
    allows: Callable[[Any], bool]  # whether a value follows the rule


def _one_of(*names: str) -> Option:
    return Option(f"be one of {', '.join(names)}", lambda value: value in names)


def _between(low: float, high: float) -> Option:
    return Option(f"be between {low} and {high}", lambda value: low <= value <= high)


POSITIVE = Option("be greater than 0", lambda value: value > 0)
BOOLEAN = Option("be True or False", lambda _value: True)
OPTION_VALUES: dict[str, Option] = {
    BUCKET_BYTES: POSITIVE,
    "wire_dtype": _one_of("float16", "bfloat16", *FLOAT8),
    "algorithm": _one_of("psum", "ring"),
    "group": POSITIVE,
    "predivide": _between(0.0001, 10000),  # gradients in float16 would overflow or become 0
    PASSES: POSITIVE,
    AVERAGE: BOOLEAN,
    "block": _between(0, 2**31),
    "min_compress_bytes": _between(0, 2**31),
    "ratio": Option("be greater than 0 and at most 1", lambda value: 0 < value <= 1),
    "levels": _between(1, 127),
    "seed": _between(0, INT32),
    "momentum": _between(0.0, 0.9999),
    "warmup": Option("be greater than 0 and less than 1", lambda value: 0 < value < 1),
    "rank": POSITIVE,
    "interval": _between(1, INT32),
    "peers": _one_of("shift_one", "all"),
    "offload": BOOLEAN,
    **dict.fromkeys(QUANTIZED, BOOLEAN),
}


class NamedExchange(NamedTuple):
    """A row of EXCHANGES."""

    of: str  # the system or paper that it is modeled on
    sends: str  # what replicas send
    # (axis, **options) -> AllReduce if the exchange averages gradients; (axis, rule, **options) -> Exchange if it wraps
    # an optimizer; None if it has programs of its own
    make: Callable[..., Any] | None
    options: Mapping[str, Any]  # its options, with their defaults
    averages: bool = False  # whether it only averages gradients
    differs: str = ""  # how training differs from a single device, whatever the options are; empty: only by rounding
    # whether it has error feedback: its private state is divided into buckets, as what it sends is
    residuals: bool = False
    # whether each replica has its own optimizer state, because the optimizer steps on the local gradient
    diverges: bool = False
    # whether it shards arrays, so that the optimizer must be elementwise, and no array may be empty
    shards: bool = False
    # whether it computes the update of AdamW itself, from exchanged momentum, so the optimizer must be AdamW
    adamw: bool = False
    # whether, with these options, most of what it sends is noise, which error feedback cancels only later
    noisy: Callable[[Mapping[str, Any]], bool] = lambda _options: False
    replicas: str = ""  # what the number of replicas must be: a key of REPLICA_NUMBERS

    @property
    def on_gradients(self) -> bool:
        """Whether it needs no more than gradients, so that stages and devices with a part of the model can use it."""
        return self.averages or self.shards

    def call(self, *arguments: Any, **settings: Any) -> Any:
        """Call `make` with the options, whose defaults these settings replace, except those of accumulation."""
        assert self.make is not None
        options = {**self.options, **settings}
        return self.make(*arguments, **{key: value for key, value in options.items() if key not in ACCUMULATION})


REPLICA_NUMBERS: dict[str, Callable[[int], bool]] = {
    "": lambda _number: True,
    "even": lambda number: number % 2 == 0,
    "a power of 2": lambda number: number & (number - 1) == 0,
}


def _bytegrad(axis: Axis, *, bucket_bytes: int, group: int, block: int) -> AllReduce:
    return fused(lossy(axis, group, min_max_uint8(block), min_max_uint8(block)), bucket_bytes)


def _zero(
    axis: Axis,
    rule: Rule,
    *,
    stage: int,
    bucket_bytes: int,
    offload: bool,
    group: int = 0,
    quantized_weights: bool = False,
    quantized_gradients: bool = False,
    block: int = 0,
) -> Exchange:
    if not bucket_bytes:
        # Several messages need fewer copies. Between nodes the latency of a message is long, and grows with the number
        # of nodes, if a replica is one GPU. So a layer has one message in stage 3, and messages grow in the others.
        num_nodes = math.ceil((group or axis.size) / NODE)
        bucket_bytes = LAYER_BYTES if stage == 3 and num_nodes > 1 else min(25 * MIB * num_nodes, LAYER_BYTES)
    coded = min_max_uint8(block)
    codes = Codes(coded if quantized_weights else None, coded if quantized_gradients else None)
    return zero(
        axis,
        stage,
        rule.optimizer,
        rule.params,
        bucket_bytes,
        offload=offload,
        codes=codes,
        group=group,
        norm=rule.norm,
        order=Order(rule.layers, rule.in_turn),
    )


# Elements that share a scale (1 bit), or a range (8 bits). The gradient of most rows of an embedding is zero, so the
# scale of 1-bit gradients should be that of one row or less.
BYTES_BLOCK, BLOCK, ROW_BLOCK = 4096, 2048, 128
RANDOM_RATIO = 0.25  # of random elements that are sent; with 0.05, most of what Adam receives is noise
BYTEPS = {BUCKET_BYTES: 4_096_000, "group": 1, "min_compress_bytes": 65_536}  # the defaults of BytePS
ZERO = {BUCKET_BYTES: 0, "offload": False}
SHARDED_PARAMS = {"offload": False, **dict.fromkeys(QUANTIZED, False), "block": BLOCK}
LOSSY, PARTIAL = "compresses gradients lossily", "sends only part of the gradients in each step"
MOMENTUM, WEIGHTS = "compresses momentum lossily after its warm-up", "has different weights on different replicas"
COMPRESSED = partial(NamedExchange, averages=True, residuals=True)

EXCHANGES: dict[str, NamedExchange] = {
    "ddp": NamedExchange(
        "PyTorch DistributedDataParallel",
        "gradients in buckets, those of the last layers first",
        ddp,
        {BUCKET_BYTES: 25 * MIB, "wire_dtype": "", "algorithm": "psum", "group": 1},
        averages=True,
    ),
    # jaxpar/strategies/data_parallel/master.py has its programs
    "dp": NamedExchange(
        "PyTorch DataParallel",
        "weights from the first device, gradients to it; only this device has an optimizer state",
        None,
        {},
    ),
    "horovod": NamedExchange(
        "Horovod",
        "gradients, by ring all-reduce",
        horovod,
        {BUCKET_BYTES: 128 * MIB, "wire_dtype": "", "algorithm": "ring", "group": 1, "predivide": 1.0, **ACCUMULATION},
        averages=True,
    ),
    "byteps": NamedExchange(
        "BytePS",
        "partitions of gradients, by push and pull; the replicas are also the servers",
        byteps,
        {BUCKET_BYTES: BYTEPS[BUCKET_BYTES], "wire_dtype": "", "group": 1},
        averages=True,
    ),
    "byteps_onebit": COMPRESSED(
        "BytePS",
        "signs and scales of gradients, with error feedback",
        partial(compressed_byteps, onebit),
        {**BYTEPS, "block": ROW_BLOCK, "momentum": 0.0},
        differs=LOSSY,
        noisy=lambda options: not 0 < options["block"] <= ROW_BLOCK,
    ),
    "byteps_topk": COMPRESSED(
        "BytePS",
        "the largest gradient elements and their indices, with error feedback",
        partial(compressed_byteps, topk),
        {**BYTEPS, "ratio": 0.01, "momentum": 0.0},
        differs=PARTIAL,
    ),
    "byteps_randomk": COMPRESSED(
        "BytePS",
        "random gradient elements and their indices, with error feedback",
        partial(compressed_byteps, randomk),
        {**BYTEPS, "ratio": RANDOM_RATIO, "momentum": 0.0, "seed": 0},
        differs=PARTIAL,
        noisy=lambda options: options["ratio"] < RANDOM_RATIO,
    ),
    "byteps_dithering": COMPRESSED(
        "BytePS",
        "gradients rounded stochastically to signed bytes, with error feedback",
        partial(compressed_byteps, dithering),
        {**BYTEPS, "levels": 127, "momentum": 0.0, "seed": 0},
        differs=LOSSY,
    ),
    # A range for each block. Bagua's own block is 1/n of a bucket.
    "bagua_bytegrad": NamedExchange(
        "Bagua ByteGrad",
        "gradients with 8 bits per element",
        _bytegrad,
        {BUCKET_BYTES: 10 * MIB, "group": 1, "block": BYTES_BLOCK},
        averages=True,
        differs=LOSSY,
    ),
    "horovod_adasum": NamedExchange(
        "Horovod, op=Adasum",
        "updates, pairwise",
        lambda axis, rule: adasum(axis, rule.optimizer),
        ACCUMULATION,
        differs="combines updates with Adasum instead of averaging gradients",
        diverges=True,
        replicas="a power of 2",
    ),
    "bagua_qadam": NamedExchange(
        "Bagua QAdam",
        "gradients during the warm-up, then momentum with 8 bits per element",
        lambda axis, rule, *, block, **options: momentum_exchange(axis, rule, min_max_uint8(block), **options),
        {BUCKET_BYTES: 10 * MIB, "group": 1, "warmup": 0.2, "block": BYTES_BLOCK},
        differs=MOMENTUM,
        adamw=True,
    ),
    "bagua_decentralized": NamedExchange(
        "Bagua",
        "weights, to another replica in each step, or to all",
        lambda axis, rule, **options: decentralized(axis, rule.optimizer, **options),
        {"peers": "shift_one", "interval": 1, "group": 1},
        differs=WEIGHTS,
        diverges=True,
        replicas="even",
    ),
    "bagua_low_precision_decentralized": NamedExchange(
        "Bagua",
        "changes of weights with 8 bits per element, to both neighbours in a ring",
        lambda axis, rule, *, block, group: low_precision_decentralized(
            axis, rule.optimizer, min_max_uint8(block), group
        ),
        {"group": 1, "block": BYTES_BLOCK},
        differs=WEIGHTS,
        diverges=True,
    ),
    "bagua_model_average": NamedExchange(
        "Bagua, its asynchronous model average made synchronous",
        "weights, every few steps",
        lambda axis, rule, *, bucket_bytes, interval: model_average(
            fused(psum(axis), bucket_bytes), rule.optimizer, interval
        ),
        {BUCKET_BYTES: 10 * MIB, "interval": 8},
        differs=WEIGHTS,
        diverges=True,
    ),
    # The groups of hsdp are by default the largest that have no more replicas than a node and divide all evenly. 0 as
    # the size of messages: `_zero` chooses it.
    "zero1": NamedExchange(
        "DeepSpeed ZeRO, stage 1",
        "gradients to their shards, parameters from theirs",
        partial(_zero, stage=1),
        ZERO,
        shards=True,
    ),
    "zero2": NamedExchange(
        "DeepSpeed ZeRO, stage 2",
        "the same, with gradients after every accumulation step",
        partial(_zero, stage=2),
        ZERO,
        shards=True,
    ),
    "zero3": NamedExchange(
        "DeepSpeed ZeRO, stage 3; PyTorch FSDP",
        "parameters layer by layer for both passes, gradients to the shards",
        partial(_zero, stage=3),
        {BUCKET_BYTES: 0, **SHARDED_PARAMS},
        shards=True,
    ),
    "hsdp": NamedExchange(
        "PyTorch FSDP, HYBRID_SHARD",
        "as zero3 within each group of replicas, then gradients of each shard between groups",
        lambda axis, rule, *, group, **options: _zero(
            axis, rule, stage=3, group=group or math.gcd(axis.size, NODE), **options
        ),
        {BUCKET_BYTES: 0, "group": 0, **SHARDED_PARAMS},
        shards=True,
    ),
    "onebit_adam": NamedExchange(
        "DeepSpeed 1-bit Adam",
        "gradients during the warm-up, then signs and scales of momentum",
        lambda axis, rule, *, block, **options: momentum_exchange(
            axis, rule, error_feedback(onebit("l2", block)), **options
        ),
        {BUCKET_BYTES: 25 * MIB, "group": 1, "warmup": 0.2, "block": BLOCK},
        differs=MOMENTUM,
        residuals=True,
        adamw=True,
    ),
    "powersgd": NamedExchange(
        "PyTorch's PowerSGD hook",
        "gradients during the warm-up, then two low-rank factors of each matrix, with error feedback",
        powersgd,
        {BUCKET_BYTES: 25 * MIB, "rank": 4, "warmup": 0.1, "seed": 0},
        differs="sends low-rank approximations of gradients after its warm-up",
    ),
}


def exchange_differs(name: str, settings: Mapping[str, Any], num_replicas: int) -> str:
    """Return how training with this exchange differs from a single device; '' if it differs only by rounding."""
    row = EXCHANGES[name]
    is_compressor = row.averages and (row.differs or settings.get("wire_dtype") in FLOAT8)
    if settings.get("group") == num_replicas > 1:  # it compresses between groups only
        if is_compressor:
            return ""
        if row.adamw:
            return f"{name} freezes the second moment after its warm-up"
    if row.differs:
        return f"{name} {row.differs}"
    if settings.get(PASSES, 1) > 1:
        return f"{name} takes one optimizer step for every {settings[PASSES]} training steps"
    quantized = [key.removeprefix("quantized_") for key in QUANTIZED if settings.get(key)]
    if quantized:
        return f"{name} sends {' and '.join(quantized)} with 8 bits per element"
    return f"{name} sends gradients in {settings['wire_dtype']}" if settings.get("wire_dtype") else ""


class OptionError(UserError, ValueError):
    """An option that an exchange cannot have, or an exchange that is impossible with this number of replicas.

    It is also a ValueError, for callers of `distributed_optimizer`, who have no config. key: the option, or "exchange".
    wrong: its value, and what it must be.
    """

    def __init__(self, key: str, wrong: str):
        super().__init__(f"{key} {wrong}")
        self.key = key


def check_options(name: str, num_replicas: int, settings: Mapping[str, Any]) -> None:
    """Raise OptionError if an exchange is impossible with these options and this number of replicas."""
    row = EXCHANGES[name]

    def refuse(key: str, must: str) -> None:
        raise OptionError(key, f"is {settings[key]!r}; it must {must}")

    for key, value in settings.items():
        if key not in row.options:
            has = f"whose options are {', '.join(row.options)}" if row.options else "which has no options"
            refuse(key, f"be None with exchange {name!r}, {has}")
        default = row.options[key]
        if isinstance(default, int) and not isinstance(value, int):
            refuse(key, "be an integer")
        if isinstance(default, float) and not isinstance(value, int | float):
            refuse(key, "be a number")
        if not OPTION_VALUES[key].allows(value):
            refuse(key, OPTION_VALUES[key].must)
    group, wire_dtype = settings.get("group", 1), settings.get("wire_dtype")
    if settings.get(AVERAGE) and settings.get(PASSES, 1) == 1:
        raise OptionError(AVERAGE, f"is True; it has no effect without exchange_options.{PASSES} of at least 2")
    if num_replicas % group:
        refuse("group", f"divide the number of replicas, {num_replicas}")
    if group == num_replicas > 1 and settings.get("momentum"):
        refuse("momentum", f"be 0 with group={group}, the number of replicas, because nothing is compressed")
    if group > 1 and settings.get("algorithm") == "ring":
        refuse("algorithm", f"be 'psum' with group={group}")
    for key in ("algorithm", "predivide"):
        if wire_dtype in FLOAT8 and key in settings:
            refuse(key, f"be None with wire_dtype={wire_dtype!r}, whose sums are in float32")
    if "block" in settings and QUANTIZED[0] in row.options and not any(settings.get(key) for key in QUANTIZED):
        refuse("block", f"be None with exchange {name!r} without {' or '.join(QUANTIZED)}")
    if row.diverges and group == num_replicas > 1:
        refuse("group", f"be less than the number of replicas, {num_replicas}, because groups send to other groups")
    if group > 1 and settings.get("peers") == "all":
        refuse("group", "be 1 with peers='all', which averages with all replicas")
    if not REPLICA_NUMBERS[row.replicas](num_replicas // group) and settings.get("peers") != "all":
        their = f" in groups of {group}; the number of groups" if group > 1 else "; their number"
        raise OptionError("exchange", f"is {name!r} with {num_replicas} replicas{their} must be {row.replicas}")


def make_all_reduce(name: str, axis: Axis, clip_norm: float, **settings: Any) -> AllReduce:
    """Return the named exchange of gradients, to their mean or shards of it. clip_norm: as in `Rule`."""
    if EXCHANGES[name].shards:
        exchange: Exchange = EXCHANGES[name].call(axis, Rule(optax.identity(), ()), **settings)
        assert exchange.shards
        return reduced_to_shards(exchange.shards)
    all_reduce: AllReduce = EXCHANGES[name].call(axis, **settings)
    is_lossy = bool(EXCHANGES[name].differs) or settings.get("wire_dtype") in FLOAT8
    return all_reduce._replace(clip_norm=clip_norm if EXCHANGES[name].residuals else 0.0, is_lossy=is_lossy)


def make_exchange(name: str, axis: Axis, rule: Rule, **settings: Any) -> Exchange:
    """Return the named exchange with these options, around an optimizer. dp is not supported."""
    if EXCHANGES[name].averages:
        all_reduce = make_all_reduce(name, axis, rule.clip_norm, **settings)
        all_reduce = in_layer_order(all_reduce, rule.layers)
        if rule.is_split is not None:
            all_reduce = apart(all_reduce, rule.is_split)
        exchange = averaged(all_reduce, rule.optimizer, rule.norm)
    else:
        exchange = EXCHANGES[name].call(axis, rule, **settings)
    passes = settings.get(PASSES, 1)
    return exchange if passes == 1 else every(passes, exchange, average=settings.get(AVERAGE, False))
