"""Passes of a swarm, the actions of its peers, and the record of a run.

With the actions of a simulated run, real peers can repeat it exactly: they contain the passes, which are the rows of
the routing table, and also the messages that arrive, and the failures.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxpar.strategies.swarm.membership import Move
from jaxpar.strategies.swarm.progress import LOST
from jaxpar.strategies.swarm.table import ROUTING_COLUMNS, RoutingTable, Service

RECEIVE_INPUT, RECEIVE_GRADIENT, FAILURE = 2, 3, 4  # kinds of actions, besides FORWARD_PASS and BACKWARD_PASS
RECEIVE = (RECEIVE_INPUT, RECEIVE_GRADIENT)  # by value: STAGE_INPUT, OUTPUT_GRADIENT
_START, _FINISH, _OUTCOME = (ROUTING_COLUMNS.index(name) for name in ("start", "finish", "outcome"))


class SwarmAction(NamedTuple):
    """An action of a peer. They are in order of time: of passes, when they end, and of messages, when they arrive."""

    # FORWARD_PASS or BACKWARD_PASS; RECEIVE_INPUT: receive the input of the stage; RECEIVE_GRADIENT: receive the
    # gradient of its output; or FAILURE: lose everything
    kind: int
    microbatch: int = -1  # of the step; -1 in a failure
    stage: int = -1  # -1 in a failure
    peer: int = -1
    source: int = -1  # the peer that sent a message; -1 if there is none
    is_counted: bool = False  # whether the gradient of a backward pass is accumulated, or repeated for its output only


@dataclass(eq=False)
class AssignedPass:
    """A pass that has been assigned to a peer: in transit, queued or started."""

    step: int
    microbatch: int
    phase: int
    stage: int
    peer: int
    # the values that are in transit, STAGE_INPUT or OUTPUT_GRADIENT: the peer that sends them
    sources: dict[int, int] = field(default_factory=dict)
    is_started: bool = False  # whether the transport was asked to let the peer compute it
    is_repeat: bool = False  # whether its gradient is not accumulated, because it was counted when the pass started
    row: int = -1  # in the record

    @property
    def key(self) -> tuple[int, int]:
        """Step and microbatch."""
        return self.step, self.microbatch


class SwarmRun(NamedTuple):
    """Result of a run."""

    table: RoutingTable  # its passes
    service: list[Service]  # which peer served which stage when
    update_times: list[float]  # time of the update of each step
    moves: list[tuple[float, Move]]  # moves of peers between stages, with their times
    actions: list[list[SwarmAction]]  # what the peers did in each step
    groups: list[list[list[int]]]  # by step and stage, the peers that averaged their gradients


class RunRecord:
    """A run so far. `service` lists the intervals in which a peer served a stage; the others are as in SwarmRun."""

    def __init__(self) -> None:
        self.update_times: list[float] = []
        self.moves: list[tuple[float, Move]] = []
        self.actions: list[list[SwarmAction]] = []
        self.groups: list[list[list[int]]] = []
        self.service: list[Service] = []
        self._rows: list[list[float]] = []

    def begin_pass(self, one: AssignedPass, version: int, now: float) -> None:
        """Add the row of a pass that begins. It is lost until `end_pass`."""
        one.row = len(self._rows)
        self._rows.append([one.step, one.microbatch, one.stage, one.phase, one.peer, version, now, math.nan, LOST])

    def end_pass(self, one: AssignedPass, now: float, outcome: int = LOST) -> float:
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
        columns = np.array(rows, np.float64).reshape(-1, len(ROUTING_COLUMNS)).T
        dtypes = [np.float64 if name in ("start", "finish") else np.int32 for name in ROUTING_COLUMNS]
        made = [column.astype(dtype) for column, dtype in zip(columns, dtypes, strict=True)]
        return RoutingTable(num_stages, num_microbatches, delay, *made)

    def run(self, table: RoutingTable) -> SwarmRun:
        """Return the run whose passes are in a table."""
        actions = self.actions[: int(table.step.max()) + 1]
        return SwarmRun(table, self.service, self.update_times, self.moves, actions, self.groups)
