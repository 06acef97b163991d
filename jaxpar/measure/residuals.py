"""Counts what a function holds for its backward pass, as JAX differentiates it, without executing it.

`jax.vjp` decides what the forward pass saves. A pipeline recomputes some of that (jaxpar/pipeline/executor), so its
stages save less.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.measure.operations import PRODUCTS, FlatJaxpr


class Residuals(NamedTuple):
    """Bytes that a function holds besides its weights.

    Attributes:
      saved: what the forward pass saves for the backward pass, with its input.
      looped: of the loop that needs most, the results of the products of an iteration, and what was computed for them.
    """

    saved: float
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
    nbytes = sum(flat.nbytes[number] for number in saved - of_weights - inputs)
    return Residuals(float(nbytes), max(map(_looped_bytes, flat.equations), default=0.0))


def _computed_from(flat: FlatJaxpr, numbers: set[int]) -> set[int]:
    """Return the numbers of these arrays, and of those that are computed from nothing else."""
    found = set(numbers)
    for one in flat.equations:
        if one.read and found.issuperset(one.read):
            found.update(one.written)
    return found


def _looped_bytes(one: Any) -> float:
    """Return the bytes of the results of the products in a scan's body, and of operands that are computed there."""
    if one.equation.primitive.name != "scan":
        return 0.0
    body, arrays = FlatJaxpr(one.equation.params["jaxpr"].jaxpr), set[int]()
    for inner in body.equations:
        if inner.equation.primitive.name in PRODUCTS:
            arrays.update(inner.written, set(inner.read) - body.inputs)
    return float(sum(body.nbytes[number] for number in arrays))
