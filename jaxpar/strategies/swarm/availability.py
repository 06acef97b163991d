"""Peers, and traces of when they join and leave, and their files.

A file of peers is CSV with the columns peer (a name), speed (1: a microbatch takes the seconds that its stage states),
bandwidth (bytes per second) and latency (seconds; a message takes that of the sender and that of the receiver). A trace
is CSV with the columns seconds, peer and event, join or leave, in order of time. A peer that joins first is absent at
second 0; all other peers are present. In a random trace, peers fail one by one and in groups, and join again.
"""

import csv
import heapq
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.errors import UserError
from jaxpar.files import open_text, read_csv, unreadable, write_text

JOIN, LEAVE = "join", "leave"
MAX_EVENTS = 1_000_000
MAX_FILE_BYTES = 200_000_000
MAX_PEERS = 5_000  # a decision of the simulation takes time in proportion to the number of peers
# The least and the greatest value of each number in a file.
LIMITS = {"speed": (1e-6, 1e6), "bandwidth": (1.0, math.inf), "latency": (0.0, 1e6), "seconds": (0.0, 1e12)}
PEER_COLUMNS = ("peer", "speed", "bandwidth", "latency")
TRACE_COLUMNS = ("seconds", "peer", "event")


class SwarmPeer(NamedTuple):
    """A peer."""

    name: str
    speed: float = 1.0  # relative
    bandwidth: float = math.inf  # bytes per second
    latency: float = 0.0  # seconds


class PeerEvent(NamedTuple):
    """An event of a trace: when the peer with this index joins or leaves."""

    seconds: float
    peer: int
    event: str


@dataclass(frozen=True)
class RandomTrace:
    """An endless random trace in which all peers are present at second 0. Each iteration yields the same events.

    All times are exponentially distributed, and in the same unit as those of the events.
    """

    num_peers: int
    lifetime: float  # mean time that a peer stays
    rejoin: float  # mean time until a peer that left joins again
    groups: int = 1  # of peers, such as those of a zone, that are preempted together; peer p is in p % groups
    group_lifetime: float = math.inf  # mean time between the preemptions of a group
    group_share: float = 0.5  # the fraction of its present peers that a preemption stops, each independently
    seed: int = 0

    def __iter__(self) -> Iterator[PeerEvent]:
        """Yield the events in order of time."""
        rng = np.random.default_rng(self.seed)
        present = np.ones(self.num_peers, bool)
        # (time, number, peer or -1, group or -1): a peer changes between present and absent, or a group is preempted.
        numbers = itertools.count()
        heap = [(rng.exponential(self.lifetime), next(numbers), peer, -1) for peer in range(self.num_peers)]
        if self.group_lifetime < math.inf:
            heap += [(rng.exponential(self.group_lifetime), next(numbers), -1, group) for group in range(self.groups)]
        heapq.heapify(heap)
        newest = {peer: number for _, number, peer, _ in heap}  # an older event of a peer is void
        while heap[0][0] < math.inf:
            now, number, peer, group = heapq.heappop(heap)
            if group >= 0:
                members = range(group, self.num_peers, self.groups)
                changing = (one for one in members if present[one] and rng.random() < self.group_share)
            else:
                changing = (one for one in (peer,) if newest[one] == number)
            for one in changing:
                present[one] = not present[one]
                yield PeerEvent(now, one, JOIN if present[one] else LEAVE)
                newest[one] = next(numbers)
                after = now + rng.exponential(self.lifetime if present[one] else self.rejoin)
                heapq.heappush(heap, (after, newest[one], one, -1))
            if group >= 0:
                heapq.heappush(heap, (now + rng.exponential(self.group_lifetime), next(numbers), -1, group))


Trace = Sequence[PeerEvent] | RandomTrace


def present_at_start(num_peers: int, trace: Trace) -> frozenset[int]:
    """Return the peers that are present at second 0: all whose first event is not that they join."""
    first: dict[int, str] = {}
    for event in () if isinstance(trace, RandomTrace) else trace:
        first.setdefault(event.peer, event.event)
    return frozenset(peer for peer in range(num_peers) if first.get(peer) != JOIN)


def write_trace(path: Path | str, trace: Sequence[PeerEvent], peers: Sequence[SwarmPeer]) -> None:
    """Write a trace. The peers give the names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TRACE_COLUMNS)
    writer.writerows((event.seconds, peers[event.peer].name, event.event) for event in trace)
    write_text(Path(path), text.getvalue())


def find_peers(text: str, key: str) -> list[SwarmPeer]:
    """Return the peers of a flag or setting: a number of equal peers, named p0, p1, .., or a file of peers.

    Raises UserError, which begins with `key`, if the number or the file is invalid.
    """
    if text and not (text.isascii() and text.removeprefix("-").isdecimal()):
        return read_peers(text, key)
    digits = text.lstrip("0")
    if text.startswith("-") or not digits or len(digits) > len(str(MAX_PEERS)) or int(digits) > MAX_PEERS:
        raise UserError(f"{key} is {text[:40] or repr(text)}; it must be between 1 and {MAX_PEERS}, or a file of peers")
    return [SwarmPeer(f"p{number}") for number in range(int(digits))]


def read_peers(path: Path | str, key: str = "--peers") -> list[SwarmPeer]:
    """Read a file of peers. Raises UserError, which begins with `key`, with the line of the first mistake."""
    try:
        return parse_peers(_rows(path, PEER_COLUMNS))
    except (OSError, ValueError) as error:
        raise UserError(f"{key} is {unreadable(path, error)}") from error


def read_swarm_trace(path: Path | str, peers: Sequence[SwarmPeer], key: str = "--trace") -> list[PeerEvent]:
    """Read a trace. Raises UserError, which begins with `key`, with the line of the first mistake."""
    try:
        return parse_events(_rows(path, TRACE_COLUMNS), peers)
    except (OSError, ValueError) as error:
        raise UserError(f"{key} is {unreadable(path, error)}") from error


Rows = Iterable[tuple[str, Sequence[str]]]  # where a row is, such as `line 2`, and the texts of its values


def parse_peers(rows: Rows) -> list[SwarmPeer]:
    """Return the peers of rows with PEER_COLUMNS. Raises ValueError with the place of the first mistake."""
    peers: dict[str, SwarmPeer] = {}
    for place, (name, *texts) in rows:
        if not name or name in peers:
            raise ValueError(f"{place}: peer is {name[:40]!r}; it must be a name that no other row has")
        numbers = [_number(place, column, text) for column, text in zip(PEER_COLUMNS[1:], texts, strict=True)]
        peers[name] = SwarmPeer(name, *numbers)
    if not 0 < len(peers) <= MAX_PEERS:
        raise ValueError(f"there are {len(peers)} peers; there must be 1 to {MAX_PEERS}")
    return list(peers.values())


def parse_events(rows: Rows, peers: Sequence[SwarmPeer]) -> list[PeerEvent]:
    """Return the events of rows with TRACE_COLUMNS. Raises ValueError with the place of the first mistake."""
    index = {peer.name: number for number, peer in enumerate(peers)}
    trace: list[PeerEvent] = []
    newest: dict[int, str] = {}
    for place, (seconds_text, name, event) in rows:
        seconds = _number(place, "seconds", seconds_text)
        if trace and seconds < trace[-1].seconds:
            raise ValueError(f"{place}: seconds is {seconds:g}; it must be at least {trace[-1].seconds:g}, as above")
        if name not in index:
            raise ValueError(f"{place}: peer is {name[:40]!r}; it must be one of the {len(peers)} peers")
        if event not in (JOIN, LEAVE):
            raise ValueError(f"{place}: event is {event[:40]!r}; it must be {JOIN} or {LEAVE}")
        peer = index[name]
        if newest.get(peer) == event:
            other = LEAVE if event == JOIN else JOIN
            raise ValueError(f"{place}: event is {event}; it must be {other}, because {name} did so before")
        newest[peer] = event
        trace.append(PeerEvent(seconds, peer, event))
        if len(trace) > MAX_EVENTS:
            raise ValueError(f"{place}: there are more than {MAX_EVENTS:,} events; there must be at most as many")
    return trace


def _rows(path: Path | str, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the line and the values of each row of a CSV file with this header."""
    with open_text(path) as file:
        text = file.read(MAX_FILE_BYTES)
    if len(text) == MAX_FILE_BYTES:
        raise ValueError(f"the file has {MAX_FILE_BYTES:,} characters or more; it must have fewer")
    lines = read_csv(io.StringIO(text))
    if tuple(map(str.strip, next(lines, (1, []))[1])) != tuple(columns):
        raise ValueError(f"line 1 must be the header {','.join(columns)}")
    for line, row in lines:
        if row and len(row) != len(columns):
            raise ValueError(f"line {line} has {len(row)} values; it must have {len(columns)}")
        if row:
            yield f"line {line}", [value.strip() for value in row]


def _number(place: str, column: str, text: str) -> float:
    least, greatest = LIMITS[column]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= greatest:
        raise ValueError(f"{place}: {column} is {text[:40]!r}; it must be between {least:g} and {greatest:g}")
    return number


def events_before(trace: Trace, seconds: float) -> list[PeerEvent]:
    """Return the events of a trace before this time."""
    return list(itertools.takewhile(lambda event: event.seconds < seconds, trace))
