from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.core.optimizer import clip_by_norm
from jaxpar.exchange.compress import min_max_uint8
from jaxpar.exchange.exchange import Rule
from jaxpar.exchange.named import make_exchange
from jaxpar.exchange.zero import Codes, Order, Shards, shard_steps, zero
from jaxpar.layout import pad, shard_shape, split_dim, unpad
from tests.exchange import compressors
from tests.exchange.replicas import Tree, adamw, axis, close, on_replicas, only, repeated, train

SHAPES: dict[str, tuple[int, ...]] = {"a": (5,), "b": (3, 7), "c": (8, 8), "d": (2, 3, 5), "e": ()}
DIMS = {"a": 0, "b": 1, "c": 0, "d": 2}  # along which they are sharded; the scalar is not sharded
STEPS = 5
LIMITS = (1, 300)  # bytes of a bucket: for one array, for several


def draw(*leading: int) -> Tree:
    rng = np.random.default_rng(len(leading))
    return {k: rng.normal(size=(*leading, *shape)).astype(np.float32) for k, shape in SHAPES.items()}


def cut(x: np.ndarray, dim: int, n: int) -> np.ndarray:
    """Return the shards of an array, [N, ...]: slices along the dim, the last ones padded with zeros."""
    size = -(-x.shape[dim] // n)
    result = []
    for i in range(n):
        part = np.take(x, range(min(i * size, x.shape[dim]), min((i + 1) * size, x.shape[dim])), axis=dim)
        missing = [(0, size - part.shape[dim] if d == dim else 0) for d in range(x.ndim)]
        result.append(np.pad(part, missing))
    return np.stack(result)


def join(x_N: np.ndarray, dim: int) -> np.ndarray:
    """Return the padded array from its shards."""
    return np.concatenate(list(x_N), axis=dim)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_shards(n: int) -> None:
    tree, others, weights = draw(), draw(n), draw(n)

    def replica(tree: Tree, others: Tree, weights: Tree) -> Any:
        results = []
        for num_bytes in LIMITS:
            shards = Shards(axis(n), jax.eval_shape(lambda: tree), num_bytes)
            local = shards.local(tree)

            def weighted(local: Any, shards: Shards = shards) -> jax.Array:
                return optax.tree.vdot(shards.gather(local), weights)

            results.append((local, shards.scatter(others), shards.gather(local), jax.grad(weighted)(local)))
        return results

    for local, scattered, gathered, slope in on_replicas(n, replica, repeated(n, tree), others, weights):
        close(only(gathered), tree, 0)
        np.testing.assert_array_equal(local["e"], np.repeat(tree["e"], n))
        np.testing.assert_array_equal(scattered["e"], others["e"])  # `ShardSteps.mean` adds up scalars
        for name, dim in DIMS.items():
            np.testing.assert_array_equal(local[name], cut(tree[name], dim, n))
            np.testing.assert_allclose(scattered[name], cut(others[name].sum(0), dim, n), 1e-5, 1e-5)
            np.testing.assert_allclose(slope[name], cut(weights[name].sum(0), dim, n), 1e-5, 1e-5)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("coded", [("params",), ("grads",), ("params", "grads")])
def test_quantized_shards(n: int, coded: tuple[str, ...]) -> None:
    """Every shard has a range of its own, and the gradient is that of `gather` without compression."""
    tree, weights = draw(), draw(n)
    codes = Codes(**dict.fromkeys(coded, min_max_uint8()))

    def replica(tree: Tree, weights: Tree) -> Any:
        results = []
        for num_bytes in LIMITS:
            shards = Shards(axis(n), jax.eval_shape(lambda: tree), num_bytes, codes)

            def weighted(local: Any, shards: Shards = shards) -> jax.Array:
                return optax.tree.vdot(shards.gather(local), weights)

            local = shards.local(tree)
            results.append((shards.gather(local), jax.grad(weighted)(local)))
        return results

    lossy_params, lossy_grads = (compressors.min_max_uint8 if which in coded else np.asarray for which in Codes._fields)
    for gathered, slope in on_replicas(n, replica, repeated(n, tree), weights):
        close(only(gathered)["e"], tree["e"], 0)
        for name, dim in DIMS.items():
            sent = join(np.stack([lossy_params(shard) for shard in cut(tree[name], dim, n)]), dim)
            np.testing.assert_allclose(only(gathered)[name], unpad(sent, SHAPES[name]), 1e-5, 1e-5)
            received = sum(np.stack([lossy_grads(shard) for shard in cut(of, dim, n)]) for of in weights[name])
            np.testing.assert_allclose(slope[name], received, 1e-5, 1e-5)
            if "params" in coded:
                assert np.abs(only(gathered)[name] - tree[name]).max() > 1e-4


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_sizes_of_shards(n: int) -> None:
    for name, shape in [(name, SHAPES[name]) for name in DIMS]:
        assert split_dim(shape) == DIMS[name]
        assert shard_shape(shape, n) == cut(np.zeros(shape), DIMS[name], n).shape[1:]
        x = draw()[name]
        np.testing.assert_array_equal(pad(x, n, np), join(cut(x, DIMS[name], n), DIMS[name]))
        np.testing.assert_array_equal(unpad(pad(x, n, np), shape), x)
    assert (split_dim(()), shard_shape((), n), pad(np.ones(()), n, np)) == (None, (), 1)
    elements = {1: 5 + 21 + 64 + 30, 2: 3 + 12 + 32 + 18, 3: 2 + 9 + 24 + 12, 4: 2 + 6 + 16 + 12, 8: 1 + 3 + 8 + 6}[n]
    assert Shards(axis(n), draw(), 100).nbytes == n * 4 * elements
    halves = {k: x.astype(np.float16) for k, x in draw().items()}
    assert Shards(axis(n), halves, 100).nbytes == n * 2 * elements


@pytest.mark.parametrize("num_bytes", LIMITS)
def test_arrays_of_two_dtypes(num_bytes: int) -> None:
    tree = draw() | {"b": draw()["b"].astype(np.float16)}
    others = {k: np.stack([x, 2 * x, -x] if x.ndim else [2 * x] * 3) for k, x in tree.items()}  # scalars are not summed

    def replica(x: Tree) -> Any:
        shards = Shards(axis(3), jax.eval_shape(lambda: x), num_bytes)
        return shards.gather(shards.scatter(x))

    got = only(on_replicas(3, replica, others))
    assert {k: x.dtype for k, x in got.items()} == {k: x.dtype for k, x in tree.items()}
    close(got, {k: 2 * x for k, x in tree.items()}, 1e-2, 1e-5)


@pytest.mark.parametrize("num_bytes", LIMITS)
def test_narrow_arrays_are_gathered_narrow(num_bytes: int) -> None:
    """Shards are cast before they are sent. Their gradients are cast back before the sum over replicas."""
    n, tree, weights = 4, draw(), draw(4)
    narrow = {"b": jnp.bfloat16, "d": jnp.float16}
    shapes = {k: jax.ShapeDtypeStruct(x.shape, narrow.get(k, np.float32)) for k, x in tree.items()}

    def replica(tree: Tree, weights: Tree) -> Any:
        shards = Shards(axis(n), shapes, num_bytes)

        def weighted(local: Any) -> jax.Array:
            return optax.tree.vdot(jax.tree.map(lambda x: x.astype(np.float32), shards.gather(local)), weights)

        local = shards.local(tree)
        return shards.gather(local), jax.grad(weighted)(local)

    gathered, slope = on_replicas(n, replica, repeated(n, tree), weights)
    for name, dim in DIMS.items():
        dtype = shapes[name].dtype
        assert gathered[name].dtype == dtype
        np.testing.assert_array_equal(only(gathered)[name], tree[name].astype(dtype))
        assert slope[name].dtype == np.float32
        expected = weights[name].astype(dtype).astype(np.float32).sum(0)
        np.testing.assert_allclose(slope[name], cut(expected, dim, n), 1e-6, 1e-6)
    sent = {one.kind: one for one in zero(axis(n), 3, OPTIMIZER, tree, num_bytes).traffic({"layer": shapes}, 1)}
    elements = {"a": 2, "b": 6, "c": 16, "d": 12}
    widths = {"a": 4, "b": 2, "c": 4, "d": 2}
    assert sent["reduce-scatter"].dtype == "float32"
    assert sent["reduce-scatter"].nbytes == 3 * 4 * sum(elements.values())
    assert sent["all-gather"].dtype == "uint16"
    assert sent["all-gather"].nbytes == 2 * 3 * sum(elements[k] * widths[k] for k in elements)


OPTIMIZER = optax.chain(clip_by_norm(0.5), optax.adamw(0.05, weight_decay=0.1))


def gradients(n: int) -> Tree:
    """Return the gradients of each replica in each step, [N, S, ...]."""
    return {k: x.swapaxes(0, 1) for k, x in draw(STEPS, n).items()}


def assert_as_on_one_device(n: int, params: Tree, norms: np.ndarray) -> None:
    """Compare parameters after each step, [S, ...], with training on one device."""
    mean = {k: g.mean(0) for k, g in gradients(n).items()}
    for step, expected in enumerate(adamw(draw(), mean, OPTIMIZER)):
        close({k: x[step] for k, x in params.items()}, expected, 1e-6, 1e-6)
        norm = np.sqrt(sum(np.sum(g[step].astype(np.float64) ** 2) for g in mean.values()))
        np.testing.assert_allclose(norms[:, step], norm, 1e-5)


def assert_padding_is_zero(_n: int, tree: Any) -> None:
    """Check the padding of shards [N, ...]."""
    for name, dim in DIMS.items():
        whole = join(tree[name], dim)
        assert np.any(whole != 0)
        np.testing.assert_array_equal(np.delete(whole, range(SHAPES[name][dim]), axis=dim), 0)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("n", [3, 8])
def test_stages_with_whole_parameters(n: int, stage: int) -> None:
    exchange = zero(axis(n), stage, OPTIMIZER, draw(), 300)
    assert (exchange.scatter is not None, exchange.fetch is not None) == (stage == 2, False)
    params, _, norms, state = train(n, exchange, draw(), gradients(n))
    assert_as_on_one_device(n, only(params), norms)
    adam = state.optimizer[1][0]
    assert {k: x.shape[1:] for k, x in adam.mu.items()} == {k: shard_shape(v, n) for k, v in SHAPES.items()}
    for moment in (adam.mu, adam.nu):
        assert_padding_is_zero(n, moment)


@pytest.mark.parametrize(("n", "group"), [(3, 3), (8, 8), (6, 3), (8, 2), (4, 1)])
def test_stage_with_divided_parameters(n: int, group: int) -> None:
    """Gradients are taken through `fetch` with respect to the replica's shards, as in a training step."""
    exchange = zero(axis(n), 3, OPTIMIZER, draw(), 300, group=group)
    assert exchange.copies == n // group
    fetch = exchange.fetch
    assert fetch is not None
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, draw()))

    def replica(params: Tree, grads: Tree) -> Any:
        def step(carry: Any, g: Any) -> Any:
            local, state = carry
            slope = jax.grad(lambda x: optax.tree.vdot(fetch(shapes, x), g))(local)
            made = exchange.update(slope, state, local)
            local = optax.apply_updates(local, made.updates)
            return (local, made.state), (fetch(shapes, local), made.grad_norm)

        local = Shards(axis(n).within(group), params, 300).local(params)
        return jax.lax.scan(step, (local, exchange.init(local)), grads)

    (local, state), (params, norms) = on_replicas(n, replica, repeated(n, draw()), gradients(n))
    assert_as_on_one_device(n, only(params), norms)
    adam = state.optimizer[1][0]
    for tree in (local, adam.mu, adam.nu):
        for name, x in tree.items():
            np.testing.assert_array_equal(x, np.tile(x[:group], (n // group, *[1] * (x.ndim - 1))), err_msg=name)
        assert_padding_is_zero(group, {name: x[:group] for name, x in tree.items()})


@pytest.mark.parametrize(("stage", "scattered", "gathered"), [(1, 1, 1), (2, 5, 1), (3, 5, 10)])
def test_traffic_of_five_microbatches(stage: int, scattered: int, gathered: int) -> None:
    once = 3 * 4 * (2 + 6 + 16 + 12)
    traffic = zero(axis(4), stage, OPTIMIZER, draw(), 300).traffic(draw(), 5)
    assert [(one.kind, one.dtype, one.nbytes) for one in traffic] == [
        ("reduce-scatter", "float32", scattered * once),
        ("all-gather", "float32", gathered * once),
    ]
    num_vectors = 4 if stage == 3 else 3  # stage 3: one each for a, b, c, d; otherwise d, c, b with a
    assert [one.messages for one in traffic] == [scattered * num_vectors * 3, gathered * num_vectors * 3]


@pytest.mark.parametrize(
    ("name", "n", "messages"),
    [
        *(("zero1", 8, 7), ("zero2", 16, 3), ("zero2", 32, 2), ("zero2", 4096, 1)),
        *(("zero3", 8, 7), ("zero3", 16, 1), ("hsdp", 16, 7)),
    ],
)
def test_messages_are_larger_between_nodes(name: str, n: int, messages: int) -> None:
    """The seven arrays of the layer have 16 MiB each: one, three or six of them fit into 25 MiB for each node of 8."""
    params = {"layer": {key: jax.ShapeDtypeStruct((2048, 2048), np.float32) for key in "abcdefg"}}
    exchange = make_exchange(name, axis(n), Rule(optax.sgd(1.0), params))
    [scattered] = [one for one in exchange.traffic(params, 1) if one.kind == "reduce-scatter"]
    assert scattered.messages == messages * (min(n, 8) - 1 if name == "hsdp" else n - 1)


LAYERS = ("embed", *(f"block_{number}" for number in range(12)), "head")


def messages_of(function: Any, n: int, *arguments: Any) -> tuple[Any, list[Any]]:
    """Return the traced function of one of n replicas, and its collectives, in order."""
    traced = jax.make_jaxpr(function, axis_env=[(axis(n).name, n)])(*arguments).jaxpr
    kinds = "reduce_scatter", "all_gather", "psum"
    return traced, [equation for equation in traced.eqns if equation.primitive.name in kinds]


def test_predicted_messages_are_those_sent() -> None:
    """The buckets of whole models depend on the order of layers, in the traffic as in gradients that are scattered."""
    n, grads = 2, {layer: {"w": np.zeros(4 * (number + 1), np.float32)} for number, layer in enumerate(LAYERS)}
    for stage in (1, 2):
        exchange = zero(axis(n), stage, optax.sgd(0.1), grads, 150, order=Order(LAYERS))
        assert exchange.shards is not None
        sent = {row.kind: row.messages for row in exchange.traffic(grads, 1)}
        assert len(messages_of(exchange.shards.scatter, n, grads)[1]) == sent["reduce-scatter"] == sent["all-gather"]
        by_name = shard_steps(axis(n), stage, 150)
        assert len(messages_of(by_name.scatter, n, grads)[1]) > sent["reduce-scatter"]


def test_groups_send_the_gradients_of_the_last_layers_first() -> None:
    shards = {layer: {"w": np.zeros(2 * (number + 1), np.float32)} for number, layer in enumerate(LAYERS)}
    steps = shard_steps(axis(4), 3, 1, group=2, order=Order(LAYERS))
    sizes = [equation.invars[0].aval.size for equation in messages_of(steps.mean, 4, shards)[1]]
    assert sizes == [2 * number for number in range(len(LAYERS), 0, -1)]


@pytest.mark.parametrize("in_turn", [False, True])
def test_the_gradients_of_the_last_layers_are_sent_first(in_turn: bool) -> None:
    """Buckets follow the layers, not the order of their names, in which block_10 comes before block_2.

    In turn, each message depends on the one before. The shards stay the same.
    """
    n, sizes = 2, {layer: 4 * (number + 1) for number, layer in enumerate(LAYERS)}
    steps = shard_steps(axis(n), 1, 1, order=Order(LAYERS, in_turn))
    rng = np.random.default_rng(0)
    grads = {layer: {"w": rng.integers(9, size=(n, size)).astype(np.float32)} for layer, size in sizes.items()}
    found = on_replicas(n, steps.scatter, grads)
    for layer, size in sizes.items():
        np.testing.assert_array_equal(found[layer]["w"], grads[layer]["w"].sum(axis=0).reshape(n, size // n))
    local = {layer: {"w": np.ones(size, np.float32)} for layer, size in sizes.items()}
    traced, messages = messages_of(steps.scatter, n, local)
    assert [equation.invars[0].aval.size for equation in messages] == list(reversed(sizes.values()))
    made = {variable: equation for equation in traced.eqns for variable in equation.outvars}

    def before(equation: Any) -> set[int]:
        """Return the equations that an equation depends on, and itself."""
        inputs = (made[x] for x in equation.invars if not isinstance(x, jax.extend.core.Literal) and x in made)
        return {id(equation)}.union(*map(before, inputs))

    for first, second in pairwise(messages):
        assert (id(first) in before(second)) == in_turn
