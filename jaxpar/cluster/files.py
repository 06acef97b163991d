"""Clusters that are named: NAME:DEVICES, NAME:HOSTSxDEVICES, or a TOML file that describes one.

NAME is a kind of GPU (jaxpar/cluster/gpus), or the path of a file for another one. A cluster file has `gpu`, a kind or
a file of the same folder; `hosts`; `gpus_per_host`; the tables `host` and `network`, each with the `bandwidth` in
bytes/s that a GPU sends to others of its host or of other hosts, and the `latency` of a message in seconds; if the
GPUs of a host share fewer cards, `network_cards`, while `bandwidth` is what each sends when all do; if they differ from
those of the GPU, its `memory_bytes` and a table `peak_flops` by dtype; and, if they were measured, `launch_seconds` and
a table `efficiency` (`jaxpar.cluster.Cluster`). `price_per_hour` is what a GPU costs.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.cluster import RATE_NAMES, Cluster, gpu_cluster, gpus
from jaxpar.cluster.gpus import GpuKind, check_positive, find_gpu, read_number, read_peaks, read_toml
from jaxpar.config import config_folder
from jaxpar.errors import UserError, nearest
from jaxpar.files import file_of

MOST_DEVICES = 2**16
CLUSTER_LINKS = ("host", "network")
CLUSTER_KEYS = (
    *("gpu", "hosts", "gpus_per_host", *CLUSTER_LINKS, "memory_bytes", "peak_flops"),
    *("efficiency", "launch_seconds", "network_cards", "price_per_hour", "source"),
)


def find_named(text: str, key: str, others: Sequence[str] = ()) -> tuple[GpuKind, Cluster]:
    """Return the cluster that the value of a flag names, and its kind of GPU.

    Raises UserError, which begins with `key`, the flag, or the path, if it names none, or the file is invalid. others:
    values of the flag that name no cluster, for messages.
    """
    path = shipped(Path(text))
    if path.suffix == ".toml" and path.is_file():
        content = read_toml(path, key)
        only = set(CLUSTER_KEYS) - set(gpus.KEYS)
        # Otherwise it describes a kind of GPU.
        if not content or "gpu" in content or ("xla" not in content and not only.isdisjoint(content)):
            return _read_cluster(content, text)
    name, colon, devices = text.partition(":")
    parts = re.fullmatch(r"((?P<hosts>\d+)x)?(?P<number>\d+)", devices if colon else "1", re.ASCII)
    if parts is None:
        raise UserError(
            f"{key} is {text!r}; it must end with the number of GPUs, as in h100:8 or h100:16x8 (hosts x GPUs)"
        )
    hosts, number = int(parts["hosts"] or 1), int(parts["number"])
    if not 0 < hosts * number <= MOST_DEVICES:
        raise UserError(f"{key} is {text!r}; it must have between 1 and {MOST_DEVICES:,} devices, as in h100:16x8")
    gpu = find_gpu(name, key, others)
    return gpu, gpu_cluster(gpu, hosts * number, num_processes=hosts)


def shipped(path: Path) -> Path:
    """Return the path, or that of the cluster file with this name that is shipped with jaxpar."""
    other = config_folder() / "clusters" / path.name
    return other if not path.exists() and other.is_file() else path


def _read_cluster(content: dict[str, Any], path: str) -> tuple[GpuKind, Cluster]:
    """Return the cluster of a file, and its kind of GPU. Raises UserError if a key is missing, unknown or invalid."""
    for name in content:
        if name not in CLUSTER_KEYS:
            hint = nearest(name.lower(), CLUSTER_KEYS)
            raise UserError(f"{path}: {name} is not a key; it must be one of {', '.join(CLUSTER_KEYS)}.{hint}")
    if "gpu" not in content:
        raise UserError(
            f"{path}: gpu is missing; it must be one of {', '.join(gpus.gpu_kinds())}, or a TOML file of this folder"
        )
    name = str(content["gpu"])
    gpu = find_gpu(str(file_of(Path(path).parent, name)) if name.endswith(".toml") else name, f"{path}: gpu")
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
    for link, number in zip(CLUSTER_LINKS, (each, hosts), strict=True):
        if number > 1 and link not in rates:
            raise UserError(f"{path} has no table {link}; it must have one with bandwidth and latency")
    cluster = gpu_cluster(gpu, int(hosts * each), num_processes=int(hosts))
    memory = read_number(content, "memory_bytes", path) if "memory_bytes" in content else cluster.memory_bytes
    launch, price = (
        read_number(content, name, path, least=0) if name in content else None
        for name in ("launch_seconds", "price_per_hour")
    )
    cards = int(read_number(content, "network_cards", path, integer=True)) if "network_cards" in content else None
    if cards is not None and cards > each:
        raise UserError(f"{path}: network_cards is {cards}; it must be at most {each}, gpus_per_host")
    peaks = {**cluster.peak_flops, **read_peaks(content, path)}
    efficiency = content.get("efficiency", {})
    if not isinstance(efficiency, dict) or not set(efficiency) <= set(RATE_NAMES):
        names = ", ".join(RATE_NAMES)
        raise UserError(f"{path}: efficiency is {efficiency!r}; it must be a table with some of {names}")
    for name, value in efficiency.items():
        check_positive(value, f"{path}: efficiency.{name}")
    return gpu, replace(
        cluster,
        memory_bytes=memory,
        peak_flops=peaks,
        send_rates=rates,
        network_cards=cards,
        latencies=latencies,
        efficiencies=efficiency,
        launch_seconds=launch,
        price_per_hour=price,
    )


def cluster_toml(cluster: Cluster, gpu: str, source: str) -> str:
    """Return the cluster file of measured GPUs of this kind, with four digits of each number.

    Their memory and peak FLOP/s are those of their kind. source: where the numbers are from.
    """
    assert cluster.launch_seconds is not None
    lines = [
        f"source = {json.dumps(source)}",
        f'gpu = "{gpu}"',
        f"hosts = {cluster.num_processes}",
        f"gpus_per_host = {cluster.num_devices // cluster.num_processes}",
        f"launch_seconds = {cluster.launch_seconds:.4g} # of a kernel, besides its bytes or FLOPs",
        "",
        "[efficiency] # what is reached / the peak FLOP/s, the bandwidth of the memory and that of a link",
        *(f"{name} = {value:.4g}" for name, value in cluster.efficiencies.items()),
    ]
    for link, latency in cluster.latencies.items():
        lines += ["", f"[{link}]", f"bandwidth = {cluster.send_rates[link]:.4g}", f"latency = {latency:.4g}"]
    return "\n".join(lines) + "\n"
