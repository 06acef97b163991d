"""The loss over a vocabulary, computed for some positions at a time, is that of whole logits, as is its gradient."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpar.core.groups import MeshGroup
from jaxpar.core.mesh import TENSOR
from jaxpar.inspect import audit
from jaxpar.measure.flops import forward_flops
from jaxpar.tasks import TASKS, cross_entropy, token_logits
from jaxpar.tasks.token_logits import SplitWords, TokenLogits
from tests.selection import slow_except
from tests.strategies.pipelines import Task, advance, make, pipeline, relative_error, shared, start

B, T, D, V = 3, 12, 8, 50


def make_logits(dtype: Any = jnp.float32, *, bias: bool = True) -> tuple[TokenLogits, Any]:
    """Return logits and a batch. Some weights are 0."""
    rng = np.random.default_rng(0)
    x, tokens, b = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, D), (V, D), (V,)))
    batch = {
        "labels": rng.integers(0, V, (B, T)).astype(np.int32),
        "weights": rng.choice([0.0, 0.5, 1.0], (B, T)).astype(np.float32),
    }
    return TokenLogits(jnp.asarray(x, dtype), jnp.asarray(tokens, dtype), jnp.asarray(b) if bias else None), batch


def by_hand(logits: TokenLogits, batch: Any, *, is_rounded: bool = False) -> tuple[float, float, list[np.ndarray]]:
    """Return loss, correct answers, and the gradient of the loss / 7, in float64, except for rounded logits."""
    x, tokens = (np.asarray(one, np.float64) for one in logits[:2])
    scores, bias = x @ tokens.T, 0 if logits.bias is None else np.asarray(logits.bias, np.float64)
    if is_rounded:
        dtype = logits.x.dtype
        scores = (scores.astype(np.float32).astype(dtype) + np.asarray(bias, dtype)).astype(np.float64)
    else:
        scores = scores + bias
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    p, label = powers / powers.sum(-1, keepdims=True), np.eye(V)[batch["labels"]]
    loss = -(np.log((p * label).sum(-1)) * batch["weights"]).sum()
    d = (p - label) * batch["weights"][..., None] / 7
    gradient = [d @ tokens, np.einsum("btv,btd->vd", d, x)]
    correct = ((scores.argmax(-1) == batch["labels"]) * batch["weights"]).sum()
    return loss, correct, gradient if logits.bias is None else [*gradient, d.sum((0, 1))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 3, 5, 12])
def test_sums_and_gradient(num_chunks: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_logits, "CHUNK_BYTES", 4 * B * T * V // num_chunks)
    logits, batch = make_logits(bias=bias)
    assert logits.num_chunks == {5: 6}.get(num_chunks, num_chunks)
    loss, correct, expected = by_hand(logits, batch)
    sums = jax.jit(cross_entropy.sums)(logits, batch)
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(sums.terms["correct"], correct, rtol=1e-6)
    np.testing.assert_allclose(sums.weight, batch["weights"].sum())

    def objective(logits: TokenLogits) -> tuple[jax.Array, Any]:
        sums = cross_entropy.sums(logits, batch)
        return sums.loss / 7, sums

    gradient, again = jax.jit(jax.grad(objective, has_aux=True))(logits)
    np.testing.assert_allclose(again.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(again.terms["correct"], correct, rtol=1e-6)
    for got, wanted in zip(jax.tree.leaves(gradient), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_chunks", [1, 3, 12])
def test_16_bits(num_chunks: int, dtype: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are rounded if there is a gradient. More chunks do not round the gradient more often."""
    monkeypatch.setattr(token_logits, "CHUNK_BYTES", 2 * B * T * V // num_chunks)
    logits, batch = make_logits(dtype, bias=bias)
    assert logits.num_chunks == num_chunks
    loss, _, expected = by_hand(logits, batch, is_rounded=True)
    objective = lambda logits: cross_entropy.sums(logits, batch).loss / 7  # noqa: E731
    with jax.numpy_dtype_promotion("strict"):
        got, gradient = jax.value_and_grad(objective)(logits)
        evaluated = cross_entropy.sums(logits, batch)
    # XLA can leave out roundings between the product and the sum with the bias.
    np.testing.assert_allclose(got, loss / 7, rtol=1e-3 if bias else 1e-6)
    exact_loss, correct, _ = by_hand(logits, batch)
    np.testing.assert_allclose((evaluated.loss, evaluated.terms["correct"]), (exact_loss, correct), rtol=1e-6)
    assert [leaf.dtype for leaf in jax.tree.leaves(gradient)] == [dtype, dtype, *["float32"] * bias]
    for leaf, wanted in zip(jax.tree.leaves(gradient), expected, strict=True):
        assert np.linalg.norm(np.asarray(leaf, np.float64) - wanted) < 0.005 * np.linalg.norm(wanted)
    text = str(jax.make_jaxpr(jax.grad(objective))(logits))
    products = [re.findall(r":(\w+)\[", line)[0] for line in text.splitlines() if "dot_general" in line]
    narrow = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    assert products == [narrow, *(["f32", "f32"] if num_chunks > 1 else [narrow, narrow])]


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_small_slopes_in_float16(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes that are 0 in float16 have the gradient of float32, because the loss is scaled."""
    monkeypatch.setattr(token_logits, "CHUNK_BYTES", 2 * B * T * V // num_chunks)
    rng, scale = np.random.default_rng(0), 2.0**15
    tokens = np.concatenate([np.full((1, D), 2.0), rng.normal(0, 0.01, (V - 1, D))])  # logits of 16 and about 0
    batch: Any = {"labels": np.zeros((B, T), np.int32), "weights": np.ones((B, T), np.float32)}
    objective = lambda logits: cross_entropy.sums(logits, batch).loss * scale  # noqa: E731
    got, expected = (
        jax.grad(objective)(TokenLogits(jnp.ones((B, T, D), dtype), jnp.asarray(tokens, dtype)))
        for dtype in (jnp.float16, jnp.float32)
    )
    assert 0 < float(expected.tokens[1:].max()) / scale / (B * T) < 2**-23  # less than float16 can represent
    assert got.x.dtype == got.tokens.dtype == jnp.float16
    for one, other in zip(got[:2], expected[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=0.03)


def test_equal_logits() -> None:
    """The first of the best logits is the answer of the model, with and without a gradient, as in argmax."""
    x, tokens = jnp.ones((2, 3, 1)), jnp.array([[1.0], [2.0], [2.0], [0.0]])
    logits = TokenLogits(x, tokens)
    labels, weights = np.array([[0, 1, 2], [1, 3, 2]]), np.ones((2, 3), np.float32)

    def chunked(logits: TokenLogits) -> Any:
        return token_logits.chunked_sums(3, logits, labels, weights)

    (_, correct), _ = jax.vjp(chunked, logits)
    assert float(correct) == float(chunked(logits)[1]) == 2


def test_the_forward_pass_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = make_logits()
    whole = forward_flops(cross_entropy.sums, logits, batch)
    monkeypatch.setattr(token_logits, "CHUNK_BYTES", B * T * V)
    assert logits.num_chunks == 4
    assert forward_flops(cross_entropy.sums, logits, batch) == whole == 2 * B * T * D * V


def test_whole_logits_are_saved_once() -> None:
    """The forward pass saves them and vectors; the gradients, also by the weights, are those of optax."""
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.normal(size=(B, T, V)), jnp.float32)
    labels, weights = jnp.asarray(rng.integers(0, V, (B, T))), jnp.asarray(rng.uniform(size=(B, T)), jnp.float32)
    _, backward = jax.vjp(lambda x, w: token_logits.weighted_sums(x, labels, w), scores, weights)
    assert [x.shape for x in jax.tree.leaves(backward) if x.size >= B * T * V] == [(B, T, V)]

    def by_optax(scores: jax.Array, weights: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return jnp.sum((2 * losses + 3 * (scores.argmax(-1) == labels)) * weights)

    found = backward((jnp.float32(2), jnp.float32(3)))
    for got, wanted in zip(found, jax.grad(by_optax, argnums=(0, 1))(scores, weights), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_small_loss_of_large_logits_is_exact(num_chunks: int) -> None:
    """The largest logit is subtracted first: 100 + 1e-5 - 100 would round the loss to multiples of 8e-6."""
    x, tokens = jnp.ones((1, 2, 1)), jnp.array([[100.0], [88.5]])
    labels, weights = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2))
    loss, _ = token_logits.chunked_sums(num_chunks, TokenLogits(x, tokens), labels, weights)
    whole, _ = token_logits.weighted_sums(TokenLogits(x, tokens).own(), labels, weights)
    np.testing.assert_allclose([loss, whole], 2 * np.log1p(np.exp(-11.5)), rtol=1e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_padded_chunks(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """11 positions are computed as 3 chunks of 4."""
    logits, batch = make_logits(bias=bias)
    logits, batch = logits._replace(x=logits.x[:, :11]), {name: x[:, :11] for name, x in batch.items()}
    monkeypatch.setattr(token_logits, "CHUNK_BYTES", 4 * B * 11 * V // 3 + 1)
    assert logits.num_chunks == 3
    loss, correct, expected = by_hand(logits, batch)
    sums = cross_entropy.sums(logits, batch)
    np.testing.assert_allclose((sums.loss, sums.terms["correct"]), (loss, correct), rtol=1e-6)
    gradient = jax.grad(lambda logits: cross_entropy.sums(logits, batch).loss / 7)(logits)
    for got, want in zip(jax.tree.leaves(gradient), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("positions", "num_chunks"), [(1024, 16), (1000, 20), (509, 7), (2048, 32), (128, 2), (64, 1), (1, 1)], ids=str
)
def test_number_of_chunks(positions: int, num_chunks: int) -> None:
    """At most 32, each of at most CHUNK_BYTES, and if possible a divisor of the number of positions."""
    shapes = [(32, positions, 768), (50304, 768)]
    x, tokens = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    logits: Any = TokenLogits(x, tokens)  # type: ignore[arg-type]
    assert logits.num_chunks == num_chunks
    assert logits._replace(x=jax.ShapeDtypeStruct((0, positions, 768), jnp.bfloat16)).num_chunks == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 4, 5])
def test_split_words(num_chunks: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 4 devices has 13 words, the last one 2 of padding. Each differentiates 1/4 of the loss.

    The devices have the same hidden states, so that the gradient of these is the sum of theirs. Of equally likely
    words, the first one counts, also if they are on several devices.
    """
    size, logits, batch = 4, *make_logits(bias=bias)
    monkeypatch.setattr(token_logits, "CHUNK_BYTES", 4 * B * T * 13 // num_chunks)
    loss, correct, expected = by_hand(logits, batch)
    group, mesh = MeshGroup(size), jax.make_mesh((size,), (TENSOR,), axis_types=(AxisType.Auto,))
    pad = functools.partial(jnp.pad, constant_values=100)  # nothing may read it
    split = logits._replace(
        tokens=pad(logits.tokens, ((0, 2), (0, 0))),
        bias=None if logits.bias is None else pad(logits.bias, (0, 2)),
    )
    words, rows = SplitWords(group, V), PartitionSpec(TENSOR)

    def objective(logits: TokenLogits) -> tuple[jax.Array, Any]:
        sums = cross_entropy.sums(logits._replace(words=words), batch)
        return sums.loss / 7 / size, sums

    def gradient(x: Any, tokens: Any, bias: Any) -> Any:
        found, sums = jax.grad(objective, has_aux=True)(TokenLogits(x, tokens, bias))
        evaluated = cross_entropy.sums(TokenLogits(x, tokens, bias, words), batch)
        return found._replace(x=group.total(found.x)), sums, evaluated

    specs = (PartitionSpec(), rows, rows)
    of_logits: Any = TokenLogits(PartitionSpec(), rows, rows if bias else None)  # type: ignore[arg-type]
    outs = (of_logits, PartitionSpec(), PartitionSpec())
    mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False))
    found, sums, evaluated = mapped(*split[:3])
    for one in (sums, evaluated):
        np.testing.assert_allclose((one.loss, one.terms["correct"]), (loss, correct), rtol=1e-6)
    scores = logits.whole()
    by_optax = optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"])
    np.testing.assert_allclose(sums.loss, (by_optax * batch["weights"]).sum(), rtol=1e-6)
    for got, wanted in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(got[: len(wanted)], wanted, rtol=1e-5, atol=1e-6)
        assert not np.any(got[len(wanted) :])


class TwoAlike:
    """A group of two devices with equal words, of which this one is the first."""

    size = 2

    def index(self) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def total(self, x: jax.Array) -> jax.Array:
        return 2 * x

    def maximum(self, x: jax.Array) -> jax.Array:
        return x

    def columns(self, x: jax.Array) -> jax.Array:
        return x


@pytest.mark.parametrize("words", [None, SplitWords(TwoAlike(), 2 * V - 1)], ids=["all", "split"])
def test_rounded_logits_are_saved_once(words: SplitWords | None) -> None:
    """The forward pass of training saves them in 16 bits, and nothing else as large."""
    logits, batch = make_logits("bfloat16", bias=False)
    _, backward = jax.vjp(lambda one: cross_entropy.sums(one, batch).loss, logits._replace(words=words))
    large = [(x.shape, x.dtype) for x in jax.tree.leaves(backward) if x.size >= B * T * V]
    assert large == [((B, T, V), jnp.bfloat16)]


def test_the_gradient_by_the_weights() -> None:
    logits, batch = make_logits()
    by_optax = optax.softmax_cross_entropy_with_integer_labels(logits.whole(), batch["labels"])
    gradient = jax.grad(lambda weights: cross_entropy.sums(logits, {**batch, "weights": weights}).loss)
    np.testing.assert_allclose(gradient(batch["weights"]), by_optax, rtol=1e-5)


def test_equally_likely_words_on_several_devices() -> None:
    size, labels, weights = 4, jnp.array([[0, 3, 15]]), jnp.ones((1, 3))
    words, mesh = SplitWords(MeshGroup(size), 16), jax.make_mesh((size,), (TENSOR,), axis_types=(AxisType.Auto,))
    scores = jnp.zeros((1, 3, 16)).at[0, 2, jnp.array([7, 15])].set(1.0)

    def sums(scores: jax.Array) -> Any:
        return token_logits.weighted_sums(scores, labels, weights, words)

    last = PartitionSpec(None, None, TENSOR)
    mapped = jax.shard_map(sums, mesh=mesh, in_specs=last, out_specs=PartitionSpec(), check_vma=False)
    assert jax.jit(mapped)(scores)[1] == token_logits.weighted_sums(scores, labels, weights)[1] == 1


STRATEGIES = {
    "single, remat": ("--config.strategy=single", "--config.model.remat=full"),
    "sharding": ("--config.strategy=data_parallel", "--config.mesh.data=2"),
    "zero3": ("--config.strategy=data_parallel", "--config.mesh.data=2", "--config.exchange=zero3"),
    "1f1b": pipeline("1f1b", 2),
    "zb_h1": pipeline("zb_h1", 2, replicas=2),
}


GPT, BERT = Task("gpt", "causal_lm", layers=2), Task("bert", "masked_lm", layers=2)
PAIRS = [(name, task) for name in STRATEGIES for task in (GPT, BERT)]


@pytest.mark.parametrize(
    ("name", "task"),
    slow_except([("single, remat", GPT), ("sharding", GPT), ("zero3", BERT), ("1f1b", BERT)], PAIRS),
    ids=str,
)
def test_strategies_equal_one_device_with_whole_logits(name: str, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are of positions, so that no strategy has to move examples between devices."""
    expected = advance(shared(task, "--config.strategy=single"), task, start(task), 0, 3)
    monkeypatch.setattr(token_logits, "CHUNK_BYTES", 1)
    strategy = make(task, *STRATEGIES[name])
    got = advance(strategy, task, start(task), 0, 3)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-6)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=1e-6)
    for path, array in expected.params.items():
        assert relative_error(got.params[path], array) < 1e-6 or "['key']['bias']" in path, path
    if name != "sharding":  # on CPUs, XLA leaves the all-reduce of the token embedding's gradient in the loop
        assert all(row.is_explained for row in audit.audit(strategy.compile(), strategy.plan, TASKS[task.task](None)))
