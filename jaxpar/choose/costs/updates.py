"""Counts the bytes that an update moves on a device, with those that pack and compress gradients.

An update is traced, and its trace has some operations for each array. So a model with many equal layers is not traced
as it is: what its update moves follows from two models with fewer of them.
"""

from collections.abc import Callable
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

SHORT_DEPTHS = (1, 3)  # numbers of the most consecutive equal layers in the models that are traced
LONGEST_TRACED = 8  # such layers of a model that is traced as it is
# Bytes of updates that have been traced, by model: by the optimizer, and the exchange and the axes of its replicas.
_MOVED: WeakKeyDictionary[Model, dict[Any, float]] = WeakKeyDictionary()
_SHORT: WeakKeyDictionary[Model, list[Model]] = WeakKeyDictionary()  # for each model, those of SHORT_DEPTHS


def update_bytes(problem: Problem) -> float:
    """Return the bytes that the update of the whole state moves on one device."""

    def count(problem: Problem) -> float:
        state = abstract_state(problem.model, problem.optimizer)
        return moved(lambda state, grads: steps.update(problem, state, grads, _sums())[0], state, state.params)

    return _from_short_models(problem, problem.optimizer, count)


def exchange_bytes(problem: Problem, plan: Plan[Any], plan_for: Callable[[Problem], Plan[Any]]) -> float:
    """Return the bytes that a replica moves from the gradients of its examples to the new state.

    Args:
      problem: of the whole model.
      plan: its plan of data parallelism with an exchange.
      plan_for: returns the same plan for another model.
    """
    key = problem.optimizer, plan.exchange, *plan.axes.items()
    return _from_short_models(problem, key, lambda problem: _exchange_bytes(plan_for(problem)))


def _exchange_bytes(plan: Plan[Any]) -> float:
    exchange, layouts, problem = plan.details.exchange, plan.layouts, plan.details.group.problem
    mesh = AbstractMesh(tuple(plan.axes.values()), tuple(plan.axes), axis_types=(AxisType.Auto,) * len(plan.axes))
    params, optimizer, private = (layouts[name].local_shapes for name in ("params", "optimizer", "private"))
    shards = exchange.shards  # stage 3 packs and unpacks as much as the others, layer by layer
    read = problem.model.narrowed_shapes(problem.batch)

    def update(params: Any, optimizer: Any, private: Any, grads: Any) -> Any:
        if shards and (exchange.scatter or exchange.fetch):
            grads = shards.scatter(grads)
        norm = jnp.zeros(()) if exchange.shows_nonfinite else optax.tree.norm(grads)
        made = exchange.update(grads, DistributedState(optimizer, private), params)
        state = State(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), params, made.state)
        norm = norm if made.grad_norm is None else made.grad_norm
        old = state._replace(optimizer=DistributedState(optimizer, private))
        new, _ = steps.apply(old, made.updates, made.state, Metrics(_sums(), norm, jnp.isfinite(norm)))
        return new, shards.gather(read, params) if shards else ()

    whole = PartitionSpec()
    on_mesh = jax.shard_map(update, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return moved(on_mesh, params, optimizer, private, problem.model.shapes)


def _from_short_models(problem: Problem, key: Any, count: Callable[[Problem], float]) -> float:
    """Return `count(problem)`, which is linear in the number of equal layers. It is kept by the model and the key."""
    model = problem.model
    found, number = _MOVED.setdefault(model, {}), max(map(len, model.runs))
    if key not in found and number <= LONGEST_TRACED:
        found[key] = count(problem)
    elif key not in found:
        if model not in _SHORT:
            _SHORT[model] = [model.shortened(depth) for depth in SHORT_DEPTHS]
        few, many = (count(problem._replace(model=one)) for one in _SHORT[model])
        found[key] = many + (number - SHORT_DEPTHS[1]) * (many - few) / (SHORT_DEPTHS[1] - SHORT_DEPTHS[0])
    return found[key]


def moved(function: Any, *args: Any) -> float:
    """Return the bytes that a function reads and writes on a device."""
    return sum(one.calls * one.nbytes for one in operations(function, *args))


def _sums() -> Sums:
    zero = jnp.zeros(())
    return Sums(zero, {}, zero)
