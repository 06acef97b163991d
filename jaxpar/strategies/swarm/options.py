"""Checks config.swarm, reads its files, and simulates the run that it describes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.core.state import State, nbytes
from jaxpar.core.step import Problem, abstract_share
from jaxpar.errors import UserError, check_choice
from jaxpar.strategies.pipeline.executor.partition import layer_flops, stage_bounds
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.tables.table import loop_stages
from jaxpar.strategies.ray_cluster import check_address
from jaxpar.strategies.swarm.availability import RandomTrace, SwarmPeer, Trace, find_peers, read_swarm_trace
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.membership import REBALANCING_RULES
from jaxpar.strategies.swarm.record import SwarmRun
from jaxpar.strategies.swarm.scenario import SwarmScenario
from jaxpar.strategies.swarm.stage_passes import MESSAGE_FORMATS, MessageFormat

SWARM_MODES = ("emulated", "live")
ONLY_LIVE = ("address", "namespace", "peer_cpus", "peer_gpus", "join_seconds", "patience")
ONLY_EMULATED = ("trace", "failures", "forward_seconds", "delayed")
BACKWARD_WORK = 3.0  # of a backward pass, in forward passes: two products for each one, and the forward pass again
LEAST_WORK = 0.01  # of a stage, in means: a lookup has no FLOPs, but takes time
MOST_PEERS = 1000  # of a live swarm: its trainer routes every pass
MOST_RESOURCES = 10_000  # of a peer
RESOURCE_UNITS = 10_000  # Ray counts resources in ten-thousandths


class SwarmSource(NamedTuple):
    """The peers and the trace of config.swarm, from files that have been read."""

    peers: list[SwarmPeer]
    trace: Trace


class StageSizes(NamedTuple):
    """Sizes of S stages."""

    # [S - 1], bytes of the activation of a microbatch between a stage and the next one, as it is sent
    messages: list[int]
    gradients: list[int]  # [S], bytes of the gradient of a stage, with copies of arrays tied to it


@dataclass(frozen=True)
class LiveDetails:
    """The details of a plan that the trainer of a live swarm needs."""

    stages: Stages  # the stages
    workload: Workload  # units of work of the passes, which are the FLOPs of a stage relative to the mean
    messages: MessageFormat  # form of activations and their gradients between peers
    num_microbatches: int  # number of microbatches of a step
    settings: ConfigDict  # config.swarm
    seed: int  # seed of the ties in routing


def decide_swarm(config: ConfigDict) -> SwarmSource:
    """Read the files that config.swarm names; live mode has none.

    Raises UserError for invalid settings, and files that cannot be read.
    """
    s = config.swarm
    check_choice("swarm.mode", s.mode, SWARM_MODES)
    check_choice("swarm.rule", s.rule, REBALANCING_RULES)
    check_choice("swarm.compress", s.compress, MESSAGE_FORMATS)
    is_live = s.mode == "live"
    default, of_other_mode = configs.keys(configs.default_config()), ONLY_EMULATED if is_live else ONLY_LIVE
    for key, value in configs.changed_keys(config).items():
        section, *names = key.split(".")
        if section == "swarm" and names[0] in of_other_mode:
            raise UserError(f"config.{key} is {value!r}; it must be {default[key]!r} with config.swarm.mode={s.mode!r}")
    rules: list[configs.KeyRule] = [
        ("swarm.stages", s.stages >= 1, "at least 1"),
        ("swarm.num_microbatches", s.num_microbatches >= 0, "at least 0"),
        _in_range("forward_seconds", s.forward_seconds, 1e-9, 1e9),
        _in_range("rebalance_seconds", s.rebalance_seconds, s.forward_seconds, 1e12, or_zero=True),
    ]
    configs.check_rules(config, rules)
    if is_live:
        _check_live(config)
        return SwarmSource([], [])
    peers = find_peers(s.peers, "config.swarm.peers")
    trace = read_swarm_trace(s.trace, peers, "config.swarm.trace") if s.trace else []
    rates = _decide_rates(config, len(peers))
    few = f"at most {len(peers)}, the number of peers (config.swarm.peers={s.peers!r})"
    rules = [
        ("swarm.stages", s.stages <= len(peers), few),
        ("swarm.trace", not (rates and s.trace), "empty with config.swarm.failures, which generate a trace"),
    ]
    configs.check_rules(config, rules)
    return SwarmSource(peers, rates or trace)


def _decide_rates(config: ConfigDict, num_peers: int) -> RandomTrace | None:
    """Return the random trace of config.swarm.failures; None if peers do not fail. Raises UserError if invalid."""
    f = config.swarm.failures
    rules = [
        _in_range("failures.lifetime", f.lifetime, 1e-9, 1e12, or_zero=True),
        _in_range("failures.group_lifetime", f.group_lifetime, 1e-9, 1e12, or_zero=True),
        _in_range("failures.rejoin", f.rejoin, 0, 1e12),
        _in_range("failures.groups", f.groups, 1, num_peers),
        _in_range("failures.group_share", f.group_share, 0, 1),
    ]
    configs.check_rules(config, rules)
    if not f.lifetime and not f.group_lifetime:
        return None
    lifetime, of_groups = f.lifetime or math.inf, f.group_lifetime or math.inf
    return RandomTrace(num_peers, lifetime, f.rejoin, f.groups, of_groups, f.group_share, config.seed)


def _in_range(key: str, value: float, least: float, greatest: float, *, or_zero: bool = False) -> configs.KeyRule:
    holds = least <= value <= greatest or (or_zero and value == 0)
    return f"swarm.{key}", holds, f"between {least:g} and {greatest:g}{' or 0' if or_zero else ''}"


def _check_live(config: ConfigDict) -> None:
    """Raise UserError for invalid settings of live mode."""
    s = config.swarm
    is_number = s.peers.isascii() and s.peers.isdecimal() and len(s.peers) <= len(str(MOST_PEERS))
    if not is_number or not s.stages <= int(s.peers) <= MOST_PEERS:
        raise UserError(
            f"config.swarm.peers is {s.peers[:40]!r}; it must be a number, at least {s.stages} (config.swarm.stages) "
            f"and at most {MOST_PEERS}, with config.swarm.mode='live'"
        )
    check_address("swarm.address", s.address, required=False)
    configs.check_rules(config, _live_rules(s))


def _live_rules(s: ConfigDict) -> Iterator[configs.KeyRule]:
    yield "swarm.join_seconds", 0 <= s.join_seconds < math.inf, "finite and at least 0"
    resources = ("peer_cpus", "peer_gpus")
    for key in resources:
        yield f"swarm.{key}", 0 <= s[key] <= MOST_RESOURCES, f"between 0 and {MOST_RESOURCES:,}"
    for key in resources:
        units = s[key] * RESOURCE_UNITS
        yield f"swarm.{key}", math.isclose(units, round(units)), f"a multiple of {1 / RESOURCE_UNITS}"
    yield "swarm.peer_gpus", s.peer_gpus <= 1 or s.peer_gpus % 1 == 0, "a whole number or less than 1"
    yield "swarm.peer_cpus", s.peer_cpus + s.peer_gpus > 0, "greater than 0 if config.swarm.peer_gpus is 0"
    yield "swarm.patience", 1 < s.patience < math.inf, "finite and greater than 1"


def swarm_microbatches(config: ConfigDict) -> int:
    """Return the number of microbatches of a step: by default four per stage, or a few more if those divide a batch."""
    least = 4 * config.swarm.stages
    divisors = (number for number in range(least, 2 * least) if config.batch_size % number == 0)
    return int(config.swarm.num_microbatches or next(divisors, least))


def check_stage_count(config: ConfigDict, names: list[str]) -> None:
    """Raise UserError for more stages than layers. names: of the layers."""
    most = f"at most {len(names)}, the number of layers of the model ({names[0]} .. {names[-1]})"
    configs.check_rules(config, [("swarm.stages", config.swarm.stages <= len(names), most)])


def plan_stages(config: ConfigDict, shapes: Problem) -> tuple[Stages, Workload, StageSizes]:
    """Return the stages, what they cost, and their sizes. Raises UserError for a model that cannot be cut into them."""
    model, num_stages = shapes.model, config.swarm.stages
    microbatch: Any = abstract_share(shapes.batch, swarm_microbatches(config))
    inputs = model.inputs(microbatch)
    check_stage_count(config, [layer.name for layer in model.layers])
    bounds = stage_bounds(model, microbatch, inputs, config.pipeline.partition, num_stages)
    stages = Stages(model, bounds, loop_stages(num_stages, 1), inputs, shapes.task)
    flops = np.add.reduceat(np.array(layer_flops(model, microbatch, inputs), float), bounds[:-1])
    ratios = np.maximum(flops / flops.mean(), LEAST_WORK)
    forward = tuple(config.swarm.forward_seconds * ratio for ratio in ratios.tolist())
    messages = MESSAGE_FORMATS[config.swarm.compress]
    sizes = StageSizes(
        [messages.nbytes(inputs[begin]) for begin in bounds[1:-1]],
        [nbytes(stages.select(model.shapes, stage)) for stage in range(num_stages)],
    )
    backward = tuple(BACKWARD_WORK * seconds for seconds in forward)
    return stages, Workload(forward, backward, max(sizes.messages, default=0), max(sizes.gradients)), sizes


def swarm_settings(config: ConfigDict, num_steps: int) -> SwarmSettings:
    """Return the settings of a simulation of this number of steps."""
    s = config.swarm
    options = {"delayed": s.delayed, "rebalance_seconds": s.rebalance_seconds, "rule": s.rule, "seed": config.seed}
    return SwarmSettings(num_steps, swarm_microbatches(config), **options)


def simulate_swarm(
    config: ConfigDict, source: SwarmSource, workload: Workload, like: State, num_steps: int
) -> tuple[SwarmScenario, SwarmRun]:
    """Return the scenario of the config, and its run. like: shapes of the state.

    Raises UserError for failures that prevent training.
    """
    s, settings = config.swarm, swarm_settings(config, num_steps)
    state_bytes = workload.gradient_bytes * (1 + nbytes(like.optimizer) / nbytes(like.params))
    scenario = SwarmScenario(source.peers, workload._replace(state_bytes=state_bytes), source.trace, settings)
    try:
        return scenario, scenario.run()
    except UserError as error:
        name = "lifetime" if s.failures.lifetime else "group_lifetime"
        is_random = isinstance(source.trace, RandomTrace)
        what = f"failures.{name} is {s.failures[name]}" if is_random else f"trace is {s.trace!r}"
        raise UserError(
            f"config.swarm.{what}; it must let each stage have a peer for long enough, but {error}"
        ) from None
