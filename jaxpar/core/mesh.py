"""The device mesh and the JAX settings of a run. Only this file defines mesh axes and virtual CPU devices."""

import math
import os
import pkgutil
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core import host
from jaxpar.errors import UserError

DATA = "data"  # replicas: each one trains on a shard of the batch
MAX_VIRTUAL_DEVICES = 1024  # each one takes memory and a thread, whether it is used or not
STAGE = "stage"  # pipeline stages: each device holds some of the layers
CONTEXT = "context"  # devices that have different positions of each text. Only in meshes with some
TENSOR = "tensor"  # devices that compute each layer together: each holds a part of its arrays. Only in meshes with some
GROUP_AXES = (CONTEXT, TENSOR)  # of the devices of a replica, besides stages

_STARTING = threading.RLock()  # held while a program of several devices is started on them


def prepare_jax(config: ConfigDict, cache: Path) -> None:
    """Configure JAX for a run: the number of virtual CPU devices, and `cache` as the compilation cache.

    This must be called before JAX touches a device. The user's environment takes precedence:
    JAX_COMPILATION_CACHE_DIR and JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS.

    Raises UserError for a number of devices that is out of range, or not that of XLA_FLAGS or of a started JAX.
    """
    if computes_on_cpus(config):
        host.keep_freed_memory()
    settings = {"jax_compilation_cache_dir": str(cache), "jax_persistent_cache_min_compile_time_secs": 0.1}
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    partition_by_gspmd()
    count = config.mesh.virtual_cpu_devices
    if not 0 <= count <= MAX_VIRTUAL_DEVICES:
        raise UserError(f"config.mesh.virtual_cpu_devices is {count}; it must be between 0 and {MAX_VIRTUAL_DEVICES}")
    in_flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if count and in_flags and int(in_flags[-1]) != count:
        raise UserError(
            f"config.mesh.virtual_cpu_devices is {count}; it must be {in_flags[-1]}, the device count in XLA_FLAGS, or "
            "0 to use that count"
        )
    if count and not in_flags:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has touched a device, as in a notebook
            if (number := jax.local_device_count(backend="cpu")) != count:
                raise UserError(
                    f"config.mesh.virtual_cpu_devices is {count}; it must be {number} or 0, because JAX has already "
                    "started in this process with that number"
                ) from None
        else:
            # For the devices that wait in a collective for the last one. Stages that are dispatched have their own, and
            # `single` computes on one device, whatever their number.
            stages = config.mesh.stage if sends_between_cpus(config) else 1
            host.add_threads(0 if config.strategy == "single" else count - stages)


def partition_by_gspmd() -> None:
    """Partition programs by GSPMD, because Shardy in JAX 0.11.2 crashes the process on some programs with stages."""
    if jax.__version_info__ >= (0, 11):
        jax.config.update("jax_use_shardy_partitioner", False)


def check_partitioner() -> None:
    """Raise RuntimeError if programs would be partitioned by Shardy in JAX 0.11, in a process without `prepare_jax`."""
    is_shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
    if jax.__version_info__ >= (0, 11) and is_shardy:
        raise RuntimeError(
            "call jaxpar.core.mesh.partition_by_gspmd() before building a pipeline; its docstring explains why"
        )


def has_plugin() -> bool:
    """Return whether JAX finds a plugin for GPUs. A folder without modules, which uninstalling one leaves, is none."""
    spec = find_spec("jax_plugins")
    folders = spec.submodule_search_locations if spec else None
    return any(pkgutil.iter_modules(folders or [])) or bool(entry_points(group="jax_plugins"))


def computes_on_cpus(config: ConfigDict) -> bool:
    """Return whether the devices of a run are CPUs, as far as that is known before JAX starts."""
    only_cpus = jax.config.jax_platforms == "cpu"  # type: ignore[attr-defined]
    return config.mesh.virtual_cpu_devices > 0 or only_cpus or not has_plugin()


def sends_between_cpus(config: ConfigDict) -> bool:
    """Return whether devices of a run are CPUs that send arrays to each other, as dispatched stages do."""
    return computes_on_cpus(config) and config.pipeline.executor != "lockstep"


def one_at_a_time(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Wrap a compiled program over `mesh` so that it waits for its results on several virtual CPU devices.

    Virtual devices share one thread pool. The collectives of several programs in flight can occupy all threads, each
    waiting for a device that has no thread left, which is a deadlock. So can those of programs that two threads start
    on devices in different orders, on any platform.
    """
    if mesh.size == 1:
        return function

    def call(*args: Any) -> Any:
        with _STARTING:
            return settled(function(*args))

    return call


def settled(x: Any) -> Any:
    """Return the arrays, after waiting for them on several virtual CPU devices. See `one_at_a_time`."""
    return jax.block_until_ready(x) if jax.default_backend() == "cpu" and jax.device_count() > 1 else x


def sizes(config: ConfigDict, cluster: Cluster) -> dict[str, int]:
    """Return the size of each axis, slowest-varying first. Checks nothing; see `check_sizes`."""
    inner = {axis: config.mesh[axis] for axis in GROUP_AXES if config.mesh[axis] > 1}
    num_data, num_others = config.mesh.data, config.mesh.stage * math.prod(inner.values())
    replicas = max(cluster.num_devices // num_others, 1) if num_data == -1 else num_data
    return {DATA: replicas, STAGE: config.mesh.stage, **inner}


def check_sizes(config: ConfigDict, cluster: Cluster) -> None:
    """Raise UserError for a mesh that does not fit the cluster."""
    for axis in (STAGE, *GROUP_AXES):
        if config.mesh[axis] < 1:
            raise UserError(f"config.mesh.{axis} is {config.mesh[axis]}; it must be at least 1")
    if config.mesh.data < 1 and config.mesh.data != -1:
        raise UserError(f"config.mesh.data is {config.mesh.data}; it must be at least 1, or -1 for all devices")
    axes = sizes(config, cluster)
    used, available = math.prod(axes.values()), cluster.num_devices
    if used > available:
        names = (STAGE, *GROUP_AXES, DATA)
        large = [f"config.mesh.{axis} is {axes[axis]}" for axis in names if axes.get(axis, 1) > 1]
        subject = "their product" if len(large) > 1 else "it"
        hint = " (--config.mesh.virtual_cpu_devices=N splits the CPU into N devices)" * (cluster.platform == "cpu")
        raise UserError(
            f"{_listed(large)}; {subject} must be at most {available}, the number of {cluster.platform} devices{hint}"
        )
    if cluster.num_processes > 1 and used < available:
        given = [f"config.mesh.{axis} is {size}" for axis, size in axes.items()]
        raise UserError(
            f"{_listed(given)}; their product must be {available}, the number of devices of all "
            f"{cluster.num_processes} processes (or start fewer processes)"
        )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def check_no_groups(config: ConfigDict, what: str, axes: Sequence[str] = GROUP_AXES) -> None:
    """Raise UserError for one of these axes. what: the setting that has none: `config.strategy='swarm'`."""
    for axis in axes:
        if config.mesh[axis] != 1:
            raise UserError(f"config.mesh.{axis} is {config.mesh[axis]}; it must be 1 with {what}")


def check_stages(config: ConfigDict) -> None:
    """Raise UserError for several stages under a strategy that has none."""
    if config.mesh.stage != 1:
        raise UserError(
            f"config.mesh.stage is {config.mesh.stage}; it must be 1 with config.strategy={config.strategy!r} "
            "(only config.strategy='pipeline' has stages)"
        )


def check_processes(what: str, cluster: Cluster) -> None:
    """Raise UserError for several processes. what: the setting that needs a single one: `config.exchange='dp'`."""
    if (number := cluster.num_processes) > 1:
        raise UserError(
            f"{what} runs in a single process, but there are {number} processes; use config.strategy='pipeline', or "
            "'data_parallel' with any exchange except dp"
        )


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """Build the mesh from the first devices. Adjacent devices are the stages of one replica."""
    shape = tuple(axes.values())
    return Mesh(
        np.asarray(devices[: math.prod(shape)]).reshape(shape), tuple(axes), axis_types=(AxisType.Auto,) * len(shape)
    )
