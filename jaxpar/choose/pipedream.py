"""PipeDream's partitioner: the fastest stages and replicas for a profiled model on a hierarchy of workers.

Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018, and Narayanan et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", 2019, section 3.1. Workers form a hierarchy of levels, such as the
GPUs of a node and the nodes of a cluster. With A_0(i..j) the time of the forward and backward passes of layers i to j,
B_k the bandwidth of level k, and a_s the bytes of the output of layer s,

    T_k(i..j, m) = max(A_{k-1}(i..j), sync_k(i..j, m)) / m    a stage on m workers of level k, each a whole group of
                                                              level k - 1
    A_k(i..j, m) = min(T_k(i..j, m),  min over s and m' of  max(A_k(i..s, m - m'), 2 a_s / B_k, T_k(s+1..j, m')))

and A_k(i..j) = A_k(i..j, m_k) uses all m_k workers of the level. All times are per microbatch.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.core.ring import sent_of_operand
from jaxpar.strategies.pipeline.tables.schedule import noam

COMMUNICATION_MODELS = ("ring", "paper", "released")
COMPARED_ROWS = 64  # rows that are compared at a time, so that they stay in the cache of the CPU
MAX_WORKERS = 1024  # a search for them takes about 7 s with a few layers, or 16 s with a memory limit
WORK_PER_SECOND = 1.2e8  # comparisons, on one core
MAX_WORK = 300 * WORK_PER_SECOND  # of a hierarchical search
MAX_VALUES = 500_000_000  # workers x layers^2, the most numbers that a search keeps, of 8 bytes each


def spans(values: Sequence[float]) -> np.ndarray:
    """Return the sums of values first to last, [last, first]; infinite where last < first."""
    sums = np.cumsum([0.0, *values])
    return np.where(np.tri(len(values), dtype=bool), sums[1:, None] - sums[None, :-1], np.inf)


def fastest_cut(before: np.ndarray, times: np.ndarray, first: int) -> np.ndarray:
    """Return the shortest time of layers first to j if they are cut anywhere, by j.

    before: time of layers first to s and of the transfer after s, by s; times: of a stage, [last layer, first layer].
    """
    result = np.full(len(times), np.inf)
    for start in range(first + 1, len(times), COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, len(times))
        last_stage = times[start:stop, first + 1 : stop]
        result[start:stop] = np.maximum(last_stage, before[first : stop - 1]).min(axis=1)
    return result


def replicated_seconds(
    model: str, times: np.ndarray, weights: np.ndarray, num_replicas: int, bandwidth: float
) -> np.ndarray:
    """Return the time of a microbatch in a stage with replicas, each of which runs one of `num_replicas`.

    By the model `ring`, replicas exchange gradients by a ring all-reduce. By `paper`, every replica exchanges all bytes
    with every other one. By `released`, PipeDream's released code, the exchange does not overlap with the computation.

    times: seconds of a microbatch on one replica; weights: bytes; bandwidth: bytes per second.
    """
    ring, each = sent_of_operand("all-reduce", num_replicas), 1 / num_replicas
    factor = {"ring": ring, "paper": 2 * (num_replicas - 1), "released": 2 * ring}[model]
    compute, exchange = each * times, each * (factor * weights / bandwidth)
    return compute + exchange if model == "released" else np.maximum(compute, exchange)


class Level(NamedTuple):
    """A level of the hierarchy: `size` groups of the level below, with links of `bandwidth` bytes per second."""

    size: int
    bandwidth: float


class PlannedStage(NamedTuple):
    """A stage: its layers, both ends included, and the number of its replicas."""

    first_layer: int
    last_layer: int
    replicas: int


class StagePlan(NamedTuple):
    """The result of a search."""

    stages: tuple[PlannedStage, ...]  # the stages, in the order of computation
    seconds_per_microbatch: float  # predicted time between two microbatches in the steady state
    data_parallel_seconds: float  # the same for data parallelism on all workers
    model_parallel_seconds: float  # time of a microbatch that passes through these stages alone, without pipelining
    num_in_flight: int  # microbatches that the first stage admits before the first backward pass, per replica (NOAM)


def search_work(num_layers: int, levels: Sequence[Level], *, has_limit: bool) -> float:
    """Return the approximate number of comparisons of a search.

    A cut of the layers i..j is tried for each i, j, number of workers and number of replicas. All spans of layers have
    plans on the inner levels. With a memory limit, these plans depend on the number of replicas and of later workers.
    """
    work, groups = 0.0, 1.0
    for number, level in enumerate(reversed(levels)):
        firsts = num_layers if number else 1
        work += groups * firsts * level.size**2 / 2 * num_layers**2 / 2
        groups *= level.size**2 / 2 if has_limit else 1
    return work


def most_workers(num_layers: int) -> int:
    """Return the largest number of workers for which a profile of this many layers can be searched."""
    return min(MAX_WORKERS, MAX_VALUES // num_layers**2)


class _Group(NamedTuple):
    """The position of a group of workers in the pipeline."""

    level: int  # its level; 0 is a single worker
    copies: int  # number of groups that are replicas of this one
    later: int  # number of workers of later stages


class StageSearch:
    """Finds the fastest plan of a profile. The times of all spans of layers are matrices [last layer, first layer]."""

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        levels: Sequence[Level],
        *,
        model: str = "ring",
        transfers: bool = True,
        straight: bool = False,
        memory_limit: float = math.inf,
    ):
        """Prepare a search. levels: the innermost one first; model: one of COMMUNICATION_MODELS.

        transfers: whether a boundary between stages takes the time of its activations and gradients; straight: only
        stages with one replica; memory_limit: bytes of a worker, on which a stage holds its weights and its stash once
        per microbatch in flight.
        """
        self._levels, self._model, self._straight, self._limit = tuple(levels), model, straight, memory_limit
        self._num_layers = len(layers)
        self._compute = spans([layer.forward_s + layer.backward_s for layer in layers])
        self._weights = spans([layer.weight_bytes for layer in layers])
        self._held = self._weights + spans([layer.stash_bytes for layer in layers])
        self._outputs = np.array([layer.output_bytes for layer in layers], float) * (2 if transfers else 0)
        self._outputs[[not layer.can_cut for layer in layers]] = np.inf
        self._sizes = [1, *np.cumprod([level.size for level in levels]).tolist()]  # workers of a group, by level
        self._known: dict[_Group, np.ndarray] = {}

    def find(self) -> StagePlan | None:
        """Return the fastest plan that uses all workers; None if there is none that fits the memory limit."""
        last, level = self._num_layers - 1, len(self._levels)
        whole = _Group(level, copies=1, later=0)
        best = self._rows(whole, 0)[-1][last] if level else self._alone(whole)[last, 0]
        if not np.isfinite(best):
            return None
        stages, transfers = zip(*self._stages(whole, 0, last), strict=True)
        on_all = self._compute[-1:, :1]  # one stage on all workers, whose memory is not limited
        for size, bandwidth in self._levels:
            on_all = replicated_seconds(self._model, on_all, self._weights[-1:, :1], size, bandwidth)
        return StagePlan(
            stages,
            float(best),
            float(on_all.item()),
            float(self._compute[last, 0] + sum(transfers)),
            noam(self._sizes[-1], stages[0].replicas),
        )

    def _alone(self, group: _Group) -> np.ndarray:
        """Return the times of all spans on a single worker; infinite where they do not fit in its memory."""
        number = noam(group.copies + group.later, group.copies)
        return np.where(number * self._held <= self._limit, self._compute, np.inf)

    def _inner(self, group: _Group, num_replicas: int, later: int) -> _Group:
        """Return the groups that hold a stage of `group` on `num_replicas` of its workers, `later` of which follow."""
        workers = later * self._sizes[group.level - 1] * group.copies
        return _Group(group.level - 1, group.copies * num_replicas, group.later + workers)

    def _times(self, group: _Group) -> np.ndarray:
        """Return A_k of all spans, [last, first]: the times of their best plans on a group."""
        if self._limit == math.inf:
            group = group._replace(copies=1, later=0)  # only the memory depends on them
        if group not in self._known:
            if group.level == 0:
                self._known[group] = self._alone(group)
            else:
                times = np.full_like(self._compute, np.inf)
                for first in range(self._num_layers):
                    times[first:, first] = self._rows(group, first)[-1][first:]
                self._known[group] = times
        return self._known[group]

    def _stage_times(self, group: _Group, num_replicas: int, later: int) -> np.ndarray:
        """Return T_k of all spans, [last, first], on `num_replicas` workers of a group, `later` of which follow."""
        if num_replicas > 1 and self._straight:
            return np.full_like(self._compute, np.inf)
        times = self._times(self._inner(group, num_replicas, later))
        if num_replicas == 1:
            return times
        bandwidth = self._levels[group.level - 1].bandwidth
        return replicated_seconds(self._model, times, self._weights, num_replicas, bandwidth)

    def _rows(self, group: _Group, first: int) -> list[np.ndarray]:
        """Return A_k(first..j, m) by [m - 1][j]: the times of the best plans of a group's first m workers."""
        size, bandwidth = self._levels[group.level - 1]
        transfers = self._outputs / bandwidth
        rows: list[np.ndarray] = []
        stage_times = cache(partial(self._stage_times, group))
        for m in range(1, size + 1):
            later = size - m if self._limit < math.inf else 0  # without a memory limit, later workers do not matter
            best = stage_times(m, later)[:, first]
            for replicas in range(1, m):
                before = np.maximum(rows[m - replicas - 1], transfers)
                best = np.minimum(best, fastest_cut(before, stage_times(replicas, later), first))
            rows.append(best)
        return rows

    def _stages(self, group: _Group, first: int, last: int) -> list[tuple[PlannedStage, float]]:
        """Return the stages of a best plan of layers first to last on a group, each with the time of its input."""
        if group.level == 0:
            return [(PlannedStage(first, last, group.copies), 0.0)]
        size, bandwidth = self._levels[group.level - 1]
        rows = self._rows(group, first)
        stages: list[tuple[PlannedStage, float]] = []
        m = size
        while m:
            times = {r: self._stage_times(group, r, size - m)[last] for r in range(1, m + 1)}
            best, replicas, cut = times[m][first], m, first - 1
            for r in range(1, m):
                for s in range(first, last):
                    time = max(rows[m - r - 1][s], self._outputs[s] / bandwidth, times[r][s + 1])
                    if time < best:
                        best, replicas, cut = time, r, s
            [(head, _), *tail] = self._stages(self._inner(group, replicas, size - m), cut + 1, last)
            stages = [(head, self._outputs[cut] / bandwidth if cut >= first else 0.0), *tail, *stages]
            m, last = m - replicas, cut
        return stages
