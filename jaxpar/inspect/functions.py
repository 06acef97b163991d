"""Certifies a training step outside of this package: a parallel function is compared with one on a single device.

Both are functions of the same parameters and batch, and return the same arrays, such as the loss and the gradients. As
in the certificate of a config (certificate.py), the tolerances follow from samples of the rounding errors of one
device. But the layers of a function are not known. So the reference is traced, and in a sample, the results of its
operations that depend on the order of a sum are changed at random, in 16 bits those of all that round. The parameters
are changed too, and the examples of the batch are permuted.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxpar.command_line import format_rows
from jaxpar.errors import UserError, format_count
from jaxpar.inspect.cause import MOST_IN_16_BITS, MOST_LEFT, Cause, best_cause
from jaxpar.inspect.certificate import Largest, Measured, largest, outside
from jaxpar.inspect.certificate_report import cell, format_cause, format_verdict
from jaxpar.inspect.hypotheses import (
    MOST_PARTS,
    MOST_UNEXPLAINED,
    NEAR,
    NUMBERS_OF_PART,
    SMALLEST_NORM,
    Guess,
    fitted_scale,
    list_shares,
    name_of_scale,
    name_of_shares,
)
from jaxpar.inspect.reference import Error, compare
from jaxpar.inspect.rounding import (
    FALSE_ALARM,
    SEEDS,
    array_tolerances,
    changed,
    changed_in_program,
    permuted,
    tolerances,
)
from jaxpar.layout import Tree
from jaxpar.run import report
from jaxpar.strategies.pipeline.executor.split_backward import CALLS, REMAT_CALLS, evaluate_jaxpr

# Primitives whose results depend on the order of a sum, and those that contain such sums.
SUMS = frozenset(
    (
        *("add_any", "conv_general_dilated", "cumsum", "dot_general", "ragged_dot_general", "reduce_sum"),
        *("reduce_window_sum", "scatter-add", "select_and_scatter_add"),
        *("cond", "custom_jvp_call", "custom_vjp_call", "scan", "shard_map", "while"),
    )
)
# Primitives whose results are exact in any dtype.
EXACT_PRIMITIVES = frozenset(
    (
        *("abs", "argmax", "argmin", "broadcast_in_dim", "clamp", "concatenate", "copy", "copy_p", "dynamic_slice"),
        *("dynamic_update_slice", "expand_dims", "gather", "iota", "max", "min", "neg", "pad", "reduce_max"),
        *("reduce_min", "reshape", "rev", "scatter", "select_n", "sign", "slice", "sort"),
        *("split", "squeeze", "stop_gradient", "transpose"),
    )
)

UNBOUNDED = 2.0  # relative tolerance from which a comparison would show nothing, even in 16 bits

StepFunction = Callable[[Any, Any], Any]  # (params, batch) -> a pytree of arrays


class FunctionsCertificate(NamedTuple):
    """The certificate of a function. Its text is a table of the errors, with the verdict."""

    results: dict[str, Largest]  # the largest errors of each array that the functions return, by its path
    outside: list[str]  # one line for each array whose error is outside its tolerance
    num_batches: int
    versions: dict[str, str]  # of the packages
    cause: Cause | None = None  # the likely cause of the first batch that fails

    @property
    def passed(self) -> bool:
        """Whether all errors are within their tolerances."""
        return not self.outside

    def __str__(self) -> str:
        """Return the certificate as a table."""
        rows = [["", "relative error / tolerance"], *([n, cell(one._asdict())] for n, one in self.results.items())]
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        lines = [f"compared   {format_count(self.num_batches, 'batch')}", f"versions   {packages}", ""]
        number = self.num_batches * len(self.results)
        lines += [format_rows(rows), "", *format_verdict(self.outside, number, FALSE_ALARM)]
        return "\n".join([*lines, *(format_cause(self.cause._asdict()) if self.cause else [])])


def certify_functions(
    reference: StepFunction, parallel: StepFunction, params: Tree, *batches: Tree
) -> FunctionsCertificate:
    """Compare a parallel function with a reference on one device, both of them functions of (params, batch).

    They may return any pytree of arrays, the same one: the gradients, the loss and the gradients, or new parameters.
    Neither may depend on the order of the examples, as dropout masks do that are drawn by position.

    Args:
      reference: the function for one device. JAX must be able to trace it, as in `jax.jit`.
      parallel: the function to certify. It is called with the parameters and batches as given, which it must not
        donate.
      params: the parameters, any pytree of arrays.
      batches: one or more batches, each a pytree of arrays [examples, ..].

    Raises:
      UserError: the functions cannot be compared: they return different arrays, the reference returns a number that is
        not finite, there is no batch or no example, or a typed key. Errors of the functions are not caught.
    """
    if not batches:
        raise UserError("batches is empty; certify_functions must be given at least one batch, after the parameters")

    @jax.jit
    def sampled(params: Tree, batch: Tree, seed: jax.Array) -> Tree:
        traced, shapes = jax.make_jaxpr(reference, return_shape=True)(params, batch)
        changes = partial(_changed_results, numbers=itertools.count(), seed=seed)
        results = evaluate_jaxpr(traced, jax.tree.leaves((params, batch)), CALLS | REMAT_CALLS, changes)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    _check_no_keys("params", params)
    on_host = jax.tree.map(np.array, params)
    errors: dict[str, list[Error]] = {}  # of each array: its error with each batch
    samples: dict[str, list[list[float]]] = {}  # of each array and batch: samples of the rounding error
    scalars: set[str] = set()
    with jax.default_matmul_precision("highest"):
        for batch in batches:
            examples = _checked_batch(batch)
            expected, *changed_ones = (
                _by_path(sampled(changed(on_host, seed), permuted(examples, seed), np.uint32(seed)))
                for seed in (0, *SEEDS)
            )
            got = _by_path(parallel(params, batch))
            _check_results(got, expected)
            for name, array in expected.items():
                errors.setdefault(name, []).append(_error(got, expected, name))
                samples.setdefault(name, []).append([_error(one, expected, name).relative for one in changed_ones])
                scalars |= {name} if array.size == 1 else set()
    probability = FALSE_ALARM / (len(errors) * len(batches))
    allowed = {name: tolerances(samples[name], probability, scalar=True) for name in scalars}
    allowed |= array_tolerances({name: of for name, of in samples.items() if name not in scalars}, probability)
    for name, bounds in allowed.items():
        if max(bounds) >= UNBOUNDED:
            raise UserError(
                f"reference depends on the order of the examples, or rounds too much, at {name}, where an error of "
                f"{max(bounds):.1g} would be allowed; it must return sums or means over the examples"
            )
    results = {name: largest(errors[name], allowed[name]) for name in errors}
    found = outside(Measured(results, {}, {}, 0, [], []))
    cause = None
    for number, batch in enumerate(batches):
        wrong = [name for name in errors if not errors[name][number].relative <= allowed[name][number]]
        if wrong:
            most = MOST_IN_16_BITS if max(allowed[name][number] for name in wrong) > MOST_LEFT else MOST_UNEXPLAINED
            examples = _checked_batch(batch)

            def of_order(order: np.ndarray, examples: Tree = examples) -> dict[str, np.ndarray]:
                return _by_path(sampled(on_host, jax.tree.map(lambda array: array[order], examples), np.uint32(0)))

            with jax.default_matmul_precision("highest"):
                got = _by_path(parallel(params, batch))
                where = f"batch {number}, {len(wrong)} of {len(errors)} arrays, {wrong[0]} first"
                cause = _find_cause(where, got, of_order, len(jax.tree.leaves(examples)[0]), wrong, most)
            break
    return FunctionsCertificate(results, found, len(batches), report.versions(), cause)


def _find_cause(
    where: str,
    got: dict[str, np.ndarray],
    reference: Callable[[np.ndarray], dict[str, np.ndarray]],
    size: int,
    names: Sequence[str],
    most: float,
) -> Cause:
    """Return the likely cause of wrong results.

    reference: the results for a batch of these of its `size` examples. Instead of leaving examples out, a part of the
    batch is repeated, which the same program computes. most: part of a difference that a cause may leave unexplained.
    """
    of_batch = reference(np.arange(size))

    def joined(results: dict[str, np.ndarray]) -> np.ndarray:
        """Return all arrays as one vector, each relative to the reference, so that none hides the others."""
        norms = [max(float(np.linalg.norm(of_batch[name].astype(np.float64))), SMALLEST_NORM) for name in names]
        arrays = [np.ravel(results[name]).astype(np.float64) / norm for name, norm in zip(names, norms, strict=True)]
        return np.concatenate(arrays)

    vector, expected = joined(got), joined(of_batch)
    if not np.isfinite(vector).all():
        return Cause(where, "a result is not finite", [])

    def guesses() -> Iterator[Guess]:
        scale = fitted_scale(vector, expected)
        numbers = {f"{number} devices": number for number in range(2, MOST_PARTS + 1)}
        some = ", of some arrays only" if len(names) < len(got) else ""
        yield Guess(f"{name_of_scale(scale, numbers)}{some}", scale * expected, f"{scale:.7g} times those expected")
        for number in range(2, MOST_PARTS + 1):
            if size % number or len(vector) < NUMBERS_OF_PART * number:
                continue
            parts = [np.tile(part, number) for part in np.split(np.arange(size), number)]
            of_parts = np.stack([joined(reference(part)) for part in parts], axis=1)
            if not np.isfinite(of_parts).all():  # a part of padding examples alone
                continue
            shares, right = (np.linalg.lstsq(of_parts, one, rcond=None)[0] for one in (vector, expected))
            shares_of_right = shares / np.where(np.abs(right) > NEAR / number, right, np.inf)
            listed = [(part, 0) for part in range(number)]
            name = name_of_shares(shares_of_right, listed, has_loss=False)
            yield Guess(f"{name}{some}", of_parts @ shares, list_shares(shares_of_right, listed))

    return best_cause(where, vector, expected, guesses(), most)


def _changed_results(name: str, results: list[Any], *, numbers: "itertools.count[int]", seed: jax.Array) -> list[Any]:
    """Return the results of an operation, changed if it rounds. name: of its primitive."""
    number = next(numbers)
    is_narrow = any(jnp.issubdtype(of.dtype, jnp.floating) and of.dtype.itemsize == 2 for of in results)
    if name in SUMS or (is_narrow and name not in EXACT_PRIMITIVES):
        return list(changed_in_program(results, number, seed))
    return results


def _by_path(tree: Tree) -> dict[str, np.ndarray]:
    """Return the arrays of a pytree on the host, by path."""
    return {keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _error(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], name: str) -> Error:
    return compare({name: got[name]}, {name: expected[name]})


def _checked_batch(batch: Tree) -> Tree:
    """Return a batch on the host. Raises UserError unless its arrays have the same number of examples, at least 1."""
    _check_no_keys("a batch", batch)
    examples = jax.tree.map(np.asarray, batch)
    shapes = {name: array.shape for name, array in _by_path(examples).items()}
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) != 1 or sizes & {(), (0,)}:
        listed = ", ".join(f"{name}: {shape}" for name, shape in shapes.items()) or "no arrays"
        raise UserError(f"a batch has {listed}; its arrays must have the same number of examples as their first dim")
    return examples


def _check_no_keys(name: str, tree: Tree) -> None:
    """Raise UserError for typed keys, which have no numbers to compare or to change."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UserError(f"{name} has a typed key at {keystr(path)}; it must be jax.random.key_data of it")


def _check_results(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Raise UserError for results that cannot be compared with those of the reference."""
    if not expected:
        raise UserError("reference returns no arrays; it must return those to compare, such as the gradients")
    for name in [*expected, *got]:
        shapes = [f"an array {of[name].shape}" if name in of else "nothing" for of in (got, expected)]
        if shapes[0] != shapes[1]:
            raise UserError(f"parallel returns {shapes[0]} at {name}; it must return {shapes[1]}, as reference does")
    for name, array in expected.items():
        if (narrow := got[name].dtype).itemsize < array.dtype.itemsize:
            raise UserError(f"parallel returns {narrow} at {name}; it must return {array.dtype}, as reference does")
        if array.dtype.kind == "c":
            raise UserError(f"reference returns complex numbers at {name}; all must be real")
        if not np.isfinite(array).all():
            raise UserError(f"reference returns a number that is not finite at {name}; all must be finite")
