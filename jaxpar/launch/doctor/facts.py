"""Finds out what a process knows about itself before a run, and what would make the run fail."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.errors import format_bytes, format_count, printable
from jaxpar.host_memory import host_bytes
from jaxpar.launch.launcher import PROCESS_BYTES

LEAST_DISK = 10**9  # bytes; a checkpoint of the smallest models, with logs
LEAST_SHARED = 2**30  # bytes of /dev/shm: the size that NCCL's user guide names, "Runtime and MPI issues"
EXAMINED = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
# The oldest driver for a plugin (docs.jax.dev, "Installation").
DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
NO_DRIVER = "nvidia-smi fails"
# Versions of NCCL that are known to hang, by what, with the source.
HANGING_NCCL = {"2.30.7": "programs on different devices that exchange arrays (github.com/NVIDIA/jaxpp/issues/11)"}


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
