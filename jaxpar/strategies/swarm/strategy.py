"""`swarm`: a pipeline whose stages have several peers, which can be slow, differ, fail, move and join again.

A simulation in virtual time (jaxpar/strategies/swarm/run.py) decides which peer computes which pass of which
microbatch, and what is computed again after a failure. The devices of this machine repeat its actions with the real
model (jaxpar/strategies/swarm/executor.py). In live mode, the peers are processes on Ray, and the trainer holds a copy
of the state on one device (jaxpar/strategies/swarm/live). Each microbatch counts exactly once, so training is equal to
`single` with as many accumulation steps as there are microbatches, even if peers fail. Delayed updates and compressed
messages change the results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import layout
from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Decision, DelayedUpdates, Plan, StageDelay, Traffic, state_memory
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Problem
from jaxpar.errors import format_bytes, format_count
from jaxpar.models.model import Model
from jaxpar.strategies import exchanges
from jaxpar.strategies.pipeline.executor.partition import AUTO, METHODS
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.placement import PlacedState, evaluator
from jaxpar.strategies.ray_cluster import WITHOUT_RAY
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.strategies.swarm import options
from jaxpar.strategies.swarm.costs import SwarmSettings
from jaxpar.strategies.swarm.executor import SwarmExecutor, SwarmState
from jaxpar.strategies.swarm.fluid import run_fluid
from jaxpar.strategies.swarm.options import LiveDetails, StageSizes, SwarmSource
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS, LOST, REPEATED
from jaxpar.strategies.swarm.record import RECEIVE, RECEIVE_INPUT, SwarmRun
from jaxpar.strategies.swarm.scenario import RunActions, SwarmScenario, write_scenario
from jaxpar.strategies.swarm.stage_passes import MESSAGE_FORMATS, MessageFormat, SwarmPrograms
from jaxpar.strategies.swarm.table import write_routing


def decide(config: ConfigDict, cluster: Cluster, model: Model | None, /) -> Decision[SwarmSource]:
    """Decide on the devices of the peers, and read the files that config.swarm names.

    Raises UserError for a config.swarm that is invalid, and files that cannot be read.
    """
    swarm = "config.strategy='swarm'"
    meshes.check_processes(swarm, cluster)
    meshes.check_no_groups(config, swarm)
    exchanges.check_no_exchange(config, "whose peers average their gradients exactly")
    accumulates = f"1 with {swarm}, which accumulates over config.swarm.num_microbatches"
    cuts = f"one of {', '.join(METHODS)}, or layer names, with {swarm}"
    rules: list[configs.KeyRule] = [
        ("mesh.stage", config.mesh.stage == 1, f"1 with {swarm}, whose stages are set by config.swarm.stages"),
        ("optimizer.accumulation_steps", config.optimizer.accumulation_steps == 1, accumulates),
        ("swarm.mode", config.swarm.mode != "live" or find_spec("ray") is not None, f"'emulated' {WITHOUT_RAY}"),
        ("pipeline.partition", config.pipeline.partition != AUTO, cuts),
    ]
    configs.check_rules(config, rules)
    source = options.decide_swarm(config)
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
    stages, workload, sizes = options.plan_stages(config, shapes)
    like = states.abstract_state(shapes.model, shapes.optimizer)
    layouts = {part: layout.on_one(decision.axes, tree, DATA) for part, tree in like._asdict().items()}
    s, messages = config.swarm, MESSAGE_FORMATS[config.swarm.compress]
    num_microbatches = options.swarm_microbatches(config)
    swarm = f"in {format_count(stages.num_stages, 'stage')}"
    batch = format_count(num_microbatches, "microbatch")
    lossy = f"{s.compress} messages are lossy" if s.compress != "none" else ""
    if s.mode == "live":
        most = int(s.peers)
        where = f"on Ray at {s.address}" if s.address else "on Ray on this machine"
        return Plan(
            "swarm",
            decision,
            f"up to {format_count(most, 'peer')} {swarm} {where}, {batch}, {format_bytes(max(sizes.gradients))} of "
            "parameters per peer",
            layouts,
            LiveDetails(stages, workload, messages, num_microbatches, s, config.seed),
            state_memory(layouts),
            live_traffic(sizes, num_microbatches, most, s.compress),
            differs=lossy,
        )
    source, num_devices = decision.source, decision.num_replicas
    scenario, run = options.simulate_swarm(config, source, workload, like, shapes.num_steps)
    seconds = run.update_times[-1]
    optimal = run_fluid(source.peers, workload, source.trace, seconds, SwarmSettings(0, 0))
    most_microbatches = float((optimal.optimal * np.diff(optimal.time)).sum())
    rate = shapes.num_steps * num_microbatches / most_microbatches
    passes = [one for step in run.actions for one in step if one.kind in (FORWARD_PASS, BACKWARD_PASS)]
    computing = {(one.stage, one.peer % num_devices) for one in passes}
    copies = []
    for stage in range(stages.num_stages):
        on = [device for device in range(1, num_devices) if (stage, device) in computing]
        copies.append(layout.on_some(decision.axes, stages.select(like.params, stage), DATA, on))
    layouts["copies"] = layout.join(tuple(copies))  # of the weights, on the devices of the peers
    layouts["history"] = layout.on_one(decision.axes, like.params if s.delayed else (), DATA)
    layers = tuple(layer.name for layer in shapes.model.layers)
    stage_delay = StageDelay(layers, 0, computed_after=(0,) * num_microbatches, lags=(1,) * num_microbatches)
    return Plan(
        "swarm",
        decision,
        f"{format_count(len(source.peers), 'peer')} {swarm}, {batch}, "
        f"{format_count(len(optimal.failures), 'failure')}, {rate:.3f} of the optimal throughput",
        layouts,
        SwarmDetails(stages, scenario, run, messages, num_microbatches, s.delayed, rate),
        state_memory(layouts),
        swarm_traffic(run, sizes, len(source.peers), s.compress),
        private_key={"swarm": "delayed"} if s.delayed else {},
        differs="; ".join(filter(None, ["delayed updates use weights one step older" if s.delayed else "", lossy])),
        delays=DelayedUpdates((stage_delay,), lossy) if s.delayed else None,
    )


def swarm_traffic(run: SwarmRun, sizes: StageSizes, num_peers: int, compress: str) -> tuple[Traffic, ...]:
    """Return what a peer sends per step, on average over peers and steps: messages to other stages, and averaging.

    A ring all-reduce among n peers of a stage sends 2 (n - 1) / n of the bytes of its gradient from each of them.
    """
    share = 1 / len(run.actions) / num_peers
    sent = [one for step in run.actions for one in step if one.kind in RECEIVE]
    message_bytes = sum(sizes.messages[one.stage - (one.kind == RECEIVE_INPUT)] for one in sent)
    rings = [(len(group), sizes.gradients[stage]) for groups in run.groups for stage, group in enumerate(groups)]
    ring_bytes = sum(2 * (size - 1) * nbytes for size, nbytes in rings)
    num_ring_messages = sum(2 * (size - 1) * size for size, _ in rings)
    messages = share * message_bytes, share * len(sent)
    return _traffic(compress, messages, (share * ring_bytes, share * num_ring_messages))


def live_traffic(sizes: StageSizes, num_microbatches: int, num_peers: int, compress: str) -> tuple[Traffic, ...]:
    """Return what a peer sends per step, on average, if no peer fails and all stages have equally many."""
    num_stages, number = len(sizes.gradients), 2 * len(sizes.messages) * num_microbatches
    groups = [num_peers // num_stages + (stage < num_peers % num_stages) for stage in range(num_stages)]
    averaged = sum(2 * (size - 1) * nbytes for size, nbytes in zip(groups, sizes.gradients, strict=True))
    messages = 2 * num_microbatches * sum(sizes.messages) / num_peers, number / num_peers
    return _traffic(compress, messages, (averaged / num_peers, sum(2 * (n - 1) * n for n in groups) / num_peers))


def _traffic(compress: str, messages: tuple[float, float], rings: tuple[float, float]) -> tuple[Traffic, ...]:
    """Return the traffic with these bytes and numbers of messages, without what sends nothing."""
    dtype = "float32" if compress == "none" else compress
    traffic = Traffic("copy", dtype, STAGE, *messages), Traffic("copy", "float32", DATA, *rings)
    return tuple(one for one in traffic if one.messages)


def build(plan: Plan[Any], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[SwarmState]:
    """Build the executor of the simulated run, or the trainer of a live one, on the first of these devices.

    Raises UserError if no cluster answers at config.swarm.address, or it has room for fewer peers than stages.
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
        from jaxpar.strategies.swarm.live.trainer import LiveTrainer  # late, because Ray may not be installed

        trainer = LiveTrainer(details, problem)
        step, report = trainer.step, trainer.report
    else:
        step, report = executor.step, partial(report_swarm, details)
    evaluate = evaluator(problem, mesh)

    def begin(state: State, private: Canonical | None = None) -> SwarmState:
        older = jax.device_put(private["params"], at) if private else state.params
        return SwarmState(int(state.step), state, older if delayed else None)

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
        evaluate=lambda state, batch: evaluate(state.state.params, batch),
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
