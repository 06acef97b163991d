"""Checks of arrays that a peer or the trainer received from a peer, before they are used. Without JAX."""

from collections.abc import Sequence
from typing import Any

import numpy as np

MALFORMED, NONFINITE_VALUES = "malformed", "nonfinite"


def find_fault(received: Any, like: Sequence[Any]) -> str:
    """Return "" if a received value is as expected, else MALFORMED or NONFINITE_VALUES.

    Args:
      received: the value; it must be a list of NumPy arrays.
      like: the expected shapes and dtypes.
    """
    if type(received) is not list or len(received) != len(like):
        return MALFORMED
    for array, expected in zip(received, like, strict=True):
        if type(array) is not np.ndarray or array.shape != expected.shape or array.dtype != expected.dtype:
            return MALFORMED
    return "" if all(is_finite_array(array) for array in received) else NONFINITE_VALUES


def is_finite_array(array: np.ndarray) -> bool:
    """Return whether all elements are finite. Supports bfloat16 and the other types of ml_dtypes."""
    return bool(array.dtype.kind in "biu" or np.isfinite(array).all())
