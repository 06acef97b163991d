"""Texts that are split over devices: what each has, and attention of its positions to all positions."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxpar.core import context
from jaxpar.core.context import (
    arranged,
    attend_in_context,
    gathered_texts,
    order,
    own_positions,
    padded_length,
)
from jaxpar.core.groups import MeshGroup
from jaxpar.core.mesh import CONTEXT, TENSOR
from jaxpar.measure.operations import PRODUCT, operations
from jaxpar.models import attention
from jaxpar.models.attention import attend
from jaxpar.models.layers import dropout
from jaxpar.models.model import Context
from jaxpar.models.options import AttentionKernel

B, H, G, K = 3, 4, 2, 8
C, T = 4, 48  # devices, positions
MESH = Mesh(np.array(jax.devices()[:C]), (CONTEXT,))
in_shard_map = partial(jax.shard_map, mesh=MESH, check_vma=False)
SPLIT = PartitionSpec(None, CONTEXT)


def test_each_device_has_two_chunks() -> None:
    chunks = order(16, 4).reshape(4, 2, 2)
    assert chunks.tolist() == [[[0, 1], [14, 15]], [[2, 3], [12, 13]], [[4, 5], [10, 11]], [[6, 7], [8, 9]]]
    sums = (1 + order(T, C).reshape(C, -1)).sum(axis=1)
    assert len(set(sums.tolist())) == 1  # of the keys that causal attention reads


def test_texts_are_padded_and_arranged_together() -> None:
    tokens = np.arange(1, 2 * 13 + 1).reshape(2, 13)
    batch: dict[str, np.ndarray] = {
        "inputs": tokens,
        "labels": tokens + 1,
        "weights": np.ones((2, 13), np.float32),
        "index": np.arange(2),
    }
    made = arranged(batch, 4)
    assert made["index"] is batch["index"]
    assert {name: x.shape for name, x in made.items() if name != "index"} == dict.fromkeys(
        ("inputs", "labels", "weights"), (2, 16)
    )
    for name in ("inputs", "labels", "weights"):
        np.testing.assert_array_equal(made[name][:, np.argsort(order(16, 4))][:, :13], batch[name])
    assert made["weights"].sum() == 26  # padding counts nothing


@pytest.mark.parametrize("number", [13, 4096, 8192, 8248, 131_072])
def test_chunks_of_long_texts_have_parts(number: int) -> None:
    half = padded_length(number, C) // (2 * C)
    assert number <= 2 * C * half < number + 2 * C * context.LEAST_KEYS
    assert half <= context.MOST_KEYS or half % context.LEAST_KEYS == 0


def test_devices_know_their_positions_and_gather_texts_in_order() -> None:
    x = np.arange(2 * T * 3.0).reshape(2, T, 3)

    def on_device(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return own_positions(x.shape[1], C), gathered_texts(x, C)[None]

    specs = {"in_specs": (SPLIT,), "out_specs": (PartitionSpec(CONTEXT), PartitionSpec(CONTEXT))}
    positions, whole = jax.jit(in_shard_map(on_device, **specs))(x[:, order(T, C)])
    np.testing.assert_array_equal(positions, order(T, C))
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (C, *x.shape)))


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("kernel", "most"), [("xla", 1024), ("xla", 2), ("cudnn", 6), ("cudnn", 2)])  # positions
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_and_its_gradients(
    is_causal: bool, has_padding: bool, kernel: AttentionKernel, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both equal those of whole texts on one device. XLA computes what cuDNN is asked for."""
    of_jax = jax.nn.dot_product_attention
    by_xla = lambda *args, **options: of_jax(*args, **{**options, "implementation": "xla"})  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    monkeypatch.setattr(attention, "_is_cudnn_installed", lambda: True)
    monkeypatch.setattr(context, "MOST_KEYS", most)
    monkeypatch.setattr(context, "MOST_SCORES", most * T)
    arrays = draw(B, T, H, K, seed=0), draw(B, T, G, K, seed=1), draw(B, T, G, K, seed=2)
    slopes, lengths_B = draw(B, T, H, K, seed=3), jnp.array([T, 17, 1]) if has_padding else None

    def objective(arrays: Any, slopes: Any, attended: Any) -> Any:
        y = attended(*arrays)
        return jnp.sum(y * slopes), y

    whole = partial(attend, kernel="xla", is_causal=is_causal, lengths_B=lengths_B)
    (_, expected), gradients = jax.value_and_grad(objective, has_aux=True)(arrays, slopes, whole)
    split = partial(attend_in_context, context=C, kernel=kernel, is_causal=is_causal, lengths_B=lengths_B)

    def on_device(arrays: Any, slopes: Any) -> Any:
        (_, y), gradients = jax.value_and_grad(objective, has_aux=True)(arrays, slopes, split)
        return y, gradients

    columns = order(T, C)
    specs = {"in_specs": (SPLIT, SPLIT), "out_specs": SPLIT}
    ours = jax.jit(in_shard_map(on_device, **specs))(tuple(x[:, columns] for x in arrays), slopes[:, columns])
    for got, wanted in zip(jax.tree.leaves(ours), [expected, *gradients], strict=True):
        np.testing.assert_allclose(got, np.asarray(wanted)[:, columns], rtol=2e-5, atol=2e-6)


def test_products_in_bfloat16() -> None:
    """All products, forward and backward, have factors in bfloat16, and no array has all scores of a device."""

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        attended = partial(attend_in_context, context=C, kernel="xla", is_causal=True, lengths_B=None)
        return jax.grad(lambda *x: attended(*x).sum(dtype=jnp.float32), argnums=(0, 1, 2))(q, k, v)

    shapes = [jax.ShapeDtypeStruct((B, T, heads, K), jnp.bfloat16) for heads in (H, G, G)]
    step = in_shard_map(on_device, in_specs=(SPLIT,) * 3, out_specs=(SPLIT,) * 3)
    made = operations(step, *shapes)
    assert {one.dtype for one in made if one.kind == PRODUCT} == {"bfloat16"}
    text = str(jax.make_jaxpr(step)(*shapes))
    assert text.count("dot_general") == 7
    assert f"{T // C},{T}]" not in text


@pytest.mark.parametrize(("length", "tensor"), [(10, 4), (16, 2)])  # a device has 6 positions, of which 2 are padding
def test_dropout(length: int, tensor: int) -> None:
    """The mask of a position is that on one device, on both axes, also if they do not divide the positions."""
    padded = padded_length(length, 2)
    mesh, group = (
        Mesh(np.array(jax.devices()[: 2 * tensor]).reshape(2, tensor), (CONTEXT, TENSOR)),
        MeshGroup(tensor, 2),
    )
    keys_B, tokens = jax.random.split(jax.random.key(0), B), np.zeros((B, padded), np.int32)
    expected = dropout(jnp.ones((B, padded, 8)), 0.5, Context({}, keys_B), 0)

    def on_device(tokens: jax.Array) -> jax.Array:
        own = group.own(jnp.ones((B, tokens.shape[1], 8)), 1)
        return group.whole(dropout(own, 0.5, Context({"inputs": tokens}, keys_B, group=group), 0), tokens.shape[1])

    made = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))(tokens)
    np.testing.assert_array_equal(made, np.asarray(expected)[:, order(padded, 2)])
