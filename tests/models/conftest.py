"""Models under strict dtype promotion: none may leave the dtype asked for unnoticed. Only optax's steps promote."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield
