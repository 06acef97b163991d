"""Checks the files of peers and traces, and the generator of traces."""

import math
from pathlib import Path

import numpy as np
import pytest

from jaxpar.errors import UserError
from jaxpar.strategies.swarm import availability as trace_module
from jaxpar.strategies.swarm.availability import (
    JOIN,
    LEAVE,
    PeerEvent,
    RandomTrace,
    SwarmPeer,
    events_before,
    present_at_start,
    read_peers,
    read_swarm_trace,
    write_trace,
)

PEERS = [SwarmPeer("a", 1.0, 2e6, 0.01), SwarmPeer("b", 0.5, math.inf, 0.0), SwarmPeer("c", 2.0, 1e6, 0.1)]
TRACE = [PeerEvent(0.1, 0, LEAVE), PeerEvent(2.5, 2, JOIN), PeerEvent(2.5, 0, JOIN)]
HEAD, TRACE_HEAD = "peer,speed,bandwidth,latency\n", "seconds,peer,event\n"


def test_files(tmp_path: Path) -> None:
    (tmp_path / "peers.csv").write_text(f"{HEAD}a,1.0,2000000.0,0.01\nb,0.5,inf,0\nc,2,1e6,0.1\n")
    write_trace(tmp_path / "trace.csv", TRACE, PEERS)
    assert read_peers(tmp_path / "peers.csv") == PEERS
    assert read_swarm_trace(tmp_path / "trace.csv", PEERS) == TRACE
    assert (tmp_path / "trace.csv").read_text() == f"{TRACE_HEAD}0.1,a,leave\n2.5,c,join\n2.5,a,join\n"
    assert present_at_start(3, TRACE) == {0, 1}  # c joins first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peer,speed\n", "line 1 must be the header peer,speed,bandwidth,latency"),
        (HEAD, "there are 0 peers; there must be 1 to 5000"),
        (f"{HEAD}a,1,1,0\na,1,1,0\n", "line 3: peer is 'a'; it must be a name that no other row has"),
        (f"{HEAD}a,0,1,0\n", "line 2: speed is '0'; it must be between 1e-06 and 1e+06"),
        (f"{HEAD}a,inf,1,0\n", "line 2: speed is 'inf'; it must be between 1e-06 and 1e+06"),
        (f"{HEAD}a,1,-5,0\n", "line 2: bandwidth is '-5'; it must be between 1 and inf"),
        (f"{HEAD}a,1,1,-1\n", "line 2: latency is '-1'; it must be between 0 and 1e+06"),
        (f"{HEAD}a,1,1\n", "line 2 has 3 values; it must have 4"),
        (
            f'{HEAD}"a,1,1,0\n',
            "line 2: unexpected end of data; quotes must be closed, and values must have at most 131,072 characters",
        ),
        (f"{TRACE_HEAD}5,a,leave\n4,b,leave\n", "line 3: seconds is 4; it must be at least 5, as above"),
        (f"{TRACE_HEAD}5,d,leave\n", "line 2: peer is 'd'; it must be one of the 3 peers"),
        (f"{TRACE_HEAD}5,a,stop\n", "line 2: event is 'stop'; it must be join or leave"),
        (f"{TRACE_HEAD}5,a,leave\n6,a,leave\n", "line 3: event is leave; it must be join, because a did so before"),
        (f"{TRACE_HEAD}nan,a,leave\n", "line 2: seconds is 'nan'; it must be between 0 and 1e+12"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.csv"
    path.write_text(text)
    is_trace = text.startswith(TRACE_HEAD)
    with pytest.raises(UserError) as error:
        read_swarm_trace(path, PEERS) if is_trace else read_peers(path)
    assert str(error.value) == f"{'--trace' if is_trace else '--peers'} is '{path}': {message}"


def test_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,peer,event\n" + "".join(f"{n},a,{(LEAVE, JOIN)[n % 2]}\n" for n in range(4)))
    monkeypatch.setattr(trace_module, "MAX_EVENTS", 3)
    with pytest.raises(UserError, match=r"line 5: there are more than 3 events; there must be at most as many$"):
        read_swarm_trace(path, PEERS)
    monkeypatch.setattr(trace_module, "MAX_FILE_BYTES", 10)
    with pytest.raises(UserError, match=r"the file has 10 characters or more; it must have fewer$"):
        read_swarm_trace(path, PEERS)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--trace is .*, which does not exist; it must be the path of a CSV file$"):
        read_swarm_trace(tmp_path / "none.csv", PEERS)


def presence(trace: list[PeerEvent], num_peers: int, seconds: float) -> np.ndarray:
    """Return the fraction of the time for which each peer is present."""
    present, since, total = np.ones(num_peers, bool), np.zeros(num_peers), np.zeros(num_peers)
    for time, peer, event in trace:
        assert present[peer] == (event == LEAVE)
        total[peer] += (time - since[peer]) * present[peer]
        present[peer], since[peer] = event == JOIN, time
    return (total + (seconds - since) * present) / seconds


def test_generated_traces_have_the_stated_means() -> None:
    """A peer that stays 3 units and is away 1 is present for 3/4 of the time."""
    trace = events_before(RandomTrace(200, lifetime=3.0, rejoin=1.0, seed=1), 400.0)
    assert [event.seconds for event in trace] == sorted(event.seconds for event in trace)
    assert presence(trace, 200, 400.0).mean() == pytest.approx(0.75, abs=0.01)
    assert trace == events_before(RandomTrace(200, lifetime=3.0, rejoin=1.0, seed=1), 400.0)
    assert trace != events_before(RandomTrace(200, lifetime=3.0, rejoin=1.0, seed=2), 400.0)


def test_a_group_is_preempted_together() -> None:
    rates = RandomTrace(40, lifetime=math.inf, rejoin=1e9, groups=4, group_lifetime=1e2, group_share=1.0, seed=3)
    trace = events_before(rates, 100.0)
    by_time: dict[float, set[int]] = {}
    for time, peer, event in trace:
        assert event == LEAVE
        by_time.setdefault(time, set()).add(peer)
    assert by_time
    assert all(peers == set(range(min(peers), 40, 4)) for peers in by_time.values())
