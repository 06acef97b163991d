import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.exchange.compress import (
    Compressor,
    Payload,
    absmax_int8,
    dithering,
    error_feedback,
    float8,
    from_bytes,
    min_max_uint8,
    momentum,
    onebit,
    randomk,
    to_bytes,
    topk,
)
from tests.exchange import compressors

ONEBITS = {f"onebit {norm} {block}": (norm, block) for norm in ("mean", "l2") for block in (0, 1, 5, 8, 1000)}
FLOAT8S = {f"{dtype} {block}": (dtype, block) for dtype, block in (("float8_e4m3fn", 0), ("float8_e5m2", 8))}
COMPRESSORS: dict[str, Compressor] = {
    "min_max_uint8": min_max_uint8(),
    "absmax_int8": absmax_int8(),
    "absmax_int8, blocks": absmax_int8(8),
    **{name: float8(*arguments) for name, arguments in FLOAT8S.items()},
    **{name: onebit(*arguments) for name, arguments in ONEBITS.items()},
    "topk": topk(0.2),
    "randomk": randomk(0.2),
    "dithering": dithering(7),
}
LOSSY: dict[str, compressors.Lossy] = {
    "min_max_uint8": compressors.min_max_uint8,
    "absmax_int8": compressors.absmax_int8(0),
    "absmax_int8, blocks": compressors.absmax_int8(8),
    **{name: compressors.float8(*arguments) for name, arguments in FLOAT8S.items()},
    **{name: compressors.onebit(*arguments) for name, arguments in ONEBITS.items()},
    "topk": compressors.topk(5),
}
LENGTH = 21  # a fifth of it is 4.2, so 5 elements are sent
RANDOM = np.random.default_rng(0).normal(size=LENGTH).astype(np.float32)
VECTORS = {
    "random": RANDOM,
    "positive": np.abs(RANDOM) + 3,
    "constant": np.full(LENGTH, 0.3, np.float32),
    "negative constant": np.full(LENGTH, -1e4, np.float32),
    "zero": np.zeros(LENGTH, np.float32),
    "huge": RANDOM * np.float32(1e30),
    "small": RANDOM * np.float32(1e-20),
    "denormal": np.full(LENGTH, 1e-42, np.float32) * np.sign(RANDOM),
}


@functools.cache
def compiled(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return jax.jit(COMPRESSORS[name].encode), jax.jit(COMPRESSORS[name].decode, static_argnums=1)


def init(compressor: Compressor, length: int = LENGTH, seed: int = 0) -> Any:
    return compressor.init(length, jax.random.key(seed), 0)


def sent(name: str, x: np.ndarray, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the payload, and the decoded vector."""
    encode, decode = compiled(name)
    payload, _ = encode(x, init(COMPRESSORS[name], len(x), seed))
    return [np.asarray(part) for part in payload], np.asarray(decode(payload, len(x)))


def tolerance(name: str, x: np.ndarray) -> float:
    """Return the tolerance of a decoded value. XLA flushes denormals to 0.

    If a step of MinMaxUInt8 is close to the spacing of float32, implementations may differ by one step.
    """
    step = (x.max() - x.min() + 1e-7) / 255
    eps = float(np.finfo(np.float32).eps)
    coarse = name == "min_max_uint8" and np.abs(x).max() / step > 2**20
    return float(1e-37 + 4 * eps * np.abs(x).max() + (step if coarse else 0))


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("name", LOSSY)
def test_compressors_lose_what_numpys_lose(name: str, vector: str) -> None:
    x = VECTORS[vector]
    np.testing.assert_allclose(sent(name, x)[1], LOSSY[name](x), 0, tolerance(name, x))


@pytest.mark.parametrize(
    "name", ["min_max_uint8", "absmax_int8", *FLOAT8S, "onebit mean 0", "onebit l2 8", "dithering"]
)
def test_huge_constants_are_preserved(name: str) -> None:
    x = np.full(LENGTH, 1e30, np.float32)
    np.testing.assert_allclose(sent(name, x)[1], x, 1e-6)


@pytest.mark.parametrize("name", ["absmax_int8", *FLOAT8S, "onebit mean 0", "onebit l2 8", "dithering"])
def test_the_largest_floats_stay_in_order(name: str) -> None:
    x = np.float32(3e38) * np.sign(RANDOM)
    got = sent(name, x)[1]
    assert np.all(np.isfinite(got))
    assert np.all(got * np.sign(x) > 1e38)


@pytest.mark.parametrize("scale", [1e38, 3e38, 3.4e38])
def test_min_max_of_the_largest_floats(scale: float) -> None:
    """The range of these vectors overflows float32."""
    x = (scale * np.linspace(-1, 1, len(RANDOM))).astype(np.float32)
    step = 2 * scale / 255
    got = sent("min_max_uint8", x)[1].astype(np.float64)
    assert np.all(np.isfinite(got))
    assert np.all(np.abs(got - x.astype(np.float64)) <= 0.51 * step)


@pytest.mark.parametrize("vector", ["random", "positive", "huge", "small"])
def test_min_max_is_within_half_a_step(vector: str) -> None:
    x = VECTORS[vector]
    (q, ends), decoded = sent("min_max_uint8", x)
    assert [q.dtype, ends.dtype] == [np.uint8, np.float32]
    np.testing.assert_array_equal(ends, [[x.min(), x.max()]])
    step = (float(x.max()) - float(x.min()) + 1e-7) / 255
    assert np.all(np.abs(decoded - x.astype(np.float64)) <= 0.5001 * step + 1e-6 * np.abs(x).max())
    if vector != "small":  # whose range is less than one step
        assert (q.min(), q.max()) == (0, 255)


@pytest.mark.parametrize("length", [1, 7, 8, 20])
def test_min_max_by_blocks(length: int) -> None:
    x = np.random.default_rng(length).normal(size=length).astype(np.float32)
    compressor = min_max_uint8(8)
    payload, _ = compressor.encode(jnp.asarray(x), ())
    assert [leaf.shape for leaf in payload] == [(length,), (-(-length // 8), 2)]
    expected = [compressors.min_max_uint8(x[first : first + 8]) for first in range(0, length, 8)]
    np.testing.assert_allclose(compressor.decode(payload, length), np.concatenate(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "error"), [("float8_e4m3fn 0", 1 / 16), ("float8_e5m2 8", 1 / 8)])
def test_float8_bounds_the_relative_error(name: str, error: float) -> None:
    """The errors of values that are not far smaller than the largest of their block are relative to the values."""
    x = (RANDOM * np.logspace(0, -3, LENGTH)).astype(np.float32)
    (q, scales), decoded = sent(name, x)
    dtype, block = FLOAT8S[name]
    assert [q.dtype, scales.dtype] == [np.dtype(dtype), np.float32]
    assert (q.shape, scales.shape) == ((LENGTH,), (1 if block == 0 else 3,))
    errors = np.abs(decoded / x - 1)
    assert 0.4 * error < errors.max() <= 1.0001 * error


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 21, 33])
@pytest.mark.parametrize("name", ["onebit mean 0", "onebit mean 8", "onebit l2 5"])
def test_onebit_of_any_length(name: str, length: int) -> None:
    x = np.random.default_rng(length).normal(size=length).astype(np.float32)
    (bits, scales), decoded = sent(name, x)
    block = ONEBITS[name][1] or length
    assert [bits.dtype, scales.dtype] == [np.uint8, np.float32]
    assert (len(bits), len(scales)) == (math.ceil(length / 8), math.ceil(length / block))
    np.testing.assert_array_equal(np.unpackbits(bits)[:length], x >= 0)
    np.testing.assert_allclose(decoded, LOSSY[name](x), 1e-6)


@pytest.mark.parametrize(("name", "sender"), [("topk", False), ("randomk", True)])
def test_some_values_and_where_they_are(name: str, sender: bool) -> None:
    (values, indices), decoded = sent(name, RANDOM)
    assert [values.dtype, indices.dtype] == [np.float32, np.int32]
    assert (len(values), len(set(indices))) == (5, 5)
    np.testing.assert_array_equal(values, RANDOM[indices])
    expected = np.zeros_like(RANDOM)
    expected[indices] = RANDOM[indices]
    np.testing.assert_array_equal(decoded, expected)
    assert (set(sent(name, RANDOM, 1)[0][1]) != set(indices)) == sender


@pytest.mark.parametrize("ratio", [0.05, 0.07, 0.5, 1.0])
def test_share_that_is_sent(ratio: float) -> None:
    expected = {0.05: 5, 0.07: 7, 0.5: 50, 1.0: 100}[ratio]
    assert [compressor(ratio).payload(100)[0].shape for compressor in (topk, randomk)] == [(expected,)] * 2


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(name: str, value: float) -> None:
    x = RANDOM.copy()
    x[4] = value
    decoded = [sent(name, x, seed)[1] for seed in range(20 if name == "randomk" else 1)]
    assert not np.all(np.isfinite(decoded))


def draws(compressor: Compressor, x: np.ndarray, number: int, seed: int = 0) -> np.ndarray:
    """Return the decoded vectors [number, L] if the same vector is sent repeatedly."""

    def once(state: Any, _: None) -> tuple[Any, jax.Array]:
        payload, state = compressor.encode(jnp.asarray(x), state)
        return state, compressor.decode(payload, len(x))

    return np.asarray(jax.jit(lambda state: jax.lax.scan(once, state, None, number))(init(compressor, len(x), seed))[1])


@pytest.mark.parametrize("vector", ["random", "positive", "constant", "zero", "huge", "denormal"])
def test_dithering_rounds_to_a_level_next_to_the_value(vector: str) -> None:
    x = VECTORS[vector]
    (q, largest), decoded = sent("dithering", x)
    assert [q.dtype, largest.dtype] == [np.int8, np.float32]
    assert (q.shape, largest.shape) == ((LENGTH,), (1,))
    step = np.abs(x).max().astype(np.float64) / 7
    assert np.all(np.abs(decoded - x.astype(np.float64)) <= step * (1 + 1e-5) + 1e-37)
    np.testing.assert_allclose(decoded, q * step, 1e-6, 1e-37)


@pytest.mark.parametrize("levels", [1, 4, 127])
def test_dithering_is_right_in_the_mean(levels: int) -> None:
    number = 2000
    got = draws(dithering(levels), RANDOM, number).astype(np.float64)
    step = float(np.abs(RANDOM).max()) / levels
    up = RANDOM / step - np.floor(RANDOM / step)  # probability of rounding up
    deviation = step * np.sqrt(up * (1 - up))
    assert np.all(np.abs(got.mean(0) - RANDOM) <= 5 * deviation / math.sqrt(number) + 1e-5 * step)
    often = up * (1 - up) > 0.02  # otherwise 2000 draws are too few
    np.testing.assert_allclose(got.std(0)[often], deviation[often], 0.2)


@pytest.mark.parametrize("compressor", [randomk(0.25), dithering(2)])
def test_chance_differs_between_calls_and_senders(compressor: Compressor) -> None:
    x = np.linspace(1, 2, 40).astype(np.float32)
    calls, others = draws(compressor, x, 6), draws(compressor, x, 6, seed=1)
    assert len(np.unique(np.concatenate([calls, others]), axis=0)) == 12
    np.testing.assert_array_equal(calls, draws(compressor, x, 6))


def test_each_value_is_as_likely_to_be_sent() -> None:
    number, share = 2000, 0.25
    times = np.count_nonzero(draws(randomk(share), np.ones(20, np.float32), number), axis=0)
    assert np.all(np.abs(times - number * share) <= 5 * math.sqrt(number * share * (1 - share)))


BYTES = {
    "min_max_uint8": LENGTH + 8,
    "onebit mean 0": 3 + 4,
    "onebit l2 0": 3 + 4,
    "onebit mean 5": 3 + 5 * 4,
    "onebit l2 8": 3 + 3 * 4,
    "onebit mean 1000": 3 + 4,
    "topk": 5 * 8,
    "randomk": 5 * 8,
    "dithering": LENGTH + 4,
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_payloads(name: str) -> None:
    for compressor in (
        COMPRESSORS[name],
        error_feedback(COMPRESSORS[name]),
        momentum(error_feedback(COMPRESSORS[name]), 0.9),
    ):
        payload = compressor.payload(LENGTH)
        assert compressor.nbytes(LENGTH) == BYTES[name]
        real, _ = compressor.encode(jnp.asarray(RANDOM), init(compressor))
        assert to_bytes(real).shape == (BYTES[name],)
        assert [(x.shape, x.dtype) for x in real] == [(x.shape, x.dtype) for x in payload]


def test_bytes_and_back() -> None:
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(2, 3)).astype(np.float32),
        rng.integers(-(2**31), 2**31, 4, np.int32),
        rng.integers(0, 256, (3, 1), np.uint8),
        rng.integers(-128, 128, 5, np.int8),
        np.array([np.nan, np.inf, -0.0], np.float32),
        np.zeros(0, np.float32),
    ]
    payload: Payload = tuple(jnp.asarray(x) for x in arrays)
    vector = jax.jit(to_bytes)(payload)
    assert vector.dtype == jnp.uint8
    assert np.asarray(vector).tobytes() == b"".join(x.tobytes() for x in arrays)
    back = jax.jit(lambda x: from_bytes(x, jax.eval_shape(lambda: payload)))(vector)
    assert [(x.shape, x.dtype, np.asarray(x).tobytes()) for x in back] == [
        (x.shape, x.dtype, x.tobytes()) for x in arrays
    ]


def steps(compressor: Compressor, vectors: np.ndarray) -> tuple[np.ndarray, Any]:
    """Send the vectors [S, L] one after another. Return the decoded vectors and the last state."""
    encode, decode = jax.jit(compressor.encode), jax.jit(compressor.decode, static_argnums=1)
    state, result = init(compressor, vectors.shape[1]), []
    for x in vectors:
        payload, state = encode(x, state)
        result.append(np.asarray(decode(payload, len(x))))
    return np.array(result), state


@pytest.mark.parametrize("name", ["min_max_uint8", "onebit mean 0", "onebit l2 8", "topk", "randomk", "dithering"])
def test_with_feedback_all_is_sent_or_left(name: str) -> None:
    vectors = np.random.default_rng(1).normal(size=(6, LENGTH)).astype(np.float32)
    decoded, state = steps(error_feedback(COMPRESSORS[name]), vectors)
    np.testing.assert_allclose(decoded.sum(0, np.float64) + state["residual"], vectors.sum(0, np.float64), 0, 1e-5)
    assert np.abs(state["residual"]).max() > 1e-3
    if name in LOSSY:
        sender = compressors.Feedback(LOSSY[name])
        np.testing.assert_allclose(decoded, [sender(x) for x in vectors], 0, 1e-5)


def test_momentum_is_nesterovs_before_compression() -> None:
    vectors = np.random.default_rng(2).normal(size=(5, LENGTH)).astype(np.float32)
    mu, m, expected = 0.7, np.zeros(LENGTH), []
    lossy = compressors.Feedback(LOSSY["onebit l2 8"])
    for x in vectors.astype(np.float64):
        m = mu * m + x
        expected.append(lossy(x + mu * m))
    decoded, state = steps(momentum(error_feedback(COMPRESSORS["onebit l2 8"]), mu), vectors)
    np.testing.assert_allclose(decoded, expected, 0, 1e-5)
    np.testing.assert_allclose(state["momentum"], m, 0, 1e-5)
    np.testing.assert_allclose(state["code"]["residual"], lossy.residual, 0, 1e-5)
