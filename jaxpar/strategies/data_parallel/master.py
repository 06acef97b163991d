"""PyTorch's DataParallel: the first device is the master, the only one that holds weights and optimizer state.

In each step, the master sends its weights to the other devices. Every device computes the gradient of its shard of the
batch and sends it to the master, which takes the optimizer step alone. The traffic through the master and its memory
grow with the number of devices. The other exchanges avoid that; this one exists for comparison. Every device computes
the loss of its own outputs, as if the loss were inside the module of DataParallel, so outputs are not sent.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar import layout
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.loss_scale import find_scale
from jaxpar.core.mesh import DATA
from jaxpar.core.plan import Decision, Plan, Traffic, state_memory
from jaxpar.core.state import State, nbytes
from jaxpar.core.step import Metrics, Problem, with_shardings
from jaxpar.models.model import Batch
from jaxpar.strategies.placement import PlacedState, batch_placer, by_replica, on_all, product_options
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums


def plan(shapes: Problem, decision: Decision[None]) -> Plan[str]:
    """Plan the whole state on the first device, and copies of the weights on the others during a step."""
    like, others = states.abstract_state(shapes.model, shapes.optimizer), range(1, decision.num_replicas)
    layouts = {part: layout.on_one(decision.axes, tree, DATA) for part, tree in like._asdict().items()}
    layouts["copies"] = layout.on_some(decision.axes, like.params, DATA, others)
    # Traffic of the master, which sends the weights to all others; any other device only sends its gradients.
    nbytes_sent, messages = len(others) * nbytes(like.params), len(others) * len(jax.tree.leaves(like.params))
    traffic = (Traffic("copy", "float32", DATA, nbytes_sent, messages),)
    summary = "dp: batch sharded, state on the first device alone"
    return Plan("data_parallel", decision, summary, layouts, "master", state_memory(layouts), traffic, exchange="dp")


def build(plan: Plan[str], problem: Problem, given: Sequence[jax.Device]) -> Strategy[State]:
    """Build the strategy on the first of the given devices. The very first one is the master."""
    mesh = meshes.make_mesh(plan.axes, given)
    devices = list(mesh.devices.flat)
    placed, everywhere = PlacedState(problem, plan.layouts, mesh), on_all(mesh)
    master = placed.shardings.step  # sharding of everything on the master
    in_shard_map = partial(jax.shard_map, mesh=mesh, out_specs=PartitionSpec(DATA), check_vma=False)

    @partial(jax.jit, compiler_options=product_options(problem.model))
    @partial(in_shard_map, in_specs=(PartitionSpec(), PartitionSpec(DATA), PartitionSpec()))
    def share(state: State, batch: Batch, weight: jax.Array) -> Any:
        """Return the gradients and metric sums of each device, with a leading dim over the devices."""
        return jax.tree.map(lambda x: x[None], steps.gradients(problem, state, batch, weight))

    @jax.jit
    @partial(in_shard_map, in_specs=(PartitionSpec(), PartitionSpec(DATA)))
    def share_of_sums(params: Any, batch: Batch) -> Sums:
        return jax.tree.map(lambda x: x[None], steps.evaluate(problem, params, batch))

    @partial(jax.jit, donate_argnums=0)
    def update(state: State, shares: list[Any]) -> tuple[State, Metrics]:
        return steps.update(problem, state, *_total(shares))

    def to_master(tree: Any) -> list[Any]:
        """Copy every device's part of a tree to the master."""

        def part(x: jax.Array, device: jax.Device) -> jax.Array:
            return next(shard.data for shard in x.addressable_shards if shard.device == device)

        parts = [jax.tree.map(partial(part, device=device), tree) for device in devices]
        return jax.device_put(parts, master)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        sent = jax.device_put(state._replace(optimizer=find_scale(state.optimizer)), everywhere)
        weight = jax.device_put(steps.batch_weight(batch), everywhere)
        return update(state, to_master(waiting_share(sent, batch, weight)))

    def evaluate(state: State, batch: Batch) -> Sums:
        return add_up(to_master(waiting_sums(jax.device_put(state.params, everywhere), batch)))

    def programs() -> list[CompiledProgram]:
        sent = with_shardings(placed.abstract._replace(optimizer=find_scale(placed.abstract.optimizer)), everywhere)
        weight = with_shardings(jax.ShapeDtypeStruct((), jnp.float32), everywhere)
        gradient = share.lower(sent, with_shardings(problem.batch, by_replica(mesh)), weight).compile()
        shares = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), gradient.out_info)
        shares = [with_shardings(shares, master)] * len(devices)
        return [CompiledProgram(gradient), CompiledProgram(update.lower(placed.abstract, shares).compile())]

    add_up = jax.jit(_total)
    waiting_share, waiting_sums = meshes.one_at_a_time(share, mesh), meshes.one_at_a_time(share_of_sums, mesh)
    return Strategy(
        plan,
        tuple(devices),
        init=placed.init,
        place=batch_placer(mesh),
        step=step,
        evaluate=evaluate,
        to_canonical=placed.to_canonical,
        from_canonical=placed.from_canonical,
        compile=programs,
    )


def _total(shares: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0])[0], *shares)
