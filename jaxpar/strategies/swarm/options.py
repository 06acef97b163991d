"""Checks config.swarm, reads its files, and simulates the run that it describes."""

import math
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar.core.state import State, nbytes
from jaxpar.core.step import Problem, abstract_share
from jaxpar.errors import UserError, check_choice
from jaxpar.strategies.pipeline.executor.partition import layer_flops, stage_bounds
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.tables.table import loop_stages
from jaxpar.strategies.swarm import live_options
from jaxpar.strategies.swarm.availability import RandomTrace, SwarmPeer, Trace, find_peers, read_swarm_trace
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.messages import MESSAGE_COMPRESSORS, MessageFormat
from jaxpar.strategies.swarm.rebalancing import REBALANCING_RULES
from jaxpar.strategies.swarm.record import SwarmRun
from jaxpar.strategies.swarm.scenario import SwarmScenario

SWARM_MODES = ("emulated", "live")
BACKWARD_WORK = 3.0  # of a backward pass, in forward passes: two products for each one, and the forward pass again
LEAST_WORK = 0.01  # of a stage, in means: a lookup has no FLOPs, but takes time


class SwarmSource(NamedTuple):
    """The peers and the trace of config.swarm, from files that have been read."""

    peers: list[SwarmPeer]
    trace: Trace


class StageSizes(NamedTuple):
    """Sizes of S stages."""

    # [S - 1], bytes of the activation of a microbatch between a stage and the next one, as it is sent
    messages: list[int]
    gradients: list[int]  # [S], bytes of the gradient of a stage, with copies of arrays tied to it


def decide_swarm(config: ConfigDict) -> SwarmSource:
    """Read the files that config.swarm names; live mode has none.

    Raises UserError for invalid settings, and files that cannot be read.
    """
    s = config.swarm
    check_choice("swarm.mode", s.mode, SWARM_MODES)
    check_choice("swarm.rule", s.rule, REBALANCING_RULES)
    check_choice("swarm.compress", s.compress, MESSAGE_COMPRESSORS)
    live_options.check_other_mode(config)
    if s.stages < 1:
        raise UserError(f"config.swarm.stages is {s.stages}; it must be at least 1")
    if s.num_microbatches < 0:
        raise UserError(f"config.swarm.num_microbatches is {s.num_microbatches}; it must be at least 0")
    _check_range("forward_seconds", s.forward_seconds, 1e-9, 1e9)
    if s.rebalance_seconds != 0:
        _check_range("rebalance_seconds", s.rebalance_seconds, s.forward_seconds, 1e12, " or 0")
    if s.mode == "live":
        live_options.check_live(config)
        return SwarmSource([], [])
    peers = find_peers(s.peers, "config.swarm.peers")
    trace = read_swarm_trace(s.trace, peers, "config.swarm.trace") if s.trace else []
    rates = _decide_rates(config, len(peers))
    if len(peers) < s.stages:
        raise UserError(
            f"config.swarm.stages is {s.stages}; it must be at most {len(peers)}, the number of peers "
            f"(config.swarm.peers={s.peers!r})"
        )
    if rates and s.trace:
        raise UserError(
            f"config.swarm.trace is {s.trace!r}; it must be empty with config.swarm.failures, which generate a trace"
        )
    return SwarmSource(peers, rates or trace)


def _decide_rates(config: ConfigDict, num_peers: int) -> RandomTrace | None:
    """Return the random trace of config.swarm.failures; None if peers do not fail. Raises UserError if invalid."""
    f = config.swarm.failures
    for name in ("lifetime", "group_lifetime"):
        if f[name] != 0:
            _check_range(f"failures.{name}", f[name], 1e-9, 1e12, " or 0")
    _check_range("failures.rejoin", f.rejoin, 0, 1e12)
    _check_range("failures.groups", f.groups, 1, num_peers)
    _check_range("failures.group_share", f.group_share, 0, 1)
    if not f.lifetime and not f.group_lifetime:
        return None
    return RandomTrace(
        num_peers,
        lifetime=f.lifetime or math.inf,
        rejoin=f.rejoin,
        groups=f.groups,
        group_lifetime=f.group_lifetime or math.inf,
        group_share=f.group_share,
        seed=config.seed,
    )


def _check_range(key: str, value: float, least: float, greatest: float, other: str = "") -> None:
    if not least <= value <= greatest:
        raise UserError(f"config.swarm.{key} is {value}; it must be between {least:g} and {greatest:g}{other}")


def swarm_microbatches(config: ConfigDict) -> int:
    """Return the number of microbatches of a step: by default four per stage, or a few more if those divide a batch."""
    least = 4 * config.swarm.stages
    divisors = (number for number in range(least, 2 * least) if config.batch_size % number == 0)
    return int(config.swarm.num_microbatches or next(divisors, least))


def check_stage_count(config: ConfigDict, names: list[str]) -> None:
    """Raise UserError for more stages than layers. names: of the layers."""
    if config.swarm.stages > len(names):
        raise UserError(
            f"config.swarm.stages is {config.swarm.stages}; it must be at most {len(names)}, the number of layers of "
            f"the model ({names[0]} .. {names[-1]})"
        )


def plan_stages(config: ConfigDict, shapes: Problem) -> tuple[Stages, Workload, StageSizes]:
    """Return the stages, what they cost, and their sizes. Raises UserError for a model that cannot be cut into them."""
    model = shapes.model
    microbatch: Any = abstract_share(shapes.batch, swarm_microbatches(config))
    inputs = model.inputs(microbatch)
    check_stage_count(config, [layer.name for layer in model.layers])
    num_stages = config.swarm.stages
    bounds = stage_bounds(model, microbatch, inputs, config.pipeline.partition, num_stages)
    stages = Stages(model, bounds, loop_stages(num_stages, 1), inputs, shapes.task)
    flops = np.add.reduceat(np.array(layer_flops(model, microbatch, inputs), float), bounds[:-1])
    ratios = np.maximum(flops / flops.mean(), LEAST_WORK)
    forward = [config.swarm.forward_seconds * ratio for ratio in ratios.tolist()]
    messages = MessageFormat(MESSAGE_COMPRESSORS[config.swarm.compress])
    sizes = StageSizes(
        [messages.nbytes(inputs[begin]) for begin in bounds[1:-1]],
        [nbytes(stages.select(model.shapes, stage)) for stage in range(num_stages)],
    )
    workload = Workload(
        tuple(forward),
        tuple(BACKWARD_WORK * seconds for seconds in forward),
        max(sizes.messages, default=0),
        max(sizes.gradients),
    )
    return stages, workload, sizes


def simulate_swarm(
    config: ConfigDict, source: SwarmSource, workload: Workload, like: State, num_steps: int
) -> tuple[SwarmScenario, SwarmRun]:
    """Return the scenario of the config, and its run. like: shapes of the state.

    Raises UserError for failures that prevent training.
    """
    s = config.swarm
    settings = SwarmSettings(
        num_steps,
        swarm_microbatches(config),
        delayed=s.delayed,
        rebalance_seconds=s.rebalance_seconds,
        rule=s.rule,
        seed=config.seed,
    )
    state_bytes = workload.gradient_bytes * (1 + nbytes(like.optimizer) / nbytes(like.params))
    scenario = SwarmScenario(source.peers, workload._replace(state_bytes=state_bytes), source.trace, settings)
    try:
        run = scenario.run()
    except UserError as error:
        f = s.failures
        name, value = ("lifetime", f.lifetime) if f.lifetime else ("group_lifetime", f.group_lifetime)
        what = f"failures.{name} is {value}" if isinstance(source.trace, RandomTrace) else f"trace is {s.trace!r}"
        raise UserError(
            f"config.swarm.{what}; it must let each stage have a peer for long enough, but {error}"
        ) from None
    return scenario, run
