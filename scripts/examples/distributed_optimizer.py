"""Uses an exchange in your own `shard_map` step: linear regression on 4 devices, with one byte per gradient element.

scripts/python scripts/examples/distributed_optimizer.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpar.exchange import distributed_optimizer, state_specs

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
optimizer = distributed_optimizer(optax.adam(0.1), "data", exchange="bagua_bytegrad")
specs = state_specs("data", exchange="bagua_bytegrad")
replicated = partial(jax.shard_map, mesh=mesh, check_vma=False)  # maps a per-device function


@partial(jax.jit, donate_argnums=(0, 1))
@partial(replicated, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), specs))
def step(params: jax.Array, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple[jax.Array, optax.OptState]:
    """Run one training step of one replica, with its examples x [examples, 3] and y [examples]."""
    grads = jax.grad(lambda params: jnp.mean((x @ params - y) ** 2))(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


params = jnp.zeros(3)
state = jax.jit(replicated(optimizer.init, in_specs=P(), out_specs=specs))(params)
x = jax.random.normal(jax.random.key(0), (64, 3))
for _ in range(100):
    params, state = step(params, state, x, x @ jnp.array([1.0, -2.0, 3.0]))
print(params)
