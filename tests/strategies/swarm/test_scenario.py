"""Checks the files of scenarios: a run replays from its file, to the last bit, and wrong files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpar.errors import UserError
from jaxpar.strategies.swarm.availability import RandomTrace, events_before
from jaxpar.strategies.swarm.run import run_swarm
from jaxpar.strategies.swarm.scenario import RunActions, SwarmScenario, read_scenario, write_scenario
from tests.strategies.swarm.scenarios import make_scenario


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_random", [False, True])
def test_a_run_replays_from_its_file(seed: int, is_random: bool, tmp_path: Path) -> None:
    peers, workload, trace, settings = make_scenario(seed)
    rates = RandomTrace(len(peers), lifetime=60, rejoin=15, seed=seed)
    assert trace == events_before(rates, 2000)
    scenario = SwarmScenario(peers, workload, rates if is_random else trace, settings)
    write_scenario(tmp_path / "scenario.json", scenario)
    read = read_scenario(tmp_path / "scenario.json", "--scenario")
    assert read == scenario
    expected = run_swarm(*make_scenario(seed))
    got = read.run()
    assert got.actions == expected.actions
    assert [column.tobytes() for column in got.table[3:]] == [column.tobytes() for column in expected.table[3:]]


def test_actions_after_the_end() -> None:
    scenario = SwarmScenario(*make_scenario(5))
    actions, longer = RunActions(scenario, scenario.run(2)), scenario.run(9)
    assert [actions(step) for step in (1, 0, 8, 2)] == [longer.actions[step] for step in (1, 0, 8, 2)]


# The path of a value in the file, the value, and what the message must contain.
WRONG: list[tuple[list[str | int], Any, str]] = [
    (["peers"], [], "there are 0 peers; there must be 1 to 5000"),
    (["peers"], {}, "peers must be a list of rows"),
    (["peers", 0], ["a", "1", "1"], "peers, row 0 must be a list of 4 texts"),
    (["peers", 0], ["a", 1, "1", "0"], "peers, row 0 must be a list of 4 texts"),
    (["peers", 0], ["a", "-1", "9", "0"], "peers, row 0: speed is '-1'; it must be between 1e-06 and 1e+06"),
    (["workload"], 3, "workload must be an object with the fields forward, backward, activation_bytes, "),
    (["workload", "forward"], 1.0, "forward is 1.0; it must be a list"),
    (["workload", "forward"], [], "forward and backward must have a number for each stage"),
    (["workload", "forward", 0], "1", 'forward is "1"; it must be between 1e-09 and 1e+09'),
    (["workload", "state_bytes"], -1.0, "state_bytes is -1.0; it must be between 0 and 1e+18"),
    (["trace", 0], ["5", "zeta", "leave"], "trace, row 0: peer is 'zeta'; it must be one of the"),
    (["trace"], {"lifetime": 1}, "trace must be an object with the fields num_peers, lifetime, rejoin"),
    (["settings", "num_steps"], 0, "num_steps is 0; it must be between 1 and 1e+06"),
    (["settings", "num_steps"], 2.5, "num_steps is 2.5; it must be between 1 and 1e+06"),
    (["settings", "num_steps"], 10**30, "num_steps is 1000000000000000000000000000000; it must be between"),
    (["settings", "rule"], "best", 'rule is "best"; it must be one of paper, balance'),
    (["settings", "rule"], ["best"], 'rule is ["best"]; it must be one of paper, balance'),
    (["settings", "rebalance_seconds"], None, "rebalance_seconds is null; it must be between 0 and 1e+12"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_scenarios_that_cannot_be(path: list[Any], value: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    write_scenario(file, SwarmScenario(*make_scenario(0)))
    content = json.loads(file.read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(UserError) as raised:
        read_scenario(file, "--scenario")
    text = str(raised.value)
    assert text.startswith(f"--scenario is '{file}'; it must be a scenario that a run has written: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"peers": []}'])
def test_files_that_are_no_scenario(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"it must be a scenario that a run has written: .+$"):
        read_scenario(file, "--scenario")


def test_paths_without_a_scenario(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--scenario is .*, which is a directory; it must be the path of a scenario$"):
        read_scenario(tmp_path, "--scenario")
