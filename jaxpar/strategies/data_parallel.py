"""`data_parallel`: every device trains on a shard of each batch, and config.exchange combines the gradients.

There are three implementations:
  shard_map  the program of one replica with explicit collectives (jaxpar/strategies/replicas.py)
  sharding   the step of one device, compiled for the whole mesh with the batch split over `data` and the state
             replicated; XLA's partitioner adds the collectives
  pmap       the step of one device, run on every device with an explicit sum over `data`

Gradients are divided by the weight of the global batch, not by that of a replica's shard.

XLA's partitioner sums every product over replicas in the dtype of the product. So the weight gradients of a bfloat16
model would be summed in bfloat16, before they are cast to float32. `auto` therefore selects `shard_map` for several
replicas of a model that is not float32.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import mesh as meshes
from jaxpar import step as steps
from jaxpar.cluster import Cluster
from jaxpar.core.plan import Decision, Plan
from jaxpar.errors import Refusals, UserError, refuse_choice
from jaxpar.mesh import DATA
from jaxpar.models.model import Model
from jaxpar.state import State
from jaxpar.step import Metrics, Problem
from jaxpar.strategies import exchanges, master, replicas, single
from jaxpar.strategies.placement import PlacedState, by_replica
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums

DataParallelPlan = Plan[str] | Plan[replicas.ReplicaDetails]  # details: the name of a builder, or an exchange
IMPLEMENTATIONS = ("auto", "shard_map", "sharding", "pmap")


def decide(config: ConfigDict, cluster: Cluster, _model: Model | None, /) -> Refusals[Decision[None]]:
    """Decide on the size of the data axis. Refuses more devices than the cluster has, and an invalid exchange."""
    yield from refuse_implementation(config)
    if config.exchange == "dp":
        yield from meshes.refuse_processes("config.exchange='dp'", cluster)
    if config.data_parallel.implementation == "pmap":
        yield from meshes.refuse_processes("config.data_parallel.implementation='pmap'", cluster)
    yield from meshes.refuse_stages(config)
    yield from meshes.refuse_sizes(config, cluster)
    axes = meshes.sizes(config, cluster)
    yield from exchanges.refuse_exchange(config, axes[DATA], cluster)
    if config.data_parallel.implementation in ("sharding", "pmap") and not is_plain(config):
        yield UserError(
            f"config.data_parallel.implementation is {config.data_parallel.implementation!r}, with which XLA sums the "
            f"gradients; it must be 'auto' or 'shard_map' with config.exchange={exchanges.name(config)!r}"
        )
    if config.data_parallel.implementation == "sharding" and not sums_are_float32(config, axes[DATA]):
        yield UserError(
            "config.data_parallel.implementation is 'sharding', with which XLA sums gradients in config.model.dtype, "
            f"{config.model.dtype!r}; it must be one of auto, shard_map, pmap, which sum in float32, "
            "with several replicas"
        )
    return Decision(axes, *single.batch_divisor(config, axes[DATA]), num_replicas=axes[DATA], source=None)


def refuse_implementation(config: ConfigDict) -> Refusals[None]:
    """Refuse a config.data_parallel.implementation that does not exist."""
    yield from refuse_choice("data_parallel.implementation", config.data_parallel.implementation, IMPLEMENTATIONS)


def is_plain(config: ConfigDict) -> bool:
    """Return whether the exchange is ddp without options, which XLA's partitioner can implement as well."""
    return config.exchange == "ddp" and not exchanges.given(config)


def sums_are_float32(config: ConfigDict, num_replicas: int) -> bool:
    """Return whether XLA's partitioner would sum gradients in float32. It sums in the dtype of the model."""
    return num_replicas == 1 or config.model.dtype == "float32"


def plan(
    config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[None], /
) -> Refusals[DataParallelPlan]:
    """Plan the implementation that the config selects. Refuses shapes that the exchange does not support."""
    if config.exchange == "dp":
        return master.plan(shapes, decision)
    num_replicas, implementation = decision.num_replicas, config.data_parallel.implementation
    if implementation == "auto":
        by_xla = is_plain(config) and sums_are_float32(config, num_replicas)
        implementation = "sharding" if by_xla else "shard_map"
    if implementation == "shard_map":
        return (yield from replicas.plan(config, shapes, decision, on_cpu=cluster.platform == "cpu"))
    summary = "batch sharded, state replicated"
    summary = f"pmap: {summary}" if implementation == "pmap" else "one device" if num_replicas == 1 else summary
    return single.plan_replicated("data_parallel", shapes, decision, summary, implementation)


def build(plan: DataParallelPlan, problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build the implementation that was planned."""
    if isinstance(plan.details, replicas.ReplicaDetails):
        return replicas.build(plan, problem, devices)
    builders = {"master": master.build, "sharding": single.build, "pmap": build_pmap}
    return builders[plan.details](plan, problem, devices)


def build_pmap(plan: Plan[str], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build data parallelism with `jax.pmap`: arrays have a leading dim over the replicas."""
    n, devices = plan.num_replicas, list(devices[: plan.num_replicas])
    mesh = meshes.make_mesh(plan.axes, devices)
    placed = PlacedState(problem, plan.layouts, mesh)

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        weight = jax.lax.psum(steps.batch_weight(batch), DATA)
        grads_unreduced, sums_unreduced = steps.gradients(problem, state, batch, weight)
        grads, sums = jax.lax.psum((grads_unreduced, sums_unreduced), DATA)
        return steps.update(problem, state, grads, sums)

    def evaluate(state: State, batch: dict[str, jax.Array]) -> Sums:
        return jax.lax.psum(steps.evaluate(problem, state.params, batch), DATA)

    def place(batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        divided = {name: x.reshape(n, -1, *x.shape[1:]) for name, x in batch.items()}
        return jax.device_put(divided, by_replica(mesh))

    def programs() -> list[CompiledProgram]:
        batch = {
            name: jax.ShapeDtypeStruct((n, len(x) // n, *x.shape[1:]), x.dtype) for name, x in problem.batch.items()
        }
        return [CompiledProgram(compiled_step.lower(placed.abstract, batch).compile())]

    # Metrics and sums are equal on all replicas and have no leading dim: their out axis is None.
    compiled_step = jax.pmap(step, axis_name=DATA, devices=devices, donate_argnums=0, out_axes=(0, None))
    compiled_evaluate = jax.pmap(evaluate, axis_name=DATA, devices=devices, out_axes=None)
    return Strategy(
        plan,
        tuple(devices),
        init=placed.init,
        place=place,
        step=meshes.one_at_a_time(compiled_step, mesh),
        evaluate=meshes.one_at_a_time(compiled_evaluate, mesh),
        to_canonical=placed.to_canonical,
        from_canonical=placed.from_canonical,
        compile=programs,
    )
