"""`single`: training on one device, the reference for all other strategies."""

from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from jaxpar import mesh
from jaxpar.cluster import Cluster
from jaxpar.errors import Refusals, UserError, refuse_choice
from jaxpar.exchange.presets import EXCHANGES
from jaxpar.mesh import DATA, STAGE
from jaxpar.models.model import Model
from jaxpar.plan import Decision, Plan
from jaxpar.state import State
from jaxpar.step import Problem
from jaxpar.strategies import exchanges
from jaxpar.strategies.data_parallel import batch_divisor, build_sharding, plan_replicated
from jaxpar.strategies.strategy import Strategy


def decide(config: ConfigDict, cluster: Cluster, _model: Model | None, /) -> Refusals[Decision[None]]:
    """Decide on one device. Refuses a config with several devices or an exchange."""
    yield from mesh.refuse_processes("config.strategy='single'", cluster)
    yield from mesh.refuse_stages(config)
    if config.mesh.data not in (-1, 1):
        yield UserError(
            f"config.mesh.data is {config.mesh.data}; it must be 1 or -1 with config.strategy='single' "
            "(config.strategy='data_parallel' uses several devices)"
        )
    yield from refuse_choice("exchange", config.exchange, EXCHANGES)
    if config.exchange != "ddp" or exchanges.given(config):
        yield UserError(
            f"config.exchange is {exchanges.name(config)!r}; it must be 'ddp' without options with "
            "config.strategy='single', which has one replica and exchanges nothing"
        )
    return Decision({DATA: 1, STAGE: 1}, *batch_divisor(config, 1), num_replicas=1, source=None)


def plan(_config: ConfigDict, shapes: Problem, _cluster: Cluster, decision: Decision[None], /) -> Refusals[Plan[str]]:
    """Plan the whole state and every batch on one device."""
    yield from ()  # this strategy refuses nothing
    return plan_replicated("single", shapes, decision, "one device")


def build(plan: Plan[str], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build the step of jaxpar/step.py on the first device, with a mesh of size 1."""
    return build_sharding(plan, problem, devices)
