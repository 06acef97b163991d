"""Spaces of candidates for a config: on GPUs, which need not exist, or on the CPU devices of this machine."""

from dataclasses import replace
from pathlib import Path

import jax
from ml_collections import ConfigDict

from jaxpar.analysis.planner.calibrate import MeasuredLayers, calibrate
from jaxpar.analysis.planner.candidates import OPTIONS, Settings, Space, with_settings
from jaxpar.analysis.planner.layers import TracedLayers
from jaxpar.analysis.planner.machine import GpuMachine
from jaxpar.cluster import Cluster
from jaxpar.run import build
from jaxpar.step import Problem

LAYER_REPEATS = 5  # measurements of a layer


def load_problem(config: ConfigDict, cluster: Cluster, workdir: Path) -> build.Loaded:
    """Read the data and build the model of a config, whatever its strategy. Raises UserError for its mistakes."""
    options = {f"{OPTIONS}{name}": None for name in config.exchange_options}
    single = with_settings(config, {"strategy": "single", "mesh.data": 1, **options})
    build.check_run(single, workdir, replace(cluster, num_processes=1))  # `single` refuses several
    return build.load_parts(single, workdir, cluster)


def gpu_space(config: ConfigDict, problem: Problem, cluster: Cluster, usable_bytes: float, kept: Settings) -> Space:
    """Return the space for GPUs, whose layers take as long as the rates of the GPUs imply.

    Args:
      config: the config.
      problem: its problem, from `load_problem`.
      cluster: the GPUs, with their rates.
      usable_bytes: the memory of a GPU that a run can use.
      kept: as in `Space`.
    """
    return Space(config, problem, TracedLayers(problem, cluster), GpuMachine(cluster), usable_bytes, kept)


def cpu_space(config: ConfigDict, loaded: build.Loaded, cluster: Cluster, kept: Settings) -> Space:
    """Return the space for CPU devices, after measuring what layers and links cost on those of this process.

    Links to other processes are assumed to be as fast as those inside this one.
    """
    devices, batch_size = jax.local_devices(), config.batch_size
    batch = {name: x for name, x in loaded.batches.longest().items() if name in loaded.problem.batch}
    share = {name: x[: max(batch_size // cluster.num_devices, 1)] for name, x in batch.items()}
    machine = calibrate(cluster, devices, loaded.problem, share)
    sizes = max(batch_size // (4 * cluster.num_devices), 1), batch_size
    layers = MeasuredLayers(loaded.problem, batch, sizes, LAYER_REPEATS, machine.started(1))
    assert cluster.memory_bytes is not None
    return Space(config, loaded.problem, layers, machine, cluster.memory_bytes / len(devices), kept)
