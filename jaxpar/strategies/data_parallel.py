"""`data_parallel`: every device takes a share of each batch; config.exchange says how they agree.

By `shard_map`: a program for one replica, in which the exchange is written out (jaxpar/strategies/replicas.py). By
`sharding`: the step of one device is compiled for the whole mesh with the batch divided over `data` and the state
replicated; XLA's partitioner then adds the gradients up. By `pmap`: the same step runs once a device and the sums over
`data` are written out. Gradients are divided by the weight of the global batch, not of a replica's share.

XLA adds each product up right behind it, in its dtype: a weight's gradient in bfloat16, before it is made float32. So
replicas of a bfloat16 model have their sums written out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import layout
from jaxpar import mesh as meshes
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.cluster import Cluster
from jaxpar.errors import Refusals, UserError, format_count, refuse_choice
from jaxpar.exchange.reduce import ring_traffic
from jaxpar.mesh import DATA
from jaxpar.models.model import Model
from jaxpar.plan import Decision, Plan
from jaxpar.state import State, nbytes
from jaxpar.step import Metrics, Problem, with_shardings
from jaxpar.strategies import exchanges, master, replicas
from jaxpar.strategies.placement import PlacedState, batch_placer, by_replica, on_all
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums

DataParallelPlan = Plan[str] | Plan[replicas.ReplicaDetails]  # with the name of a builder; with an exchange
IMPLEMENTATIONS = ("auto", "shard_map", "sharding", "pmap")


def decide(config: ConfigDict, cluster: Cluster, _model: Model | None, /) -> Refusals[Decision[None]]:
    """Decide on the data axis. Refuses more devices than there are, and an exchange that cannot be."""
    yield from refuse_choice("data_parallel.implementation", config.data_parallel.implementation, IMPLEMENTATIONS)
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
            f"config.data_parallel.implementation is {config.data_parallel.implementation!r}, in which XLA adds "
            "gradients up; it must be 'shard_map' with a config.exchange or config.exchange_options"
        )
    if config.data_parallel.implementation == "sharding" and not sums_are_float32(config, axes[DATA]):
        yield UserError(
            "config.data_parallel.implementation is 'sharding', in which XLA adds gradients up in config.model.dtype, "
            f"{config.model.dtype!r}; on several replicas it must be 'shard_map' or 'pmap', in which sums are float32"
        )
    return Decision(axes, *batch_divisor(config, axes[DATA]), num_replicas=axes[DATA], source=None)


def is_plain(config: ConfigDict) -> bool:
    """Return whether the exchange is ddp without options, which XLA can write too."""
    return config.exchange == "ddp" and not exchanges.given(config)


def sums_are_float32(config: ConfigDict, num_replicas: int) -> bool:
    """Return whether XLA adds gradients up in float32, where it writes the sums: it does so in the model's dtype."""
    return num_replicas == 1 or config.model.dtype == "float32"


def batch_divisor(config: ConfigDict, num_replicas: int) -> tuple[int, str]:
    """Return what a batch divides into: replicas, and what each takes one after another."""
    number = config.optimizer.accumulation_steps
    words = f"{format_count(num_replicas, 'replica')} (the data axis) x {format_count(number, 'accumulation step')}"
    return num_replicas * number, words


def plan(
    config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[None], /
) -> Refusals[DataParallelPlan]:
    """Plan the implementation that config.data_parallel.implementation names. Refuses as the exchange does."""
    if config.exchange == "dp":
        return master.plan(shapes, decision)
    num_replicas, implementation = decision.num_replicas, config.data_parallel.implementation
    if implementation == "auto":
        by_xla = is_plain(config) and sums_are_float32(config, num_replicas)
        implementation = "sharding" if by_xla else "shard_map"
    if implementation == "shard_map":
        return (yield from replicas.plan(config, shapes, decision, on_cpu=cluster.platform == "cpu"))
    summary = "batch divided, state replicated"
    summary = f"pmap: {summary}" if implementation == "pmap" else "one device" if num_replicas == 1 else summary
    return plan_replicated("data_parallel", shapes, decision, summary, implementation)


def plan_replicated(
    strategy: str, shapes: Problem, decision: Decision[None], summary: str, implementation: str = "sharding"
) -> Plan[str]:
    """Plan all of the state on each device, and gradients added up by XLA's ring all-reduce.

    Args:
      implementation: sharding or pmap; the `details` of the plan.
    """
    like, n = states.abstract_state(shapes.model, shapes.optimizer), decision.num_replicas
    over = (DATA,) if implementation == "pmap" else ()  # pmap's arrays have a leading dim of the replicas
    layouts = {
        part: layout.per_replica(decision.axes, tree, *over, are_copies=True) for part, tree in like._asdict().items()
    }
    memory = {"parameters": layouts["params"].nbytes_on(), "optimizer": layouts["optimizer"].nbytes_on()}
    size, num_arrays = nbytes(like.params), len(jax.tree.leaves(like.params))
    traffic = (ring_traffic("all-reduce", 2, DATA, n, size, "float32", num_vectors=num_arrays),) if n > 1 else ()
    exchange = "" if strategy == "single" else "ddp"
    return Plan(strategy, decision, summary, layouts, implementation, (memory,) * n, traffic, exchange)


def build(plan: DataParallelPlan, problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build what `plan` decided on."""
    if isinstance(plan.details, replicas.ReplicaDetails):
        return replicas.build(plan, problem, devices)
    builders = {"master": master.build, "sharding": build_sharding, "pmap": build_pmap}
    return builders[plan.details](plan, problem, devices)


def build_sharding(plan: Plan[str], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build data parallelism by jit over a mesh: batch divided, state replicated."""
    mesh = meshes.make_mesh(plan.axes, devices)
    placed = PlacedState(problem, plan.layouts, mesh)

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        grads, sums = steps.gradients(problem, state, batch, steps.batch_weight(batch))
        return steps.update(problem, state, grads, sums)

    def evaluate(state: State, batch: dict[str, jax.Array]) -> Sums:
        return steps.evaluate(problem, state.params, batch)

    compiled_step = jax.jit(step, donate_argnums=0, out_shardings=(placed.shardings, on_all(mesh)))
    arguments = placed.abstract, with_shardings(problem.batch, by_replica(mesh))
    return Strategy(
        plan,
        tuple(mesh.devices.flat),
        init=placed.init,
        place=batch_placer(mesh),
        step=meshes.one_at_a_time(compiled_step, mesh),
        evaluate=meshes.one_at_a_time(jax.jit(evaluate, out_shardings=on_all(mesh)), mesh),
        to_canonical=placed.to_canonical,
        from_canonical=placed.from_canonical,
        compile=lambda: [CompiledProgram(compiled_step.lower(*arguments).compile())],
    )


def build_pmap(plan: Plan[str], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build data parallelism by `jax.pmap`: arrays have a leading dim of the replicas."""
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

    def first(tree: Any) -> Any:
        """The sums or metrics of the first replica, which are those of all."""
        return jax.tree.map(lambda x: x.addressable_shards[0].data[0], tree)

    def step_with_metrics(state: State, batch: Any) -> tuple[State, Metrics]:
        state, metrics = mapped_step(state, batch)
        return state, first(metrics)

    def programs() -> list[CompiledProgram]:
        batch = {
            name: jax.ShapeDtypeStruct((n, len(x) // n, *x.shape[1:]), x.dtype) for name, x in problem.batch.items()
        }
        return [CompiledProgram(compiled_step.lower(placed.abstract, batch).compile())]

    compiled_step = jax.pmap(step, axis_name=DATA, devices=devices, donate_argnums=0)
    mapped_step = meshes.one_at_a_time(compiled_step, mesh)
    mapped_evaluate = meshes.one_at_a_time(jax.pmap(evaluate, axis_name=DATA, devices=devices), mesh)
    return Strategy(
        plan,
        tuple(devices),
        init=placed.init,
        place=place,
        step=step_with_metrics,
        evaluate=lambda state, batch: first(mapped_evaluate(state, batch)),
        to_canonical=placed.to_canonical,
        from_canonical=placed.from_canonical,
        compile=programs,
    )
