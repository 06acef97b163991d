"""`data_parallel`: every device trains on a shard of each batch, and config.exchange combines the gradients.

There are three implementations:
  shard_map  the program of one replica, with explicit collectives
  sharding   the step of one device, compiled for the whole mesh with the batch split over `data` and the state
             replicated; XLA's partitioner adds the collectives
  pmap       the step of one device, run on every device with an explicit sum over `data`

and the exchange `dp` has programs of its own (master.py). `single` is one replica of `sharding`.

Gradients are divided by the weight of the global batch, not by that of a replica's shard.

XLA's partitioner sums every product over replicas where it is computed, in its dtype. So the weight gradients of a
bfloat16 model would be summed in bfloat16, before they are cast to float32, those of a tied array once for each layer
that uses it, and all of them in each accumulation step. In these cases, several replicas have `shard_map` with `auto`.
"""

from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import DATA, GROUP_AXES
from jaxpar.core.plan import Decision, Plan
from jaxpar.core.state import State
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, check_choice
from jaxpar.models.model import Model
from jaxpar.strategies import exchanges, groups
from jaxpar.strategies.data_parallel import master, pmap, shard_map, sharding
from jaxpar.strategies.data_parallel.sharding import batch_divisor
from jaxpar.strategies.strategy import Strategy

DataParallelPlan = Plan[str] | Plan[shard_map.ReplicaDetails]  # details: the name of a builder, or an exchange
IMPLEMENTATIONS = ("auto", "shard_map", "sharding", "pmap")


def decide(config: ConfigDict, cluster: Cluster, _model: Model | None, /) -> Decision[None]:
    """Decide on the size of the data axis. Raises UserError if it is too large, or for an invalid exchange."""
    check_choice("data_parallel.implementation", config.data_parallel.implementation, IMPLEMENTATIONS)
    if config.exchange == "dp":
        meshes.check_processes("config.exchange='dp'", cluster)
    if config.data_parallel.implementation == "pmap":
        meshes.check_processes("config.data_parallel.implementation='pmap'", cluster)
    meshes.check_stages(config)
    meshes.check_sizes(config, cluster)
    axes = meshes.sizes(config, cluster)
    exchanges.check_exchange(config, axes[DATA], cluster)
    for axis in GROUP_AXES:
        if axis in axes:
            groups.check_group(config, axis)
    if config.data_parallel.implementation in ("sharding", "pmap") and not exchanges.is_plain(config):
        raise UserError(
            f"config.data_parallel.implementation is {config.data_parallel.implementation!r}, with which XLA sums the "
            f"gradients; it must be 'auto' or 'shard_map' with config.exchange={exchanges.name(config)!r}"
        )
    if config.data_parallel.implementation == "sharding" and not sums_are_float32(config, axes[DATA]):
        raise UserError(
            "config.data_parallel.implementation is 'sharding', with which XLA sums gradients in config.model.dtype, "
            f"{config.model.dtype!r}; it must be one of auto, shard_map, pmap, which sum in float32, "
            "with several replicas"
        )
    return Decision(axes, *batch_divisor(config, axes[DATA]), num_replicas=axes[DATA], source=None)


def sums_are_float32(config: ConfigDict, num_replicas: int) -> bool:
    """Return whether XLA's partitioner would sum gradients in float32. It sums in the dtype of the model."""
    return num_replicas == 1 or config.model.dtype == "float32"


def plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[None], /) -> DataParallelPlan:
    """Plan the implementation that the config selects. Raises UserError if its exchange does not support the shapes."""
    if config.exchange == "dp":
        return master.plan(shapes, decision)
    num_replicas, implementation = decision.num_replicas, config.data_parallel.implementation
    if decision.axes.keys() & GROUP_AXES:
        implementation = "shard_map"
    if implementation == "auto":
        sums_once = shapes.accumulation_steps == 1 and not shapes.model.ties
        is_exact = num_replicas == 1 or (sums_once and sums_are_float32(config, num_replicas))
        by_xla = exchanges.is_plain(config) and is_exact
        implementation = "sharding" if by_xla else "shard_map"
    if implementation == "shard_map":
        return shard_map.plan(config, shapes, cluster, decision)
    summary = "batch sharded, state replicated"
    summary = f"pmap: {summary}" if implementation == "pmap" else "one device" if num_replicas == 1 else summary
    return sharding.plan_replicated("data_parallel", shapes, decision, summary, implementation)


def build(plan: DataParallelPlan, problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build the implementation that was planned."""
    if isinstance(plan.details, shard_map.ReplicaDetails):
        return shard_map.build(plan, problem, devices)
    builders = {"master": master.build, "sharding": sharding.build, "pmap": pmap.build}
    return builders[plan.details](plan, problem, devices)
