"""Candidates of the planner, and the space in which it searches for them: what both kinds of candidates share."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import strategies
from jaxpar.choose.costs.calibrate import MeasuredLayers, calibrate
from jaxpar.choose.costs.layers import Layers
from jaxpar.choose.costs.machine import GpuMachine, Machine
from jaxpar.choose.costs.step import StepCosts
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.choose.costs.updates import update_bytes
from jaxpar.cluster import Cluster
from jaxpar.core.plan import Plan
from jaxpar.core.state import abstract_state, nbytes
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, is_refused
from jaxpar.exchange.named import check_options, exchange_differs
from jaxpar.run import build
from jaxpar.strategies.exchanges import given

Settings = Mapping[str, Any]  # dotted key of the config -> value
MOST_DIVISORS = 12  # numbers of microbatches that are compared
LAYER_REPEATS = 5  # measurements of a layer
OPTIONS = "exchange_options."
OFFLOAD = f"{OPTIONS}offload"
GROUP, IMPLEMENTATION = f"{OPTIONS}group", "data_parallel.implementation"
# Keys that a candidate sets, and their values without the strategy that needs another one.
DEFAULTS_OF_CHOICES: Settings = {
    "mesh.tensor": 1,
    "mesh.context": 1,
    "mesh.stage": 1,
    "exchange": "ddp",
    GROUP: None,
    OFFLOAD: None,
    "optimizer.accumulation_steps": 1,
    "model.remat": "none",
    "model.scan_layers": "auto",
    "pipeline.schedule": "auto",
    "pipeline.num_microbatches": 0,
    "pipeline.num_chunks": 0,
    "pipeline.partition": "flops",
    "pipeline.replicas": "",
    "pipeline.remat": "none",
    IMPLEMENTATION: "auto",
}
OF_STAGES = ("mesh.stage", "pipeline.")  # beginnings of the keys that only pipelines set to other values


class Candidate(NamedTuple):
    """A way to train, and its predicted costs.

    Attributes:
      name: the strategy and its sizes, such as `zero3` or `zb_h1, 4 stages x 2 replicas`.
      settings: the keys of the config that select it.
      costs: its costs.
      fits: whether it fits into the memory of a device.
      waits: whether devices wait that share cores. Others are preferred, because how fast the cores are for those that
        do not wait is predicted worst, and a device that waits is of no use to anyone.
    """

    name: str
    settings: Settings
    costs: StepCosts
    fits: bool
    waits: bool = False


class AsyncCandidate(NamedTuple):
    """A way to train that is not compared with others, and its predicted rate."""

    name: str  # the strategy and its sizes, such as `ssp with bound 3, 8 workers`
    settings: Settings  # the keys of the config that select it
    seconds: float  # time in which config.batch_size examples are trained on, in the long run
    mean_staleness: float  # mean number of updates that are missing in the weights that a gradient is computed from
    max_staleness: int  # the largest such number
    sent_bytes: tuple[float, ...]  # by device, bytes that it sends in this time
    device_bytes: tuple[float, ...]  # by device, bytes that it needs
    fits: bool  # whether these fit into the memory of a device


class Space(NamedTuple):
    """The space of candidates."""

    config: ConfigDict  # the config of the run
    problem: Problem  # its problem, without rematerialization and accumulation
    layers: Layers  # the costs of its layers
    machine: Machine  # the costs of the cluster
    usable_bytes: float  # the memory of a device that a run can use
    kept: Settings = MappingProxyType({})  # settings of the config that every candidate must have

    @property
    def num_devices(self) -> int:
        """The number of devices of the cluster."""
        return self.machine.cluster.num_devices

    def choices(self, key: str, values: Iterable[Any]) -> list[Any]:
        """Return the values of a key to compare: only that of the config if it is kept."""
        return [self.kept[key]] if key in self.kept else list(values)

    def allows(self, settings: Settings) -> bool:
        """Return whether candidates with these settings, and some others, can have the settings that are kept."""
        return all(settings.get(key, value) == value for key, value in self.kept.items())

    def keeps(self, settings: Settings) -> bool:
        """Return whether a candidate has the settings that are kept."""
        has = {**DEFAULTS_OF_CHOICES, **settings}
        return all(has.get(key) == value for key, value in self.kept.items())


def ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates, the fastest that fit and do not wait first; those that do not fit by their memory, last."""
    return sorted(found, key=lambda one: (0, one.waits, one.costs.seconds) if one.fits else (1, 0, one.costs.nbytes))


def with_settings(config: ConfigDict, settings: Settings) -> ConfigDict:
    """Return a copy of a config with the settings of a candidate."""
    changed = copy.deepcopy(config)
    with changed.ignore_type():  # some keys have values of several types, such as 'auto' and a bool
        changed.update_from_flattened_dict(dict(DEFAULTS_OF_CHOICES) | dict(settings))
    return changed


def with_values(config: ConfigDict, settings: Settings) -> ConfigDict:
    """Return a copy of a config with other values of some keys."""
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(dict(settings))
    return changed


def plan_of(space: Space, settings: Settings) -> Plan[Any] | str:
    """Return the plan of some settings, or the reason why there is none."""
    return strategies.possible(with_settings(space.config, settings), space.problem, space.machine.cluster)


class StateRatios(NamedTuple):
    """Bytes for each byte of the parameters: of the optimizer state, and that an update moves."""

    optimizer: float
    update: float


def state_ratios(problem: Problem) -> StateRatios:
    """Return the ratios of a problem."""
    state = abstract_state(problem.model, problem.optimizer)
    params = nbytes(state.params)
    return StateRatios(nbytes(state.optimizer) / params, update_bytes(problem) / params)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number; at most MOST_DIVISORS of them, with the smallest and the largest."""
    found = [one for one in range(1, number + 1) if number % one == 0]
    return [
        found[i] for i in sorted({round(i) for i in np.linspace(0, len(found) - 1, min(len(found), MOST_DIVISORS))})
    ]


def options_of(space: Space, exchange: str, num_replicas: int) -> dict[str, Any]:
    """Return the settings of the options that the config sets; None for those that the exchange cannot have.

    These are options of other exchanges, those that are impossible with this number of replicas, and lossy ones.
    """

    def possible(name: str, value: Any) -> bool:
        options = {name: value}
        is_exact = num_replicas > 1 and not exchange_differs(exchange, options, num_replicas)
        return is_exact and not is_refused(check_options, exchange, num_replicas, options)

    return {f"{OPTIONS}{name}": value if possible(name, value) else None for name, value in given(space.config).items()}


# ---- spaces ---------------------------------------------------------------------------------------------------------


def load_problem(config: ConfigDict, cluster: Cluster, workdir: Path) -> build.Parts:
    """Read the data and build the model of a config, whatever its strategy. Raises UserError for its mistakes."""
    if config.elastic_seconds and config.batch_size % cluster.num_devices:
        rule = f"a multiple of the {cluster.num_devices} devices for the planner, with config.elastic_seconds"
        raise UserError(f"config.batch_size is {config.batch_size}; it must be {rule}")
    options = {f"{OPTIONS}{name}": None for name in config.exchange_options}
    single = with_settings(config, {"strategy": "single", "mesh.data": 1, "elastic_seconds": 0, **options})
    build.check_run(single, workdir, replace(cluster, num_processes=1))  # `single` refuses several
    return build.load_parts(single, workdir, cluster)


def gpu_space(config: ConfigDict, problem: Problem, cluster: Cluster, usable_bytes: float, kept: Settings) -> Space:
    """Return the space for GPUs, whose layers take as long as the rates of the cluster imply.

    problem: from `load_problem`.
    """
    return Space(config, problem, TracedLayers(problem, cluster), GpuMachine(cluster), usable_bytes, kept)


def cpu_space(config: ConfigDict, loaded: build.Parts, cluster: Cluster, kept: Settings) -> Space:
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
