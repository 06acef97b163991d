"""The device mesh: the only place that names its axes, counts devices and splits the CPU."""

import ctypes
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.errors import Refusals, UserError

DATA = "data"  # replicas: each takes a share of the batch
STAGE = "stage"  # of a pipeline: each device holds some of the layers

# malloc.h: M_TRIM_THRESHOLD and M_MMAP_MAX (freed memory stays with the process), M_ARENA_MAX (and serves all threads).
GLIBC_MALLOC = {-1: 2**31 - 1, -4: 0, -8: 1}


def prepare_jax(config: ConfigDict, cache: Path) -> None:
    """Prepare JAX for a run: virtual CPU devices, and compiled programs kept in `cache`.

    Call before JAX touches a device. A device count in XLA_FLAGS and JAX's environment variables for this cache
    (JAX_COMPILATION_CACHE_DIR, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS) are the user's, and win.
    """
    keep_freed_memory()
    settings = {"jax_compilation_cache_dir": str(cache), "jax_persistent_cache_min_compile_time_secs": 0.1}
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if config.strategy == "pipeline":
        partition_by_gspmd()
    count = config.mesh.virtual_cpu_devices
    if count < 0:
        raise UserError(f"config.mesh.virtual_cpu_devices is {count}; it must be 0 or more")
    if count and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def partition_by_gspmd() -> None:
    """Have programs partitioned by GSPMD. On a pipeline's, the Shardy of JAX 0.11.2 ends the process."""
    if jax.__version_info__ >= (0, 11):
        jax.config.update("jax_use_shardy_partitioner", False)


def check_partitioner() -> None:
    """Raise RuntimeError where a pipeline's program would be partitioned by the Shardy of JAX 0.11."""
    is_shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
    if jax.__version_info__ >= (0, 11) and is_shardy:
        raise RuntimeError("pipelines need jaxpar.mesh.partition_by_gspmd() to be called before: see there")


def keep_freed_memory() -> None:
    """Tell glibc to keep what a CPU step frees for the next step, where the CPU is what computes.

    Else each step gives its temporary buffers back to the system and faults them in again, zeroed: on a
    2-layer BERT over two virtual devices that was 40% of the time. Call before threads start.
    """
    if not sys.platform.startswith("linux") or find_spec("jax_plugins") is not None:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for parameter, value in GLIBC_MALLOC.items():
            mallopt(parameter, value)


def one_at_a_time(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return `function`, a compiled program over `mesh`; on several virtual CPU devices it waits for its results.

    Virtual devices share the threads of one pool. Collectives of several programs in flight can
    take all of them, each waiting for a device that has no thread left, and so for ever.
    """
    if mesh.size == 1:
        return function
    return lambda *args: settled(function(*args))


def settled(x: Any) -> Any:
    """Return the arrays; on several virtual CPU devices, once they are computed. See `one_at_a_time`."""
    return jax.block_until_ready(x) if jax.default_backend() == "cpu" and jax.device_count() > 1 else x


def sizes(config: ConfigDict, cluster: Cluster) -> dict[str, int]:
    """Return the size of each axis, the slowest first. Checks nothing: see `refuse_sizes`."""
    num_data, num_stages = config.mesh.data, config.mesh.stage
    return {DATA: max(cluster.num_devices // num_stages, 1) if num_data == -1 else num_data, STAGE: num_stages}


def refuse_sizes(config: ConfigDict, cluster: Cluster) -> Refusals[None]:
    """Refuse a mesh that does not fit the cluster."""
    if config.mesh.stage < 1:
        yield UserError(f"config.mesh.stage is {config.mesh.stage}; it must be 1 or more")
    if config.mesh.data < 1 and config.mesh.data != -1:
        yield UserError(f"config.mesh.data is {config.mesh.data}; it must be 1 or more, or -1 for all devices")
    num_data, num_stages = sizes(config, cluster).values()
    available = cluster.num_devices
    if num_data * num_stages > available:
        asked = f"config.mesh.data is {num_data}" if num_stages == 1 else f"config.mesh.stage is {num_stages}"
        if num_stages > 1 and num_data > 1:
            asked += f" and config.mesh.data {num_data}, {num_data * num_stages} devices in all"
        hint = " (--config.mesh.virtual_cpu_devices=N splits the CPU into N)" if cluster.platform == "cpu" else ""
        yield UserError(f"{asked}; there are {available} {cluster.platform} devices{hint}")
    if cluster.num_processes > 1 and num_data * num_stages < available:
        yield UserError(
            f"config.mesh has data {num_data} and stage {num_stages}; {cluster.num_processes} processes have "
            f"{available} devices in all, and no process may be without one: use them all, or start fewer processes"
        )


def refuse_stages(config: ConfigDict) -> Refusals[None]:
    """Refuse stages that the config asks for and its strategy does not have."""
    if config.mesh.stage != 1:
        yield UserError(
            f"config.mesh.stage is {config.mesh.stage}; it must be 1 with config.strategy={config.strategy!r} "
            "(config.strategy='pipeline' has stages)"
        )


def refuse_processes(what: str, cluster: Cluster) -> Refusals[None]:
    """Refuse several processes."""
    if (number := cluster.num_processes) > 1:
        yield UserError(
            f"{what} is for one process, and there are {number}; several may have config.strategy='data_parallel' "
            "with any exchange but dp, or 'pipeline'"
        )


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """Build the mesh of the first devices; those that are next to each other are stages of one replica."""
    shape = tuple(axes.values())
    return Mesh(np.asarray(devices[: math.prod(shape)]).reshape(shape), tuple(axes), axis_types=(AxisType.Auto,) * 2)
