"""Strategies: how a problem is trained on devices. One file a strategy, one row in STRATEGIES.

The training loop calls the functions of a `Strategy` and nothing else. Every synchronous
strategy gives the same training as `single`: tests/strategies/test_equality.py runs over the table.
"""

from ml_collections import ConfigDict

from jaxpar.errors import UserError, check_choice
from jaxpar.step import Problem
from jaxpar.strategies import async_data_parallel, data_parallel, pipeline, single
from jaxpar.strategies.strategy import Description, Strategy

__all__ = ["STRATEGIES", "Description", "Strategy", "build", "check"]

# Each module has `num_replicas(config)`, which checks the config, `parts(config, num_replicas)`, into how many a batch
# must divide and what they are in words, and `build(config, problem)`.
STRATEGIES = {
    "single": single,
    "data_parallel": data_parallel,
    "async_data_parallel": async_data_parallel,
    "pipeline": pipeline,
}


def check(config: ConfigDict) -> None:
    """Raises UserError where the strategy cannot run on these devices with this batch size."""
    check_choice("strategy", config.strategy, STRATEGIES)
    module = STRATEGIES[config.strategy]
    num_replicas = module.num_replicas(config)
    number, words = module.parts(config, num_replicas)
    if config.batch_size < 1 or config.batch_size % number:
        raise UserError(f"config.batch_size is {config.batch_size}; it may be a multiple of {number}: {words}")
    if config.eval.batch_size < 0 or config.eval.batch_size % num_replicas:
        raise UserError(
            f"config.eval.batch_size is {config.eval.batch_size}; it may be a multiple of {num_replicas}, "
            "the number of replicas (the data axis), or 0 for config.batch_size"
        )


def build(config: ConfigDict, problem: Problem) -> Strategy:
    """The strategy that config.strategy names, for a config that `check` passed."""
    return STRATEGIES[config.strategy].build(config, problem)
