"""The canonical state: what training is at a step, in a form that no strategy appears in.

A strategy may hold its state as it likes, and converts to and from this form. Checkpoints,
equality tests, evaluation, export and resume all read it.

    {"step": int32 [], "key": uint32 [2], "params": {layer: {...}}, "optimizer": {...}}

The key is the data of the run's PRNG key. The data position is the step: the batch at step t
is a function of (seed, t) alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import serialization

from jaxpar.layout import Tree
from jaxpar.models.model import Model, Params

Canonical = dict[str, Any]


class State(NamedTuple):
    """Training at a step, on devices. `step` counts the steps taken."""

    step: jax.Array
    key: jax.Array
    params: Params
    optimizer: optax.OptState


def init(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> State:
    """The state at step 0. Jittable; the same whatever the devices."""
    init_key, run_key = split(key)
    params = model.init(init_key)
    return State(jnp.zeros((), jnp.int32), run_key, params, optimizer.init(params))


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> State:
    """Return the shapes and dtypes of what `init` returns, without touching a device."""
    step, key = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), split(jax.random.key(0))[1]))
    return State(step, key, model.shapes, jax.eval_shape(optimizer.init, model.shapes))


def split(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the key that parameters are drawn from, and the key of the run, as data."""
    init_key, run_key = jax.random.split(key)
    return init_key, jax.random.key_data(run_key)


def to_canonical(state: State) -> Canonical:
    """A nested dict of the state's arrays, optax's named tuples included."""
    return serialization.to_state_dict(state._asdict())


def from_canonical(tree: Canonical, like: State) -> State:
    """The state that `tree` holds; `like` gives the structure (its leaves may be abstract)."""
    return State(**serialization.from_state_dict(like._asdict(), tree))


def nbytes(tree: Tree) -> int:
    """Bytes of the arrays of a tree, abstract or not."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
