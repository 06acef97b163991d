"""Table of a training run of a swarm: which peer computed which pass of which microbatch, and when.

From a table, the emulated strategy trains the real model: the counted backward passes of a step are its gradients.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.files import write_text
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, COUNTED, FORWARD_PASS, LOST

PHASE_NAMES = ("F", "B")
OUTCOME_NAMES = ("counted", "repeated", "lost")
_ROUNDING = 1e-9  # relative: by this much, sums of the same seconds can differ


class RoutingTable(NamedTuple):
    """R passes, in the order in which they started: arrays [R] int32, and of times float64."""

    num_stages: int
    num_microbatches: int  # in a global batch
    delay: int  # 1 with delayed parameter updates, otherwise 0: step t reads version max(t - delay, 0) of the weights
    step: np.ndarray
    microbatch: np.ndarray
    stage: np.ndarray
    phase: np.ndarray  # FORWARD_PASS or BACKWARD_PASS; backward includes the gradient of the weights
    peer: np.ndarray
    version: np.ndarray  # of the weights; update t makes version t + 1 from the gradients of step t
    start: np.ndarray  # seconds
    finish: np.ndarray  # seconds; for an interrupted pass, when its peer failed
    outcome: np.ndarray  # COUNTED; REPEATED for its output; LOST: interrupted, or the peer failed before the update


Service = tuple[int, int, float, float]  # a peer, a stage that it served, and begin and end in seconds
ROUTING_COLUMNS = RoutingTable._fields[3:]
_NAMES = {"phase": PHASE_NAMES, "outcome": OUTCOME_NAMES}


def check_routing(table: RoutingTable, service: Sequence[Service] | None = None) -> None:
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
    if service is None:
        return
    intervals: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for peer, stage, begin, end in service:
        intervals.setdefault((peer, stage), []).append((begin, end))
    rows = zip(*(column.tolist() for column in (table.peer, table.stage, table.start, table.finish)), strict=True)
    for row, (peer, stage, start, finish) in enumerate(rows):
        if not any(begin <= start and finish <= end for begin, end in intervals.get((peer, stage), [])):
            raise ValueError(f"row {row}: peer is {peer}; it must serve stage {stage} from {start} to {finish}")


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
    shape = (int(table.step.max(initial=0)) + 1, table.num_microbatches, table.num_stages, 2)
    key = np.ravel_multi_index((table.step, table.microbatch, table.stage, table.phase), shape)
    counted = np.flatnonzero(table.outcome == COUNTED)
    again = np.zeros(len(key), bool)
    again[counted] = True
    again[counted[np.unique(key[counted], return_index=True)[1]]] = False
    yield again, lambda _row: "outcome is counted, as in a row above; it must be counted once"
    yield (
        _early(table, key, math.prod(shape)),
        lambda row: f"start is {table.start[row]}; its input must be computed before",
    )
    by_peer = np.lexsort((table.finish, table.start, table.peer))
    same = np.diff(table.peer[by_peer]) == 0
    overlap = same & (table.start[by_peer][1:] < table.finish[by_peer][:-1] * (1 - _ROUNDING))
    busy = np.zeros(len(key), bool)
    busy[by_peer[1:][overlap]] = True
    yield busy, lambda row: f"start is {table.start[row]}; it must be when peer {table.peer[row]} is idle"


def _early(table: RoutingTable, key: np.ndarray, num_keys: int) -> np.ndarray:
    """Return [R] bool: whether a pass starts before any pass that computes its input has finished."""
    # An interrupted pass has no output. A lost backward pass may have been interrupted, or have had one.
    has_output = ((table.outcome != LOST) | (table.phase == BACKWARD_PASS)) & (table.finish > table.start)
    ended = np.full(num_keys, np.inf)
    np.minimum.at(ended, key[has_output], table.finish[has_output])
    is_last = table.stage == table.num_stages - 1
    before = np.where(table.phase == FORWARD_PASS, key - 2, np.where(is_last, key - 1, key + 2))
    reads = (table.phase == BACKWARD_PASS) | (table.stage > 0)  # the others read the data
    return reads & (ended[np.where(reads, before, 0)] > table.start * (1 + _ROUNDING) + _ROUNDING)


def write_routing(path: Path | str, table: RoutingTable) -> None:
    """Write a valid table as CSV: a line with the sizes, the names of the columns, and one row per pass."""
    check_routing(table)
    head = f"# num_stages={table.num_stages} num_microbatches={table.num_microbatches} delay={table.delay}"
    columns = [
        [_NAMES[name][value] for value in column] if name in _NAMES else column
        for name, column in zip(ROUTING_COLUMNS, (column.tolist() for column in table[3:]), strict=True)
    ]
    rows = [",".join(map(str, row)) for row in (ROUTING_COLUMNS, *zip(*columns, strict=True))]
    write_text(Path(path), "\n".join([head, *rows]) + "\n")
