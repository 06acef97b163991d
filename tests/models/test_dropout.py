"""Tests that dropout masks depend only on the key of the example, the layer and the site."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models import Context
from jaxpar.models.layers import dropout
from tests.models.small import dropout_keys, fast_jit, small


def drop(rate: float, shape: tuple[int, ...], keys_B: jax.Array | None, site: int = 0) -> np.ndarray:
    return np.asarray(dropout(jnp.ones(shape), rate, Context({}, keys_B), site))


def test_keeps_the_mean_at_the_stated_rate() -> None:
    for rate in (0.1, 0.5):
        out = drop(rate, (4, 100, 100), dropout_keys())
        kept = out != 0
        np.testing.assert_allclose(out[kept], 1 / (1 - rate), rtol=1e-6)
        # Tolerance: four standard deviations for 40,000 draws.
        assert abs(kept.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / kept.size)


def test_the_backward_pass_reads_a_bit_per_element() -> None:
    """The gradient is that of the mask of the forward pass, of which it holds 13 bytes for 100 elements."""
    keys_B, slope = dropout_keys(), jax.random.normal(jax.random.key(1), (4, 7, 100))
    out, backward = jax.vjp(lambda x: dropout(x, 0.3, Context({}, keys_B), 0), jnp.ones((4, 7, 100)))
    np.testing.assert_array_equal(backward(slope)[0], np.where(out != 0, slope / np.float32(0.7), 0))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(backward)) == 4 * 7 * 13


def test_off_without_keys_or_rate() -> None:
    np.testing.assert_array_equal(drop(0.5, (4, 8), None), 1)
    np.testing.assert_array_equal(drop(0.0, (4, 8), dropout_keys()), 1)


def test_sites_examples_and_steps_differ() -> None:
    base = drop(0.5, (4, 64), dropout_keys()) != 0
    for other in (drop(0.5, (4, 64), dropout_keys(), site=1) != 0, drop(0.5, (4, 64), dropout_keys(step=4)) != 0):
        assert 0.3 < (base == other).mean() < 0.7
    assert 0.3 < (base[0] == base[1]).mean() < 0.7


def test_position_draws_the_same_at_every_padded_length() -> None:
    short, long = drop(0.3, (4, 5, 6), dropout_keys()), drop(0.3, (4, 9, 6), dropout_keys())
    np.testing.assert_array_equal(short, long[:, :5])


def test_logits_of_an_example_do_not_depend_on_its_batch() -> None:
    for name, task in (("bert", "masked_lm"), ("gpt", "classification")):
        model, params, batch = small(name, task, dropout=0.3)
        apply = fast_jit(model.apply)
        keys_B = dropout_keys()
        whole = apply(params, batch, keys_B)
        order = np.array([2, 0])
        part = apply(params, {key: rows[order] for key, rows in batch.items()}, keys_B[order])
        np.testing.assert_allclose(part, whole[order], rtol=1e-5, atol=1e-5)
        assert np.abs(whole - apply(params, batch)).max() > 1e-2  # dropout has an effect
        assert np.abs(whole - apply(params, batch, dropout_keys(step=4))).max() > 1e-2


def test_layers_draw_different_masks() -> None:
    """Equal layers in one scan have different dropout masks."""
    model, params, batch = small("mlp", "classification", num_layers=2, hidden_size=64, dropout=0.5)
    for name in ("block_0", "block_1"):  # each layer returns the activation of its bias
        params[name]["linear"] = {"kernel": np.zeros((64, 64), np.float32), "bias": np.ones(64, np.float32)}
    x = jnp.ones((4, 64))
    first, second = (model.apply_layers(params, x, batch, dropout_keys(), i, i + 1) != 0 for i in (1, 2))
    assert 0.3 < (first == second).mean() < 0.7
