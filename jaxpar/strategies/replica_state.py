"""The state of replicas that exchange, in its three forms: canonical, global over the mesh, local to a replica."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import layout
from jaxpar import state as states
from jaxpar.exchange.exchange import DistributedState, Exchange
from jaxpar.layout import PER_REPLICA, REPLICATED, Layout
from jaxpar.mesh import DATA
from jaxpar.state import Canonical, State
from jaxpar.step import Problem, abstract


def make_layouts(exchange: Exchange, axes: dict[str, int], like: State) -> dict[str, Layout]:
    """Return the layouts of params, optimizer and private state under an exchange. like: canonical, abstract."""
    params = layout.by_kind(exchange.params, axes, like.params, DATA)
    optimizer = layout.by_kind(exchange.optimizer, axes, like.optimizer, DATA)

    def private() -> Any:  # of each replica: `init` asks which replica it is on
        whole = jax.tree.map(lambda leaf: jnp.zeros(_local_shape(leaf, axes), leaf.dtype), params.leaves, is_leaf=_is)
        return jax.vmap(lambda _: exchange.init(whole).private, axis_name=DATA)(jnp.zeros(axes[DATA]))

    return {
        "params": params,
        "optimizer": optimizer,
        "private": layout.per_replica(axes, abstract(jax.eval_shape(private), 1), DATA),
    }


def _is(node: Any) -> bool:
    return isinstance(node, layout.LeafLayout)


def _local_shape(leaf: layout.LeafLayout, axes: dict[str, int]) -> tuple[int, ...]:
    return layout.shard_shape(leaf.shape, axes[leaf.split.axis], leaf.split.dim) if leaf.split else leaf.shape


class ReplicaState:
    """The forms of a state whose optimizer's part is a DistributedState.

    Attributes:
      layouts: of params, optimizer and private state.
      on_device: the shardings of its global arrays in a step.
      at_rest: between steps, which differ where the optimizer's state is offloaded.
    """

    def __init__(self, problem: Problem, mesh: Mesh, exchange: Exchange, layouts: dict[str, Layout]):
        """mesh: with an axis of the replicas; layouts: as `make_layouts` returns."""
        self._problem, self._exchange, self.layouts = problem, exchange, layouts
        self.params, self.optimizer, self.private = (layouts[part] for part in ("params", "optimizer", "private"))
        self._like = states.abstract_state(problem.model, problem.optimizer)
        private_of = partial(jax.shard_map, mesh=mesh, in_specs=(self.params.specs,), out_specs=PartitionSpec(DATA))
        self._fresh_private = jax.jit(private_of(self._init_private, check_vma=False))
        self.on_device: Any = jax.tree.map(partial(NamedSharding, mesh), self.specs)
        self.at_rest = self.on_device
        if exchange.offload:
            distributed = self.on_device.optimizer
            inner = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), distributed.optimizer)
            self.at_rest = self.on_device._replace(optimizer=distributed._replace(optimizer=inner))
        self._without_private = self.at_rest._replace(optimizer=self.at_rest.optimizer._replace(private=()))
        self._spread_init = jax.jit(self._init, out_shardings=self._without_private)

    @property
    def specs(self) -> Any:
        """The specs of its global arrays."""
        distributed = DistributedState(self.optimizer.specs, self.private.specs)
        return State(PartitionSpec(), PartitionSpec(), self.params.specs, distributed)  # type: ignore[arg-type]

    def local(self, state: State) -> State:
        """Return what a replica sees of a global state, inside `shard_map`."""
        inner, private = state.optimizer
        distributed = DistributedState(self.optimizer.local(inner), self.private.local(private))
        return state._replace(params=self.params.local(state.params), optimizer=distributed)

    def out(self, state: State) -> State:
        """Return what a replica gives `shard_map`: the reverse of `local`."""
        inner, private = state.optimizer
        distributed = DistributedState(self.optimizer.out(inner), self.private.out(private))
        return state._replace(params=self.params.out(state.params), optimizer=distributed)

    def init(self, key: jax.Array) -> State:
        """Return the state at step 0."""
        return self._with_private(self._spread_init(key))

    def from_canonical(self, tree: Canonical, private: Canonical | None = None) -> State:
        """Return the global form of a canonical state; without `private`, private state is fresh."""
        state = self._spread(states.from_canonical(tree, self._like), np)
        if not private:
            return self._with_private(jax.device_put(state, self._without_private))
        state = self._with_private(state)  # all of which `private` replaces
        parts = serialization.from_state_dict(self._private(state), private)
        inner = parts.get("optimizer", state.optimizer.optimizer)
        distributed = DistributedState(inner, parts.get("private", state.optimizer.private))
        state = state._replace(params=parts.get("params", state.params), optimizer=distributed)
        return jax.device_put(state, self.at_rest)

    def to_canonical(self, state: State) -> Canonical:
        """Return the canonical form; of arrays that differ between replicas, the mean."""
        if {self.params.kind, self.optimizer.kind} == {REPLICATED}:
            return states.to_canonical(self._gather(state))
        return states.to_canonical(jax.jit(self._gather)(jax.device_put(state, self.on_device)))

    def to_private(self, state: State) -> Canonical:
        """Return what of a state is not in its canonical form."""
        private: Canonical = serialization.to_state_dict(self._private(state))
        return private

    def _private(self, state: State) -> dict[str, Any]:
        parts = {"params": state.params, "optimizer": state.optimizer.optimizer, "private": state.optimizer.private}
        layouts = {"params": self.params, "optimizer": self.optimizer, "private": self.private}
        private = {name: part for name, part in parts.items() if layouts[name].kind == PER_REPLICA}
        return private if jax.tree.leaves(private) else {}

    def _init(self, key: jax.Array) -> State:
        return self._spread(states.init(self._problem.model, self._problem.optimizer, key))

    def _init_private(self, params: Any) -> Any:
        return jax.tree.map(lambda x: x[None], self._exchange.init(self.params.local(params)).private)

    def _with_private(self, state: State) -> State:
        return state._replace(optimizer=state.optimizer._replace(private=self._fresh_private(state.params)))

    def _spread(self, state: State, numpy: Any = jnp) -> State:
        distributed = DistributedState(self.optimizer.to_global(state.optimizer, numpy), ())
        return state._replace(params=self.params.to_global(state.params, numpy), optimizer=distributed)

    def _gather(self, state: State) -> State:
        inner = self.optimizer.to_canonical(state.optimizer.optimizer)
        return state._replace(params=self.params.to_canonical(state.params), optimizer=inner)
