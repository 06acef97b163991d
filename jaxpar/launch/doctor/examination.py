"""Examines the processes of a run before it starts: what would make it fail, hang or crawl.

The processes meet by plain sockets, because JAX would wait for a process that is missing or cannot be reached without
naming it. Process 0 asks all of them for one thing at a time, in this order, and so knows who does not answer:

1. facts: versions, devices, memory, disk;
2. time: what the clock shows, between two readings of process 0's own;
3. files: whether the workdir of process 0 is the workdir of all;
4. send: in round r, each process sends to the one r places after it, so that every pair is tried in both directions;
5. collective: all devices add up an array, through JAX.

Messages are lines of JSON.
"""

import contextlib
import errno
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import USER_ERROR, TrainingError, UserError, format_bytes
from jaxpar.launch.doctor.connections import Peer, connect_to, listen, rate_to, receiving
from jaxpar.launch.doctor.facts import Row, existing, facts, judge
from jaxpar.launch.place import Place, bind_address
from jaxpar.launch.signals import called_after

GREETING_SECONDS = 5.0  # for the first message of a process that has connected
ADDED = 2**24  # bytes of the array that all devices add up
MOST_SKEW = 1.0  # seconds between two clocks; files and logs would be in the wrong order


def answer(place: Place, workdir: Path | None, seconds: float) -> None:
    """Do what process 0 asks for, until it reports the end. Raises TrainingError if it cannot be reached.

    Raises UserError if process 0 found a problem.
    """
    try:
        connection = connect_to(place.coordinator_address, seconds)
        with contextlib.closing(Peer(connection)) as peer, receiving(place.coordinator_address) as address:
            peer.send({"number": place.process_id, "address": address, **facts(workdir)})
            tasks: dict[str, Callable[[Any], Any]] = {
                "time": lambda _: time.time(),
                "files": lambda paths: share_files(*map(Path, paths)),
                "send": lambda to: _sent(to, seconds),
                "add": lambda _: _done(lambda: add_on_devices(place)),
            }
            while (asked := peer.receive())["do"] != "end":
                peer.send(tasks[asked["do"]](asked.get("with")))
            if asked.get("with"):
                raise UserError(f"process 0 found a problem; see its output ({asked['with']})")
    except OSError as error:
        who = f"process {place.process_id} on {platform.node()}"
        raise TrainingError(f"{who} cannot reach process 0 at {place.coordinator_address}: {error}") from None


def share_files(theirs: Path, own: Path) -> str:
    """Read a file of process 0 and write an own one. Return what is wrong, or an empty text."""
    if not theirs.exists():
        return f"does not see the files of process 0 in {theirs.parent}"
    try:
        own.touch()
    except OSError as error:
        return f"cannot write to {own.parent}: {error.strerror}"
    return ""


def _sent(to: str, seconds: float) -> float | str:
    try:
        return rate_to(to, seconds)
    except OSError as error:
        return str(error)


def _done(task: Callable[[], Any]) -> Any:
    try:
        return task()
    except Exception as error:  # whatever it is, it is what the report is about
        return {"wrong": str(error).partition("\n")[0] or type(error).__name__}


def add_on_devices(place: Place | None) -> dict[str, Any]:
    """Let all devices add up an array, through JAX. Return their number and kinds, the seconds, and what is wrong."""
    # Imported late: a driver that hangs must not keep the processes from meeting.
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpar.core import mesh
    from jaxpar.launch import processes

    processes.meet_processes(place)
    devices = jax.devices()
    grid = mesh.make_mesh({"data": len(devices)}, devices)
    spread, whole = (NamedSharding(grid, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
    shape = len(devices), ADDED // 4

    def row(at: Any) -> np.ndarray:
        return np.full((1, shape[1]), at[0].start or 0, np.float32)

    values = jax.make_array_from_callback(shape, spread, row)
    added = jax.jit(lambda x: x.sum(0), out_shardings=whole)
    seconds = []
    for _ in range(4):  # the first one compiles and connects
        begin = time.monotonic()
        total = jax.block_until_ready(added(values))
        seconds.append(time.monotonic() - begin)
    got, expected = np.asarray(total.addressable_data(0)), len(devices) * (len(devices) - 1) / 2
    wrong = "" if (got == expected).all() else f"the sum is {got[0]:g}; it must be {expected:g}"
    kinds = sorted({device.device_kind for device in devices})
    if place is not None:
        jax.distributed.shutdown()  # all together: it waits for the others
    return {"devices": len(devices), "kinds": kinds, "seconds": min(seconds[1:]), "wrong": wrong}


class _Broken(Exception):
    """A problem after which the other parts of the examination cannot be done."""

    def __init__(self, row: Row):
        super().__init__(row.problem)
        self.row = row


class Examination:
    """The examination by process 0, which asks the processes, itself included, and collects the rows of the report."""

    def __init__(self, place: Place | None, workdir: Path | None, seconds: float):
        """seconds: that a process has for an answer."""
        self._place, self._workdir, self._seconds = place, workdir, seconds
        self._peers: dict[int, Peer] = {}
        self._facts: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        self.part = "processes"  # what is examined at this time

    def run(self) -> list[Row]:
        """Examine the processes, and return the report. It ends early with a problem that the rest depends on."""
        parts = {
            "processes": self._meet,
            "clocks": self._compare_clocks,
            "workdir": self._find_files,
            "network": self._send,
            "devices": self._add,
        }
        for self.part, examine in parts.items():
            try:
                examine()
            except _Broken as broken:
                self.rows.append(broken.row)
                break
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # it has ended
                peer.send({"do": "end", "with": ", ".join(row.what for row in self.rows if row.problem)})
            peer.close()
        return self.rows

    def _meet(self) -> None:
        own = facts(self._workdir)
        if self._place is None:
            self._facts = [own]
        else:
            self._facts = [own, *self._wait_for_others(self._place)]
        self.rows += judge(self._facts)

    def _wait_for_others(self, place: Place) -> list[dict[str, Any]]:
        try:
            address = bind_address(place.coordinator_address) or f":{place.coordinator_address.rpartition(':')[2]}"
        except TrainingError as error:
            raise _Broken(Row("port", place.coordinator_address, str(error))) from None
        end = time.monotonic() + self._seconds
        found: dict[int, dict[str, Any]] = {}
        with listen(address) as server:
            while len(found) < place.num_processes - 1 and time.monotonic() < end:
                server.settimeout(max(end - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    break
                connection.settimeout(GREETING_SECONDS)
                peer = Peer(connection)
                try:
                    message = peer.receive()
                    number = int(message["number"])
                except (OSError, ValueError, KeyError, TypeError):  # not a process of this run, such as a probe
                    peer.close()
                    continue
                connection.settimeout(self._seconds)
                found[number], self._peers[number] = message, peer
        missing = [str(number) for number in range(1, place.num_processes) if number not in found]
        if missing:
            who = f"{'process' if len(missing) == 1 else 'processes'} {', '.join(missing)} of {place.num_processes}"
            reason = f"{who} did not reach {place.coordinator_address} within {self._seconds:g} s"
            raise _Broken(Row("processes", f"{len(found) + 1} of {place.num_processes}", reason))
        return [found[number] for number in sorted(found)]

    def _ask(self, number: int, what: str, argument: Any = None) -> Any:
        self._tell(number, what, argument)
        return self._receive(number, what)

    def _tell(self, number: int, what: str, argument: Any = None) -> None:
        with self._answering(number, what):
            self._peers[number].send({"do": what, "with": argument})

    def _receive(self, number: int, what: str) -> Any:
        with self._answering(number, what):
            return self._peers[number].receive()

    @contextlib.contextmanager
    def _answering(self, number: int, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a process that ends can leave half a message
            who = f"process {number} on {self._facts[number]['host']}"
            raise _Broken(Row(what, "no answer", f"{who} did not answer: {error}")) from None

    def _compare_clocks(self) -> None:
        skews = {0: 0.0}
        for number in self._peers:
            before = time.time()
            skews[number] = self._ask(number, "time") - (before + time.time()) / 2
        worst = max(skews, key=lambda number: abs(skews[number]))
        problem = f"the clock of process {worst} on {self._facts[worst]['host']} differs by {skews[worst]:.1f} s"
        is_far = abs(skews[worst]) > MOST_SKEW
        self.rows.append(Row("clocks", f"within {1000 * abs(skews[worst]):.0f} ms", problem if is_far else ""))

    def _find_files(self) -> None:
        if self._workdir is None:
            return
        folder, token = existing(self._workdir), uuid.uuid4().hex
        paths = [folder / f".doctor-{token}-{number}" for number in range(len(self._facts))]
        wrong = {}
        try:
            if self._workdir.exists() and not self._workdir.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            paths[0].touch()
            for number in self._peers:
                wrong[number] = self._ask(number, "files", [str(paths[0]), str(paths[number])])
        except OSError as error:
            wrong[0] = f"cannot write to {self._workdir if self._workdir.exists() else folder}: {error.strerror}"
        finally:
            for path in paths:
                with contextlib.suppress(OSError):
                    path.unlink()
        problems = [f"process {i} on {self._facts[i]['host']} {text}" for i, text in wrong.items() if text]
        self.rows.append(
            Row("workdir", f"{self._workdir} in {folder}" if problems else str(self._workdir), *problems[:1])
        )

    def _send(self) -> None:
        if self._place is None:
            return
        hosts, number = [of["host"] for of in self._facts], len(self._facts)
        rates: dict[tuple[int, int], float] = {}
        with receiving(self._place.coordinator_address) as own:
            addresses = [own, *(of["address"] for of in self._facts[1:])]
            for places in range(1, number):
                receivers = {sender: (sender + places) % number for sender in range(number)}
                for sender in self._peers:
                    self._tell(sender, "send", addresses[receivers[sender]])
                of_round = {0: _sent(addresses[receivers[0]], self._seconds)}
                of_round |= {sender: self._receive(sender, "send") for sender in self._peers}
                for sender, rate in of_round.items():
                    receiver = receivers[sender]
                    if isinstance(rate, str):
                        who = f"process {sender} on {hosts[sender]} cannot send to process {receiver}"
                        reason = f"{who} on {hosts[receiver]} at {addresses[receiver]}: {rate}"
                        raise _Broken(Row("network", "broken", reason))
                    rates[sender, receiver] = rate
        (slow, least), most = min(rates.items(), key=lambda pair: pair[1]), max(rates.values())
        found = f"{format_bytes(least)}/s (process {slow[0]} to {slow[1]}) to {format_bytes(most)}/s between processes"
        self.rows.append(Row("network", found))

    def _add(self) -> None:
        place = self._place
        for number in self._peers:
            self._tell(number, "add")
        found = {0: _done(lambda: add_on_devices(place))} | {
            number: self._receive(number, "add") for number in self._peers
        }
        for number, of in found.items():
            if of["wrong"]:
                who = f"process {number} on {self._facts[number]['host']}"
                raise _Broken(Row("devices", "broken", f"{who}: {of['wrong']}"))
        first = found[0]
        devices = f"{first['devices']} x {', '.join(first['kinds'])}"
        seconds = max(of["seconds"] for of in found.values())
        sent = 2 * (1 - 1 / first["devices"]) * ADDED / seconds
        rate = f", all-reduce at {format_bytes(sent)}/s" if first["devices"] > 1 else ""
        self.rows.append(Row("devices", f"{devices}{rate}"))


@contextlib.contextmanager
def guarded(seconds: float, report: Callable[[], None]) -> Iterator[None]:
    """Within `with`, report and end the process after `seconds`: JAX can wait for ever, and cannot be interrupted."""

    def end() -> None:
        report()
        os._exit(USER_ERROR)

    with called_after(seconds, end):
        yield
