"""A certificate: what a strategy computes, compared with what one device computes, step by step.

A step is a gradient and an update, and each is compared on its own. Before each step of the strategy, the reference
(`single`) is given the strategy's canonical state and the same batch, and takes the step too: losses, gradient norms
and gradients must agree. Then one device applies the optimizer to the *strategy's* gradient: parameters and optimizer
state must agree with what the strategy has after the step. So a run is right where its start, its gradients and its
updates are; and rounding is not taken for a mistake. In two runs apart it would grow: Adam makes full steps of a
gradient that is zero but for rounding, such as that of a key's bias. How far such runs are apart is not judged.

The gradient is what the optimizer is given: `recording` in front of it keeps that in the state.
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

# Relative errors by the dtype of the computation. A gradient's is larger, as it may be a small sum of thousands of
# large terms. In bfloat16 each share of a batch has its gradient rounded to 8 bits before shares are added up.
TOLERANCES = {
    "float32": {"metrics": 1e-6, "start": 1e-6, "gradient": 1e-5, "update": 1e-6, "optimizer": 1e-6},
    "bfloat16": {"metrics": 2**-8, "start": 1e-6, "gradient": 2**-7, "update": 1e-6, "optimizer": 1e-6},
}
STEP_METRICS = ("loss", "gradient norm")
QUANTITIES = ("start", "gradient", "update", "optimizer", "alone")  # of a layer; the last is not judged

Leaves = Mapping[str, np.ndarray]


class Recorded(NamedTuple):
    """State of `recording`: the gradient that the optimizer was last given."""

    last_gradient: Params


def recording() -> optax.GradientTransformation:
    """Passes gradients on as they are, and keeps them in its state."""

    def init(params: Params) -> Recorded:
        return Recorded(jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, lambda grads, _state, _params=None: (grads, Recorded(grads)))


class Error(NamedTuple):
    """How far arrays are from the reference's.

    Attributes:
      bitwise: they are equal to the last bit.
      ulps: the largest difference, in units in the last place of the largest value of them all.
      relative: norm of the difference / norm, of all of them together; infinite where the norm is zero.
    """

    bitwise: bool
    ulps: float
    relative: float


def compare(got: Leaves, expected: Leaves) -> Error:
    """The error of arrays with the same names."""
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
    """Return the largest error of several steps, in each respect."""
    bitwise, ulps, relative = zip(*errors, strict=True)
    return Error(all(bitwise), float(np.max(ulps)), float(np.max(relative)))  # of which one that is not a number is all


class Snapshot(NamedTuple):
    """A canonical state on the host, by layer where it belongs to one.

    Attributes:
      tree: the state.
      params: of each layer.
      gradient: that the optimizer last took; empty where the strategy brings an optimizer.
      optimizer: its moments.
      counters: what belongs to no layer: the step, the run's key, the optimizer's steps.
    """

    tree: Canonical
    params: dict[str, Leaves]
    gradient: dict[str, Leaves]
    optimizer: dict[str, Leaves]
    counters: Leaves


def split_by_layer(tree: Tree, within: Sequence[Address]) -> tuple[dict[str, Leaves], dict[str, np.ndarray]]:
    """Return the leaves of each layer by path, and those of no layer. within: the addresses of the tree's leaves."""
    layers: dict[str, dict[str, np.ndarray]] = {}
    of_no_layer: dict[str, np.ndarray] = {}
    for address, leaf in zip(within, jax.tree.leaves(tree), strict=True):
        leaves = of_no_layer if address.layer is None else layers.setdefault(address.layer, {})
        leaves[address.path] = leaf
    return dict(layers), of_no_layer


def moment_addresses(problem: Problem) -> list[Address]:
    """Return the addresses in the canonical state of the optimizer whose gradients a problem records."""

    def init(params: Params) -> Canonical:
        _, moments = problem.optimizer.init(params)
        return dict(serialization.to_state_dict(moments))

    return addresses(init, problem.model.shapes)


class Reference:
    """One device, which is given any state."""

    def __init__(self, run: Run):
        """run: of strategy `single`, with an optimizer that records."""
        self.strategy, problem = run.strategy, run.problem
        self._like = states.abstract_state(problem.model, problem.optimizer)
        self._params, self._moments = addresses(lambda params: params, problem.model.shapes), moment_addresses(problem)
        self._update = jax.jit(functools.partial(steps.update, problem))

    def snapshot(self, strategy: Strategy[S], state: S) -> Snapshot:
        """Return any strategy's state on the host; copied, as the next step takes its arrays."""
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
        """A step from a canonical state."""
        state, metrics = self.strategy.step(self.strategy.from_canonical(tree), self.strategy.place(batch))
        return self.snapshot(self.strategy, state), metrics

    def update(self, before: Canonical, after: Canonical, metrics: Metrics) -> Snapshot:
        """Return the update of the state before a step by the gradient that is recorded in the one after it."""
        grads = states.from_canonical(after, self._like).optimizer[0].last_gradient
        sums, norm = jax.device_get((metrics.sums, metrics.grad_norm))
        state, _ = self._update(states.from_canonical(before, self._like), grads, sums, norm)
        return self.snapshot(self.strategy, state)


class Measured(NamedTuple):
    """The errors that a comparison found.

    Attributes:
      metrics: {"loss": its worst error, "gradient norm": likewise}.
      layers: {layer: {quantity: its worst error}}. Where the strategy differs by intent, gradient and metrics are of
        the first step alone, and there are no update and optimizer.
      counters: the names of those that the strategy has other values of.
      batches: that the steps were taken on.
    """

    metrics: dict[str, Error]
    layers: dict[str, dict[str, Error]]
    counters: list[str]
    batches: list[int]


def make_pair(run: Run, passes: int) -> tuple[Run, Run]:
    """The run, with an optimizer that records gradients, and its reference, which takes a batch in `passes`."""
    problem = run.problem._replace(optimizer=optax.chain(recording(), run.problem.optimizer))
    whole = problem._replace(accumulation_steps=passes)
    ours = run._replace(problem=problem, strategy=strategies.make(run.config, problem))
    return ours, run._replace(problem=whole, strategy=make_single(run.config, whole))


def make_single(config: ConfigDict, problem: Problem) -> Strategy[StrategyState]:
    """Build the reference: `single`, whatever the run's config says of devices and exchanges."""
    config = config.copy_and_resolve_references()
    config.strategy, config.exchange, config.mesh.data, config.mesh.stage = "single", "ddp", 1, 1
    config.optimizer.accumulation_steps = problem.accumulation_steps
    for option in config.exchange_options:
        config.exchange_options[option] = None
    return strategies.make(config, problem)


def batches(run: Run) -> list[int]:
    """The run's batches; in the place of the last one the one with fillers, where the epoch has one elsewhere."""

    def is_short(count: int) -> bool:
        return run.batches.examples_before(count + 1) < (count + 1) * run.config.batch_size

    in_epoch = run.batches.steps_per_epoch
    padded = bisect_left(range(in_epoch), True, key=is_short)
    if not run.num_steps <= padded < in_epoch:
        return [*range(run.num_steps)]
    return [*range(run.num_steps - 1), padded]


def measure(run: Run, reference: Run) -> Measured:
    """Runs both, as `build` made them, for the run's steps. Raises TrainingError where one gives what is not finite."""
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
        elif count == 0:  # where both still have the same state
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
    """Compares a quantity of each layer; nothing where there is nothing to compare."""
    for layer, leaves in got.items():
        errors.setdefault((layer, quantity), []).append(compare(leaves, expected[layer]))


def compared_metrics(metrics: Metrics, batch: int) -> dict[str, Leaves]:
    """Return the metrics of a step that are compared, as layers are."""
    step = jax.device_get(metrics)
    if not step.finite:
        raise TrainingError(f"the loss or the gradient of batch {batch} is not finite: there is nothing to compare")
    values = {"loss": mean_loss(step.sums.loss, step.sums.weight), "gradient norm": step.grad_norm}
    return {name: {name: values[name]} for name in STEP_METRICS}


def outside(measured: Measured, tolerance: Mapping[str, float]) -> list[str]:
    """Return a line for each quantity that is not within the tolerance."""
    wrong = [(name, error, tolerance["metrics"]) for name, error in measured.metrics.items()]
    for layer, errors in measured.layers.items():
        wrong += [(f"{q} of {layer}", error, tolerance[q]) for q, error in errors.items() if q in tolerance]
    lines = [
        f"{name}: {error.relative:.1e}, tolerance {most:.1e}"
        for name, error, most in wrong
        if not error.relative <= most
    ]
    return lines + [f"{name}: another value than the reference's" for name in measured.counters]
