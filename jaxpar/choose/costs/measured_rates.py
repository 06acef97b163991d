"""Measures the rates of the devices of this machine, in place of the assumed ones of jaxpar/choose/costs/rates.py.

Each rate follows from the difference of two programs, so that what both have in common, such as the time until the
first kernel starts, cancels:

  launch   many small kernels, each of which needs the result of the one before / one of them
  memory   as many passes over a large vector / the small kernels
  product  a product of large matrices / one small kernel
  link     a loop over a collective / the same loop without it, for short and for long vectors

All collectives together give one bandwidth and one latency of a hop, by the model of `collective_seconds`. The programs
run on devices of any kind, and take turns, so that a slow phase of the machine affects all of them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpar.choose.costs.calibrate import AXIS, KINDS, NUM_REPEATED, collectives, divisible, on_mesh
from jaxpar.choose.costs.rates import ring_hops
from jaxpar.cluster import Cluster
from jaxpar.cluster.gpus import PEAK_DTYPES
from jaxpar.core.ring import sent_of_operand
from jaxpar.errors import UserError
from jaxpar.measure.phases import seconds_in_turn

FLOAT_BYTES = 4  # of an element of the vectors, which are float32
ROUNDS = 10
NO_COLLECTIVE = "none"


class MeasuredSizes(NamedTuple):
    """Sizes of the programs; the defaults are for GPUs."""

    width: int = 8192  # rows and columns of the matrices
    kernels: int = 128  # number of kernels, and of passes, in a program
    few: int = 2**8  # elements of the vector of a small kernel, and of a collective that takes as long as its latency
    many: int = 2**26  # elements of the vector of a pass, which no cache holds
    sent: int = 2**24  # elements of the vector of a collective that takes as long as its bytes


GPU_SIZES = MeasuredSizes()


def measured_cluster(cluster: Cluster, devices: Sequence[jax.Device], sizes: MeasuredSizes = GPU_SIZES) -> Cluster:
    """Return the cluster, of one process, with measured rates. See `with_measured_rates`."""
    assert len(devices) == cluster.num_devices
    return with_measured_rates(cluster, measure_seconds(devices, sizes), sizes)


# ---- measure --------------------------------------------------------------------------------------------------------


def measure_seconds(devices: Sequence[jax.Device], sizes: MeasuredSizes, rounds: int = ROUNDS) -> dict[Any, float]:
    """Return the seconds of each of `single_programs`, and of each of `loops` by its name and the length of its vector.

    rounds: measurements of each program.
    """
    calls: dict[Hashable, Callable[[], Any]] = {
        name: partial(jax.jit(function), *(jax.device_put(x, devices[0]) for x in arguments))
        for name, (function, *arguments) in single_programs(sizes).items()
    }
    n, mesh = len(devices), Mesh(np.asarray(devices), (AXIS,))
    if n > 1:
        lengths = [divisible(length, n) for length in (sizes.few, sizes.sent)]
        calls |= {(kind, length): on_mesh(f, (length,), mesh) for kind, f in loops(n).items() for length in lengths}
    return seconds_in_turn(calls, rounds)


def single_programs(sizes: MeasuredSizes) -> dict[str, tuple[Any, ...]]:
    """Return the programs of one device, by name: a function and its arguments."""
    few, many = (np.ones(length, np.float32) for length in (sizes.few, sizes.many))
    # Products of constant matrices need less power, so that GPUs compute them faster than others.
    matrix = np.random.default_rng(0).normal(size=(sizes.width, sizes.width)).astype(np.float32)
    return {
        "kernel": (partial(chained_kernels, 1), few),
        "kernels": (partial(chained_kernels, sizes.kernels), few),
        "passes": (partial(chained_kernels, sizes.kernels), many),
        **{dtype: (jnp.matmul, *[matrix.astype(jnp.dtype(dtype))] * 2) for dtype in PEAK_DTYPES},
    }


def chained_kernels(number: int, x: jax.Array) -> jax.Array:
    """Halve a vector `number` times, each time in a kernel of its own."""
    for _ in range(number):
        x = jax.lax.optimization_barrier(x * 0.5)
    return x


def loops(n: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Return a loop over each kind of collective of n devices, and the same loop without one (NO_COLLECTIVE)."""
    return {kind: partial(loop, f) for kind, f in (collectives(n) | {NO_COLLECTIVE: lambda x: x}).items()}


def loop(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Repeat a collective. Each one waits for the one before, because its vector depends on the result of that.

    Besides the collective, all loops compute the same two kernels: one copies an element, and the other one is a pass
    over a vector, to which the element is added. A result with the shape of the vector replaces it, so that an
    all-reduce can be done in place, as in training.
    """

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        result = collective(x)
        element = jax.lax.optimization_barrier(result[0])
        return 0.5 * (result if result.shape == x.shape else x) + element, None

    return jax.lax.scan(step, x, None, length=NUM_REPEATED)[0]


# ---- read -----------------------------------------------------------------------------------------------------------


def with_measured_rates(cluster: Cluster, seconds: Mapping[Any, float], sizes: MeasuredSizes) -> Cluster:
    """Return the cluster with the rates that follow from the seconds of `measure_seconds`.

    Rates of data sheets stay, with measured efficiencies; an unknown rate becomes the measured one. Attention, and
    links that were not measured, keep their assumed efficiency. Raises UserError if other programs disturbed the
    measurement, so that a program took no longer than a smaller one.
    """
    launch = _longer(seconds["kernels"], seconds["kernel"], "a kernel") / (sizes.kernels - 1)
    moved = 2 * FLOAT_BYTES * (sizes.many - sizes.few) * sizes.kernels
    memory = moved / _longer(seconds["passes"], seconds["kernels"], "a pass over the memory")
    products = {
        dtype: 2 * sizes.width**3 / _longer(seconds[dtype], seconds["kernel"], f"a product in {dtype}")
        for dtype in PEAK_DTYPES
    }
    peaks = {**products, "float16": products["bfloat16"], **cluster.peak_flops}
    bandwidth = cluster.memory_bandwidth or memory
    efficiencies = {dtype: rate / peaks[dtype] for dtype, rate in products.items()} | {"memory": memory / bandwidth}
    measured = replace(
        cluster, memory_bandwidth=bandwidth, peak_flops=peaks, efficiencies=efficiencies, launch_seconds=launch
    )
    n = cluster.num_devices
    if n == 1:
        return measured
    lengths = [divisible(length, n) for length in (sizes.few, sizes.sent)]
    short, long = (
        sum((seconds[kind, length] - seconds[NO_COLLECTIVE, length]) / NUM_REPEATED for kind in KINDS)
        for length in lengths
    )
    few, many = (FLOAT_BYTES * length for length in lengths)
    sent = sum(sent_of_operand(kind, n) for kind in KINDS)  # for each byte of a vector
    rate = sent * (many - few) / _longer(long, short, "a collective of a long vector")
    hop = max(short - sent * few / rate, 0.0) / sum(ring_hops(kind, n).host for kind in KINDS)
    return replace(
        measured,
        efficiencies={**efficiencies, "host": 1.0},
        send_rates={**cluster.send_rates, "host": rate},
        latencies={**cluster.latencies, "host": hop},
    )


def _longer(seconds: float, others: float, what: str) -> float:
    """Return the difference of two times. Raises UserError if it is not positive."""
    if seconds <= others:
        raise UserError(
            f"--cluster is 'here', but {what} is too fast to time; it must be a machine with devices that are idle"
        )
    return seconds - others


def describe_rates(cluster: Cluster) -> str:
    """Return the measured rates in a line."""
    assert cluster.memory_bandwidth is not None
    assert cluster.launch_seconds is not None
    share, rates = cluster.efficiencies, {dtype: cluster.peak_flops[dtype] for dtype in PEAK_DTYPES}
    parts = [
        f"{dtype} products {share[dtype] * peak / 1e12:.3g} TFLOP/s ({share[dtype]:.0%})"
        for dtype, peak in rates.items()
    ]
    parts.append(f"memory {share['memory'] * cluster.memory_bandwidth / 1e9:.4g} GB/s ({share['memory']:.0%})")
    parts.append(f"{cluster.launch_seconds * 1e6:.3g} us per kernel")
    if "host" in share:
        rate, hop = cluster.send_rates["host"], cluster.latencies["host"]
        parts.append(f"links {rate / 1e9:.4g} GB/s and {hop * 1e6:.3g} us a hop")
    return ", ".join(parts)
