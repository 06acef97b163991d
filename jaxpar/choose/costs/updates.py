"""Counts the bytes that an update moves on a device, with those that pack and compress gradients."""

from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxpar.core import step as steps
from jaxpar.core.plan import Plan
from jaxpar.core.state import State, abstract_state
from jaxpar.core.step import Metrics, Problem
from jaxpar.exchange.exchange import DistributedState
from jaxpar.measure.operations import operations
from jaxpar.models.model import Model
from jaxpar.tasks import Sums

# Bytes of updates that have been traced, by model: by the optimizer, and the exchange and the axes of its replicas.
_MOVED: WeakKeyDictionary[Model, dict[Any, float]] = WeakKeyDictionary()


def update_bytes(problem: Problem) -> float:
    """Return the bytes that the update of the whole state moves on one device."""
    found, key = _MOVED.setdefault(problem.model, {}), problem.optimizer
    if key not in found:
        state = abstract_state(problem.model, problem.optimizer)
        found[key] = moved(lambda state, grads: steps.update(problem, state, grads, _sums())[0], state, state.params)
    return found[key]


def exchange_bytes(problem: Problem, plan: Plan[Any]) -> float:
    """Return the bytes that a replica moves from the gradients of its examples to the new state.

    plan: a plan of data parallelism with an exchange.
    """
    found, key = _MOVED.setdefault(problem.model, {}), (problem.optimizer, plan.exchange, *plan.axes.items())
    if key in found:
        return found[key]
    exchange, layouts = plan.details.exchange, plan.layouts
    mesh = AbstractMesh(tuple(plan.axes.values()), tuple(plan.axes), axis_types=(AxisType.Auto,) * len(plan.axes))
    params, optimizer, private = (layouts[name].local_shapes for name in ("params", "optimizer", "private"))
    grads = params if exchange.fetch else problem.model.shapes

    def update(params: Any, optimizer: Any, private: Any, grads: Any) -> Any:
        if exchange.scatter:
            grads = exchange.scatter(grads)
        norm = optax.tree.norm(grads)
        made = exchange.update(grads, DistributedState(optimizer, private), params)
        state = State(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), params, made.state)
        norm = norm if made.grad_norm is None else made.grad_norm
        old = state._replace(optimizer=DistributedState(optimizer, private))
        return steps.apply(old, made.updates, made.state, Metrics(_sums(), norm, jnp.isfinite(norm)))[0]

    whole = PartitionSpec()
    on_mesh = jax.shard_map(update, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    found[key] = moved(on_mesh, params, optimizer, private, grads)
    return found[key]


def moved(function: Any, *args: Any) -> float:
    """Return the bytes that a function reads and writes on a device."""
    return sum(one.calls * one.nbytes for one in operations(function, *args))


def _sums() -> Sums:
    zero = jnp.zeros(())
    return Sums(zero, {}, zero)
