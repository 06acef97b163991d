"""Strategies: how a problem is trained on devices. One file a strategy, one row in STRATEGIES.

A strategy is planned, for any cluster and without devices, then built on devices (strategy.py has the contracts). The
training loop calls the functions of a `Strategy` and nothing else. Every synchronous strategy gives the training of
`single`: tests/strategies/test_equality.py runs over the table.
"""

from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar.cluster import Cluster
from jaxpar.errors import UserError, check_choice
from jaxpar.optimizer import check_optimizer
from jaxpar.plan import Decision, Plan
from jaxpar.step import Problem
from jaxpar.strategies import async_data_parallel, data_parallel, pipeline, single
from jaxpar.strategies.strategy import Strategy, StrategyModule

__all__ = ["STRATEGIES", "Strategy", "build", "decide", "make", "plan", "possible"]

STRATEGIES: dict[str, StrategyModule] = {
    "single": single,
    "data_parallel": data_parallel,
    "async_data_parallel": async_data_parallel,
    "pipeline": pipeline,
}


def decide(config: ConfigDict, cluster: Cluster) -> Decision:
    """Decide what the config comes to on a cluster before data is read.

    Raises:
      UserError: the strategy cannot run on this cluster, or not with this batch size.
    """
    check_choice("strategy", config.strategy, STRATEGIES)
    check_optimizer(config)  # here too: what a batch divides into depends on it
    decision = STRATEGIES[config.strategy].decide(config, cluster)
    number, words = decision.batch_divisor, decision.batch_words
    if config.batch_size < 1 and number == 1:
        raise UserError(f"config.batch_size is {config.batch_size}; it must be 1 or more")
    if config.batch_size < 1 or config.batch_size % number:
        raise UserError(f"config.batch_size is {config.batch_size}; it must be a multiple of {number}: {words}")
    if config.eval.batch_size < 0 or config.eval.batch_size % decision.num_replicas:
        raise UserError(
            f"config.eval.batch_size is {config.eval.batch_size}; it must be a multiple of {decision.num_replicas}, "
            "the number of replicas (the data axis), or 0 for config.batch_size"
        )
    return decision


def plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision | None = None) -> Plan:
    """Plan the strategy of a config for a cluster, which need not be at hand. See `StrategyModule.plan`.

    Raises:
      UserError: as `decide`, or the strategy cannot train these shapes.
    """
    decision = decision or decide(config, cluster)
    return STRATEGIES[config.strategy].plan(config, shapes, cluster, decision)


def possible(config: ConfigDict, shapes: Problem, cluster: Cluster) -> Plan | str:
    """Return the plan, or in one line why there is none: for callers that ask about many configs."""
    try:
        return plan(config, shapes, cluster)
    except UserError as error:
        return str(error)


def build(plan: Plan, problem: Problem, devices: Sequence[jax.Device]) -> Strategy:
    """Build a planned strategy on the first of these devices."""
    return STRATEGIES[plan.strategy].build(plan, problem, devices)


def make(config: ConfigDict, problem: Problem) -> Strategy:
    """Plan and build the strategy of a config on this machine's devices."""
    return build(plan(config, problem, clusters.find_cluster()), problem, clusters.devices())
