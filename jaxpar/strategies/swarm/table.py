"""Table of a training run of a swarm: which peer computed which pass of which microbatch, and when.

From a table, the emulated strategy trains the real model: the counted backward passes of a step are its gradients.
"""

import csv
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.files import write_text
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, COUNTED, FORWARD_PASS, LOST

ROUTING_HEAD = ("num_stages", "num_microbatches", "delay")
PHASE_NAMES = ("F", "B")
OUTCOME_NAMES = ("counted", "repeated", "lost")
_ROUNDING = 1e-9  # relative: by this much, sums of the same seconds can differ


class RoutingTable(NamedTuple):
    """R passes, in the order in which they started.

    Attributes:
      num_stages: number of stages.
      num_microbatches: number of microbatches in a global batch.
      delay: 1 with delayed parameter updates, otherwise 0. Step t reads version max(t - delay, 0) of the weights.
      step: [R] int32, the step.
      microbatch: [R] int32, the microbatch of the step.
      stage: [R] int32, the stage.
      phase: [R] int32, FORWARD_PASS or BACKWARD_PASS; backward includes the gradient of the weights.
      peer: [R] int32, the peer.
      version: [R] int32, the version of the weights; update t makes version t + 1 from the gradients of step t.
      start: [R] float64, seconds.
      finish: [R] float64, seconds; for an interrupted pass, when its peer failed.
      outcome: [R] int32, COUNTED; REPEATED only for its output; or LOST: interrupted, or accumulated by a peer that
        failed before the update.
    """

    num_stages: int
    num_microbatches: int
    delay: int
    step: np.ndarray
    microbatch: np.ndarray
    stage: np.ndarray
    phase: np.ndarray
    peer: np.ndarray
    version: np.ndarray
    start: np.ndarray
    finish: np.ndarray
    outcome: np.ndarray


class ServiceTable(NamedTuple):
    """N intervals in which a peer served a stage: arrays [N] of peer, stage, and begin and end in seconds."""

    peer: np.ndarray
    stage: np.ndarray
    begin: np.ndarray
    end: np.ndarray


ROUTING_COLUMNS = RoutingTable._fields[3:]
_NAMES = {"phase": PHASE_NAMES, "outcome": OUTCOME_NAMES}


def make_routing_table(num_stages: int, num_microbatches: int, delay: int, rows: list[list[float]]) -> RoutingTable:
    """Return a table from its rows, whose values are in the order of ROUTING_COLUMNS."""
    columns = np.array(rows, np.float64).reshape(-1, len(ROUTING_COLUMNS)).T
    is_time = [name in ("start", "finish") for name in ROUTING_COLUMNS]
    made = (column.copy() if time else column.astype(np.int32) for column, time in zip(columns, is_time, strict=True))
    return RoutingTable(num_stages, num_microbatches, delay, *made)


def check_routing(table: RoutingTable, service: ServiceTable | None = None) -> None:
    """Raise ValueError at the first rule that a table breaks, with the row.

    Rules: each backward and each forward pass of every (step, microbatch, stage) is counted exactly once; steps are
    numbered from 0; the version is that of the step; a pass starts after a finished pass that computed its input; a
    peer computes one pass at a time; and, with `service`, the peer serves the stage from start to finish.
    """
    for is_bad, rule in _routing_rules(table):
        if is_bad.any():
            raise ValueError(f"row {int(is_bad.argmax())}: {rule(int(is_bad.argmax()))}")
    wanted = (int(table.step.max()) + 1) * table.num_microbatches * table.num_stages
    for phase in (FORWARD_PASS, BACKWARD_PASS):
        found = int(((table.outcome == COUNTED) & (table.phase == phase)).sum())
        if found != wanted:
            raise ValueError(f"{found} {PHASE_NAMES[phase]} passes are counted; they must be {wanted}")
    if service is not None:
        _check_service(table, service)


def _routing_rules(table: RoutingTable) -> Iterator[tuple[np.ndarray, Callable[[int], str]]]:
    """Yield the rows that break a rule, and the rule as a function of the row."""
    limits = {"microbatch": table.num_microbatches, "stage": table.num_stages, "phase": 2, "outcome": 3}
    for name, limit in limits.items():
        values = getattr(table, name)
        yield (
            (values < 0) | (values >= limit),
            lambda row, n=name, v=values, m=limit: (  # type: ignore[misc]
                f"{n} is {v[row]}; it must be between 0 and {m - 1}"
            ),
        )
    yield table.step < 0, lambda row: f"step is {table.step[row]}; it must be at least 0"
    yield (
        table.version != np.maximum(table.step - table.delay, 0),
        lambda row: f"version is {table.version[row]}; it must be {max(table.step[row] - table.delay, 0)}",
    )
    is_late = table.finish < table.start
    yield is_late, lambda row: f"finish is {table.finish[row]}; it must be at least start, {table.start[row]}"
    key = np.ravel_multi_index(
        (table.step, table.microbatch, table.stage, table.phase),
        (int(table.step.max(initial=0)) + 1, table.num_microbatches, table.num_stages, 2),
    )
    counted = np.flatnonzero(table.outcome == COUNTED)
    again = np.zeros(len(key), bool)
    again[counted] = True
    again[counted[np.unique(key[counted], return_index=True)[1]]] = False
    yield again, lambda _row: "outcome is counted, as in a row above; it must be counted once"
    yield _early(table, key), lambda row: f"start is {table.start[row]}; its input must be computed before"
    by_peer = np.lexsort((table.finish, table.start, table.peer))
    same = np.diff(table.peer[by_peer]) == 0
    overlap = same & (table.start[by_peer][1:] < table.finish[by_peer][:-1] * (1 - _ROUNDING))
    busy = np.zeros(len(key), bool)
    busy[by_peer[1:][overlap]] = True
    yield busy, lambda row: f"start is {table.start[row]}; it must be when peer {table.peer[row]} is idle"


def _early(table: RoutingTable, key: np.ndarray) -> np.ndarray:
    """Return [R] bool: whether a pass starts before any pass that computes its input has finished."""
    ended: dict[int, float] = {}
    for one, finish, start, outcome, phase in zip(
        key.tolist(),
        table.finish.tolist(),
        table.start.tolist(),
        table.outcome.tolist(),
        table.phase.tolist(),
        strict=True,
    ):
        # An interrupted pass has no output. A lost backward pass may have been interrupted, or have had one.
        if (outcome != LOST or phase == BACKWARD_PASS) and finish > start:
            ended[one] = min(finish, ended.get(one, math.inf))
    is_early = np.zeros(len(key), bool)
    for row, (one, stage, phase, start) in enumerate(
        zip(key.tolist(), table.stage.tolist(), table.phase.tolist(), table.start.tolist(), strict=True)
    ):
        needs = [one - 2] if phase == FORWARD_PASS and stage > 0 else []
        if phase == BACKWARD_PASS:
            needs = [one - 1] if stage == table.num_stages - 1 else [one + 2]
        is_early[row] = any(ended.get(need, math.inf) > start * (1 + _ROUNDING) + _ROUNDING for need in needs)
    return is_early


def _check_service(table: RoutingTable, service: ServiceTable) -> None:
    intervals: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for peer, stage, begin, end in zip(*(column.tolist() for column in service), strict=True):
        intervals.setdefault((peer, stage), []).append((begin, end))
    rows = zip(*(getattr(table, name).tolist() for name in ("peer", "stage", "start", "finish")), strict=True)
    for row, (peer, stage, start, finish) in enumerate(rows):
        if not any(begin <= start and finish <= end for begin, end in intervals.get((peer, stage), [])):
            raise ValueError(f"row {row}: peer is {peer}; it must serve stage {stage} from {start} to {finish}")


def write_routing(path: Path | str, table: RoutingTable) -> None:
    """Write a valid table as CSV: a line with the sizes, the names of the columns, and one row per pass."""
    check_routing(table)
    text = io.StringIO()
    text.write("# " + " ".join(f"{name}={value}" for name, value in zip(ROUTING_HEAD, table[:3], strict=True)) + "\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(ROUTING_COLUMNS)
    columns = [
        [_NAMES[name][value] for value in column] if name in _NAMES else column
        for name, column in zip(ROUTING_COLUMNS, (column.tolist() for column in table[3:]), strict=True)
    ]
    writer.writerows(zip(*columns, strict=True))
    write_text(Path(path), text.getvalue())
