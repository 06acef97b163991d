"""Runs functions on replicas: virtual devices on one mesh axis, each with its slice of stacked arrays.

Dims: N replicas, S steps.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.exchange import Axis, Exchange

DATA = "data"
Tree = dict[str, np.ndarray]


def on_replicas(n: int, function: Callable[..., Any], *stacked: Any) -> Any:
    """Call `function` on each of n replicas with its slice of trees [N, ...]. Return stacked results, on the host."""

    def replica(*trees: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], trees)))

    mesh, specs = Mesh(np.array(jax.devices()[:n]), (DATA,)), PartitionSpec(DATA)
    mapped = jax.jit(jax.shard_map(replica, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))
    return jax.tree.map(np.asarray, jax.block_until_ready(mapped(*stacked)))


def train(n: int, exchange: Exchange, params: Tree, grads: Any, after: Callable[[Any], Any] = lambda x: x) -> Any:
    """Train with given gradients.

    Args:
      n: number of replicas.
      exchange: around an optimizer.
      params: initial parameters of all replicas, which an exchange that gathers them divides.
      grads: of all steps, [N, S, ...].
      after: parameters after a step, whole -> the value recorded.

    Returns:
      Recorded values [N, S, ...], updates [N, S, ...], norms [N, S], last state [N, ...].
    """

    def replica(params: Any, grads: Any) -> Any:
        def step(carry: Any, g: Any) -> Any:
            held, state = carry
            g = exchange.scatter(g) if exchange.scatter else g
            made = exchange.update(g, state, held)
            held = optax.apply_updates(held, made.updates)
            whole = exchange.gather(params, held) if exchange.gather else held
            return (held, made.state), (after(whole), made.updates, made.grad_norm)

        held = exchange.shards.local(params) if exchange.shards else params
        (_, state), (recorded, updates, norms) = jax.lax.scan(step, (held, exchange.init(held)), grads)
        return recorded, updates, norms, state

    return on_replicas(n, replica, repeated(n, params), grads)


def repeated(n: int, tree: Any) -> Any:
    """Repeat a tree for each replica."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (n, *np.shape(x))), tree)


def only(tree: Any) -> Any:
    """Check that a tree is bitwise the same on all replicas, and return one copy."""

    def first(x: np.ndarray) -> np.ndarray:
        for other in x[1:]:
            assert other.tobytes() == x[0].tobytes()
        return np.asarray(x[0])

    return jax.tree.map(first, tree)


def axis(n: int) -> Axis:
    return Axis(DATA, n)


def adamw(params: Tree, grads: Tree, optimizer: optax.GradientTransformation) -> list[Tree]:
    """Return the parameters after each step of an optax optimizer on one device. grads: [S, ...]."""
    params, state, result = {k: np.asarray(v) for k, v in params.items()}, optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for step in range(len(next(iter(grads.values())))):
        updates, state = update({k: v[step] for k, v in grads.items()}, state, params)
        params = {k: np.asarray(params[k] + updates[k]) for k in params}
        result.append(params)
    return result


def close(got: Any, expected: Any, rtol: float = 1e-6, atol: float = 0.0) -> None:
    """Compare two trees of the same structure."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), got, expected)
