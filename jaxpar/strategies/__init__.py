"""Strategies: how a problem is trained on devices. One file a strategy, one row in STRATEGIES.

A strategy is planned, for any cluster and without devices, then built on devices (strategy.py has the contracts). The
training loop calls the functions of a `Strategy` and nothing else. Every synchronous strategy gives the training of
`single`: tests/strategies/test_equality.py runs over the table.
"""

from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar.cluster import Cluster
from jaxpar.errors import Refusals, UserError, accepted, outcome, refuse_choice
from jaxpar.models.model import Model
from jaxpar.optimizer import refuse_optimizer
from jaxpar.plan import ACTIVATIONS, Decision, Plan, refuse_memory
from jaxpar.state import nbytes
from jaxpar.step import Problem, saved_bytes
from jaxpar.strategies import async_data_parallel, data_parallel, pipeline, single
from jaxpar.strategies.strategy import Strategy, StrategyModule

__all__ = ["STRATEGIES", "Strategy", "build", "decide", "in_flight_bytes", "make", "plan", "possible"]

STRATEGIES: dict[str, StrategyModule[Any, Any]] = {
    "single": single,
    "data_parallel": data_parallel,
    "async_data_parallel": async_data_parallel,
    "pipeline": pipeline,
}


def decide(config: ConfigDict, cluster: Cluster, model: Model | None = None) -> Decision[Any]:
    """Decide what the config comes to on a cluster before data is read. model: as in `StrategyModule.decide`.

    Raises:
      UserError: the strategy cannot run on this cluster, or not with this batch size.
    """
    return accepted(_decide(config, cluster, model))


def plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[Any] | None = None) -> Plan[Any]:
    """Plan the strategy of a config for a cluster, which need not be at hand. See `StrategyModule.plan`.

    Args:
      config: of the run.
      shapes: what is trained: a model and a batch in shapes, and an optimizer.
      cluster: to run on.
      decision: what `decide` returned for this config and cluster; None: it is called.

    Raises:
      UserError: as `decide`; the strategy cannot train these shapes, or a device of the cluster cannot hold its part.
    """
    return accepted(_plan(config, shapes, cluster, decision))


def possible(config: ConfigDict, shapes: Problem, cluster: Cluster) -> Plan[Any] | str:
    """Return the plan, or in one line why there is none: for callers that ask about many configs. Raises nothing."""
    result = outcome(_plan(config, shapes, cluster, None))
    return str(result) if isinstance(result, UserError) else result


def _plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[Any] | None) -> Refusals[Plan[Any]]:
    if decision is None:
        decision = yield from _decide(config, cluster, None)  # the strategy's plan looks at the model
    plan = yield from STRATEGIES[config.strategy].plan(config, shapes, cluster, decision)
    yield from refuse_memory(plan, cluster)
    return plan


def _decide(config: ConfigDict, cluster: Cluster, model: Model | None) -> Refusals[Decision[Any]]:
    yield from refuse_choice("strategy", config.strategy, STRATEGIES)
    yield from refuse_optimizer(config)  # what a batch divides into depends on it
    decision = yield from STRATEGIES[config.strategy].decide(config, cluster, model)
    number, words = decision.batch_divisor, decision.batch_words
    if config.batch_size < 1 and number == 1:
        yield UserError(f"config.batch_size is {config.batch_size}; it must be 1 or more")
    if config.batch_size < 1 or config.batch_size % number:
        yield UserError(f"config.batch_size is {config.batch_size}; it must be a multiple of {number}: {words}")
    if config.eval.batch_size < 0 or config.eval.batch_size % decision.num_replicas:
        yield UserError(
            f"config.eval.batch_size is {config.eval.batch_size}; it must be a multiple of {decision.num_replicas}, "
            "the number of replicas (the data axis), or 0 for config.batch_size"
        )
    return decision


def in_flight_bytes(plan: Plan[Any], shapes: Problem) -> dict[str, int]:
    """Return what a step needs on a device beyond plan.memory, in bytes by what they are for.

    Gradients: of the parameters there; less where ZeRO adds shards of them up. Activations: what the forward pass of a
    microbatch saves, as the model is traced; a pipeline's stashes are in plan.memory. XLA may keep less of both, or
    more for a while, so no plan is refused for them.
    """
    memory = plan.memory[0]
    if any(part in memory for part in ACTIVATIONS):
        return {"gradients": memory["parameters"]}
    saved = saved_bytes(shapes, plan.num_replicas * shapes.accumulation_steps)
    return {"gradients": nbytes(shapes.model.shapes), "activations": saved}


def build(plan: Plan[Any], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[Any]:
    """Build a planned strategy on the first of these devices."""
    return STRATEGIES[plan.strategy].build(plan, problem, devices)


def make(config: ConfigDict, problem: Problem) -> Strategy[Any]:
    """Plan and build the strategy of a config on this machine's devices."""
    return build(plan(config, problem, clusters.find_cluster()), problem, clusters.devices())
