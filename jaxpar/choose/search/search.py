"""Searches for a schedule that fits given action times and a given memory limit, in three steps.

1. Generate skeletons, which are orders of F and B alone: named schedules with different warm-ups, and one skeleton that
   fits any memory limit.
2. Fill each skeleton with W: W runs while a device waits or when it is short of memory, and the remaining W run last.
   Select the best of all results and of the named schedules that fit the limit.
3. Improve it by local search: move actions on a critical path ahead of actions that they do not depend on. The moves
   are those of job-shop scheduling (van Laarhoven, Aarts and Lenstra, "Job Shop Scheduling by Simulated Annealing",
   1992): only a change of order on a critical path can make that path shorter.

The reference is the automatic scheduler of Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3. Its rules
for W are among the rules in insert_w.py.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.choose.search.insert_w import RULES, Orders, SearchProblem, Skeleton, WeightGradients
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table, schedule_obstacle
from jaxpar.strategies.pipeline.tables.simulate import (
    ActionGraph,
    Time,
    Times,
    action_graph,
    end_times,
    simulate_table,
)
from jaxpar.strategies.pipeline.tables.table import BW, Action, B, F, Table, W, loop_stages, place_actions, v_stages
from jaxpar.strategies.pipeline.tables.validate import peak_stashed


class SearchResult(NamedTuple):
    """The best table of a search, and a name for the policy that generated it."""

    policy: str
    table: Table


def search(
    times: Times,
    communication: Time,
    memory_limit: float,
    num_devices: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    weight_memory: float = 1.0,
    evaluations: int = 1000,
    seed: int = 0,
) -> SearchResult:
    """Search for a table of low cost (see simulate.py). No named schedule that fits the memory limit costs less.

    Args:
      times: times of the actions.
      communication: time of a transfer to another device.
      memory_limit: maximum number of microbatches of a whole device between their F and their W.
      num_devices, num_microbatches, num_chunks: sizes of the table; chunks of a device.
      weight_memory: fraction of a microbatch's memory that is still held between its B and its W. The paper stashes
        only the inputs of the matrix products of a transformer for W: 32h of 34h + 5as bytes per token (appendix;
        hidden size h, a heads, s tokens).
      evaluations, seed: number of orders that step 3 tries, and seed of its random moves.

    Raises ValueError if a size or the memory limit is below 1.
    """
    sizes = num_devices, num_microbatches, num_chunks
    problem = make_search_problem(times, communication, memory_limit, sizes, weight_memory)
    first, *others = [*named_schedules(problem), filled(problem)]
    best = first
    for other in others:
        best = _better(problem, best, other)
    improved = _improve(problem, best.table, evaluations, random.Random(seed))
    return _better(problem, best, SearchResult(f"{best.policy}, improved", improved))


def make_search_problem(
    times: Times, communication: Time, memory_limit: float, sizes: tuple[int, int, int], weight_memory: float
) -> SearchProblem:
    """Return the problem of a search. sizes: number of devices, of microbatches, and of chunks per device."""
    names = ("num_devices", "num_microbatches", "num_chunks", "memory_limit")
    for name, value in zip(names, (*sizes, memory_limit), strict=True):
        if not value >= 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    return SearchProblem(*sizes, times, communication, memory_limit * sizes[-1], weight_memory)


def _better(problem: SearchProblem, old: SearchResult, new: SearchResult) -> SearchResult:
    """Return the cheaper result; the old one if the costs are equal up to rounding."""
    costs = [simulate_table(result.table, problem.times, problem.communication).cost for result in (old, new)]
    return new if costs[1] < costs[0] * (1 - 1e-9) else old


def named_schedules(problem: SearchProblem) -> Iterator[SearchResult]:
    """Yield the named schedules that fit the memory limit."""
    p, m, v = problem[:3]
    for name in SCHEDULES:
        if schedule_obstacle(name, num_devices=p, num_microbatches=m, num_chunks=v) is None:
            table = make_table(name, num_devices=p, num_microbatches=m, num_chunks=v)
            if problem.fits(peak_stashed(table, problem.weight_memory).max()):
                yield SearchResult(name, table)


def filled(problem: SearchProblem) -> SearchResult:
    """Return the result of steps 1 and 2: the best of all skeletons, each filled with W by every rule."""
    best: WeightGradients | None = None
    for skeleton in _skeletons(problem):
        for rule in RULES:
            found = WeightGradients(problem, skeleton, rule)
            if found.run() and (best is None or found.costs() < best.costs()):
                best = found
    assert best is not None, "one microbatch at a time fits any limit"
    stages = best.skeleton.stages
    return SearchResult(
        f"{best.skeleton.name}, W {best.rule}", place_actions(best.orders, stages, problem.num_microbatches)
    )


def _skeletons(problem: SearchProblem) -> Iterator[Skeleton]:
    p, m, v = problem[:3]
    yield _packed(problem, v_stages(p) if v == 2 else loop_stages(p, v))
    if v == 1:
        yield from _alternating(problem)
    for name in ("zb_v", "interleaved_1f1b"):
        if v > 1 and schedule_obstacle(name, num_devices=p, num_microbatches=m, num_chunks=v) is None:
            table = make_table(name, num_devices=p, num_microbatches=m, num_chunks=v)
            kinds: list[list[tuple[int, int]]] = [[] for _ in range(p)]  # (F or B, chunk) by device
            for _, device, kind, _, chunk, *_ in table.actions.tolist():
                if kind != W:
                    kinds[device].append((F if kind == F else B, chunk))
            room = max(0, min(int(problem.most_stashed - peak_stashed(table).max()), m))
            for extra in sorted({room * i // 8 for i in range(9)}):
                orders = [_more_warmup(of_device, extra) for of_device in kinds]
                yield Skeleton(f"{name} with {extra} more forwards in warm-up", table.stages, orders)


def _packed(problem: SearchProblem, stages: np.ndarray) -> Skeleton:
    """Return a skeleton in which every microbatch goes through all F and all B without a stop.

    A microbatch enters as soon as no device is busy or out of memory when the microbatch reaches it.
    """
    way = 2 * stages.size  # clocks that a microbatch takes
    use = np.zeros((2, problem.num_devices, way), int)  # by device and clock: its actions, and its stashed copies
    for (device, _), stage in np.ndenumerate(stages):
        use[0, device, [stage, way - 1 - stage]] += 1
        use[1, device, stage : way - stage] += 1
    room = np.ones((2, problem.num_devices, way * (problem.num_microbatches + 1)), int)
    room[1] = int(problem.most_stashed)
    clocks: list[list[tuple[int, Action]]] = [[] for _ in stages]
    entry = 0
    for k in range(problem.num_microbatches):
        while (room[..., entry : entry + way] < use).any():
            entry += 1
        room[..., entry : entry + way] -= use
        for (device, chunk), stage in np.ndenumerate(stages):
            clocks[device] += [(entry + stage, Action(F, k, chunk)), (entry + way - 1 - stage, Action(B, k, chunk))]
    return Skeleton("microbatches as they fit", stages, [[action for _, action in sorted(order)] for order in clocks])


def _alternating(problem: SearchProblem) -> Iterator[Skeleton]:
    """Yield 1F1B with different warm-ups.

    They are the warm-ups of zb_h1 (slope 1) and zb_h2 (slope 2), slopes between and beyond them, and a warm-up that
    lasts until the first B.
    """
    p, m = problem.num_devices, problem.num_microbatches
    warmups: dict[tuple[int, ...], str] = {}
    for slope in (1, 1.25, 1.5, 1.75, 2, 2.25):
        for rounded in (math.floor, math.ceil):
            of_slope = tuple(1 + rounded(slope * (p - 1 - device)) for device in range(p))
            warmups.setdefault(of_slope, f"{slope} times the warm-up")
    for rounded in (math.floor, math.ceil):
        warmups.setdefault(tuple(_until_first_b(problem, rounded)), "warm-up until the first B")
    for of_devices, name in warmups.items():
        counts = [min(m, int(problem.most_stashed), count) for count in of_devices]
        kinds = [[F] * count + [B, F] * (m - count) + [B] * count for count in counts]
        orders = [_with_microbatches([(kind, 0) for kind in of_device]) for of_device in kinds]
        yield Skeleton(f"1f1b with {name}", loop_stages(p, 1), orders)


def _until_first_b(problem: SearchProblem, rounded: Callable[[float], int]) -> list[int]:
    """Return the number of forwards that each device has time for before its first B can start."""
    durations = problem.times.by_kind(problem.num_devices, 1)
    ends = itertools.accumulate(times[F] + problem.communication for times in durations)  # arrival after the first F
    arrival: Time = -1
    counts = []
    for times, end in reversed(list(zip(durations, ends, strict=True))):
        end -= problem.communication
        arrival = max(arrival, end)  # arrival of the first B's input; on the last device, the end of its F
        more = min(rounded((arrival - end) / times[F]), problem.num_microbatches) if times[F] else 0
        counts.append(1 + more)
        arrival = max(arrival, end + more * times[F]) + times[B] + problem.communication
    return counts[::-1]


def _more_warmup(kinds: Sequence[tuple[int, int]], extra: int) -> list[Action]:
    """Move the last `extra` forwards of the first chunk to the start of the order."""
    kinds = list(kinds)
    for _ in range(extra):
        last = len(kinds) - 1 - kinds[::-1].index((F, 0))
        kinds.insert(0, kinds.pop(last))
    return _with_microbatches(kinds)


def _with_microbatches(kinds: Sequence[tuple[int, int]]) -> list[Action]:
    """Number the microbatches 0, 1, ... separately for every (kind, chunk)."""
    counts = dict.fromkeys(kinds, -1)
    actions = []
    for kind, chunk in kinds:
        counts[kind, chunk] += 1
        actions.append(Action(kind, counts[kind, chunk], chunk))
    return actions


# ---- step 3 ---------------------------------------------------------------------------------------------------------


class SearchState(NamedTuple):
    """A schedule that step 3 tries."""

    orders: list[list[int]]  # actions by device
    ends: list[Time]  # end time of each action
    costs: tuple[Time, Time]  # the longest span and the sum of squared spans, compared in this order


def _improve(problem: SearchProblem, table: Table, evaluations: int, rng: random.Random) -> Table:
    """Try `evaluations` random moves, and accept those that fit the memory limit and do not increase the costs.

    The result has B and W instead of BW.
    """
    split: Orders = [[] for _ in range(table.num_devices)]
    for _, device, kind, microbatch, chunk, *_ in table.actions.tolist():
        split[device] += [Action(each, microbatch, chunk) for each in ((B, W) if kind == BW else (kind,))]
    table = place_actions(split, table.stages, table.num_microbatches)
    actions, orders = action_graph(table, problem.times, problem.communication)
    changes = [problem.change(kind) for kind in table.actions["kind"].tolist()]
    state = _state(actions, orders)
    assert state is not None, "the orders of a valid table do not deadlock"
    moves = _moves(actions, state)
    for _ in range(evaluations):
        if not moves:
            break
        device, position = rng.choice(moves)
        order = _moved(actions, state.orders[device], position, rng.choice((1, 1, 1, 2, 3, 4, 6)))
        if order is None or not all(map(problem.fits, itertools.accumulate(changes[action] for action in order))):
            continue
        tried = _state(actions, [*state.orders[:device], order, *state.orders[device + 1 :]])
        if tried is not None and tried.costs <= state.costs:
            state, moves = tried, _moves(actions, tried)
    rows = table.actions[["kind", "microbatch", "chunk"]].tolist()
    return place_actions(
        [[Action(*rows[a]) for a in order] for order in state.orders], table.stages, table.num_microbatches
    )


def _state(actions: ActionGraph, orders: list[list[int]]) -> SearchState | None:
    ends = end_times(actions, orders)
    if ends is None:
        return None
    spans = [ends[order[-1]] - ends[order[0]] + actions.durations[order[0]] for order in orders]
    return SearchState(orders, ends, (max(spans), sum(span * span for span in spans)))


def _moves(actions: ActionGraph, state: SearchState) -> list[tuple[int, int]]:
    """Return the possible moves: (device, position) of the action to move ahead.

    These are the actions on critical paths that start when the previous action of their device ends, except those that
    depend on it.
    """
    where = {action: (d, i) for d, order in enumerate(state.orders) for i, action in enumerate(order)}
    moves = set()
    for order in state.orders:
        span = state.ends[order[-1]] - state.ends[order[0]] + actions.durations[order[0]]
        action: int | None = order[-1] if span >= state.costs[0] * (1 - 1e-9) else None
        while action is not None:
            device, position = where[action]
            sources = [(state.ends[source] + delay, source) for source, delay in actions.inputs[action]]
            latest, source = max(sources, default=(-1, -1))
            before = state.orders[device][position - 1] if position else None
            if before is not None and state.ends[before] >= latest:
                if before not in [source for _, source in sources]:
                    moves.add((device, position))
                action = before
            else:
                action = source if source >= 0 else None
    return sorted(moves)


def _moved(actions: ActionGraph, order: Sequence[int], position: int, steps: int) -> list[int] | None:
    """Return the order with an action moved ahead by `steps`, or as far as its inputs allow; None if it cannot move."""
    needs = {source for source, _ in actions.inputs[order[position]]}
    to = position
    while to > 0 and position - to < steps and order[to - 1] not in needs:
        to -= 1
    return [*order[:to], order[position], *order[to:position], *order[position + 1 :]] if to < position else None
