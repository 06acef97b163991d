"""The state of replicas that exchange: which part of it is on which of them, and its canonical form."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import state as states
from jaxpar.exchange.exchange import OWN, REPLICATED, DistributedState, Exchange
from jaxpar.exchange.placement import Placement
from jaxpar.exchange.reduce import Axis
from jaxpar.mesh import DATA
from jaxpar.state import Canonical, State
from jaxpar.step import Problem, abstract


class Form:
    """The global form of a state, whose optimizer's part is a DistributedState: arrays over the mesh.

    Attributes:
      params, optimizer, own: where its parts are.
      on_device: the shardings of its arrays in a step.
      at_rest: between steps.
    """

    def __init__(self, problem: Problem, mesh: Mesh, exchange: Exchange):
        """mesh: with an axis of the replicas."""
        axis = Axis(DATA, mesh.shape[DATA])
        self._problem, self._exchange = problem, exchange
        self.like = jax.eval_shape(partial(states.init, problem.model, problem.optimizer), jax.random.key(0))
        self.params = Placement(exchange.params, axis, self.like.params)
        self.optimizer = Placement(exchange.optimizer, axis, self.like.optimizer)
        own_of = partial(jax.shard_map, mesh=mesh, in_specs=(self.params.specs,), out_specs=PartitionSpec(DATA))
        self._fresh_own = jax.jit(own_of(self._init_own, check_vma=False))
        own = jax.eval_shape(self._fresh_own, jax.eval_shape(self.params.spread, self.like.params))
        self.own = Placement(OWN, axis, abstract(own, 1))
        self.on_device: Any = jax.tree.map(partial(NamedSharding, mesh), self.specs)
        self.at_rest = self.on_device
        if exchange.offload:
            distributed = self.on_device.optimizer
            inner = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), distributed.optimizer)
            self.at_rest = self.on_device._replace(optimizer=distributed._replace(optimizer=inner))
        self._without_own = self.at_rest._replace(optimizer=self.at_rest.optimizer._replace(own=()))
        self._spread_init = jax.jit(self._init, out_shardings=self._without_own)

    @property
    def specs(self) -> Any:
        """Of its arrays."""
        distributed = DistributedState(self.optimizer.specs, self.own.specs)
        return State(PartitionSpec(), PartitionSpec(), self.params.specs, distributed)  # type: ignore[arg-type]

    def local(self, state: State) -> State:
        """What a replica sees of it, inside `shard_map`."""
        inner, own = state.optimizer
        distributed = DistributedState(self.optimizer.local(inner), self.own.local(own))
        return state._replace(params=self.params.local(state.params), optimizer=distributed)

    def out(self, state: State) -> State:
        """The reverse of `local`."""
        inner, own = state.optimizer
        distributed = DistributedState(self.optimizer.out(inner), self.own.out(own))
        return state._replace(params=self.params.out(state.params), optimizer=distributed)

    def init(self, key: jax.Array) -> State:
        """At step 0."""
        return self._with_own(self._spread_init(key))

    def from_canonical(self, tree: Canonical, private: Canonical | None = None) -> State:
        """Of a canonical state; without the private one, what is private is fresh."""
        state = self._spread(states.from_canonical(tree, self.like), np)
        if not private:
            return self._with_own(jax.device_put(state, self._without_own))
        state = self._with_own(state)  # all of which `private` replaces
        parts = serialization.from_state_dict(self._private(state), private)
        distributed = DistributedState(parts.get("optimizer", state.optimizer.optimizer), parts["own"])
        state = state._replace(params=parts.get("params", state.params), optimizer=distributed)
        return jax.device_put(state, self.at_rest)

    def to_canonical(self, state: State) -> Canonical:
        """Of arrays that differ between replicas: the mean."""
        if {self.params.kind, self.optimizer.kind} == {REPLICATED}:
            return states.to_canonical(self._gather(state))
        return states.to_canonical(jax.jit(self._gather)(jax.device_put(state, self.on_device)))

    def to_private(self, state: State) -> Canonical:
        """What of it is not in the canonical state."""
        private: Canonical = serialization.to_state_dict(self._private(state))
        return private

    def _private(self, state: State) -> dict[str, Any]:
        parts = {"params": state.params, "optimizer": state.optimizer.optimizer, "own": state.optimizer.own}
        private = {name: part for name, part in parts.items() if getattr(self, name).kind == OWN}
        return private if jax.tree.leaves(private) else {}

    def _init(self, key: jax.Array) -> State:
        return self._spread(states.init(self._problem.model, self._problem.optimizer, key))

    def _init_own(self, params: Any) -> Any:
        return jax.tree.map(lambda x: x[None], self._exchange.init(self.params.local(params)).own)

    def _with_own(self, state: State) -> State:
        return state._replace(optimizer=state.optimizer._replace(own=self._fresh_own(state.params)))

    def _spread(self, state: State, numpy: Any = jnp) -> State:
        distributed = DistributedState(self.optimizer.spread(state.optimizer, numpy), ())
        return state._replace(params=self.params.spread(state.params, numpy), optimizer=distributed)

    def _gather(self, state: State) -> State:
        inner = self.optimizer.canonical(state.optimizer.optimizer)
        return state._replace(params=self.params.canonical(state.params), optimizer=inner)
