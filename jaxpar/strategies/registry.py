"""The strategies by name, and the functions that plan and build any of them.

A strategy is planned first, for any cluster and without devices, and then built on devices. strategy.py defines both
contracts. The training loop calls only the functions of a `Strategy`. Every synchronous strategy trains like `single`,
which tests/strategies/test_cases.py checks for all of STRATEGIES.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar.cluster import Cluster
from jaxpar.core.optimizer import check_kernels, check_optimizer
from jaxpar.core.plan import Decision, Plan, keeping_previous
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, check_choice
from jaxpar.models.model import Model
from jaxpar.strategies import data_parallel
from jaxpar.strategies.asynchronous import strategy as async_data_parallel
from jaxpar.strategies.asynchronous.options import decide_updates
from jaxpar.strategies.data_parallel import sharding
from jaxpar.strategies.elastic import check_elastic as check_elastic
from jaxpar.strategies.elastic import padded_batch_size as padded_batch_size
from jaxpar.strategies.fits import check_memory
from jaxpar.strategies.fits import in_flight_bytes as in_flight_bytes
from jaxpar.strategies.outer.live import RayLink
from jaxpar.strategies.outer.options import OuterDetails, check_outer, with_outer_step
from jaxpar.strategies.outer.worker import OuterLink, as_worker
from jaxpar.strategies.pipeline import schedules
from jaxpar.strategies.pipeline import strategy as pipeline
from jaxpar.strategies.pipeline.executor.partition import AUTO, METHODS
from jaxpar.strategies.strategy import Strategy, StrategyModule
from jaxpar.strategies.swarm import strategy as swarm
from jaxpar.strategies.swarm.options import decide_swarm

STRATEGIES: dict[str, StrategyModule[Any, Any]] = {
    "single": sharding,
    "data_parallel": data_parallel,
    "async_data_parallel": async_data_parallel,
    "pipeline": pipeline,
    "swarm": swarm,
}


def decide(config: ConfigDict, cluster: Cluster, model: Model | None = None) -> Decision[Any]:
    """Decide on the mesh and batch divisor, before any data is read. Raises UserError if the cluster cannot run it."""
    check_choice("strategy", config.strategy, STRATEGIES)
    if not 0 <= config.seed < 2**31:
        raise UserError(f"config.seed is {config.seed}; it must be between 0 and {2**31 - 1}")
    check_elastic(config)
    check_outer(config, cluster)
    check_optimizer(config)  # the batch divisor depends on the optimizer config
    decision = STRATEGIES[config.strategy].decide(config, cluster, model)
    number, words = decision.batch_divisor, decision.batch_words
    if config.batch_size < 1 and number == 1:
        raise UserError(f"config.batch_size is {config.batch_size}; it must be at least 1")
    if config.batch_size < 1 or (config.batch_size % number and not config.elastic_seconds):
        positive = "positive " if config.batch_size < 1 else ""
        raise UserError(
            f"config.batch_size is {config.batch_size}; it must be a {positive}multiple of {number}: {words}"
        )
    is_divided = config.elastic_seconds or config.eval.batch_size % decision.num_replicas == 0
    if config.eval.batch_size < 0 or not is_divided:
        raise UserError(
            f"config.eval.batch_size is {config.eval.batch_size}; it must be a multiple of {decision.num_replicas}, "
            "the number of replicas (the data axis), or 0 to use config.batch_size"
        )
    return decision


def check_other_sections(config: ConfigDict, layers: Sequence[str]) -> None:
    """Raise UserError for an invalid value in the section of another strategy. layers: empty if they are not known."""
    if config.strategy != "data_parallel":
        name = config.data_parallel.implementation
        check_choice("data_parallel.implementation", name, data_parallel.IMPLEMENTATIONS)
    if config.strategy != "async_data_parallel":
        decide_updates(config)
    if config.strategy != "swarm":
        decide_swarm(config)
    if config.strategy != "pipeline":
        schedules.check_pipeline_values(config)
        method = config.pipeline.partition
        for name in method.split(",") if layers and method not in (*METHODS, AUTO) else ():
            check_choice("pipeline.partition", name.strip(), (*METHODS, AUTO, *layers))


def plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[Any] | None = None) -> Plan[Any]:
    """Plan the strategy of a config for a cluster, which need not exist. See `StrategyModule.plan`.

    decision: result of `decide` for this config and cluster; None: calls `decide`.

    Raises UserError if `decide` fails, the strategy cannot train these shapes, or a device has too little memory, and
    ValueError if the shapes are those of a batch of another size.
    """
    for name, x in shapes.batch.items():
        if len(x) != (size := padded_batch_size(config, cluster)):
            raise ValueError(f"{name} of the problem has {len(x)} examples; it must have {size}, batch_size")
    if shapes.num_steps < 1:
        raise ValueError(f"num_steps of the problem is {shapes.num_steps}; it must be at least 1")
    if decision is None:
        decision = decide(config, cluster, shapes.model)
    check_kernels(config, shapes.model.shapes)
    planned = STRATEGIES[config.strategy].plan(config, shapes, cluster, decision)
    if config.elastic_seconds and cluster.num_processes > 1:
        planned = keeping_previous(planned)
    if config.outer.num_workers:
        planned = with_outer_step(config, shapes, planned)
    check_memory(planned, cluster)
    return planned


def possible(config: ConfigDict, shapes: Problem, cluster: Cluster) -> Plan[Any] | str:
    """Return the plan, or the message of the UserError in one line. For callers that compare many configs."""
    try:
        return plan(config, shapes, cluster)
    except UserError as error:
        return str(error)


def build(
    plan: Plan[Any], problem: Problem, devices: Sequence[jax.Device], connect: Callable[[Path], OuterLink] | None = None
) -> Strategy[Any]:
    """Build a planned strategy on the first of these devices.

    connect: makes the connection of a worker of an outer step, for a run in this workdir; None: one to Ray.
    """
    built = STRATEGIES[plan.strategy].build(plan, problem, devices)
    if not isinstance(plan.outer, OuterDetails):
        return built
    return as_worker(built, problem, connect or partial(RayLink, plan.outer))


def make(config: ConfigDict, problem: Problem) -> Strategy[Any]:
    """Plan and build the strategy of a config on the devices of this machine."""
    return build(plan(config, problem, clusters.find_cluster()), problem, clusters.devices())
