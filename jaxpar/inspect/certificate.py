"""The certificate compares a strategy with one device, step by step.

A step consists of a gradient and an update, which are compared separately. Before each step of the strategy, the
reference (`single`) receives the strategy's canonical state and the same batch and takes the step too: losses, gradient
norms and gradients must agree. Then one device applies the optimizer to the *strategy's* gradient: the resulting
update, parameters and optimizer state must agree with those of the strategy. A run is therefore correct if its start,
its gradients and its updates are correct. After the first step, the strategy continues from its canonical state, as a
resumed run does; after the last step, the strategy and the reference evaluate the same parameters.

This separates mistakes from rounding errors, which grow between two independent runs: Adam makes full-size steps from a
gradient that is zero except for rounding. The drift between two independent runs is reported without a tolerance.

Two transformations `recording` store the input of the optimizer and its output, the update, in their states. Rounded to
the precision of the parameters, it would lack its smallest parts, such as the weight decay of a small learning rate.

The gradient of a bfloat16 model depends on the order of its sums. So it is compared with the float32 gradient of one
device, and the tolerance follows from the error of one device in bfloat16.
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.core.step import Metrics
from jaxpar.errors import TrainingError
from jaxpar.inspect.reference import (
    Error,
    HostBatch,
    Leaves,
    Reference,
    Runs,
    Snapshot,
    compare,
    compare_change,
    worst,
)
from jaxpar.run.build import Run, StrategyState
from jaxpar.run.metrics import format_clock
from jaxpar.run.restore import start
from jaxpar.tasks import Sums, mean_loss

# Relative errors. The tolerance of the gradient is larger, because a gradient can be a small sum of thousands of large
# terms. In 16 bits, the terms of the metrics, such as the number of correct predictions, have no tolerance, because
# rounding decides between nearly equal logits.
OF_LAYERS = {"start": 1e-6, "gradient": 1e-5, "update": 1e-5, "moments": 1e-6, "resume": 0.0}
TOLERANCES = {
    "float32": {"metrics": 1e-6, "sums of the task": 1e-6, **OF_LAYERS},
    "bfloat16": {"metrics": 2**-8, **OF_LAYERS},
    "float16": {"metrics": 2**-11, **OF_LAYERS},
}
# In 16 bits an error can also be this multiple of the error of one device in the same dtype, the "rounding": two orders
# of summation have rounding errors of about the same size.
ROUNDINGS = 2.0
MOST_STEPS = 100_000  # the errors of all steps are in memory: about 10 kB per step for a model of 12 layers
FIRST_STEPS, SILENT_SECONDS = 2, 10.0  # steps that compile; how long the others can take without being announced
METRICS = ("loss", "weight", "gradient norm")  # all other metrics are terms
EVALUATION = "evaluation "  # prefix of the metrics of an evaluation
# Compared per layer; "rounding" and "drift" have no tolerance.
QUANTITIES = ("start", "gradient", "rounding", "update", "moments", "resume", "drift")


class Measured(NamedTuple):
    """The largest errors that a comparison found."""

    # the errors of the loss, the gradient norm and the sums of the task, in a step and in an evaluation. For a bfloat16
    # model also "rounding of METRIC", the error of one device in bfloat16.
    metrics: dict[str, Error]
    # {layer: {quantity: error}}. If the strategy differs by design, gradient and metrics are compared only at the first
    # step, and update and moments are not compared.
    layers: dict[str, dict[str, Error]]
    # for a bfloat16 model, {"loss", "gradient norm" or "gradient of LAYER": (error, rounding) of each step}
    by_step: dict[str, list[tuple[float, float]]]
    counters: list[str]  # names of the counters whose values differ from the reference
    batches: list[int]  # indices of the batches used


def batches(run: Run) -> list[int]:
    """Return the batches of the run; the last one becomes the padded batch of the epoch, if there is one after them."""

    def is_short(count: int) -> bool:
        return run.batches.examples_before(count + 1) < (count + 1) * run.config.batch_size

    in_epoch = run.batches.steps_per_epoch
    padded = bisect_left(range(in_epoch), True, key=is_short)
    last = padded if run.num_steps <= padded < in_epoch else run.num_steps - 1
    return [*range(run.num_steps - 1), last]


def announced(numbers: Sequence[int]) -> Iterator[int]:
    """Yield the batches of all steps, and print how long the steps take, once that is known and if it is long."""
    begin = time.monotonic()
    for count, number in enumerate(numbers):
        if count == FIRST_STEPS:
            begin = time.monotonic()
        if count == FIRST_STEPS + 1:
            seconds = (time.monotonic() - begin) * (len(numbers) - count)
            if seconds > SILENT_SECONDS:
                print(f"comparing {len(numbers)} steps, {format_clock(seconds)} left", file=sys.stderr, flush=True)
        yield number


class Comparison:
    """The steps of a strategy, compared one by one with the reference. All states are snapshots."""

    def __init__(self, runs: Runs):
        self.single = Reference(runs.one_device)  # the reference with the dtype of the model
        exact = runs.exact is runs.one_device
        # the references of gradients and metrics: the exact one, and `single` if its model is not exact
        self.references = [self.single] if exact else [Reference(runs.exact), self.single]
        self.counters: set[str] = set()  # names of the counters whose values differ from the reference
        self._errors: dict[tuple[str, str], list[Error]] = {}  # by (layer, quantity), or (metric, "")

    def add(self, quantity: str, got: Mapping[str, Leaves], expected: Mapping[str, Leaves]) -> None:
        """Compare a quantity of each layer with the reference; for quantity "", compare metrics."""
        for name, leaves in got.items():
            self._append(name, quantity, compare(leaves, expected[name]))

    def gradients(
        self, got: Mapping[str, Leaves], exact: Mapping[str, Leaves], rounded: Mapping[str, Leaves] | None = None
    ) -> None:
        """Compare the gradient of a batch with that of each reference."""
        self.add("gradient", got, exact)
        if rounded is not None:
            self.add("rounding", rounded, exact)
            # The norms of two gradients differ by at most the norm of their difference.
            self._append("rounding of gradient norm", "", compare(joined(rounded), joined(exact)))

    def metrics(self, got: Metrics, exact: Metrics, rounded: Metrics | None = None) -> None:
        """Compare the metrics of a step with those of each reference."""
        self.add("", step_metrics(got), step_metrics(exact))
        if rounded is not None:
            loss, exact_loss = (step_metrics(of)["loss"] for of in (rounded, exact))
            self._append("rounding of loss", "", compare(loss, exact_loss))

    def update(self, before: Snapshot, after: Snapshot, metrics: Metrics) -> None:
        """Compare the update of a step with the update of one device for the same gradient."""
        expected = self.single.update(before.tree, after.tree, metrics)
        self.add("update", after.update, expected.update)
        for layer, params in after.params.items():
            self._append(layer, "update", compare_change(before.params[layer], params, expected.params[layer]))
        self.add("moments", after.optimizer, expected.optimizer)
        self._compare_counters(after, expected)

    def resumed(self, saved: Snapshot, resumed: Snapshot) -> None:
        """Compare a state that was made from a canonical state with this canonical state."""
        for field in ("params", "gradient", "update", "optimizer"):
            self.add("resume", getattr(resumed, field), getattr(saved, field))
        self._compare_counters(resumed, saved)

    def evaluation(self, got: Sums, alone: StrategyState, after: Snapshot, batch: HostBatch) -> None:
        """Compare the evaluation of a state on a batch with that of the reference. alone: any state of the latter."""
        expected = self.references[0].evaluate(alone, after.tree["params"], batch)
        self.add("", *(sums_by_name(sums, EVALUATION) for sums in (jax.device_get(got), expected)))

    def measured(self, run: Run, batches: list[int]) -> Measured:
        """Return the largest errors of all steps."""
        of, errors_of = {key: worst(errors) for key, errors in self._errors.items()}, self._errors.__getitem__
        layers = [layer.name for layer in run.problem.model.layers if (layer.name, "start") in of]
        by_layer = {layer: {q: of[layer, q] for q in QUANTITIES if (layer, q) in of} for layer in layers}
        by_metric = {name: error for (name, quantity), error in of.items() if not quantity}
        keys = {f"gradient of {layer}": ((layer, "gradient"), (layer, "rounding")) for layer in layers}
        keys |= {name: ((name, ""), (f"rounding of {name}", "")) for name in METRICS}
        by_step = {
            name: [(error.relative, rounding.relative) for error, rounding in zip(*map(errors_of, pair), strict=True)]
            for name, pair in keys.items()
            if of.keys() >= set(pair)
        }
        return Measured(by_metric, by_layer, by_step, sorted(self.counters), batches)

    def _append(self, name: str, quantity: str, error: Error) -> None:
        self._errors.setdefault((name, quantity), []).append(error)

    def _compare_counters(self, got: Snapshot, expected: Snapshot) -> None:
        self.counters |= {name for name, value in expected.counters.items() if (got.counters[name] != value).any()}


def measure(runs: Runs) -> Measured:
    """Compare all steps of a strategy without delays. Raises TrainingError if a loss or gradient is not finite."""
    run, strategy, single = runs.ours, runs.ours.strategy, runs.one_device.strategy
    compared = Comparison(runs)
    snapshot = compared.single.snapshot
    (state, _), (alone, _) = start(run), start(runs.one_device)
    after = snapshot(strategy, state)
    compared.add("start", after.params, snapshot(single, alone).params)
    for count, number in enumerate(announced(batches(run))):
        batch, before = run.batches.batch(number), after
        alone, metrics_alone = single.step(alone, single.place(batch))
        state, metrics = strategy.step(state, strategy.place(batch))
        check_finite(number, metrics, metrics_alone)
        after = snapshot(strategy, state)
        if not strategy.plan.differs:
            expected = [reference.step(before.tree, batch) for reference in compared.references]
            compared.gradients(after.gradient, *(of_reference.gradient for of_reference, _ in expected))
            compared.metrics(metrics, *(of_step for _, of_step in expected))
            compared.update(before, after, metrics)
        elif count == 0:  # both started from the same state
            compared.add("gradient", after.gradient, snapshot(single, alone).gradient)
            compared.add("", step_metrics(metrics), step_metrics(metrics_alone))
        if count == 0:  # continue as a resumed run does
            state = strategy.from_canonical(after.tree, jax.tree.map(np.array, strategy.to_private(state)))
            compared.resumed(after, snapshot(strategy, state))
    compared.evaluation(strategy.evaluate(state, strategy.place(batch)), alone, after, batch)
    compared.add("drift", after.params, snapshot(single, alone).params)
    return compared.measured(run, batches(run))


def check_finite(number: int, *metrics: Metrics) -> None:
    """Raise TrainingError if a loss or gradient of a step is not finite. number: index of the batch of the step."""
    if not all(jax.device_get([of.finite for of in metrics])):
        raise TrainingError(
            f"in the step of batch {number}, the loss or a gradient is not finite, so it cannot be compared"
        )


def step_metrics(metrics: Metrics) -> dict[str, Leaves]:
    """Return the metrics of a step, in the form of layers with one leaf each."""
    step = jax.device_get(metrics)
    return sums_by_name(step.sums) | {"gradient norm": {"": step.grad_norm}}


def sums_by_name(sums: Sums, prefix: str = "") -> dict[str, Leaves]:
    """Return the mean loss, the weight and the terms of sums on the host, in the form of layers with one leaf each."""
    values = {"loss": mean_loss(sums.loss, sums.weight), "weight": sums.weight, **sums.terms}
    return {prefix + name: {"": value} for name, value in values.items()}


def joined(layers: Mapping[str, Leaves]) -> Leaves:
    """Return the leaves of all layers as those of one."""
    return {f"{layer}.{path}": leaf for layer, leaves in layers.items() for path, leaf in leaves.items()}


def outside(measured: Measured, tolerance: Mapping[str, float]) -> list[str]:
    """Return one line for each quantity with an error above the tolerance and ROUNDINGS times the rounding of its step.

    The line is about the step whose error exceeds what is allowed by the largest factor.
    """
    errors: dict[str, tuple[float, float]] = {}  # the largest error of a quantity, and its tolerance
    for name, error in measured.metrics.items():
        kind = "metrics" if name.removeprefix(EVALUATION) in METRICS else "sums of the task"
        if kind in tolerance and not name.startswith("rounding"):
            errors[name] = error.relative, tolerance[kind]
    for layer, quantities in measured.layers.items():
        for quantity, error in quantities.items():
            if quantity in tolerance:
                errors[f"{quantity} of {layer}"] = error.relative, tolerance[quantity]
    lines = []
    for name, (largest, most) in errors.items():
        steps = [(of_step, max(most, ROUNDINGS * rounding)) for of_step, rounding in measured.by_step.get(name, [])]
        wrong = [(of_step, allowed) for of_step, allowed in steps or [(largest, most)] if not of_step <= allowed]
        if wrong:
            of_step, allowed = max(wrong, key=lambda pair: pair[0] / (pair[1] or 1))
            lines.append(f"{name}: {of_step:.1e}, tolerance {allowed:.1e}")
    return lines + [f"{name}: differs from the reference" for name in measured.counters]
