"""Predicts the memory of a training step on a CPU, from that of each layer (jaxpar/measure/early_memory.py).

The backward pass goes from the last layer to the first. While it computes a layer, the layers before it hold what their
forward pass has left, and the layers after it their gradients.
"""

from collections.abc import Sequence
from itertools import pairwise

import jax

from jaxpar.choose.costs.step import StateBytes
from jaxpar.measure.early_memory import PassMemory
from jaxpar.models.model import Layer, LayerRun, Model
from jaxpar.state import nbytes


def backward_bytes(passes: Sequence[PassMemory], weights: Sequence[float]) -> float:
    """Return the most bytes that a backward pass needs, with the gradients of layers that have been computed.

    Args:
      passes: the memory of each layer.
      weights: bytes of the gradient of each layer.
    """
    held, gradients, most = sum(layer.held for layer in passes), 0.0, 0.0
    for layer, weight in zip(reversed(passes), reversed(weights), strict=True):
        held -= layer.held
        most = max(most, held + layer.peak + gradients)
        gradients += weight
    return most


def cpu_replica_bytes(
    passes: Sequence[PassMemory],
    gradients: Sequence[float],
    state: StateBytes,
    *,
    is_accumulated: bool,
    copies: float,
    updated: float,
) -> float:
    """Return the bytes of a replica.

    Args:
      passes: the memory of each layer, for the examples of a microbatch.
      gradients: bytes of the gradient of each layer that exist until all have been computed.
      state: the state on a device.
      is_accumulated: whether gradients of microbatches are added up.
      copies: bytes of copies of parameters and gradients: see `stacked_bytes` and `gathered_bytes`.
      updated: bytes of the parameters that this device updates. Their gradient divided by its norm is an array, because
        several instructions read it.
    """
    accumulated = state.gradients if is_accumulated else 0.0
    computing = accumulated + copies + backward_bytes(passes, gradients)
    updating = state.gradients + updated
    return state.parameters + state.optimizer + max(computing, updating)


def stacked_bytes(model: Model) -> float:
    """Return the bytes of the stacks of parameters, and of their gradients, that a scan over the layers needs."""
    return 2.0 * sum(nbytes([layer.shapes for layer in _layers(model, run)]) for run in model.runs if is_run(run))


def is_run(run: LayerRun) -> bool:
    """Return whether a run has several layers, which a scan can compute."""
    return run.stop - run.start > 1


def gathered_bytes(model: Model, bucket_bytes: int) -> float:
    """Return the bytes of all parameters that zero3 gathers, which programs for CPUs do before they compute a layer.

    Arrays smaller than a bucket of `bucket_bytes` bytes are gathered in a vector, from which they are then copied.
    """
    sizes = [nbytes(array) for array in jax.tree.leaves(model.shapes)]
    return float(sum(2 * size if size < bucket_bytes else size for size in sizes))


def without_zeros(passes: Sequence[PassMemory], model: Model) -> list[PassMemory]:
    """Return the memory of layers if XLA adds the gradient of a lookup to that of the layer that shares its table.

    Then there are no zeros to which it is added.
    """
    tied = {(tie.source, tie.source_name) for tie in model.ties}
    saved = dict.fromkeys((layer.name for layer in model.layers), 0.0)
    for layer, name in tied:
        saved[layer] += nbytes(model.shapes[layer][name])
    return [
        PassMemory(max(of.held - saved[layer.name], 0.0), max(of.peak - saved[layer.name], 0.0))
        for layer, of in zip(model.layers, passes, strict=True)
    ]


def _layers(model: Model, run: LayerRun) -> Sequence[Layer]:
    return model.layers[run.start : run.stop]


def cpu_pipeline_bytes(
    passes: Sequence[PassMemory],
    kept: Sequence[float],
    weights: Sequence[float],
    bounds: Sequence[int],
    stashes: float,
    state: StateBytes,
) -> float:
    """Return the bytes of a device of a pipeline.

    Args:
      passes: the memory of the backward pass of each layer.
      kept: bytes of each layer that an action holds while it computes another layer of the stage.
      weights: bytes of the parameters of each layer. The gradient of a layer exists before it is added to the others.
      bounds: first layer of each stage, and the number of layers.
      stashes: bytes of stashes and transfers.
      state: the state on the device.
    """
    working = 0.0
    for first, end in pairwise(bounds):
        held = sum(kept[first:end])
        peaks = (held - mine + layer.peak for layer, mine in zip(passes[first:end], kept[first:end], strict=True))
        working = max(working, *peaks)
    computing = stashes + working + max(weights)
    return sum(state) + computing
