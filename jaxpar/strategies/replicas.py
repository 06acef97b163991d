"""Data parallelism by `shard_map`: a program for one replica, in which the exchange is written out.

jaxpar/exchange says what replicas send each other, and which part of the state each has.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import mesh as meshes
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.exchange.exchange import OWN, REPLICATED, DistributedState, Exchange
from jaxpar.exchange.placement import Placement
from jaxpar.exchange.reduce import Axis
from jaxpar.mesh import DATA
from jaxpar.models.model import Batch
from jaxpar.state import Canonical, State
from jaxpar.step import Metrics, Problem
from jaxpar.strategies.strategy import Description, Program, Strategy, with_shardings
from jaxpar.tasks import Sums

# On GPUs XLA would put buckets together again, and so wait for the whole backward pass; and is to hide their latency.
OVERLAP: dict[str, Any] = {
    f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_reduce", "all_gather", "reduce_scatter")
} | {"xla_gpu_enable_latency_hiding_scheduler": True}


class Form(NamedTuple):
    """Where the parts of a state are, whose optimizer's is a DistributedState."""

    params: Placement
    optimizer: Placement
    own: Placement

    @property
    def specs(self) -> Any:
        """Of the global form."""
        distributed = DistributedState(self.optimizer.specs, self.own.specs)
        return State(PartitionSpec(), PartitionSpec(), self.params.specs, distributed)  # type: ignore[arg-type]

    def shardings(self, mesh: Mesh, optimizer_memory: str | None) -> Any:
        """Of the global form; optimizer_memory: the kind of memory that the optimizer's state is in."""
        state = jax.tree.map(partial(NamedSharding, mesh), self.specs)
        inner = jax.tree.map(lambda s: s.with_memory_kind(optimizer_memory), state.optimizer.optimizer)
        return state._replace(optimizer=state.optimizer._replace(optimizer=inner))

    def local(self, state: State) -> State:
        """What a replica sees of the global form."""
        inner, own = state.optimizer
        distributed = DistributedState(self.optimizer.local(inner), self.own.local(own))
        return state._replace(params=self.params.local(state.params), optimizer=distributed)

    def out(self, state: State) -> State:
        """What a replica gives back of the local form."""
        inner, own = state.optimizer
        distributed = DistributedState(self.optimizer.out(inner), self.own.out(own))
        return state._replace(params=self.params.out(state.params), optimizer=distributed)

    def private(self, state: State) -> dict[str, Any]:
        """What of the global form is not in the canonical one."""
        parts = {"params": state.params, "optimizer": state.optimizer.optimizer, "own": state.optimizer.own}
        private = {name: parts[name] for name, place in zip(self._fields, self, strict=True) if place.kind == OWN}
        return private if jax.tree.leaves(private) else {}


def build(problem: Problem, mesh: Mesh, exchange: Exchange, name: str) -> Strategy:
    """The strategy of an exchange; name: what its private state is of."""
    if exchange.fetch and mesh.devices.flat[0].platform == "cpu":
        # There nothing orders collectives inside a loop and outside of it: devices would wait in different ones.
        problem = problem._replace(model=problem.model.unrolled())
    form, fresh_own = _form(problem, mesh, exchange)
    params, optimizer = form.params, form.optimizer
    like = jax.eval_shape(partial(states.init, problem.model, problem.optimizer), jax.random.key(0))
    divided = NamedSharding(mesh, PartitionSpec(DATA))
    on_device = form.shardings(mesh, None)
    at_rest = form.shardings(mesh, "pinned_host") if exchange.offload else on_device
    without_own = at_rest._replace(optimizer=at_rest.optimizer._replace(own=()))
    in_shard_map = partial(jax.shard_map, mesh=mesh, check_vma=False)

    def spread(state: State, numpy: Any = jnp) -> State:
        """The global form of a canonical state, without what is the replicas' own."""
        distributed = DistributedState(optimizer.spread(state.optimizer, numpy), ())
        return state._replace(params=params.spread(state.params, numpy), optimizer=distributed)

    def with_own(state: State) -> State:
        return state._replace(optimizer=state.optimizer._replace(own=fresh_own(state.params)))

    @partial(jax.jit, out_shardings=without_own)
    def init(key: jax.Array) -> State:
        return spread(states.init(problem.model, problem.optimizer, key))

    def from_canonical(tree: Canonical, private: Canonical | None = None) -> State:
        state = spread(states.from_canonical(tree, like), np)
        if not private:
            return with_own(jax.device_put(state, without_own))
        state = with_own(state)  # of which `private` replaces all
        parts = serialization.from_state_dict(form.private(state), private)
        distributed = DistributedState(parts.get("optimizer", state.optimizer.optimizer), parts["own"])
        state = state._replace(params=parts.get("params", state.params), optimizer=distributed)
        return jax.device_put(state, at_rest)

    def canonical(state: State) -> State:
        inner = optimizer.canonical(state.optimizer.optimizer)
        return state._replace(params=params.canonical(state.params), optimizer=inner)

    is_canonical = {params.kind, optimizer.kind} == {REPLICATED}
    to_canonical = canonical if is_canonical else jax.jit(lambda state: canonical(jax.device_put(state, on_device)))

    @partial(in_shard_map, in_specs=(form.specs, PartitionSpec(DATA)), out_specs=(form.specs, PartitionSpec()))
    def replica_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        state = form.local(state)
        weight = jax.lax.psum(batch["weights"].sum(), DATA) / mesh.shape[DATA]  # so that gradients are replicas' means
        grads, own_sums = steps.gradients(problem, state, batch, weight, fetch=exchange.fetch, scatter=exchange.scatter)
        square = optax.tree.norm(grads) ** 2
        *totals, squares = jax.lax.psum(jnp.stack([*own_sums, square]), DATA)
        sums, grad_norm = Sums(*totals), jnp.sqrt(squares / mesh.shape[DATA])
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)  # on all replicas: a code may hide what is not
        if exchange.branches:
            # On the CPU nothing orders collectives in a branch and outside of it, and devices would wait for each other
            # in different ones; so these wait for that above.
            grads = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
        made = exchange.update(grads, state.optimizer, state.params)
        if made.grad_norm is not None:
            grad_norm, finite = made.grad_norm, finite & jnp.isfinite(made.grad_norm)
        state, metrics = steps.apply(state, made.updates, made.state, Metrics(sums, grad_norm, finite))
        return form.out(state), metrics

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        return replica_step(jax.device_put(state, on_device) if exchange.offload else state, batch)

    @jax.jit
    @partial(in_shard_map, in_specs=(params.specs, PartitionSpec(DATA)), out_specs=PartitionSpec())
    def evaluate(tree: Any, batch: Batch) -> Sums:
        whole = jax.lax.pmean(params.local(tree), DATA) if params.kind == OWN else tree
        return jax.lax.psum(steps.evaluate(problem, whole, batch, fetch=exchange.fetch), DATA)

    def describe() -> Description:
        places = {"parameters": params, "own": form.own} | ({} if exchange.offload else {"optimizer": optimizer})
        memory = {part: place.device_bytes() for part, place in places.items()}
        traffic = tuple(exchange.traffic(like.params, problem.accumulation_steps))
        layout = f"{name}: batch divided, parameters {params.kind}, optimizer {optimizer.kind}"
        layout += ", in the host's memory" if exchange.offload else ""
        devices = tuple(mesh.devices.flat)
        return Description(devices, layout, len(devices), memory, traffic)

    def compile() -> list[Program]:
        state = jax.eval_shape(lambda key: with_own(init(key)), jax.random.key(0))
        arguments = with_shardings(state, at_rest), with_shardings(problem.batch, divided)
        return [Program(compiled.lower(*arguments).compile(), exchange.branches)]

    shardings = at_rest, NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(step, donate_argnums=0, out_shardings=shardings, compiler_options=OVERLAP)
    mapped_evaluate = meshes.one_at_a_time(evaluate, mesh)
    return Strategy(
        init=lambda key: with_own(init(key)),
        place=lambda rows: {k: jax.make_array_from_process_local_data(divided, v) for k, v in rows.items()},
        step=meshes.one_at_a_time(compiled, mesh),
        evaluate=lambda state, batch: mapped_evaluate(state.params, batch),
        to_canonical=lambda state: states.to_canonical(to_canonical(state)),
        from_canonical=from_canonical,
        describe=describe,
        compile=compile,
        to_private=lambda state: serialization.to_state_dict(form.private(state)),
        private_of=f"{name} on {mesh.shape[DATA]} replicas",
    )


def _form(problem: Problem, mesh: Mesh, exchange: Exchange) -> tuple[Form, Callable[[Any], Any]]:
    """Where the parts of the state are, and what makes replicas' own state from parameters, both in the global form."""
    axis = Axis(DATA, mesh.shape[DATA])
    like = jax.eval_shape(partial(states.init, problem.model, problem.optimizer), jax.random.key(0))
    params = Placement(exchange.params, axis, like.params)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(params.specs,), out_specs=PartitionSpec(DATA), check_vma=False)
    def fresh_own(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[None], exchange.init(params.local(tree)).own)

    own = jax.eval_shape(fresh_own, jax.eval_shape(params.spread, like.params))
    return Form(
        params, Placement(exchange.optimizer, axis, like.optimizer), Placement(OWN, axis, steps.abstract(own, 1))
    ), fresh_own
