import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Any floats, those of one magnitude, and constants; each with zeros of both signs and denormals among them.
ANY_VECTOR = st.one_of(
    st.lists(FLOAT, min_size=LENGTH, max_size=LENGTH),
    st.builds(
        lambda scale, values: [scale * value for value in values],
        st.sampled_from([1e-42, 1e-37, 1e-20, 1.0, 1e30, 1e38]),
        st.lists(st.floats(-3, 3, width=32), min_size=LENGTH, max_size=LENGTH),
    ),
    FLOAT.map(lambda value: [value] * LENGTH),
).map(lambda values: np.array(values, np.float32))


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


def in_blocks(x: np.ndarray, block: int, of: Callable[[np.ndarray], Any]) -> np.ndarray:
    """Return the value of each element's block, in float64."""
    size = block or len(x)
    parts = [x[first : first + size].astype(np.float64) for first in range(0, len(x), size)]
    return np.concatenate([np.full(len(part), of(part)) for part in parts])


def bounds(name: str, x: np.ndarray) -> np.ndarray:
    """Return the largest error of each element of a vector that a quantizer may make, apart from rounding."""
    block = 8 if name in ("absmax_int8, blocks", "float8_e5m2 8") else 0
    largest = in_blocks(x, block, lambda part: np.abs(part).max())
    if name == "min_max_uint8":
        step = in_blocks(x, 0, lambda part: (part.max() - part.min() + 1e-7) / 255)
        # If a step is close to the spacing of float32, a value can be one step out.
        return step * np.where(largest / step > 2**20, 1.5, 0.5)
    if name.startswith("absmax"):
        return largest / 254
    if name.startswith("float8"):  # relative, and half of the smallest step: 2^-9 if 448 is the largest, or 2^-16
        relative, smallest = (1 / 16, 2**-10 / 448) if "e4m3" in name else (1 / 8, 2**-17 / 57344)
        return np.maximum(np.abs(x.astype(np.float64)) * relative, largest * smallest)
    assert name == "dithering"
    return largest / 7


QUANTIZERS = ("min_max_uint8", "absmax_int8", "absmax_int8, blocks", *FLOAT8S, "dithering")
TINY = 1e-37  # XLA flushes denormals to 0
EPS = 4 * float(np.finfo(np.float32).eps)


@pytest.mark.parametrize("name", QUANTIZERS)
@settings(max_examples=25)
@given(x=ANY_VECTOR)
@example(x=np.full(LENGTH, 1e30, np.float32))
@example(x=(3.4e38 * np.linspace(-1, 1, LENGTH)).astype(np.float32))  # the range overflows
def test_any_vector_is_decoded_within_half_a_step(name: str, x: np.ndarray) -> None:
    got = sent(name, x)[1].astype(np.float64)
    rounding = EPS * np.abs(x.astype(np.float64)).max() + TINY
    assert np.all(np.abs(got - x.astype(np.float64)) <= bounds(name, x) * 1.001 + rounding)


@pytest.mark.parametrize("name", [*ONEBITS, "topk"])
@settings(max_examples=20)
@given(x=ANY_VECTOR)
@example(x=np.float32(3.4028235e38) * np.sign(RANDOM))  # the largest floats, whose mean rounded to infinity
def test_any_vector_is_decoded_as_by_numpy(name: str, x: np.ndarray) -> None:
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0  # as XLA does, also with the signs of denormals
    expected = LOSSY[name](x).astype(np.float64)
    np.testing.assert_allclose(sent(name, x)[1].astype(np.float64), expected, 4e-6, TINY)


@pytest.mark.parametrize("name", LOSSY)
def test_compressors_lose_what_numpys_lose(name: str) -> None:
    np.testing.assert_allclose(sent(name, RANDOM)[1], LOSSY[name](RANDOM), 0, EPS * np.abs(RANDOM).max())


def test_payloads_of_quantizers() -> None:
    (q, ends), _ = sent("min_max_uint8", RANDOM)
    assert [q.dtype, ends.dtype, q.min(), q.max()] == [np.uint8, np.float32, 0, 255]
    np.testing.assert_array_equal(ends, [[RANDOM.min(), RANDOM.max()]])
    (q, largest), decoded = sent("dithering", RANDOM)
    assert [q.dtype, largest.dtype, q.shape, largest.shape] == [np.int8, np.float32, (LENGTH,), (1,)]
    np.testing.assert_allclose(decoded, q * np.abs(RANDOM).max().astype(np.float64) / 7, 1e-6, 1e-37)


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


@functools.cache
def with_feedback(name: str) -> Any:
    """Return a program that sends vectors [S, L] one after another: the decoded vectors and the last residual."""
    compressor = error_feedback(COMPRESSORS[name])

    def send(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        payload, state = compressor.encode(x, state)
        return state, compressor.decode(payload, LENGTH)

    return jax.jit(lambda vectors: jax.lax.scan(send, init(compressor), vectors))


@pytest.mark.parametrize("name", ["min_max_uint8", "onebit mean 0", "onebit l2 8", "topk", "randomk", "dithering"])
@settings(max_examples=15)
@given(vectors=st.lists(ANY_VECTOR, min_size=4, max_size=4))
@example(vectors=list(np.random.default_rng(1).normal(size=(4, LENGTH)).astype(np.float32)))
def test_with_feedback_all_is_sent_or_left(name: str, vectors: list[np.ndarray]) -> None:
    given = np.clip(vectors, -1e37, 1e37)  # so that sums stay finite
    state, decoded = jax.tree.map(np.asarray, with_feedback(name)(given))
    total = given.sum(0, np.float64)
    largest = np.abs(given).max() + np.abs(decoded).max()
    np.testing.assert_allclose(np.sum(decoded, 0, np.float64) + state["residual"], total, 0, 8 * EPS * largest + TINY)
    if name in LOSSY and np.abs(given).max() < 4:
        sender = compressors.Feedback(LOSSY[name])
        np.testing.assert_allclose(decoded, [sender(x) for x in given], 0, 1e-5)


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
