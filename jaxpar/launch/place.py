"""Finds the place of a process in a run of several, from flags, environment variables or the cluster, without JAX."""

import contextlib
import errno
import json
import os
import random
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from jaxpar.errors import TrainingError, UserError


class PlaceFlag(NamedTuple):
    """A flag of `jaxpar train` that defines the place of a process."""

    variable: str  # environment variable that can be set instead of the flag
    kind: type[int] | type[str]  # type of the value
    help: str  # text for --help


# name -> flag. The launcher sets the environment variables of each process that it starts.
FLAGS = {
    "coordinator_address": PlaceFlag("JAXPAR_COORDINATOR_ADDRESS", str, "HOST:PORT of process 0."),
    "num_processes": PlaceFlag("JAXPAR_NUM_PROCESSES", int, "Number of processes of the run."),
    "process_id": PlaceFlag("JAXPAR_PROCESS_ID", int, "Index of this process, from 0."),
}
# Environment variable with the program that the user called, quoted for a shell: scripts/jaxpar, or a program that
# stands for a command of jaxpar, such as scripts/train, or scripts/launch with its flags.
COMMAND = "JAXPAR_COMMAND"
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # set for the pods of an indexed Job
# Variables that a cluster manager sets for each process: the number of processes, the index of this one among all and
# among those of its machine, and two that identify the coordinator.
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri")
SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
MEET = "JAXPAR_MEET_SECONDS"  # variable with the time within which all processes must start; without it, JAX's 300 s
MEET_SECONDS = 60  # its value for survivors, and for processes of an elastic run that start together
SURVIVOR = "JAXPAR_SURVIVOR"  # variable with the Survivor, as JSON, of a process that continues without lost ones
# Ports that Linux gives to no connection that does not ask for them, so that the next one of a used port stays free.
QUIET_PORTS = range(20_000, 32_000)
BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # variable with the HOST:PORT on which process 0 listens, instead of its own


class Place(NamedTuple):
    """The place of a process in a run of several."""

    coordinator_address: str  # HOST:PORT of process 0
    num_processes: int  # number of processes
    process_id: int  # index of this process, from 0
    local_device: int | None = None  # index of the only GPU that this process uses; None: it uses all that it sees


class Survivor(NamedTuple):
    """A process that continues a run without lost processes. jaxpar/launch/elastic.py explains how."""

    place: Place  # its place among the processes that are left, maybe alone
    numbers: tuple[int, ...]  # process_id at the start of the run of each of the processes that are left
    lost: tuple[int, ...]  # the same of the processes that were lost since the last start
    since: float  # time of the last step that was completed with them, as of time.time()
    file: int | None = None  # in process 0, the file descriptor of the state after that step, if there is one


def find_survivor(environ: Mapping[str, str] = os.environ) -> Survivor | None:
    """Return the record of this process if it survived others, or None."""
    if SURVIVOR not in environ:
        return None
    place, numbers, lost, *others = json.loads(environ[SURVIVOR])
    return Survivor(Place(*place), tuple(numbers), tuple(lost), *others)


def command_of(argv: Sequence[str]) -> str:
    """Return the command line of a process with these arguments, quoted for a shell."""
    python = f"{shlex.quote(sys.executable)} -m jaxpar"
    program = python if argv[0].endswith("__main__.py") else shlex.quote(argv[0])
    words = argv[1:]
    if given := os.environ.get(COMMAND):
        program = given
        words = words[Path(given).name != "jaxpar" :]  # scripts/train stands for `jaxpar train`
    return " ".join([program, *map(shlex.quote, words)])


def find_place(flags: Mapping[str, str | int | None], environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process, or None if it is the only process.

    flags: the values of FLAGS on the command line by name; None for flags that are not given.
    """
    if survivor := find_survivor(environ):
        return survivor.place if survivor.place.num_processes > 1 else None
    values = {name: environ.get(flag.variable) if flags[name] is None else flags[name] for name, flag in FLAGS.items()}
    if str(values["num_processes"]) == "1":
        return None
    if all(value is None for value in values.values()):
        if KUBERNETES_INDEX in environ and environ.get("KUBERNETES_SERVICE_HOST"):
            number = FLAGS["num_processes"].variable
            both = f"{number} and {FLAGS['coordinator_address'].variable}"
            given = f"{KUBERNETES_INDEX} is set, as in a Kubernetes indexed Job, but {both} are not"
            raise UserError(f"{given}; set both, or {number}=1 to run each pod separately")
        return _of_cluster(environ)
    if values["process_id"] is None:
        values["process_id"] = environ.get(KUBERNETES_INDEX)
    if missing := [name for name, value in values.items() if value is None]:
        lacking = " and ".join(f"--{name} (or {FLAGS[name].variable})" for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{lacking} {verb} missing; a run of several processes needs all of --{', --'.join(FLAGS)}")
    address, number, process = (str(values[name]) for name in FLAGS)
    if not number.isdigit() or int(number) < 1:
        raise UserError(f"--num_processes is {number}; it must be at least 1")
    if not process.isdigit() or int(process) >= int(number):
        raise UserError(f"--process_id is {process}; it must be between 0 and {int(number) - 1}")
    if not _is_address(address):
        raise UserError(f"--coordinator_address is {address!r}; it must be the HOST:PORT of process 0")
    return Place(address, int(number), int(process))


def _of_cluster(environ: Mapping[str, str]) -> Place | None:
    """Return the place that a cluster manager has set. The coordinator is on the first machine, as JAX expects it."""
    for variables, find in ((OPEN_MPI, _of_open_mpi), (SLURM, _of_slurm)):  # in a SLURM job, mpirun starts processes
        if all(name in environ for name in variables) and int(environ[variables[0]]) > 1:
            size, process, device = (int(environ[name]) for name in variables[:3])
            host, job = find(environ)
            port = environ.get("JAX_COORDINATOR_PORT", 61440 + job % 4096)  # the last ports of all
            return Place(f"{host}:{port}", size, process, device)
    return None


def _of_open_mpi(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the address of mpirun and the job, from 4096.0;tcp://10.0.0.1,10.1.0.1:80 or 4096.0;tcp6://[fd::1]:80."""
    job, _, addresses = environ["OMPI_MCA_orte_hnp_uri"].rpartition(":")[0].partition("://")
    host = addresses.strip("[]").partition(",")[0]
    return in_address(host), int(job.partition(".")[0]) // 4096  # ids are multiples of 4096


def _of_slurm(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the first machine, which is a1 in a[1-3,7],b and in a1,b, and the job."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", environ["SLURM_STEP_NODELIST"])
    assert found is not None
    return "".join(found.groups("")), int(environ["SLURM_JOB_ID"])


def bind_address(address: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the HOST:PORT on which process 0 listens, or None for all addresses of the machine.

    It is `address`, to which the processes connect, unless the variable BIND replaces it. Without an own address that
    others reach, process 0 listens on all, and prints a line about it. Raises UserError if BIND is not an address of
    this machine, and TrainingError if the port is in use.
    """
    if BIND in environ:
        if not _is_address(environ[BIND]) or not _own_addresses(BIND, environ[BIND]):
            raise UserError(f"{BIND} is {environ[BIND]!r}; it must be the HOST:PORT of an address of this machine")
        return environ[BIND]
    host, _, port = address.rpartition(":")
    own = _own_addresses("--coordinator_address", address)
    is_local = host == "localhost" or host.strip("[]") in own
    # Many machines resolve their own name to a loopback address, which no other machine reaches.
    if is_local or any(not ip_address(one).is_loopback for one in own):
        return address
    what = f"{' and '.join(sorted(own))} on this machine" if own else "not an address of this machine"
    line = f"{host} is {what}, so process 0 listens on all addresses; to choose one, set {BIND}=IP:{port}"
    print(f"jaxpar: {line}", file=sys.stderr, flush=True)
    return None


def _own_addresses(name: str, address: str) -> set[str]:
    """Return those IP addresses of HOST:PORT that this machine has. name: the setting, for errors.

    gRPC crashes if it cannot listen on an address. Raises TrainingError if the port is in use.
    """
    host, _, port = address.rpartition(":")
    own = set()
    with contextlib.suppress(socket.gaierror, UnicodeError):  # this machine does not know the name
        for family, *_, where in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(where)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise TrainingError(f"{name} is {address}; the port must be free: {error.strerror}") from None
                else:
                    own.add(str(where[0]))
    return own


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port on an address of this machine."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return probe.getsockname()[1]


def free_ports(number: int) -> int:
    """Return the first of `number` adjacent ports of QUIET_PORTS that are free on 127.0.0.1."""
    while True:
        first = random.choice(QUIET_PORTS[:-number])
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + number):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def own_address(coordinator_address: str) -> str:
    """Return the IP address from which this machine reaches the coordinator.

    Raises TrainingError if this machine does not know its name, which a cluster may announce later.
    """
    host, _, port = coordinator_address.rpartition(":")
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        given = f"--coordinator_address is {coordinator_address}"
        raise TrainingError(f"{given}; it must have a host that this machine knows: {error}") from None
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return probe.getsockname()[0]


def in_address(host: str) -> str:
    """Return a host as it is written before :PORT, with an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return host != "" and port.isdecimal() and int(port) < 65536
