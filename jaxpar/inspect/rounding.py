"""Derives tolerances: samples the errors that rounding alone may cause, and bounds a further error by them.

Two orders of the same operations round differently. A certificate samples the effect on one device, as TTrace does
(Jiang et al., arXiv 2506.09280): what passes between layers, in both directions, is changed by one unit in the last
place at random, and so are the parameters. The examples of a batch are permuted, so that sums over them are computed in
another order. An optimizer receives changed gradients, parameters and moments.

The samples of an error are the relative errors e of a few seeds. The model of their squares is a scale, which differs
between layers and steps, times chi-squared with d degrees of freedom / d: an error has d independent components. Their
spread yields d = 2 mean(e^2)^2 / var(e^2), pooled over the layers of a step (Satterthwaite 1946). The square of a
further error divided by the mean of K samples then has the F distribution with d and d K degrees of freedom. A scalar
has d = 1.

A strategy can round twice as often as one device: the parts of a sum, and their sum. So its error can have twice the
variance of the samples. A scalar factor of a whole array, such as 1 / the weight of a batch or a learning rate, is
rounded too. So a tolerance also contains a common error of the array by one unit of float32.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from scipy import special

from jaxpar.layout import Tree

Name = TypeVar("Name", bound=Hashable)
SEEDS = range(1, 5)  # of the samples of a step; seed 0 changes nothing
FALSE_ALARM = 1e-6  # probability that rounding alone makes a certificate fail
ROUNDINGS = 2  # how often a strategy can round what one device rounds once: parts of a sum, and their sum
SCALAR_FACTOR = (2 / 3) ** 0.5 * float(np.finfo(np.float32).eps)  # standard deviation


def num_outcomes(dtype: DTypeLike) -> int:
    """Return the number of equally likely outcomes of which one is a change upwards, and another one downwards.

    In float32, all of an error is due to the changes, so most numbers are changed. Errors in 16 bits are with respect
    to float32 and contain the rounding of all operations. It suffices to draw that again, by changes with the variance
    of rounding, 1/12 of the square of a unit.
    """
    return 3 if dtype == jnp.float32 else 24


def changed(tree: Tree, seed: int) -> Tree:
    """Return NumPy arrays with floats changed by one unit in the last place at random; with seed 0 by none."""
    if seed == 0:
        return tree
    random = np.random.default_rng(seed)

    def change(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        outcome = random.integers(0, num_outcomes(leaf.dtype), leaf.shape, np.int8)
        units = (outcome == 0).astype(leaf.dtype) - (outcome == 1).astype(leaf.dtype)
        return np.asarray(leaf + leaf * (units * (jnp.finfo(leaf.dtype).eps / 2)), leaf.dtype)

    return jax.tree.map(change, tree)


def permuted(batch: Tree, seed: int) -> Tree:
    """Return a batch of NumPy arrays with its examples, along the first dim, in another order; with seed 0 as it is."""
    if seed == 0:
        return batch
    order = np.random.default_rng(seed).permutation(len(jax.tree.leaves(batch)[0]))
    return jax.tree.map(lambda array: array[order], batch)


def changed_in_program(tree: Tree, index: int | jax.Array, seed: jax.Array) -> Tree:
    """Do what `changed` does in a program, and change the cotangents too. index: of the layer that reads the tree."""
    key = jax.random.fold_in(jax.random.key(seed, impl="unsafe_rbg"), index)  # which compiles fast
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure,
        [
            _change(leaf, jax.random.fold_in(key, number), seed > 0)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
            for number, leaf in enumerate(leaves)
        ],
    )


@jax.custom_vjp
def _change(x: jax.Array, key: jax.Array, is_active: jax.Array) -> jax.Array:
    outcome = jax.random.bits(key, x.shape) % num_outcomes(x.dtype)
    units = jnp.where(is_active, (outcome == 0).astype(x.dtype) - (outcome == 1).astype(x.dtype), 0)
    half = jnp.asarray(jnp.finfo(x.dtype).eps / 2, x.dtype)
    return jnp.where(units == 0, x, x + x * (units * half))  # not infinity times 0


def _forward(x: jax.Array, key: jax.Array, is_active: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _change(x, key, is_active), (key, is_active)


def _backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    key, is_active = saved
    return _change(cotangent, jax.random.fold_in(key, 1), is_active), None, None


_change.defvjp(_forward, _backward)


def tolerances(samples: Sequence[Sequence[float]], probability: float, *, scalar: bool) -> list[float]:
    """Return a bound for each row of samples of an error, which a further one with twice the variance can exceed.

    probability: of that.

    samples: relative errors, [layers, seeds] of one step; if they are of a scalar, [steps, seeds], with one scale for
    all steps except those whose samples are larger.
    """
    squares = np.square(np.asarray(samples, np.float64))
    means, count = squares.mean(axis=1), squares.shape[1]
    if scalar:
        means, components, others = np.maximum(means, means.mean()), 1.0, float(squares.size)
    else:
        present = means > 0
        spread = (squares[present].var(axis=1, ddof=1) / means[present] ** 2).mean() if present.any() else 0.0
        components = max(2 / max(spread, 1e-6), 1.0)
        others = components * count
    # The quantile of the F distribution, from that of the share of the further error in the weighted sum of squares.
    share = special.betainccinv(components / 2, others / 2, probability)
    factor = others * share / (components * (1 - share))
    common = special.ndtri(probability / 2) * SCALAR_FACTOR
    return [float(value) for value in np.sqrt(ROUNDINGS * means * factor + common**2)]


def array_tolerances(samples: Mapping[Name, Sequence[Sequence[float]]], probability: float) -> dict[Name, list[float]]:
    """Return the `tolerances` of arrays in several steps, by name. samples: of each array, [steps, seeds]."""
    bounds = [tolerances(of_step, probability, scalar=False) for of_step in zip(*samples.values(), strict=True)]
    return {name: [of_step[place] for of_step in bounds] for place, name in enumerate(samples)}
