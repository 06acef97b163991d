"""Workers of an outer step in threads of this process, and the same recurrence in NumPy.

Dims: L elements of a fragment.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import cluster, strategies
from jaxpar.core.state import Canonical
from jaxpar.core.step import Problem
from jaxpar.strategies import Strategy
from jaxpar.strategies.outer.options import OuterDetails
from jaxpar.strategies.outer.recorded import LocalLink, Turns
from jaxpar.strategies.outer.server import Anchor, OuterServer
from jaxpar.strategies.outer.worker import FragmentVectors, as_worker
from tests.strategies.pipelines import Task, make_batch, make_config, make_problem, shared

MLP, NUM_STEPS = Task("mlp", "classification", layers=2), 12
CONSTANT = ("--config.optimizer.schedule=constant", "--config.optimizer.warmup=0", "--config.optimizer.lr=0.01")
Settings = dict[str, Any]


def single() -> Strategy[Any]:
    return shared(MLP, *CONSTANT)


@functools.cache
def problem() -> Problem:
    return make_problem(make_config(MLP, *CONSTANT), MLP)._replace(num_steps=NUM_STEPS)


def overrides(settings: Settings) -> list[str]:
    """Return the config overrides of a worker."""
    values = {"address": "auto", "num_workers": 2, "every_steps": 4, **settings}
    return [f"--config.num_steps={NUM_STEPS}", *(f"--config.outer.{key}={one}" for key, one in values.items())]


def details_of(settings: Settings) -> OuterDetails:
    config = make_config(MLP, *CONSTANT, *overrides(settings))
    details = strategies.plan(config, problem(), cluster.find_cluster()).outer
    assert isinstance(details, OuterDetails)
    return details


def initial_tree() -> Canonical:
    """Return the canonical state with which all workers begin."""
    tree: Canonical = jax.device_get(single().to_canonical(single().init(jax.random.key(0))))
    return tree


def make_server(settings: Settings) -> OuterServer:
    details = details_of(settings)
    vectors, params = FragmentVectors(problem(), details.fragments), initial_tree()["params"]
    anchors = [vectors.vector(params, number) for number in range(len(details.fragments))]
    return OuterServer(details.settings, [Anchor(details.settings, anchor) for anchor in anchors])


def worker_of(settings: Settings, server: Any, turns: Turns, link: type[LocalLink] = LocalLink) -> Strategy[Any]:
    """Return a worker around `single`. settings: with the place of the worker. link: its connection to the server."""
    config = make_config(MLP, *CONSTANT, *overrides(settings))
    inner = single()._replace(plan=strategies.plan(config, problem(), cluster.find_cluster()))
    return as_worker(inner, problem(), lambda _workdir: link(server, turns, config.outer.worker))


def own_batch(worker: int, step: int) -> dict[str, np.ndarray]:
    return make_batch(MLP, 100 * step + worker)


def train_worker(strategy: Strategy[Any], worker: int, state: Any, step: int, last: int) -> Any:
    state, step = strategy.begin(state, step, Path())
    for number in range(step, last):
        state, _ = strategy.step(state, strategy.place(own_batch(worker, number)))
    return state


def together(functions: Sequence[Callable[[], Any]], turns: Turns) -> list[Any]:
    """Call functions in threads that take turns, and return their results."""

    def call(function: Callable[[], Any]) -> Any:
        with turns:
            return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        return [one.result() for one in [threads.submit(call, function) for function in functions]]


def train_all(settings: Settings, num_workers: int = 2) -> tuple[list[Canonical], OuterServer]:
    """Train all workers from step 0, and return their states and the server."""
    server, turns = make_server(settings), Turns(num_workers)

    def run(worker: int) -> Canonical:
        strategy = worker_of({**settings, "worker": worker}, server, turns)
        state = train_worker(strategy, worker, strategy.init(jax.random.key(0)), 0, NUM_STEPS)
        tree: Canonical = jax.device_get(strategy.to_canonical(state))
        return tree

    return together([functools.partial(run, worker) for worker in range(num_workers)], turns), server


# ---- the recurrence in NumPy: only the steps between two rounds are those of `single` ------------------------------


def flat(params: Canonical, layers: Sequence[str]) -> np.ndarray:
    """Return the arrays of layers in one vector, in the order of their names."""
    arrays = [
        array for layer in sorted(layers) for _, array in sorted(_by_name(params[layer]).items())
    ]  # names of nested modules sort like the keys of nested dicts
    return np.concatenate([np.asarray(array).ravel() for array in arrays])


def _by_name(tree: Any, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {name: x for key, one in tree.items() for name, x in _by_name(one, (*prefix, key)).items()}


def with_flat(params: Canonical, layers: Sequence[str], vector: np.ndarray) -> Canonical:
    """Return parameters with the arrays of layers from a vector."""
    params, begin = {**params}, 0
    for layer in sorted(layers):
        values = {}
        for name, array in sorted(_by_name(params[layer]).items()):
            values[name] = vector[begin : begin + array.size].reshape(array.shape).astype(np.float32)
            begin += array.size
        nested: Canonical = {}
        for name, array in values.items():
            place = nested
            for key in name[:-1]:
                place = place.setdefault(key, {})
            place[name[-1]] = array
        params[layer] = nested
    return params


def sent_by_int8(x: np.ndarray) -> np.ndarray:
    """Return what arrives of a vector in blocks of 4096 bytes with a scale each."""
    arrived = np.zeros_like(x)
    for begin in range(0, len(x), 4096):
        block = x[begin : begin + 4096]
        scale = np.float32(np.abs(block).max()) / np.float32(127)
        arrived[begin : begin + 4096] = np.rint(block / scale) * scale
    return arrived


def sent_by_topk(x: np.ndarray, ratio: float) -> np.ndarray:
    largest = np.argsort(-np.abs(x), kind="stable")[: int(np.ceil(ratio * len(x)))]
    arrived = np.zeros_like(x)
    arrived[largest] = x[largest]
    return arrived


def recurrence(
    num_workers: int,
    every: int,
    *,
    lr: float = 0.7,
    momentum: float = 0.9,
    send: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    fragments: int = 1,
    overlap: int = 0,
    mix: float = 0.5,
    until: int = NUM_STEPS,
) -> list[Canonical]:
    """Return the parameters of the workers after step `until`."""
    names = [layer.name for layer in problem().model.layers if layer.name in initial_tree()["params"]]
    parts = [names[number::fragments] for number in range(fragments)]
    strategy, trees = single(), []
    for worker in range(num_workers):
        tree = initial_tree()
        key = jax.random.fold_in(jax.random.wrap_key_data(tree["key"]), worker)
        trees.append({**tree, "key": np.asarray(jax.random.key_data(key))})
    anchors = [flat(trees[0]["params"], part) for part in parts]
    momenta = [np.zeros_like(anchor) for anchor in anchors]
    residuals = [[np.zeros_like(anchor) for anchor in anchors] for _ in trees]
    flying: tuple[int, int] | None = None  # fragment, and the step at which it was sent
    for step in range(until):
        for worker, tree in enumerate(trees):
            state, _ = strategy.step(strategy.from_canonical(tree), strategy.place(own_batch(worker, step)))
            trees[worker] = jax.tree.map(np.array, jax.device_get(strategy.to_canonical(state)))
        now = step + 1
        if flying and (now == flying[1] + overlap or now == NUM_STEPS):
            trees = [_mixed(tree, parts[flying[0]], anchors[flying[0]], mix) for tree in trees]
            flying = None
        turn, rest = divmod(now, every // fragments)
        for fragment in range(fragments) if now == NUM_STEPS else () if rest else [(turn - 1) % fragments]:
            total = np.zeros_like(anchors[fragment])
            for worker, tree in enumerate(trees):
                x = anchors[fragment] - flat(tree["params"], parts[fragment]) + residuals[worker][fragment]
                arrived = send(x)
                residuals[worker][fragment] = x - arrived
                total += arrived
            mean = total / num_workers
            momenta[fragment] = momentum * momenta[fragment] + mean
            anchors[fragment] = (anchors[fragment] - lr * (mean + momentum * momenta[fragment])).astype(np.float32)
            if overlap and now < NUM_STEPS:
                flying = fragment, now
            else:
                trees = [_mixed(tree, parts[fragment], anchors[fragment], 0.0) for tree in trees]
    return [tree["params"] for tree in trees]


def _mixed(tree: Canonical, layers: Sequence[str], anchor: np.ndarray, mix: float) -> Canonical:
    vector = mix * flat(tree["params"], layers) + (1 - mix) * anchor
    return {**tree, "params": with_flat(tree["params"], layers, vector)}
