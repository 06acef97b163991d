"""Predicts the time of a step of a pipeline from the costs of its layers and of the cluster.

All devices step through the clocks of the table together; or, if the stages are dispatched, each action starts as soon
as its inputs have arrived and the host has enqueued it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpar.choose.costs.layer_programs import stash_spans
from jaxpar.choose.costs.layers import LayerWork
from jaxpar.choose.costs.machine import Machine
from jaxpar.choose.costs.memory import PackedBytes, StateBytes, largest_transfer, pipeline_bytes, stashes_of
from jaxpar.choose.costs.step import CASTS, HIDDEN_BETWEEN_PRODUCTS, StepCosts, exposed_of_layers, sent_by_layers
from jaxpar.core.mesh import STAGE
from jaxpar.core.plan import Traffic
from jaxpar.core.ring import PERMUTE
from jaxpar.strategies.pipeline.executor.dispatch_costs import num_calls
from jaxpar.strategies.pipeline.executor.enqueue import ENQUEUE_SECONDS
from jaxpar.strategies.pipeline.executor.stage_programs import last_joins_f
from jaxpar.strategies.pipeline.schedules import LOCKSTEP
from jaxpar.strategies.pipeline.tables.periodic import num_in_flight, unroll
from jaxpar.strategies.pipeline.tables.simulate import Times, action_graph, end_times
from jaxpar.strategies.pipeline.tables.table import StageDevices, Table

CASTS_OF_ACTION = CASTS / 2  # of the weights that an action of a pipeline reads
# Bytes that a lockstep step moves to clear, pack, copy and unpack gradients, for each byte of a device's gradients: of
# 8-layer GPTs compiled for H100s, 12 on 2 stages (zero1), and 24 on 4 stages whose first and last share an array.
PACKING = 12.0
COPIED_OUT = 0.5  # the share of the arrays of a stash that kernels of their own copy out of it, in lockstep
# Kernels that an update of a stage launches for each array: two more than that of replicas, to average gradients and to
# unpack them. Of BERT base, compiled for H100s.
STAGE_UPDATE_KERNELS = 4


class PipelineStep(NamedTuple):
    """A step of a pipeline, whose costs are predicted."""

    work: LayerWork  # for a microbatch of a replica
    machine: Machine
    axes: Mapping[str, int]  # sizes of the mesh axes
    table: Table
    bounds: Sequence[int]  # first layer of each stage, and the number of layers
    traffic: Sequence[Traffic]  # what a device sends in the step


class ActionCosts(NamedTuple):
    """The costs of the actions of a pipeline on its devices, before gradients are exchanged."""

    seconds: float  # until all actions and transfers are done
    compute: float  # computing of the busiest device
    waiting: float  # its waiting for other stages
    exposed: float  # transfers, and waiting for the other devices of a group
    executor: str


def action_costs(step: PipelineStep, executor: str = LOCKSTEP) -> ActionCosts:
    """Return the costs of the actions of a step; of a step in the steady state, if it never drains."""
    work, machine, axes, table, bounds, traffic = step
    devices = math.prod(axes.values())
    transfer = send_seconds(machine, largest_transfer(work.layers, list(pairwise(bounds))), axes)
    times = stage_times(work, bounds, machine, devices, executor, has_flush=not table.period)
    busy = clock_seconds(table, times).sum(axis=0)
    # Actions wait for the other devices of a group.
    between = sum(machine.collective(one, axes) for one in traffic if sent_by_layers(one))
    between *= 1 - HIDDEN_BETWEEN_PRODUCTS if machine.overlaps else 1.0
    slowdown = 1 + between / max(float(busy.mean()), 1e-12)
    times = Times(*((slowdown * np.array(of_stages)).tolist() for of_stages in times))
    compute, working = float(busy.max()), slowdown * float(busy.max())
    total, transfers = actions_seconds(table, times, transfer, machine, devices // table.num_devices, executor)
    exposed, waiting = transfers + working - compute, max(total - working, 0.0)
    return ActionCosts(total + transfers, compute, waiting, exposed, executor)


def pipeline_costs(
    step: PipelineStep,
    actions: ActionCosts,
    states: Sequence[StateBytes],
    packed: PackedBytes,
    update_bytes: float,
    sent_in_actions: Sequence[str] = (),
) -> StepCosts:
    """Return the costs of a pipeline with an exchange of gradients.

    actions: see `action_costs`; states: by device; packed: of a device in lockstep; update_bytes: what an update moves
    on the fullest device; sent_in_actions: the kinds of collectives that replicas send for each layer in the actions.
    """
    work, machine, axes, table, bounds, traffic = step
    devices = math.prod(axes.values())
    others = [one for one in traffic if one.axis != STAGE and not sent_by_layers(one)]
    seconds_of: dict[str, float] = defaultdict(float)
    for one in others:
        seconds_of[one.kind] += machine.collective(one, axes)
    if machine.overlaps and sent_in_actions:
        in_actions = {kind: seconds_of.pop(kind, 0.0) for kind in sent_in_actions}
        gather, reduce = (in_actions.get(kind, 0.0) for kind in ("all-gather", "reduce-scatter"))
        seconds_of["actions"] = exposed_in_actions(work, table, bounds, gather, reduce)
    exchange = sum(seconds_of.values())
    is_packed = actions.executor == LOCKSTEP
    packing = machine.moved(PACKING * max(of.gradients for of in states) * is_packed, devices)
    if narrows(actions.executor, has_flush=not table.period):
        update_bytes += CASTS_OF_ACTION * _most_on_device(step, [of.narrowed for of in work.memory])
    launched = STAGE_UPDATE_KERNELS * _most_on_device(step, [of.num_weights for of in work.memory])
    update = machine.moved(update_bytes, devices) + machine.launched(launched) + packing
    seconds = machine.started(devices) + actions.seconds + exchange + update
    nbytes, state = pipeline_bytes(work, table, bounds, states, packed, in_lockstep=is_packed)
    exposed = actions.exposed + exchange
    return StepCosts(seconds, actions.compute, actions.waiting, exposed, update, nbytes, state, packing)


def _most_on_device(step: PipelineStep, by_layer: Sequence[float]) -> float:
    """Return the largest sum of a number of each layer over the layers of a device."""
    of_stages = np.add.reduceat(by_layer, step.bounds[:-1])
    return float(of_stages[step.table.stages].sum(axis=1).max())


def exposed_in_actions(work: LayerWork, table: Table, bounds: Sequence[int], gather: float, reduce: float) -> float:
    """Return the exposed seconds of the device that waits longest for what actions send, layer by layer.

    gather, reduce: the seconds of those of the device with the largest parameters.
    """
    weights = np.array([layer.weight_bytes for layer in work.layers])
    seconds = table.num_microbatches * np.array(work.seconds)  # [layer, phase]
    spans = list(pairwise(bounds))
    spans_of_device = [[spans[stage] for stage in stages] for stages in table.stages.tolist()]
    held = [sum(weights[slice(*span)].sum() for span in spans) for spans in spans_of_device]
    exposed = []
    for spans_here, nbytes in zip(spans_of_device, held, strict=True):
        forward, *of_backward = sum(seconds[slice(*span)].sum(axis=0) for span in spans_here)
        backward = sum(of_backward)
        share = nbytes / max(held)
        last = sum(weights[start] for start, _ in spans_here) / nbytes
        gathered = share * gather / 2
        exposed.append(exposed_of_layers(gathered, gathered, share * reduce, forward, backward, backward, last))
    return max(exposed)


def send_seconds(machine: Machine, nbytes: float, axes: Mapping[str, int]) -> float:
    """Return the time in which a stage sends these bytes to the next one."""
    return machine.collective(Traffic(PERMUTE, "", STAGE, nbytes, 1), axes)


def actions_seconds(
    table: Table, times: Times, transfer: float, machine: Machine, replicas: int = 1, executor: str = LOCKSTEP
) -> tuple[float, float]:
    """Return the time of the actions of a step, waiting included, and of the transfers that are added to it.

    times: of F, B and W, by stage; transfer: seconds of one to the next stage; replicas: of the pipeline.
    """
    clocks = clock_seconds(table, times)
    if executor == LOCKSTEP:
        together = float(machine.together(clocks, replicas).sum())
        return together + len(clocks) * machine.clock_seconds, sending_clocks(table) * transfer
    busy = float(machine.together(clocks.sum(axis=0), replicas))  # of devices that share cores
    per_host = machine.cluster.num_devices / machine.cluster.num_processes
    # A host enqueues the programs of the columns of which it has a device.
    enqueue = ENQUEUE_SECONDS * min(per_host / table.num_devices, 1.0) * num_calls(table)
    return max(dispatched_seconds(table, times, transfer), busy, enqueue), 0.0


def dispatched_seconds(table: Table, times: Times, transfer: float) -> float:
    """Return the time of a step if devices wait only for their inputs; of a periodic table, in the steady state."""
    if not table.period:
        return max(_spans(table, times, transfer))
    few, many = (_spans(unroll(table, count * num_in_flight(table)), times, transfer) for count in (4, 8))
    return max(after - before for before, after in zip(few, many, strict=True)) / (4 * num_in_flight(table))


def _spans(table: Table, times: Times, transfer: float) -> list[float]:
    """Return the time from the first start to the last end on each device. times: by stage."""
    graph, orders = action_graph(table, Times(0.0, 0.0, 0.0), transfer)
    by_stage = times.by_kind(table.num_stages, 1)
    durations = [by_stage[stage][kind] for stage, kind in table.actions[["stage", "kind"]].tolist()]
    ends = end_times(graph._replace(durations=durations), orders)
    assert ends is not None, "not a valid table: its devices deadlock"
    return [ends[order[-1]] - ends[order[0]] + durations[order[0]] if order else 0.0 for order in orders]


def narrows(executor: str, *, has_flush: bool) -> bool:
    """Return whether a step narrows the weights once, instead of each action."""
    return executor != LOCKSTEP and has_flush


def stage_times(
    work: LayerWork,
    bounds: Sequence[int],
    machine: Machine,
    devices: int,
    executor: str = LOCKSTEP,
    *,
    has_flush: bool = True,
) -> Times:
    """Return the times of F, B and W by stage, if this number of devices compute at the same time.

    An action adds the gradients of its weights to those of other microbatches, array by array. In lockstep, it also
    copies what it saves into slots of stashes, array by array, and what earlier ones saved out of them. has_flush:
    whether the table has one.
    """
    of_stages = []
    for first, end in pairwise(bounds):
        memory, computed = work.memory[first:end], np.sum(work.seconds[first:end], axis=0)
        # Where arrays are apart, the gradient of a lookup is scattered to where it is added.
        adding = [one for one in range(first, end) if executor == LOCKSTEP or not work.memory[one].is_lookup]
        moved = [0.0, 0.0, 3.0 * sum(work.layers[number].weight_bytes for number in adding)]
        joins_f = end == bounds[-1] and last_joins_f(work.remat, has_flush=has_flush)
        if narrows(executor, has_flush=has_flush):
            moved[0] -= CASTS_OF_ACTION * sum(of.narrowed for of in memory)
            # The gradient of a loss over a vocabulary is computed with the loss.
            moved[1] -= CASTS_OF_ACTION * sum(of.narrowed for of in memory if joins_f or not of.looped)
        if joins_f:  # F is part of B
            computed[0], moved[0] = 0.0, 0.0
        launched = [0.0, 0.0, sum(work.memory[number].num_weights for number in adding)]
        if executor == LOCKSTEP:
            stashes = stashes_of(work, first, end)
            for number, (made, last) in enumerate(stash_spans(3 if len(stashes) > 1 else 2)):
                for phase in range(made, last + 1):
                    moved[phase] += 2.0 * sum(stashes[number].values())
                saving = memory[:1] if work.remat == "full" and made == 0 else memory
                copied = sum(of.num_saved[number] for of in saving)
                launched[made] += copied
                launched[last] += copied * COPIED_OUT
        besides = [
            machine.moved(nbytes, devices) + machine.launched(number)
            for nbytes, number in zip(moved, launched, strict=True)
        ]
        of_stages.append((computed + besides).tolist())
    return Times(*map(list, zip(*of_stages, strict=True)))


def clock_seconds(table: Table, times: Times) -> np.ndarray:
    """Return the time of the actions of each device in each clock, [clock, device]. times: by stage."""
    by_stage = np.array(times.by_kind(table.num_stages, 1))  # [stage, kind]
    number, actions = table.num_clocks, table.actions
    seconds = np.zeros((number, table.num_devices))
    of_actions = by_stage[actions["stage"], actions["kind"]]
    np.add.at(seconds, (actions["clock"] % number, actions["device"]), of_actions)
    return seconds


def sending_clocks(table: Table) -> int:
    """Return the number of clocks after which a device sends a result to another one."""
    devices, number = StageDevices(table.stages), table.num_clocks
    sends = set[int]()
    for clock, device, kind, k, _, stage, *_ in table.actions.tolist():
        if clock % number not in sends and devices.receiver(kind, stage, k) not in (None, device):
            sends.add(clock % number)
    return len(sends)
