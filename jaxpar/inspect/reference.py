"""The reference of a certificate, strategy `single` from the state of any other one, and errors with respect to it."""

import functools
from collections.abc import Iterable, Mapping, Sequence
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
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.inspect.rounding import changed, changed_in_program, permuted
from jaxpar.layout import Tree
from jaxpar.models import Params
from jaxpar.models.model import Batch
from jaxpar.run.build import Run, StrategyState
from jaxpar.strategies import Strategy
from jaxpar.strategies.strategy import S
from jaxpar.tasks import Sums

HostBatch = Mapping[str, np.ndarray]
Leaves = Mapping[str, np.ndarray]


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


class Reference:
    """The reference, which takes steps from any canonical state on one device."""

    def __init__(self, run: Run):
        """run: a run of strategy `single` whose optimizer records gradients."""
        self.strategy, problem = run.strategy, run.problem
        self._like = states.abstract_state(problem.model, problem.optimizer)

        def init_moments(params: Params) -> Canonical:
            _, moments, _ = problem.optimizer.init(params)
            return dict(serialization.to_state_dict(moments))

        self._params = leaf_paths(lambda params: params, problem.model.shapes)
        self._moments = leaf_paths(init_moments, problem.model.shapes)

        def gradients(state: State, batch: Batch, weight: jax.Array, seed: jax.Array) -> tuple[Params, Sums]:
            model = problem.model.with_changes(functools.partial(changed_in_program, seed=seed))
            return steps.gradients(problem._replace(model=model), state, batch, weight)

        def untied_gradients(state: State, batch: Batch, weight: jax.Array) -> Params:
            return steps.gradients(problem._replace(model=problem.model.untied()), state, batch, weight)[0]

        self._gradients, self._untied_gradients = jax.jit(gradients), jax.jit(untied_gradients)
        self._update = jax.jit(functools.partial(steps.update, problem))

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

    def gradient(
        self, tree: Canonical, batch: HostBatch, weight: np.ndarray, seed: int = 0
    ) -> tuple[dict[str, Leaves], Sums]:
        """Return the gradient of the sum of weights * losses / weight, by layer, and the sums of a batch.

        seed: of a sample of the rounding errors; 0: none.
        """
        grads, sums = self.gradient_tree(tree, batch, weight, seed)
        return self.by_layer(grads), sums

    def gradient_tree(
        self, tree: Canonical, batch: HostBatch, weight: np.ndarray, seed: int = 0
    ) -> tuple[Params, Sums]:
        """Return the same as `gradient`, with the gradient in the form of the parameters. NumPy arrays."""
        state = states.from_canonical({**tree, "params": changed(tree["params"], seed)}, self._like)
        made: tuple[Params, Sums] = jax.device_get(
            self._gradients(state, permuted(batch, seed), weight, np.uint32(seed))
        )
        return made

    def untied_gradient(self, tree: Canonical, batch: HostBatch, weight: np.ndarray) -> dict[str, Leaves]:
        """Return the gradient of `gradient` in which an array that two layers share is a constant of the second one."""
        made = self._untied_gradients(states.from_canonical(tree, self._like), batch, weight)
        return self.by_layer(jax.device_get(made))

    def by_layer(self, params: Params) -> dict[str, Leaves]:
        """Return the leaves of each layer of a tree like the parameters, by path."""
        return split_by_layer(params, self._params)[0]

    def update(self, before: Canonical, after: Canonical, metrics: Metrics, seed: int = 0) -> Snapshot:
        """Update the state `before` a step on one device, with the gradient recorded in the state `after` the step.

        seed: of a sample of the rounding errors; 0: none.
        """
        return self.update_with(before, states.from_canonical(after, self._like).optimizer[0].last, metrics, seed)

    def update_with(self, before: Canonical, grads: Params, metrics: Metrics, seed: int = 0) -> Snapshot:
        """Do what `update` does with this gradient."""
        sums, norm = jax.device_get((metrics.sums, metrics.grad_norm))
        before, grads, norm = changed((before, grads, norm), seed)
        state, _ = self._update(states.from_canonical(before, self._like), grads, sums, norm)
        return self.snapshot(self.strategy, state)

    def evaluate(self, state: StrategyState, params: Canonical, batch: HostBatch) -> Sums:
        """Evaluate canonical parameters on a batch. state: any state of the reference."""
        state = self.strategy.from_canonical({**self.strategy.to_canonical(state), "params": params})
        sums: Sums = jax.device_get(self.strategy.evaluate(state, self.strategy.place(batch)))
        return sums


class Runs(NamedTuple):
    """The runs to compare, of which all but the one of the strategy always record gradients and updates."""

    ours: Run  # the run of the strategy; from `make_runs`, it records them too
    one_device: Run  # the same run of strategy `single`
    exact: Run  # `one_device` with a float32 model; the same object if the model is a float32 model already


def make_runs(run: Run, passes: int) -> Runs:
    """Return the runs to compare, whose reference accumulates the gradient of a batch over `passes` microbatches."""
    runs = make_references(run, passes)
    problem = _recorded(run.problem)
    return runs._replace(ours=run._replace(problem=problem, strategy=strategies.make(run.config, problem)))


def make_references(run: Run, passes: int) -> Runs:
    """Return the run as it is, and its references of `make_runs`."""
    one_device = _make_reference(run, _recorded(run.problem)._replace(accumulation_steps=passes))
    if run.config.model.dtype == "float32":
        return Runs(run, one_device, one_device)
    config = run.config.copy_and_resolve_references()
    config.model.dtype, config.model.attention = "float32", "auto"
    model = models.build(config, run.dataset.info, run.cluster)
    return Runs(run, one_device, _make_reference(run._replace(config=config), one_device.problem._replace(model=model)))


def _recorded(problem: Problem) -> Problem:
    return problem._replace(optimizer=optax.chain(recording(), problem.optimizer, recording()))


def _make_reference(run: Run, problem: Problem) -> Run:
    return run._replace(problem=problem, strategy=make_single(run.config, problem))


def make_single(config: ConfigDict, problem: Problem) -> Strategy[StrategyState]:
    """Build the reference strategy `single`, ignoring the devices and exchanges of the config."""
    config = config.copy_and_resolve_references()
    config.strategy, config.exchange = "single", "ddp"
    config.mesh.data = config.mesh.stage = config.mesh.tensor = config.mesh.context = 1
    config.optimizer.accumulation_steps = problem.accumulation_steps
    for option in config.exchange_options:
        config.exchange_options[option] = None
    return strategies.make(config, problem)


# ---- errors --------------------------------------------------------------------------------------------------------


class Error(NamedTuple):
    """The error of a set of arrays with respect to the reference."""

    bitwise: bool  # whether all arrays are bitwise equal
    ulps: float  # the largest difference, in units in the last place (ULPs) of the largest reference value
    # norm of the difference / norm of the reference, over all arrays; infinite if only the latter is zero
    relative: float


def compare(got: Leaves, expected: Leaves) -> Error:
    """Compare arrays with the reference arrays of the same names."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    pairs = [(np.asarray(got[name]), np.asarray(value)) for name, value in expected.items()]
    bitwise = all(a.tobytes() == b.tobytes() for a, b in pairs)
    differences = [a.astype(np.float64) - b for a, b in pairs]
    largest = max((np.abs(b).max() for _, b in pairs if b.size), default=0.0)
    ulps = max((np.abs(d).max() for d in differences if d.size), default=0.0) / np.spacing(np.float32(largest))
    return Error(bitwise, float(ulps), relative(differences, expected.values()))


def compare_change(before: Leaves, got: Leaves, expected: Leaves) -> Error:
    """Compare changed arrays with the reference, relative to the change instead of to the arrays.

    A correct sum of an array and its change can differ by one ULP of the array, which can be large compared with the
    change. So the relative error counts only the part of a difference that is larger than one ULP.
    """
    excess, changes = [], []
    for name, array in expected.items():
        a, b, old = (np.asarray(x, np.float64) for x in (got[name], array, before[name]))
        ulp = np.spacing(np.maximum(np.maximum(np.abs(a), np.abs(b)), np.abs(old)).astype(np.float32))
        excess.append(np.maximum(np.abs(a - b) - ulp, 0))  # np.maximum propagates NaN
        changes.append(b - old)
    return compare(got, expected)._replace(relative=relative(excess, changes))


def relative(differences: Iterable[np.ndarray], of: Iterable[np.ndarray]) -> float:
    """Return the norm of `differences` / the norm of `of`; infinite if only the latter is zero."""
    square, total = (sum(float((x.astype(np.float64) ** 2).sum()) for x in arrays) for arrays in (differences, of))
    return float(np.sqrt(square / total)) if total else (np.inf if square else 0.0)


def worst(errors: Iterable[Error]) -> Error:
    """Return the largest error over several steps, separately for each attribute."""
    bitwise, ulps, relative = zip(*errors, strict=True)
    return Error(all(bitwise), float(np.max(ulps)), float(np.max(relative)))  # np.max propagates NaN
