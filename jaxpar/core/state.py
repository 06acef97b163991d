"""The canonical state: the complete training state at a step, in a form that is the same for all strategies.

Each strategy stores the state in its own form and converts it to and from the canonical form. Checkpoints, equality
tests, evaluation, export and resuming all use the canonical form:

    {"step": int32 [], "key": uint32 [2], "params": {layer: {...}}, "optimizer": {...}}

`key` is the key data of the run's PRNG key. There is no data loader state, because the batch at step t depends only on
the data, the seed, the batch size and t.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

from jaxpar.layout import Tree
from jaxpar.models.model import Model, Params

Canonical = dict[str, Any]


class State(NamedTuple):
    """The training state on devices. `step` is the number of completed steps."""

    step: jax.Array
    key: jax.Array
    params: Params
    optimizer: optax.OptState


def init(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> State:
    """Return the state at step 0. Jittable; the result does not depend on the devices."""
    init_key, run_key = split(key)
    params = model.init(init_key)
    return State(jnp.zeros((), jnp.int32), run_key, params, optimizer.init(params))


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> State:
    """Return the shapes and dtypes of the state that `init` returns, without touching a device."""
    step, key = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), split(jax.random.key(0))[1]))
    return State(step, key, model.shapes, jax.eval_shape(optimizer.init, model.shapes))


def split(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the key that initializes the parameters and the key data of the run's key."""
    init_key, run_key = jax.random.split(key)
    return init_key, jax.random.key_data(run_key)


def to_canonical(state: State) -> Canonical:
    """Convert a state to a nested dict of arrays. The named tuples of optax become dicts too."""
    return serialization.to_state_dict(state._asdict())


def from_canonical(tree: Canonical, like: State) -> State:
    """Convert a canonical tree to a State with the structure of `like`, whose leaves may be abstract."""
    return State(**serialization.from_state_dict(like._asdict(), tree))


def is_finite_tree(tree: Tree) -> bool:
    """Return whether all values of arrays are finite. Those of arrays on devices are checked on the devices."""
    leaves = jax.tree.leaves(tree)
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return all(np.isfinite(leaf).all() for leaf in leaves)
    return bool(_is_finite_on_devices(leaves))


@jax.jit
def _is_finite_on_devices(leaves: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))


def nbytes(tree: Tree) -> int:
    """Return the total bytes of the arrays of a tree, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
