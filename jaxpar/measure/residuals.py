"""Counts what a function holds for its backward pass, as JAX differentiates it, without executing it.

`jax.vjp` decides what the forward pass saves, and a scan stacks all of it. Without a scan, XLA fuses elementwise
operations into the kernels that read their results, forward and backward. It then holds what other kernels write or
read anyway. A pipeline recomputes other values (jaxpar/strategies/pipeline/executor).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.measure.operations import KERNELS, PRODUCTS, REDUCTIONS, FlatEquation, FlatJaxpr

READING = (*KERNELS, "random_bits", "threefry2x32")  # operations whose operands and results are arrays in memory


class Residuals(NamedTuple):
    """Bytes that a function holds besides its weights.

    Attributes:
      saved: what the forward pass saves for the backward pass, with its input.
      fused: the same without a scan, where XLA repeats elementwise operations in the backward pass.
      looped: of the loop that needs most, the results of the products of an iteration, and what was computed for them.
    """

    saved: float
    fused: float
    looped: float


def residuals(function: Callable[[Any, Any, Any], Any], weights: Any, x: Any, others: Any) -> Residuals:
    """Return the residuals of a function of weights, an input and others, which are not differentiated.

    Copies of the weights in another dtype are not counted, and an array that is saved in two shapes counts once.

    Args:
      function: (weights, x, others) -> results.
      weights: arrays or their shapes.
      x: arrays or their shapes; they are differentiated if they are floats.
      others: arrays or their shapes.
    """
    has_gradient = all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x))

    def forward(weights: Any, x: Any, others: Any) -> tuple[Any, Any]:
        if has_gradient:
            y, backward = jax.vjp(lambda weights, x: function(weights, x, others), weights, x)
        else:
            y, backward = jax.vjp(lambda weights: function(weights, x, others), weights)
        return jax.tree.leaves(y), jax.tree.leaves(backward)

    traced, (outputs, _) = jax.make_jaxpr(forward, return_shape=True)(weights, x, others)
    flat = FlatJaxpr(traced.jaxpr)
    num_weights, num_inputs = len(jax.tree.leaves(weights)), len(jax.tree.leaves(x))
    of_weights = _computed_from(flat, set(range(num_weights)))
    inputs = flat.inputs - (set(range(num_weights, num_weights + num_inputs)) if has_gradient else set())
    saved = {number for number in flat.output_numbers[len(outputs) :] if number is not None}
    ignored = of_weights | inputs
    fused = _fused(flat, saved - ignored, ignored)
    nbytes_saved, nbytes_fused = (
        float(sum(flat.nbytes[number] for number in numbers)) for numbers in (saved - ignored, fused)
    )
    return Residuals(nbytes_saved, nbytes_fused, max(map(_looped_bytes, flat.equations), default=0.0))


def _fused(flat: FlatJaxpr, saved: set[int], ignored: set[int]) -> set[int]:
    """Return the arrays that are held instead of those that are saved, if elementwise operations are repeated.

    An array that no kernel needs in memory is computed again from those that are, if these take no more memory.
    """
    writers = {number: one for one in flat.equations for number in one.written}
    in_memory = set(flat.inputs)
    for one in flat.equations:
        name = one.equation.primitive.name
        if name in (*READING, *REDUCTIONS):
            in_memory.update(one.written)
        if name in READING:
            in_memory.update(one.read)
    held = saved & in_memory
    for number in sorted(saved - in_memory, key=lambda number: -flat.nbytes[number]):
        sources = _sources(number, writers, in_memory) - ignored - held
        is_cheaper = sum(flat.nbytes[source] for source in sources) <= flat.nbytes[number]
        held |= sources if is_cheaper else {number}
    return held


def _sources(number: int, writers: Mapping[int, FlatEquation], in_memory: set[int]) -> set[int]:
    """Return the arrays in memory from which elementwise operations compute an array."""
    sources, seen, left = set[int](), {number}, [number]
    while left:
        for read in writers[left.pop()].read:
            if read in seen:
                continue
            seen.add(read)
            if read in in_memory or read not in writers:
                sources.add(read)
            else:
                left.append(read)
    return sources


def _computed_from(flat: FlatJaxpr, numbers: set[int]) -> set[int]:
    """Return the numbers of these arrays, and of those that are computed from nothing else."""
    found = set(numbers)
    for one in flat.equations:
        if one.read and found.issuperset(one.read):
            found.update(one.written)
    return found


def _looped_bytes(one: FlatEquation) -> float:
    """Return the bytes of the results of the products in a scan's body, and of operands that are computed there."""
    if one.equation.primitive.name != "scan":
        return 0.0
    body, arrays = FlatJaxpr(one.equation.params["jaxpr"].jaxpr), set[int]()
    for inner in body.equations:
        if inner.equation.primitive.name in PRODUCTS:
            arrays.update(inner.written, set(inner.read) - body.inputs)
    return float(sum(body.nbytes[number] for number in arrays))
