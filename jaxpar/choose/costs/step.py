"""Predicts the time of a training step from the costs of its layers and of the cluster.

A step of replicas is the forward and backward pass of each microbatch, the exchange of gradients and the update. On
GPUs, links work at the same time as the GPU: gradients are sent while earlier layers are computed backward, unless a
scan over the layers returns them all at its end; parameters of zero3, and without a loop of zero1 and zero2, are
gathered while other layers compute. In a pipeline, all devices step through the clocks of the table together; or, if
its stages are dispatched, each action starts as soon as its inputs have arrived and the host has enqueued it.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jaxpar.choose.costs.layer_programs import stash_spans
from jaxpar.choose.costs.layers import Layers, LayerWork
from jaxpar.choose.costs.machine import Machine, num_collectives
from jaxpar.choose.costs.memory import StateBytes, largest_transfer, pipeline_bytes, replica_bytes, stashes_of
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.costs.rates import host_copy_seconds
from jaxpar.core.mesh import CONTEXT, DATA, STAGE, TENSOR
from jaxpar.core.plan import COPY, Traffic
from jaxpar.core.ring import PERMUTE
from jaxpar.models.model import Model
from jaxpar.models.options import scans_layers
from jaxpar.strategies.pipeline.executor.dispatch_costs import num_calls
from jaxpar.strategies.pipeline.executor.enqueue import ENQUEUE_SECONDS
from jaxpar.strategies.pipeline.executor.stage_programs import last_joins_f
from jaxpar.strategies.pipeline.schedules import LOCKSTEP
from jaxpar.strategies.pipeline.tables.periodic import num_in_flight, unroll
from jaxpar.strategies.pipeline.tables.simulate import Times, action_graph, end_times
from jaxpar.strategies.pipeline.tables.table import StageDevices, Table

# Bytes that a scan over the layers moves in addition, for each byte of the stacks of what layers save: the difference
# between compiled programs of GPT-2 124M for H100s with and without a scan.
SCAN_OF_STASH = 6.5
CASTS = 6.0  # bytes that casts of float32 weights in both passes read and write, for each byte in a narrower dtype
CASTS_OF_ACTION = CASTS / 2  # of the weights that an action of a pipeline reads
# The assumed part of the time of collectives between products (tensor axis) that is hidden: for each pair of products,
# the backward pass gathers the positions again while it computes their gradient, and scatters that while it computes
# those of the kernels. For the other three of five collectives, the next operation waits.
HIDDEN_BETWEEN_PRODUCTS = 0.4
# Bytes that a lockstep step moves to clear, pack, copy and unpack gradients, for each byte of a device's gradients: of
# 8-layer GPTs compiled for H100s, 12 on 2 stages (zero1), and 24 on 4 stages whose first and last share an array.
PACKING = 12.0
# Settings on which the costs of replicas depend, besides those of their exchange.
REPLICA_KEYS = ("optimizer.accumulation_steps", "model.remat", "model.scan_layers")


class StepCosts(NamedTuple):
    """The predicted time of a step, in seconds, and the memory of the fullest device."""

    seconds: float  # the whole step
    compute: float  # forward and backward passes of the busiest device
    waiting: float  # waiting of that device for other stages
    exposed: float  # communication during which it does not compute
    update: float  # the update of the parameters, packing included
    nbytes: float  # bytes that the device needs
    # those of them that are state; the others are activations, and what the computation of a layer needs
    state: StateBytes = StateBytes(0.0, 0.0, 0.0)
    packing: float = 0.0  # copies of gradients and parameters into and out of messages

    def overheads(self) -> dict[str, float]:
        """Return the seconds of what is not computing, in disjoint parts: waiting, exposed, packing and update."""
        return {
            "waiting": self.waiting,
            "exposed": self.exposed,
            "packing": self.packing,
            "update": self.update - self.packing,
        }


class UpdateWork(NamedTuple):
    """The bytes that an update moves and holds on a device, and the time to launch it."""

    exchange: float  # bytes that are moved to pack, add up and compress gradients
    update: float  # bytes that the optimizer moves
    from_host: float = 0.0  # bytes of the optimizer state that a step copies from the host, and back
    held: float = 0.0  # those that the device holds meanwhile, besides its part of the state: `Plan.update_bytes`
    launching: float = 0.0  # seconds in which a GPU launches its kernels


def replicas_costs(
    layers: Layers,
    model: Model,
    machine: Machine,
    axes: Mapping[str, int],
    size: int,
    settings: Mapping[str, Any],
    traffic: Sequence[Traffic],
    state: StateBytes,
    moved: UpdateWork,
    *,
    gathers_whole: bool = False,
    gathers_layers: bool = False,
    scatters_layers: bool = False,
    sent_alone: Collection[str] = (),
) -> StepCosts:
    """Return the costs of data parallelism, or of a single device, with microbatches of `size` examples of a replica.

    traffic, state and moved are what a device sends in a step, holds, and moves in an update. settings: at least those
    of REPLICA_KEYS; gathers_whole: whether all parameters are gathered before the passes (zero1, zero2);
    gathers_layers: whether they are gathered layer by layer (zero3); scatters_layers: whether a scan scatters the
    gradients layer by layer (zero2); sent_alone: the kinds of collectives that are sent when nothing can be computed.
    On a tensor or context axis, layers and model are those of a device of a group, which is a replica.
    """
    accumulation, remat, scan_layers = (settings[key] for key in REPLICA_KEYS)
    is_scanned, is_accumulated = scans_layers(scan_layers, remat) and machine.overlaps, accumulation > 1
    by_layer = {"gathers_layers": gathers_layers, "scatters_layers": scatters_layers}
    moving = {"gathers_whole": gathers_whole, **by_layer}
    # Without a scan, XLA on GPUs computes again long before the backward pass needs it, and so saves nothing.
    saved = remat if is_scanned or not machine.overlaps else "none"
    flags = {"is_scanned": is_scanned, "is_accumulated": is_accumulated, "is_sent": bool(traffic), **moving}
    nbytes = replica_bytes(layers, model, state, size, saved, **flags)
    nbytes = max(nbytes, state.parameters + state.optimizer + moved.held)
    # The backward pass does not compute the loss again.
    profile = [*layers.profile(size, remat)[:-1], layers.profile(size, "none")[-1]]
    narrowed = [of.narrowed for of in layers.memory(size, remat, is_split=False)]
    scanned = [number for run in model.runs if len(run) > 1 for number in run] if is_scanned else []
    n, devices = axes[DATA], math.prod(axes.values())
    alone = sum(layer.forward_s + layer.backward_s for layer in profile)
    alone += _moving_weights(machine, profile, narrowed, scanned, n, **moving)
    if is_accumulated:
        alone += machine.moved(3 * state.gradients, 1)
    passes = _Passes(profile, accumulation, accumulation * float(machine.together(np.array([alone]), devices)))
    by_host = sum(machine.collective(one, axes) for one in traffic if one.kind == COPY)
    copied = 2 * (by_host + host_copy_seconds(machine.cluster, moved.from_host))  # there and back
    apart = [one for one in traffic if one.kind in sent_alone and not sent_by_layers(one)]
    others = [one for one in traffic if one.kind != COPY and one not in apart]
    is_late = is_scanned and not any(by_layer.values())
    gathers = 2 if gathers_layers else int(gathers_whole)
    exposed = copied + sum(machine.collective(one, axes) for one in apart)
    exposed += _exposed(machine, axes, others, passes, gathers=gathers, is_late=is_late)
    update = machine.moved(moved.exchange + moved.update, devices) + moved.launching
    seconds = machine.started(devices) + passes.compute + exposed + update
    held = state if is_accumulated else state._replace(gradients=0.0)
    packing = machine.moved(moved.exchange, devices)
    return StepCosts(seconds, passes.compute, 0.0, exposed, update, nbytes, held, packing)


def _moving_weights(
    machine: Machine,
    profile: Sequence[LayerProfile],
    narrowed: Sequence[float],
    scanned: Sequence[int],
    num_replicas: int,
    *,
    gathers_whole: bool,
    gathers_layers: bool,
    scatters_layers: bool,
) -> float:
    """Return the seconds in which scans copy stacks, less those of casts in `profile` that a scan or gathering saves.

    narrowed: bytes of the weights that each layer reads in a narrower dtype; scanned: numbers of the layers in scans.
    """
    seconds = machine.moved(SCAN_OF_STASH * sum(profile[number].stash_bytes for number in scanned), 1)
    # Weights are read and written to a stack in the dtype in which layers read them, and gradients come from one.
    of_weights = sum(profile[number].weight_bytes for number in scanned)
    of_stack = sum(narrowed[number] or profile[number].weight_bytes for number in scanned)
    # Weights are cast before they are gathered.
    uncast = CASTS * (1 - 1 / num_replicas) * sum(narrowed) if machine.overlaps else 0.0
    if gathers_layers:
        return seconds + machine.moved(4 * of_weights / num_replicas, 1) - machine.moved(uncast, 1)
    gradients = 1 / (num_replicas if scatters_layers else 1)
    of_scan = CASTS * sum(narrowed[number] for number in scanned)
    if gathers_whole:
        of_gradients = (of_weights + of_stack) * gradients
        return seconds + machine.moved(2 * of_stack + of_gradients, 1) - machine.moved((uncast + of_scan) / 2, 1)
    return seconds + machine.moved((of_weights + of_stack) * (1 + gradients), 1) - machine.moved(of_scan, 1)


class _Passes(NamedTuple):
    """The forward and backward passes of a step of replicas."""

    profile: Sequence[LayerProfile]  # of a microbatch
    number: int  # of microbatches
    compute: float  # seconds in which a device computes all of them


def _exposed(
    machine: Machine,
    axes: Mapping[str, int],
    traffic: Sequence[Traffic],
    passes: _Passes,
    *,
    gathers: int,
    is_late: bool,
) -> float:
    """Return the exposed seconds of what is sent during passes.

    gathers: the number of passes in which parameters are gathered; is_late: whether a scan leaves gradients to its end.
    """
    profile = passes.profile
    of_layers = [one for one in traffic if sent_by_layers(one)]
    gathered = [one for one in traffic if one not in of_layers and gathers and one.kind == "all-gather"]
    reduced = [one for one in traffic if one not in of_layers and one not in gathered]
    between, gather, reduce = (
        sum(machine.collective(one, axes) for one in kind) for kind in (of_layers, gathered, reduced)
    )
    if not machine.overlaps:
        return between + gather + reduce
    forward, backward = sum(layer.forward_s for layer in profile), sum(layer.backward_s for layer in profile)
    beside = min(HIDDEN_BETWEEN_PRODUCTS * between, passes.number * backward)  # one collective runs at a time
    hidden = sum(layer.backward_s for layer in profile[:1]) if is_late else backward - beside / passes.number
    # Nothing is left to compute when the gradients of the first layer, and the others in their message, are sent.
    weights = sum(layer.weight_bytes for layer in profile)
    number = sum(num_collectives(one, axes[one.axis]) for one in reduced)
    last = max(profile[0].weight_bytes / max(weights, 1.0), 1 / number) if number else 1.0
    of_forward = passes.compute * forward / (forward + backward)
    of_backward = passes.compute - of_forward - beside
    gather /= max(gathers, 1)
    again = gather if gathers == 2 else 0.0
    return exposed_of_layers(gather, again, reduce, of_forward, of_backward, hidden, min(last, 1.0)) + between - beside


def exposed_of_layers(
    gather: float, again: float, reduce: float, forward: float, backward: float, hidden: float, end: float
) -> float:
    """Return the exposed seconds of collectives that are sent for each layer while a device computes others.

    gather, again, reduce: the seconds of the gathers in the forward pass, of those in the backward pass, and of all
    reductions, which use the same links; forward, backward: of computing; hidden: those of computing while gradients
    are sent; end: the share of the first layers, which are gathered before anything can be computed, and whose
    gradients are sent when nothing is left to compute.
    """
    of_backward = max(again + reduce - backward, reduce - hidden, reduce * end)
    return max(gather - forward, gather * end) + of_backward


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
    packed_bytes: float,
    update_bytes: float,
    sent_in_actions: Sequence[str] = (),
) -> StepCosts:
    """Return the costs of a pipeline with an exchange of gradients.

    actions: see `action_costs`; states: by device; packed_bytes: of the parameters and of the optimizer on a device,
    which lockstep packs in vectors; update_bytes: what an update moves on the fullest device; sent_in_actions: the
    kinds of collectives that replicas send for each layer in the actions.
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
        narrowed = [sum(of.narrowed for of in work.memory[first:end]) for first, end in pairwise(bounds)]
        update_bytes += CASTS_OF_ACTION * max(sum(narrowed[stage] for stage in stages) for stages in table.stages)
    update = machine.moved(update_bytes, devices) + packing
    seconds = machine.started(devices) + actions.seconds + exchange + update
    nbytes, state = pipeline_bytes(work, table, bounds, states, packed_bytes * is_packed, in_lockstep=is_packed)
    exposed = actions.exposed + exchange
    return StepCosts(seconds, actions.compute, actions.waiting, exposed, update, nbytes, state, packing)


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


def sent_by_layers(sent: Traffic) -> bool:
    """Return whether layers wait for a collective: on the context axis, gradients are summed after them."""
    return sent.axis == TENSOR or (sent.axis == CONTEXT and sent.kind != "all-reduce")


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

    An action adds the gradients of its weights to those of other microbatches. In lockstep, it also copies what it
    saves into slots of stashes, and what earlier ones saved out of them. has_flush: whether the table has one.
    """
    of_stages = []
    for first, end in pairwise(bounds):
        memory, computed = work.memory[first:end], np.sum(work.seconds[first:end], axis=0)
        moved = [0.0, 0.0, 3.0 * sum(one.weight_bytes for one in work.layers[first:end])]
        joins_f = end == bounds[-1] and last_joins_f(work.remat, has_flush=has_flush)
        if narrows(executor, has_flush=has_flush):
            moved[0] -= CASTS_OF_ACTION * sum(of.narrowed for of in memory)
            # The gradient of a loss over a vocabulary is computed with the loss.
            moved[1] -= CASTS_OF_ACTION * sum(of.narrowed for of in memory if joins_f or not of.looped)
        if joins_f:  # F is part of B
            computed[0], moved[0] = 0.0, 0.0
        if executor == LOCKSTEP:
            stashes = stashes_of(work, first, end)
            for (made, last), saved in zip(stash_spans(3 if len(stashes) > 1 else 2), stashes, strict=True):
                for phase in range(made, last + 1):
                    moved[phase] += 2.0 * sum(saved.values())
        of_stages.append((computed + [machine.moved(nbytes, devices) for nbytes in moved]).tolist())
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
