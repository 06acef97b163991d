"""Checks the script: its results, against the targets and hand counts, and its errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpar.commands import swarm_simulate
from jaxpar.strategies.swarm import reports
from jaxpar.strategies.swarm.availability import LEAVE, PeerEvent, SwarmPeer, read_swarm_trace
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.progress import COUNTED, LOST, REPEATED
from jaxpar.strategies.swarm.scenario import SwarmScenario, write_scenario
from tests.runs import script_error
from tests.strategies.swarm.scenarios import make_scenario


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    swarm_simulate.main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_rebalancing_of_400_peers() -> None:
    """The targets are the published 0.958 and 0.976, on a trace with 0.827 without rebalancing."""
    lines, result = reports.rebalancing(swarm_simulate.read_flags(["--peers=400", "--stages=4", "--rule=balance"]))
    none, slow, fast = (case["efficiency"] for case in result["cases"])
    assert none == pytest.approx(0.827, abs=0.01)
    assert slow >= 0.958
    assert fast >= 0.976
    assert [line.split()[-1] for line in lines[1:]] == ["published", "0.827", "-", "-"]


SMALL = ("--peers=12", "--stages=3", "--hours=4", "--lifetime=3", "--rejoin=1")


def test_a_written_trace_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    made = simulate(capsys, *SMALL, f"--make_trace={path}")
    again = simulate(capsys, *SMALL[:3], f"--trace={path}", f"--out={tmp_path / 'capacity.svg'}")
    assert made == again
    assert [case["rule"] for case in made["cases"]] == ["none", "paper", "paper", "balance", "balance"]
    assert read_swarm_trace(path, [SwarmPeer(f"p{n}") for n in range(12)])
    drawn = (tmp_path / "capacity.svg").read_text()
    none, paper, later, balance, _ = (f"{case['efficiency']:.1%} of the optimum" for case in made["cases"])
    assert f"no rebalancing: throughput {none}" in drawn
    assert f"rule paper, every 300 s: throughput {paper}" in drawn
    assert f"rule balance, every 300 s: throughput {balance}" in drawn
    assert later not in drawn  # the other period has no panel
    one = simulate(capsys, *SMALL, "--rebalance_seconds=300", "--rule=paper")
    assert one["cases"] == made["cases"][:2]


def test_gpipe_at_several_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    """GPipe takes (4 + 1) (0.1 + 0.3) s and one message each way, of 0.04 s and the latency; the ideal is 4 x 0.4 s."""
    flags = ("--report=latency", "--peers=4", "--stages=2", "--num_microbatches=8")
    cases = simulate(capsys, *flags)["cases"]
    for case in cases:
        assert case["gpipe"] == pytest.approx(1.6 / (2.0 + 2 * (0.04 + case["latency"])))
        assert case["delayed"] > case["gpipe"]
    assert all(0 < case["swarm"] <= 1 for case in cases)


def test_square_cube_law(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand for width 1000 and 100 tokens: 7.32 GFLOP, 2 x 200 kB at 1 MB/s, and two round trips of 0.1 s."""
    used = reports.device_utilization(1000, 100, 2.0, flops=7.32e9, bandwidth=1e6, latency=0.1)
    assert used == pytest.approx(1 / 1.6)
    cases = simulate(capsys, "--report=width")["cases"]
    at_once = [case["utilization"][1] for case in cases if case["latency"] == 0]
    assert at_once == sorted(at_once)
    assert {case["published"] for case in cases if case["width"] == 768} == {0.18, 0.015, None}


@pytest.mark.parametrize("flag", ["--peers=399", "--stages=3", "--hours=15", "--lifetime=3", "--bandwidth=100"])
def test_published_results_are_for_their_settings_only(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm_simulate.read_flags(["--seed=1"]).is_published
    assert not swarm_simulate.read_flags([flag]).is_published
    swarm_simulate.main(["--peers=8", "--stages=2", "--hours=0.1"])
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "rebalancing               throughput / optimal   moves",
        "none                                     0.792       0",
    ]


def test_too_many_events(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reports, "MAX_EVENTS", 1000)
    output, error = script_error(monkeypatch, capsys, swarm_simulate, "--lifetime=0.01", "--rejoin=0.01", "--hours=2")
    assert output == ""
    assert error.startswith("--hours is 2; it must be less than 0.0")
    assert error.endswith("because by then peers with these rates have failed and joined 1,000 times\n")


def test_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = SwarmScenario(*make_scenario(3))
    write_scenario(tmp_path / "scenario.json", scenario)
    run = scenario.run()
    assert simulate(capsys, "--report=replay", f"--scenario={tmp_path / 'scenario.json'}") == {
        "steps": 6,
        "seconds": run.update_times[-1],
        "failures": sum(event.event == LEAVE and event.seconds < run.update_times[-1] for event in scenario.trace),
        "moves": len(run.moves),
        "counted": int((run.table.outcome == COUNTED).sum()),
        "repeated": int((run.table.outcome == REPEATED).sum()),
        "lost": int((run.table.outcome == LOST).sum()),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers=3"], "--peers is 3, 3 peers; it must be at least --stages, 4"),
        (["--peers=none.csv"], "--peers is 'none.csv', which does not exist; it must be the path of a CSV file"),
        (["--trace=none.csv"], "--trace is 'none.csv', which does not exist; it must be the path of a CSV file"),
        (["--trace=one.csv", "--make_trace=two.csv"], "--make_trace is two.csv; it must be left out with --trace"),
        (["--trace=one.csv", "--lifetime=2"], "--lifetime is 2.0; it must be left out with --trace"),
        (["--peers="], "--peers is ''; it must be between 1 and 5000, or a file of peers"),
        (["--report=width", "--out=a.png"], "--out is a.png; it must be left out with --report=width"),
        (["--report=latency", "--hours=2"], "--hours is 2.0; it must be left out with --report=latency"),
        (["--forward=inf"], "--forward is 'inf'; it must be finite and greater than 0"),
        (
            ["--trace=late.csv", "--peers=4"],
            "--trace is 'late.csv', which begins with 3 peers; it must begin with at least --stages, 4",
        ),
        (
            ["--trace=at_once.csv", "--peers=4"],
            "--trace is 'at_once.csv', which begins with 0 peers; it must begin with at least --stages, 4",
        ),
        (["--peers=\u0664"], "--peers is '\u0664', which does not exist; it must be the path of a CSV file"),
        (["--peers=0"], "--peers is 0; it must be between 1 and 5000, or a file of peers"),
        (
            ["--report=replay"],
            "--scenario is missing; it must be set, as in --report=replay --scenario=runs/swarm/scenario.json",
        ),
        (
            ["--report=replay", "--scenario=empty.json"],
            "--scenario is 'empty.json'; it must let the peers train, but stage 1 has no peer from second 5 on, and no "
            "other peer can move there or joins",
        ),
        (["--lifetime=0"], "--lifetime is '0'; it must be between 0.01 and 1000000"),
        (["--hours=1e300"], "--hours is '1e300'; it must be between 0.01 and 1000000"),
        (["--hours=1e6"], "--hours is 1e+06; it must be at most 16666.7 with a period of 60 s"),
        (["--groups=401"], "--groups is 401; it must be at most the number of peers, 400"),
        (
            ["--report=latency", "--num_microbatches=1000000000"],
            "--num_microbatches is 1000000000; it must be at most 1000 for --report=latency",
        ),
        (
            ["--report=latency", "--peers=4000"],
            "--peers is 4000; it must be at most 1000 for --report=latency",
        ),
        (["--bandwidth=-1"], "--bandwidth is '-1'; it must be finite and greater than 0"),
        (["--rebalance_seconds=-1"], "--rebalance_seconds is '-1'; it must be between 1 and 1000000000"),
        (["--stages=0"], "--stages is 0; it must be at least 1"),
        (["--out=load.txt"], "--out is 'load.txt'; it must end in one of .png, .svg"),
        (
            ["--make_trace=no/trace.csv"],
            "--make_trace is 'no/trace.csv'; it must be in an existing directory, and 'no' is not one",
        ),
        (
            ["--out=no/load.png", *SMALL],
            "--out is 'no/load.png'; it must be in an existing directory, and 'no' is not one",
        ),
        (
            ["--report=latency", "--peers=peers.csv"],
            "--peers is 'peers.csv'; for --report=latency it must be a number of equal peers",
        ),
        (
            ["--report=latency", "--peers=10"],
            "--peers is 10; for GPipe it must be a multiple of --stages, 4, and --num_microbatches, 64, a multiple of "
            "the number of pipelines",
        ),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("late.csv").write_text("seconds,peer,event\n5,p1,join\n")
    Path("at_once.csv").write_text("seconds,peer,event\n" + "".join(f"0,p{peer},leave\n" for peer in range(4)))
    stays, fails = SwarmPeer("a"), SwarmPeer("b")
    work, trace = Workload((1.0, 1.0), (1.0, 1.0)), [PeerEvent(5.0, 1, LEAVE)]
    write_scenario("empty.json", SwarmScenario([stays, fails], work, trace, SwarmSettings(9, 2)))
    assert script_error(monkeypatch, capsys, swarm_simulate, *arguments) == ("", f"{message}\n")
