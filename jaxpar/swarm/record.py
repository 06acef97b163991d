"""Record of a simulated run of a swarm: its passes, service, updates, moves and actions, as they happen."""

import math
from typing import NamedTuple

import numpy as np

from jaxpar.swarm.actions import SwarmAction
from jaxpar.swarm.batch import AssignedPass
from jaxpar.swarm.ledger import LOST
from jaxpar.swarm.membership import Move
from jaxpar.swarm.table import ROUTING_COLUMNS, RoutingTable, ServiceTable, make_routing_table

_START, _FINISH, _OUTCOME = (ROUTING_COLUMNS.index(name) for name in ("start", "finish", "outcome"))


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
    """A run so far.

    Attributes:
      update_times: time of the update of each step.
      moves: moves of peers between stages, with their times.
      actions: by step, what the peers did.
      groups: by step and stage, the peers that averaged their gradients.
      service: intervals in which a peer served a stage: peer, stage, begin, end.
    """

    def __init__(self) -> None:
        self.update_times: list[float] = []
        self.moves: list[tuple[float, Move]] = []
        self.actions: list[list[SwarmAction]] = []
        self.groups: list[list[list[int]]] = []
        self.service: list[tuple[int, int, float, float]] = []
        self._rows: list[list[float]] = []

    def begin_pass(self, one: AssignedPass, version: int, now: float) -> int:
        """Add a pass that begins, and return its row. It is lost until `end_pass`."""
        self._rows.append([one.step, one.microbatch, one.stage, one.phase, one.peer, version, now, math.nan, LOST])
        return len(self._rows) - 1

    def end_pass(self, row: int, now: float, outcome: int) -> float:
        """Set the end of a pass, and return its seconds."""
        self._rows[row][_FINISH:] = [now, outcome]
        return now - self._rows[row][_START]

    def lose_pass(self, row: int) -> None:
        """Set the outcome of a pass whose gradient is lost."""
        self._rows[row][_OUTCOME] = LOST

    def run(self, num_stages: int, num_microbatches: int, delay: int, num_steps: int) -> SwarmRun:
        """Return the run of the first `num_steps` steps."""
        rows = [row for row in self._rows if row[0] < num_steps]
        table = make_routing_table(num_stages, num_microbatches, delay, rows)
        columns = np.array(self.service).T
        service = ServiceTable(columns[0].astype(np.int32), columns[1].astype(np.int32), columns[2], columns[3])
        return SwarmRun(table, service, self.update_times, self.moves, self.actions[:num_steps], self.groups)
