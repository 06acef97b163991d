"""Predicts the memory of a training step of replicas on a GPU, from what each layer holds for its backward pass.

The backward pass goes from the last layer to the first. While it computes a layer, the layers before it hold what their
forward pass has saved, and those after it their gradients. A scan over layers holds the gradients of all of them, and
their weights: in the dtype in which they are read, or whole with rematerialization, which reads them again.
"""

from collections.abc import Iterator, Sequence

from jaxpar.analysis.planner.layers import Layers
from jaxpar.analysis.planner.predict import StateBytes
from jaxpar.measure.residuals import Residuals
from jaxpar.models.model import Model


def gpu_replica_bytes(
    layers: Layers,
    model: Model,
    state: StateBytes,
    size: int,
    remat: str,
    *,
    is_scanned: bool,
    is_accumulated: bool,
    gathers_layers: bool,
) -> float:
    """Return the bytes of a replica on a GPU.

    Args:
      layers: the layers.
      model: the model.
      state: the state on a device.
      size: examples of a microbatch.
      remat: none, full or dots.
      is_scanned: whether equal layers are computed by a scan.
      is_accumulated: whether the gradients of microbatches are added up.
      gathers_layers: whether the parameters are gathered layer by layer (zero3).
    """
    profile = layers.profile(size, remat)
    saved = layers.residuals(size, remat)
    whole = layers.residuals(size, "none")
    working = [_working(of, layer.output_bytes) for of, layer in zip(whole, profile, strict=True)]
    weights = [float(layer.weight_bytes) for layer in profile]
    narrowed = [of.narrowed for of in layers.memory(size, remat, is_split=False)]
    scans = _scans(model, is_scanned=is_scanned or gathers_layers)
    copied = [
        weight if len(scan) > 1 and (remat != "none" or not narrow) else narrow
        for scan, weight, narrow in zip(scans, weights, narrowed, strict=True)
    ]
    if gathers_layers:
        sums = list(_with_shards(weights, narrowed, state.gradients / sum(weights), scans))
    else:
        sums = [sum(copied) + of_gradients for of_gradients in _whole_gradients(weights, whole, scans)]
    stacked = [of.saved if len(scan) > 1 else of.fused for of, scan in zip(saved, scans, strict=True)]
    held = [sum(stacked[: number + 1]) for number in range(len(stacked))]
    peak = max(map(sum, zip(held, working, sums, strict=True)))
    return state.parameters + state.optimizer + (state.gradients if is_accumulated else 0.0) + peak


def _working(of: Residuals, output_bytes: float) -> float:
    """Return what the backward pass of a layer holds besides what was saved.

    That is as much as it saves without rematerialization, for gradients or because it computes it again. The loss of a
    large vocabulary has computed its gradient in the forward pass, chunk by chunk.
    """
    return of.looped if of.looped else of.fused + output_bytes


def _scans(model: Model, *, is_scanned: bool) -> list[range]:
    """Return, for each layer, the numbers of the layers that are computed with it in one scan, or only its own."""
    scans: list[range] = []
    for run in model.runs:
        together = range(run.start, run.stop)
        scans += [together if is_scanned else range(number, number + 1) for number in together]
    return scans


def _whole_gradients(weights: Sequence[float], whole: Sequence[Residuals], scans: Sequence[range]) -> Iterator[float]:
    """Yield the bytes of the gradients that exist while each layer is computed."""
    for scan, of in zip(scans, whole, strict=True):
        # That of a loss in chunks is among what is saved.
        yield sum(weights[scan.stop :]) + (0.0 if of.looped else sum(weights[scan.start : scan.stop]))


def _with_shards(
    weights: Sequence[float], narrowed: Sequence[float], share: float, scans: Sequence[range]
) -> Iterator[float]:
    """Yield the bytes of gathered arrays and of gradients that exist while each layer is computed.

    The arrays of this layer and of the next one are gathered, in the dtype in which they are read, and the gradient is
    whole until it is scattered. The shards of the layers of a scan are stacked, and those of their gradients. XLA makes
    the zeros early to which the gradient of a lookup, in the first layer, is added.
    """
    stacked = 2 * share * sum(weights[number] for number, scan in enumerate(scans) if len(scan) > 1)
    for number, (scan, weight, narrow) in enumerate(zip(scans, weights, narrowed, strict=True)):
        gathered = 2 * (narrow or weight) + weight
        yield stacked + gathered + share * sum(weights[scan.stop :]) + (weights[0] if number else 0.0)
