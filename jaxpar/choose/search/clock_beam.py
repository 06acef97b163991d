"""Finds tables of low cost in lockstep by a beam search over their clocks, with one stage per device.

In every clock, each device runs a set of actions: any of F, B and W, each for its next microbatch, since microbatches
are alike. So a partial table is known by the numbers of F, B and W that each device has run, its *counts*, and among
tables with equal counts only the fastest one matters. The search extends partial tables by a clock at a time:

1. Choose how long the clock lasts, and an order of F, B and W. Each device then runs the most preferred set of actions
   that is possible and fits in this time.
2. Estimate the time of the whole table: the time so far, and a lower bound for the rest.
3. Of the partial tables with about as many actions, keep those with the lowest estimates: the beam.

Known tables take part: their partial tables are never dropped, so the result is at least as good, and the search
tries all extensions of them.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.choose.search.insert_w import SearchProblem
from jaxpar.strategies.pipeline.tables.table import ACTION, BW, B, F, Table, W, with_slots

SETS = np.array(list(itertools.product((0, 1), repeat=3)))  # the sets of F, B and W: [set, F or B or W]
SET_OF_KIND = {F: 4, B: 2, W: 1, BW: 3}
PREFERENCES = np.array([SETS @ weights for weights in itertools.permutations((4, 2, 1))])  # [order, set]
MAX_LENGTHS = 24  # lengths of a clock that are tried, of all that the times of the devices allow
EPSILON = 1e-9  # differences of times below this, in units of the work of a microbatch, are rounding


class PartialTables(NamedTuple):
    """Partial tables: the first clocks of tables."""

    counts: np.ndarray  # number of F, B and W that each device has run, [n, 3, device]
    elapsed: np.ndarray  # time of the clocks, [n]
    estimate: np.ndarray  # estimated time of the whole table, [n]; minus infinity for those that are never dropped
    number: np.ndarray  # index in the history of the search, [n]

    def select(self, which: np.ndarray) -> "PartialTables":
        """Return the partial tables with these indices, or where a mask is true."""
        return PartialTables(*(values[which] for values in self))


class SearchEstimate(NamedTuple):
    """Weights of the estimate, besides the lower bound of the device that needs longest."""

    all_devices: float  # weight of the mean of the lower bounds of all devices
    transfers: float  # weight of the mean time of the remaining F and B, for which other devices wait


class ClockBeam:
    """A beam search for a problem with one chunk per device."""

    def __init__(self, problem: SearchProblem, width: int):
        """width: number of partial tables with about as many actions that the search keeps."""
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

    def run(self, known: Sequence[np.ndarray], estimate: SearchEstimate) -> np.ndarray:
        """Return the fastest table that was found, as the set of actions by [clock, device].

        known: tables in the same form, at least one.
        """
        p, m = self._problem.num_devices, self._problem.num_microbatches
        parents, sets = [np.array([-1])], [np.zeros((1, p), int)]  # the history
        size, best, best_number = 1, np.inf, -1
        start = PartialTables(np.zeros((1, 3, p), int), np.zeros(1), np.zeros(1), np.zeros(1, int))
        beams: defaultdict[int, list[PartialTables]] = defaultdict(
            list, {0: [start]}
        )  # by twice the actions per device

        def add(made: PartialTables, parent: np.ndarray, made_sets: np.ndarray) -> None:
            nonlocal size
            made = made._replace(number=size + np.arange(len(parent)))
            parents.append(parent)
            sets.append(made_sets)
            size += len(parent)
            actions = made.counts.sum((1, 2)) * 2 // p
            for number in np.unique(actions).tolist():
                beams[number].append(made.select(actions == number))

        for table in known:
            add(self._prefixes(table), np.array([0, *range(size, size + len(table) - 1)]), table)
            best = min(best, float(self._clock_times(table).sum()))
        while beams:
            beam = self._keep(beams.pop(min(beams)))
            is_done = (beam.counts == m).all((1, 2))
            if is_done.any():
                best, best_number = float(beam.elapsed[is_done][0]), int(beam.number[is_done][0])
            extended, source, chosen = self._extend(beam.select(~is_done), estimate, best)
            add(extended, beam.number[~is_done][source], chosen)
        all_parents, all_sets, result = np.concatenate(parents), np.concatenate(sets), []
        while best_number > 0:
            result.append(all_sets[best_number])
            best_number = int(all_parents[best_number])
        return np.array(result[::-1])

    def _prefixes(self, table: np.ndarray) -> PartialTables:
        """Return the partial tables of a known table, after each of its clocks."""
        counts = SETS[table].transpose(0, 2, 1).cumsum(axis=0)
        never_dropped = np.full(len(table), -np.inf)
        return PartialTables(counts, self._clock_times(table).cumsum(), never_dropped, never_dropped)

    def _clock_times(self, sets: np.ndarray) -> np.ndarray:
        """Return the time of clocks in which the devices run these sets, [clock, device]."""
        devices = np.arange(sets.shape[1])
        computation = self._durations[sets, devices].max(axis=1)
        time: np.ndarray = computation + self._communication * self._sends[sets, devices].any(axis=1)
        return time

    def _keep(self, beam: Sequence[PartialTables]) -> PartialTables:
        """Return the beam: the fastest partial table of equal counts, and of these the ones with low estimates."""
        merged = PartialTables(*map(np.concatenate, zip(*beam, strict=True)))
        merged = merged.select(self._fastest(merged))
        num_known = int((merged.estimate == -np.inf).sum())  # in addition to the width, so that they displace no other
        return merged.select(np.argsort(merged.estimate, kind="stable")[: num_known + self._width])

    def _fastest(self, tables: PartialTables) -> np.ndarray:
        """Return the index of the fastest partial table of each group with equal counts."""
        hashes = tables.counts.reshape(-1, len(self._hash)) @ self._hash
        order = np.lexsort((tables.estimate, tables.elapsed.round(9), hashes))
        is_first = np.diff(hashes[order], prepend=hashes[order][:1] - 1) != 0
        result: np.ndarray = order[is_first]
        return result

    def _extend(
        self, beam: PartialTables, estimate: SearchEstimate, best: float
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
        rank = lowest + estimate.all_devices * remaining.mean(axis=1) + estimate.transfers * transfers
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
        result: np.ndarray = (passes[:, ::-1].cumsum(axis=1)[:, ::-1] + weights) / int(self._problem.memory + 1e-6)
        return result


def sets_of_actions(table: Table) -> np.ndarray:
    """Return the set of actions by [clock, device] of a table with one stage per device."""
    sets = np.zeros((table.num_clocks, table.num_devices), int)
    for clock, device, kind in table.actions[["clock", "device", "kind"]].tolist():
        sets[clock, device] += SET_OF_KIND[kind]
    return sets


def table_of_sets(sets: np.ndarray, num_microbatches: int) -> Table:
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
