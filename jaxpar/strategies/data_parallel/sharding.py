"""Data parallelism by `jit` over a mesh: the batch is split over `data`, and XLA adds the collectives.

On a mesh of one device, this is the strategy `single`.
"""

from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from jaxpar import layout
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA
from jaxpar.core.plan import Decision, Plan, ring_traffic, state_memory
from jaxpar.core.state import State, nbytes
from jaxpar.core.step import Metrics, Problem, with_shardings
from jaxpar.errors import format_count
from jaxpar.strategies.placement import IN_PLACE, PlacedState, batch_placer, by_replica, on_all
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums


def batch_divisor(config: ConfigDict, num_replicas: int) -> tuple[int, str]:
    """Return the batch divisor, which is replicas x accumulation steps, and its description."""
    number = config.optimizer.accumulation_steps
    words = f"{format_count(num_replicas, 'replica')} (the data axis) x {format_count(number, 'accumulation step')}"
    return num_replicas * number, words


def plan_replicated(
    strategy: str, shapes: Problem, decision: Decision[None], summary: str, implementation: str = "sharding"
) -> Plan[str]:
    """Plan the whole state on each device, and an all-reduce of the gradients by XLA, assumed to be a ring.

    Args:
      strategy: name of the strategy.
      shapes: the problem.
      decision: the mesh and the batch divisor.
      summary: summary of the plan.
      implementation: sharding or pmap; becomes the `details` of the plan.
    """
    like, n = states.abstract_state(shapes.model, shapes.optimizer), decision.num_replicas
    over = (DATA,) if implementation == "pmap" else ()  # arrays of pmap have a leading dim over the replicas
    layouts = {
        part: layout.per_replica(decision.axes, tree, *over, are_copies=True) for part, tree in like._asdict().items()
    }
    size, num_arrays = nbytes(like.params), len(jax.tree.leaves(like.params))
    traffic = (ring_traffic("all-reduce", 2, DATA, n, size, "float32", num_vectors=num_arrays),) if n > 1 else ()
    exchange = "" if strategy == "single" else "ddp"
    return Plan(strategy, decision, summary, layouts, implementation, state_memory(layouts), traffic, exchange)


def build(plan: Plan[str], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build the step with `jit` over the planned mesh: the batch is split over `data`, the state replicated."""
    mesh = meshes.make_mesh(plan.axes, devices)
    placed = PlacedState(problem, plan.layouts, mesh)

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        grads, sums = steps.gradients(problem, state, batch, steps.batch_weight(batch))
        return steps.update(problem, state, grads, sums)

    def evaluate(state: State, batch: dict[str, jax.Array]) -> Sums:
        return steps.evaluate(problem, state.params, batch)

    compiled_step = jax.jit(
        step, donate_argnums=0, out_shardings=(placed.shardings, on_all(mesh)), compiler_options=IN_PLACE
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
