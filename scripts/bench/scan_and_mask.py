"""The reference for pipelines: the common implementation as a scan with masks, differentiated by `jax.grad`.

In each of m + p - 1 ticks, every device computes its stage, even without a valid microbatch, and sends its output to
the next device. Autodiff derives the backward pass, so all m microbatches are in flight. The layers before and after
the run of equal layers are computed outside the loop, with the microbatches sharded over the devices, as in MaxText.
Dropout is not supported.

Array dims: B examples, T positions, D features; a leading m: microbatches, t: ticks.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpar.cluster import devices
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.mesh import STAGE
from jaxpar.core.state import State
from jaxpar.core.step import Metrics, Problem
from jaxpar.models.model import Batch, Model, Params
from jaxpar.tasks import Sums, mean_loss


class ScanAndMask(NamedTuple):
    """The part of a strategy that a benchmark needs. `jitted` is the jitted step, which can be lowered."""

    init: Any
    place: Any
    step: Any
    jitted: Any


def build(config: ConfigDict, problem: Problem) -> ScanAndMask:
    """Build the pipeline for config.mesh.stage, config.pipeline.num_microbatches and config.pipeline.remat.

    Raises:
      ValueError: the number of equal layers or of microbatches is not a multiple of the number of devices.
    """
    p, m = config.mesh.stage, config.pipeline.num_microbatches
    model, mesh = problem.model, meshes.make_mesh({meshes.DATA: 1, STAGE: p}, devices())
    run = max(model.runs, key=len)
    if len(run) % p or m % p:
        raise ValueError(f"{len(run)} equal layers and {m} microbatches must be multiples of {p} devices")
    replicated, staged = PartitionSpec(), PartitionSpec(STAGE)
    specs = {"outer": replicated, "blocks": staged}
    mapped = jax.shard_map(
        partial(_gradients, problem, run, p, config.pipeline.remat),
        mesh=mesh,
        in_specs=(specs, replicated, replicated),
        out_specs=(specs, replicated),
        check_vma=False,
    )

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        grads, sums = mapped(state.params, steps.microbatches(batch, m), batch["weights"].sum())
        return steps.update(problem, state, grads, sums)

    def init(key: jax.Array) -> State:
        state = states.init(model, problem.optimizer, key)
        params = _stack(model, run, p, state.params)
        return state._replace(params=params, optimizer=problem.optimizer.init(params))

    def sharding(path: Any, _leaf: Any) -> NamedSharding:
        is_staged = any(getattr(part, "key", None) == "blocks" for part in path)
        return NamedSharding(mesh, staged if is_staged else replicated)

    shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(init, jax.random.key(0)))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, replicated)))
    return ScanAndMask(
        init=jax.jit(init, out_shardings=shardings),
        place=lambda batch: jax.device_put(dict(batch), NamedSharding(mesh, replicated)),
        step=meshes.one_at_a_time(jitted, mesh),
        jitted=jitted,
    )


def _stack(model: Model, run: range, p: int, params: Params) -> dict[str, Any]:
    """Return the parameters with the equal layers stacked as [p, layers of a stage, ...]."""
    names = [layer.name for layer in model.layers[run.start : run.stop]]
    blocks = jax.tree.map(
        lambda *leaves: jnp.stack(leaves).reshape(p, -1, *leaves[0].shape), *[params[name] for name in names]
    )
    return {"outer": {name: params[name] for name in params if name not in names}, "blocks": blocks}


def _gradients(
    problem: Problem, run: range, p: int, remat: str, params: dict[str, Any], batch_m: Batch, weight: jax.Array
) -> tuple[dict[str, Any], Sums]:
    """Compute on each device the gradients of its stage and of the outer layers, and the sums over all devices."""
    model, stage, per_stage = problem.model, jax.lax.axis_index(STAGE), len(run) // p
    m = batch_m["index"].shape[0]
    blocks = jax.tree.map(lambda leaf: leaf[0], params["blocks"])
    # The device's shard for the layers outside the loop: m / p microbatches as one batch.
    share = {name: jax.lax.dynamic_slice_in_dim(x, stage * (m // p), m // p) for name, x in batch_m.items()}
    share = {name: x.reshape(-1, *x.shape[2:]) for name, x in share.items()}

    def compute(blocks: Any, x_BTD: jax.Array, batch: Batch) -> jax.Array:
        names = [layer.name for layer in model.layers[run.start : run.start + per_stage]]
        weights = {name: jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i, name in enumerate(names)}
        return model.apply_layers(weights, x_BTD, batch, None, run.start, run.start + per_stage, scan=False)

    if remat == "full":
        compute = jax.checkpoint(compute, prevent_cse=False)

    def local_loss(outer: Params, blocks: Any) -> tuple[jax.Array, Sums]:
        x = model.apply_layers(outer, share["inputs"], share, None, 0, run.start)
        x_mBTD = jax.lax.all_gather(x.reshape(m // p, -1, *x.shape[1:]), STAGE, tiled=True)

        def tick(received_BTD: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            number, fresh_BTD = now
            mine = jnp.clip(number - stage, 0, m - 1)  # outside the range, the result is computed but not used
            x_BTD = jnp.where(stage == 0, fresh_BTD, received_BTD)
            y_BTD = compute(blocks, x_BTD, {name: x[mine] for name, x in batch_m.items()})
            return jax.lax.ppermute(y_BTD, STAGE, [(i, (i + 1) % p) for i in range(p)]), y_BTD

        fresh_tBTD = jnp.concatenate([x_mBTD, jnp.zeros_like(x_mBTD[: p - 1])])
        _, y_tBTD = jax.lax.scan(tick, jnp.zeros_like(x_mBTD[0]), (jnp.arange(m + p - 1), fresh_tBTD))
        y_mBTD = jnp.where(stage == p - 1, y_tBTD[p - 1 :], 0)
        y = jax.lax.psum_scatter(y_mBTD, STAGE, tiled=True)
        logits = model.apply_layers(outer, y.reshape(-1, *y.shape[2:]), share, None, run.stop, len(model.layers))
        sums = problem.task.sums(logits, share)
        return mean_loss(sums.loss, weight), sums

    (outer_unreduced, grads), sums = jax.grad(local_loss, (0, 1), has_aux=True)(params["outer"], blocks)
    grads = jax.tree.map(lambda leaf: leaf[None], grads)
    return {"outer": jax.lax.psum(outer_unreduced, STAGE), "blocks": grads}, jax.lax.psum(sums, STAGE)
