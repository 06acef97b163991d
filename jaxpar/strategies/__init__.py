"""Strategies: how a problem is trained on devices. One file a strategy, one row in STRATEGIES.

The training loop calls the functions of a `Strategy` and nothing else. Every synchronous
strategy gives the same training as `single`: tests/strategies/test_equality.py runs over the table.
"""

from ml_collections import ConfigDict

from jaxpar.errors import UserError, check_choice
from jaxpar.step import Problem
from jaxpar.strategies import data_parallel, pipeline, single
from jaxpar.strategies.strategy import Description, Strategy

__all__ = ["STRATEGIES", "Description", "Strategy", "build", "check"]

# Each module has `num_replicas(config)`, which checks the config, `num_microbatches(config)`, what they are called in
# messages, and `build(config, problem)`.
STRATEGIES = {"single": single, "data_parallel": data_parallel, "pipeline": pipeline}


def check(config: ConfigDict) -> None:
    """Raises UserError where the strategy cannot run on these devices with this batch size."""
    check_choice("strategy", config.strategy, STRATEGIES)
    module = STRATEGIES[config.strategy]
    num_replicas, num_microbatches = module.num_replicas(config), module.num_microbatches(config)
    if config.batch_size < 1 or config.batch_size % (num_replicas * num_microbatches):
        raise UserError(
            f"config.batch_size is {config.batch_size}; it may be a multiple of {num_replicas * num_microbatches}: "
            f"{num_replicas} replicas (the data axis) x {num_microbatches} {module.MICROBATCHES}"
        )
    if config.eval.batch_size < 0 or config.eval.batch_size % num_replicas:
        raise UserError(
            f"config.eval.batch_size is {config.eval.batch_size}; it may be a multiple of {num_replicas}, "
            "the number of replicas (the data axis), or 0 for config.batch_size"
        )


def build(config: ConfigDict, problem: Problem) -> Strategy:
    """The strategy that config.strategy names, for a config that `check` passed."""
    return STRATEGIES[config.strategy].build(config, problem)
