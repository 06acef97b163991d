"""The rates that predicted times assume: those of data sheets, times efficiencies.

The rates of data sheets are in jaxpar/cluster/gpus and jaxpar/measure/flops.py. The efficiencies below are assumptions,
which hold unless a cluster has measured ones (jaxpar/choose/costs/measured_rates.py).
docs/results/published.md compares predicted rates of training with published ones.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.cluster import Cluster
from jaxpar.cluster.gpus import PEAK_DTYPES
from jaxpar.core.ring import PERMUTE, RING_PASSES
from jaxpar.errors import UserError

EFFICIENCY = {
    "float32": 0.7,  # of the peak FLOP/s of this dtype, in matrix products and convolutions
    "bfloat16": 0.7,
    "attention": 0.5,  # of the peak FLOP/s, in attention kernels
    "memory": 0.85,  # of the rate of the memory
    "host": 0.8,  # of the rate of a link
    "network": 0.8,
}
# By the first digit of the compute capability, if it differs. A100s: matrix products reach 80% to 90% of the peak, and
# attention 50% to 73% (Dao, "FlashAttention-2", 2023, abstract and section 1). The best product of a search reached 87%
# (stas00/ml-engineering at 744d01e, compute/accelerator/README.md, MAMF), but 80% on an H100, so most reach less.
EFFICIENCY_OF = {"8": {"float32": 0.8, "bfloat16": 0.8, "attention": 0.6}}
# Attention of Hopper with heads below 128, whose softmax takes longer than its products / that with larger heads. Heads
# of 64 reach 0.25 (1,024 tokens) to 0.33 (4,096 tokens) of the peak: docs/results/gpu/one_gpu.md.
HOPPER, WIDE_HEAD, OF_NARROW_HEADS = "9", 128, 0.5
# What a kernel adds to the time of its bytes or FLOPs. On an H200 (scripts/bench/gpu_steps.py --profile), the next one
# starts after 1.9 us, one with few bytes takes 1.8 us, and one with 50 to 150 MB 1 to 10 us longer than its bytes.
LAUNCH_SECONDS = 4e-6
# Seconds of each message that follows another one. NCCL assumes 1.9 to 3.4 and 4 to 14 us in a ring, with its protocols
# LL128 and Simple (NVIDIA/nccl at b647562, src/graph/tuning.cc, hwLat).
HOP_SECONDS = {"host": 3e-6, "network": 1e-5}
TREE_BANDWIDTH = 0.92  # of a tree between hosts / that of a ring (the same file)
# Bytes/s of 16 lanes of PCI Express in one direction, by the first digit of the compute capability: generation 3, 4 and
# 5 (data sheets of the GPUs). A copy reaches 0.9 of it: docs/results/gpu/offload.md.
PCIE_RATES, PCIE_EFFICIENCY = {"7": 16e9, "8": 32e9, "9": 64e9, "10": 64e9, "12": 64e9}, 0.9
HALF_WIDTH = ("bfloat16", "float16", "f8e4m3fn", "f8e5m2")  # dtypes of products with the efficiency of bfloat16


def efficiency(cluster: Cluster, rate: str) -> float:
    """Return the measured efficiency of one of `jaxpar.cluster.RATE_NAMES`, or else the assumed one."""
    return (EFFICIENCY | EFFICIENCY_OF.get(_generation(cluster), {}) | dict(cluster.efficiencies))[rate]


def _generation(cluster: Cluster) -> str:
    return cluster.compute_capability.partition(".")[0]


def launch_seconds(cluster: Cluster) -> float:
    """Return the time that a kernel takes besides that of its bytes or FLOPs."""
    return LAUNCH_SECONDS if cluster.launch_seconds is None else cluster.launch_seconds


def product_seconds(cluster: Cluster, kind: str, dtype: str, flops: float, head: int = WIDE_HEAD) -> float:
    """Return the time of matrix products. Raises UserError if the peak FLOP/s of the GPU are unknown.

    kind: product or attention; dtype: the NumPy name of that of the first operand; head: the size of attention heads.
    """
    wide = "bfloat16" if dtype in HALF_WIDTH else "float32"
    peak = cluster.peak_flops.get("float16" if dtype == "float16" else wide)
    if peak is None:
        raise _unknown_peak(cluster)
    if kind != "attention":
        return flops / (efficiency(cluster, wide) * peak)
    is_slow = head < WIDE_HEAD and _generation(cluster) == HOPPER and "attention" not in cluster.efficiencies
    return flops / (efficiency(cluster, "attention") * (OF_NARROW_HEADS if is_slow else 1.0) * peak)


def dtype_advice(cluster: Cluster, dtype: str) -> str | None:
    """Return a sentence if products in bfloat16 are as slow as in float32, but float16 is faster; otherwise None."""
    peaks = cluster.peak_flops
    if dtype != "bfloat16" or peaks[dtype] > peaks["float32"] or peaks["float16"] <= peaks[dtype]:
        return None
    faster = peaks["float16"] / peaks[dtype]
    return (
        f"config.model.dtype is 'bfloat16', for which a {cluster.device_kind} has no tensor cores; products are up to "
        f"{faster:.0f} times as fast with config.model.dtype='float16'."
    )


def memory_seconds(cluster: Cluster, nbytes: float) -> float:
    """Return the time in which a GPU reads or writes `nbytes` bytes of its memory."""
    assert cluster.memory_bandwidth is not None  # every kind of GPU has its own
    return nbytes / (efficiency(cluster, "memory") * cluster.memory_bandwidth)


def host_copy_seconds(cluster: Cluster, nbytes: float) -> float:
    """Return the time in which a GPU copies `nbytes` bytes from pinned host memory, or to it."""
    rate = PCIE_RATES.get(_generation(cluster), min(PCIE_RATES.values()))
    return nbytes / (PCIE_EFFICIENCY * rate)


class Hops(NamedTuple):
    """The messages of a collective that follow each other, by the link that they cross."""

    host: int
    network: int


def ring_hops(kind: str, size: int, num_hosts: int = 1) -> Hops:
    """Return the hops of a collective of `size` devices on this number of hosts, in a ring that enters each host once.

    Source: NVIDIA/nccl at b647562, src/graph/tuning.cc, nsteps and nInterSteps.
    """
    if kind == PERMUTE:
        return Hops(0, 1) if num_hosts > 1 else Hops(1, 0)
    passes = RING_PASSES[kind]
    return Hops(passes * (size - num_hosts), passes * (num_hosts - 1))


def tree_hops(size: int, num_hosts: int) -> Hops:
    """Return the hops of an all-reduce that goes up and down a binary tree of the hosts, and a chain in each.

    Source: the same file, and Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4", 2019.
    """
    return Hops(2 * (math.ceil(size / num_hosts) - 1), 2 * math.ceil(math.log2(num_hosts)))


def collective_seconds(
    cluster: Cluster, kind: str, groups: Sequence[Sequence[int]], nbytes: float, number: float = 1.0
) -> float:
    """Return the time of `number` collectives: of their bytes on the slowest link that they cross, and of their hops.

    They are rings, or, if it is faster, all-reduces between hosts are trees. Raises UserError if the links of the GPU
    are unknown.

    groups: the devices of each group; for a permute, each pair of a sender and a receiver. nbytes: what a device sends
    in all of them together.
    """
    if max(map(len, groups), default=1) == 1:
        return 0.0
    if not cluster.send_rates:
        raise _unknown_links(cluster)
    per_host = cluster.num_devices // cluster.num_processes
    on_hosts = [Counter(device // per_host for device in group) for group in groups]
    rate = send_rate(cluster, "host")
    if crossing := [numbers for numbers in on_hosts if len(numbers) > 1]:
        rate = min(rate, _network_rate(cluster, kind, groups, crossing))
    sizes = {(numbers.total(), len(numbers)) for numbers in on_hosts}
    seconds = nbytes / rate + number * max(_latency(cluster, ring_hops(kind, *size)) for size in sizes)
    if kind == "all-reduce" and crossing:
        tree = nbytes / (TREE_BANDWIDTH * rate) + number * max(_latency(cluster, tree_hops(*size)) for size in sizes)
        return min(seconds, tree)
    return seconds


def _network_rate(
    cluster: Cluster, kind: str, groups: Sequence[Sequence[int]], crossing: Sequence[Counter[int]]
) -> float:
    """Return the bytes/s that a GPU sends in a collective between hosts. crossing: the GPUs of its groups by host."""
    per_host, rate = cluster.num_devices // cluster.num_processes, send_rate(cluster, "network")
    if kind == PERMUTE:  # a sender has its card, or a part of it if others of its host send over it
        hosts = ((sender // per_host, receiver // per_host) for sender, receiver in groups)
        senders = Counter(sender for sender, receiver in hosts if sender != receiver)
        cards = cluster.network_cards or per_host
        return rate * per_host / cards / math.ceil(max(senders.values()) / cards)
    if kind == "all-to-all":  # each GPU sends what is for other hosts, of what is for other GPUs
        fewest = ((numbers.total(), min(numbers.values())) for numbers in crossing)
        return rate * min((total - 1) / (total - own) for total, own in fewest)
    # The rings of a group share the network of all its GPUs on a host.
    return rate * min(min(numbers.values()) for numbers in crossing)


def _latency(cluster: Cluster, hops: Hops) -> float:
    return hops.host * hop_seconds(cluster, "host") + hops.network * hop_seconds(cluster, "network")


def send_rate(cluster: Cluster, link: str) -> float:
    """Return the bytes/s that a GPU reaches on a link, `host` or `network`."""
    return efficiency(cluster, link) * cluster.send_rates[link]


def hop_seconds(cluster: Cluster, link: str) -> float:
    """Return the time of one hop on a link, `host` or `network`."""
    return cluster.latencies.get(link, HOP_SECONDS[link])


def check_rates(cluster: Cluster) -> None:
    """Raise UserError for a cluster for which times cannot be predicted, because rates of the GPUs are unknown."""
    if any(dtype not in cluster.peak_flops for dtype in PEAK_DTYPES):
        raise _unknown_peak(cluster)
    if not cluster.send_rates:
        raise _unknown_links(cluster)
    if cluster.memory_bandwidth is None:
        raise UserError(
            f"the GPU is {cluster.device_kind!r}, whose memory bandwidth is unknown; it must be one of a kind with a "
            "file (jaxpar/cluster/gpus) to predict times"
        )


def _unknown_peak(cluster: Cluster) -> UserError:
    return UserError(
        f"the GPU is {cluster.device_kind!r}, whose peak FLOP/s are unknown; its file, or a cluster file, must have a "
        f"table peak_flops ({' and '.join(PEAK_DTYPES)}) to predict times"
    )


def _unknown_links(cluster: Cluster) -> UserError:
    return UserError(f"the GPU is {cluster.device_kind!r}, whose file has no links; it must have them to predict times")
