"""Searches for the table that is cheapest in lockstep, where a clock lasts as long as its most expensive device.

The candidates are the named schedules that fit the memory limit and, with one chunk per device, gpipe in blocks of as
many microbatches as fit. A beam search over the clocks then improves on the best one. The engine runs a table in
lockstep, unlike the schedules that search.py finds for devices that wait only for their inputs.

In every clock, each device runs a set of actions: any of F, B and W, each for its next microbatch, since microbatches
are alike. So a partial table is known by the numbers of F, B and W that each device has run, its *counts*, and among
tables with equal counts only the fastest one matters. The beam search extends partial tables by a clock at a time:

1. Choose how long the clock lasts, and an order of F, B and W. Each device then runs the most preferred set of actions
   that is possible and fits in this time.
2. Estimate the time of the whole table: the time so far, and a lower bound for the rest.
3. Of the partial tables with about as many actions, keep those with the lowest estimates: the beam.

Known tables take part: their partial tables are never dropped, so the result is at least as good, and the search
tries all extensions of them.

A table in lockstep is also a schedule whose actions start when their clocks start, so the bounds of any schedule hold:

  - The first action of device d needs one F on each device before it. This is the fill.
  - After the last B of device d, the microbatch still needs one B on each device before it, and a W. This is the drain.
  - With memory for k microbatches, one of the k slots of a device is used by m / k microbatches, one after another.
    Each stays for its way through all later stages and back.

Clocks that send are counted apart, because the communication of a clock never overlaps with computation: the first
device sends every microbatch in a clock of its own, and the last microbatch then makes its way forth and back.
"""

import itertools
from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpar.choose.search.insert_w import SearchProblem
from jaxpar.choose.search.search import SearchResult, filled, make_search_problem, named_schedules
from jaxpar.strategies.pipeline.tables.simulate import Time, Times, lockstep
from jaxpar.strategies.pipeline.tables.table import (
    ACTION,
    BW,
    Action,
    B,
    F,
    StageDevices,
    Table,
    W,
    loop_stages,
    place_actions,
    with_slots,
)

SETS = np.array(list(itertools.product((0, 1), repeat=3)))  # the sets of F, B and W: [set, F or B or W]
SET_OF_KIND = {F: 4, B: 2, W: 1, BW: 3}
PREFERENCES = np.array([SETS @ weights for weights in itertools.permutations((4, 2, 1))])  # [order, set]
MAX_LENGTHS = 24  # lengths of a clock that are tried, of all that the times of the devices allow
EPSILON = 1e-9  # differences of times below this, in units of the work of a microbatch, are rounding
# Weights of the estimate of a table's time, besides the lower bound of the device that needs longest: of the mean of
# the lower bounds of all devices, and of the mean time of the remaining F and B, for which other devices wait. None of
# them is best for all times and limits.
ESTIMATES = ((0.5, 0.0), (0.0, 0.1), (0.0, 0.5))


def search_lockstep(
    times: Times,
    communication: Time,
    memory_limit: float,
    num_devices: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    weight_memory: float = 1.0,
    width: int = 16,
) -> SearchResult:
    """Search for a table of low cost in lockstep.

    No named schedule that fits the memory limit costs less, and with one chunk no gpipe in blocks that fit. Arguments
    and errors: see `search`, but communication is the time of a clock in which any device sends, in addition to its
    actions.

    width: partial tables that the beam search keeps. More are slower, and find better tables. 0: no beam search.
    """
    sizes = num_devices, num_microbatches, num_chunks
    problem = make_search_problem(times, communication, memory_limit, sizes, weight_memory)
    candidates = list(named_schedules(problem))  # with one chunk, model_parallel fits any limit
    candidates.append(filled(problem) if num_chunks > 1 else _in_blocks(problem))
    best = min(candidates, key=lambda result: lockstep(result.table, times, communication))
    if num_chunks > 1 or width == 0:
        return best
    beam, sets = ClockBeam(problem, width), np.zeros((best.table.num_clocks, num_devices), int)
    for clock, device, kind in best.table.actions[["clock", "device", "kind"]].tolist():
        sets[clock, device] += SET_OF_KIND[kind]
    for weights in ESTIMATES:
        sets = beam.run(sets, weights)
    improved = _table_of_sets(sets, num_microbatches)
    if lockstep(improved, times, communication) < lockstep(best.table, times, communication) * (1 - 1e-9):
        return SearchResult(f"{best.policy}, improved in lockstep", improved)
    return best


def _in_blocks(problem: SearchProblem) -> SearchResult:
    """Return gpipe in blocks of as many microbatches as fit."""
    p, m = problem.num_devices, problem.num_microbatches
    size = min(int(problem.most_stashed), m)
    order: list[Action] = []
    for first in range(0, m, size):
        block = range(first, min(first + size, m))
        order += [Action(F, k, 0) for k in block]
        order += [Action(BW, k, 0) for k in block]
    table = place_actions([order] * p, loop_stages(p, 1), m)
    return SearchResult(f"gpipe in blocks of {size} microbatches", table)


def search_fused(
    times: Times, memory_limit: float, num_devices: int, num_microbatches: int, width: int
) -> SearchResult:
    """Search for a table of low cost in lockstep whose backward pass is fused.

    times: those of F and BW; BW is B, and W takes no time, so that it can be in the clock of its B.
    """
    found = search_lockstep(times, 0, memory_limit, num_devices, num_microbatches, width=width)
    actions = found.table.actions[found.table.actions["kind"] != W]
    actions["kind"][actions["kind"] == B] = BW
    return SearchResult(found.policy, with_slots(Table(num_devices, 1, num_microbatches, actions)))


def lockstep_bound(
    times: Times,
    communication: Time,
    memory_limit: float,
    num_microbatches: int,
    stages: np.ndarray,
    weight_memory: float = 1.0,
) -> Time:
    """Return a time that no table with these stages can beat in lockstep; in the unit of the times.

    stages: by [device, chunk]; the first chunk of device d is stage d. Other arguments: see `search_lockstep`.
    """
    num_devices, num_chunks = stages.shape
    m, of_device = num_microbatches, times.by_kind(num_devices, num_chunks)
    devices = StageDevices(stages)
    route = [devices.device(stage, 0) for stage in range(stages.size)]
    bounds: list[Time] = []
    for d, own in enumerate(of_device):
        fill = sum(before[F] for before in of_device[:d])
        drain = max(sum(between[B] for between in of_device[i:d]) + of_device[i][W] for i in range(d + 1))
        # From the start of the F of a microbatch to the end of its B.
        stay = sum(of_device[device][F] + of_device[device][B] for device in route[d:])
        bounds += [
            fill + m * num_chunks * (own[F] + own[BW]),
            fill + m * num_chunks * (own[F] + own[B]) + drain,
            fill + (m - 1) * own[F] + stay + drain,
        ]
        if num_chunks == 1:
            turns = -(-m // int(memory_limit))
            occupied = stay + (own[W] if weight_memory == 1 else 0)
            bounds.append(fill + (turns - 1) * occupied + stay + drain)
    hops = sum(before != after for before, after in pairwise(route))
    return max(bounds) + (communication * (m - 1 + 2 * hops) if hops else 0)


# ---- the beam -------------------------------------------------------------------------------------------------------


class PartialTables(NamedTuple):
    """Partial tables: the first clocks of tables."""

    counts: np.ndarray  # number of F, B and W that each device has run, [n, 3, device]
    elapsed: np.ndarray  # time of the clocks, [n]
    estimate: np.ndarray  # estimated time of the whole table, [n]; minus infinity for those that are never dropped
    number: np.ndarray  # index in the history of the search, [n]

    def select(self, which: np.ndarray) -> "PartialTables":
        """Return the partial tables with these indices, or where a mask is true."""
        return PartialTables(*(values[which] for values in self))


class ClockBeam:
    """A beam search for a problem with one chunk per device."""

    def __init__(self, problem: SearchProblem, width: int):
        assert problem.num_chunks == 1, problem.num_chunks
        p = problem.num_devices
        self._problem, self._width = problem, width
        by_device = problem.times.by_kind(p, 1)
        times = np.array([[float(of_device[kind]) for kind in (F, B, W)] for of_device in by_device])
        unit = times.sum(1).max() or 1.0
        self._times = times.T / unit  # [F or B or W, device]
        self._communication = float(problem.communication) / unit
        self._durations = SETS @ self._times  # [set, device]
        lengths = np.unique(self._durations[1:].round(9))
        self._lengths = lengths[np.linspace(0, len(lengths) - 1, min(len(lengths), MAX_LENGTHS)).astype(int)]
        self._sends = np.zeros((len(SETS), p), bool)
        self._sends[:, :-1] |= SETS[:, :1] > 0
        self._sends[:, 1:] |= SETS[:, 1:2] > 0
        self._hash = np.random.default_rng(0).integers(1, 2**62, 3 * p)
        before = np.cumsum(self._times, axis=1) - self._times
        after = self._times.sum(1, keepdims=True) - before - self._times
        self._drain = before[1] + self._times[2, 0]
        self._way_back = after[0] + after[1] + self._times[1] + self._drain

    def run(self, known: np.ndarray, weights: tuple[float, float]) -> np.ndarray:
        """Return the fastest table that was found, as the set of actions by [clock, device].

        known: a table in the same form; weights: one of ESTIMATES.
        """
        p, m = self._problem.num_devices, self._problem.num_microbatches
        parents, sets = [np.array([-1])], [np.zeros((1, p), int)]  # the history
        size, best, best_number = 1, float(self._clock_times(known).sum()), -1
        start = PartialTables(np.zeros((1, 3, p), int), np.zeros(1), np.zeros(1), np.zeros(1, int))
        beams = defaultdict(list, {0: [start]})  # by twice the actions per device

        def add(made: PartialTables, parent: np.ndarray, made_sets: np.ndarray) -> None:
            nonlocal size
            made = made._replace(number=size + np.arange(len(parent)))
            parents.append(parent)
            sets.append(made_sets)
            size += len(parent)
            actions = made.counts.sum((1, 2)) * 2 // p
            for number in np.unique(actions).tolist():
                beams[number].append(made.select(actions == number))

        never_dropped = np.full(len(known), -np.inf)
        prefixes = SETS[known].transpose(0, 2, 1).cumsum(axis=0), self._clock_times(known).cumsum()
        add(
            PartialTables(*prefixes, never_dropped, never_dropped),
            np.array([0, *range(size, size + len(known) - 1)]),
            known,
        )
        while beams:
            merged = PartialTables(*map(np.concatenate, zip(*beams.pop(min(beams)), strict=True)))
            merged = merged.select(self._fastest(merged))
            num_known = int((merged.estimate == -np.inf).sum())  # besides the width, so that they displace no other
            beam = merged.select(np.argsort(merged.estimate, kind="stable")[: num_known + self._width])
            is_done = (beam.counts == m).all((1, 2))
            if is_done.any():
                best, best_number = float(beam.elapsed[is_done][0]), int(beam.number[is_done][0])
            extended, source, chosen = self._extend(beam.select(~is_done), weights, best)
            add(extended, beam.number[~is_done][source], chosen)
        all_parents, all_sets, result = np.concatenate(parents), np.concatenate(sets), []
        while best_number > 0:
            result.append(all_sets[best_number])
            best_number = int(all_parents[best_number])
        return np.array(result[::-1])

    def _clock_times(self, sets: np.ndarray) -> np.ndarray:
        """Return the time of clocks in which the devices run these sets, [clock, device]."""
        devices = np.arange(sets.shape[1])
        computation = self._durations[sets, devices].max(axis=1)
        time: np.ndarray = computation + self._communication * self._sends[sets, devices].any(axis=1)
        return time

    def _fastest(self, tables: PartialTables) -> np.ndarray:
        """Return the index of the fastest partial table of each group with equal counts."""
        hashes = tables.counts.reshape(-1, len(self._hash)) @ self._hash
        order = np.lexsort((tables.estimate, tables.elapsed.round(9), hashes))
        is_first = np.diff(hashes[order], prepend=hashes[order][:1] - 1) != 0
        result: np.ndarray = order[is_first]
        return result

    def _extend(
        self, beam: PartialTables, weights: tuple[float, float], best: float
    ) -> tuple[PartialTables, np.ndarray, np.ndarray]:
        """Return extensions by a clock that can be faster than `best`, the index of their source, and their sets."""
        fits = self._durations <= self._lengths[:, None, None] + EPSILON  # [length, set, device]
        allowed = self._possible(beam.counts)[:, None] & fits
        values = np.where(allowed[:, :, None], PREFERENCES[:, :, None], -1)  # [n, length, order, set, device]
        sets = values.argmax(axis=3).reshape(-1, self._problem.num_devices)
        source = np.repeat(np.arange(len(beam.elapsed)), len(self._lengths) * len(PREFERENCES))
        source, sets = source[sets.any(axis=1)], sets[sets.any(axis=1)]
        counts = beam.counts[source] + SETS[sets].transpose(0, 2, 1)
        elapsed = beam.elapsed[source] + self._clock_times(sets)
        remaining = self._remaining(counts)
        lowest = elapsed + remaining.max(axis=1)
        transfers = ((self._problem.num_microbatches - counts[:, :2]) * self._times[:2]).sum(1).mean(axis=1)
        rank = lowest + weights[0] * remaining.mean(axis=1) + weights[1] * transfers
        made = PartialTables(counts, elapsed, rank, rank)
        kept = np.flatnonzero(lowest < best - EPSILON)
        kept = kept[self._fastest(made.select(kept))]
        return made.select(kept), source[kept], sets[kept]

    def _possible(self, counts: np.ndarray) -> np.ndarray:
        """Return whether a device can run a set of actions in the next clock, [n, set, device].

        Results arrive at the end of a clock, except on the same device: the B of the last stage after its F, and W
        after B.
        """
        f, b, w = counts.transpose(1, 0, 2)
        stashed = (counts * [[self._problem.change(kind)] for kind in (F, B, W)]).sum(1)
        can_f = (f < self._problem.num_microbatches) & self._problem.fits(stashed + 1)
        can_f[:, 1:] &= f[:, :-1] > f[:, 1:]
        can_b = np.concatenate([b[:, 1:] > b[:, :-1], f[:, -1:] > b[:, -1:]], axis=1)
        with_f, with_b, with_w = SETS.T[:, :, None] > 0  # [set, 1]
        is_last = np.arange(f.shape[1]) == f.shape[1] - 1
        possible: np.ndarray = (
            (can_f[:, None] | ~with_f)
            & (can_b[:, None] | ~with_b | (with_f & is_last))
            & ((b > w)[:, None] | ~with_w | with_b)
        )
        return possible

    def _remaining(self, counts: np.ndarray) -> np.ndarray:
        """Return a lower bound for the time until the end, by the device that it follows from, [n, device]."""
        m, (f, b, w) = self._problem.num_microbatches, counts.transpose(1, 0, 2)
        forward, backward, weight = ((m - counts) * self._times).transpose(1, 0, 2)
        wait = np.zeros_like(forward)  # for the next F
        for d in range(1, f.shape[1]):
            wait[:, d] = np.where(f[:, d - 1] > f[:, d], 0, wait[:, d - 1] + self._times[0, d - 1])
        forward += np.where((f == w) & (f < m), wait, 0)  # a device that stashes nothing has no other action
        bounds = (
            forward + backward + weight,
            np.where(b < m, forward + backward + self._drain, 0),
            np.where(f < m, forward + self._way_back, 0),
            self._occupied(counts),
        )
        result: np.ndarray = np.max(bounds, axis=0)
        return result

    def _occupied(self, counts: np.ndarray) -> np.ndarray:
        """Return a lower bound for the time until the end, by the device whose memory it follows from, [n, device].

        A microbatch is in the memory of a device from its F to its W there, and meanwhile no two of its F and B run at
        the same time, on this device and the later ones. This work, divided by the microbatches that fit, takes time.
        """
        left = (self._problem.num_microbatches - counts) * self._times
        passes = left[:, :2].sum(axis=1)
        weights = left[:, 2] if self._problem.weight_memory == 1 else 0
        result: np.ndarray = (passes[:, ::-1].cumsum(axis=1)[:, ::-1] + weights) / int(
            self._problem.most_stashed + 1e-6
        )
        return result


def _table_of_sets(sets: np.ndarray, num_microbatches: int) -> Table:
    """Return the table whose devices run these sets of actions, by [clock, device].

    It has BW if every W is in the clock of its B.
    """
    num_devices = sets.shape[1]
    rows = []
    counts = np.zeros((num_devices, 3), int)
    for clock, device in np.argwhere(sets).tolist():
        for bit in np.flatnonzero(SETS[sets[clock, device]]).tolist():
            rows.append((clock, device, (F, B, W)[bit], int(counts[device, bit]), 0, device, 0, 0))
            counts[device, bit] += 1
    actions = np.array(rows, dtype=ACTION)
    of_kind = {kind: np.sort(actions[actions["kind"] == kind], order=["device", "microbatch"]) for kind in (B, W)}
    if (of_kind[B]["clock"] == of_kind[W]["clock"]).all():
        actions = actions[actions["kind"] != W]
        actions["kind"][actions["kind"] == B] = BW
    return with_slots(Table(num_devices, 1, num_microbatches, actions))
