"""Data parallelism by `jit` over a mesh: the batch is split over `data`, and XLA adds the collectives.

On a mesh of one device, this is the strategy `single`: training on one device, the reference for all other strategies.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import layout
from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA, GROUP_AXES
from jaxpar.core.plan import Decision, Plan, ring_traffic, state_memory
from jaxpar.core.state import State, nbytes
from jaxpar.core.step import Metrics, Problem, with_shardings
from jaxpar.errors import UserError, check_choice, format_count
from jaxpar.exchange.named import EXCHANGES
from jaxpar.models.model import Model
from jaxpar.strategies import exchanges
from jaxpar.strategies.data_parallel import shard_map
from jaxpar.strategies.placement import IN_PLACE, PlacedState, batch_placer, by_replica, on_all, product_options
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums


def decide(config: ConfigDict, cluster: Cluster, _model: Model | None, /) -> Decision[None]:
    """Decide on the one device of `single`. Raises UserError for a config with several devices or an exchange."""
    meshes.check_processes("config.strategy='single'", cluster)
    meshes.check_stages(config)
    if config.mesh.data not in (-1, 1):
        raise UserError(
            f"config.mesh.data is {config.mesh.data}; it must be 1 or -1 with config.strategy='single' "
            "(config.strategy='data_parallel' uses several devices)"
        )
    check_choice("exchange", config.exchange, EXCHANGES)
    exchanges.check_no_exchange(config, "which has one replica and exchanges nothing")
    axes = {**meshes.sizes(config, cluster), DATA: 1}
    meshes.check_sizes(config, cluster)
    return Decision(axes, *batch_divisor(config, 1), num_replicas=1, source=None)


def plan(
    config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[None], /
) -> Plan[str] | Plan[shard_map.ReplicaDetails]:
    """Plan the whole state and every batch of `single` on one device, or on those of a tensor or context axis."""
    if decision.axes.keys() & GROUP_AXES:
        plan = shard_map.plan(config, shapes, cluster, decision)
        return replace(plan, strategy="single", exchange="", summary=plan.summary.partition(": ")[2])
    return plan_replicated("single", shapes, decision, "one device")


def batch_divisor(config: ConfigDict, num_replicas: int) -> tuple[int, str]:
    """Return the batch divisor, which is replicas x accumulation steps, and its description."""
    number = config.optimizer.accumulation_steps
    words = f"{format_count(num_replicas, 'replica')} (the data axis) x {format_count(number, 'accumulation step')}"
    return num_replicas * number, words


def plan_replicated(
    strategy: str, shapes: Problem, decision: Decision[None], summary: str, implementation: str = "sharding"
) -> Plan[str]:
    """Plan the whole state on each device, and an all-reduce of the gradients, assumed to be a ring.

    XLA sums the gradient of an array for each layer that uses it, and in each accumulation step; `pmap` does so once.
    """
    like, n = states.abstract_state(shapes.model, shapes.optimizer), decision.num_replicas
    over = (DATA,) if implementation == "pmap" else ()  # arrays of pmap have a leading dim over the replicas
    layouts = {
        part: layout.per_replica(decision.axes, tree, *over, are_copies=True) for part, tree in like._asdict().items()
    }
    times, layers = shapes.accumulation_steps, [layer.shapes for layer in shapes.model.layers]
    if implementation == "pmap":
        times, layers = 1, list(like.params.values())
    num_arrays = len(jax.tree.leaves(layers))
    ring = ring_traffic("all-reduce", 2 * times, DATA, n, nbytes(layers), "float32", num_vectors=num_arrays)
    traffic = (ring,) if n > 1 else ()
    exchange = "" if strategy == "single" else "ddp"
    return Plan(strategy, decision, summary, layouts, implementation, state_memory(layouts), traffic, exchange)


def build(plan: Plan[Any], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build the step with `jit` over the planned mesh: the batch is split over `data`, the state replicated."""
    if isinstance(plan.details, shard_map.ReplicaDetails):
        return shard_map.build(plan, problem, devices)
    mesh = meshes.make_mesh(plan.axes, devices)
    placed = PlacedState(problem, plan.layouts, mesh)

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        grads, sums = steps.gradients(problem, state, batch, steps.batch_weight(batch))
        return steps.update(problem, state, grads, sums)

    def evaluate(state: State, batch: dict[str, jax.Array]) -> Sums:
        return steps.evaluate(problem, state.params, batch)

    compiled_step = jax.jit(
        step,
        donate_argnums=() if plan.keeps_previous else 0,
        out_shardings=(placed.shardings, on_all(mesh)),
        compiler_options=IN_PLACE | product_options(problem.model),
    )
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
