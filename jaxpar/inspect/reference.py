"""The reference of a certificate: strategy `single`, which takes single steps from the state of any other strategy."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from ml_collections import ConfigDict

from jaxpar import models, strategies
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.leaf_paths import LeafPath, leaf_paths
from jaxpar.core.state import Canonical
from jaxpar.core.step import Metrics, Problem
from jaxpar.inspect.errors import Leaves
from jaxpar.layout import Tree
from jaxpar.models import Params
from jaxpar.run.build import Run, StrategyState
from jaxpar.strategies import Strategy
from jaxpar.strategies.strategy import S
from jaxpar.tasks import Sums

HostBatch = Mapping[str, np.ndarray]


class Recorded(NamedTuple):
    """The state of `recording`: the last gradient or update that passed through it."""

    last: Params


def recording() -> optax.GradientTransformation:
    """Return a transformation that passes gradients or updates through unchanged and stores them in its state."""

    def init(params: Params) -> Recorded:
        return Recorded(jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, lambda grads, _state, _params=None: (grads, Recorded(grads)))


class Snapshot(NamedTuple):
    """A canonical state on the host, split by layer."""

    tree: Canonical  # the canonical state
    params: dict[str, Leaves]  # parameters of each layer
    # last gradient passed to the optimizer, by layer; empty if the strategy brings its own optimizer
    gradient: dict[str, Leaves]
    update: dict[str, Leaves]  # last update returned by the optimizer, by layer; empty in the same case
    optimizer: dict[str, Leaves]  # optimizer moments of each layer
    counters: Leaves  # leaves that belong to no layer: the step, the run's key and the optimizer's step counters


def split_by_layer(tree: Tree, within: Sequence[LeafPath]) -> tuple[dict[str, Leaves], dict[str, np.ndarray]]:
    """Return the leaves of each layer by path, and the leaves of no layer. within: where each leaf of the tree is."""
    layers: dict[str, dict[str, np.ndarray]] = {}
    of_no_layer: dict[str, np.ndarray] = {}
    for path, leaf in zip(within, jax.tree.leaves(tree), strict=True):
        leaves = of_no_layer if path.layer is None else layers.setdefault(path.layer, {})
        leaves[path.path] = leaf
    return dict(layers), of_no_layer


def moment_paths(problem: Problem) -> list[LeafPath]:
    """Return where each leaf of the canonical optimizer state is, for a problem whose optimizer records gradients."""

    def init(params: Params) -> Canonical:
        _, moments, _ = problem.optimizer.init(params)
        return dict(serialization.to_state_dict(moments))

    return leaf_paths(init, problem.model.shapes)


class Reference:
    """The reference, which takes steps from any canonical state on one device."""

    def __init__(self, run: Run):
        """run: a run of strategy `single` whose optimizer records gradients."""
        self.strategy, problem = run.strategy, run.problem
        self._like = states.abstract_state(problem.model, problem.optimizer)
        self._params, self._moments = leaf_paths(lambda params: params, problem.model.shapes), moment_paths(problem)
        self._update = jax.jit(functools.partial(steps.update, problem))
        self._gradients = jax.jit(functools.partial(steps.gradients, problem))

    def snapshot(self, strategy: Strategy[S], state: S) -> Snapshot:
        """Copy the state of any strategy to the host. The copy is needed because the next step donates the state."""
        return self.split(jax.tree.map(np.array, strategy.to_canonical(state)))

    def split(self, tree: Canonical) -> Snapshot:
        """Split a canonical state on the host by layer."""
        params, _ = split_by_layer(tree["params"], self._params)
        counters = {"step": tree["step"], "key": tree["key"]}
        if "last" not in tree["optimizer"].get("0", {}):
            return Snapshot(tree, params, {}, {}, {}, counters)
        gradient, update = (split_by_layer(tree["optimizer"][place]["last"], self._params)[0] for place in "02")
        moments, of_no_layer = split_by_layer(tree["optimizer"]["1"], self._moments)
        return Snapshot(tree, params, gradient, update, moments, of_no_layer | counters)

    def step(self, tree: Canonical, batch: HostBatch) -> tuple[Snapshot, Metrics]:
        """Take a step from a canonical state."""
        state, metrics = self.strategy.step(self.strategy.from_canonical(tree), self.strategy.place(batch))
        return self.snapshot(self.strategy, state), metrics

    def gradient(self, tree: Canonical, batch: HostBatch, weight: np.ndarray) -> tuple[dict[str, Leaves], Sums]:
        """Return the gradient of the sum of weights * losses / weight, by layer, and the sums of a batch.

        Args:
          tree: a canonical state, whose optimizer state is not used.
          batch: the batch.
          weight: the divisor.
        """
        state = states.State(tree["step"], tree["key"], tree["params"], ())
        grads, sums = jax.device_get(self._gradients(state, batch, weight))
        return split_by_layer(grads, self._params)[0], sums

    def update(self, before: Canonical, after: Canonical, metrics: Metrics) -> Snapshot:
        """Update the state `before` a step on one device, with the gradient recorded in the state `after` the step."""
        grads = states.from_canonical(after, self._like).optimizer[0].last
        sums, norm = jax.device_get((metrics.sums, metrics.grad_norm))
        state, _ = self._update(states.from_canonical(before, self._like), grads, sums, norm)
        return self.snapshot(self.strategy, state)

    def evaluate(self, state: StrategyState, params: Canonical, batch: HostBatch) -> Sums:
        """Evaluate canonical parameters on a batch. state: any state of the reference."""
        tree = {**self.strategy.to_canonical(state), "params": params}
        sums: Sums = jax.device_get(
            self.strategy.evaluate(self.strategy.from_canonical(tree), self.strategy.place(batch))
        )
        return sums


class Runs(NamedTuple):
    """The runs to compare, whose optimizers record gradients and updates."""

    ours: Run  # the run of the strategy
    one_device: Run  # the same run of strategy `single`
    exact: Run  # `one_device` with a float32 model; the same object if the model is a float32 model already


def make_runs(run: Run, passes: int) -> Runs:
    """Return the runs to compare for a run.

    passes: number of microbatches over which the reference accumulates the gradient of a batch.
    """
    problem = run.problem._replace(optimizer=optax.chain(recording(), run.problem.optimizer, recording()))
    ours = run._replace(problem=problem, strategy=strategies.make(run.config, problem))
    one_device = make_reference(run, problem._replace(accumulation_steps=passes))
    if run.config.model.dtype == "float32":
        return Runs(ours, one_device, one_device)
    config = run.config.copy_and_resolve_references()
    config.model.dtype, config.model.attention = "float32", "auto"
    model = models.build(config, run.dataset.info, run.cluster)
    exact = make_reference(run._replace(config=config), one_device.problem._replace(model=model))
    return Runs(ours, one_device, exact)


def make_reference(run: Run, problem: Problem) -> Run:
    """Return the run of a problem under strategy `single`."""
    return run._replace(problem=problem, strategy=make_single(run.config, problem))


def make_single(config: ConfigDict, problem: Problem) -> Strategy[StrategyState]:
    """Build the reference strategy `single`, ignoring the devices and exchanges of the config."""
    config = config.copy_and_resolve_references()
    config.strategy, config.exchange, config.mesh.data, config.mesh.stage = "single", "ddp", 1, 1
    config.optimizer.accumulation_steps = problem.accumulation_steps
    for option in config.exchange_options:
        config.exchange_options[option] = None
    return strategies.make(config, problem)
