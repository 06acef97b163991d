"""Validates config.exchange and config.exchange_options, and builds the exchange that they select."""

from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import optimizer
from jaxpar.cluster import Cluster
from jaxpar.errors import UserError, check_choice
from jaxpar.exchange import presets
from jaxpar.exchange.around import AROUND, Rule
from jaxpar.exchange.compress import FLOAT8
from jaxpar.exchange.exchange import AllReduce, Exchange
from jaxpar.exchange.gradients import GRADIENTS
from jaxpar.exchange.powersgd import largest_rank
from jaxpar.exchange.presets import AVERAGE, BUCKET_BYTES, EXCHANGES, HAS_BUCKETS, PASSES
from jaxpar.exchange.reduce import Axis
from jaxpar.exchange.settings import obstacle, options
from jaxpar.mesh import DATA
from jaxpar.models.model import Params
from jaxpar.optimizer import OPTIMIZERS
from jaxpar.state import nbytes
from jaxpar.step import Problem

NOISY = ("byteps_onebit", "byteps_randomk")  # most of what they send is noise, which error feedback cancels only later


def given(config: ConfigDict) -> dict[str, Any]:
    """Return the exchange options that the config sets."""
    return {name: value for name, value in config.exchange_options.items() if value is not None}


def name(config: ConfigDict) -> str:
    """Return the name of the exchange and the options that the config sets, such as `ddp bucket_bytes=1000`."""
    return " ".join([config.exchange, *(f"{key}={value}" for key, value in sorted(given(config).items()))])


def sums_along_a_ring(config: ConfigDict) -> bool:
    """Return whether replicas send gradients to their neighbours on a ring. A float8 or a group rules that out."""
    chosen = {**options(config.exchange), **given(config)}
    return chosen.get("algorithm") == "ring" and chosen["wire_dtype"] not in FLOAT8 and chosen["group"] == 1


def private_key(config: ConfigDict, num_replicas: int, params: Params) -> dict[str, Any]:
    """Return the settings that the private state of an exchange depends on: its name, options and replicas.

    A size of buckets is not among them if all parameters are in one bucket, or if the private state has no buckets.

    params: the parameters of the model, or their shapes.
    """
    chosen = {**options(config.exchange), **_with_seed(config)}
    if config.exchange not in HAS_BUCKETS or chosen[BUCKET_BYTES] >= nbytes(params):
        chosen.pop(BUCKET_BYTES, None)
    return {"exchange": config.exchange, "options": dict(sorted(chosen.items())), "replicas": num_replicas}


def differs(config: ConfigDict, num_replicas: int) -> str:
    """Return how training with the exchange differs from training on one device, for `Plan.differs`."""
    return presets.exchange_differs(config.exchange, given(config), num_replicas)


def exchange_advice(config: ConfigDict) -> str:
    """Return advice against an exchange that trains badly with the optimizer, for `Plan.advice`."""
    kind = OPTIMIZERS[config.optimizer.name]
    if config.exchange not in NOISY or not kind.adaptive:
        return ""
    has_onebit_adam = kind.is_adamw and config.strategy != "pipeline"
    others = "onebit_adam or byteps_topk" if has_onebit_adam else "bagua_bytegrad or byteps_topk"
    return (
        f"{config.optimizer.name} divides by the size of the noise that {config.exchange} adds, and learns slowly; "
        f"use exchange {others}, or optimizer sgd"
    )


def _with_seed(config: ConfigDict) -> dict[str, Any]:
    seed = {"seed": config.seed} if "seed" in options(config.exchange) else {}
    return seed | given(config)


def check_exchange(config: ConfigDict, num_replicas: int, cluster: Cluster) -> None:
    """Raise UserError for an invalid exchange or exchange option."""
    check_choice("exchange", config.exchange, EXCHANGES)
    if reason := obstacle(config.exchange, num_replicas, given(config)):
        key, wrong = reason
        raise UserError(f"config.{key} {wrong}" if key == "exchange" else f"config.exchange_options.{key} {wrong}")
    if given(config).get("offload") and not cluster.has_pinned_host_memory:
        raise UserError(
            "config.exchange_options.offload is True; it must be False on a platform without pinned host memory, "
            f"such as {cluster.platform} ({cluster.device_kind})"
        )
    _check_optimizer(config)


def _check_optimizer(config: ConfigDict) -> None:
    exchange, kind = config.exchange, config.optimizer.name
    if exchange not in AROUND:
        return
    elementwise = [name for name, one in OPTIMIZERS.items() if one.elementwise]
    if AROUND[exchange].divides and kind not in elementwise:
        raise UserError(
            f"config.optimizer.name is {kind!r}, which needs whole arrays; it must be one of {', '.join(elementwise)} "
            f"with config.exchange={exchange!r}, which shards them"
        )
    adamw = [name for name, one in OPTIMIZERS.items() if one.is_adamw]
    if AROUND[exchange].has_adamw and kind not in adamw:
        raise UserError(
            f"config.optimizer.name is {kind!r}; it must be {', '.join(adamw)} with config.exchange={exchange!r}, "
            "which computes the update of AdamW itself"
        )


def configured_exchange(config: ConfigDict, problem: Problem, num_replicas: int) -> Exchange:
    """Return the exchange around the problem's optimizer. Raises UserError if it does not support this problem."""
    passes = given(config).get(PASSES, 1)
    if problem.num_steps % passes:
        raise UserError(
            f"config.exchange_options.{PASSES} is {passes}; it must divide the number of steps, {problem.num_steps}"
        )
    if config.exchange in AROUND and AROUND[config.exchange].divides:
        for path, leaf in jax.tree_util.tree_leaves_with_path(problem.model.shapes):
            if not leaf.size:
                where = jax.tree_util.keystr(path)
                raise UserError(
                    f"config.exchange is {config.exchange!r}, which cannot shard {where} of shape {leaf.shape}; "
                    "parameters must not be empty"
                )
    rank = (options(config.exchange) | given(config)).get("rank")
    if rank is not None and rank > (largest := largest_rank(problem.model.shapes)):
        raise UserError(
            f"config.exchange_options.rank is {rank}; it must be at most {largest}, or no array of this model is "
            "compressed"
        )
    interval = given(config).get("interval")
    if interval is not None and interval > problem.num_steps:
        raise UserError(
            f"config.exchange_options.interval is {interval}; it must be at most {problem.num_steps}, the number of "
            "steps, or the replicas never exchange anything"
        )
    check_compressed(config, problem.model.shapes)
    o = config.optimizer
    adamw = None
    if OPTIMIZERS[o.name].is_adamw:
        schedule = optimizer.build_schedule(config, problem.num_steps)
        adamw = {"schedule": schedule, "mask": optimizer.decayed}
        adamw |= {key: o[key] for key in ("b1", "b2", "eps", "weight_decay", "clip_norm")}
    layers = [layer.name for layer in problem.model.layers]
    rule = Rule(problem.optimizer, problem.model.shapes, adamw, layers, o.clip_norm, problem.num_steps)
    return presets.make_exchange(config.exchange, Axis(DATA, num_replicas), rule, **_with_seed(config))


def check_compressed(config: ConfigDict, arrays: Any) -> None:
    """Raise UserError for a compressor to which all of these arrays are too small."""
    smallest = (options(config.exchange) | given(config)).get("min_compress_bytes", 0)
    largest = max((nbytes([leaf]) for leaf in jax.tree.leaves(arrays)), default=0)
    if smallest > largest:
        raise UserError(
            f"config.exchange_options.min_compress_bytes is {smallest}; it must be at most {largest}, the bytes of the "
            f"largest array, or {config.exchange} compresses nothing"
        )


def check_gradient_exchange(config: ConfigDict, num_replicas: int, cluster: Cluster, *, has_ring: bool = True) -> None:
    """Raise UserError for an invalid exchange of a pipeline, whose replicas can exchange only gradients.

    has_ring: whether the pipeline supports a ring all-reduce, the default of some exchanges.
    """
    for key in given(config).keys() & {PASSES, AVERAGE}:
        raise UserError(
            f"config.exchange_options.{key} is {given(config)[key]}; it must be None with "
            "config.strategy='pipeline', which accumulates gradients over config.pipeline.num_microbatches"
        )
    if config.exchange in EXCHANGES and config.exchange not in GRADIENTS:
        reason = (
            "holds the whole model on one device"
            if config.exchange == "dp"
            else "wraps the optimizer of the whole model, but each stage has only a part of it"
        )
        names = [name for name in GRADIENTS if has_ring or options(name).get("algorithm") != "ring"]
        raise UserError(
            f"config.exchange is {config.exchange!r}, which {reason}; it must be one of {', '.join(names)} with "
            "config.strategy='pipeline'"
        )
    check_exchange(config, num_replicas, cluster)


def on_gradients(config: ConfigDict, num_replicas: int) -> AllReduce:
    """Return the exchange of gradients over the data axis, for pipelines."""
    clip_norm = config.optimizer.clip_norm
    return presets.make_all_reduce(config.exchange, Axis(DATA, num_replicas), clip_norm, **_with_seed(config))
