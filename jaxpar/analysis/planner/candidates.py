"""Candidates of the planner, and the space in which it searches for them: what both kinds of candidates share."""

import copy
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar import strategies
from jaxpar.analysis.planner.layers import Layers
from jaxpar.analysis.planner.machine import Machine
from jaxpar.analysis.planner.predict import StepCosts
from jaxpar.analysis.planner.updates import update_bytes
from jaxpar.core.plan import Plan
from jaxpar.exchange.presets import exchange_differs
from jaxpar.exchange.settings import obstacle
from jaxpar.state import abstract_state, nbytes
from jaxpar.step import Problem
from jaxpar.strategies.exchanges import given

Settings = Mapping[str, Any]  # dotted key of the config -> value
MOST_DIVISORS = 12  # numbers of microbatches that are compared
OPTIONS = "exchange_options."
GROUP, IMPLEMENTATION = f"{OPTIONS}group", "data_parallel.implementation"
# Keys that a candidate sets, and their values without the strategy that needs another one.
DEFAULTS_OF_CHOICES: Settings = {
    "mesh.stage": 1,
    "exchange": "ddp",
    GROUP: None,
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
    """

    name: str
    settings: Settings
    costs: StepCosts
    fits: bool


class Space(NamedTuple):
    """The space of candidates.

    Attributes:
      config: the config of the run.
      problem: its problem, without rematerialization and accumulation.
      layers: the costs of its layers.
      machine: the cluster.
      usable_bytes: the memory of a device that a run can use.
      kept: settings of the config that every candidate must have.
    """

    config: ConfigDict
    problem: Problem
    layers: Layers
    machine: Machine
    usable_bytes: float
    kept: Settings = MappingProxyType({})

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
    """Return candidates, the fastest that fit first, then the others by the memory that they need."""
    return sorted(found, key=lambda one: (0, one.costs.seconds) if one.fits else (1, one.costs.nbytes))


def with_settings(config: ConfigDict, settings: Settings) -> ConfigDict:
    """Return a copy of a config with the settings of a candidate."""
    changed = copy.deepcopy(config)
    with changed.ignore_type():  # some keys have values of several types, such as 'auto' and a bool
        changed.update_from_flattened_dict(dict(DEFAULTS_OF_CHOICES) | dict(settings))
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
        return is_exact and obstacle(exchange, num_replicas, options) is None

    return {f"{OPTIONS}{name}": value if possible(name, value) else None for name, value in given(space.config).items()}
