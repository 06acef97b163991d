"""`single`: training on one device, the reference for all other strategies. It is one replica of `data_parallel`."""

from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Decision, Plan
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, check_choice
from jaxpar.exchange.named import EXCHANGES
from jaxpar.models.model import Model
from jaxpar.strategies import exchanges
from jaxpar.strategies.data_parallel.sharding import batch_divisor, build, plan_replicated

__all__ = ["build", "decide", "plan"]


def decide(config: ConfigDict, cluster: Cluster, _model: Model | None, /) -> Decision[None]:
    """Decide on one device. Raises UserError for a config with several devices or an exchange."""
    meshes.check_processes("config.strategy='single'", cluster)
    meshes.check_stages(config)
    if config.mesh.data not in (-1, 1):
        raise UserError(
            f"config.mesh.data is {config.mesh.data}; it must be 1 or -1 with config.strategy='single' "
            "(config.strategy='data_parallel' uses several devices)"
        )
    check_choice("exchange", config.exchange, EXCHANGES)
    exchanges.check_no_exchange(config, "which has one replica and exchanges nothing")
    return Decision({DATA: 1, STAGE: 1}, *batch_divisor(config, 1), num_replicas=1, source=None)


def plan(_config: ConfigDict, shapes: Problem, _cluster: Cluster, decision: Decision[None], /) -> Plan[str]:
    """Plan the whole state and every batch on one device."""
    return plan_replicated("single", shapes, decision, "one device")
