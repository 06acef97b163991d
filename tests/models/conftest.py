"""Runs the model tests under strict dtype promotion, so that no model silently leaves the requested dtype.

Only optax's updates need implicit promotion.
"""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield
