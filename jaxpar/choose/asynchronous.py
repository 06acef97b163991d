"""Predicts the rates of async_data_parallel and swarm, whose workers or peers do not wait for each other.

Both are simulated: workers and their server by jaxpar/strategies/asynchronous/contention.py, peers by
jaxpar/strategies/swarm/run.py. The times of layers, updates and messages are those of the other predictions. A run is
predicted in which every worker or peer has a device that computes while the others do, as live ones have; emulated ones
are predicted as if they were live, with the relative delays, failures and speeds that the config gives them. The search
does not rank them, because a step from stale gradients is worth less, and a rate does not include that.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar.choose.candidates import (
    OPTIONS,
    AsyncCandidate,
    Candidate,
    Settings,
    Space,
    StateRatios,
    with_settings,
)
from jaxpar.choose.costs.memory import StateBytes
from jaxpar.choose.costs.replica_steps import replicas_costs
from jaxpar.choose.costs.step import StepCosts, UpdateWork
from jaxpar.choose.planner import candidate_of_plan
from jaxpar.choose.replicas import settings_of_replicas
from jaxpar.choose.stages import possible_stages
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Plan, Traffic, state_memory
from jaxpar.core.ring import RING_PASSES, ring_sends
from jaxpar.core.state import abstract_state, nbytes
from jaxpar.errors import UserError, format_count
from jaxpar.strategies.asynchronous import options as updates
from jaxpar.strategies.asynchronous.contention import ServerTimes, simulate_contention
from jaxpar.strategies.asynchronous.delays import compute_times, mean_compute_time
from jaxpar.strategies.asynchronous.layouts import server_layouts
from jaxpar.strategies.asynchronous.table import UpdateTable
from jaxpar.strategies.swarm import options as swarms
from jaxpar.strategies.swarm.availability import SwarmPeer
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.options import StageSizes
from jaxpar.strategies.swarm.record import RECEIVE, RECEIVE_INPUT, SwarmRun
from jaxpar.strategies.swarm.run import run_swarm

NUM_STEPS, WARM_UP = 120, 20  # simulated steps of workers, and those of them that do not count
SWARM_STEPS, SWARM_WARM_UP = 12, 4  # the same of a swarm
CROWDED_ROUNDS = 4  # simulations of a swarm that shares cores, each with the number of busy peers of the one before
UNRANKED = ("async_data_parallel", "swarm")


def async_candidates(space: Space, ratios: StateRatios) -> list[AsyncCandidate | str]:
    """Return async, ssp and swarm on all devices, with the other settings of the config, or why one is not possible."""
    n, cluster = space.num_devices, space.machine.cluster
    if cluster.platform != "cpu" and not cluster.send_rates:
        return [f"the rates of the links of {cluster.device_kind} are unknown"]
    workers = {"strategy": "async_data_parallel", "mesh.data": n, "asynchronous.num_workers": n}
    peers = {"strategy": "swarm", "mesh.data": n, "swarm.peers": str(n), "swarm.trace": ""}
    chosen: list[Settings] = []
    of_policies = {key for settings in updates.POLICY_SETTINGS.values() for key in settings}
    for policy in updates.LIVE_POLICIES:
        others = of_policies - set(updates.POLICY_SETTINGS.get(policy, {}))
        unset = {f"asynchronous.{key}": None for key in sorted(others)}
        chosen.append({**workers, "asynchronous.table": "", "asynchronous.policy": policy, **unset})
    chosen += [peers, {**peers, "swarm.mode": "emulated", "swarm.delayed": True, "swarm.compress": "int8"}]
    without_options = {f"{OPTIONS}{name}": None for name in space.config.exchange_options}  # both have none
    found = []
    for settings in chosen:
        one = predicted(space, with_settings(space.config, {**settings, **without_options}), ratios)
        assert not isinstance(one, Candidate)
        found.append(one if isinstance(one, str) else one._replace(settings=settings))
    return found


def predicted(space: Space, config: ConfigDict, ratios: StateRatios) -> Candidate | AsyncCandidate | str:
    """Return the prediction for a config on the cluster of a space with its problem, or the reason why there is none.

    ratios: `state_ratios` of the problem, which take a second or more.
    """
    cluster, problem = space.machine.cluster, space.problem
    if config.strategy == "swarm":  # the process with the state, or with the emulation, is one; peers are on all hosts
        cluster, problem = replace(cluster, num_processes=1), problem._replace(num_steps=SWARM_STEPS)
    plan = possible_stages(config, problem, cluster)
    if isinstance(plan, str):
        return plan
    if plan.strategy not in UNRANKED:
        return candidate_of_plan(space, config, plan)
    candidate = _workers_candidate if plan.strategy == "async_data_parallel" else _swarm_candidate
    return candidate(space, config, plan, ratios)


def crowding(space: Space, number: int) -> float:
    """Return how many times as long this number of devices take if they work at the same time."""
    return float(space.machine.together(np.ones(number)))


# ---- workers and a server -------------------------------------------------------------------------------------------


def _workers_candidate(space: Space, config: ConfigDict, plan: Plan[Any], ratios: StateRatios) -> AsyncCandidate | str:
    """Return the prediction for workers that send gradients to a server, or the reason why there is none."""
    policy, numbers = config.asynchronous.policy, plan.details.numbers
    if policy not in updates.LIVE_POLICIES:
        return f"config.asynchronous.policy is {policy!r}; only {' and '.join(updates.LIVE_POLICIES)} are predicted"
    bound = updates.policy_settings(config).get("bound", math.inf)
    params = float(nbytes(space.problem.model.shapes))
    costs = replicas_costs(  # of a gradient, and of an update, on a device alone, whose memory is without the state
        space.layers,
        space.problem.model,
        space.machine,
        {DATA: 1, STAGE: 1},
        config.batch_size // (numbers.num_workers * config.optimizer.accumulation_steps),
        settings_of_replicas(config),
        (),
        StateBytes(0.0, 0.0, params),
        UpdateWork(0.0, ratios.update * params),
    )
    table = simulate_contention(
        numbers,
        _server_times(space, config, plan, costs),
        NUM_STEPS * numbers.num_workers,
        bound=bound,
        crowding=cache(partial(crowding, space)),
    )
    counted = table.step >= WARM_UP
    sent, first = [0.0] * len(plan.memory), WARM_UP * numbers.num_workers
    for worker in table.worker[counted].tolist():
        device = numbers.of_worker(worker)
        if device != numbers.server:
            sent[numbers.server] += params / (NUM_STEPS - WARM_UP)  # the weights
            sent[device] += params / (NUM_STEPS - WARM_UP)  # the gradient
    with_bound = f" with bound {bound}" if policy == "ssp" else ""
    held = _device_bytes(space, plan, table, costs)
    return AsyncCandidate(
        f"{policy}{with_bound}, {format_count(numbers.num_workers, 'worker')}",
        {},
        # The time in which as many gradients finish as a step has.
        float((table.finish[-1] - table.finish[first - 1]) / (len(table.finish) - first) * numbers.num_workers),
        float(table.staleness[counted].mean()),
        int(table.staleness[counted].max()),
        tuple(sent),
        held,
        max(held) <= space.usable_bytes,
    )


def _server_times(space: Space, config: ConfigDict, plan: Plan[Any], costs: StepCosts) -> ServerTimes:
    """Return the times of workers and server. The delays of the config are relative to the time of a gradient."""
    source: Any = plan.decision.source
    delays, workers = source.delays, plan.details.numbers.num_workers
    unit = (costs.seconds - costs.update) / mean_compute_time(delays)
    draws = compute_times(delays._replace(slowdown=1.0), workers, config.seed)
    arrays = jax.tree.leaves(space.problem.model.shapes)
    message = space.machine.collective(Traffic("copy", "float32", DATA, nbytes(arrays), len(arrays)), plan.axes)
    return ServerTimes(
        [(unit * seconds for seconds in of_worker) for of_worker in draws],
        (*(1.0,) * (workers - 1), delays.slowdown),
        pull=message,
        push=message,
        update=costs.update + space.machine.started(1),
    )


def _device_bytes(space: Space, plan: Plan[Any], table: UpdateTable, costs: StepCosts) -> tuple[float, ...]:
    """Return the bytes of each device: the state of the table's run, and a gradient, computed by it or that arrives."""
    details, params = plan.details, nbytes(space.problem.model.shapes)
    like = abstract_state(space.problem.model, details.optimizer)
    memory = state_memory(server_layouts(like, details.mitigations, table, details.numbers))
    computing = set(details.numbers.of_workers)
    return tuple(
        sum(parts.values()) + (costs.nbytes if device in computing else params) for device, parts in enumerate(memory)
    )


# ---- swarm ----------------------------------------------------------------------------------------------------------


def _swarm_candidate(space: Space, config: ConfigDict, plan: Plan[Any], ratios: StateRatios) -> AsyncCandidate | str:
    """Return the prediction for a swarm with a peer on each device, or the reason why there is none."""
    s = config.swarm
    source: Any = plan.decision.source
    peers = source.peers or [SwarmPeer(f"p{number}") for number in range(int(s.peers))]
    if len(peers) > space.num_devices:
        return f"config.swarm.peers is {s.peers!r}; it must be at most {space.num_devices}, the number of devices"
    stages, workload, sizes = swarms.plan_stages(config, space.problem)
    layers = space.layers.profile(config.batch_size // swarms.swarm_microbatches(config), "none")
    of_stages = [layers[first:end] for first, end in itertools.pairwise(stages.bounds)]
    forward = tuple(sum(layer.forward_s for layer in stage) + space.machine.started(1) for stage in of_stages)
    backward = (sum(layer.backward_s for layer in stage) for stage in of_stages)
    workload = workload._replace(
        forward=forward,
        backward=tuple(map(sum, zip(forward, backward, strict=True))),  # which computes the forward pass again
        state_bytes=workload.gradient_bytes * (1 + ratios.optimizer),
    )
    settings = swarms.swarm_settings(config, SWARM_STEPS)
    try:
        run = _run_crowded(space, linked(space, peers), workload, source.trace, settings)
    except UserError as error:
        return f"config.swarm: the failures must let each stage have a peer for long enough, but {error}"
    update = space.machine.moved(ratios.update * workload.gradient_bytes, 1)
    seconds = (run.update_times[-1] - run.update_times[SWARM_WARM_UP - 1]) / (SWARM_STEPS - SWARM_WARM_UP)
    copies = 2 + ratios.optimizer + s.delayed  # parameters, gradients, optimizer and older parameters
    held = _peer_bytes(
        space, config, stages.bounds, [copies * gradient for gradient in sizes.gradients], run, len(peers)
    )
    changes = ", delayed" * s.delayed + f", {s.compress} messages" * (s.compress != "none")
    return AsyncCandidate(
        f"swarm, {format_count(len(peers), 'peer')} in {format_count(stages.num_stages, 'stage')}{changes}",
        {},
        float(seconds) + update,
        float(s.delayed),
        int(s.delayed),
        _peer_traffic(run, sizes, len(peers)),
        held,
        max(held) <= space.usable_bytes,
    )


def linked(space: Space, peers: Sequence[SwarmPeer]) -> list[SwarmPeer]:
    """Return peers with the links of the cluster, or with their own ones where those are slower."""
    axes = {DATA: space.num_devices, STAGE: 1}
    sends = partial(Traffic, "copy", "float32", DATA)
    gigabyte, message = (space.machine.collective(one, axes) for one in (sends(1e9, 0), sends(0, 1)))
    bandwidth = 1e9 / gigabyte if gigabyte else math.inf
    return [
        peer._replace(bandwidth=min(peer.bandwidth, bandwidth), latency=max(peer.latency, message / 2))
        for peer in peers
    ]


def _run_crowded(
    space: Space, peers: Sequence[SwarmPeer], workload: Workload, trace: Any, settings: SwarmSettings
) -> SwarmRun:
    """Return the run of peers. If devices share cores, all passes take longer the more peers are busy on average."""
    run = run_swarm(peers, workload, trace, settings)
    if crowding(space, len(peers)) == 1.0:
        return run
    for _ in range(CROWDED_ROUNDS):
        busy = float((run.table.finish - run.table.start).sum()) / run.update_times[-1]
        factor = float(np.interp(busy, range(1, len(peers) + 1), [crowding(space, n + 1) for n in range(len(peers))]))
        forward, backward = (tuple(factor * seconds for seconds in passes) for passes in workload[:2])
        run = run_swarm(peers, workload._replace(forward=forward, backward=backward), trace, settings)
    return run


def _peer_traffic(run: SwarmRun, sizes: StageSizes, num_peers: int) -> tuple[float, ...]:
    """Return the bytes that each peer sends in a step, on average: messages, and rings that average gradients."""
    sent = [0.0] * num_peers
    for action in itertools.chain.from_iterable(run.actions):
        if action.kind in RECEIVE:
            sent[action.source] += sizes.messages[action.stage - (action.kind == RECEIVE_INPUT)]
    for groups in run.groups:
        for group, gradient in zip(groups, sizes.gradients, strict=True):
            for peer in group:
                sent[peer] += ring_sends(RING_PASSES["all-reduce"], len(group), gradient)[0]
    return tuple(nbytes / len(run.actions) for nbytes in sent)


def _peer_bytes(
    space: Space, config: ConfigDict, bounds: Sequence[int], states: Sequence[float], run: SwarmRun, num_peers: int
) -> tuple[float, ...]:
    """Return the bytes of each peer at its last stage: `states` of the stage, inputs that it holds, and a pass.

    A stage without other peers holds the inputs of all microbatches of a step, and other stages equal parts of them.
    """
    size, number = config.batch_size // swarms.swarm_microbatches(config), swarms.swarm_microbatches(config)
    layers, memory = space.layers.profile(size, "none"), space.layers.memory(size, "none", is_split=False)
    stage_of = {peer: stage for peer, stage, *_ in run.service}
    held = [0.0] * num_peers
    for peer, stage in stage_of.items():
        first, end = bounds[stage], bounds[stage + 1]
        inputs = (
            math.ceil(number / list(stage_of.values()).count(stage)) * layers[first - 1].output_bytes if first else 0
        )
        working = sum(of.computed + of.narrowed for of in memory[first:end]) + layers[end - 1].output_bytes
        held[peer] = states[stage] + inputs + working
    return tuple(held)
