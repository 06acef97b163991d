"""Cuts the layers of a model into stages of consecutive layers, with balanced costs or at given layers."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import UserError, nearest
from jaxpar.measure import flops
from jaxpar.models.model import Activations, Batch, Model, Params
from jaxpar.tasks.token_logits import whole

METHODS = ("uniform", "parameters", "flops", "narrow")
AUTO = "auto"  # by a profile; jaxpar/choose replaces it by layer names


def stage_bounds(model: Model, batch: Batch, inputs: Sequence[Any], method: str, num_stages: int) -> tuple[int, ...]:
    """Return the layer bounds of the stages: stage j is layers[bounds[j]:bounds[j + 1]].

    Raises UserError if the model has fewer layers than stages, if the cut points are not layer names in order, or if
    the activations at a cut have an array that is not floating-point.

    Args:
      model: the model to cut.
      batch: shapes of a batch, for counting FLOPs.
      inputs: inputs of every layer: model.inputs(batch).
      method: uniform balances the number of layers, parameters the number of parameters, and flops the FLOPs of the
        most expensive stage. narrow balances the FLOPs too, but cuts only where the activations are smallest, such as
        at the bottlenecks of a model. Any other value lists the first layers of stages 1, 2, .., separated by commas.
      num_stages: number of stages of the whole pipeline.
    """
    cuts = explicit_cuts([layer.name for layer in model.layers], method, num_stages)
    if cuts is not None:
        bounds = (0, *cuts, len(model.layers))
    else:
        by_layer = {"uniform": uniform, "parameters": parameters}
        costs = by_layer[method](model) if method in by_layer else layer_flops(model, batch, inputs)
        is_narrow = method == "narrow"
        starts = _narrow_starts(model, inputs, num_stages) if is_narrow else list(range(len(costs)))
        chosen = balanced(np.add.reduceat(costs, starts).tolist(), num_stages)
        bounds = tuple([*starts, len(costs)][start] for start in chosen)
    for begin in bounds[1:-1]:
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(inputs[begin])]
        if other := next((dtype for dtype in dtypes if not jnp.issubdtype(dtype, jnp.inexact)), None):
            raise UserError(
                f"config.pipeline.partition is {method!r}, which cuts before {model.layers[begin].name}; it must cut "
                f"elsewhere, because the input of {model.layers[begin].name} is {other}, which has no gradient"
            )
    return bounds


def _narrow_starts(model: Model, inputs: Sequence[Any], num_stages: int) -> list[int]:
    """Return layer 0 and the layers whose input is smallest, at which stages can start. Raises UserError if too few."""
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x)) for x in inputs]
    starts = [0, *(index for index in range(1, len(sizes)) if sizes[index] == min(sizes[1:]))]
    if len(starts) < num_stages:
        names = ", ".join(model.layers[index].name for index in starts[1:])
        raise UserError(
            f"config.pipeline.partition is 'narrow'; it must be another method for {num_stages} stages, because the "
            f"input is smallest only at {names}"
        )
    return starts


def explicit_cuts(names: Sequence[str], method: str, num_stages: int) -> list[int] | None:
    """Return the cut points that `method` lists, as layer indices; None if it is one of METHODS. Raises UserError."""
    if num_stages > len(names):
        raise UserError(
            f"config.mesh.stage x config.pipeline.num_chunks is {num_stages} stages; it must be at most "
            f"{len(names)}, the number of layers of the model ({names[0]} .. {names[-1]})"
        )
    if method in METHODS:
        return None
    cuts = [cut.strip() for cut in method.split(",")]
    values = f"config.pipeline.partition is {method!r}; it must be one of {', '.join((*METHODS, AUTO))}, or"
    if unknown := [cut for cut in cuts if cut not in names]:
        hint = nearest(unknown[0], [*METHODS, *names])
        raise UserError(
            f"{values} list the first layers of stages 1, 2, .. (layers after {names[0]}, up to {names[-1]}), "
            f"separated by commas; {unknown[0]!r} is not a layer{hint and '.' + hint}"
        )
    indices = [names.index(cut) for cut in cuts]
    if len(cuts) != num_stages - 1 or not np.all(np.diff([0, *indices]) > 0):
        raise UserError(
            f"{values} the first layer of each stage but the first ({num_stages - 1} layers), in model order and after "
            f"{names[0]}"
        )
    return indices


def uniform(model: Model) -> list[int]:
    """Return a cost of 1 for every layer."""
    return [1] * len(model.layers)


def parameters(model: Model) -> list[int]:
    """Return the number of parameters of every layer.

    A tied array counts in every layer that uses it, because every stage that uses it holds a copy.
    """
    return [sum(leaf.size for leaf in jax.tree.leaves(layer.shapes)) for layer in model.layers]


def layer_flops(model: Model, batch: Batch, inputs: Sequence[Any]) -> list[int]:
    """Return the forward FLOPs of every layer. inputs: inputs of every layer: model.inputs(batch)."""
    shapes, starts = model.shapes, {run.start for run in model.runs}
    costs: list[int] = []
    for index, x in enumerate(inputs):
        if index not in starts and x == inputs[index - 1]:  # same layer, same input shapes
            costs.append(costs[-1])
            continue

        def layer(params: Params, x: Activations, batch: Batch, index: int = index) -> Any:
            return whole(model.apply_layers(params, x, batch, None, index, index + 1))  # logits as one array

        costs.append(flops.forward_flops(layer, shapes, x, dict(batch)))
    return costs


def balanced(costs: Sequence[int], num_stages: int, last: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the bounds that minimize the cost of the most expensive stage, then the sum of squared stage costs.

    Every stage has at least one layer. Uses dynamic programming over (stages, layers), as in Narayanan et al.,
    PipeDream (SOSP'19), section 3.1. last: the costs of the layers in the last stage, if they differ.
    """
    sums, in_last = ([0, *itertools.accumulate(of)] for of in (costs, last or costs))
    num_layers = len(costs)
    # best[stop] = (most expensive stage, sum of squares, bounds) of the first `stages` stages over layers[:stop]
    best: dict[int, tuple[int, int, tuple[int, ...]]]
    best = {stop: (sums[stop], sums[stop] ** 2, (0, stop)) for stop in range(1, num_layers + 1)}
    for stages in range(2, num_stages + 1):
        sums = in_last if stages == num_stages else sums
        best = {
            stop: min(
                (
                    max(best[cut][0], sums[stop] - sums[cut]),
                    best[cut][1] + (sums[stop] - sums[cut]) ** 2,
                    (*best[cut][2], stop),
                )
                for cut in range(stages - 1, stop)
            )
            for stop in range(stages, num_layers + 1)
        }
    return best[num_layers][2]
