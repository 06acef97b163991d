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

The gradient of a model in 16 bits depends on the order of its sums. So it is compared with the float32 gradient of one
device. All tolerances follow from samples of the rounding errors of one device (rounding.py).
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core.loss_scale import LEAST_SCALE
from jaxpar.core.step import Metrics
from jaxpar.errors import TrainingError
from jaxpar.inspect.copies import describe_copies
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
from jaxpar.inspect.rounding import FALSE_ALARM, SEEDS, array_tolerances, tolerances
from jaxpar.run.build import Run, StrategyState
from jaxpar.run.metrics import format_clock
from jaxpar.run.restore import start
from jaxpar.tasks import Sums, mean_loss

MOST_STEPS = 100_000  # the errors of all steps are in memory: about 20 kB per step for a model of 12 layers
FIRST_STEPS, SILENT_SECONDS = 2, 10.0  # steps that compile; how long the others can take without being announced
POOLED_STEPS = 100  # certified steps of a run whose samples of metrics are used
# All other metrics are terms. In 16 bits these have no tolerance: rounding decides between nearly equal logits, rarely,
# so that a few samples do not bound how often.
METRICS = ("loss", "weight", "gradient norm")
EVALUATION = "evaluation "  # prefix of the metrics of an evaluation
QUANTITIES = ("start", "gradient", "update", "moments", "resume", "drift")  # compared per layer; drift has no tolerance
SAMPLED = ("gradient", "update", "moments")


class Largest(NamedTuple):
    """The largest errors of several steps. If they have tolerances, `relative` is the largest relative to its one."""

    bitwise: bool
    ulps: float
    relative: float
    tolerance: float | None  # of the step of `relative`


class Failure(NamedTuple):
    """An error outside its tolerance."""

    step: int  # index of the step; that of the first step for what is compared once
    name: str  # a layer, or a metric
    quantity: str  # one of QUANTITIES, or "" for a metric
    relative: float  # the relative error


class Measured(NamedTuple):
    """The largest errors that a comparison found.

    If the strategy differs by design, gradient and metrics are compared only at the first step, update and moments are
    not compared, and there are no tolerances.
    """

    metrics: dict[str, Largest]  # the loss, the gradient norm and the sums of the task, in steps and in an evaluation
    layers: dict[str, dict[str, Largest]]  # {layer: {quantity: errors}}
    # the smallest error of the scale of the gradient of one layer that is outside the tolerance of some step
    smallest_scale_errors: dict[str, float]
    num_tolerances: int  # over all steps
    counters: list[str]  # names of the counters whose values differ from the reference
    batches: list[int]  # indices of the batches used
    failures: Sequence[Failure] = ()  # all errors outside their tolerances
    copies: Sequence[str] = ()  # one line for each place of the mesh that holds another state after the last step


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
        # the reference of gradients and metrics; not `single` if the model computes in 16 bits
        self.exact = self.single if runs.exact is runs.one_device else Reference(runs.exact)
        self.counters: set[str] = set()  # names of the counters whose values differ from the reference
        # of each step, by (layer, quantity), or (metric, ""): the error, and samples of the rounding error
        self._errors: dict[tuple[str, str], list[Error]] = {}
        self._samples: dict[tuple[str, str], list[list[float]]] = {}

    def add(
        self,
        quantity: str,
        got: Mapping[str, Leaves],
        expected: Mapping[str, Leaves],
        samples: Sequence[Mapping[str, Leaves]] = (),
    ) -> None:
        """Compare a quantity of each layer with the reference; for quantity "", compare metrics."""
        for name, leaves in got.items():
            of_samples = [compare(sample[name], expected[name]).relative for sample in samples]
            self.append(name, quantity, compare(leaves, expected[name]), of_samples)

    def append(self, name: str, quantity: str, error: Error, samples: list[float]) -> None:
        """Add the error of a quantity of a layer, or of a metric, and samples of the relative rounding error."""
        self._errors.setdefault((name, quantity), []).append(error)
        self._samples.setdefault((name, quantity), []).append(samples)

    def update(self, before: Snapshot, after: Snapshot, metrics: Metrics) -> None:
        """Compare the update of a step with the update of one device for the same gradient."""
        expected, *samples = (self.single.update(before.tree, after.tree, metrics, seed) for seed in (0, *SEEDS))
        self.add("update", after.update, expected.update, [sample.update for sample in samples])
        for layer, params in after.params.items():
            errors = self._errors[layer, "update"]
            change = compare_change(before.params[layer], params, expected.params[layer])
            errors[-1] = worst([errors[-1], change])
        self.add("moments", after.optimizer, expected.optimizer, [sample.optimizer for sample in samples])
        self.compare_counters(after, expected)

    def resumed(self, saved: Snapshot, resumed: Snapshot) -> None:
        """Compare a state that was made from a canonical state with this canonical state."""
        for field in ("params", "gradient", "update", "optimizer"):
            self.add("resume", getattr(resumed, field), getattr(saved, field))
        self.compare_counters(resumed, saved)

    def evaluation(self, got: Sums, alone: StrategyState, after: Snapshot, batch: HostBatch) -> None:
        """Compare the evaluation of a state on a batch with that of the reference. alone: any state of the latter."""
        expected = self.exact.evaluate(alone, after.tree["params"], batch)
        self.add("", sums_by_name(jax.device_get(got), EVALUATION), sums_by_name(expected, EVALUATION))

    def measured(self, run: Run, batches: list[int], *, differs: bool) -> Measured:
        """Return the largest errors of all steps. differs: whether there are no tolerances."""
        allowed = {} if differs else self._tolerances(has_terms=run.config.model.dtype == "float32")
        of = {key: largest(errors, allowed.get(key)) for key, errors in self._errors.items()}
        present = {name for name, quantity in of if quantity}
        layers = [layer.name for layer in run.problem.model.layers if layer.name in present]
        return Measured(
            {name: found for (name, quantity), found in of.items() if not quantity},
            {layer: {q: of[layer, q] for q in QUANTITIES if (layer, q) in of} for layer in layers},
            {layer: min(allowed[layer, "gradient"]) for layer in layers if (layer, "gradient") in allowed},
            sum(map(len, allowed.values())),
            sorted(self.counters),
            batches,
            [
                Failure(0 if quantity == "resume" else step, name, quantity, error.relative)
                for (name, quantity), bounds in allowed.items()
                for step, (error, bound) in enumerate(zip(self._errors[name, quantity], bounds, strict=True))
                if not error.relative <= bound
            ],
        )

    def _tolerances(self, *, has_terms: bool) -> dict[tuple[str, str], list[float]]:
        """Return the tolerances of all steps by (layer, quantity), or (metric, ""). has_terms: also those of terms."""
        keys = [(name, q) for name, q in self._errors if q != "drift"]
        if not has_terms:
            keys = [(name, q) for name, q in keys if q or name.removeprefix(EVALUATION) in METRICS]
        probability = FALSE_ALARM / sum(len(self._errors[key]) for key in keys)
        allowed: dict[tuple[str, str], list[float]] = {}
        for name, quantity in keys:
            # The loss of an evaluation has the rounding errors of that of a step: the operations are the same.
            samples = self._samples.get((name.removeprefix(EVALUATION), quantity), [[]])
            if quantity == "resume":
                allowed[name, quantity] = [0.0] * len(samples)
            elif quantity not in SAMPLED:
                number = len(self._errors[name, quantity])  # the samples can be those of more steps, up to the last one
                rows = samples if all(samples) else [[0.0] * len(SEEDS)] * number
                allowed[name, quantity] = tolerances(rows, probability, scalar=True)[-number:]
        for quantity in SAMPLED:
            of_arrays = {key: self._samples[key] for key in keys if key[1] == quantity}
            allowed |= array_tolerances(of_arrays, probability)
        return allowed

    def next_step(self) -> None:
        """Forget all errors, and all samples except those of metrics, whose scale is that of several steps."""
        self._errors.clear()
        self._samples = {key: samples[-POOLED_STEPS:] for key, samples in self._samples.items() if not key[1]}

    def compare_counters(self, got: Snapshot, expected: Snapshot) -> None:
        """Compare the leaves of a state that belong to no layer, which must be equal."""
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
        while overflowed(metrics_alone):
            alone, metrics_alone = single.step(alone, single.place(batch))
        state, metrics = strategy.step(state, strategy.place(batch))
        while overflowed(metrics):
            before = snapshot(strategy, state)
            state, metrics = strategy.step(state, strategy.place(batch))
        check_finite(number, metrics, metrics_alone)
        after = snapshot(strategy, state)
        if not strategy.plan.differs:
            exact, exact_metrics = compared.exact.step(before.tree, batch)
            weight = batch["weights"].sum()
            samples = [compared.single.gradient(before.tree, batch, weight, seed) for seed in SEEDS]
            compared.add("gradient", after.gradient, exact.gradient, [gradient for gradient, _ in samples])
            of_samples = [host_metrics(sums, squared_norm(gradient)) for gradient, sums in samples]
            compared.add("", step_metrics(metrics), step_metrics(exact_metrics), [*map(step_metrics, of_samples)])
            compared.update(before, after, metrics)
        elif count == 0:  # both started from the same state
            compared.add("gradient", after.gradient, snapshot(single, alone).gradient)
            compared.add("", step_metrics(metrics), step_metrics(metrics_alone))
        if count == 0:  # continue as a resumed run does
            state = strategy.from_canonical(after.tree, jax.tree.map(np.array, strategy.to_private(state)))
            compared.resumed(after, snapshot(strategy, state))
    compared.evaluation(strategy.evaluate(state, strategy.place(batch)), alone, after, batch)
    compared.add("drift", after.params, snapshot(single, alone).params)
    measured = compared.measured(run, batches(run), differs=bool(strategy.plan.differs))
    copies = () if strategy.plan.differs else describe_copies(run, compared.single, state, before)
    return measured._replace(copies=copies)


def overflowed(metrics: Metrics) -> bool:
    """Return whether a step in float16 was skipped and has halved the scale of the loss, so that it can be repeated."""
    finite, scale = jax.device_get((metrics.finite, metrics.loss_scale))
    return scale is not None and not finite and scale > LEAST_SCALE


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


def squared_norm(gradient: Mapping[str, Leaves]) -> float:
    """Return the squared norm of the gradient of some layers."""
    leaves = [leaf for leaves in gradient.values() for leaf in leaves.values()]
    return sum(float((leaf.astype(np.float64) ** 2).sum()) for leaf in leaves)


def host_metrics(sums: Sums, squared_norm: float) -> Metrics:
    """Return the metrics of a step in float32, from sums and the squared norm of the gradient."""
    return Metrics(sums, jnp.asarray(squared_norm**0.5, jnp.float32), jnp.asarray(True))


def largest(errors: Sequence[Error], allowed: Sequence[float] | None) -> Largest:
    """Return the largest errors of several steps. allowed: the tolerance of each step."""
    of_all = worst(errors)
    if allowed is None:
        return Largest(*of_all, None)
    # NaN is outside every tolerance.
    excess = [
        0.0 if error.relative == 0 else error.relative / bound if bound and error.relative == error.relative else np.inf
        for error, bound in zip(errors, allowed, strict=True)
    ]
    step = max(range(len(excess)), key=lambda step: (excess[step], -allowed[step]))
    return Largest(of_all.bitwise, of_all.ulps, errors[step].relative, allowed[step])


def outside(measured: Measured) -> list[str]:
    """Return one line for each quantity with an error above its tolerance.

    The line is about the step whose error exceeds its tolerance by the largest factor.
    """
    found = dict(measured.metrics)
    for layer, quantities in measured.layers.items():
        found |= {f"{quantity} of {layer}": error for quantity, error in quantities.items()}
    lines = [
        f"{name}: {error.relative:.1e}, tolerance {error.tolerance:.1e}"
        for name, error in found.items()
        if error.tolerance is not None and not error.relative <= error.tolerance
    ]
    return [*lines, *(f"{name}: differs from the reference" for name in measured.counters), *measured.copies]
