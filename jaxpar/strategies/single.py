"""`single`: one device. The reference that every other strategy is held to."""

from ml_collections import ConfigDict

from jaxpar import mesh
from jaxpar.errors import UserError
from jaxpar.step import Problem
from jaxpar.strategies import exchanges
from jaxpar.strategies.data_parallel import build_sharding, parts
from jaxpar.strategies.strategy import Strategy

__all__ = ["build", "num_replicas", "parts"]


def num_replicas(config: ConfigDict) -> int:
    """One. Raises UserError where the config asks for more."""
    mesh.check_one_process("config.strategy='single'")
    mesh.check_one_stage(config)
    if config.mesh.data not in (-1, 1):
        raise UserError(
            f"config.mesh.data is {config.mesh.data}; it may be 1 or -1 with config.strategy='single' "
            "(config.strategy='data_parallel' uses several devices)"
        )
    if config.exchange != "ddp" or exchanges.given(config):
        raise UserError(
            f"config.exchange is {exchanges.name(config)!r}; it may be 'ddp' without options with "
            "config.strategy='single', where there is nobody to exchange with"
        )
    return 1


def build(config: ConfigDict, problem: Problem) -> Strategy:
    """The step of jaxpar/step.py on the first device: a mesh of one, over which nothing is reduced."""
    return build_sharding(problem, mesh.build(1))
