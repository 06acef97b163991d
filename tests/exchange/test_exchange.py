import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.core.optimizer import clip_by_norm
from jaxpar.exchange import Exchange, reduce
from jaxpar.exchange.exchange import EVERY, AdamW, Rule, every
from jaxpar.exchange.fuse import averaged, fused
from jaxpar.exchange.named import EXCHANGES, make_exchange
from tests.exchange import compressors
from tests.exchange.replicas import Tree, adamw, axis, close, on_replicas, only, train

N, PASSES, STEPS = 4, 3, 2
START: Tree = {"a": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}
ADAMW = AdamW(lambda _: 0.1, 0.9, 0.999, 1e-8, 0.1, mask=lambda tree: jax.tree.map(lambda _: True, tree))
OPTIMIZER = optax.chain(clip_by_norm(1.0), optax.adamw(0.1, weight_decay=0.1))


def draw(steps: int) -> Tree:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(N, steps, *v.shape)).astype(np.float32) for k, v in START.items()}


def plain() -> Exchange:
    return averaged(fused(reduce.psum(axis(N)), 16), OPTIMIZER)


def norm(tree: Tree) -> float:
    return float(np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in tree.values())))


def test_averaged_is_a_step_of_the_mean() -> None:
    grads = draw(4)
    params, _, norms, state = train(N, plain(), START, grads)
    mean = {k: g.mean(0) for k, g in grads.items()}
    for step, expected in enumerate(adamw(START, mean, OPTIMIZER)):
        close({k: x[step] for k, x in only(params).items()}, expected, 1e-5, 1e-6)
        assert only(norms)[step] == pytest.approx(norm({k: g[step] for k, g in mean.items()}), rel=1e-5)
    assert only(state.optimizer)[1][0].count == 4


@pytest.mark.parametrize("name", [name for name in EXCHANGES if name != "dp"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_exact_exchanges_show_the_fault_of_a_replica(name: str, value: float) -> None:
    """Nobody looks for infinities and NaNs before these exchanges. Those that change the result may hide them."""
    exchange = make_exchange(name, axis(N), Rule(OPTIMIZER, START, adamw=ADAMW, num_steps=10))
    assert exchange.shows_nonfinite == (not EXCHANGES[name].differs)
    if not exchange.shows_nonfinite:
        return

    def replica(grads: Tree) -> jax.Array | None:
        params = {name: jnp.asarray(x) for name, x in START.items()}
        if exchange.shards:
            grads = exchange.shards.scatter(grads) if exchange.leaves_shards else grads
            params = exchange.shards.local(params)
        return exchange.update(grads, exchange.init(params), params).grad_norm

    grads = {name: x[:, 0] for name, x in draw(1).items()}
    assert np.isfinite(on_replicas(N, replica, grads)).all()
    grads["a"][2, 1, 0] = value
    assert not np.isfinite(on_replicas(N, replica, grads)).any()


@pytest.mark.parametrize("average", [False, True])
def test_passes_equal_one_pass_with_their_sum_or_mean(average: bool) -> None:
    grads = draw(STEPS * PASSES)
    params, updates, norms, state = train(N, every(PASSES, plain(), average=average), START, grads)
    passes = {k: g.reshape(N, STEPS, PASSES, *g.shape[2:]) for k, g in grads.items()}
    totals = {k: (g.mean if average else g.sum)(2, dtype=np.float32) for k, g in passes.items()}
    expected, _, _, inner = train(N, plain(), START, totals)
    close({k: x[:, PASSES - 1 :: PASSES] for k, x in params.items()}, expected, 1e-5, 1e-6)
    close(state.optimizer, inner.optimizer, 1e-5, 1e-6)
    for name, update in updates.items():
        assert [bool(np.any(update[:, step] != 0)) for step in range(STEPS * PASSES)] == [False, False, True] * STEPS
        np.testing.assert_array_equal(state.private["sums"][name], 0)
    assert norms is None


def test_passes_of_horovod() -> None:
    """The optimizer state does not change between exchanges, and the remaining passes stay accumulated."""
    rule, grads = Rule(OPTIMIZER, None), draw(PASSES + 1)
    exchange = make_exchange("horovod", axis(N), rule, backward_passes_per_step=PASSES)
    params, _, _, state = train(N, exchange, START, grads)
    alone = adamw(START, {k: g[:, :PASSES].sum(1).mean(0)[None] for k, g in grads.items()}, OPTIMIZER)[0]
    for name, x in only(params).items():
        np.testing.assert_array_equal(x[PASSES - 2], START[name])
        np.testing.assert_allclose(x[PASSES - 1], alone[name], 1e-5, 1e-6)
        np.testing.assert_array_equal(x[PASSES], x[PASSES - 1])
        np.testing.assert_array_equal(state.private["sums"][name], grads[name][:, PASSES])
    assert (only(state.optimizer)[1][0].count, only(state.private["passes"])) == (1, 1)


def test_passes_share_the_traffic() -> None:
    exchange = every(PASSES, plain(), average=True)
    assert sum(one.nbytes for one in plain().traffic(START, 1)) == 1.5 * 9 * 4
    assert sum(one.nbytes for one in exchange.traffic(START, 1)) == pytest.approx(1.5 * 9 * 4 / PASSES)
    assert exchange.branches == {EVERY: (1 - 1 / PASSES, 1 / PASSES)}
    assert make_exchange("horovod", axis(N), Rule(OPTIMIZER, None), backward_passes_per_step=1).branches == {}


@pytest.mark.parametrize(("name", "dtype"), [("ddp", "float8_e4m3fn"), ("byteps", "float8_e5m2")])
def test_float8_gradients_are_summed_in_float32(name: str, dtype: str) -> None:
    """Gradients far beyond the largest float8 do not overflow, because each shard that a replica sends has a scale."""
    grads = {k: 1e6 * g for k, g in draw(2).items()}
    exchange = make_exchange(name, axis(N), Rule(optax.sgd(1.0), START), wire_dtype=dtype)
    _, updates, _, state = train(N, exchange, START, grads)
    order = "ba" if name == "ddp" else "ab"  # ddp sends the last gradients first
    lossy = compressors.float8(dtype, 4096)
    servers = compressors.Servers(N, 9, lossy, lossy, feedback=False)
    for step in range(2):
        expected = servers.mean(np.concatenate([grads[k][:, step].reshape(N, -1) for k in order], axis=1))
        got = np.concatenate([only(updates[k])[step].reshape(-1) for k in order])
        close(got, -expected, 1e-6)
    assert not jax.tree.leaves(state.private)
