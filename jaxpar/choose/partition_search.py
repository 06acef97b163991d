"""Finds the fastest stages and replicas of a pipeline, by a profile of the layers.

The costs are those of a step of this package, for which

    seconds = max over stages of  passes x (forward + backward + transfers) + exchange of gradients
    bytes   = weight copies x largest weights of a stage + largest stashes and transfers of a stage

A pipeline without a flush never waits in the steady state: a replica of a stage computes its share of the microbatches,
and then exchanges their gradients. With a flush, every stage takes as long as the whole table, so the passes are those
of the most expensive stage, waiting included. All devices allocate as much as the one that needs most.

The numbers of passes and copies depend on the replicas of all stages, so the search divides the layers for one list of
replicas after the other. It skips a list if even stages without transfers could not be faster than the best so far.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxpar.choose.costs.pipeline_steps import clock_seconds, dispatched_seconds
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.pipedream import PlannedStage, fastest_cut, spans
from jaxpar.core.ring import sent_of_operand
from jaxpar.strategies.pipeline.schedules import LOCKSTEP
from jaxpar.strategies.pipeline.tables.periodic import (
    continuous_obstacle,
    fewest_microbatches,
    microbatches_in_flight,
    most_versions,
)
from jaxpar.strategies.pipeline.tables.schedule import replicated_table
from jaxpar.strategies.pipeline.tables.simulate import Times
from jaxpar.strategies.pipeline.tables.table import Table
from jaxpar.strategies.pipeline.tables.validate import peak_stashed

MAX_CANDIDATES = 40_000  # lists of replicas, which a search compares in about 10 s
MAX_ACTIONS = 4096  # devices x microbatches; a table of this size for each number of stages takes about 4 s
MAX_WEIGHTS = 100  # of the weights of a stage, the limits that are tried if the best stages do not fit
SEND_BUFFERS = 2  # for activations and for gradients


# ---- replicas -------------------------------------------------------------------------------------------------------


class TableCosts(NamedTuple):
    """The costs of a step, for stages with given numbers of replicas."""

    replicas: tuple[int, ...]  # number of devices of each stage
    num_microbatches: float  # number of microbatches of a step, of the size in the profile
    passes: tuple[float, ...]  # number of microbatches that a replica computes in a step, by stage
    weight_copies: float  # arrays with the size of the weights: versions, gradients, and the state of the optimizer
    stash_slots: float  # number of microbatches of the profile for which a device has a stash
    transfer_slots: float  # number of buffers for transfers, in microbatches of the profile


def continuous_costs(
    name: str, replicas: Sequence[int], num_microbatches: int, moments: float, size: float = 1.0
) -> TableCosts:
    """Return the costs of a schedule without a flush.

    moments: bytes of the optimizer state / bytes of the weights. size: examples of a microbatch / examples of a
    microbatch of the profile, to which its times are proportional.
    """
    in_flight = microbatches_in_flight(replicas)
    inboxes = 1 + (1 if len(set(replicas)) == 1 else 2)
    return TableCosts(
        tuple(replicas),
        size * num_microbatches,
        tuple(size * num_microbatches / number for number in replicas),
        most_versions(name, replicas, num_microbatches) + 1 + moments,
        size * max(-(-number // of_stage) for number, of_stage in zip(in_flight, replicas, strict=True)),
        size * (inboxes + SEND_BUFFERS),
    )


def flushing_costs(table: Table, backward_ratio: float, moments: float, executor: str = LOCKSTEP) -> TableCosts:
    """Return the costs of a table with a flush.

    backward_ratio: time of a backward pass / time of a forward pass. B and W each take a half.
    moments: bytes of the optimizer state / bytes of the weights.
    """
    half = [backward_ratio / 2] * table.num_stages
    times = Times([1.0] * table.num_stages, half, half)
    in_lockstep = executor == LOCKSTEP
    seconds = clock_seconds(table, times).max(axis=1).sum() if in_lockstep else dispatched_seconds(table, times, 0.0)
    return TableCosts(
        table.replicas or (1,) * table.num_stages,
        table.num_microbatches,
        (float(seconds) / (1 + backward_ratio),) * table.num_stages,
        (1 + 1 + moments) * table.num_chunks,
        int(peak_stashed(table).max()),
        2 + SEND_BUFFERS,
    )


def even_replicas(num_devices: int, num_stages: int) -> tuple[int, ...]:
    """Return replicas that differ by at most one; later stages have more, which shortens the fill of the pipeline."""
    each, more = divmod(num_devices, num_stages)
    return (each,) * (num_stages - more) + (each + 1,) * more


def flushing_candidates(
    name: str,
    num_devices: int,
    num_microbatches: int,
    most_stages: int,
    ratio: float,
    moments: float,
    executor: str = LOCKSTEP,
) -> Iterator[TableCosts]:
    """Yield the costs of a schedule with a flush for each number of stages, the largest first.

    In lockstep, the stage with the fewest replicas determines the number of clocks, so replicas are spread evenly. If
    the tables are large, only the largest number of stages may have different numbers of replicas.
    """
    most = min(num_devices, most_stages)
    is_large = num_devices * num_microbatches > MAX_ACTIONS
    for num_stages in range(most, 1, -1):
        replicas = even_replicas(num_devices, num_stages)
        is_tried = not is_large or num_stages == most or replicas[0] == replicas[-1]
        if is_tried and replicas[-1] <= num_microbatches:
            yield flushing_costs(replicated_table(name, replicas, num_microbatches), ratio, moments, executor)


def continuous_candidates(
    name: str,
    num_devices: int,
    num_microbatches: int,
    most_stages: int,
    batch_size: int,
    accepts: Callable[[int], bool],
    moments: float,
) -> Iterator[TableCosts]:
    """Yield the costs of a schedule without a flush for all replicas that it can have.

    The profile is of microbatches with as many examples as those of the first result.

    num_microbatches: of a batch; 0: the fewest possible. accepts: whether a batch can have a number of microbatches.
    """
    of_profile = 0
    for replicas in possible_replicas(num_devices, num_microbatches or batch_size, most_stages):
        m = num_microbatches or fewest_microbatches(name, replicas)
        if continuous_obstacle(name, replicas, num_microbatches=m, num_chunks=1) is None and accepts(m):
            of_profile = of_profile or m
            yield continuous_costs(name, replicas, m, moments, of_profile / m)


def possible_replicas(num_devices: int, multiple: int, most_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the lists of at least two divisors of `multiple` that add up to `num_devices`.

    If there are more than MAX_CANDIDATES, only those in which the number of replicas changes at most once.
    """
    divisors = [number for number in range(1, num_devices) if multiple % number == 0]
    most = min(num_devices, most_stages)
    if num_lists(divisors, num_devices, most) <= MAX_CANDIDATES:
        yield from _lists(divisors, num_devices, most)
        return
    for first in divisors:
        for count in range(num_devices // first, 0, -1):
            rest = num_devices - count * first
            for second in [0] if rest == 0 else [number for number in divisors if number != first]:
                more = rest // second if second else 0
                if more * second == rest and 2 <= count + more <= most:
                    yield (first,) * count + (second,) * more


def num_lists(numbers: Sequence[int], total: int, most: int) -> int:
    """Return the number of lists of at least two and at most `most` of the numbers that add up to `total`."""
    counts, result = [1] + [0] * total, 0
    for length in range(1, most + 1):
        counts = [sum(counts[rest - one] for one in numbers if one <= rest) for rest in range(total + 1)]
        result += counts[total] if length > 1 else 0
    return result


def _lists(numbers: Sequence[int], total: int, most: int) -> Iterator[tuple[int, ...]]:
    for first in numbers:
        if first == total:
            yield (first,)
        elif first < total and most > 1:
            yield from ((first, *rest) for rest in _lists(numbers, total - first, most - 1))


# ---- layers ---------------------------------------------------------------------------------------------------------


class Partition(NamedTuple):
    """The result of a search."""

    stages: tuple[PlannedStage, ...]  # the stages, in the order of computation
    seconds: float  # predicted time of a step
    nbytes: float  # predicted bytes of a device
    costs: TableCosts  # the costs with these replicas


class PartitionSearch:
    """Divides the layers of a profile. The values of all spans of layers are matrices [last layer, first layer]."""

    def __init__(self, layers: Sequence[LayerProfile], *, bandwidth: float, memory_limit: float = math.inf):
        """Prepare a search. bandwidth: bytes per second between two devices; memory_limit: bytes of a device."""
        self._limit, self._bandwidth, self._last = memory_limit, bandwidth, len(layers) - 1
        seconds = [layer.forward_s + layer.backward_s for layer in layers]
        weights, stashes = [layer.weight_bytes for layer in layers], [layer.stash_bytes for layer in layers]
        outputs = np.array([0, *(layer.output_bytes for layer in layers)], float)
        outputs[-1] = 0  # the last layer has the loss
        ends = outputs[1:, None], outputs[None, :-1]  # what crosses the end of a span, and its start
        # Every output is sent, and a gradient of its size comes back.
        self._compute = spans(seconds) + 2 * sum(ends) / bandwidth
        self._weights, self._stashes, self._transfers = spans(weights), spans(stashes), np.maximum(*ends)
        cut_after = np.array([layer.can_cut for layer in layers])
        self._can_be_stage = np.ones_like(self._compute, bool)
        self._can_be_stage[:-1] &= cut_after[:-1, None]
        self._can_be_stage[:, 1:] &= cut_after[None, :-1]
        self._sums = [np.cumsum([0.0, *values]) for values in (seconds, weights, stashes)]
        # The least time in which the transfers at an end of a stage can run.
        sent = [layer.output_bytes for layer in layers[:-1] if layer.can_cut]
        self._least_transfers = 2 * min(sent, default=0.0) / bandwidth
        self._seconds = cache(self._stage_seconds)
        self._cumulative_seconds, self._cumulative_bytes = cache(self._sum_seconds), cache(self._sum_bytes)

    def find(self, candidates: Iterable[TableCosts]) -> Partition | None:
        """Return the fastest plan of all candidates, or None if none fits. Of equally fast ones, the first one wins."""
        best = None
        for costs in candidates:
            if self._is_possible(costs, math.inf if best is None else best.seconds):
                found = self._of_candidate(costs)
                if found is not None and (best is None or found.seconds < best.seconds):
                    best = found
        return best

    def price(self, costs: TableCosts, bounds: Sequence[int]) -> Partition:
        """Return the plan with these stages: stage s is layers[bounds[s]:bounds[s + 1]]."""
        stages = [(end - 1, begin) for begin, end in itertools.pairwise(bounds)]
        each = zip(costs.replicas, costs.passes, stages, strict=True)
        seconds = max(self._seconds(number, passes)[span] for number, passes, span in each)
        activations = self._activations(costs)
        largest = max(self._weights[span] for span in stages), max(activations[span] for span in stages)
        planned = tuple(
            PlannedStage(begin, last, number) for (last, begin), number in zip(stages, costs.replicas, strict=True)
        )
        return Partition(planned, float(seconds), float(costs.weight_copies * largest[0] + largest[1]), costs)

    def _stage_seconds(self, num_replicas: int, passes: float) -> np.ndarray:
        exchange = self._exchange(self._weights, num_replicas) if num_replicas > 1 else 0.0
        return np.where(self._can_be_stage, passes * self._compute + exchange, np.inf)

    def _exchange(self, weights: np.ndarray, num_replicas: int) -> np.ndarray:
        """Return the seconds in which replicas of a stage exchange the gradients of these weights."""
        return sent_of_operand("all-reduce", num_replicas) * weights / self._bandwidth

    def _activations(self, costs: TableCosts) -> np.ndarray:
        """Return the bytes of the stashes and transfers of a stage."""
        return costs.stash_slots * self._stashes + costs.transfer_slots * self._transfers

    def _of_candidate(self, costs: TableCosts) -> Partition | None:
        """Return the fastest plan with these replicas; None if none fits."""
        activations = self._activations(costs)
        fits = costs.weight_copies * self._weights + activations <= self._limit
        best = self._divide(costs, fits)
        if best is None or best.nbytes <= self._limit:
            return best
        # Every device allocates the largest weights and the largest activations, which can be those of two stages.
        best = None
        weights = np.unique(self._weights[fits & self._can_be_stage])
        for most in weights[np.linspace(0, len(weights) - 1, min(len(weights), MAX_WEIGHTS)).astype(int)]:
            fit = (self._weights <= most) & (activations <= self._limit - costs.weight_copies * most)
            found = self._divide(costs, fit)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
        return best

    def _divide(self, costs: TableCosts, fits: np.ndarray) -> Partition | None:
        """Return the fastest plan whose stages are among those that fit; None if there is none."""
        each = zip(costs.replicas, costs.passes, strict=True)
        of_stages = [np.where(fits, self._seconds(number, passes), np.inf) for number, passes in each]
        rows = [of_stages[0][:, 0]]  # by stage: the times of layers 0 to j in the stages so far, by j
        for of_stage in of_stages[1:]:
            rows.append(fastest_cut(rows[-1], of_stage, 0))
        if not np.isfinite(rows[-1][-1]):
            return None
        bounds, end = [self._last + 1], self._last
        for before, of_stage in zip(rows[-2::-1], of_stages[:0:-1], strict=True):
            cut = int(np.maximum(before[:end], of_stage[end, 1 : end + 1]).argmin())
            bounds.append(cut + 1)
            end = cut
        return self.price(costs, [0, *reversed(bounds)])

    def _is_possible(self, costs: TableCosts, seconds: float) -> bool:
        """Return whether stages with the least transfers could take less time and fit; each gets all that it can."""
        position, num_layers, last = 0, self._last + 1, len(costs.replicas) - 1
        of_bytes = self._cumulative_bytes(costs.weight_copies, costs.stash_slots)
        for stage, (number, passes) in enumerate(zip(costs.replicas, costs.passes, strict=True)):
            of_seconds = self._cumulative_seconds(number, passes)
            transfers = ((stage > 0) + (stage < last)) * passes * self._least_transfers
            within_time = bisect_right(of_seconds, of_seconds[position] + seconds - transfers)
            within_memory = bisect_right(of_bytes, of_bytes[position] + self._limit)
            position = min(within_time, within_memory) - 1
        return position == num_layers

    def _sum_seconds(self, num_replicas: int, passes: float) -> list[float]:
        """Return the seconds of the first layers in one stage, by their number."""
        seconds, weights, _ = self._sums
        times: list[float] = (passes * seconds + self._exchange(weights, num_replicas)).tolist()
        return times

    def _sum_bytes(self, weight_copies: float, stash_slots: float) -> list[float]:
        """Return the bytes of the weights and stashes of the first layers, by their number."""
        _, weights, stashes = self._sums
        nbytes: list[float] = (weight_copies * weights + stash_slots * stashes).tolist()
        return nbytes
