"""Tests of the tolerances of certificates: what is changed, and how often an error exceeds its bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.inspect import rounding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_changes_are_of_one_unit_in_the_last_place(dtype: str) -> None:
    """Values and cotangents change, in a program and on the host; with seed 0 none does."""
    x = np.asarray(np.random.default_rng(0).normal(size=3000), jnp.dtype(dtype))
    unit = np.asarray(np.spacing(np.abs(x)), np.float64) if dtype != "bfloat16" else None
    tree = {"x": x, "count": np.arange(3)}

    def both(seed: int) -> list[np.ndarray]:
        change = jax.jit(lambda x, seed: rounding.changed_in_program({"x": x, "count": tree["count"]}, 1, seed)["x"])
        out, pull = jax.vjp(lambda x: change(x, np.uint32(seed)), x)
        return [np.asarray(rounding.changed(tree, seed)["x"]), np.asarray(out), np.asarray(pull(x)[0])]

    for same in both(0):
        assert same.tobytes() == x.tobytes()
    patterns = []
    for got in both(1):
        assert got.dtype == x.dtype
        difference = got.astype(np.float64) - x
        if unit is None:
            unit = 2.0 ** (np.floor(np.log2(np.abs(x.astype(np.float64)))) - 7)
        units = difference / unit
        assert set(np.unique(units)) <= {-1.0, -0.5, 0.0, 0.5, 1.0}  # below a power of 2, a unit is half as large
        patterns.append(units)
        low, high = (0.25, 0.42) if dtype == "float32" else (0.025, 0.06)
        for sign in (-1, 1):
            assert low < (np.sign(units) == sign).mean() < high
    for one, other in ((0, 1), (1, 2)):
        assert abs(np.corrcoef(patterns[one], patterns[other])[0, 1]) < 0.1
    assert (both(2)[1] != both(1)[1]).mean() > (0.5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize(("components", "scalar"), [(1, True), (8, False), (100, False)])
def test_errors_exceed_their_bounds_with_the_stated_probability(components: int, scalar: bool) -> None:
    """Normal errors have this many independent components; the bounds of many are close to the error itself."""
    random, exceeded, factors = np.random.default_rng(0), 0, []
    num_rows = 12
    for _ in range(400):
        scales = 1e-3 * np.ones(num_rows) if scalar else 10 ** random.uniform(-4, -1, num_rows)
        draws = random.normal(size=(num_rows, 5, components)) ** 2
        draws[:, 4] *= 2  # the variance that a strategy is allowed
        errors = scales[:, None] * np.sqrt(draws.mean(-1))
        bounds = np.array(rounding.tolerances(errors[:, :4].tolist(), 0.01, scalar=scalar))
        exceeded += int((errors[:, 4] > bounds).sum())
        factors.append(float(np.median(bounds / scales)))
    assert 0.002 < exceeded / (400 * num_rows) < 0.03
    if components == 100:
        assert 1.1 < np.mean(factors) / 2**0.5 < 1.4


def test_a_bound_allows_for_the_rounding_of_a_scalar_factor() -> None:
    """The factor is the least bound at any probability, and one sample that differs makes no bound infinite."""
    for probability, expected in ((1e-8, 5.5775e-7), (1e-12, 6.9461e-7)):
        for scalar in (False, True):
            bounds = rounding.tolerances([[0.0] * 4, [0.0] * 4], probability, scalar=scalar)
            assert bounds == pytest.approx([expected] * 2, rel=1e-3)
            assert np.isfinite(rounding.tolerances([[0.0, 0.0, 0.0, 1e-3]], probability, scalar=scalar)).all()
