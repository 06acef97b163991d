"""Where the arrays of replicas are: whole on each, different on each, or divided between them.

Three forms of a tree: *canonical*, as on one device; *global*, arrays over the mesh as jit sees them; *local*, what a
replica sees of a global one inside `shard_map`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.exchange.exchange import OWN, REPLICATED, SHARDED
from jaxpar.exchange.reduce import Axis
from jaxpar.exchange.zero import pad, split_dim, unpad


class Placement:
    """The forms of one tree. OWN: global arrays have a leading dim n; SHARDED: they are padded."""

    def __init__(self, kind: str, axis: Axis, like: Any):
        """like: the canonical tree, or its shapes."""
        assert kind in (REPLICATED, OWN, SHARDED), kind
        self.kind, self._axis, self._like = kind, axis, like

    @property
    def specs(self) -> Any:
        """Of the global form."""
        return jax.tree.map(self._spec, self._like)

    def local(self, tree: Any) -> Any:
        """Of what `shard_map` gives a replica."""
        return jax.tree.map(lambda x: x[0], tree) if self.kind == OWN else tree

    def out(self, tree: Any) -> Any:
        """What a replica gives `shard_map`, of the local form."""
        return jax.tree.map(lambda x: x[None], tree) if self.kind == OWN else tree

    def canonical(self, tree: Any) -> Any:
        """Of the global form. Jittable. Of replicas' own floats: the mean."""
        if self.kind == OWN:
            return jax.tree.map(_mean, tree)
        if self.kind == SHARDED:
            return jax.tree.map(lambda x, like: unpad(x, like.shape), tree, self._like)
        return tree

    def spread(self, tree: Any, numpy: Any = jnp) -> Any:
        """The global form of a canonical tree. numpy: np on the host, jnp where it is to be jitted."""
        if self.kind == OWN:
            return jax.tree.map(lambda x: numpy.broadcast_to(x, (self._axis.size, *x.shape)), tree)
        if self.kind == SHARDED:
            return jax.tree.map(lambda x: pad(x, self._axis.size, numpy), tree)
        return tree

    def device_bytes(self) -> int:
        """On each device."""
        leaves = jax.tree.leaves(self._like)
        if self.kind == SHARDED:
            leaves = [jax.eval_shape(lambda x: pad(x, self._axis.size), leaf) for leaf in leaves]
        parts = [self._axis.size if self.kind == SHARDED and leaf.ndim else 1 for leaf in leaves]
        return sum(leaf.size * leaf.dtype.itemsize // part for leaf, part in zip(leaves, parts, strict=True))

    def _spec(self, leaf: Any) -> PartitionSpec:
        if self.kind == OWN:
            return PartitionSpec(self._axis.name)
        dim = split_dim(leaf.shape)
        if self.kind == SHARDED and dim is not None:
            return PartitionSpec(*[None] * dim, self._axis.name)
        return PartitionSpec()


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]
