"""Collectives are counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core.groups import SentArrays
from jaxpar.strategies.pipeline.executor.collectives import sent_arrays

AXES = [("tensor", 4), ("context", 2)]


def test_collectives_of_a_jaxpr() -> None:
    """A loop sends in each iteration, and an array is gathered before it is widened."""

    def function(x_BD: jax.Array) -> jax.Array:
        def iteration(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            return total + jax.lax.psum(x_BD[0], "tensor").sum(), None

        total, _ = jax.lax.scan(iteration, jnp.zeros((), x_BD.dtype), length=5)
        wide_BD = jax.lax.all_gather(x_BD.astype(jnp.float32), "context", axis=1, tiled=True)
        scattered_BD = jax.lax.psum_scatter(wide_BD, "tensor", scatter_dimension=1, tiled=True)
        return scattered_BD.sum() + jax.lax.pmax(total, "tensor")

    closed = jax.make_jaxpr(function, axis_env=AXES)(jax.ShapeDtypeStruct((3, 8), jnp.bfloat16))
    narrow, wide = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    assert list(sent_arrays(closed.jaxpr.eqns)) == [
        SentArrays("all-reduce", "tensor", narrow, 8, 5, 5),
        SentArrays("all-gather", "context", narrow, 48, 1, 0.5),
        SentArrays("reduce-scatter", "tensor", wide, 48, 1, 1),
        SentArrays("all-reduce", "tensor", narrow, 1, 1, 1),
    ]
