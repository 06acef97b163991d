"""Errors of arrays with respect to reference arrays, as the certificate reports them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

Leaves = Mapping[str, np.ndarray]


class Error(NamedTuple):
    """The error of a set of arrays with respect to the reference."""

    bitwise: bool  # whether all arrays are bitwise equal
    ulps: float  # the largest difference, in units in the last place (ULPs) of the largest reference value
    # norm of the difference / norm of the reference, over all arrays; infinite if only the latter is zero
    relative: float


def compare(got: Leaves, expected: Leaves) -> Error:
    """Compare arrays with the reference arrays of the same names."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    pairs = [(np.asarray(got[name]), np.asarray(value)) for name, value in expected.items()]
    bitwise = all(a.tobytes() == b.tobytes() for a, b in pairs)
    differences = [a.astype(np.float64) - b for a, b in pairs]
    largest = max((np.abs(b).max() for _, b in pairs if b.size), default=0.0)
    ulps = max((np.abs(d).max() for d in differences if d.size), default=0.0) / np.spacing(np.float32(largest))
    return Error(bitwise, float(ulps), relative(differences, expected.values()))


def compare_change(before: Leaves, got: Leaves, expected: Leaves) -> Error:
    """Compare changed arrays with the reference, relative to the change instead of to the arrays.

    A correct sum of an array and its change can differ by one ULP of the array, which can be large compared with the
    change. So the relative error counts only the part of a difference that is larger than one ULP.

    Args:
      before: the arrays before the change.
      got: the arrays after the change.
      expected: the reference arrays after the change, with the same names.
    """
    excess, changes = [], []
    for name, array in expected.items():
        a, b, old = (np.asarray(x, np.float64) for x in (got[name], array, before[name]))
        ulp = np.spacing(np.maximum(np.maximum(np.abs(a), np.abs(b)), np.abs(old)).astype(np.float32))
        excess.append(np.maximum(np.abs(a - b) - ulp, 0))  # np.maximum propagates NaN
        changes.append(b - old)
    return compare(got, expected)._replace(relative=relative(excess, changes))


def relative(differences: Iterable[np.ndarray], of: Iterable[np.ndarray]) -> float:
    """Return the norm of `differences` / the norm of `of`; infinite if only the latter is zero."""
    square, total = (sum(float((x.astype(np.float64) ** 2).sum()) for x in arrays) for arrays in (differences, of))
    return float(np.sqrt(square / total)) if total else (np.inf if square else 0.0)


def worst(errors: Iterable[Error]) -> Error:
    """Return the largest error over several steps, separately for each attribute."""
    bitwise, ulps, relative = zip(*errors, strict=True)
    return Error(all(bitwise), float(np.max(ulps)), float(np.max(relative)))  # np.max propagates NaN
