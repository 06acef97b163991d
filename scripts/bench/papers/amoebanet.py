"""Counts the parameters, FLOPs and bytes of each layer of AmoebaNet-D (L, D), for the pipelines of GPipe's tables.

The cells are those that torchgpipe benchmarks (kakaobrain/torchgpipe at a4710261, benchmarks/models/amoebanet), whose
numbers of parameters equal those of the paper. A cell concatenates its branches, and reads its two predecessors.
"""

from typing import NamedTuple

SIDE = 224  # pixels of an image's side


class ConvLayer(NamedTuple):
    """The convolutions of a layer: parameters, with those of batch normalization, and costs of an image forward."""

    parameters: int
    flops: float
    nbytes: float  # bytes that activation, convolution and normalization read and write
    saved: float  # bytes that they keep for the backward pass: what convolutions read and write
    inputs: float = 0.0  # bytes of what the layer reads from the layers before it


def _conv(inputs: int, outputs: int, kernel: int, pixels: int, strided: int | None = None) -> ConvLayer:
    """Return ReLU, a convolution from `pixels` to as many or `strided` ones, and batch normalization."""
    weights, after = inputs * outputs * kernel, strided or pixels
    moved = 4.0 * (3 * inputs * pixels + 4 * outputs * after)
    saved = 4.0 * (inputs * pixels + outputs * after)
    return ConvLayer(weights + 2 * outputs, 2.0 * weights * after, moved, saved)


def _bottleneck(channels: int, kernels: tuple[int, ...], before: int, after: int) -> list[ConvLayer]:
    """Return 1x1, convolutions of a quarter of the channels, and 1x1; pixels `before` and `after` their strides."""
    quarter = channels // 4
    first = _conv(quarter, quarter, kernels[0], before, after)
    others = [_conv(quarter, quarter, kernel, after) for kernel in kernels[1:]]
    return [_conv(channels, quarter, 1, before), first, *others, _conv(quarter, channels, 1, after)]


def _sum(convolutions: list[ConvLayer], inputs: float) -> ConvLayer:
    parameters, flops, nbytes, saved, _ = zip(*convolutions, strict=True)
    return ConvLayer(sum(parameters), sum(flops), sum(nbytes), sum(saved), inputs)


def amoebanet(num_layers: int, filters: int, num_classes: int = 1000) -> list[ConvLayer]:
    """Return the layers: three of the stem, `num_layers` normal cells in three groups with reductions, classifier."""
    channels, side = filters // 4, SIDE // 2
    layers = [_conv(3, channels, 9, SIDE**2, side**2)._replace(inputs=4.0 * 3 * SIDE**2)]
    before_previous = previous = channels
    was_reduction = False
    group = ["normal"] * (num_layers // 3)
    for kind in ["reduction"] * 2 + group + ["reduction"] + group + ["reduction"] + group:
        reduces = kind == "reduction"
        channels *= 2 if reduces else 1
        pixels, half = side**2, (side // 2) ** 2
        cell = [_conv(previous, channels, 1, pixels)]
        before = 4 * pixels if was_reduction else pixels
        inputs = 4.0 * (previous * pixels + before_previous * before)
        if was_reduction or before_previous != channels:  # a factorized reduction is two convolutions of half the width
            cell.append(_conv(before_previous, channels, 1, before, pixels))
        if reduces:
            cell += [_conv(channels, channels, 1, half), *_bottleneck(channels, (9,), pixels, half)]
            cell += _bottleneck(channels, (7, 7), half, half)
        else:
            cell += [_conv(channels, channels, 1, pixels)] * 3
            cell += _bottleneck(channels, (7, 7), pixels, pixels) * 2
        layers.append(_sum(cell, inputs))
        before_previous, previous, was_reduction = previous, channels * (3 if reduces else 4), reduces
        side //= 2 if reduces else 1
    classifier = (previous + 1) * num_classes
    values = 4.0 * (previous * side**2 + num_classes)
    return [*layers, ConvLayer(classifier, 2.0 * classifier, values, values, 4.0 * previous * side**2)]
