"""Validates config.exchange and config.exchange_options, and builds the exchange that they select."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core import optimizer
from jaxpar.core.mesh import DATA
from jaxpar.core.optimizer import OPTIMIZERS
from jaxpar.core.state import nbytes
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, check_choice
from jaxpar.exchange import named
from jaxpar.exchange.compress import FLOAT8
from jaxpar.exchange.exchange import AdamW, AllReduce, Exchange, Rule
from jaxpar.exchange.named import AVERAGE, BUCKET_BYTES, EXCHANGES, PASSES, OptionError, check_options
from jaxpar.exchange.powersgd import largest_rank
from jaxpar.exchange.reduce import Axis
from jaxpar.layout import Tree
from jaxpar.models.model import Params

# The exchanges that average gradients, and those of pipelines whose collectives are outside of all actions.
OF_GRADIENTS = [name for name, row in EXCHANGES.items() if row.averages]
IN_LOCKSTEP = [*OF_GRADIENTS, "zero1"]


def given(config: ConfigDict) -> dict[str, Any]:
    """Return the exchange options that the config sets."""
    return {name: value for name, value in config.exchange_options.items() if value is not None}


def chosen(config: ConfigDict) -> dict[str, Any]:
    """Return all options of the exchange: those that the config sets, and the defaults of the others."""
    defaults = EXCHANGES[config.exchange].options
    seed = {"seed": config.seed} if "seed" in defaults else {}
    return {**defaults, **seed, **given(config)}


def name(config: ConfigDict) -> str:
    """Return the name of the exchange and the options that the config sets, such as `ddp bucket_bytes=1000`."""
    return " ".join([config.exchange, *(f"{key}={value}" for key, value in sorted(given(config).items()))])


def is_plain(config: ConfigDict) -> bool:
    """Return whether the exchange is ddp without options."""
    return config.exchange == "ddp" and not given(config)


def check_no_exchange(config: ConfigDict, reason: str) -> None:
    """Raise UserError if the exchange is not the default, for a strategy without one. reason: why it has none."""
    if not is_plain(config):
        raise UserError(
            f"config.exchange is {name(config)!r}; it must be 'ddp' without options with "
            f"config.strategy={config.strategy!r}, {reason}"
        )


def sums_along_a_ring(config: ConfigDict) -> bool:
    """Return whether replicas send gradients to their neighbours on a ring. A float8 or a group rules that out."""
    options = chosen(config)
    return options.get("algorithm") == "ring" and options["wire_dtype"] not in FLOAT8 and options["group"] == 1


def private_key(config: ConfigDict, num_replicas: int, params: Params) -> dict[str, Any]:
    """Return the settings that the private state depends on. A size of buckets without effect is left out."""
    options = chosen(config)
    if not EXCHANGES[config.exchange].residuals or options[BUCKET_BYTES] >= nbytes(params):
        options.pop(BUCKET_BYTES, None)
    return {"exchange": config.exchange, "options": dict(sorted(options.items())), "replicas": num_replicas}


def differs(config: ConfigDict, num_replicas: int) -> str:
    """Return how training with the exchange differs from training on one device, for `Plan.differs`."""
    return named.exchange_differs(config.exchange, given(config), num_replicas)


def exchange_advice(config: ConfigDict) -> str:
    """Return advice against an exchange that trains badly with the optimizer, for `Plan.advice`."""
    kind = OPTIMIZERS[config.optimizer.name]
    if not (kind.adaptive and EXCHANGES[config.exchange].noisy(chosen(config))):
        return ""
    has_onebit_adam = kind.is_adamw and config.strategy != "pipeline"
    others = "onebit_adam or byteps_topk" if has_onebit_adam else "bagua_bytegrad or byteps_topk"
    return (
        f"{config.optimizer.name} divides by the size of the noise that {name(config)} adds, and learns slowly; "
        f"use the default options, exchange {others}, or optimizer sgd"
    )


def check_exchange(config: ConfigDict, num_replicas: int, cluster: Cluster) -> None:
    """Raise UserError for an invalid exchange or exchange option."""
    check_choice("exchange", config.exchange, EXCHANGES)
    try:
        check_options(config.exchange, num_replicas, given(config))
    except OptionError as error:
        section = "config" if error.key == "exchange" else "config.exchange_options"
        raise UserError(f"{section}.{error}") from None
    if given(config).get("offload") and not cluster.has_pinned_host_memory:
        raise UserError(
            "config.exchange_options.offload is True; it must be False on a platform without pinned host memory, "
            f"such as {cluster.platform} ({cluster.device_kind})"
        )
    row, name = EXCHANGES[config.exchange], config.optimizer.name
    if row.shards and not OPTIMIZERS[name].elementwise:
        elementwise = ", ".join(key for key, kind in OPTIMIZERS.items() if kind.elementwise)
        raise UserError(
            f"config.optimizer.name is {name!r}, which needs whole arrays; it must be one of {elementwise} with "
            f"config.exchange={config.exchange!r}, which shards them"
        )
    if row.adamw and not OPTIMIZERS[name].is_adamw:
        adamw = ", ".join(key for key, kind in OPTIMIZERS.items() if kind.is_adamw)
        raise UserError(
            f"config.optimizer.name is {name!r}; it must be {adamw} with config.exchange={config.exchange!r}, which "
            "computes the update of AdamW itself"
        )


def configured_exchange(
    config: ConfigDict,
    problem: Problem,
    num_replicas: int,
    norm: Callable[[Params], jax.Array] = optax.tree.norm,
    is_split: Callable[[Tree], Tree] | None = None,
    *,
    in_turn: bool = False,
) -> Exchange:
    """Return the exchange around the problem's optimizer. Raises UserError if it does not support this problem.

    norm, is_split, in_turn: as in `Rule`.
    """
    options, num_steps, shapes = chosen(config), problem.num_steps, problem.model.shapes

    def check(holds: bool, key: str, must: str) -> None:
        if not holds:
            raise UserError(f"config.exchange_options.{key} is {options[key]}; it must {must}")

    check(num_steps % options.get(PASSES, 1) == 0, PASSES, f"divide the number of steps, {num_steps}")
    check_not_empty(config, shapes)
    rank = largest_rank(shapes)
    check(options.get("rank", 0) <= rank, "rank", f"be at most {rank}, or no array of this model is compressed")
    never = f"be at most {num_steps}, the number of steps, or the replicas never exchange anything"
    check(given(config).get("interval", 0) <= num_steps, "interval", never)
    check_compressed(config, shapes)
    o, layers, adamw = config.optimizer, [layer.name for layer in problem.model.layers], None
    if OPTIMIZERS[o.name].is_adamw:
        learning_rate = optimizer.build_learning_rate(config, num_steps)
        adamw = AdamW(learning_rate, o.b1, o.b2, o.eps, o.weight_decay, optimizer.decayed)
    rule = Rule(problem.optimizer, shapes, adamw, layers, o.clip_norm, num_steps, norm, is_split, in_turn)
    return named.make_exchange(config.exchange, Axis(DATA, num_replicas), rule, **options)


def check_not_empty(config: ConfigDict, shapes: Params) -> None:
    """Raise UserError for an empty array that the exchange would shard."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        if EXCHANGES[config.exchange].shards and not leaf.size:
            raise UserError(
                f"config.exchange is {config.exchange!r}, which cannot shard {jax.tree_util.keystr(path)} of shape "
                f"{leaf.shape}; parameters must not be empty"
            )


def check_compressed(config: ConfigDict, arrays: Any) -> None:
    """Raise UserError for a compressor to which all of these arrays are too small."""
    smallest = chosen(config).get("min_compress_bytes", 0)
    largest = max((nbytes([leaf]) for leaf in jax.tree.leaves(arrays)), default=0)
    if smallest > largest:
        raise UserError(
            f"config.exchange_options.min_compress_bytes is {smallest}; it must be at most {largest}, the bytes of the "
            f"largest array, or {config.exchange} compresses nothing"
        )


def runs_in_lockstep(config: ConfigDict) -> bool:
    """Return whether the exchange runs in lockstep: collectives are outside of all actions there."""
    return config.exchange in IN_LOCKSTEP


def check_gradient_exchange(config: ConfigDict, num_replicas: int, cluster: Cluster, *, has_flush: bool) -> None:
    """Raise UserError for an invalid exchange of a pipeline. has_flush: whether its schedule has a flush."""
    for key in given(config).keys() & {PASSES, AVERAGE}:
        raise UserError(
            f"config.exchange_options.{key} is {given(config)[key]}; it must be None with "
            "config.strategy='pipeline', which accumulates gradients over config.pipeline.num_microbatches"
        )
    if config.exchange in EXCHANGES:
        check_in_pipeline(config, num_replicas, has_flush=has_flush)
    check_exchange(config, num_replicas, cluster)


def check_in_pipeline(config: ConfigDict, num_replicas: int, *, has_flush: bool) -> None:
    """Raise UserError for an exchange or option that pipelines, their executor or their schedule do not support."""
    row, pipeline = EXCHANGES[config.exchange], config.pipeline
    names = [name for name, row in EXCHANGES.items() if row.on_gradients]
    if not has_flush:
        has_ring = num_replicas == 1
        names = [name for name in OF_GRADIENTS if has_ring or EXCHANGES[name].options.get("algorithm") != "ring"]
    if not row.on_gradients:
        reason, where = (
            "wraps the optimizer of the whole model, but each stage has only a part of it",
            "strategy='pipeline'",
        )
        if config.exchange == "dp":
            reason = "holds the whole model on one device"
    elif row.shards and not has_flush:
        reason, where = "shards the state that a flush updates", f"pipeline.schedule={pipeline.schedule!r}"
    elif pipeline.executor == "lockstep" and not runs_in_lockstep(config):
        reason, where = "has collectives in each action", f"pipeline.executor={pipeline.executor!r}"
        names = IN_LOCKSTEP
    elif given(config).get("offload"):
        raise UserError("config.exchange_options.offload is True; it must be False with config.strategy='pipeline'")
    else:
        return
    raise UserError(
        f"config.exchange is {config.exchange!r}, which {reason}; it must be one of {', '.join(names)} with "
        f"config.{where}"
    )


def on_gradients(config: ConfigDict, num_replicas: int) -> AllReduce:
    """Return the exchange of gradients over the data axis, for pipelines."""
    clip_norm = config.optimizer.clip_norm
    return named.make_all_reduce(config.exchange, Axis(DATA, num_replicas), clip_norm, **chosen(config))
