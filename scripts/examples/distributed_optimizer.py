"""An exchange in one's own `shard_map` step: linear regression on 4 devices, with a byte for each gradient on the wire.

scripts/python scripts/examples/distributed_optimizer.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpar.exchange import distributed_optimizer

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
optimizer = distributed_optimizer(optax.adam(0.1), "data", exchange="bagua_bytegrad")


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
def train(params: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """100 steps. What the optimizer keeps for each replica never leaves it."""

    def step(_: int, carry: tuple[jax.Array, optax.OptState]) -> tuple[jax.Array, optax.OptState]:
        params, state = carry
        grads = jax.grad(lambda params: jnp.mean((x @ params - y) ** 2))(params)  # of this replica's rows
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, 100, step, (params, optimizer.init(params)))[0]


x = jax.random.normal(jax.random.key(0), (64, 3))
print(train(jnp.zeros(3), x, x @ jnp.array([1.0, -2.0, 3.0])))
