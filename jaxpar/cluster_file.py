"""Clusters that are named: NAME:DEVICES, NAME:HOSTSxDEVICES, or a TOML file that describes one.

NAME is a kind of GPU (jaxpar/gpus), or the path of a file for another one. A cluster file has `gpu`, a NAME; `hosts`;
`gpus_per_host`; the tables `host` and `network`, each with the `bandwidth` in bytes/s that a GPU sends to others of its
host or of other hosts, and the `latency` of a message in seconds; and, if they differ from those of the GPU, its
`memory_bytes` and a table `peak_flops` by dtype.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar import gpus
from jaxpar.cluster import Cluster, gpu_cluster
from jaxpar.config import config_folder
from jaxpar.errors import UserError, nearest
from jaxpar.gpus import GpuKind, find_gpu, read_number, read_peaks, read_toml

MOST_DEVICES = 2**16
CLUSTER_LINKS = ("host", "network")
CLUSTER_KEYS = ("gpu", "hosts", "gpus_per_host", *CLUSTER_LINKS, "memory_bytes", "peak_flops", "source")


def find_named(text: str, key: str) -> tuple[GpuKind, Cluster]:
    """Return the cluster that a flag names, and its kind of GPU. Raises UserError, which begins with `key`."""
    path = shipped(Path(text))
    if path.suffix == ".toml" and path.is_file() and describes_cluster(content := read_toml(path, key)):
        return read_cluster(content, text)
    gpu, hosts, number = parse_devices(text, key)
    return gpu, gpu_cluster(gpu, hosts * number, num_processes=hosts)


def shipped(path: Path) -> Path:
    """Return the path, or that of the cluster file with this name that is shipped with jaxpar."""
    other = config_folder() / "clusters" / path.name
    return other if not path.exists() and other.is_file() else path


def parse_devices(text: str, key: str) -> tuple[GpuKind, int, int]:
    """Return the kind of GPU, the hosts and the GPUs of a host that a flag names.

    Raises:
      UserError: it names none; the message begins with `key`.
    """
    name, colon, devices = text.partition(":")
    parts = re.fullmatch(r"((?P<hosts>\d+)x)?(?P<number>\d+)", devices if colon else "1", re.ASCII)
    if parts is None:
        raise UserError(
            f"{key} is {text!r}; it must end with the number of GPUs, as in h100:8 or h100:16x8 (hosts x GPUs)"
        )
    hosts, number = int(parts["hosts"] or 1), int(parts["number"])
    if not 0 < hosts * number <= MOST_DEVICES:
        raise UserError(f"{key} is {text!r}; it must have between 1 and {MOST_DEVICES:,} devices, as in h100:16x8")
    return find_gpu(name, key), hosts, number


def describes_cluster(content: dict[str, Any]) -> bool:
    """Return whether a TOML file has keys that only cluster files have, and is not the file of a kind of GPU."""
    only = set(CLUSTER_KEYS) - set(gpus.KEYS)
    return "gpu" in content or ("xla" not in content and not only.isdisjoint(content))


def read_cluster(content: dict[str, Any], path: str) -> tuple[GpuKind, Cluster]:
    """Return the cluster of a file, and its kind of GPU.

    Args:
      content: the content of the file.
      path: its path, for messages.

    Raises:
      UserError: a key is missing, unknown or invalid.
    """
    for name in content:
        if name not in CLUSTER_KEYS:
            hint = nearest(name.lower(), CLUSTER_KEYS)
            raise UserError(f"{path}: {name} is not a key; it must be one of {', '.join(CLUSTER_KEYS)}.{hint}")
    if "gpu" not in content:
        raise UserError(
            f"{path}: gpu is missing; it must be one of {', '.join(gpus.gpu_kinds())}, or the path of a TOML file"
        )
    gpu = find_gpu(str(content["gpu"]), f"{path}: gpu")
    hosts, each = (read_number(content, name, path, integer=True) for name in ("hosts", "gpus_per_host"))
    if hosts * each > MOST_DEVICES:
        raise UserError(f"{path}: hosts x gpus_per_host is {hosts * each:,}; it must be at most {MOST_DEVICES:,}")
    rates, latencies = dict(gpu.links), dict[str, float]()
    for link in CLUSTER_LINKS:
        if link in content:
            of_link = content[link]
            if not isinstance(of_link, dict) or set(of_link) != {"bandwidth", "latency"}:
                raise UserError(f"{path}: {link} is {of_link!r}; it must be a table with bandwidth and latency")
            rates[link] = read_number(of_link, "bandwidth", f"{path}: {link}")
            latencies[link] = read_number(of_link, "latency", f"{path}: {link}", least=0)
    missing = [
        link for link, number in zip(CLUSTER_LINKS, (each, hosts), strict=True) if number > 1 and link not in rates
    ]
    if missing:
        raise UserError(f"{path} has no table {missing[0]}; it must have one with bandwidth and latency")
    cluster = gpu_cluster(gpu, int(hosts * each), num_processes=int(hosts))
    memory = read_number(content, "memory_bytes", path) if "memory_bytes" in content else cluster.memory_bytes
    peaks = {**cluster.peak_flops, **read_peaks(content, path)}
    return gpu, replace(cluster, memory_bytes=memory, peak_flops=peaks, send_rates=rates, latencies=latencies)
