"""Whether a plan fits the memory of its devices, what would help, and what a step needs besides the plan's arrays."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.cluster import Cluster
from jaxpar.core.mesh import GROUP_AXES, TENSOR
from jaxpar.core.plan import ACTIVATION_PARTS, ON_HOST, Plan
from jaxpar.core.state import nbytes
from jaxpar.core.step import Problem, abstract_share, dropout_key, example_keys
from jaxpar.errors import UserError, format_bytes
from jaxpar.layout import SHARDED
from jaxpar.models.model import Batch, Params


def check_memory(plan: Plan[object], cluster: Cluster) -> None:
    """Raise UserError for a plan that needs more memory than there is. Accept any plan if the memory is unknown.

    A GPU has its own memory. The CPU devices of a process share the memory of its machine, which also holds what other
    devices keep on the host. Other processes may be on other machines, so what they need is not counted.
    """
    if cluster.memory_bytes is None:
        return
    shared = cluster.platform == "cpu"
    size = -(-cluster.num_devices // cluster.num_processes) if shared else 1
    groups = [range(first, min(first + size, plan.num_devices)) for first in range(0, plan.num_devices, size)]
    totals: list[Counter[str]] = []  # bytes of each group by purpose
    for group in groups:
        totals.append(Counter())
        for device in group:
            totals[-1].update(
                {part: n for part, n in plan.memory[device].items() if shared or not part.endswith(ON_HOST)}
            )
            if not shared:
                totals[-1]["gradients and optimizer state during the update"] += plan.update_bytes
    parts = max(totals, key=Counter.total)
    needed, devices = parts.total(), groups[totals.index(parts)]
    if needed <= cluster.memory_bytes:
        return
    where = f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]} to {devices[-1]}"
    owner = "this machine" if shared else cluster.device_kind
    listed = ", ".join(f"{part} {format_bytes(n)}" for part, n in parts.items() if n)
    raise UserError(
        f"config.strategy is {plan.strategy!r}, which needs {format_bytes(needed)} on {where} ({listed}); it must fit "
        f"in {format_bytes(cluster.memory_bytes)}, the memory of {owner}; " + _relief(plan, parts, shared)
    )


def _relief(plan: Plan[object], parts: Mapping[str, int], shared: bool) -> str:
    """Return advice on how to reduce the memory of devices that hold these parts, and that may share one memory."""
    if sum(parts.get(part, 0) for part in ACTIVATION_PARTS) > sum(parts.values()) / 2:
        return (
            "try a higher config.pipeline.num_microbatches, config.pipeline.remat='full' or a lower config.batch_size"
        )
    ways = ["a smaller config.model"]
    if not shared:
        ways.insert(0, "more stages (config.strategy='pipeline', config.mesh.stage)")
    elif plan.num_replicas > 1:
        ways.insert(0, "fewer replicas (config.mesh.data)")
    is_whole = plan.layouts["params"].kind != SHARDED and not any(part in parts for part in ACTIVATION_PARTS)
    if is_whole and not (shared and plan.num_replicas == 1):
        ways.insert(0, "a sharded state (config.strategy='data_parallel', config.exchange='zero3')")
    return "try " + " or ".join(ways)


def in_flight_bytes(plan: Plan[Any], shapes: Problem) -> dict[str, int]:
    """Return an estimate of the bytes that a step needs on a device in addition to plan.memory, by purpose.

    Gradients have the size of the parameters; ZeRO, which accumulates shards of them from stage 2 on, needs less.
    Activations are the values that the forward pass of a microbatch saves, without the parameters, according to the
    traced model, divided between the devices of a group; a microbatch is the smallest part of a batch that the
    batch divisor allows, of one worker or all stages of a swarm. The stashes of a pipeline are part of plan.memory
    instead, and so are its gradients if it never drains. XLA may store less, or temporarily more, so these estimates
    never cause a plan to be refused.
    """
    memory = plan.memory[0]
    if any(part in memory for part in ACTIVATION_PARTS):
        return {} if "gradients" in memory else {"gradients": memory["parameters"]}

    def saved(state_key: jax.Array, params: Params, shard: Batch) -> Any:
        keys_B = example_keys(dropout_key(state_key, jnp.zeros((), jnp.int32)), shard)
        return jax.vjp(lambda p: shapes.task.sums(shapes.model.outputs(p, shard, keys_B), shard).loss, params)[1]

    params = plan.layouts["params"]
    of_tensor = [
        one._replace(splits=tuple(split for split in one.splits if split.axis == TENSOR)) for one in params.flat
    ]
    state_key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    share = abstract_share(shapes.batch, plan.decision.batch_divisor)
    traced, saved_shapes = jax.make_jaxpr(saved, return_shape=True)(state_key, shapes.model.shapes, share)
    inputs = {id(variable) for variable in (*traced.jaxpr.invars, *traced.jaxpr.constvars)}
    # A dict, because some arrays are saved twice.
    arrays = dict(zip(map(id, traced.jaxpr.outvars), jax.tree.leaves(saved_shapes), strict=True))
    activations = nbytes([x for variable, x in arrays.items() if variable not in inputs])
    gathered = {"gathered parameters": plan.gathered_bytes} if plan.gathered_bytes else {}
    return {
        "gradients": sum(leaf.local_nbytes(plan.axes) for leaf in of_tensor),
        "activations": activations // math.prod(plan.axes.get(axis, 1) for axis in GROUP_AXES),
        **gathered,
    }
