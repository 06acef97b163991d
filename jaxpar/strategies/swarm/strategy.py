"""`swarm`: a pipeline whose stages have several peers, which can be slow, differ, fail, move and join again.

A simulation in virtual time (jaxpar/strategies/swarm/run.py) decides which peer computes which pass of which
microbatch, and what is computed again after a failure. The devices of this machine repeat its actions with the real
model (jaxpar/strategies/swarm/executor.py). Each microbatch counts exactly once, so training is equal to `single` with
as many accumulation steps as there are microbatches, even if peers fail. Delayed updates and compressed messages change
the results.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import layout
from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Decision, DelayedUpdates, Plan, StageDelay, Traffic, state_memory
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, format_count
from jaxpar.layout import Layout
from jaxpar.models.model import Model
from jaxpar.strategies import exchanges
from jaxpar.strategies.pipeline.executor.partition import AUTO, METHODS
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.placement import PlacedState, batch_placer, on_all
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.strategies.swarm import live_options, options
from jaxpar.strategies.swarm import live_plan as live_swarm
from jaxpar.strategies.swarm.availability import LEAVE, events_before
from jaxpar.strategies.swarm.executor import SwarmExecutor, SwarmState
from jaxpar.strategies.swarm.fluid import run_fluid
from jaxpar.strategies.swarm.live_options import LiveDetails
from jaxpar.strategies.swarm.messages import MESSAGE_COMPRESSORS, MessageFormat
from jaxpar.strategies.swarm.options import StageSizes, SwarmSource
from jaxpar.strategies.swarm.progress import LOST, REPEATED
from jaxpar.strategies.swarm.record import SwarmRun, devices_of_stages, num_messages
from jaxpar.strategies.swarm.scenario import RunActions, SwarmScenario, write_scenario
from jaxpar.strategies.swarm.stage_passes import SwarmPrograms
from jaxpar.strategies.swarm.table import write_routing
from jaxpar.tasks import Sums


def decide(config: ConfigDict, cluster: Cluster, model: Model | None, /) -> Decision[SwarmSource]:
    """Decide on the devices of the peers, and read the files that config.swarm names.

    Raises UserError for a config.swarm that is invalid, and files that cannot be read.
    """
    meshes.check_processes("config.strategy='swarm'", cluster)
    if config.mesh.stage != 1:
        raise UserError(
            f"config.mesh.stage is {config.mesh.stage}; it must be 1 with config.strategy='swarm', whose stages are "
            "set by config.swarm.stages"
        )
    if config.exchange != "ddp" or exchanges.given(config):
        raise UserError(
            f"config.exchange is {exchanges.name(config)!r}; it must be 'ddp' without options with "
            "config.strategy='swarm', whose peers average their gradients exactly"
        )
    if config.optimizer.accumulation_steps != 1:
        raise UserError(
            f"config.optimizer.accumulation_steps is {config.optimizer.accumulation_steps}; it must be 1 with "
            "config.strategy='swarm', which accumulates over config.swarm.num_microbatches"
        )
    if config.swarm.mode == "live":
        live_options.check_ray()
    source = options.decide_swarm(config)
    if config.pipeline.partition == AUTO:
        raise UserError(
            f"config.pipeline.partition is {AUTO!r}; it must be one of {', '.join(METHODS)}, or layer names, with "
            "config.strategy='swarm'"
        )
    meshes.check_sizes(config, cluster)
    if model is not None:
        options.check_stage_count(config, [layer.name for layer in model.layers])
    most = 1 if config.swarm.mode == "live" else len(source.peers)
    taken, microbatches = min(meshes.sizes(config, cluster)[DATA], most), options.swarm_microbatches(config)
    words = f"{format_count(microbatches, 'microbatch')} (config.swarm.num_microbatches), on {taken} devices"
    return Decision({DATA: taken, STAGE: 1}, math.lcm(microbatches, taken), words, taken, source)


@dataclass(frozen=True)
class SwarmDetails:
    """The details of a plan that `build` needs."""

    stages: Stages  # the stages
    scenario: SwarmScenario  # the inputs of the simulated run
    run: SwarmRun  # the simulated run
    messages: MessageFormat  # form of activations and their gradients between peers
    num_microbatches: int  # number of microbatches of a step
    delayed: bool  # whether updates are delayed
    efficiency: float  # throughput, as a fraction of the most that the present peers could compute


def plan(config: ConfigDict, shapes: Problem, _cluster: Cluster, decision: Decision[SwarmSource], /) -> Plan[Any]:
    """Plan the stages, and simulate the run if it is emulated.

    Raises UserError for a model that cannot be cut into the stages, and a trace that leaves a stage without a peer.
    """
    if config.swarm.mode == "live":
        return live_swarm.plan_live(config, shapes, decision)
    return plan_emulated(config, shapes, decision)


def plan_emulated(config: ConfigDict, shapes: Problem, decision: Decision[SwarmSource]) -> Plan[SwarmDetails]:
    """Plan the stages, and simulate the run. Raises the errors of `plan`."""
    s, source, num_microbatches = config.swarm, decision.source, options.swarm_microbatches(config)
    like = states.abstract_state(shapes.model, shapes.optimizer)
    stages, workload, sizes = options.plan_stages(config, shapes)
    scenario, run = options.simulate_swarm(config, source, workload, like, shapes.num_steps)
    seconds = run.update_times[-1]
    works = [sum(both) for both in zip(workload.forward, workload.backward, strict=True)]
    optimal = run_fluid(source.peers, works, source.trace, seconds)
    most = float((optimal.optimal * np.diff(optimal.time)).sum())
    rate = shapes.num_steps * num_microbatches / most
    num_failures = sum(event.event == LEAVE for event in events_before(source.trace, seconds))
    num_peers, num_devices = len(source.peers), decision.num_replicas
    devices = devices_of_stages(run.actions, stages.num_stages, lambda peer: peer % num_devices)
    layouts = swarm_layouts(stages, like, devices, decision.axes, delayed=s.delayed)
    reason = f"{s.compress} messages are lossy" if s.compress != "none" else ""
    layers = tuple(layer.name for layer in shapes.model.layers)
    zeros, ones = (0,) * num_microbatches, (1,) * num_microbatches
    stage_delay = StageDelay(layers, updated_after=0, computed_after=zeros, lags=ones)
    return Plan(
        "swarm",
        decision,
        f"{format_count(num_peers, 'peer')} in {format_count(stages.num_stages, 'stage')}, "
        f"{format_count(num_microbatches, 'microbatch')}, {format_count(num_failures, 'failure')}, "
        f"{rate:.3f} of the optimal throughput",
        layouts,
        SwarmDetails(
            stages, scenario, run, MessageFormat(MESSAGE_COMPRESSORS[s.compress]), num_microbatches, s.delayed, rate
        ),
        state_memory(layouts),
        swarm_traffic(run, sizes, num_peers, s.compress),
        private_key={"swarm": "delayed"} if s.delayed else {},
        differs="; ".join(filter(None, ["delayed updates use weights one step older" if s.delayed else "", reason])),
        delays=DelayedUpdates((stage_delay,), reason) if s.delayed else None,
    )


def swarm_layouts(
    stages: Stages, like: State, devices: Sequence[Sequence[int]], axes: Mapping[str, int], *, delayed: bool
) -> dict[str, Layout]:
    """Return the layouts of the state and of the weights of peers. devices: of the peers of each stage."""
    on_first = {part: layout.on_one(axes, tree, DATA) for part, tree in like._asdict().items()}
    copies = [
        layout.on_some(axes, stages.select(like.params, stage), DATA, [device for device in of_stage if device])
        for stage, of_stage in enumerate(devices)
    ]
    history = layout.on_one(axes, like.params if delayed else (), DATA)
    return {**on_first, "copies": layout.join(tuple(copies)), "history": history}


def swarm_traffic(run: SwarmRun, sizes: StageSizes, num_peers: int, compress: str) -> tuple[Traffic, ...]:
    """Return what a peer sends per step, on average over peers and steps: messages to other stages, and averaging.

    A ring all-reduce among n peers of a stage sends 2 (n - 1) / n of the bytes of its gradient from each of them.
    """
    share = 1 / len(run.actions) / num_peers
    messages = num_messages(run.actions)
    rings = [(len(group), sizes.gradients[stage]) for groups in run.groups for stage, group in enumerate(groups)]
    message_bytes = sum(number * sizes.messages[boundary] for boundary, number in messages.items())
    ring_bytes = sum(2 * (size - 1) * nbytes for size, nbytes in rings)
    num_ring_messages = sum(2 * (size - 1) * size for size, _ in rings)
    dtype = "float32" if compress == "none" else compress
    traffic = (
        Traffic("copy", dtype, STAGE, share * message_bytes, share * messages.total()),
        Traffic("copy", "float32", DATA, share * ring_bytes, share * num_ring_messages),
    )
    return tuple(one for one in traffic if one.messages)


def build(plan: Plan[Any], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[SwarmState]:
    """Build the executor of the simulated run, or the trainer of a live one, on the first of these devices.

    Raises:
      UserError: no cluster answers at config.swarm.address, or it has room for fewer peers than stages.
    """
    details, mesh = plan.details, meshes.make_mesh(plan.axes, devices)
    is_live = isinstance(details, LiveDetails)
    delayed = not is_live and details.delayed
    placed = PlacedState(problem, plan.layouts, mesh)
    [at] = placed.shardings.key.device_set
    executor = SwarmExecutor(
        SwarmPrograms(problem, details.stages, details.messages, keeps_params=delayed),
        details.stages,
        (lambda _: []) if is_live else RunActions(details.scenario, details.run),
        details.num_microbatches,
        tuple(mesh.devices.flat),
    )
    if is_live:
        from jaxpar.strategies.swarm.live.trainer import start_trainer  # late, because Ray may not be installed

        trainer = start_trainer(details, problem)
        step, report = trainer.step, trainer.report
    else:
        step, report = executor.step, partial(report_swarm, details)
    everywhere, place_on_devices = on_all(mesh), batch_placer(mesh)
    sums = meshes.one_at_a_time(jax.jit(partial(steps.evaluate, problem), out_shardings=everywhere), mesh)

    def begin(state: State, private: Canonical | None = None) -> SwarmState:
        older = jax.device_put(private["params"], at) if private else state.params
        return SwarmState(int(state.step), state, older if delayed else None)

    def evaluate(state: SwarmState, batch: Mapping[str, np.ndarray]) -> Sums:
        total: Sums = sums(jax.device_put(state.state.params, everywhere), place_on_devices(batch))
        return total

    def compile_programs() -> list[CompiledProgram]:
        *passes, update = executor.lower(states.abstract_state(problem.model, problem.optimizer), problem.batch)
        compiled = [CompiledProgram(one.compile()) for one in passes]
        return [*compiled, CompiledProgram(update.compile(), arguments=("parameters",))]

    return Strategy(
        plan,
        tuple(mesh.devices.flat),
        init=lambda key: begin(placed.init(key)),
        place=dict,
        step=step,
        evaluate=evaluate,
        to_canonical=lambda state: placed.to_canonical(state.state),
        from_canonical=lambda tree, private=None: begin(placed.from_canonical(tree), private),
        compile=compile_programs,
        to_private=lambda state: {} if state.older is None else {"params": state.older},
        report=lambda _state, workdir: report(workdir),
    )


def report_swarm(details: SwarmDetails, workdir: Path) -> dict[str, Any]:
    """Write the scenario and the routing table of the run, and return its results."""
    run = details.run
    write_scenario(workdir / "scenario.json", details.scenario)
    write_routing(workdir / "routing.csv", run.table)
    return {
        "moves": len(run.moves),
        "lost_passes": int((run.table.outcome == LOST).sum()),
        "repeated_passes": int((run.table.outcome == REPEATED).sum()),
        "table_seconds": run.update_times[-1],
        "efficiency": details.efficiency,
    }
