"""Scenarios: all that a simulated run depends on. A run replays exactly from the file of its scenario.

The file is JSON: an object with the fields of SwarmScenario. Peers and trace are lists of rows with the values of their
CSV files (availability.py), as text. A random trace is an object with the attributes of RandomTrace, where null is
infinity.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.errors import UserError
from jaxpar.files import json_text, open_text, parse_json, path_error, write_text
from jaxpar.strategies.swarm import availability
from jaxpar.strategies.swarm.availability import RandomTrace, SwarmPeer, Trace
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.membership import REBALANCING_RULES
from jaxpar.strategies.swarm.record import SwarmAction, SwarmRun
from jaxpar.strategies.swarm.run import run_swarm


class SwarmScenario(NamedTuple):
    """The inputs of a simulated run, which are the arguments of `run_swarm`."""

    peers: Sequence[SwarmPeer]
    workload: Workload
    trace: Trace
    settings: SwarmSettings

    def run(self, num_steps: int | None = None) -> SwarmRun:
        """Return the run, of `num_steps` if they are given."""
        steps = self.settings.num_steps if num_steps is None else num_steps
        return run_swarm(self.peers, self.workload, self.trace, self.settings._replace(num_steps=steps))


class RunActions:
    """The actions of a scenario by step, also after the end of its run.

    A longer run begins with the same rows. A step that is not known yet simulates twice as many steps from the start.
    """

    def __init__(self, scenario: SwarmScenario, run: SwarmRun) -> None:
        self._scenario, self._known = scenario, run.actions

    def __call__(self, step: int) -> Sequence[SwarmAction]:
        """Return the actions of a step. Raises UserError if the trace leaves a stage without a peer by then."""
        if step >= len(self._known):
            self._known = self._scenario.run(2 * (step + 1)).actions
        return self._known[step]


def write_scenario(path: Path | str, scenario: SwarmScenario) -> None:
    """Write a scenario as JSON."""
    peers, workload, trace, settings = scenario
    events: Any
    if isinstance(trace, RandomTrace):
        events = dataclasses.asdict(trace)
    else:
        events = [[str(event.seconds), peers[event.peer].name, event.event] for event in trace]
    rows = [[str(value) for value in peer] for peer in peers]
    value = {"peers": rows, "workload": workload._asdict(), "trace": events, "settings": settings._asdict()}
    write_text(Path(path), json_text(value) + "\n")


def read_scenario(path: Path | str, key: str) -> SwarmScenario:
    """Read the file of a scenario. Raises UserError, which begins with `key`, if it is not one that was written."""
    try:
        with open_text(path) as file:
            return _parse(parse_json(file.read()))
    except OSError as error:
        raise UserError(f"{key} is {str(path)!r}, {path_error(error)}; it must be the path of a scenario") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{key} is {str(path)!r}; it must be a scenario that a run has written: {error}") from error


# The least and the greatest value of each number, which is an integer if these are.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("forward", "backward"), (1e-9, 1e9)),
    **dict.fromkeys(("activation_bytes", "gradient_bytes", "state_bytes"), (0.0, 1e18)),
    **dict.fromkeys(("num_steps", "num_microbatches", "groups"), (1, 1_000_000)),
    **dict.fromkeys(("in_flight", "seed"), (0, 2**63)),
    **dict.fromkeys(("lifetime", "group_lifetime"), (1e-9, math.inf)),
    **dict.fromkeys(("rebalance_seconds", "rejoin"), (0.0, 1e12)),
    "delayed": (0, 1),
    "group_share": (0.0, 1.0),
}


def _parse(value: object) -> SwarmScenario:
    parts = _object("the file", value, SwarmScenario._fields)
    peers = availability.parse_peers(_rows("peers", parts["peers"], len(availability.PEER_COLUMNS)))
    costs = _object("workload", parts["workload"], Workload._fields)
    for phase in ("forward", "backward"):
        if not isinstance(costs[phase], list):
            raise ValueError(f"{phase} is {json.dumps(costs[phase])[:40]}; it must be a list")
        costs[phase] = tuple(_number(phase, one) for one in costs[phase])
    sizes = {name: _number(name, costs[name]) for name in Workload._fields[2:]}
    workload = Workload(costs["forward"], costs["backward"], **sizes)
    if not 0 < len(workload.forward) == len(workload.backward) <= len(peers):
        raise ValueError("forward and backward must have a number for each stage, and there must be a peer per stage")
    settings = _object("settings", parts["settings"], SwarmSettings._fields)
    rule = settings["rule"]
    if rule not in [*REBALANCING_RULES]:
        raise ValueError(f"rule is {json.dumps(rule)[:40]}; it must be one of {', '.join(REBALANCING_RULES)}")
    settings |= {name: _number(name, settings[name]) for name in settings if name != "rule"}
    settings["delayed"] = bool(settings["delayed"])
    trace: Trace
    if isinstance(parts["trace"], list):
        rows = _rows("trace", parts["trace"], len(availability.TRACE_COLUMNS))
        trace = availability.parse_events(rows, peers)
    else:
        rates = _object("trace", parts["trace"], [field.name for field in dataclasses.fields(RandomTrace)])
        numbers: dict[str, Any] = {name: _number(name, rates[name]) for name in rates if name != "num_peers"}
        trace = RandomTrace(len(peers), **numbers)
    return SwarmScenario(peers, workload, trace, SwarmSettings(**settings))


def _object(name: str, value: object, fields: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != set(fields):
        raise ValueError(f"{name} must be an object with the fields {', '.join(fields)}")
    return value


def _rows(name: str, value: object, size: int) -> Iterator[tuple[str, list[str]]]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of rows")
    for number, row in enumerate(value):
        if not isinstance(row, list) or len(row) != size or not all(isinstance(text, str) for text in row):
            raise ValueError(f"{name}, row {number} must be a list of {size} texts")
        yield f"{name}, row {number}", row


def _number(name: str, value: object) -> float:
    least, greatest = _RANGES[name]
    types = int if isinstance(least, int) else (int, float)
    number = math.inf if value is None and greatest == math.inf else value
    if not isinstance(number, types) or not least <= number <= greatest:
        raise ValueError(f"{name} is {json.dumps(value)[:40]}; it must be between {least:g} and {greatest:g}")
    return number
