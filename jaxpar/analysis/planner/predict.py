"""Predicts the time of a training step and the memory that it needs, from the costs of its layers and of the cluster.

A step of replicas is the forward and backward pass of each microbatch, the exchange of gradients and the update. On
GPUs, links work at the same time as the GPU: gradients are sent while earlier layers are computed backward, unless a
scan over the layers returns them all at its end; and parameters of zero3 are gathered while other layers compute. In a
pipeline, all devices step through the clocks of the table together.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpar.analysis.planner.layers import LayerMemory
from jaxpar.analysis.planner.machine import Machine, num_collectives
from jaxpar.core.plan import COPY, Traffic
from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.pipeline.tables.simulate import Times
from jaxpar.pipeline.tables.table import StageDevices, Table, W
from jaxpar.pipeline.tables.validate import peak_handed, peak_in_flight, peak_stashed

# Bytes that a scan over the layers moves in addition, for each byte of the stacks of what layers save and of their
# weights: compiled programs of GPT-2 124M for H100s with and without a scan differ by this much.
SCAN_OF_STASH, SCAN_OF_WEIGHTS = 6.5, 16.0
# The same for the parameters that zero3 packs into vectors, which it sends, and unpacks: from compiled GPTs of 1 and 7
# billion parameters. Its stacks are those of the shards.
GATHER_PASSES = 4.0


class StepCosts(NamedTuple):
    """The predicted time of a step, in seconds, and the memory of the fullest device.

    Attributes:
      seconds: the whole step.
      compute: forward and backward passes of the busiest device.
      waiting: waiting of that device for other stages.
      exposed: communication during which it does not compute.
      update: the update of the parameters.
      nbytes: bytes that the device needs.
    """

    seconds: float
    compute: float
    waiting: float
    exposed: float
    update: float
    nbytes: float

    def limit(self) -> str:
        """Return what takes the longest besides computing: waiting, exposed or update."""
        return max(("waiting", "exposed", "update"), key=lambda name: float(getattr(self, name)))


class StateBytes(NamedTuple):
    """Bytes of the state on the fullest device: parameters, optimizer, and the gradients that it accumulates."""

    parameters: float
    optimizer: float
    gradients: float


class UpdateBytes(NamedTuple):
    """Bytes that an update moves on a device: what packs, adds up and compresses gradients, and the optimizer."""

    exchange: float
    update: float


def replicas_costs(
    layers: Sequence[LayerProfile],
    machine: Machine,
    axes: Mapping[str, int],
    accumulation: int,
    traffic: Sequence[Traffic],
    state: StateBytes,
    moved: UpdateBytes,
    nbytes: float,
    *,
    is_scanned: bool,
    gathers_layers: bool,
) -> StepCosts:
    """Return the costs of data parallelism, or of a single device.

    Args:
      layers: the layers, for the examples of a microbatch of a replica.
      machine: the cluster.
      axes: sizes of the mesh axes.
      accumulation: microbatches per step.
      traffic: what a device sends in a step.
      state: the state on a device.
      moved: what an update moves on a device.
      nbytes: bytes that a device needs.
      is_scanned: whether the blocks are computed by a scan.
      gathers_layers: whether the parameters are gathered layer by layer (zero3).
    """
    n = axes[DATA]
    forward, backward = (sum(values) for values in zip(*((x.forward_s, x.backward_s) for x in layers), strict=True))
    stash, weights = sum(layer.stash_bytes for layer in layers), sum(layer.weight_bytes for layer in layers)
    alone = forward + backward
    if is_scanned:
        stacked = weights / n if gathers_layers else weights
        alone += machine.moved(SCAN_OF_STASH * stash + SCAN_OF_WEIGHTS * stacked, 1)
    if gathers_layers:
        alone += machine.moved(GATHER_PASSES * weights, 1) if machine.overlaps else 0.0
    if accumulation > 1:
        alone += machine.moved(3 * state.gradients, 1)
    compute = accumulation * float(machine.together(np.array([alone]), n))
    gathered = [one for one in traffic if gathers_layers and one.kind == "all-gather"]
    gather = sum(machine.collective(one, axes) for one in gathered)
    copied = 2 * sum(machine.collective(one, axes) for one in traffic if one.kind == COPY)  # there and back
    reduced = [one for one in traffic if one.kind != COPY and one not in gathered]
    reduce, number = (
        sum(machine.collective(one, axes) for one in reduced),
        sum(num_collectives(one, n) for one in reduced),
    )
    exposed = gather + reduce + copied
    if machine.overlaps:
        hidden = sum(layer.backward_s for layer in layers[:1]) if is_scanned else backward
        # Nothing is left to compute when the gradients of the first layer, and the others in their message, are sent.
        last = max(layers[0].weight_bytes / max(weights, 1.0), 1 / number) if number else 1.0
        exposed = max(gather - compute, 0.0) + max(reduce - hidden, reduce * min(last, 1.0)) + copied
    update = machine.moved(moved.exchange + machine.update_repeats * moved.update, n)
    seconds = machine.started(n) + compute + exposed + update
    return StepCosts(seconds, compute, 0.0, exposed, update, nbytes)


def pipeline_costs(
    layers: Sequence[LayerProfile],
    memory: Sequence[LayerMemory],
    machine: Machine,
    axes: Mapping[str, int],
    table: Table,
    bounds: Sequence[int],
    traffic: Sequence[Traffic],
    states: Sequence[StateBytes],
    packed_bytes: float,
    update_bytes: float,
    *,
    remat: str,
) -> StepCosts:
    """Return the costs of a pipeline; of a step in the steady state, if it never drains.

    Args:
      layers: the layers, for a microbatch of a replica.
      memory: what they hold in addition.
      machine: the cluster.
      axes: sizes of the mesh axes.
      table: the schedule.
      bounds: first layer of each stage, and the number of layers.
      traffic: what a device sends over the data axis in a step.
      states: the state on each device.
      packed_bytes: bytes of the parameters and of the optimizer on a device that are packed in vectors.
      update_bytes: what an update moves on the fullest device.
      remat: none, dots or full.
    """
    stages = [layers[first:end] for first, end in pairwise(bounds)]
    sent = largest_transfer(layers, bounds)
    clocks = clock_seconds(table, stage_times(stages))
    replicas = axes[DATA]
    of_clocks = machine.together(clocks, replicas)
    compute = float(clocks.sum(axis=0).max())
    sends = sending_clocks(table)
    transfer = machine.collective(Traffic("collective-permute", "", STAGE, sent, 1), axes)
    transfers = sends * transfer
    exchange = sum(machine.collective(one, axes) for one in traffic if one.axis == DATA)
    update = machine.moved(machine.update_repeats * update_bytes, table.num_devices * replicas)
    clocks_s = float(of_clocks.sum()) + len(clocks) * machine.clock_seconds
    exposed = exchange + transfers
    fullest = max(states, key=sum)
    computing = stash_bytes(table, layers, memory, bounds, sent, remat) + working_bytes(layers, memory, bounds, remat)
    updating = packed_bytes + max(layer.weight_bytes for layer in layers)
    nbytes = sum(fullest) + max(computing, updating)
    started = machine.started(table.num_devices * replicas)
    return StepCosts(
        started + clocks_s + exposed + update, compute, max(clocks_s - compute, 0.0), exposed, update, nbytes
    )


def largest_transfer(layers: Sequence[LayerProfile], bounds: Sequence[int]) -> float:
    """Return the bytes of the largest transfer between stages."""
    return max((layers[end - 1].output_bytes for end in bounds[1:-1]), default=0.0)


def stage_times(stages: Sequence[Sequence[LayerProfile]]) -> Times:
    """Return the times of F, B and W by stage. B and W each take half of a backward pass."""
    half = [sum(layer.backward_s for layer in stage) / 2 for stage in stages]
    return Times([sum(layer.forward_s for layer in stage) for stage in stages], half, half)


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


def working_bytes(
    layers: Sequence[LayerProfile], memory: Sequence[LayerMemory], bounds: Sequence[int], remat: str
) -> float:
    """Return the bytes with which the action of a stage works besides stashes, on a device; all run one program.

    Without rematerialization, an action reads each array of a stash where it is needed: it holds those of one layer and
    its gradient before it is added to the accumulated one, or works on a loss. Otherwise, it first computes all arrays
    of a stage again.

    Args:
      layers: as in `pipeline_costs`.
      memory: as in `pipeline_costs`.
      bounds: as in `pipeline_costs`.
      remat: none, dots or full.
    """
    stages = [memory[first:end] for first, end in pairwise(bounds)]
    if remat == "none":
        each = zip(layers, memory, strict=True)
        worked = max(of.looped or layer.weight_bytes + of.computed for layer, of in each)
    else:
        recomputed = max(sum(of.computed for of in stage) for stage in stages)
        worked = max(layer.weight_bytes for layer in layers) + recomputed
    narrowed = max(sum(of.narrowed for of in stage) for stage in stages)
    return worked + narrowed + max(layer.output_bytes for layer in layers)


def stash_bytes(
    table: Table,
    layers: Sequence[LayerProfile],
    memory: Sequence[LayerMemory],
    bounds: Sequence[int],
    sent: float,
    remat: str,
) -> float:
    """Return the bytes of stashes and transfers on a device. It has two inboxes and two outputs.

    With remat full, a stage saves only its input, that of its first layer.

    Args:
      table: the schedule.
      layers: as in `pipeline_costs`.
      memory: as in `pipeline_costs`.
      bounds: as in `pipeline_costs`.
      sent: bytes of the largest transfer.
      remat: none, dots or full.
    """
    ranges = list(pairwise(bounds))

    def largest(nbytes: Sequence[float]) -> float:
        return max(nbytes[first] if remat == "full" else sum(nbytes[first:end]) for first, end in ranges)

    if splits_backward(table):
        peaks = peak_in_flight(table), peak_stashed(table), peak_handed(table)
        by_span = zip(*(of.split for of in memory), strict=True)
        stashes = sum(float(peak.max()) * largest(of_span) for peak, of_span in zip(peaks, by_span, strict=True))
    else:
        stashes = float(peak_stashed(table).max()) * largest([layer.stash_bytes for layer in layers])
    return stashes + 4 * sent


def splits_backward(table: Table) -> bool:
    """Return whether W is separate from B."""
    return bool((table.actions["kind"] == W).any())
