"""Data parallelism by `jax.pmap`: the step of one device on every device, with an explicit sum over `data`."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxpar.core import mesh as meshes
from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA
from jaxpar.core.plan import Plan
from jaxpar.core.state import State
from jaxpar.core.step import Metrics, Problem
from jaxpar.strategies.placement import PlacedState, by_replica
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums


def build(plan: Plan[str], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build the planned step. Arrays have a leading dim over the replicas."""
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
