"""The certificate compares a strategy with one device, step by step.

A step consists of a gradient and an update, which are compared separately. Before each step of the strategy, the
reference (`single`) receives the strategy's canonical state and the same batch and takes the step too: losses, gradient
norms and gradients must agree. Then one device applies the optimizer to the *strategy's* gradient: the resulting
parameters and optimizer state must agree with the strategy's state after the step. A run is therefore correct if its
start, its gradients and its updates are correct.

This separates mistakes from rounding errors, which grow between two independent runs: Adam makes full-size steps from a
gradient that is zero except for rounding, such as the gradient of a key bias. The drift between two independent runs is
reported without a tolerance.

The compared gradient is the optimizer's input, which the transformation `recording` in front of the optimizer stores
in its state.
"""

import functools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from ml_collections import ConfigDict

from jaxpar import state as states
from jaxpar import step as steps
from jaxpar import strategies
from jaxpar.addresses import Address, addresses
from jaxpar.errors import TrainingError
from jaxpar.layout import Tree
from jaxpar.models import Params
from jaxpar.run.build import Run, StrategyState
from jaxpar.run.start import start
from jaxpar.state import Canonical
from jaxpar.step import Metrics, Problem
from jaxpar.strategies import Strategy
from jaxpar.strategies.strategy import S
from jaxpar.tasks import mean_loss

# Relative errors by dtype of the computation. The tolerance of the gradient is larger, because a gradient can be a
# small sum of thousands of large terms. In bfloat16, the gradient of each batch shard is rounded to 8 bits before the
# shards are added up.
TOLERANCES = {
    "float32": {"metrics": 1e-6, "start": 1e-6, "gradient": 1e-5, "update": 1e-6, "optimizer": 1e-6},
    "bfloat16": {"metrics": 2**-8, "start": 1e-6, "gradient": 2**-7, "update": 1e-6, "optimizer": 1e-6},
}
STEP_METRICS = ("loss", "gradient norm")
QUANTITIES = ("start", "gradient", "update", "optimizer", "alone")  # compared per layer; "alone" has no tolerance

Leaves = Mapping[str, np.ndarray]


class Recorded(NamedTuple):
    """The state of `recording`: the last gradient passed to the optimizer."""

    last_gradient: Params


def recording() -> optax.GradientTransformation:
    """Return a transformation that passes gradients through unchanged and stores them in its state."""

    def init(params: Params) -> Recorded:
        return Recorded(jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, lambda grads, _state, _params=None: (grads, Recorded(grads)))


class Error(NamedTuple):
    """The error of a set of arrays with respect to the reference.

    Attributes:
      bitwise: whether all arrays are bitwise equal.
      ulps: the largest difference, in units in the last place (ULPs) of the largest reference value.
      relative: norm of the difference / norm of the reference, over all arrays; infinite if only the latter is zero.
    """

    bitwise: bool
    ulps: float
    relative: float


def compare(got: Leaves, expected: Leaves) -> Error:
    """Compare arrays with the reference arrays of the same names."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    pairs = [(np.asarray(got[name]), np.asarray(value)) for name, value in expected.items()]
    bitwise = all(a.tobytes() == b.tobytes() for a, b in pairs)
    differences = [a.astype(np.float64) - b for a, b in pairs]
    largest = max((np.abs(b).max() for _, b in pairs if b.size), default=0.0)
    ulps = max((np.abs(d).max() for d in differences if d.size), default=0.0) / np.spacing(np.float32(largest))
    square, total = (
        sum(float((x.astype(np.float64) ** 2).sum()) for x in of) for of in (differences, expected.values())
    )
    relative = np.sqrt(square / total) if total else (np.inf if square else 0.0)
    return Error(bitwise, float(ulps), float(relative))


def worst(errors: Iterable[Error]) -> Error:
    """Return the largest error over several steps, separately for each attribute."""
    bitwise, ulps, relative = zip(*errors, strict=True)
    return Error(all(bitwise), float(np.max(ulps)), float(np.max(relative)))  # np.max propagates NaN


class Snapshot(NamedTuple):
    """A canonical state on the host, split by layer.

    Attributes:
      tree: the canonical state.
      params: parameters of each layer.
      gradient: last gradient passed to the optimizer, by layer; empty if the strategy brings its own optimizer.
      optimizer: optimizer moments of each layer.
      counters: leaves that belong to no layer: the step, the run's key and the optimizer's step counters.
    """

    tree: Canonical
    params: dict[str, Leaves]
    gradient: dict[str, Leaves]
    optimizer: dict[str, Leaves]
    counters: Leaves


def split_by_layer(tree: Tree, within: Sequence[Address]) -> tuple[dict[str, Leaves], dict[str, np.ndarray]]:
    """Return the leaves of each layer by path, and the leaves of no layer. within: addresses of the tree's leaves."""
    layers: dict[str, dict[str, np.ndarray]] = {}
    of_no_layer: dict[str, np.ndarray] = {}
    for address, leaf in zip(within, jax.tree.leaves(tree), strict=True):
        leaves = of_no_layer if address.layer is None else layers.setdefault(address.layer, {})
        leaves[address.path] = leaf
    return dict(layers), of_no_layer


def moment_addresses(problem: Problem) -> list[Address]:
    """Return the addresses of the canonical optimizer state, for a problem whose optimizer records gradients."""

    def init(params: Params) -> Canonical:
        _, moments = problem.optimizer.init(params)
        return dict(serialization.to_state_dict(moments))

    return addresses(init, problem.model.shapes)


class Reference:
    """The reference, which takes steps from any canonical state on one device."""

    def __init__(self, run: Run):
        """run: a run of strategy `single` whose optimizer records gradients."""
        self.strategy, problem = run.strategy, run.problem
        self._like = states.abstract_state(problem.model, problem.optimizer)
        self._params, self._moments = addresses(lambda params: params, problem.model.shapes), moment_addresses(problem)
        self._update = jax.jit(functools.partial(steps.update, problem))

    def snapshot(self, strategy: Strategy[S], state: S) -> Snapshot:
        """Copy the state of any strategy to the host. The copy is needed because the next step donates the state."""
        tree = jax.tree.map(np.array, strategy.to_canonical(state))
        params, _ = split_by_layer(tree["params"], self._params)
        counters = {"step": tree["step"], "key": tree["key"]}
        recorded = tree["optimizer"].get("0", {}).get("last_gradient")
        if recorded is None:
            return Snapshot(tree, params, {}, {}, counters)
        gradient, _ = split_by_layer(recorded, self._params)
        moments, of_no_layer = split_by_layer(tree["optimizer"]["1"], self._moments)
        return Snapshot(tree, params, gradient, moments, of_no_layer | counters)

    def step(self, tree: Canonical, batch: Mapping[str, np.ndarray]) -> tuple[Snapshot, Metrics]:
        """Take a step from a canonical state."""
        state, metrics = self.strategy.step(self.strategy.from_canonical(tree), self.strategy.place(batch))
        return self.snapshot(self.strategy, state), metrics

    def update(self, before: Canonical, after: Canonical, metrics: Metrics) -> Snapshot:
        """Update the state `before` a step on one device, with the gradient recorded in the state `after` the step."""
        grads = states.from_canonical(after, self._like).optimizer[0].last_gradient
        sums, norm = jax.device_get((metrics.sums, metrics.grad_norm))
        state, _ = self._update(states.from_canonical(before, self._like), grads, sums, norm)
        return self.snapshot(self.strategy, state)


class Measured(NamedTuple):
    """The largest errors that a comparison found.

    Attributes:
      metrics: the errors of "loss" and "gradient norm".
      layers: {layer: {quantity: error}}. If the strategy differs by design, gradient and metrics are compared only at
        the first step, and update and optimizer are not compared.
      counters: names of the counters whose values differ from the reference.
      batches: indices of the batches used.
    """

    metrics: dict[str, Error]
    layers: dict[str, dict[str, Error]]
    counters: list[str]
    batches: list[int]


def make_pair(run: Run, passes: int) -> tuple[Run, Run]:
    """Return the run, with an optimizer that records gradients, and its reference.

    passes: number of microbatches over which the reference accumulates the gradient of a batch.
    """
    problem = run.problem._replace(optimizer=optax.chain(recording(), run.problem.optimizer))
    whole = problem._replace(accumulation_steps=passes)
    ours = run._replace(problem=problem, strategy=strategies.make(run.config, problem))
    return ours, run._replace(problem=whole, strategy=make_single(run.config, whole))


def make_single(config: ConfigDict, problem: Problem) -> Strategy[StrategyState]:
    """Build the reference strategy `single`, ignoring the devices and exchanges of the config."""
    config = config.copy_and_resolve_references()
    config.strategy, config.exchange, config.mesh.data, config.mesh.stage = "single", "ddp", 1, 1
    config.optimizer.accumulation_steps = problem.accumulation_steps
    for option in config.exchange_options:
        config.exchange_options[option] = None
    return strategies.make(config, problem)


def batches(run: Run) -> list[int]:
    """Return the batches to compare: those of the run, with the last one replaced by the padded batch of the epoch.

    It is not replaced if the run already contains the padded batch or the epoch has none.
    """

    def is_short(count: int) -> bool:
        return run.batches.examples_before(count + 1) < (count + 1) * run.config.batch_size

    in_epoch = run.batches.steps_per_epoch
    padded = bisect_left(range(in_epoch), True, key=is_short)
    if not run.num_steps <= padded < in_epoch:
        return [*range(run.num_steps)]
    return [*range(run.num_steps - 1), padded]


def measure(run: Run, reference: Run) -> Measured:
    """Run both runs of `make_pair` for all steps. Raises TrainingError if a loss or gradient is not finite."""
    strategy, one_device = run.strategy, Reference(reference)
    (state, _), (alone, _) = start(run), start(reference)
    after = one_device.snapshot(strategy, state)
    errors: dict[tuple[str, str], list[Error]] = {}  # (layer, quantity), or ("", metric)
    add(errors, "start", after.params, one_device.snapshot(reference.strategy, alone).params)
    counters: set[str] = set()
    for count, number in enumerate(batches(run)):
        batch, before = run.batches.batch(number), after
        alone, expected_metrics = reference.strategy.step(alone, reference.strategy.place(batch))
        if not strategy.plan.differs:
            expected, expected_metrics = one_device.step(before.tree, batch)
        elif count == 0:  # both still have the same state
            expected = one_device.snapshot(reference.strategy, alone)
        state, metrics = strategy.step(state, strategy.place(batch))
        after = one_device.snapshot(strategy, state)
        if count == 0 or not strategy.plan.differs:
            add(errors, "", *(compared_metrics(of, number) for of in (metrics, expected_metrics)))
            add(errors, "gradient", after.gradient, expected.gradient)
        if not strategy.plan.differs:
            updated = one_device.update(before.tree, after.tree, metrics)
            add(errors, "update", after.params, updated.params)
            add(errors, "optimizer", after.optimizer, updated.optimizer)
            counters |= {name for name, value in updated.counters.items() if (after.counters[name] != value).any()}
    add(errors, "alone", after.params, one_device.snapshot(reference.strategy, alone).params)
    worst_of = {key: worst(of) for key, of in errors.items()}
    layers = [layer.name for layer in run.problem.model.layers if layer.name in after.params]
    by_quantity = {layer: {q: worst_of[layer, q] for q in QUANTITIES if (layer, q) in worst_of} for layer in layers}
    by_metric = {name: worst_of[name, ""] for name in STEP_METRICS}
    return Measured(by_metric, by_quantity, sorted(counters), batches(run))


def add(
    errors: dict[tuple[str, str], list[Error]], quantity: str, got: Mapping[str, Leaves], expected: Mapping[str, Leaves]
) -> None:
    """Compare a quantity of each layer in `got` with the reference and append the errors."""
    for layer, leaves in got.items():
        errors.setdefault((layer, quantity), []).append(compare(leaves, expected[layer]))


def compared_metrics(metrics: Metrics, batch: int) -> dict[str, Leaves]:
    """Return the compared metrics of a step, in the form of layers with one leaf each."""
    step = jax.device_get(metrics)
    if not step.finite:
        raise TrainingError(f"the loss or the gradient of batch {batch} is not finite, so it cannot be compared")
    values = {"loss": mean_loss(step.sums.loss, step.sums.weight), "gradient norm": step.grad_norm}
    return {name: {name: values[name]} for name in STEP_METRICS}


def outside(measured: Measured, tolerance: Mapping[str, float]) -> list[str]:
    """Return one line for each quantity that exceeds the tolerance."""
    wrong = [(name, error, tolerance["metrics"]) for name, error in measured.metrics.items()]
    for layer, errors in measured.layers.items():
        wrong += [(f"{q} of {layer}", error, tolerance[q]) for q, error in errors.items() if q in tolerance]
    lines = [
        f"{name}: {error.relative:.1e}, tolerance {most:.1e}"
        for name, error, most in wrong
        if not error.relative <= most
    ]
    return lines + [f"{name}: differs from the reference" for name in measured.counters]
