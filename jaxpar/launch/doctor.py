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
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.errors import USER_ERROR, TrainingError, UserError, format_bytes, format_count, printable
from jaxpar.host_memory import host_bytes
from jaxpar.launch.launcher import PROCESS_BYTES
from jaxpar.launch.place import Place, bind_address, in_address, own_address
from jaxpar.launch.signals import called_after

GREETING_SECONDS = 5.0  # for the first message of a process that has connected
SENT = 2**25  # bytes that a process sends to another
ADDED = 2**24  # bytes of the array that all devices add up
MOST_SKEW = 1.0  # seconds between two clocks; files and logs would be in the wrong order
LEAST_DISK = 10**9  # bytes; a checkpoint of the smallest models, with logs
LEAST_SHARED = 2**30  # bytes of /dev/shm: the size that NCCL's user guide names, "Runtime and MPI issues"
EXAMINED = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
# The oldest driver for a plugin (docs.jax.dev, "Installation").
DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
# Versions of NCCL that are known to hang, by what, with the source.
HANGING_NCCL = {"2.30.7": "programs on different devices that exchange arrays (github.com/NVIDIA/jaxpp/issues/11)"}


NO_DRIVER = "nvidia-smi fails"


class Row(NamedTuple):
    """A line of the report."""

    what: str
    found: str
    problem: str = ""  # what will break, and whose fault it is; empty: nothing


def facts(workdir: Path | None) -> dict[str, Any]:
    """Return what a process knows about itself, without using its devices."""
    found = {"python": platform.python_version()}
    for name in EXAMINED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = shutil.which("nvidia-smi")
    query = [gpus or "", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, check=False) if gpus else None
    listed = asked.stdout.splitlines() if asked else []
    drivers = {line.partition(",")[0].strip() for line in listed}
    if asked and asked.returncode:  # its reason is on stdout
        listed, drivers = [], {f"{NO_DRIVER}: {printable(' '.join(listed[:1]))}"}
    shared = Path("/dev/shm")  # its size, not a file in it
    return {
        "host": platform.node(),
        "versions": found | ({"driver": "/".join(sorted(drivers))} if drivers else {}),
        "gpus": [line.partition(",")[2].strip() for line in listed],
        "memory": host_bytes(),
        "disk": None if workdir is None else shutil.disk_usage(existing(workdir)).free,
        "shared": shutil.disk_usage(shared).total if shared.exists() else None,
    }


def existing(path: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


# ---- what the facts mean -------------------------------------------------------------------------------------------


def judge(of_processes: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each kind of fact, with the problem of the first process that has one."""
    hosts = [of["host"] for of in of_processes]
    machines = f"{format_count(len(set(hosts)), 'machine')}: {', '.join(sorted(set(hosts)))}"
    rows = [Row("processes", f"{len(hosts)} on {machines}")]
    for name in sorted({name for of in of_processes for name in of["versions"]}):
        values = [of["versions"].get(name, "missing") for of in of_processes]
        rows.append(Row(name, ", ".join(sorted(set(values))), _of_version(name, values, of_processes)))
    numbers = [len(of["gpus"]) for of in of_processes]
    kinds = sorted({kind for of in of_processes for kind in of["gpus"]})
    rows.append(Row("GPUs that nvidia-smi lists", kinds[0] if kinds else "none", _of_numbers(numbers, hosts, kinds)))
    rows.append(_of_bytes("host memory", "memory", of_processes, lambda host: PROCESS_BYTES * hosts.count(host)))
    if any(of["disk"] is not None for of in of_processes):
        rows.append(_of_bytes("free disk for the workdir", "disk", of_processes, lambda _: LEAST_DISK))
    if max(numbers) > 1:
        rows.append(_of_bytes("/dev/shm", "shared", of_processes, lambda _: LEAST_SHARED))
    return rows


def _of_version(name: str, values: Sequence[str], of_processes: Sequence[Mapping[str, Any]]) -> str:
    for number, value in enumerate(values):
        if value != values[0]:
            return f"process {number} has {value}, process 0 has {values[0]}; all must have the same"
    versions = of_processes[0]["versions"]
    # The plugin of another version is skipped: jaxlib/plugin_support.py.
    if name in DRIVERS and versions[name] != versions["jaxlib"]:
        return f"jaxlib is {versions['jaxlib']}; {name} must be the same version"
    if name == "driver":
        if values[0].startswith(NO_DRIVER):
            return "nvidia-smi must list the GPUs"
        least = max((needed for plugin, needed in DRIVERS.items() if plugin in versions), default=0)
        if int(values[0].partition(".")[0] or 0) < least:
            return f"the driver must be {least} or newer for this CUDA version"
    if name.startswith("nvidia-nccl") and values[0] in HANGING_NCCL:
        return f"known to hang: {HANGING_NCCL[values[0]]}"
    return ""


def _of_numbers(numbers: Sequence[int], hosts: Sequence[str], kinds: Sequence[str]) -> str:
    if len(kinds) > 1:
        return f"different kinds wait for the slowest: {', '.join(kinds)}"
    different = next((i for i, number in enumerate(numbers) if number != numbers[0]), None)
    if different is None:
        return ""
    return f"process {different} on {hosts[different]} has {numbers[different]}, process 0 has {numbers[0]}"


def _of_bytes(what: str, name: str, of_processes: Sequence[Mapping[str, Any]], needed: Callable[[str], int]) -> Row:
    found = [(of[name], number, of["host"]) for number, of in enumerate(of_processes) if of[name] is not None]
    if not found:
        return Row(what, "unknown")
    least = [(nbytes, number, host) for nbytes, number, host in found if nbytes < needed(host)]
    problem = ""
    if least:
        nbytes, number, host = least[0]
        problem = f"process {number} on {host} has {format_bytes(nbytes)}; it needs {format_bytes(needed(host))}"
    return Row(what, f"at least {format_bytes(min(found)[0])}", problem)


# ---- messages ------------------------------------------------------------------------------------------------------


class Peer:
    """A connection to another process, over which lines of JSON go."""

    def __init__(self, connection: socket.socket):
        self._connection, self._lines = connection, connection.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Return the next message. Raises OSError if none comes in time, or the process has ended."""
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("it ended")
        return json.loads(line)

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._connection.close()


def connect_to(address: str, seconds: float) -> socket.socket:
    """Return a connection to HOST:PORT, on which each operation takes at most `seconds`. Tries for as long."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            connection.settimeout(seconds)
            return connection


def listen(address: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT; with an empty host, on all addresses."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


@contextlib.contextmanager
def receiving(coordinator_address: str) -> Iterator[str]:
    """Within `with`, read what other processes send, and answer with a byte once all has arrived. Yield the HOST:PORT.

    coordinator_address: of process 0; the host is the one from which this machine reaches it.
    """

    def drain(connection: socket.socket) -> None:
        with connection:
            left = SENT
            while left and (read := len(connection.recv(min(left, 2**20)))):
                left -= read
            if not left:
                connection.sendall(b"1")

    def accept() -> None:
        with contextlib.suppress(OSError):  # the server is shut down
            while True:
                connection, _ = server.accept()
                threading.Thread(target=drain, args=(connection,), daemon=True).start()

    shown = in_address(own_address(coordinator_address))
    with listen(f"{shown}:0") as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"{shown}:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def rate_to(address: str, seconds: float) -> float:
    """Return the bytes per second at which SENT bytes arrive at the sink of an address."""
    with connect_to(address, seconds) as connection:
        payload, begin = bytes(SENT), time.monotonic()
        connection.sendall(payload)
        if connection.recv(1) != b"1":
            raise ConnectionResetError("it ended")
        return SENT / (time.monotonic() - begin)


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


# ---- the examination -----------------------------------------------------------------------------------------------


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
