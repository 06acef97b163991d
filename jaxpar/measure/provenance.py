"""Describes the environment of a result: package versions, devices, and the flags of XLA and JAX."""

import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax")
PROJECT = Path(__file__).parents[2]  # of a clone
JAX_SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl")


def versions() -> dict[str, str]:
    """Return the versions of jaxpar, Python and the numerical packages."""
    project = PROJECT / "pyproject.toml"  # exists in a clone; a wheel has metadata
    jaxpar_version = (
        tomllib.loads(project.read_text())["project"]["version"] if project.is_file() else version("jaxpar")
    )
    return {"jaxpar": jaxpar_version, "python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def commit() -> str | None:
    """Return the commit of the clone with this code, with `-dirty` if its files differ; None without a clone or git."""
    if not (PROJECT / ".git").exists() or shutil.which("git") is None:
        return None
    git = ["git", "--no-optional-locks", "-C", str(PROJECT)]
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    return subprocess.run([*git, *describe], capture_output=True, text=True).stdout.strip() or None


def describe_devices(used: Sequence[jax.Device]) -> dict[str, Any]:
    """Return the platform, the kinds and the number of these devices."""
    kinds = sorted({device.device_kind for device in used})
    return {"platform": used[0].platform, "kinds": kinds, "number": len(used), "machine": platform.machine()}


def flags() -> dict[str, Any]:
    """Return the settings of XLA and JAX that affect numerical results."""
    return {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")} | {name: getattr(jax.config, name) for name in JAX_SETTINGS}
