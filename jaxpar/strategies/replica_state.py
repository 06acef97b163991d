"""The state of data-parallel replicas in its three forms: canonical, global over the mesh, and local to a replica."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization
from jax.sharding import Mesh

from jaxpar import layout
from jaxpar.exchange.exchange import DistributedState, Exchange
from jaxpar.layout import PER_REPLICA, Layout
from jaxpar.mesh import DATA
from jaxpar.state import Canonical, State
from jaxpar.step import Problem
from jaxpar.strategies.placement import PlacedState


def make_layouts(exchange: Exchange, axes: dict[str, int], like: State) -> dict[str, Layout]:
    """Return the layouts of the parts of the state with an exchange. like: shapes of the canonical state."""
    params = layout.by_kind(exchange.params, axes, like.params, DATA, exchange.copies)
    optimizer = layout.by_kind(exchange.optimizer, axes, like.optimizer, DATA, exchange.copies)

    def private() -> Any:
        held = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params.local_shapes)
        return exchange.init(held).private

    return {
        "step": layout.replicated(axes, like.step),
        "key": layout.replicated(axes, like.key),
        "params": params,
        "optimizer": optimizer.moved_to_host() if exchange.offload else optimizer,
        "private": layout.made_by_replicas(axes, private, DATA),
    }


def private_parts(layouts: Mapping[str, Layout]) -> list[str]:
    """Return the names of the parts of the state that differ between replicas, which are its private state."""
    return [name for name in ("params", "optimizer", "private") if layouts[name].kind == PER_REPLICA]


class ReplicaState:
    """Converts between the forms of the state of replicas: a State whose `optimizer` is a DistributedState.

    Attributes:
      params: layout of the parameters.
      layout: layout of the whole state.
      shardings: shardings of the global state during a step. Between steps, the optimizer state may be on the host.
      abstract: shapes, dtypes and shardings of the global state between steps.
    """

    def __init__(self, problem: Problem, mesh: Mesh, exchange: Exchange, layouts: Mapping[str, Layout]):
        """mesh: with a data axis. layouts: from `make_layouts`."""
        self._layouts, self._placed = layouts, PlacedState(problem, layouts, mesh)
        self.params, private = layouts["params"], layouts["private"]
        distributed = DistributedState(layouts["optimizer"], private)
        self.layout = layout.join(State(layouts["step"], layouts["key"], self.params, distributed))  # type: ignore[arg-type]
        self.shardings: Any = self.layout.shardings(mesh, in_step=True)
        self.abstract: Any = self.layout.abstract(mesh)
        self._at_rest = self.layout.shardings(mesh)

        def fresh_private(params: Any) -> Any:
            return private.out(exchange.init(self.params.local(params)).private)

        specs = {"in_specs": (self.params.specs,), "out_specs": private.specs}
        self._fresh_private = jax.jit(jax.shard_map(fresh_private, mesh=mesh, check_vma=False, **specs))

    def init(self, key: jax.Array) -> State:
        """Return the state at step 0."""
        return self._with_private(self._placed.init(key))

    def from_canonical(self, tree: Canonical, private: Canonical | None = None) -> State:
        """Return the global form of a canonical state. Without `private`, the private state is initialized."""
        state = self._with_private(self._placed.from_canonical(tree))
        if not private:
            return state
        parts = serialization.from_state_dict(self._private(state), private)
        inner = parts.get("optimizer", state.optimizer.optimizer)
        distributed = DistributedState(inner, parts.get("private", state.optimizer.private))
        state = state._replace(params=parts.get("params", state.params), optimizer=distributed)
        return jax.device_put(state, self._at_rest)

    def to_canonical(self, state: State) -> Canonical:
        """Return the canonical form of a global state: where replicas differ, the mean over replicas."""
        return self._placed.to_canonical(state._replace(optimizer=state.optimizer.optimizer))

    def to_private(self, state: State) -> Canonical:
        """Return the private state: the parts of a global state that its canonical form lacks."""
        private: Canonical = serialization.to_state_dict(self._private(state))
        return private

    def _private(self, state: State) -> dict[str, Any]:
        parts = {"params": state.params, "optimizer": state.optimizer.optimizer, "private": state.optimizer.private}
        return {name: parts[name] for name in private_parts(self._layouts)}

    def _with_private(self, state: State) -> State:
        return state._replace(optimizer=DistributedState(state.optimizer, self._fresh_private(state.params)))
