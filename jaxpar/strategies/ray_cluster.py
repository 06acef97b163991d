"""Joins or starts a cluster of Ray, for live swarms and for the outer step between runs.

Without an address, Ray is started on this machine alone: it listens on the loopback interface, and ends with this
process. With an address, this process joins the cluster that `ray start` started. Ray's usage statistics are off, and
the output of actors stays in Ray's log files.
"""

import atexit
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import TrainingError, UserError

CONNECT_SECONDS = 10.0
LOOPBACK = "127."
GCS_ADDRESS = re.compile(r"--gcs-address=([^\0\s]+)")
SILENT_END = (
    "jaxpar: the run ended without saving, because it was killed, or Ray's processes on this machine were; the same "
    "command resumes it from its last checkpoint"
)
ADDRESS = re.compile(r"[^/\s]+:(?P<port>\d{1,5})")
# What Ray must be installed for, as the end of a rule.
WITHOUT_RAY = "without Ray, which `pip install 'jaxpar[swarm]'` installs, and `scripts/setup swarm` in a clone"
AUTH_MODE = re.compile(r"(?:^|\0)RAY_AUTH_MODE=([^\0]*)")


def load_ray(*, alone: bool) -> Any:
    """Import Ray, with its usage statistics and its warnings off, and return it. alone: on this machine only."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # messages of the raylet, such as that a worker died
    if alone:  # Ray then uses the loopback interface as that of this machine. It is read when Ray is imported
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
    logging.getLogger("ray").setLevel(logging.ERROR)
    return ray


def check_address(key: str, address: str, *, required: bool) -> None:
    """Raise UserError for an invalid address of a cluster, the value of config key `key`. required: not empty."""
    found = ADDRESS.fullmatch(address)
    if address not in (("auto",) if required else ("auto", "")) and not (found and 0 < int(found["port"]) < 2**16):
        rule = "HOST:PORT or auto" if required else "HOST:PORT, auto, or empty"
        raise UserError(f"config.{key} is {address!r}; it must be {rule}")


def connect(key: str, address: str, num_cpus: int) -> Any:
    """Return Ray, connected to a cluster. A process that is connected already stays where it is.

    Actors find jaxpar and an own model in the folders of this process's PYTHONPATH, if they are not installed. address:
    HOST:PORT of a cluster, `auto` for the one of this machine, or empty to start one here, with `num_cpus`. key: its
    config key.

    Raises UserError if there is no cluster at the address, or it has another version of Ray or Python; TrainingError if
    Ray does not start here.
    """
    here = clusters_here() if address else {}
    adopt_token_mode(address, here)
    ray = load_ray(alone=not address)
    if ray.is_initialized():
        return ray
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    with _signal_handlers():
        if not address:
            try:
                ray.init(address="local", num_cpus=num_cpus, **quiet)
            except Exception as error:  # Ray raises bare exceptions
                reason = str(error).strip().split("\n")[0]
                raise TrainingError(f"Ray does not start on this machine: {reason}") from error
        else:
            try:
                # Without these checks, Ray itself tries for minutes.
                if address != "auto":
                    host, _, port = address.rpartition(":")
                    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
                elif here and not os.environ.get("RAY_ADDRESS") and all(one.startswith(LOOPBACK) for one in here):
                    raise ValueError(f"the cluster at {min(here)} is that of another run, which nothing else can join")
                folders = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
                ray.init(address=address, job_config=ray.job_config.JobConfig(code_search_path=folders), **quiet)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                reason = str(error).strip().split("\n")[0]
                raise UserError(
                    f"config.{key} is {address!r}, where no Ray cluster accepts this process ({reason}); it must be "
                    "HOST:PORT of a cluster that `ray start --head` started, whose token this process has, or auto for "
                    "the one of this machine"
                ) from error
    _announce_silent_end()
    return ray


def end_actor() -> None:
    """End the process of the actor that calls this, from any of its tasks."""
    import ray

    ray.kill(ray.get_runtime_context().current_actor)


def _announce_silent_end() -> None:
    """Start a process that prints a line if this process ends without Python's exit handlers.

    Ray ends each process of a machine, in C++ and without a message, when its own process there has ended.
    """
    program = 'trap "" HUP INT TERM; read -r line || echo "$0" >&2'
    shell = subprocess.Popen(["sh", "-c", program, SILENT_END], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    atexit.register(shell.communicate, b"\n")


def clusters_here(processes: Path = Path("/proc")) -> dict[str, str]:
    """Return the clusters to which Ray's processes on this machine belong, on Linux: RAY_AUTH_MODE by address."""
    found: dict[str, str] = {}
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to someone else
            for address in GCS_ADDRESS.findall((folder / "cmdline").read_text(errors="replace")):
                found.setdefault(address, "")
                if modes := AUTH_MODE.findall((folder / "environ").read_text(errors="replace")):
                    found[address] = modes[0]
    return found


def adopt_token_mode(address: str, here: Mapping[str, str]) -> None:
    """Set RAY_AUTH_MODE as the cluster at an address has it, unless it is set. Before Ray is imported.

    `ray start --head` asks for tokens if it finds one, `ray start --address` and ray.init do not.
    """
    port = address.rpartition(":")[-1]
    for one, mode in here.items():
        is_meant = not one.startswith(LOOPBACK) if address == "auto" else one.rpartition(":")[-1] == port
        if mode and is_meant:
            os.environ.setdefault("RAY_AUTH_MODE", mode)


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Keep the handlers of signals, because ray.init replaces that of SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
