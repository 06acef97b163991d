"""The costs of computation and communication on a cluster: by the rates of GPUs, or as measured on CPUs.

A machine has these:

  overlaps                      whether a device sends and computes at the same time
  clock_seconds                 seconds of a clock of a pipeline besides its actions and transfers
  together(seconds, copies)     how long devices take that compute at the same time, given the seconds that each takes
                                alone, [.., device]; copies: replicas of these devices, which compute the same
  collective(sent, axes)        seconds of the collectives of a traffic; axes: sizes of the mesh axes
  started(num_devices)          seconds that a step takes besides everything else
  moved(nbytes, num_devices)    seconds in which these devices each read or write this number of bytes at the same time
  launched(number)              seconds in which a device launches this number of kernels
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpar import cluster as clusters
from jaxpar.choose.costs.rates import collective_seconds, hop_seconds, launch_seconds, memory_seconds, send_rate
from jaxpar.cluster import Cluster
from jaxpar.core.mesh import CONTEXT, DATA, STAGE, TENSOR
from jaxpar.core.plan import COPY, Traffic
from jaxpar.core.ring import PERMUTE, RING_PASSES

CLOCK_KERNELS = 10  # launches that a clock of a pipeline needs besides those of its actions


def num_collectives(sent: Traffic, size: int) -> float:
    """Return the number of collectives of a traffic over an axis of this size."""
    passes = RING_PASSES.get(sent.kind, 0) * (size - 1)  # of one of them; 0 if it is one message, or there are none
    return sent.messages / passes if passes else sent.messages


@cache
def axis_groups(
    axis: str, num_data: int, num_stages: int, num_tensor: int = 1, num_context: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each group of a mesh axis; the devices of a tensor axis, or else stages, are adjacent."""
    sizes = {DATA: num_data, STAGE: num_stages, CONTEXT: num_context, TENSOR: num_tensor}
    groups = np.moveaxis(np.arange(math.prod(sizes.values())).reshape(*sizes.values()), list(sizes).index(axis), -1)
    return tuple(map(tuple, groups.reshape(-1, groups.shape[-1]).tolist()))


def partners(group: Sequence[int], distance: int) -> list[tuple[int, int]]:
    """Return each device and its partner, if blocks of `distance` devices exchange with the next block."""
    ahead = [1 if place // distance % 2 == 0 else -1 for place in range(len(group))]
    return [(device, group[place + ahead[place] * distance]) for place, device in enumerate(group)]


class GpuMachine(NamedTuple):
    """GPUs, with the rates of jaxpar/choose/costs/rates.py, measured or assumed."""

    cluster: Cluster
    overlaps: bool = True

    @property
    def clock_seconds(self) -> float:
        """Seconds of the launches of a clock besides those of its actions."""
        return self.launched(CLOCK_KERNELS)

    def together(self, seconds: np.ndarray, copies: int = 1) -> np.ndarray:
        """GPUs share nothing."""
        return np.max(seconds, axis=-1)

    def collective(self, sent: Traffic, axes: Mapping[str, int]) -> float:
        """Return the time of a ring on the slowest link that it crosses, or of copies by the host, one by one."""
        if sent.kind == COPY:
            link = "host" if self.cluster.num_processes == 1 else "network"
            return sent.nbytes / send_rate(self.cluster, link) + sent.messages * hop_seconds(self.cluster, link)
        within = axis_groups(sent.axis, axes[DATA], axes[STAGE], axes.get(TENSOR, 1), axes.get(CONTEXT, 1))
        size = len(sent.members or within[0])
        if size == 1:
            return 0.0
        if sent.members:
            # Those who send to a partner share the cards of a host with the other groups.
            num_groups = sent.members[1] - sent.members[0] if sent.kind == PERMUTE else 1
            groups = [[member + shift for member in sent.members] for shift in range(num_groups)]
            within = tuple(tuple(devices[member] for member in group) for devices in within for group in groups)
        number = num_collectives(sent, size)
        if sent.kind == PERMUTE and sent.distance == 1:
            within = tuple(pair for group in within for pair in pairwise(group))
        elif sent.kind == PERMUTE:
            within = tuple(pair for group in within for pair in partners(group, sent.distance))
        return collective_seconds(self.cluster, sent.kind, within, sent.nbytes, number)

    def started(self, num_devices: int) -> float:
        """The host starts a step while GPUs compute the one before."""
        return 0.0

    def moved(self, nbytes: float, num_devices: int) -> float:
        """Return the time of one GPU."""
        return memory_seconds(self.cluster, nbytes)

    def launched(self, number: float) -> float:
        """Return the time of one GPU."""
        return number * launch_seconds(self.cluster)


class SharedCores(NamedTuple):
    """CPU devices that were not measured: those of a process share its cores, and only computing takes time."""

    cluster: Cluster
    overlaps: bool = False
    clock_seconds: float = 0.0

    def together(self, seconds: np.ndarray, copies: int = 1) -> np.ndarray:
        """Return the longest sum of the times of the devices of a process.

        Replicas of a pipeline are other processes, or as slow for every schedule.
        """
        number = seconds.shape[-1]
        first = range(0, number, processors_shared(self.cluster))
        return np.max(np.add.reduceat(seconds, list(first), axis=-1), axis=-1)

    def collective(self, sent: Traffic, axes: Mapping[str, int]) -> float:
        """Communication is free."""
        return 0.0

    def started(self, num_devices: int) -> float:
        """A step starts at once."""
        return 0.0

    def moved(self, nbytes: float, num_devices: int) -> float:
        """Memory is free."""
        return 0.0

    def launched(self, number: float) -> float:
        """A CPU launches nothing."""
        return 0.0


class CpuMachine(NamedTuple):
    """Virtual devices that share the cores of this machine, with measured rates (calibrate.py)."""

    cluster: Cluster  # the devices
    slowdown: Mapping[int, float]  # time of a computation on n devices at the same time / on one device alone, by n
    # seconds to read or write a byte of memory, by the number of devices that do so at the same time
    byte_seconds: Mapping[int, float]
    # by kind and number of devices, the seconds of a collective and of each byte that a device sends
    collectives: Mapping[str, Mapping[int, tuple[float, float]]]
    clock_seconds: float  # what a clock of a pipeline costs
    step_seconds: Mapping[int, float]  # what a program costs that computes nothing, by number of devices
    overlaps: bool = False

    def together(self, seconds: np.ndarray, copies: int = 1) -> np.ndarray:
        """Devices share the cores: n of them take slowdown(n) times their mean, and at least the longest."""
        busy = np.count_nonzero(seconds, axis=-1)
        numbers = np.array([0, *self.slowdown])
        factor = np.interp(copies * busy, numbers, [0.0, *self.slowdown.values()])
        mean = seconds.sum(axis=-1) / np.maximum(busy, 1)
        return np.maximum(factor * mean, seconds.max(axis=-1))

    def collective(self, sent: Traffic, axes: Mapping[str, int]) -> float:
        """Return the measured time of collectives; all groups of an axis run at the same time."""
        size = len(sent.members) or axes[sent.axis]
        if size == 1:
            return 0.0
        measured = self.collectives["all-reduce" if sent.kind not in self.collectives else sent.kind]
        latency, of_byte = (
            float(np.interp(math.prod(axes.values()), list(measured), values))
            for values in zip(*measured.values(), strict=True)
        )
        return num_collectives(sent, size) * latency + sent.nbytes * of_byte

    def moved(self, nbytes: float, num_devices: int) -> float:
        """Return the time of devices that share the memory."""
        return nbytes * _at(num_devices, self.byte_seconds)

    def launched(self, number: float) -> float:
        """A CPU launches nothing."""
        return 0.0

    def started(self, num_devices: int) -> float:
        """Return the time that a program takes that computes nothing."""
        return _at(num_devices, self.step_seconds)


def _at(number: int, measured: Mapping[int, float]) -> float:
    """Return a value between those that were measured for numbers of devices."""
    return float(np.interp(number, list(measured), list(measured.values())))


Machine = GpuMachine | CpuMachine | SharedCores


def machine_of(cluster: Cluster) -> Machine:
    """Return the costs of a cluster without measuring anything. Unknown rates of GPUs are assumed."""
    return SharedCores(cluster) if cluster.platform == "cpu" else GpuMachine(with_assumed_rates(cluster))


def processors_shared(cluster: Cluster) -> int:
    """Return the number of neighbouring devices that share their processors."""
    return max(1, cluster.num_devices // cluster.num_processes) if cluster.platform == "cpu" else 1


def with_assumed_rates(cluster: Cluster) -> Cluster:
    """Return a cluster with the rates of an H100 where its own are unknown, so that times can be compared."""
    if cluster.memory_bandwidth is None or not cluster.send_rates:  # JAX reports neither
        cluster = clusters.with_rates_of_kind(cluster)
    assumed = clusters.named_cluster("h100", 1)
    return replace(
        cluster,
        peak_flops={**assumed.peak_flops, **cluster.peak_flops},
        memory_bandwidth=cluster.memory_bandwidth or assumed.memory_bandwidth,
        send_rates=cluster.send_rates or assumed.send_rates,
    )
