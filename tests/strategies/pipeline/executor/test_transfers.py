"""Processes that enqueue the actions of their devices in the order of `dispatch_order` never wait for each other.

In the worst case, a transfer blocks its sender and its receiver until both have reached it. Then processes must reach
their transfers in the same order.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxpar.strategies.pipeline.executor.dispatch import DispatchedAction, dispatch_order
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS, fewest_microbatches, periodic_table, unroll
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.table import Table
from tests.strategies.test_pipeline import CASES, Case

Operation = tuple[Any, ...]


def blocked(orders: Sequence[Sequence[Operation]]) -> list[Operation]:
    """Return the operations at which processes wait for each other forever; empty if all of them finish.

    An operation in the orders of several processes runs when it is the next one of all of them.
    """
    owners = {
        operation: [p for p, order in enumerate(orders) if operation in order]
        for order in orders
        for operation in order
    }
    nexts = [0] * len(orders)

    def at(process: int) -> Operation | None:
        return orders[process][nexts[process]] if nexts[process] < len(orders[process]) else None

    while True:
        heads = [(p, one) for p in range(len(orders)) if (one := at(p)) is not None]
        ready = {one for _, one in heads if all(at(p) == one for p in owners[one])}
        if not ready:
            return [one for _, one in heads]
        for process, one in heads:
            nexts[process] += one in ready


def global_orders(table: Table, columns_per_process: int) -> list[list[Operation]]:
    """Return what each process does if all follow one order, as StageDispatcher.run does."""
    orders: list[list[Operation]] = [[] for _ in range(table.num_devices // columns_per_process)]
    for action in dispatch_order(table):
        here = action.column // columns_per_process
        orders[here].append(("run", *action[:-1]))
        if action.to is not None and (there := action.to[1] // columns_per_process) != here:
            for process in (here, there):
                orders[process].append(transfer_of(action))
    return orders


def transfer_of(action: DispatchedAction) -> Operation:
    assert action.to is not None
    return "send", action.phase, action.to[0], action.microbatch


def own_orders(table: Table) -> list[list[Operation]]:
    """Return what each process does if it receives an input when it needs it, one column per process."""
    orders: list[list[Operation]] = [[] for _ in range(table.num_devices)]
    sent = {transfer_of(action): action.to[1] for action in dispatch_order(table) if action.to}
    for action in dispatch_order(table):
        received = "send", action.phase, action.stage, action.microbatch
        if sent.get(received) == action.column:
            orders[action.column].append(received)
        orders[action.column].append(("run", *action[:-1]))
        if action.to is not None:
            orders[action.column].append(transfer_of(action))
    return orders


def test_transfers_in_opposite_orders_block() -> None:
    a, b = ("send", 0, 1, 0), ("send", 1, 0, 0)
    assert blocked([[a, b], [a, b]]) == []
    assert blocked([[a, b], [b, a]]) == [a, b]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_order_for_all_never_blocks(case: Case) -> None:
    table = case.table
    for columns in range(1, table.num_devices + 1):
        if table.num_devices % columns == 0:
            assert blocked(global_orders(table, columns)) == []


@pytest.mark.parametrize("name", CONTINUOUS)
def test_one_order_for_all_never_blocks_without_a_flush(name: str) -> None:
    for replicas in ((1, 1, 1, 1), (2, 1, 1)):
        whole = unroll(periodic_table(name, replicas, fewest_microbatches(name, replicas)), 5)
        for columns in (1, 2, 4):
            assert blocked(global_orders(whole, columns)) == []


def test_the_order_of_each_process_alone_would_block() -> None:
    """In 1F1B, a stage sends its next activation while the stage after it sends a gradient back."""
    table = make_table("1f1b", num_devices=2, num_microbatches=4, num_chunks=1)
    waiting = blocked(own_orders(table))
    assert {operation[:2] for operation in waiting} == {("send", 0), ("send", 1)}
