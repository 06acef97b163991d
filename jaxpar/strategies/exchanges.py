"""config.exchange and config.exchange_options: checked, and built."""

from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import optimizer
from jaxpar.cluster import Cluster
from jaxpar.errors import Refusals, UserError, refuse_choice
from jaxpar.exchange import presets
from jaxpar.exchange.exchange import Exchange
from jaxpar.exchange.fuse import AllReduce
from jaxpar.exchange.presets import AROUND, EXCHANGES, GRADIENTS, PASSES, Rule, obstacle, options
from jaxpar.exchange.reduce import Axis
from jaxpar.mesh import DATA
from jaxpar.optimizer import OPTIMIZERS
from jaxpar.step import Problem


def given(config: ConfigDict) -> dict[str, Any]:
    """Return the options that the config sets."""
    return {name: value for name, value in config.exchange_options.items() if value is not None}


def name(config: ConfigDict) -> str:
    """Return the exchange and the options that the config sets, such as `ddp bucket_bytes=1000`."""
    return " ".join([config.exchange, *(f"{key}={value}" for key, value in sorted(given(config).items()))])


def private_key(config: ConfigDict, num_replicas: int) -> dict[str, Any]:
    """Return what the private state of an exchange depends on: its name, all of its options, the replicas."""
    chosen = {**options(config.exchange), **_with_seed(config)}
    return {"exchange": config.exchange, "options": dict(sorted(chosen.items())), "replicas": num_replicas}


def differs(config: ConfigDict) -> str:
    """Return what the exchange does unlike one device, as `Plan.differs`."""
    return presets.exchange_differs(config.exchange, given(config))


def _with_seed(config: ConfigDict) -> dict[str, Any]:
    seed = {"seed": config.seed} if "seed" in options(config.exchange) else {}
    return seed | given(config)


def refuse_exchange(config: ConfigDict, num_replicas: int, cluster: Cluster) -> Refusals[None]:
    """Refuse an exchange, or an option of one, that cannot be."""
    yield from refuse_choice("exchange", config.exchange, EXCHANGES)
    if reason := obstacle(config.exchange, num_replicas, given(config)):
        key, wrong = reason
        yield UserError(f"config.{key} {wrong}" if key == "exchange" else f"config.exchange_options.{key} {wrong}")
    if given(config).get("offload") and not cluster.has_pinned_host_memory:
        yield UserError(
            "config.exchange_options.offload is True; it must be False on a platform without pinned host memory, "
            f"such as {cluster.platform} ({cluster.device_kind})"
        )
    yield from _refuse_optimizer(config)


def _refuse_optimizer(config: ConfigDict) -> Refusals[None]:
    exchange, kind = config.exchange, config.optimizer.name
    if exchange not in AROUND:
        return
    elementwise = [name for name, one in OPTIMIZERS.items() if one.elementwise]
    if AROUND[exchange].divides and kind not in elementwise:
        yield UserError(
            f"config.optimizer.name is {kind!r}, which looks at whole arrays, and config.exchange={exchange!r} divides "
            f"them; it must be one of {', '.join(elementwise)}"
        )
    adamw = [name for name, one in OPTIMIZERS.items() if one.is_adamw]
    if AROUND[exchange].has_adamw and kind not in adamw:
        yield UserError(
            f"config.optimizer.name is {kind!r}; it must be {', '.join(adamw)} with config.exchange={exchange!r}"
        )


def configured_exchange(config: ConfigDict, problem: Problem, num_replicas: int) -> Refusals[Exchange]:
    """Return the exchange around the problem's optimizer. Refuses one that cannot be of this problem."""
    passes = given(config).get(PASSES, 1)
    if problem.num_steps % passes:
        yield UserError(
            f"config.exchange_options.{PASSES} is {passes}; it must divide the run's {problem.num_steps} steps"
        )
    if config.exchange in AROUND and AROUND[config.exchange].divides:
        for path, leaf in jax.tree_util.tree_leaves_with_path(problem.model.shapes):
            if not leaf.size:
                where = jax.tree_util.keystr(path)
                yield UserError(
                    f"config.exchange is {config.exchange!r}, which cannot divide {where} of shape {leaf.shape}"
                )
    o = config.optimizer
    adamw = None
    if OPTIMIZERS[o.name].is_adamw:
        schedule = optimizer.build_schedule(config, problem.num_steps)
        adamw = {"schedule": schedule, "num_steps": problem.num_steps, "mask": optimizer.decayed}
        adamw |= {key: o[key] for key in ("b1", "b2", "eps", "weight_decay", "clip_norm")}
    layers = [layer.name for layer in problem.model.layers]
    rule = Rule(problem.optimizer, problem.model.shapes, adamw, layers)
    return presets.make_exchange(config.exchange, Axis(DATA, num_replicas), rule, **_with_seed(config))


def refuse_beyond_gradients(config: ConfigDict, num_replicas: int, cluster: Cluster) -> Refusals[None]:
    """As `refuse_exchange`, for pipelines, whose replicas can agree on gradients alone."""
    if PASSES in given(config):
        yield UserError(
            f"config.exchange_options.{PASSES} is {given(config)[PASSES]}; it must be None with "
            "config.strategy='pipeline', where config.pipeline.num_microbatches is for that"
        )
    if config.exchange in EXCHANGES and config.exchange not in GRADIENTS:
        what = "has all of the model on one device"
        what = (
            what
            if config.exchange == "dp"
            else "is more than an exchange of gradients, and stages hold different arrays"
        )
        yield UserError(
            f"config.exchange is {config.exchange!r}, which {what}; with config.strategy='pipeline' it must be "
            f"{', '.join(GRADIENTS)}"
        )
    yield from refuse_exchange(config, num_replicas, cluster)


def on_gradients(config: ConfigDict, num_replicas: int) -> AllReduce:
    """Return the exchange of gradients alone, over the data axis."""
    return GRADIENTS[config.exchange](Axis(DATA, num_replicas), **_with_seed(config))
