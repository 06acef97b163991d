"""Certifies the step of a plain Flax training loop on 2 devices, with and without a mistake in its average.

scripts/python scripts/examples/certify_functions.py
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jaxpar

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
replicated = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(4)])
optimizer = optax.adam(1e-2)


def losses(params: Any, batch: Any) -> jax.Array:
    """Return the sum of the weighted losses of some examples, x [examples, 8]. Padding examples have the weight 0."""
    of_examples = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, batch["x"]), batch["label"])
    return (of_examples * batch["weight"]).sum()


def one_device(params: Any, batch: Any) -> Any:
    """Return the mean loss and its gradient."""
    return jax.value_and_grad(lambda params: losses(params, batch) / batch["weight"].sum())(params)


@jax.jit
@replicated
def correct(params: Any, batch: Any) -> Any:
    """Return the same, with the batch split between the devices."""
    weight = jax.lax.psum(batch["weight"].sum(), "data")
    return jax.lax.psum(jax.value_and_grad(lambda params: losses(params, batch) / weight)(params), "data")


@jax.jit
@replicated
def wrong(params: Any, batch: Any) -> Any:
    """Return the mean of the means of the devices, whose examples have different weights."""
    return jax.lax.pmean(one_device(params, batch), "data")


x = jax.random.normal(jax.random.key(0), (64, 8))
batch = {"x": x, "label": jnp.argmax(x[:, :4], axis=1), "weight": jnp.ones(64).at[60:].set(0)}
params = model.init(jax.random.key(1), x)
state = optimizer.init(params)
for name, step in {"correct": correct, "wrong": wrong}.items():
    print(f"{name}\n{jaxpar.certify_functions(one_device, step, params, batch)}\n")
for _ in range(100):
    loss, grads = correct(params, batch)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
print(f"loss after 100 steps: {loss:.3f}")
