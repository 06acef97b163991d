"""Predicts the memory of a training step on a device, from what each layer holds for its backward pass.

The backward pass goes from the last layer to the first. While it computes a layer, the layers before it hold what their
forward pass has saved, and those after it their gradients. A scan over layers holds the weights of all of them, and
their gradients, in the dtype in which the weights are read.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from operator import or_
from typing import NamedTuple

import numpy as np

from jaxpar.choose.costs.layers import Layers, LayerWork
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.models.model import Model
from jaxpar.strategies.pipeline.tables.periodic import num_in_flight, unroll
from jaxpar.strategies.pipeline.tables.table import Table, W
from jaxpar.strategies.pipeline.tables.validate import peak_handed, peak_in_flight, peak_stashed


class StateBytes(NamedTuple):
    """Bytes of the state on the fullest device: parameters, optimizer, and the gradients that it accumulates.

    With the parameters count their earlier versions and the private state, such as residuals.
    """

    parameters: float
    optimizer: float
    gradients: float


class PackedBytes(NamedTuple):
    """Bytes of the vectors in which a device in lockstep packs what differs between stages."""

    parameters: float
    optimizer: float
    shards: int = 1  # replicas among which an update and the optimizer state are divided (zero1)


def replica_bytes(
    layers: Layers,
    model: Model,
    state: StateBytes,
    size: int,
    remat: str,
    *,
    is_scanned: bool,
    is_accumulated: bool,
    is_sent: bool = False,
    gathers_whole: bool = False,
    gathers_layers: bool = False,
    packs_layers: bool = False,
    scatters_layers: bool = False,
) -> float:
    """Return the bytes of a replica, for microbatches of `size` examples.

    is_scanned: whether equal layers are computed by a scan; is_accumulated: whether the gradients of microbatches are
    added up; is_sent: whether gradients are sent; gathers_whole: whether all parameters are gathered before the step
    (zero1, zero2); gathers_layers: whether they are gathered layer by layer (zero3); packs_layers: whether each layer
    is then one message; scatters_layers: whether a scan scatters the gradients layer by layer (zero2).
    """
    profile = layers.profile(size, remat)
    saved = layers.residuals(size, remat)
    whole = layers.residuals(size, "none")
    # The backward pass of a layer holds, besides what was saved, as much as the layer saves without rematerialization:
    # for gradients, or because it computes it again. The loss of a large vocabulary has computed its gradient in the
    # forward pass, chunk by chunk, in place; not if loops alternate between buffers, as with a scan that gathers.
    in_place = not (gathers_layers and is_scanned)
    working = [
        max(of.looped - min(its.fused, layer.weight_bytes) * in_place, 0.0)
        if of.looped
        else max(of.fused, of.score_gradients + of.probabilities * (remat != "none")) + layer.output_bytes + of.chunked
        for of, its, layer in zip(whole, saved, profile, strict=True)
    ]
    weights = [float(layer.weight_bytes) for layer in profile]
    narrowed = [of.narrowed for of in layers.memory(size, remat, is_split=False)]
    scans: list[range] = []  # for each layer, the layers that are computed with it in one scan, or only its own
    for run in model.runs:
        scans += [run if is_scanned else range(number, number + 1) for number in run]
    share = state.gradients / max(sum(weights), 1.0)
    is_looped = [bool(of.looped) for of in whole]
    of_weights = _Weights(weights, narrowed, scans, is_looped, share, gathers_whole, scatters_layers, remat != "none")
    sums = of_weights.of_gathered_layers(is_packed=packs_layers) if gathers_layers else of_weights.whole()
    has_scan = any(len(scan) > 1 for scan in scans)
    at_end = of_weights.at_end() if is_sent and has_scan and not (gathers_layers or scatters_layers) else 0.0
    kept = [of.saved if len(scan) > 1 else of.fused for of, scan in zip(saved, scans, strict=True)]
    held = [sum(kept[: number + 1]) for number in range(len(kept))]
    peak = max(at_end, *map(sum, zip(held, working, sums, strict=True)))
    return state.parameters + state.optimizer + (state.gradients if is_accumulated else 0.0) + peak


class _Weights(NamedTuple):
    """The weights of the layers of a replica, of which scans stack some."""

    nbytes: Sequence[float]  # of each layer
    narrowed: Sequence[float]  # in the narrower dtype in which it reads them; 0: in their own
    scans: Sequence[range]  # the layers that are computed with it in one scan, or only its own
    is_looped: Sequence[bool]  # whether its gradient is among what is saved, as that of a loss in chunks is
    share: float  # what a device keeps of a scattered gradient
    gathers_whole: bool  # whether all are gathered before the step, in the dtypes in which they are read
    scatters_layers: bool  # whether scans scatter gradients
    computes_again: bool  # whether the backward pass computes layers again

    @property
    def read(self) -> list[float]:
        """The bytes in the dtypes in which layers read them."""
        return [narrow or nbytes for narrow, nbytes in zip(self.narrowed, self.nbytes, strict=True)]

    @property
    def gathered(self) -> list[float]:
        """The bytes that stay if all are gathered: the backward pass needs the first layer only to compute it again."""
        return self.read if self.computes_again else [0.0, *self.read[1:]]

    @property
    def gradients(self) -> list[float]:
        """The bytes of the gradients: a scan stacks them in the dtype in which it reads, or their shards."""
        of_scans = [self.share * nbytes for nbytes in self.nbytes] if self.scatters_layers else self.read
        return self.chosen(of_scans, self.nbytes)

    @property
    def in_scans(self) -> list[float]:
        """The bytes of the layers in scans; 0 for the others."""
        return self.chosen(self.nbytes, [0.0] * len(self.nbytes))

    def chosen(self, of_scans: Sequence[float], others: Sequence[float]) -> list[float]:
        """Return the values of the layers in scans, and the other values of the other layers."""
        return [x if len(scan) > 1 else other for x, other, scan in zip(of_scans, others, self.scans, strict=True)]

    def whole(self) -> list[float]:
        """Return the bytes of copied weights and of gradients that exist while each layer is computed.

        All gradients exist of this layer's scan and of later layers. Before a scan scatters that of a layer, it is
        whole.
        """
        copies = self.gathered if self.gathers_whole else self.chosen(self.read, self.narrowed)
        gradients = self.gradients
        sums = []
        for scan, is_looped, nbytes in zip(self.scans, self.is_looped, self.in_scans, strict=True):
            of_scan = 0.0 if is_looped else sum(gradients[scan.start : scan.stop])
            unscattered = nbytes if self.scatters_layers else 0.0
            sums.append(sum(copies[: scan.stop]) + sum(gradients[scan.stop :]) + of_scan + unscattered)
        return sums

    def at_end(self) -> float:
        """Return the bytes of gradients and of copies after the backward pass.

        Stacks become float32 arrays of single layers; the largest array is copied.
        """
        return sum(self.gradients) + sum(self.in_scans) + max(self.nbytes)

    def of_gathered_layers(self, *, is_packed: bool) -> list[float]:
        """Return the bytes of gathered arrays and of gradients that exist while each layer is computed.

        The arrays of this layer and of the one before are gathered, in the dtype in which they are read, and the
        gradient is whole until it is scattered. The shards of the layers of a scan are stacked, and, unless each layer
        is packed, those of their gradients. The packed gradient of a loss that is computed chunk by chunk is a copy.
        """
        read, stacked = self.read, (1 if is_packed else 2) * self.share * sum(self.in_scans)
        sums = []
        for number, (scan, nbytes) in enumerate(zip(self.scans, self.nbytes, strict=True)):
            gathered = read[number] + (read[number - 1] if number else 0.0)
            whole = nbytes if is_packed or not self.is_looped[number] else 0.0
            sums.append(stacked + gathered + whole + self.share * sum(self.nbytes[scan.stop :]))
        return sums


# ---- pipelines ------------------------------------------------------------------------------------------------------


def pipeline_bytes(
    work: LayerWork,
    table: Table,
    bounds: Sequence[int],
    states: Sequence[StateBytes],
    packed: PackedBytes,
    *,
    in_lockstep: bool = True,
) -> tuple[float, StateBytes]:
    """Return the bytes of the fullest device of a pipeline, and its state. Arguments: see `pipeline_costs`.

    In lockstep, all devices run one program, so each allocates as much as the one that needs most of a kind of array.
    Otherwise, each device allocates what its stages need.
    """
    spans = list(pairwise(bounds))
    never_drains = bool(table.period)
    if never_drains:  # a step begins with microbatches in flight
        table = unroll(table, 3 * num_in_flight(table))
    if in_lockstep:
        state, stashed, kept = max(states, key=sum), stash_bytes(work, table, spans), 0.0
        if never_drains:  # stashes stay during updates
            kept, stashed = stashed, 0.0
        updating = updating_bytes(work, packed, state, has_flush=not never_drains)
        return sum(state) + kept + max(activation_bytes(work, spans, stashed, in_lockstep=True), updating), state
    saved = zip(*(map(Counter.total, stashes_of(work, *span)) for span in spans), strict=True)  # by stash and stage
    stashed_by_device = np.sum([peak(sizes) for peak, sizes in zip(stash_peaks(table), saved, strict=True)], axis=0)
    totals = []
    for device, stages in enumerate(table.stages.tolist()):
        of_device = [spans[stage] for stage in stages]
        stashed = float(stashed_by_device[device])
        activations = activation_bytes(work, of_device, stashed, in_lockstep=False)
        totals.append((sum(states[device]) + activations, states[device]))
    return max(totals)


Spans = Sequence[tuple[int, int]]  # the first layer of each stage, and the one after its last


def activation_bytes(work: LayerWork, spans: Spans, stashed: float, *, in_lockstep: bool) -> float:
    """Return the bytes besides the state of a device that can run each of these stages. stashed: bytes of its stashes.

    A device has two inboxes and two outputs for transfers.
    """
    transfers = 4 * largest_transfer(work.layers, spans)
    return stashed + transfers + working_bytes(work, spans, in_lockstep=in_lockstep)


def updating_bytes(work: LayerWork, packed: PackedBytes, state: StateBytes, *, has_flush: bool) -> float:
    """Return the bytes besides the state of an update in lockstep.

    It computes new vectors, and apart from them the largest layer and the optimizer state of the other layers in
    vectors, which their new parameters need too. Without a flush, it copies parameters and gradients, and unpacks its
    results. If replicas divide it, it first stacks the shards of all gradients; then it computes only its own shards.
    """
    largest, vectors = max(layer.weight_bytes for layer in work.layers), packed.parameters + packed.optimizer
    if packed.shards > 1:
        return state.parameters + (state.parameters + largest) / packed.shards
    if not has_flush:
        return vectors + largest + 3 * state.gradients
    others = max(packed.parameters - largest, 0.0)
    return vectors + largest + (others * packed.optimizer / packed.parameters if others else 0.0)


def largest_transfer(layers: Sequence[LayerProfile], spans: Spans) -> float:
    """Return the bytes of the largest transfer from one of these stages to the next."""
    return max((layers[end - 1].output_bytes for _, end in spans if end < len(layers)), default=0.0)


def gathered_bytes(work: LayerWork) -> float:
    """Return the bytes of the largest layer that a stage gathers, if replicas shard parameters, and reads uncast."""
    memory = zip(work.layers, work.memory, strict=True)
    return max((float(layer.weight_bytes) for layer, of in memory if not of.narrowed), default=0.0)


def scattered_bytes(work: LayerWork) -> float:
    """Return the bytes of the largest gradient that an action scatters to replicas, for whom it is packed first."""
    return max(float(layer.weight_bytes) for layer in work.layers)


def working_bytes(work: LayerWork, spans: Spans, *, in_lockstep: bool) -> float:
    """Return the bytes with which the action of a stage works besides stashes.

    Without rematerialization, an action reads each array of a stash where it is needed: it holds those of one layer and
    its gradient before it is added to the accumulated one, or works on a loss. In lockstep, it first copies all of them
    out of a slot. With rematerialization, it first computes all arrays of a stage again.
    """
    numbers = [number for span in spans for number in range(*span)]
    layers, memory = [work.layers[number] for number in numbers], [work.memory[number] for number in numbers]
    together = max(sum(of.computed for of in work.memory[first:end]) for first, end in spans)
    worked = max(layer.weight_bytes for layer in layers) + together
    if work.remat != "none":
        worked += max(of.score_gradients for of in memory)
    else:
        each = zip(layers, memory, strict=True)
        apart = max(of.looped or layer.weight_bytes + max(of.computed, of.score_gradients) for layer, of in each)
        worked = max(apart, worked) if in_lockstep else apart
    narrowed = [sum(of.narrowed for of in work.memory[first:end]) for first, end in spans]
    narrow = max(narrowed) if in_lockstep else sum(narrowed)  # those of all stages of a device exist
    gathered = max(sum(of.gathered for of in work.memory[first:end]) for first, end in spans)
    return worked + narrow + gathered + max(layer.output_bytes for layer in layers)


def stash_bytes(work: LayerWork, table: Table, spans: Spans) -> float:
    """Return the bytes of the stashes of a device in lockstep, which are equal on all devices.

    In a stash, there is a vector of each dtype, for the stage that saves most in this dtype.
    """
    saved = [stashes_of(work, *span) for span in spans]
    largest = (reduce(or_, of_stages) for of_stages in zip(*saved, strict=True))
    peaks = (float(peak(None).max()) for peak in stash_peaks(table))
    return sum(peak * sum(of_stash.values()) for peak, of_stash in zip(peaks, largest, strict=True))


def stashes_of(work: LayerWork, first: int, end: int) -> list[Counter[str]]:
    """Return the bytes that a stage of these layers saves in each stash, by dtype.

    With remat full, F only saves the input of the stage. What B computes again for W, it saves, such as other inputs.
    """
    of_layers = zip(*(of.stashes for of in work.memory[first:end]), strict=True)
    by_stash: list[list[Counter[str]]] = [[Counter(one) for one in of_stash] for of_stash in of_layers]
    if work.remat == "full":
        from_forward, handed = by_stash[:2], by_stash[2:]
        by_stash = [of[:1] for of in from_forward] + [[*of, *from_forward[1][1:]] for of in handed]
    return [sum(of_stash, Counter()) for of_stash in by_stash]


def stash_peaks(table: Table) -> list[Callable[[Sequence[float] | None], np.ndarray]]:
    """Return for each stash the function from the size of each stage in it to the largest sum, by device.

    Without sizes (None), the sums are numbers of microbatches.
    """
    if splits_backward(table):
        return [partial(peak_in_flight, table), partial(_peak_until_w, table), partial(peak_handed, table)]
    return [partial(_peak_until_w, table)]


def _peak_until_w(table: Table, sizes: Sequence[float] | None) -> np.ndarray:
    return peak_stashed(table, sizes=sizes)


def splits_backward(table: Table) -> bool:
    """Return whether W is separate from B."""
    return bool((table.actions["kind"] == W).any())
