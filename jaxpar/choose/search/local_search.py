"""Improves a schedule by local search: it moves actions on a critical path ahead of actions that they do not depend on.

The moves are those of job-shop scheduling (van Laarhoven, Aarts and Lenstra, "Job Shop Scheduling by Simulated
Annealing", 1992): only a change of order on a critical path can make that path shorter.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.choose.search.insert_w import SearchProblem
from jaxpar.strategies.pipeline.tables.simulate import ActionGraph, Time, action_graph, end_times
from jaxpar.strategies.pipeline.tables.table import BW, Action, B, Table, W, place_actions


class SearchState(NamedTuple):
    """A candidate schedule: the orders by device, the end time of each action, and the costs.

    The costs are the longest span and the sum of squared spans, compared in this order.
    """

    orders: list[list[int]]
    ends: list[Time]
    costs: tuple[Time, Time]


def improve(problem: SearchProblem, table: Table, evaluations: int, rng: random.Random) -> Table:
    """Try `evaluations` random moves, and accept those that fit the memory limit and do not increase the costs.

    The result has B and W instead of BW.
    """
    table = _split(table)
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
        if order is None or not _fits(problem, changes, order):
            continue
        tried = _state(actions, [*state.orders[:device], order, *state.orders[device + 1 :]])
        if tried is not None and tried.costs <= state.costs:
            state, moves = tried, _moves(actions, tried)
    rows = table.actions[["kind", "microbatch", "chunk"]].tolist()
    return place_actions(
        [[Action(*rows[a]) for a in order] for order in state.orders], table.stages, table.num_microbatches
    )


def _split(table: Table) -> Table:
    """Return the table with every BW replaced by a B and a W."""
    orders: list[list[Action]] = [[] for _ in range(table.num_devices)]
    for _, device, kind, microbatch, chunk, *_ in table.actions.tolist():
        kinds = (B, W) if kind == BW else (kind,)
        orders[device] += [Action(each, microbatch, chunk) for each in kinds]
    return place_actions(orders, table.stages, table.num_microbatches)


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


def _fits(problem: SearchProblem, changes: Sequence[float], order: Sequence[int]) -> bool:
    stashed = 0.0
    for action in order:
        stashed += changes[action]
        if not problem.fits(stashed):
            return False
    return True
