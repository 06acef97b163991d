"""config.exchange and config.exchange_options: checked, and built."""

from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import optimizer
from jaxpar.errors import UserError, check_choice
from jaxpar.exchange import GRADIENTS, NAMES, Axis, Exchange, Rule, options
from jaxpar.exchange import build as build_exchange
from jaxpar.exchange.fuse import AllReduce
from jaxpar.mesh import DATA
from jaxpar.step import Problem

# optimizers that compute each element of an update from that element alone
ELEMENTWISE = ("adamw", "sgd", "lion")
POSITIVE = ("bucket_bytes", "group", "predivide", "backward_passes_per_step", "interval")
CHOICES = {"wire_dtype": ("float16", "bfloat16"), "algorithm": ("psum", "ring")}
RANGES = {"ratio": (0.0, 1.0), "warmup": (0.0, 1.0), "momentum": (0.0, 1.0), "levels": (1, 127), "block": (0, 2**31)}


def given(config: ConfigDict) -> dict[str, Any]:
    """The options that the config sets."""
    return {name: value for name, value in config.exchange_options.items() if value is not None}


def name(config: ConfigDict) -> str:
    """The exchange and its options, in words."""
    return " ".join([config.exchange, *(f"{key}={value}" for key, value in sorted(given(config).items()))])


def check(config: ConfigDict, num_replicas: int) -> None:
    """Raises UserError for an exchange, or an option of one, that cannot be."""
    check_choice("exchange", config.exchange, NAMES)
    own = options(config.exchange)
    for key, value in given(config).items():
        label = f"config.exchange_options.{key} is {value!r}"
        if key not in own:
            has = f"it has {', '.join(own)}" if own else "it has none"
            raise UserError(f"{label}, which config.exchange={config.exchange!r} has no use for; {has}")
        if key in CHOICES:
            check_choice(f"exchange_options.{key}", value, CHOICES[key])
        if key in POSITIVE and not value > 0:
            raise UserError(f"{label}; it may be more than 0")
        if key in RANGES and not RANGES[key][0] <= value <= RANGES[key][1]:
            raise UserError(f"{label}; it may be {RANGES[key][0]} to {RANGES[key][1]}")
    _check_sizes(config, num_replicas)
    _check_optimizer(config)


def _check_sizes(config: ConfigDict, num_replicas: int) -> None:
    asked, o = given(config), config.exchange
    if asked.get("group") and num_replicas % asked["group"]:
        raise UserError(f"config.exchange_options.group is {asked['group']}; it may divide {num_replicas} replicas")
    if asked.get("group", 1) > 1 and asked.get("algorithm", "psum") != "psum":
        raise UserError("config.exchange_options.algorithm is 'ring'; it may be 'psum' between groups")
    if o == "horovod_adasum" and num_replicas & (num_replicas - 1):
        raise UserError(f"config.exchange is {o!r}, which needs 2, 4, 8, .. replicas; there are {num_replicas}")
    if o == "bagua_decentralized" and num_replicas % 2:
        raise UserError(f"config.exchange is {o!r}, which needs pairs of replicas; there are {num_replicas}")
    if asked.get("offload"):
        kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
        if "pinned_host" not in kinds:
            raise UserError(
                f"config.exchange_options.offload is True; this platform has no pinned host memory ({', '.join(kinds)})"
            )


def _check_optimizer(config: ConfigDict) -> None:
    o, kind = config.exchange, config.optimizer.name
    if o.startswith("zero") and kind not in ELEMENTWISE:
        raise UserError(
            f"config.optimizer.name is {kind!r}, which looks at whole arrays, and config.exchange={o!r} divides them; "
            f"it may be {', '.join(ELEMENTWISE)}"
        )
    if o in ("onebit_adam", "bagua_qadam") and kind != "adamw":
        raise UserError(f"config.optimizer.name is {kind!r}; it may be adamw with config.exchange={o!r}")


def build(config: ConfigDict, problem: Problem, num_replicas: int) -> Exchange:
    """The exchange around the problem's optimizer."""
    o = config.optimizer
    adamw = None
    if o.name == "adamw":
        schedule = optimizer.build_schedule(config, problem.num_steps)
        adamw = {"schedule": schedule, "num_steps": problem.num_steps, "mask": optimizer.decayed}
        adamw |= {key: o[key] for key in ("b1", "b2", "eps", "weight_decay", "clip_norm")}
    rule = Rule(problem.optimizer, problem.model.shapes, adamw)
    return build_exchange(config.exchange, Axis(DATA, num_replicas), rule, **given(config))


def check_on_gradients(config: ConfigDict, num_replicas: int) -> None:
    """As `check`, for pipelines, whose replicas can agree on gradients alone."""
    if config.exchange in NAMES and (config.exchange not in GRADIENTS or "backward_passes_per_step" in given(config)):
        why = {
            "dp": "it has all of the model on one device",
            "horovod": "its backward_passes_per_step is what config.pipeline.num_microbatches is for",
        }
        reason = why.get(config.exchange, "it is more than an exchange of gradients, and stages differ in their arrays")
        raise UserError(
            f"config.exchange is {config.exchange!r} with config.strategy='pipeline': {reason}; it may be "
            f"{', '.join(GRADIENTS)}"
        )
    check(config, num_replicas)


def on_gradients(config: ConfigDict, num_replicas: int) -> AllReduce:
    """The exchange of gradients alone, over the data axis."""
    return GRADIENTS[config.exchange](Axis(DATA, num_replicas), **given(config))
