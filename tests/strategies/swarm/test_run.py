"""Checks runs under random failures: nothing is lost, nothing is counted twice, and every run replays exactly."""

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from jaxpar.errors import UserError
from jaxpar.strategies.swarm.availability import JOIN, LEAVE, PeerEvent, SwarmPeer
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.fluid import run_fluid
from jaxpar.strategies.swarm.progress import (
    BACKWARD_PASS,
    COUNTED,
    FORWARD_PASS,
    LOST,
    REPEATED,
    BatchProgress,
)
from jaxpar.strategies.swarm.record import SwarmRun
from jaxpar.strategies.swarm.run import run_swarm
from jaxpar.strategies.swarm.scenario import read_scenario
from jaxpar.strategies.swarm.table import RoutingTable, check_routing, write_routing
from tests.strategies.swarm.scenarios import Scenario, make_scenario, replayable

SEEDS = range(25)
RUNS: dict[int, SwarmRun] = {}


def run_of(seed: int) -> SwarmRun:
    """Return the run of a scenario, which several tests share."""
    if seed not in RUNS:
        RUNS[seed] = run_swarm(*make_scenario(seed))
    return RUNS[seed]


def check(scenario: Scenario, run: SwarmRun) -> None:
    """Count by hand; the validator then checks dependencies, versions, and that peers serve what they compute."""
    (_, workload, trace, settings), table = scenario, run.table
    counted = np.zeros((settings.num_steps, settings.num_microbatches, len(workload.forward), 2), int)
    is_counted = table.outcome == COUNTED
    np.add.at(counted, tuple(getattr(table, n)[is_counted] for n in ("step", "microbatch", "stage", "phase")), 1)
    assert (counted == 1).all()
    check_routing(table, run.service)
    # Who has accumulated a gradient that counts stays until the update; the weights that a pass reads exist.
    updates = [0.0, *run.update_times]
    for step, phase, peer, version, start, finish, outcome in zip(
        *(getattr(table, n).tolist() for n in ("step", "phase", "peer", "version", "start", "finish", "outcome")),
        strict=True,
    ):
        left = [time for time, who, event in trace if who == peer and event == LEAVE and time >= finish]
        if outcome == COUNTED and phase == BACKWARD_PASS:
            assert finish <= run.update_times[step] <= min(left, default=math.inf)
        assert start >= updates[version]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_counted_twice(seed: int) -> None:
    check(make_scenario(seed), run_of(seed))


# Changes of peers: after how many seconds, and which peer; it leaves if it is present, and otherwise joins.
CHANGES = strategies.lists(strategies.tuples(strategies.floats(0, 20), strategies.integers(0, 6)), max_size=40)


@settings(max_examples=60)
@given(
    changes=CHANGES,
    speeds=strategies.lists(strategies.sampled_from([0.3, 0.5, 1.0, 2.0]), min_size=7, max_size=7),
    delayed=strategies.booleans(),
    period=strategies.sampled_from([0.0, 5.0, 20.0]),
    rule=strategies.sampled_from(["paper", "balance"]),
    in_flight=strategies.integers(0, 4),
)
def test_any_sequence_of_joins_deaths_and_moves(
    changes: list[tuple[float, int]], speeds: list[float], delayed: bool, period: float, rule: str, in_flight: int
) -> None:
    peers = [SwarmPeer(str(n), speed, bandwidth=4.0, latency=0.1) for n, speed in enumerate(speeds)]
    trace: list[PeerEvent] = []
    present, now = set(range(7)), 0.0
    for wait, peer in changes:
        now += wait
        trace.append(PeerEvent(now, peer, LEAVE if peer in present else JOIN))
        present ^= {peer}
    trace += [PeerEvent(now + 1.0, peer, JOIN) for peer in sorted(set(range(7)) - present)]  # so that the run can end
    workload = Workload((1.0, 0.5, 1.0), (2.0, 2.0, 1.0), 1.0, 8.0, 10.0)
    scenario = (peers, workload, trace, SwarmSettings(3, 5, in_flight, delayed, period, rule))
    with replayable(scenario):
        check(scenario, run_swarm(*scenario))


def test_a_failing_test_writes_its_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario = make_scenario(1)
    with pytest.raises(AssertionError) as raised, replayable(scenario):
        raise AssertionError
    assert raised.value.__notes__[0].endswith(f"--report=replay --scenario={tmp_path / 'jaxpar_scenario.json'}")
    assert tuple(read_scenario(tmp_path / "jaxpar_scenario.json", "--scenario")) == scenario


def test_scenarios_have_all_that_can_happen() -> None:
    runs = [run_of(seed) for seed in SEEDS]
    outcomes = np.sum([np.bincount(run.table.outcome, minlength=3) for run in runs], axis=0)
    assert (outcomes > 100).all()
    assert sum(len(run.moves) for run in runs) > 100
    assert {run.table.delay for run in runs} == {0, 1}


def rows(table: RoutingTable) -> list[bytes]:
    return [column.tobytes() for column in table[3:]]


def test_another_seed_is_another_run() -> None:
    peers, workload, trace, settings = make_scenario(3)
    assert rows(run_swarm(peers, workload, trace, settings).table) == rows(run_of(3).table)
    assert rows(run_swarm(peers, workload, trace, settings._replace(seed=4)).table) != rows(run_of(3).table)


def test_the_file_of_a_table_has_every_bit(tmp_path: Path) -> None:
    table = run_of(3).table
    write_routing(tmp_path / "routing.csv", table)
    head, names, *lines = (tmp_path / "routing.csv").read_text().splitlines()
    assert head == f"# num_stages={table.num_stages} num_microbatches={table.num_microbatches} delay={table.delay}"
    assert names == "step,microbatch,stage,phase,peer,version,start,finish,outcome"
    words = {"F": FORWARD_PASS, "B": BACKWARD_PASS, "counted": COUNTED, "repeated": REPEATED, "lost": LOST}
    read = [[float(words.get(text, text)) for text in line.split(",")] for line in lines]
    assert np.array_equal(np.array(read).T, table[3:])


@pytest.mark.parametrize("seed", range(8))
def test_a_longer_run_begins_with_the_same_rows(seed: int) -> None:
    peers, workload, trace, settings = make_scenario(seed)
    long, short = run_of(seed), run_swarm(peers, workload, trace, settings._replace(num_steps=3))
    begins = RoutingTable(*long.table[:3], *(column[long.table.step < 3] for column in long.table[3:]))
    assert rows(short.table) == rows(begins)
    assert short.update_times == long.update_times[:3]


def test_one_peer_per_stage_is_a_pipeline() -> None:
    """Two microbatches in two stages, with passes of 1 s: F0 F1 in each stage, then B0 B1, in 6 s."""
    run = run_swarm([SwarmPeer("a"), SwarmPeer("b")], Workload((1, 1), (1, 1)), [], SwarmSettings(2, 2))
    table = run.table
    first = {
        (int(k), int(s), int(p)): float(f)
        for k, s, p, f in zip(table.microbatch[:8], table.stage[:8], table.phase[:8], table.finish[:8], strict=True)
    }
    assert first == {
        (0, 0, 0): 1, (1, 0, 0): 2, (0, 1, 0): 2, (1, 1, 0): 3, (0, 1, 1): 4, (1, 1, 1): 5, (0, 0, 1): 5, (1, 0, 1): 6,
    }  # fmt: skip
    assert run.update_times == [6, 12]
    assert set(table.outcome.tolist()) == {COUNTED}


def test_messages_take_time() -> None:
    """One microbatch through two stages: latency of the data 1, then 1 + 1 + 6 bytes at 3 bytes/s, there and back."""
    peers = [SwarmPeer("a", bandwidth=3.0, latency=1.0), SwarmPeer("b", bandwidth=5.0, latency=1.0)]
    run = run_swarm(peers, Workload((10, 10), (20, 20), activation_bytes=6.0), [], SwarmSettings(1, 1))
    assert run.table.start.tolist() == [1, 15, 26, 50]
    assert run.update_times == [70]


def test_averaging_takes_a_ring() -> None:
    """Each of two peers sends 2 (n - 1) / n of 12 bytes at 2 bytes/s; the slower stage counts."""
    peers = [SwarmPeer(name, bandwidth=2.0) for name in "abcd"]
    work = Workload((1, 1), (1, 1), gradient_bytes=12.0)
    plain = run_swarm(peers, work, [], SwarmSettings(2, 4))
    delayed = run_swarm(peers, work, [], SwarmSettings(2, 4, delayed=True))
    last = plain.table.finish[plain.table.step == 0].max()
    assert plain.update_times[0] == last + 6
    assert plain.table.start[plain.table.step == 1].min() == last + 6
    assert delayed.table.start[delayed.table.step == 1].min() < last
    assert delayed.table.version.max() == 0


def test_gradients_of_a_failed_peer_are_computed_again() -> None:
    """Peer c of stage 1 fails after it has accumulated: its microbatches are repeated there, by d, and only there."""
    peers = [SwarmPeer(name) for name in "abcd"]
    work, settings = Workload((1, 1), (1, 1), gradient_bytes=0.0), SwarmSettings(1, 4)
    plain = run_swarm(peers, work, [], settings)
    is_late = (plain.table.stage == 1) & (plain.table.phase == BACKWARD_PASS)
    peer = int(plain.table.peer[is_late][0])
    time = float(plain.table.finish[is_late & (plain.table.peer == peer)].max()) + 0.5
    table = run_swarm(peers, work, [PeerEvent(time, peer, LEAVE)], settings).table
    lost = table.outcome == LOST
    assert set(table.peer[lost].tolist()) == {peer}
    assert set(table.stage[lost].tolist()) == {1}
    again = (table.stage == 1) & (table.phase == BACKWARD_PASS) & (table.outcome == COUNTED) & (table.start >= time)
    assert sorted(table.microbatch[again]) == sorted(table.microbatch[lost])
    assert peer not in table.peer[again]


def test_a_failure_starts_the_averaging_over() -> None:
    """Peer b has a slow link: averaging takes 100 s. It fails meanwhile, so a computes its gradients again, alone."""
    peers = [SwarmPeer("a", speed=1.0), SwarmPeer("b", speed=0.9, bandwidth=1.0), SwarmPeer("c", speed=2.0)]
    work, settings = Workload((1.0, 1.0), (1.0, 1.0), gradient_bytes=100.0), SwarmSettings(30, 4)
    plain = run_swarm(peers, work, [], settings)
    assert {stage for peer, stage, *_ in plain.service if peer < 2} == {1}
    assert plain.update_times[0] > 100
    run = run_swarm(peers, work, [PeerEvent(50.0, 1, LEAVE)], settings)
    assert 50 < run.update_times[0] < 70
    lost = run.table.outcome == LOST
    assert set(run.table.peer[lost].tolist()) == {1}
    assert run.update_times[-1] > plain.update_times[0]  # the end of the first averaging has passed


@pytest.mark.parametrize(
    ("inputs", "gradients", "has_loss", "counted", "found"),
    [
        (set(), set(), False, set(), (FORWARD_PASS, 0)),
        ({1, 2}, set(), False, set(), (FORWARD_PASS, 2)),
        ({1, 2}, set(), True, set(), (BACKWARD_PASS, 2)),
        ({1, 2}, {1}, True, {2}, (BACKWARD_PASS, 1)),
        # The gradient of the output of stage 1 is lost: repeat the backward pass of stage 2, which is counted.
        ({1, 2}, set(), True, {0, 2}, (BACKWARD_PASS, 2)),
        # Its input is lost too: start from the nearest one that is left.
        ({1}, set(), True, {0, 2}, (FORWARD_PASS, 1)),
        (set(), {0}, True, {1, 2}, (BACKWARD_PASS, 0)),
        (set(), set(), True, {0, 1, 2}, None),
    ],
)
def test_the_next_pass(
    inputs: set[int], gradients: set[int], has_loss: bool, counted: set[int], found: tuple[int, int] | None
) -> None:
    """The stages whose input, and gradient of the output, a peer holds; and those whose gradient is counted."""
    progress = BatchProgress(3, 1)
    progress._inputs, progress._gradients = (
        [[{0} if stage in held else set() for stage in range(3)]] for held in (inputs, gradients)
    )
    progress._forwarded, progress._counted = [{2} if has_loss else set()], [dict.fromkeys(counted, (0, 0))]
    assert progress.next_phase(0) == found


@pytest.mark.parametrize("seed", range(20))
def test_progress_completes_whatever_is_lost(seed: int) -> None:
    """Passes of random peers, any of which can fail after any pass: in the end every gradient is counted."""
    rng = np.random.default_rng(seed)
    num_stages = int(rng.integers(1, 6))
    progress = BatchProgress(num_stages, 1)
    held: dict[tuple[int, int], int] = {}  # row of each counted gradient, kept here without BatchProgress
    for row in range(10_000):
        found = progress.next_phase(0)
        if found is None:
            break
        peer = int(rng.integers(4))
        assert all(progress.holders(0, *found).values())  # all inputs are available
        if progress.finish(0, *found, peer, row) == COUNTED and found[0] == BACKWARD_PASS:
            held[found[1], peer] = row
        if rng.random() < 0.3:
            failed = int(rng.integers(4))
            gone = {key: one for key, one in held.items() if key[1] == failed}
            assert sorted(one for _, one in progress.lose(failed)) == sorted(gone.values())
            held = {key: one for key, one in held.items() if key not in gone}
    assert progress.is_complete
    assert sorted(stage for stage, _ in held) == list(range(num_stages))


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_the_fluid_model(seed: int) -> None:
    """Without messages and with delayed updates, a swarm computes what its slowest stage can, within 5%."""
    rng = np.random.default_rng(seed)
    peers = [SwarmPeer(str(n), float(rng.lognormal(0, 0.3)), bandwidth=1.0) for n in range(12)]
    trace = [PeerEvent(400, 3, LEAVE), PeerEvent(500, 7, LEAVE), PeerEvent(900, 3, JOIN)]
    work = Workload((0.5,) * 3, (1.0,) * 3, state_bytes=20.0)
    settings = SwarmSettings(30, 100, in_flight=60, delayed=True, rebalance_seconds=100, rule="balance", seed=seed)
    run = run_swarm(peers, work, trace, settings)
    seconds = run.update_times[-1]
    fluid = run_fluid(peers, work, trace, seconds, settings)
    expected = float((fluid.throughput * np.diff(fluid.time)).sum())
    assert seconds > 1000
    assert pytest.approx(expected, rel=0.05) == 30 * 100


def test_a_stage_without_peers_ends_the_run() -> None:
    with pytest.raises(UserError) as error:
        run_swarm(
            [SwarmPeer("a"), SwarmPeer("b")], Workload((1, 1), (1, 1)), [PeerEvent(5, 1, LEAVE)], SwarmSettings(9, 2)
        )
    assert str(error.value).startswith("stage 1 has no peer from second ")


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("outcome", 0, LOST, r"row 2: start is .*; its input must be computed before"),
        ("outcome", -1, LOST, r"7 B passes are counted; they must be 8"),
        ("stage", 0, 2, r"row 0: stage is 2; it must be between 0 and 1"),
        ("version", 3, 1, r"row 3: version is 1; it must be 0"),
        ("finish", 2, 0.0, r"row 2: finish is 0.0; it must be at least start, .*"),
        ("microbatch", 1, 0, r"row 1: outcome is counted, as in a row above; it must be counted once"),
        ("step", 0, -1, r"row 0: step is -1; it must be at least 0"),
        ("peer", 2, 0, r"row 2: start is .*; it must be when peer 0 is idle"),
    ],
)
def test_the_validator_finds_what_is_wrong(column: str, row: int, value: float, message: str) -> None:
    run = run_swarm([SwarmPeer("a"), SwarmPeer("b")], Workload((1, 1), (1, 1)), [], SwarmSettings(1, 4))
    values = getattr(run.table, column).copy()
    values[row] = value
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_routing(run.table._replace(**{column: values}))
    ends = [(peer, stage, begin, end - 1) for peer, stage, begin, end in run.service]
    with pytest.raises(ValueError, match=r"^row \d+: peer is 0; it must serve stage 0 from .*$"):
        check_routing(run.table, ends)
