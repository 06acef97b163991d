"""The device mesh: the only place that names its axes, counts devices and splits the CPU."""

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from jaxpar.errors import UserError

DATA = "data"  # replicas: each takes a share of the batch


def start(config: ConfigDict, cache: Path) -> None:
    """Prepares JAX for a run: virtual CPU devices, and compiled programs kept in `cache`.

    Call before JAX touches a device. A device count in XLA_FLAGS is the user's, and wins.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    count = config.mesh.virtual_cpu_devices
    if count < 0:
        raise UserError(f"config.mesh.virtual_cpu_devices is {count}; it may be 0 or more")
    if count and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def num_replicas(config: ConfigDict) -> int:
    """The size of the data axis. Raises UserError where there are fewer devices than asked for."""
    wanted, available = config.mesh.data, jax.device_count()
    if wanted == -1:
        return available
    if wanted < 1:
        raise UserError(f"config.mesh.data is {wanted}; it may be 1 or more, or -1 for all devices")
    if wanted > available:
        hint = " (--config.mesh.virtual_cpu_devices=N splits the CPU into N)" if jax.default_backend() == "cpu" else ""
        raise UserError(f"config.mesh.data is {wanted}; there are {available} {jax.default_backend()} devices{hint}")
    return wanted


def build(num_data: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first `num_data` devices along the data axis."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices[:num_data]), (DATA,), axis_types=(AxisType.Auto,))
