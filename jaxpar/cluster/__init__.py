"""Describes the devices of a real or planned cluster. This is the only file that asks JAX for devices.

Plans are made for a `Cluster` (jaxpar/core/plan.py); strategies are built on the devices that `devices` returns.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax

from jaxpar.cluster.gpus import LINKS, PEAK_DTYPES, GpuKind, find_gpu, kind_of_device
from jaxpar.errors import UserError
from jaxpar.host_memory import host_bytes
from jaxpar.measure.flops import peak_flops

RATE_NAMES = (*PEAK_DTYPES, "attention", "memory", *LINKS)  # matrix products by dtype, attention kernels, memory, links

DEFAULT_FRACTION = 0.75  # of the memory of a GPU, which JAX takes unless XLA_CLIENT_MEM_FRACTION is set


@dataclass(frozen=True)
class Link:
    """The link between neighbouring devices on a mesh axis."""

    bandwidth: float  # the rate at which a device can send, in bytes/s
    latency: float = 0.0  # the time until the first byte of a message arrives, in seconds


@dataclass(frozen=True)
class Cluster:
    """A set of devices of one kind."""

    platform: str  # the JAX backend, cpu or gpu
    device_kind: str  # the device kind as JAX reports it
    num_devices: int  # the number of devices on all hosts together
    num_processes: int = 1  # the number of processes that share the devices
    memory_bytes: float | None = None  # of one device; None if unknown. The CPU devices of a machine share its memory.
    memory_fraction: float = 1.0  # of it that JAX takes; 1 for devices that are present, which report what it took
    memory_bandwidth: float | None = None  # the rate at which a device reads its memory, in bytes/s; None if unknown
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # FLOP/s of one device, by the dtypes that are known
    compute_capability: str = ""  # the compute capability of NVIDIA GPUs, such as 9.0; empty for other devices
    has_pinned_host_memory: bool = True  # whether arrays can be placed in pinned host memory
    links: Mapping[str, Link] = field(default_factory=dict)  # of each mesh axis whose link is known
    # the rates at which a device can send to others of its host (`host`) and over the network (`network`) while all
    # devices of its host do, in bytes/s; empty if unknown
    send_rates: Mapping[str, float] = field(default_factory=dict)
    network_cards: int | None = None  # those of a host, which its devices share; None: one for each device
    latencies: Mapping[str, float] = field(default_factory=dict)  # the seconds of a hop on these links, if known
    # by RATE_NAMES, what is reached / the rates above; those that were not measured are missing
    efficiencies: Mapping[str, float] = field(default_factory=dict)
    launch_seconds: float | None = None  # of a kernel, besides its bytes or FLOPs; None if not measured
    price_per_hour: float | None = None  # of a device, in any currency; None if unknown

    @property
    def usable_bytes(self) -> float | None:
        """The memory of a device that JAX takes; None if unknown."""
        return None if self.memory_bytes is None else self.memory_fraction * self.memory_bytes


def devices() -> list[jax.Device]:
    """Return the devices of all processes, in JAX's order. Raises UserError if JAX cannot use any."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin for the platform is installed
        chosen = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error).split("\n")[0] or "its plugin is not installed"
        raise UserError(
            f"JAX_PLATFORMS is {chosen!r}, which JAX cannot start on this machine ({reason}); it must be a platform "
            "that has devices, such as cpu"
        ) from error


def find_cluster() -> Cluster:
    """Describe the devices of all processes of this run."""
    all_devices = devices()
    first = jax.local_devices()[0]
    stats = first.memory_stats() or {}
    kinds = {memory.kind for memory in first.addressable_memories()}
    platform, gpu = jax.default_backend(), kind_of_device(first.device_kind)
    return Cluster(
        platform=platform,
        device_kind=first.device_kind,
        num_devices=len(all_devices),
        num_processes=jax.process_count(),
        memory_bytes=host_bytes() if platform == "cpu" else stats.get("bytes_limit"),
        memory_bandwidth=gpu.memory_bandwidth if gpu else None,
        peak_flops=_peaks(first.device_kind),
        compute_capability=str(getattr(first, "compute_capability", "")),
        has_pinned_host_memory="pinned_host" in kinds,
    )


def named_cluster(
    name: str, num_devices: int, *, num_processes: int = 1, links: Mapping[str, Link] | None = None
) -> Cluster:
    """Describe a cluster of CPUs (`cpu`) or of GPUs (jaxpar/cluster/gpus), without touching a device.

    Raises UserError if the device kind is unknown, num_devices is less than 1, or num_processes does not divide it.
    """
    if num_devices < 1:
        raise UserError(f"num_devices is {num_devices}; it must be at least 1")
    if num_processes < 1 or num_devices % num_processes:
        raise UserError(f"num_processes is {num_processes}; it must divide the number of devices, {num_devices}")
    if name == "cpu":
        return Cluster("cpu", "cpu", num_devices, num_processes, links=links or {})
    return gpu_cluster(find_gpu(name), num_devices, num_processes=num_processes, links=links)


def gpu_cluster(
    gpu: GpuKind, num_devices: int, *, num_processes: int = 1, links: Mapping[str, Link] | None = None
) -> Cluster:
    """Describe a cluster of GPUs of one kind."""
    return Cluster(
        platform="gpu",
        device_kind=gpu.device_kind,
        num_devices=num_devices,
        num_processes=num_processes,
        memory_bytes=gpu.memory_bytes,
        memory_fraction=DEFAULT_FRACTION,
        memory_bandwidth=gpu.memory_bandwidth,
        peak_flops=_peaks(gpu.device_kind) | dict(gpu.peak_flops),
        compute_capability=gpu.compute_capability,
        links=links or {},
        send_rates=gpu.links,
    )


def with_rates_of_kind(cluster: Cluster) -> Cluster:
    """Return the devices of a run with the rates of their kind, which JAX does not report; unchanged if not known."""
    gpu = kind_of_device(cluster.device_kind)
    return replace(cluster, memory_bandwidth=gpu.memory_bandwidth, send_rates=gpu.links) if gpu else cluster


def _peaks(device_kind: str) -> dict[str, float]:
    known = {dtype: peak_flops(device_kind, dtype) for dtype in (*PEAK_DTYPES, "float16")}
    return {dtype: peak for dtype, peak in known.items() if peak is not None}
