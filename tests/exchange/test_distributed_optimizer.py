import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxpar.exchange import EXCHANGES, broadcast, distributed_optimizer, state_specs
from jaxpar.exchange.named import AVERAGE
from tests.exchange.replicas import DATA, on_replicas, only

N, ROWS, WIDTH, STEPS = 4, 32, 16, 6
EXACT = ("ddp", "horovod", "byteps")
CODED = ("byteps_onebit", "byteps_topk", "byteps_randomk", "byteps_dithering", "bagua_bytegrad")
OWN = ("horovod_adasum", "bagua_decentralized", "bagua_low_precision_decentralized", "bagua_model_average")
OPTIMIZER = optax.adamw(0.1, weight_decay=0.01)

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
TARGETS = (INPUTS @ RNG.normal(size=(WIDTH, 1)) + 0.3).astype(np.float32)
START = {"bias": np.zeros(1, np.float32), "kernel": np.zeros((WIDTH, 1), np.float32)}


def loss(params: Any, inputs: Any, targets: Any) -> Any:
    return jnp.mean((inputs @ params["kernel"] + jnp.broadcast_to(params["bias"], (len(inputs), 1)) - targets) ** 2)


def test_names_are_all_there_are() -> None:
    names = {*EXACT, *CODED, *OWN}
    assert set(EXCHANGES) - names == {"dp", "zero1", "zero2", "zero3", "hsdp", "onebit_adam", "bagua_qadam", "powersgd"}
    assert names < set(EXCHANGES)


@pytest.mark.parametrize("name", ["", "hovorod", "dp", "zero1", "zero3", "onebit_adam", "bagua_qadam", "powersgd"])
def test_other_exchanges_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"exchange is '.*it must be"):
        state_specs(DATA, name)
    with pytest.raises(ValueError, match=r"exchange is '.*it must be") as error:
        distributed_optimizer(OPTIMIZER, DATA, name)
    assert all(known in str(error.value) for known in (repr(name), *EXACT, *CODED, *OWN))
    assert not any(other in str(error.value).split("it must be")[1] for other in ("zero", "onebit_adam", "qadam"))


@pytest.mark.parametrize(
    ("name", "option", "allowed"),
    [
        (
            "horovod",
            "levels",
            ("bucket_bytes", "wire_dtype", "algorithm", "predivide", "backward_passes_per_step", AVERAGE),
        ),
        ("ddp", "backward_passes_per_step", ("bucket_bytes", "wire_dtype", "algorithm", "group")),
        ("byteps_topk", "block", ("bucket_bytes", "ratio", "momentum")),
        ("bagua_model_average", "ratio", ("bucket_bytes", "interval")),
        ("horovod_adasum", "bucket_bytes", ("backward_passes_per_step", AVERAGE)),
        ("bagua_decentralized", "axis", ()),
    ],
)
def test_options_it_does_not_have_are_refused(name: str, option: str, allowed: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"{option} is .*; it must be None with exchange '{name}'") as error:
        use(N, distributed_optimizer(OPTIMIZER, DATA, name, **{option: 1}))
    assert all(known in str(error.value) for known in allowed)


@pytest.mark.parametrize(
    ("name", "n", "options", "message"),
    [
        ("bagua_decentralized", 3, {}, "exchange is 'bagua_decentralized' with 3 replicas; their number must be even"),
        ("horovod_adasum", 3, {}, "with 3 replicas; their number must be a power of 2"),
        ("ddp", 4, {"group": 3}, "group is 3; it must divide the number of replicas, 4"),
        ("ddp", 4, {"algorithm": "tree"}, "algorithm is 'tree'; it must be one of psum, ring"),
        ("byteps_dithering", 4, {"levels": 128}, "levels is 128; it must be between 1 and 127"),
        ("horovod", 2, {"wire_dtype": "foo"}, "wire_dtype is 'foo'; it must be one of float16"),
        ("horovod", 2, {"wire_dtype": None}, "wire_dtype is 'None'; it must be one of float16"),
        ("ddp", 2, {"wire_dtype": jnp.int32}, "wire_dtype is 'int32'; it must be one of float16"),
        ("horovod", 2, {"predivide": "two"}, "predivide is 'two'; it must be a number"),
    ],
)
def test_what_cannot_work_is_refused(name: str, n: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(n, distributed_optimizer(OPTIMIZER, DATA, name, **options))


def test_shard_map_must_not_check_what_varies() -> None:
    """With check_vma, jax.grad sums gradients over replicas, and the exchange would sum them again."""
    with pytest.raises(ValueError, match="check_vma of shard_map is True; it must be False"):
        use(N, distributed_optimizer(OPTIMIZER, DATA, "ddp"), check_vma=True)


def use(n: int, optimizer: optax.GradientTransformation, *, check_vma: bool = False) -> None:
    """Trace the optimizer's init on n replicas."""
    mesh, same = Mesh(np.array(jax.devices()[:n]), (DATA,)), PartitionSpec()
    mapped = jax.shard_map(optimizer.init, mesh=mesh, in_specs=same, out_specs=same, check_vma=check_vma)
    jax.eval_shape(mapped, START)


@functools.cache
def trained(name: str, **options: Any) -> tuple[dict[str, np.ndarray], list[float]]:
    """Return all replicas' parameters [N, ...] after some steps, and the loss of the whole batch before each step."""
    mesh = Mesh(np.array(jax.devices()[:N]), (DATA,))
    optimizer = distributed_optimizer(OPTIMIZER, DATA, name, **options)
    each, specs = PartitionSpec(DATA), state_specs(DATA, name)

    def init(params: Any) -> Any:
        return optimizer.init(jax.tree.map(lambda x: x[0], params))

    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        params = jax.tree.map(lambda x: x[0], params)
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], params), state, value[None]

    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    begin = jax.jit(mapped(init, in_specs=each, out_specs=specs))
    go_on = jax.jit(mapped(step, in_specs=(each, specs, each, each), out_specs=(each, specs, each)))
    params: Any = jax.tree.map(lambda x: np.broadcast_to(x, (N, *x.shape)), START)
    state = jax.block_until_ready(begin(params))
    losses = []
    for _ in range(STEPS):
        params, state, values = jax.block_until_ready(go_on(params, state, INPUTS, TARGETS))
        losses.append(float(np.mean(values)))
    return jax.tree.map(np.asarray, params), losses


@functools.cache
def alone() -> tuple[dict[str, np.ndarray], list[float]]:
    """Train on one device, on the whole batch."""
    params, state, losses = dict(START), OPTIMIZER.init(START), []
    gradient = jax.jit(jax.value_and_grad(loss))
    for _ in range(STEPS):
        value, grads = gradient(params, INPUTS, TARGETS)
        updates, state = OPTIMIZER.update(grads, state, params)
        params = {k: np.asarray(params[k] + updates[k]) for k in params}
        losses.append(float(value))
    return params, losses


@pytest.mark.parametrize(
    ("name", "options"),
    [("ddp", ()), ("horovod", ()), ("byteps", ()), ("ddp", (("group", 2),)), ("horovod", (("predivide", 4.0),))],
)
def test_a_step_is_that_of_the_whole_batch(name: str, options: tuple[tuple[str, Any], ...]) -> None:
    params, losses = trained(name, **dict(options))
    expected, expected_losses = alone()
    for key, x in params.items():
        np.testing.assert_allclose(x, np.stack([expected[key]] * N), 1e-5, 1e-5)
    np.testing.assert_allclose(losses, expected_losses, 1e-5)


@pytest.mark.parametrize("name", [*CODED, *OWN])
def test_others_learn(name: str) -> None:
    options = {"ratio": 0.5} if "k" in name.split("_")[-1] else {}
    params, losses = trained(name, **options, **{"min_compress_bytes": 0} if name.startswith("byteps_") else {})
    assert losses[-1] < 0.85 * losses[0]
    assert all(np.all(np.isfinite(x)) for x in params.values())
    are_same = all(np.all(x == x[0]) for x in params.values())
    assert are_same == (name not in OWN[1:])
    assert losses != pytest.approx(alone()[1], rel=1e-5)


@pytest.mark.parametrize("name", ["ddp", "horovod_adasum", "bagua_model_average"])
def test_what_else_is_given_reaches_the_optimizer(name: str) -> None:
    def update(grads: Any, state: Any, _params: Any = None, *, factor: Any, **_rest: Any) -> Any:
        return jax.tree.map(lambda g: -factor * g, grads), state

    scaled = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    optimizer = distributed_optimizer(scaled, DATA, name)

    def step(grads: Any) -> Any:
        return optimizer.update(grads, optimizer.init(grads), grads, factor=3.0)[0]

    got = on_replicas(2, step, {"x": np.ones((2, 5), np.float32)})
    np.testing.assert_array_equal(got["x"], -3 * np.ones((2, 5)))


def test_a_dtype_is_any_that_numpy_knows() -> None:
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.float16, jnp.float8_e5m2):
        use(2, distributed_optimizer(OPTIMIZER, DATA, "ddp", wire_dtype=dtype))


def test_broadcast() -> None:
    x = np.array([[-0.0, np.nan, 3.0], [1.0, 2.0, 4.0], [5.0, 6.0, 7.0]], np.float32)
    got = on_replicas(3, lambda x: broadcast(x, DATA), {"x": x, "n": np.arange(3)})
    assert got["x"].tobytes() == np.stack([x[0]] * 3).tobytes()
    assert got["n"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "options"),
    [("horovod", {"backward_passes_per_step": 2}), ("bagua_model_average", {"interval": 2}), ("horovod_adasum", {})],
)
@pytest.mark.parametrize(("of_params", "of_grads"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_dtypes_may_differ_and_arrays_be_empty(name: str, options: Any, of_params: str, of_grads: str) -> None:
    optimizer = distributed_optimizer(optax.sgd(0.5), DATA, name, **options)
    shapes = {"x": (2, 5), "none": (2, 0, 3)}

    def step(grads: Any) -> Any:
        params = {key: jnp.ones(x.shape, of_params) for key, x in grads.items()}
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(jax.tree.map(lambda g: g.astype(of_grads), grads), state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x.astype(jnp.float32), params)

    got = on_replicas(2, step, {key: np.ones(shape, np.float32) for key, shape in shapes.items()})
    np.testing.assert_allclose(got["x"], 0.0, atol=1e-2)


def test_an_optimizer_that_takes_no_parameters() -> None:
    optimizer = distributed_optimizer(optax.sgd(1.0), DATA, "horovod", backward_passes_per_step=2)

    def step(grads: Any) -> Any:
        return optimizer.update(grads, optimizer.init(grads))[0]

    np.testing.assert_array_equal(on_replicas(2, step, {"x": np.ones((2, 5), np.float32)})["x"], 0)


def test_weights_that_neighbours_cannot_know_exactly_are_refused() -> None:
    optimizer = distributed_optimizer(OPTIMIZER, DATA, "bagua_low_precision_decentralized")
    with pytest.raises(ValueError, match="parameters are bfloat16; they must be float32"):
        on_replicas(2, lambda x: optimizer.init(x.astype(jnp.bfloat16)).private, np.ones((2, 5), np.float32))


def test_ddp_in_float16_does_not_overflow_where_horovod_does() -> None:
    """PyTorch's fp16 hook divides by the number of replicas before the sum, Horovod by default after it."""
    params = {"w": jnp.zeros(8)}

    def replica(grads: dict[str, jax.Array]) -> Any:
        result = {}
        for name in ("ddp", "horovod"):
            optimizer = distributed_optimizer(optax.sgd(1.0), DATA, name, wire_dtype="float16")
            result[name] = optimizer.update(grads, optimizer.init(params), params)[0]["w"]
        return result

    updates = only(on_replicas(4, replica, {"w": np.full((4, 8), 3e4, np.float32)}))
    np.testing.assert_array_equal(updates["ddp"], -np.float32(np.float16(7500)) * 4)
    assert np.all(np.isinf(updates["horovod"]))
