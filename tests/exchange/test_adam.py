import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.core.optimizer import at_step, clip_by_norm
from jaxpar.exchange import Exchange
from jaxpar.exchange.exchange import AdamW, Rule
from jaxpar.exchange.named import make_exchange
from tests.exchange import compressors
from tests.exchange.replicas import Tree, adamw, axis, close, only, train

STEPS, WARM = 10, 4
B1, B2, EPS, DECAY = 0.8, 0.95, 1e-2, 0.3
RNG = np.random.default_rng(0)
START: Tree = {k: RNG.normal(size=shape).astype(np.float32) for k, shape in {"bias": (5,), "kernel": (3, 4)}.items()}
DECAYED = {"bias": False, "kernel": True}
STAYS: dict[str, tuple[int, ...]] = {"bias": (2,), "kernel": (1, 3)}  # these have no gradient until v is frozen


class Case(NamedTuple):
    name: str
    n: int
    clip_norm: float
    group: int = 1


CASES = [
    *(Case("onebit_adam", 4, 0.0), Case("onebit_adam", 8, 1.5)),
    *(Case("bagua_qadam", 2, 1.5), Case("bagua_qadam", 4, 0.0)),
    *(Case("onebit_adam", 4, 1.5, group=2), Case("bagua_qadam", 8, 0.0, group=4)),
]


def schedule(count: Any) -> Any:
    return 0.2 / (1 + count)


def optimizer(clip_norm: float) -> optax.GradientTransformation:
    adam = optax.adamw(schedule, B1, B2, EPS, weight_decay=DECAY, mask=lambda _params: DECAYED)
    return optax.chain(clip_by_norm(clip_norm), adam) if clip_norm else adam


def make(case: Case, num_steps: int = STEPS, warmup: float = WARM / STEPS) -> Exchange:
    adamw = AdamW(schedule, B1, B2, EPS, DECAY, lambda _params: DECAYED)
    rule = Rule(optimizer(case.clip_norm), None, adamw, clip_norm=case.clip_norm, num_steps=num_steps)
    options = {"block": 2} if case.name == "onebit_adam" else {}
    return make_exchange(case.name, axis(case.n), rule, warmup=warmup, group=case.group, **options)


def draw(n: int) -> Tree:
    rng = np.random.default_rng(n)
    grads = {k: rng.normal(0.3, 1, size=(n, STEPS, *x.shape)).astype(np.float32) for k, x in START.items()}
    for name, place in STAYS.items():
        index: tuple[slice | int, ...] = (slice(None), slice(WARM), *place)
        grads[name][index] = 0
    return grads


@functools.cache
def outcome(case: Case) -> Any:
    """Train, and return the parameters after each step and the last state."""
    params, _, _, state = train(case.n, make(case), START, draw(case.n))
    return only(params), state


def flat(tree: Tree) -> np.ndarray:
    """Return the vector as it is sent, with the last array first."""
    return np.concatenate([np.asarray(tree[k]).astype(np.float64).reshape(-1) for k in ("kernel", "bias")])


def clipped(g: np.ndarray, clip_norm: float) -> np.ndarray:
    norm = np.linalg.norm(g)
    return g * clip_norm / norm if clip_norm and norm > clip_norm else g


class Adam:
    """Reference for the replicas' computation, on float64 vectors."""

    def __init__(self, case: Case):
        self.case, self.count = case, 0
        self.x, self.m, self.v = flat(START), np.zeros(17), np.zeros(17)
        one_bit = case.name == "onebit_adam"
        lossy = compressors.onebit("l2", 2) if one_bit else compressors.min_max_uint8
        # replica i of each group is a worker for shard i of the mean of its group
        self.num_groups, self.length = case.n // case.group, -(-17 // case.n) * case.n
        sizes = self.num_groups, self.length // case.group
        self.shards = [compressors.Servers(*sizes, lossy, lossy, feedback=one_bit) for _ in range(case.group)]
        self.decayed = flat({k: np.full(x.shape, DECAYED[k]) for k, x in START.items()})

    def exchanged(self, x_NL: np.ndarray) -> np.ndarray:
        padded = np.pad(x_NL, ((0, 0), (0, self.length - 17)))
        means = padded.reshape(self.num_groups, self.case.group, self.case.group, -1).mean(1)  # group, shard, element
        return np.concatenate([servers.mean(means[:, shard]) for shard, servers in enumerate(self.shards)])[:17]

    def step(self, g_NL: np.ndarray) -> None:
        clip_norm, rate = self.case.clip_norm, schedule(self.count)
        self.count += 1
        if self.count <= WARM:
            g = clipped(g_NL.mean(0), clip_norm)
            self.m, self.v = B1 * self.m + (1 - B1) * g, B2 * self.v + (1 - B2) * g**2
        else:
            local = [B1 * self.m + (1 - B1) * clipped(g, clip_norm) for g in g_NL]
            self.m = np.where(self.v > 0, self.exchanged(np.stack(local)), 0)
        v = self.v / (1 - B2 ** min(self.count, WARM))
        direction = np.where(self.v > 0, self.m / (1 - B1**self.count) / (np.sqrt(v) + EPS), 0)
        self.x = self.x - rate * (direction + DECAY * self.decayed * self.x)


@pytest.mark.parametrize("case", CASES)
def test_as_in_numpy_through_the_switch(case: Case) -> None:
    grads = draw(case.n)
    (params, state), adam = outcome(case), Adam(case)
    for step in range(STEPS):
        adam.step(np.stack([flat({k: g[i, step] for k, g in grads.items()}) for i in range(case.n)]))
        np.testing.assert_allclose(flat({k: x[step] for k, x in params.items()}), adam.x, 1e-4, 1e-5)
    inner = only(state.optimizer)
    (moments,) = [s for s in jax.tree.leaves(inner, is_leaf=is_adam) if is_adam(s)]
    np.testing.assert_allclose(flat(moments.mu), adam.m, 1e-4, 1e-5)
    unbiased = flat(moments.nu) / (1 - B2**STEPS)
    np.testing.assert_allclose(unbiased, adam.v / (1 - B2**WARM), 1e-5, 1e-7)
    np.testing.assert_array_equal(state.private["steps"], STEPS)


def is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


@pytest.mark.parametrize("case", CASES[:2])
def test_before_the_switch_it_is_adamw_of_the_mean(case: Case) -> None:
    params, _ = outcome(case)
    mean = {k: g[:, :WARM].mean(0) for k, g in draw(case.n).items()}
    alone = adamw(START, mean, optimizer(case.clip_norm))
    for step, expected in enumerate(alone):
        close({k: x[step] for k, x in params.items()}, expected, 1e-6, 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_parameters_without_a_second_moment_stay(case: Case) -> None:
    params = outcome(case)[0]
    assert np.all(params["bias"][:, *STAYS["bias"]] == START["bias"][STAYS["bias"]])
    kernel = START["kernel"][STAYS["kernel"]]
    decays = np.cumprod([1 - schedule(count) * DECAY for count in range(STEPS)])
    np.testing.assert_allclose(params["kernel"][:, *STAYS["kernel"]], kernel * decays, 1e-5)


@pytest.mark.parametrize("case", CASES[1:3])
def test_its_state_is_adamws(case: Case) -> None:
    state = only(outcome(case)[1].optimizer)
    fresh = optimizer(case.clip_norm).init(START)

    def compare(got: Any, like: Any) -> None:
        assert (got.shape, got.dtype) == (like.shape, like.dtype)

    jax.tree.map(compare, state, fresh)  # raises if the structures differ
    counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == np.int32]
    assert [int(count) for count in counts] == [STEPS, STEPS]


def test_a_run_that_comes_from_adamw_warms_up() -> None:
    """Adam's v may reflect only the last gradients, so it must not be frozen immediately."""
    case, grads = Case("bagua_qadam", 2, 0.0), draw(2)
    mean = {k: g.mean(0) for k, g in grads.items()}
    state, params = optimizer(0).init(START), dict(START)
    for step in range(6):
        updates, state = optimizer(0).update({k: g[step] for k, g in mean.items()}, state, params)
        params = {k: np.asarray(params[k] + updates[k]) for k in params}
    exchange = make(case)
    going_on = exchange._replace(init=lambda x: exchange.init(x)._replace(optimizer=state))
    got, _, _, _ = train(2, going_on, params, {k: g[:, 6:7] for k, g in grads.items()})
    updates, _ = optimizer(0).update({k: g[6] for k, g in mean.items()}, state, params)
    close({k: x[0] for k, x in only(got).items()}, {k: params[k] + updates[k] for k in params}, 1e-5, 1e-6)


@pytest.mark.parametrize("name", ["onebit_adam", "bagua_qadam"])
def test_adamw_goes_on_with_what_it_left(name: str) -> None:
    """AdamW can continue long after v was frozen, even for parameters that never had a gradient."""
    grads = {k: np.repeat(g, 8, axis=1) for k, g in draw(2).items()}
    grads["kernel"][..., 0] = 0
    params, _, _, last = train(2, make(Case(name, 2, 0.0)), START, grads)
    state, params = only(last.optimizer), {k: x[-1] for k, x in only(params).items()}
    rate = float(schedule(8 * STEPS))
    none = {k: np.zeros_like(x) for k, x in params.items()}
    updates, _ = optimizer(0).update(none, state, params)
    largest = max(float(np.abs(u + rate * DECAY * DECAYED[k] * params[k]).max()) for k, u in updates.items())
    assert 0 < largest < 5 * rate


@pytest.mark.parametrize("name", ["onebit_adam", "bagua_qadam"])
def test_the_learning_rate_follows_the_schedule_not_the_updates(name: str) -> None:
    """Adam has counted more updates than the schedule has steps, as after asynchronous steps."""
    exchange = make(Case(name, 2, 0.0))

    def init(params: Tree) -> Any:
        state = exchange.init(params)
        counted = jax.tree.map(lambda x: x + (1 if x.ndim else 80), state.optimizer)  # v = 1, so that m counts
        scheduled = at_step(counted, jnp.int32(3))
        return state._replace(optimizer=scheduled, private={**state.private, "steps": jnp.int32(WARM)})

    none = {k: np.zeros((2, 1, *x.shape), np.float32) for k, x in START.items()}
    params, _, _, state = train(2, exchange._replace(init=init), START, none)
    counts = sorted(int(x) for x in jax.tree.leaves(only(state.optimizer)) if x.dtype == np.int32)
    assert counts == [4, 81]
    moved = only(params)["kernel"][0] - START["kernel"]
    direction = B1 / (1 - B1**81) / (np.sqrt(1 / (1 - B2**80)) + EPS)  # of m = v = 1, without a gradient
    np.testing.assert_allclose(moved, -schedule(3) * (direction + DECAY * START["kernel"]), rtol=1e-3, atol=1e-5)


def test_a_short_run_trains() -> None:
    """The warm-up share rounds to 0 steps, but v must not be frozen at zero."""
    case = Case("onebit_adam", 2, 0.0)
    grads = {k: g[:, WARM : WARM + 2] for k, g in draw(2).items()}
    params = only(train(2, make(case, num_steps=2, warmup=0.2), START, grads)[0])
    assert np.all(params["bias"][-1] != START["bias"])


@pytest.mark.parametrize("name", ["onebit_adam", "bagua_qadam"])
def test_traffic_is_of_both_stages(name: str) -> None:
    exact, *lossy = make(Case(name, 4, 0.0)).traffic(START, 1)
    assert (exact.kind, exact.dtype) == ("all-reduce", "float32")
    assert exact.nbytes == pytest.approx(WARM / STEPS * 2 * 3 / 4 * 17 * 4)
    payload = 1 + 4 * 3 if name == "onebit_adam" else 5 + 8  # bytes for a shard of 5 elements, in blocks of 2
    assert [(one.kind, one.dtype) for one in lossy] == [("all-to-all", "uint8"), ("all-gather", "uint8")]
    assert [one.nbytes for one in lossy] == [pytest.approx((1 - WARM / STEPS) * 3 * payload)] * 2
