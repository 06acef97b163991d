"""Finds the fastest stages and replicas for the pipeline engine of this package, by a profile of the layers.

PipeDream's partitioner (stage_search.py) describes another system: a replica exchanges gradients after each of its
microbatches, while it computes, and every device allocates only what its stage needs. Here the costs are those of the
engine (engine_costs.py), for a whole step:

    seconds = max over stages of  passes x (forward + backward + transfers) + exchange of gradients
    bytes   = weight copies x largest weights of a stage + largest stashes and transfers of a stage

The numbers of passes and copies depend on the replicas of all stages, so the search divides the layers for one list of
replicas after the other. It skips a list if even stages without transfers could not be faster than the best so far.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.pipeline.search.engine_costs import EngineCosts
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.pipeline.search.stage_costs import Rates, fastest_cut, spans, stage_seconds, sync_seconds
from jaxpar.pipeline.search.stage_search import PlannedStage

MAX_WEIGHTS = 100  # of the weights of a stage, the limits that are tried if the best stages do not fit


class EnginePlan(NamedTuple):
    """The result of a search.

    Attributes:
      stages: the stages, in the order of computation.
      seconds: predicted time of a step.
      nbytes: predicted bytes of a device.
      costs: the costs of the engine with these replicas.
    """

    stages: tuple[PlannedStage, ...]
    seconds: float
    nbytes: float
    costs: EngineCosts


class EngineSearch:
    """Divides the layers of a profile. The values of all spans of layers are matrices [last layer, first layer]."""

    def __init__(self, layers: Sequence[LayerProfile], *, bandwidth: float, memory_limit: float = math.inf):
        """Prepare a search.

        Args:
          layers: the profile.
          bandwidth: bytes per second between two devices.
          memory_limit: bytes of a device.
        """
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
        self._known: dict[tuple[int, Rates], np.ndarray] = {}
        self._bounds: dict[tuple[Rates | float, float], list[float]] = {}

    def find(self, candidates: Iterable[EngineCosts]) -> EnginePlan | None:
        """Return the fastest plan of all candidates, or None if none fits. Of equally fast ones, the first one wins."""
        best = None
        for costs in candidates:
            if self._is_possible(costs, math.inf if best is None else best.seconds):
                found = self._of_candidate(costs)
                if found is not None and (best is None or found.seconds < best.seconds):
                    best = found
        return best

    def price(self, costs: EngineCosts, bounds: Sequence[int]) -> EnginePlan:
        """Return the plan with these stages: stage s is layers[bounds[s]:bounds[s + 1]]."""
        stages = [(end - 1, begin) for begin, end in itertools.pairwise(bounds)]
        seconds = max(self._seconds(costs, stage)[span] for stage, span in enumerate(stages))
        activations = self._activations(costs)
        largest = max(self._weights[span] for span in stages), max(activations[span] for span in stages)
        planned = tuple(
            PlannedStage(begin, last, number) for (last, begin), number in zip(stages, costs.replicas, strict=True)
        )
        return EnginePlan(planned, float(seconds), float(costs.weight_copies * largest[0] + largest[1]), costs)

    def _seconds(self, costs: EngineCosts, stage: int) -> np.ndarray:
        key = costs.replicas[stage], costs.rates[stage]
        if key not in self._known:
            number, rates = key
            sync = sync_seconds("ring", self._weights, number, self._bandwidth) if number > 1 else np.zeros(())
            times = stage_seconds(rates, self._compute, sync)
            self._known[key] = np.where(self._can_be_stage, times, np.inf)
        return self._known[key]

    def _activations(self, costs: EngineCosts) -> np.ndarray:
        """Return the bytes of the stashes and transfers of a stage."""
        return costs.stash_slots * self._stashes + costs.transfer_slots * self._transfers

    def _of_candidate(self, costs: EngineCosts) -> EnginePlan | None:
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

    def _divide(self, costs: EngineCosts, fits: np.ndarray) -> EnginePlan | None:
        """Return the fastest plan whose stages are among those that fit; None if there is none."""
        of_stages = [np.where(fits, self._seconds(costs, stage), np.inf) for stage in range(len(costs.replicas))]
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

    def _is_possible(self, costs: EngineCosts, seconds: float) -> bool:
        """Return whether stages with the least transfers could take less time and fit; each gets all that it can."""
        position, num_layers, last = 0, self._last + 1, len(costs.replicas) - 1
        of_bytes = self._cumulative(costs.weight_copies, costs.stash_slots)
        for stage, (number, rates) in enumerate(zip(costs.replicas, costs.rates, strict=True)):
            of_seconds = self._cumulative(rates, number)
            transfers = ((stage > 0) + (stage < last)) * rates.passes * self._least_transfers
            within_time = bisect_right(of_seconds, of_seconds[position] + seconds - transfers)
            within_memory = bisect_right(of_bytes, of_bytes[position] + self._limit)
            position = min(within_time, within_memory) - 1
        return position == num_layers

    def _cumulative(self, work: Rates | float, number: float) -> list[float]:
        """Return the seconds of the first layers on `number` replicas, or the bytes of their copies, by their number.

        work: the rates, or the number of copies of the weights; `number` is that of the stashes then.
        """
        key = (work, number)
        if key not in self._bounds:
            seconds, weights, stashes = self._sums
            if isinstance(work, Rates):
                values = stage_seconds(work, seconds, sync_seconds("ring", weights, int(number), self._bandwidth))
            else:
                values = work * weights + number * stashes
            self._bounds[key] = values.tolist()
        return self._bounds[key]
