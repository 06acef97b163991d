"""Data parallelism by `shard_map`: the program of one replica, with explicit collectives for the exchange.

jaxpar/exchange defines the communication between replicas, and the part of the state that each replica holds.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization
from jax.sharding import Mesh, PartitionSpec
from ml_collections import ConfigDict

from jaxpar import layout
from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.mesh import DATA, GROUP_AXES, TENSOR
from jaxpar.core.optimizer import at_step
from jaxpar.core.plan import Decision, Plan, Traffic, state_memory
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.exchange.exchange import EVERY, DistributedState, Exchange
from jaxpar.exchange.fetch import fetched
from jaxpar.exchange.reduce import psum_small
from jaxpar.exchange.scatter_layers import LayerScatter, can_scatter, scattering
from jaxpar.layout import PER_REPLICA, REPLICATED, Layout
from jaxpar.models.model import Batch, Model, Params
from jaxpar.strategies import exchanges, groups
from jaxpar.strategies.placement import (
    IN_PLACE,
    OVERLAP,
    BatchPlacement,
    PlacedState,
    between_hosts,
    first_known,
    on_all,
    product_options,
)
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums

# Let XLA gather the arrays of a layer while the layer before it is computed. Later versions have only the first name.
AHEAD: tuple[dict[str, Any], ...] = (
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"},
    {"xla_gpu_enable_pipelined_all_gather": True},
)
# Unroll the loop over layers by two: gathered arrays then alternate between two buffers, and are not copied.
ALTERNATE: dict[str, Any] = {"xla_gpu_enable_while_loop_double_buffering": True}


@dataclass(frozen=True)
class ReplicaDetails:
    """The details of a plan that `build` needs."""

    exchange: Exchange  # the exchange around the optimizer
    group: ReplicaGroup  # the devices of a replica
    unrolled: bool  # whether to compute the model without a scan over layers
    last_apart: bool  # whether the exchange overlaps with the last backward pass, after the loop over microbatches
    spans_hosts: bool  # whether several processes, such as hosts, share the devices
    scatter_layers: LayerScatter | None  # how a scan scatters the gradients of a layer while it computes the one before


def plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[None]) -> Plan[ReplicaDetails]:
    """Plan data-parallel replicas with config.exchange. Raises UserError if it does not support these shapes."""
    on_cpu, spans_hosts = cluster.platform == "cpu", cluster.platform == "gpu" and cluster.num_processes > 1
    axes, like = dict(decision.axes), states.abstract_state(shapes.model, shapes.optimizer)
    group = groups.replica_group(config, shapes, axes)
    is_split = group.is_split if TENSOR in axes else None
    exchange = exchanges.configured_exchange(
        config, group.problem, decision.num_replicas, group.norm, is_split, in_turn=spans_hosts
    )
    layouts = make_layouts(exchange, group.layouts(like))
    model = group.problem.model
    sent = sent_shapes(model, shapes.batch, exchange)
    traffic = exchange.traffic(sent, shapes.accumulation_steps)
    traffic = [*traffic, *group_traffic(group, exchange, decision.num_replicas, on_cpu=on_cpu)]
    summary = f"{exchanges.name(config)}: batch sharded, parameters {layouts['params'].kind}, "
    summary += f"optimizer {layouts['optimizer'].kind}" + (", in the host's memory" if exchange.offload else "")
    summary += groups.summary(axes)
    # Exchanges with branches run in a conditional, and scans over layers return all gradients at their end.
    overlaps = not (on_cpu or exchange.fetch or exchange.branches or model.scanned)
    private_key = exchanges.private_key(config, decision.num_replicas, like.params)
    private_key |= {axis: axes[axis] for axis in group.axes}
    return Plan(
        "data_parallel",
        decision,
        summary,
        layouts,
        # On CPUs, nothing orders collectives inside a loop relative to those outside of it, so devices could deadlock.
        ReplicaDetails(
            exchange,
            group,
            unrolled=bool(exchange.fetch) and on_cpu,
            last_apart=overlaps and decision.num_replicas > 1,
            spans_hosts=spans_hosts,
            scatter_layers=exchange.scatter_layers if model.scanned and can_scatter(model) and not on_cpu else None,
        ),
        state_memory(layouts),
        tuple(traffic),
        exchanges.name(config),
        private_key if private_parts(layouts) else {},
        exchanges.differs(config, decision.num_replicas),
        exchanges.exchange_advice(config),
        update_bytes=_update_bytes(layouts["optimizer"], _gradients(group, exchange), exchange),
        gathered_bytes=states.nbytes(sent) if exchange.gather else 0,
    )


def build(plan: Plan[ReplicaDetails], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[State]:
    """Build the strategy of a planned exchange."""
    mesh, exchange, group = meshes.make_mesh(plan.axes, devices), plan.details.exchange, plan.details.group
    placed = ReplicaState(problem, mesh, exchange, plan.layouts)
    if group.axes:
        problem = group.problem
    if plan.details.unrolled:
        problem = problem._replace(model=problem.model.unrolled())
    in_shard_map, of_batch = partial(jax.shard_map, mesh=mesh, check_vma=False), BatchPlacement(mesh, problem.batch)
    step = in_shard_map(
        train_step(problem, plan.details, placed.layout, plan.num_replicas),
        in_specs=(placed.layout.specs, of_batch.specs),
        out_specs=(placed.layout.specs, PartitionSpec()),
    )

    @jax.jit
    @partial(in_shard_map, in_specs=(placed.params.specs, of_batch.specs), out_specs=PartitionSpec())
    def evaluate(params: Any, batch: Batch) -> Sums:
        if placed.params.kind == PER_REPLICA:
            params = jax.lax.pmean(placed.params.local(params), DATA)
        elif exchange.gather:
            params = exchange.gather(problem.model.narrowed_shapes(problem.batch, in_training=False), params)
        return jax.lax.psum(steps.evaluate(fetching(problem, exchange), params, batch), group.batch_axes)

    def num_in_flight(state: State) -> int:
        """Return the number of passes that wait for an update, which all replicas count."""
        if EVERY not in exchange.branches:
            return 0
        return int(state.optimizer.private["passes"].addressable_shards[0].data.item())

    def programs() -> list[CompiledProgram]:
        return [CompiledProgram(compiled_step.lower(placed.abstract, of_batch.abstract).compile(), exchange.branches)]

    shardings = jax.tree.map(lambda x: x.sharding, placed.abstract), on_all(mesh)
    options = IN_PLACE | product_options(problem.model) | OVERLAP | fetch_options(problem, exchange)
    if plan.details.spans_hosts and not problem.model.scanned:  # in a scan, a collective overlaps with one layer
        options |= between_hosts()
    donated = () if plan.keeps_previous else 0
    compiled_step = jax.jit(step, donate_argnums=donated, out_shardings=shardings, compiler_options=options)
    waiting_evaluate = meshes.one_at_a_time(evaluate, mesh)
    return Strategy(
        plan,
        tuple(mesh.devices.flat),
        init=placed.init,
        place=of_batch.place,
        step=meshes.one_at_a_time(compiled_step, mesh),
        evaluate=lambda state, batch: waiting_evaluate(state.params, batch),
        to_canonical=placed.to_canonical,
        from_canonical=placed.from_canonical,
        compile=programs,
        to_private=placed.to_private,
        num_in_flight=num_in_flight,
    )


def fetch_options(problem: Problem, exchange: Exchange) -> dict[str, Any]:
    """Return the options for scans over layers whose arrays are fetched.

    They apply to every loop of a program: to one over microbatches too, whose gathers before its first layers would be
    taken out of it. If it is the only loop, unrolling it would keep the arrays of two microbatches.
    """
    if not (exchange.fetch and problem.model.scanned):
        return {}
    return ALTERNATE if problem.accumulation_steps > 1 else gather_ahead() | ALTERNATE


@functools.cache
def gather_ahead() -> dict[str, Any]:
    """Return the first of AHEAD that this version of XLA knows. Raises RuntimeError if it knows none."""
    return first_known(*AHEAD)


def fetching(problem: Problem, exchange: Exchange) -> Problem:
    """Return the problem with a model that reads parameters as replicas hold them."""
    return problem._replace(model=fetched(problem.model, exchange.fetch)) if exchange.fetch else problem


def sent_shapes(model: Model, batch: Batch, exchange: Exchange) -> Params:
    """Return the shapes of the parameters as `exchange.traffic` takes them, in the dtypes in which they are gathered.

    With `fetch`, a layer receives all arrays that it uses, including those that it shares with another layer.
    """
    if exchange.fetch:
        return model.read_shapes(batch)
    return model.narrowed_shapes(batch) if exchange.gather else model.shapes


def train_step(
    problem: Problem, details: ReplicaDetails, layout: Layout, num_replicas: int
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """Return the function that runs one training step on a device. layout: layout of the global state."""
    exchange, group = details.exchange, details.group
    problem, scatter = fetching(problem, exchange), exchange.scatter
    if details.scatter_layers is not None:
        model = scattering(problem.model, details.scatter_layers)
        problem, scatter = problem._replace(model=model), model.shards
    elif exchange.gather:
        scatter = functools.partial(_scattered, exchange, problem.model)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        state = layout.local(state)
        if exchange.offload:
            state = state._replace(optimizer=_scalars_on_device(state.optimizer))
        # The mean, so that the gradient is the mean over replicas.
        weight = jax.lax.pmean(group.divisor(steps.batch_weight(batch)), DATA)
        if exchange.gather:
            params = exchange.gather(problem.model.narrowed_shapes(problem.batch), state.params)
        else:
            # If JAX checks types (check_vma), it sums the gradient over replicas itself, unless the parameters vary.
            is_equal = exchange.params == REPLICATED
            params = jax.lax.pcast(state.params, DATA, to="varying") if is_equal else state.params
        differentiated = state._replace(params=problem.model.differentiated(params))
        grads_unreduced, sums_unreduced = steps.gradients(
            problem, differentiated, batch, weight, scatter=scatter, last_apart=details.last_apart
        )
        grads_unreduced = group.reduced(grads_unreduced)
        if exchange.offload:
            grads_unreduced, optimizer = _on_device_after(grads_unreduced, state.optimizer)
            state = state._replace(optimizer=optimizer)
        squares_unreduced = jnp.zeros(())
        if not exchange.shows_nonfinite:
            squares_unreduced = group.norm(grads_unreduced) ** 2 / group.times_counted
        sums, squares = psum_small((sums_unreduced, squares_unreduced), group.batch_axes)
        grad_norm = jnp.sqrt(squares / num_replicas)
        finite = steps.is_finite(grad_norm, sums)
        distributed = state.optimizer._replace(optimizer=at_step(state.optimizer.optimizer, state.step))
        if exchange.branches:
            # On the CPU, nothing orders collectives inside a branch relative to those outside of it, so devices could
            # deadlock. To order them after the psum above, make the operands of the branches and the counters that
            # select a branch depend on its result.
            grads_unreduced = jax.tree.map(lambda x: jnp.where(finite, x, 0), grads_unreduced)
            counters = jax.tree.map(lambda x: x if x.ndim else jnp.where(finite, x, 0), distributed.private)
            distributed = distributed._replace(private=counters)
        made = exchange.update(grads_unreduced, distributed, state.params)
        if made.grad_norm is not None:
            grad_norm, finite = made.grad_norm, finite & jnp.isfinite(made.grad_norm)
        else:  # values sent in a narrow dtype may overflow
            finite &= jax.lax.psum(steps.nonfinite_count(made.updates), (DATA, *group.axes)) == 0
        state, metrics = steps.apply(state, made.updates, made.state, Metrics(sums, grad_norm, finite))
        return layout.out(state), metrics

    return step


def _scattered(exchange: Exchange, model: Model, grads: Params) -> Params:
    """Return what a replica accumulates of the gradients of gathered parameters."""
    grads = model.as_stored(grads)
    return exchange.scatter(grads) if exchange.scatter else grads


def _scalars_on_device(optimizer: Any) -> Any:
    """Return an optimizer state on the host with its scalars on the device, such as the scale of the loss."""
    return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, jax.memory.Space.Device), optimizer)


def _on_device_after(grads: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return the gradients, and a copy of the optimizer state from the host that begins once they exist.

    Without this order, XLA copies the state first, and the device holds it during the backward pass.
    """
    grads, optimizer = jax.lax.optimization_barrier((grads, optimizer))
    return grads, jax.device_put(optimizer, jax.memory.Space.Device)


def group_traffic(group: ReplicaGroup, exchange: Exchange, num_replicas: int, *, on_cpu: bool) -> list[Traffic]:
    """Return what a device sends to the others of its replica in a step. on_cpu: whether XLA widens what is sent."""
    return group.traffic(num_replicas, _gradients(group, exchange).local_shapes, on_cpu=on_cpu)


def _gradients(group: ReplicaGroup, exchange: Exchange) -> Layout:
    """Return the layout of what the backward pass leaves on each device."""
    return group.params.sharded(DATA, exchange.copies) if exchange.leaves_shards else group.params


def _update_bytes(optimizer: Layout, gradients: Layout, exchange: Exchange) -> int:
    """Return the bytes of a copied optimizer state and of gradients, whole and those that the exchange scatters."""
    if not exchange.offload:
        return 0
    held = [optimizer, gradients]
    if not exchange.leaves_shards:
        held.append(gradients.sharded(DATA, exchange.copies))
    return max(map(sum, zip(*(part.nbytes_by_device for part in held), strict=True)))


def make_layouts(exchange: Exchange, base: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of the parts of the state with an exchange. base: those without one."""
    params = layout.by_kind(exchange.params, base["params"], DATA, exchange.copies)
    optimizer = layout.by_kind(exchange.optimizer, base["optimizer"], DATA, exchange.copies)
    others = [axis for axis in GROUP_AXES if axis in params.axes]

    def private() -> Any:
        held = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params.local_shapes)
        return exchange.init(held).private

    return {
        "step": base["step"],
        "key": base["key"],
        "params": params,
        "optimizer": optimizer.moved_to_host() if exchange.offload else optimizer,
        "private": layout.made_by_replicas(params.axes, private, DATA, *others),
    }


def private_parts(layouts: Mapping[str, Layout]) -> list[str]:
    """Return the names of the parts of the state that differ between replicas, which are its private state."""
    return [name for name, part in layouts.items() if part.kind == PER_REPLICA]


class ReplicaState:
    """Converts between the forms of the state of replicas: a State whose `optimizer` is a DistributedState."""

    def __init__(self, problem: Problem, mesh: Mesh, exchange: Exchange, layouts: Mapping[str, Layout]):
        """mesh: with a data axis. layouts: from `make_layouts`."""
        self._layouts, self._placed = layouts, PlacedState(problem, layouts, mesh)
        self.params, private = layouts["params"], layouts["private"]
        distributed = DistributedState(layouts["optimizer"], private)
        self.layout = layout.join(State(layouts["step"], layouts["key"], self.params, distributed))  # type: ignore[arg-type]
        self._at_rest: Any = self.layout.shardings(mesh)
        self.abstract: Any = self.layout.abstract(
            mesh
        )  # shapes, dtypes and shardings of the global state between steps

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
        return serialization.to_state_dict(self._private(state))

    def _private(self, state: State) -> dict[str, Any]:
        parts = {"params": state.params, "optimizer": state.optimizer.optimizer, "private": state.optimizer.private}
        return {name: parts[name] for name in private_parts(self._layouts)}

    def _with_private(self, state: State) -> State:
        return state._replace(optimizer=DistributedState(state.optimizer, self._fresh_private(state.params)))
