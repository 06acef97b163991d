"""Targets: GPUs for which XLA compiles, also those that this machine does not have.

A target is written NAME:DEVICES or NAME:HOSTSxDEVICES, such as h100:8 or h100:16x8. NAME is a kind of GPU
(jaxpar/cluster/gpus), or the path of a file for another one. Compiling needs JAX's plugin for GPUs, but no GPU. `here`
are the GPUs of this machine, for which the compiler of a run compiles.
"""

import os
import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxpar import cluster as clusters
from jaxpar.cluster import DEFAULT_FRACTION, Cluster
from jaxpar.cluster.files import find_named
from jaxpar.errors import UserError, format_bytes

HERE = "here"
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
NO_AUTOTUNING = "--xla_gpu_autotune_level=0"  # it would run kernels, and there is nothing to run them on
FRACTION = "XLA_CLIENT_MEM_FRACTION"
FORMER_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


class Target(NamedTuple):
    """GPUs to compile for."""

    cluster: Cluster  # the GPUs. Those that are absent have the memory of their data sheet.
    devices: list[Any]  # the GPUs of this machine, or those of a topology, on which nothing can be placed
    memory_bytes: float  # memory that a GPU reports to JAX, which differs from that of the data sheet by some percent
    usable_bytes: float  # the part of it that JAX takes


def memory_fraction() -> float:
    """Return the fraction of the memory that JAX takes on a GPU with the present environment variables."""
    name = FRACTION if os.environ.get(FRACTION) else FORMER_FRACTION
    text = os.environ.get(name) or str(DEFAULT_FRACTION)
    if not re.fullmatch(r"\d*\.?\d+", text) or not 0 < float(text) <= 1:
        raise UserError(f"{name} is {text!r}; it must be a number above 0 and up to 1, such as 0.9")
    return float(text)


def what_jax_takes(usable_bytes: float, digits: int = 3) -> str:
    """Return a sentence about the memory of a GPU that a run can use, and the variable that sets it."""
    fraction = memory_fraction()
    usable, whole = (format_bytes(nbytes, digits) for nbytes in (usable_bytes, usable_bytes / fraction))
    return f"JAX takes {usable} of the {whole} of a GPU ({FRACTION}={fraction:g})"


def find_target(text: str, key: str = "--target") -> Target:
    """Return the target that a flag names. Call before JAX uses a device: it restricts JAX to CPUs.

    Raises UserError, which begins with `key`, if the text is not a target, the plugin is not installed, or the target
    is `here` on a machine without GPUs; and if XLA_CLIENT_MEM_FRACTION is invalid.
    """
    if text == HERE:
        cluster = clusters.with_rates_of_kind(clusters.find_cluster())
        if cluster.platform != "gpu" or cluster.memory_bytes is None:
            raise UserError(
                f"{key} is {text!r}, on a machine without GPUs that JAX can use; it must be a kind of GPU, such as "
                "h100:8"
            )
        # JAX reports the memory that it takes.
        return Target(cluster, clusters.devices(), cluster.memory_bytes / memory_fraction(), cluster.memory_bytes)
    if text.startswith(f"{HERE}:"):
        raise UserError(f"{key} is {text!r}; it must be {HERE}, without a number of devices")
    (gpu, cluster), fraction = find_named(text, key, others=(HERE,)), memory_fraction()
    if not any(find_spec(name) for name in PLUGINS):
        raise UserError(
            f"{key} is {text!r}, for which XLA cannot compile here; install the extra targets (scripts/setup "
            "targets, or pip install 'jaxpar[targets]')"
        )
    if NO_AUTOTUNING not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_AUTOTUNING}".strip()
    assert cluster.memory_bytes is not None  # every kind of GPU has its own
    # A cluster file can state another memory.
    is_of_kind = cluster.memory_bytes == gpu.memory_bytes
    memory = gpu.numbers["device_memory_size"] if is_of_kind else cluster.memory_bytes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # XLA cannot load a cached program without a GPU
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=gpu.config(memory),
            topology=f"1x{cluster.num_processes}x{cluster.num_devices // cluster.num_processes}",
        )
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{key} is {text!r}, which XLA refuses ({reason}); it must be a GPU that XLA knows") from error
    usable = fraction * memory
    cluster = replace(cluster, memory_fraction=usable / cluster.memory_bytes)
    return Target(cluster, list(topology.devices), memory, usable)
