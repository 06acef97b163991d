"""Predicts the time of a step of replicas, or of a single device, from the costs of its layers and of the cluster.

A step is the forward and backward pass of each microbatch, the exchange of gradients and the update. On GPUs, links
work at the same time as the GPU: gradients are sent while earlier layers are computed backward, unless a scan over the
layers returns them all at its end; parameters of zero3, and without a loop of zero1 and zero2, are gathered while other
layers compute.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpar.choose.costs.layers import Layers
from jaxpar.choose.costs.machine import Machine, num_collectives
from jaxpar.choose.costs.memory import StateBytes, replica_bytes
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.costs.rates import host_copy_seconds
from jaxpar.choose.costs.step import (
    CASTS,
    HIDDEN_BETWEEN_PRODUCTS,
    StepCosts,
    UpdateWork,
    exposed_of_layers,
    sent_by_layers,
)
from jaxpar.core.mesh import DATA
from jaxpar.core.plan import COPY, Traffic
from jaxpar.models.model import Model
from jaxpar.models.options import scans_layers

# Bytes that a scan over the layers moves in addition, for each byte of the stacks of what layers save: the difference
# between compiled programs of GPT-2 124M for H100s with and without a scan.
SCAN_OF_STASH = 6.5
# Settings on which the costs of replicas depend, besides those of their exchange.
REPLICA_KEYS = ("optimizer.accumulation_steps", "model.remat", "model.scan_layers")


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
    packs_layers: bool = False,
    scatters_layers: bool = False,
    sent_alone: Collection[str] = (),
) -> StepCosts:
    """Return the costs of data parallelism, or of a single device, with microbatches of `size` examples of a replica.

    traffic, state and moved are what a device sends in a step, holds, and moves in an update. settings: at least those
    of REPLICA_KEYS; gathers_whole: whether all parameters are gathered before the passes (zero1, zero2);
    gathers_layers: whether they are gathered layer by layer (zero3), with packs_layers each in one message;
    scatters_layers: whether a scan scatters the gradients layer by layer (zero2); sent_alone: the kinds of collectives
    that are sent when nothing can be computed.
    On a tensor or context axis, layers and model are those of a device of a group, which is a replica.
    """
    accumulation, remat, scan_layers = (settings[key] for key in REPLICA_KEYS)
    is_scanned, is_accumulated = scans_layers(scan_layers, remat) and machine.overlaps, accumulation > 1
    by_layer = {"gathers_layers": gathers_layers, "scatters_layers": scatters_layers}
    moving = {"gathers_whole": gathers_whole, **by_layer}
    # Without a scan, XLA on GPUs computes again long before the backward pass needs it, and so saves nothing.
    saved = remat if is_scanned or not machine.overlaps else "none"
    flags = {"is_scanned": is_scanned, "is_accumulated": is_accumulated, "is_sent": bool(traffic), **moving}
    nbytes = replica_bytes(layers, model, state, size, saved, packs_layers=packs_layers, **flags)
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
