"""Passes of a swarm, the actions of its peers, and the record of a run.

With the actions of a simulated run, real peers can repeat it exactly: they contain the passes, which are the rows of
the routing table, and also the messages that arrive, and the failures.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxpar.strategies.swarm.membership import Move
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS, LOST
from jaxpar.strategies.swarm.table import ROUTING_COLUMNS, RoutingTable, ServiceTable, make_routing_table

RECEIVE_INPUT, RECEIVE_GRADIENT, FAILURE = 2, 3, 4  # kinds of actions, besides FORWARD_PASS and BACKWARD_PASS
RECEIVE = (RECEIVE_INPUT, RECEIVE_GRADIENT)  # by value: STAGE_INPUT, OUTPUT_GRADIENT
_START, _FINISH, _OUTCOME = (ROUTING_COLUMNS.index(name) for name in ("start", "finish", "outcome"))


class SwarmAction(NamedTuple):
    """An action of a peer. Actions are in order of time: of passes, when they end, and of messages, when they arrive.

    Attributes:
      kind: FORWARD_PASS or BACKWARD_PASS; RECEIVE_INPUT: receive the input of the stage; RECEIVE_GRADIENT: receive the
        gradient of its output; or FAILURE: lose everything.
      microbatch: the microbatch of the step; -1 in a failure.
      stage: the stage; -1 in a failure.
      peer: the peer.
      source: the peer that sent a message; -1 if there is none.
      is_counted: whether the gradient of a backward pass is accumulated; false if it is repeated only for its output.
    """

    kind: int
    microbatch: int = -1
    stage: int = -1
    peer: int = -1
    source: int = -1
    is_counted: bool = False


def num_messages(actions: Sequence[Sequence[SwarmAction]]) -> Counter[int]:
    """Return the number of activations and gradients that peers send to each other, by the stage before the link."""
    messages = (action for step in actions for action in step if action.kind in RECEIVE)
    return Counter(action.stage - (action.kind == RECEIVE_INPUT) for action in messages)


def devices_of_stages(
    actions: Sequence[Sequence[SwarmAction]], num_stages: int, device_of: Callable[[int], int]
) -> list[list[int]]:
    """Return the devices on which passes of each stage are computed in any step. device_of: peer -> its device."""
    devices: list[set[int]] = [set() for _ in range(num_stages)]
    for step in actions:
        for action in step:
            if action.kind in (FORWARD_PASS, BACKWARD_PASS):
                devices[action.stage].add(device_of(action.peer))
    return [sorted(of_stage) for of_stage in devices]


@dataclass(eq=False)
class AssignedPass:
    """A pass that has been assigned to a peer: in transit, queued or started.

    Attributes:
      sources: the values that are in transit, STAGE_INPUT or OUTPUT_GRADIENT: the peer that sends them.
      is_started: whether the transport was asked to let the peer compute it.
      is_repeat: whether the peer does not accumulate its gradient, because it was counted when the pass started.
      row: its row in the record.
    """

    step: int
    microbatch: int
    phase: int
    stage: int
    peer: int
    sources: dict[int, int] = field(default_factory=dict)
    is_started: bool = False
    is_repeat: bool = False
    row: int = -1

    @property
    def key(self) -> tuple[int, int]:
        """Step and microbatch."""
        return self.step, self.microbatch


class SwarmRun(NamedTuple):
    """Result of a run.

    Attributes:
      table: its passes.
      service: which peer served which stage when.
      update_times: time of the update of each step.
      moves: moves of peers between stages, with their times.
      actions: what the peers did in each step.
      groups: by step and stage, the peers that averaged their gradients.
    """

    table: RoutingTable
    service: ServiceTable
    update_times: list[float]
    moves: list[tuple[float, Move]]
    actions: list[list[SwarmAction]]
    groups: list[list[list[int]]]


class RunRecord:
    """A run so far. `service` lists the intervals in which a peer served a stage; the others are as in SwarmRun."""

    def __init__(self) -> None:
        self.update_times: list[float] = []
        self.moves: list[tuple[float, Move]] = []
        self.actions: list[list[SwarmAction]] = []
        self.groups: list[list[list[int]]] = []
        self.service: list[tuple[int, int, float, float]] = []
        self._rows: list[list[float]] = []

    def begin_pass(self, one: AssignedPass, version: int, now: float) -> None:
        """Add the row of a pass that begins. It is lost until `end_pass`."""
        one.row = len(self._rows)
        self._rows.append([one.step, one.microbatch, one.stage, one.phase, one.peer, version, now, math.nan, LOST])

    def end_pass(self, one: AssignedPass, now: float, outcome: int) -> float:
        """Set the end of a pass, and return its seconds."""
        row = self._rows[one.row]
        row[_FINISH:] = [now, outcome]
        return now - row[_START]

    def lose_pass(self, row: int) -> None:
        """Set the outcome of a pass whose gradient is lost."""
        self._rows[row][_OUTCOME] = LOST

    def forget(self, step: int) -> None:
        """Remove the passes of a step that ends without an update."""
        self._rows = [row for row in self._rows if row[0] != step]

    def table(self, num_stages: int, num_microbatches: int, delay: int, num_steps: int) -> RoutingTable:
        """Return the passes of the first `num_steps` steps."""
        rows = [row for row in self._rows if row[0] < num_steps]
        return make_routing_table(num_stages, num_microbatches, delay, rows)

    def run(self, table: RoutingTable) -> SwarmRun:
        """Return the run whose passes are in a table."""
        columns = np.array(self.service).T
        service = ServiceTable(columns[0].astype(np.int32), columns[1].astype(np.int32), columns[2], columns[3])
        actions = self.actions[: int(table.step.max()) + 1]
        return SwarmRun(table, service, self.update_times, self.moves, actions, self.groups)
