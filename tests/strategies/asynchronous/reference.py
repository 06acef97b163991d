"""Reference for the engines: asynchronous training as a plain NumPy loop over a table, which stashes every version.

Gradients are from `jax.grad` of a loss written out here. Optimizers, mitigations and synchronizations are NumPy, in
float64.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.strategies.asynchronous.table import UpdateTable

Weights = dict[str, np.ndarray]  # by path
Batch = dict[str, np.ndarray]
# (weights, gradient, memory, rate) -> (weights, memory); memory is None at first
Rule = Callable[[Weights, Weights, Any, float], tuple[Weights, Any]]
LAYERS = ("['embed']['linear']", "['block_0']['linear']", "['head']['classifier']")


def sgd(momentum: float = 0.0) -> Rule:
    def rule(weights: Weights, grads: Weights, memory: Any, rate: float) -> tuple[Weights, Any]:
        trace = memory or {key: np.zeros_like(g) for key, g in grads.items()}
        trace = {key: momentum * trace[key] + g for key, g in grads.items()}
        return {key: w - rate * trace[key] for key, w in weights.items()}, trace

    return rule


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Rule:
    def rule(weights: Weights, grads: Weights, memory: Any, rate: float) -> tuple[Weights, Any]:
        zeros = {key: np.zeros_like(g) for key, g in grads.items()}
        count, m, v = memory or (0, zeros, zeros)
        m = {key: b1 * m[key] + (1 - b1) * g for key, g in grads.items()}
        v = {key: b2 * v[key] + (1 - b2) * g * g for key, g in grads.items()}
        count += 1
        step = {key: m[key] / (1 - b1**count) / (np.sqrt(v[key] / (1 - b2**count)) + eps) for key in grads}
        return {key: w - rate * step[key] for key, w in weights.items()}, (count, m, v)

    return rule


@jax.jit
@jax.grad
def slope(weights: Any, inputs: jax.Array, labels: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the gradient of sum(weight * cross entropy) / scale for a network of three linear maps."""
    x = inputs.astype(jnp.float32).reshape(len(inputs), -1) / 127.5 - 1
    for layer in LAYERS:
        x = jnp.matmul(x, weights[f"{layer}['kernel']"]) + weights[f"{layer}['bias']"][None]
        x = x if layer == LAYERS[-1] else jnp.maximum(x, 0)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], axis=1)[:, 0]
    return -jnp.sum(chosen * weight) / scale


def gradient(weights: Weights, batch: Batch, chunk: int, n: int) -> Weights:
    """Return the gradient of the examples chunk, chunk + n, chunk + 2 n, .."""
    single = {key: x.astype(np.float32) for key, x in weights.items()}
    inputs, labels, weight = (batch[name][chunk::n] for name in ("inputs", "labels", "weights"))
    grads = slope(single, inputs, labels, weight, batch["weights"].sum() / n)
    return {key: np.asarray(g, np.float64) for key, g in grads.items()}


def norm(tree: Weights) -> float:
    return float(np.sqrt(sum(np.sum(x**2) for x in tree.values())))


def mean(trees: list[Weights]) -> Weights:
    return {key: np.mean([tree[key] for tree in trees], axis=0) for key in trees[0]}


Mitigation = Callable[[Weights, Weights, Weights, int], Weights]  # (gradient, newest weights, read weights, staleness)


def to_server(
    table: UpdateTable,
    start: Weights,
    batches: list[Batch],
    rule: Rule,
    rates: list[float],
    *,
    mitigations: tuple[Mitigation, ...] = (),
    staleness_aware: bool = False,
) -> Weights:
    """Run sync, async, ssp or softsync: read and apply each gradient at the versions given in the table."""
    versions, memory, n = [start], None, table.num_workers
    for update in range(table.num_updates):
        rows = np.flatnonzero(table.update == update)
        grads = []
        for row in rows:
            step, read = int(table.step[row]), versions[table.read[row]]
            g = gradient(read, batches[table.chunk[row] // n], int(table.chunk[row]) % n, n)
            for mitigation in mitigations:
                g = mitigation(g, versions[-1], read, int(update - table.read[row]))
            grads.append(g)
        old, shares = versions[-1], [1 / max(update - read, 1) for read in table.read[rows].tolist()]
        shares = shares if staleness_aware else [1.0] * len(rows)
        total = {key: sum(share * g[key] for share, g in zip(shares, grads, strict=True)) for key in old}
        new, memory = rule(old, {key: x / sum(shares) for key, x in total.items()}, memory, rates[step])
        versions.append({key: old[key] + (new[key] - old[key]) * float(np.mean(shares)) for key in old})
    return versions[-1]


def meeting(
    table: UpdateTable,
    start: Weights,
    batches: list[Batch],
    rule: Rule,
    rates: list[float],
    *,
    outer: tuple[float, float] | None,
) -> Weights:
    """Run local_sgd or diloco: rounds of each worker's local steps, one worker after another."""
    n = table.num_workers
    memories: list[Any] = [None] * n
    begun, velocity = start, {key: np.zeros_like(x) for key, x in start.items()}
    for number in range(table.num_updates):
        ends = []
        for worker in range(n):
            weights = begun
            for row in np.flatnonzero((table.update == number) & (table.worker == worker)):
                chunk, step = int(table.chunk[row]), int(table.step[row])
                g = gradient(weights, batches[chunk // n], chunk % n, n)
                weights, memories[worker] = rule(weights, g, memories[worker], rates[step])
            ends.append(weights)
        if outer is None:
            begun = mean(ends)
            continue
        rate, momentum = outer
        delta = {key: begun[key] - x for key, x in mean(ends).items()}
        velocity = {key: momentum * velocity[key] + delta[key] for key in delta}
        begun = {key: begun[key] - rate * (delta[key] + momentum * velocity[key]) for key in delta}
    return begun


def averaging(table: UpdateTable, start: Weights, batches: list[Batch], rule: Rule, rates: list[float]) -> Weights:
    """Run model_average, event by event, and return the mean of all workers' final weights.

    A worker begins its next gradient as soon as it has applied the last one, after adding the averagings that have
    ended. An averaging begins after the last gradient of its update. It reads `agreed`: each worker's own updates, on
    top of all earlier averagings.
    """
    n, num_rows = table.num_workers, len(table.update)
    local, memories, agreed = [start] * n, [None] * n, [start] * n
    taken, differences = [0] * n, list[list[Weights]]()

    def begin(worker: int, done: int) -> None:
        """Add the averagings that have ended when the worker begins its first gradient after row `done`."""
        following = [row for row in range(done + 1, num_rows) if table.worker[row] == worker]
        while following and taken[worker] < table.read[following[0]]:
            local[worker] = plus(local[worker], differences[taken[worker]][worker])
            taken[worker] += 1

    for row in range(num_rows):
        worker, chunk, step = int(table.worker[row]), int(table.chunk[row]), int(table.step[row])
        assert taken[worker] == table.read[row]
        g = gradient(local[worker], batches[chunk // n], chunk % n, n)
        new, memories[worker] = rule(local[worker], g, memories[worker], rates[step])
        agreed[worker] = plus(agreed[worker], minus(new, local[worker]))
        local[worker] = new
        begin(worker, row)
        if row + 1 == num_rows or table.update[row + 1] > table.update[row]:
            middle = mean(agreed)
            differences.append([minus(middle, x) for x in agreed])
            agreed = [middle] * n
    return mean(local)


def plus(a: Weights, b: Weights) -> Weights:
    return {key: x + b[key] for key, x in a.items()}


def minus(a: Weights, b: Weights) -> Weights:
    return {key: x - b[key] for key, x in a.items()}
