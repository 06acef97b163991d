"""The certificate of PipeDream compares it with its recurrence of delayed updates, batch by batch.

A stage of a pipeline that never drains applies the gradient of a batch some steps after the batch has entered, and it
computes this gradient from weights that lack some earlier updates. `Plan.delays` states both delays, also those of a
swarm with delayed updates. With them, one device computes the gradient and the update of each batch, which must agree
with those of the pipeline, as in jaxpar/inspect/certificate.py:

- Version v of a layer is the result of the first v batches. After i steps, a layer that is updated n steps after a
  batch enters is at version max(i - n, 0). So the states of several successive steps contain, layer by layer, a whole
  state at version v: parameters, optimizer state, and the gradient and the update of batch v - 1.
- The gradient of a batch is the sum of the gradients of its microbatches, each at the versions that it reads. The
  reference computes it for all microbatches with the same versions at once; the other examples have a weight of 0.
- The update from one version to the next is computed stage by stage, because each stage clips its gradient by the norm
  over its own layers.
- The metrics of a step are those of the microbatches that reach the last stage in it, and the norm of the gradients
  that are applied in it.

After the last batch to compare, the pipeline takes more steps, until all stages have applied its gradient. The pipeline
is resumed when all stages have been updated once and work is in flight. One without weight stashing follows no
recurrence: it is compared with the gradient at the weights of its forward passes, and fails.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core import state as states
from jaxpar.core.leaf_paths import leaf_paths
from jaxpar.core.plan import DelayedUpdates, StageDelay
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.inspect.certificate import (
    Comparison,
    Measured,
    announced,
    batches,
    check_finite,
    host_metrics,
    squared_norm,
    step_metrics,
)
from jaxpar.inspect.reference import HostBatch, Leaves, Reference, Runs
from jaxpar.inspect.rounding import SEEDS
from jaxpar.models import Params
from jaxpar.run.restore import start
from jaxpar.tasks import Sums, add_up


class Versions:
    """The latest versions of the canonical state, composed of the states of successive steps."""

    def __init__(self, problem: Problem, stages: Sequence[StageDelay]):
        like = states.abstract_state(problem.model, problem.optimizer)

        def init(params: Params) -> Canonical:
            step, key = (jnp.zeros(x.shape, x.dtype) for x in (like.step, like.key))
            return states.to_canonical(State(step, key, params, problem.optimizer.init(params)))

        self._paths = leaf_paths(init, problem.model.shapes)
        self._delays: dict[str | None, int] = {layer: of.updated_after for of in stages for layer in of.layers}
        self._delays[None] = stages[0].updated_after  # leaves of no layer are taken from the first device
        self.num = 0  # number of versions so far; the newest one is num - 1
        # number of steps from the step in which a batch enters to the step after which all layers have its update
        self.delay = max(self._delays.values())
        self._num_states = 0
        self._states: deque[Canonical] = deque(maxlen=1 + self.delay - min(self._delays.values()))
        self._kept: deque[Canonical] = deque(maxlen=2 + max(max(of.lags) for of in stages))

    def add(self, tree: Canonical) -> None:
        """Add the state after the next step; the first one is that before the first step."""
        self._states.append(tree)
        self._num_states += 1
        if self._num_states <= self.delay:
            return
        leaves = {layer: jax.tree.leaves(self._states[after - self.delay - 1]) for layer, after in self._delays.items()}
        of_version = [leaves[path.layer][index] for index, path in enumerate(self._paths)]
        composed = jax.tree.unflatten(jax.tree.structure(tree), of_version)
        self._kept.append({**composed, "step": composed["step"] - self._delays[None]})
        self.num += 1

    def __getitem__(self, version: int) -> Canonical:
        """Return the canonical state at a version that is not too old. There is none before version 0."""
        return self._kept[max(version, 0) - self.num]


def of_stage(layers: Mapping[str, Leaves], stage: StageDelay) -> dict[str, Leaves]:
    """Return the leaves of the layers of a stage."""
    return {layer: leaves for layer, leaves in layers.items() if layer in stage.layers}


class Recurrence:
    """The gradients and metrics of the recurrence, computed by one of the references."""

    def __init__(self, reference: Reference, stages: Sequence[StageDelay], zeros: Sums, seed: int = 0):
        """zeros: the sums of no examples."""
        self._reference, self._stages, self.zeros, self._seed = reference, stages, zeros, seed
        # The microbatches of a batch with the same delays: the lags by stage, and the number of steps from the step in
        # which the batch enters to the step whose metrics count them.
        self._microbatches: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        lags = zip(*(stage.lags for stage in stages), strict=True)
        for number, key in enumerate(zip(lags, stages[-1].computed_after, strict=True)):
            self._microbatches[key].append(number)
        self._sums: dict[int, list[Sums]] = defaultdict(lambda: [zeros])  # by step
        self._squared_norms: dict[int, float] = defaultdict(float)  # by step

    def gradient(self, versions: Versions, number: int, batch: HostBatch) -> Mapping[str, Leaves]:
        """Return the gradient of a batch by layer, and count its metrics. number: number of the batch in the run."""
        microbatch, parts = np.arange(len(batch["weights"])) % len(self._stages[0].lags), []  # of each example
        for (lags, counted_after), microbatches in self._microbatches.items():
            params = {
                layer: versions[number - lag]["params"][layer]
                for stage, lag in zip(self._stages, lags, strict=True)
                for layer in stage.layers
                if layer in versions[number]["params"]
            }
            weights = batch["weights"].copy()
            weights[~np.isin(microbatch, microbatches)] = 0
            tree, examples = {**versions[number], "params": params}, {**batch, "weights": weights}
            gradient, sums = self._reference.gradient(tree, examples, batch["weights"].sum(), self._seed)
            parts.append(gradient)
            self._sums[number + counted_after].append(sums)
        total: Mapping[str, Leaves] = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)
        for stage in self._stages:
            self._squared_norms[number + stage.updated_after] += squared_norm(of_stage(total, stage))
        return total

    def metrics(self, step: int) -> Metrics:
        """Return the metrics of a step, for which all batches have been counted. step: its number in the run."""
        return host_metrics(jax.tree.map(np.float32, add_up(self._sums[step])), self._squared_norms[step])


def _compare_batch(
    compared: Comparison,
    versions: Versions,
    expected: Sequence[Recurrence],
    delays: DelayedUpdates,
    batch: HostBatch,
) -> None:
    """Compare the gradient and the update of the newest batch that all layers have applied."""
    number = versions.num - 2
    before, after = (compared.single.split(versions[version]) for version in (number, number + 1))
    exact, *samples = (of.gradient(versions, number, batch) for of in expected)
    compared.add("gradient", after.gradient, exact, samples)
    for stage in () if delays.differs else delays.stages:
        metrics = host_metrics(expected[0].zeros, squared_norm(of_stage(after.gradient, stage)))
        part = after._replace(
            params=of_stage(after.params, stage),
            update=of_stage(after.update, stage),
            optimizer=of_stage(after.optimizer, stage),
        )
        compared.update(before, part, metrics)


def measure_recurrence(runs: Runs) -> Measured:
    """Run the pipeline, and compare it with its recurrence. Raises TrainingError if a gradient is not finite."""
    run, strategy, single, delays = runs.ours, runs.ours.strategy, runs.one_device.strategy, runs.ours.plan.delays
    assert delays is not None
    (state, _), (alone, _) = start(run), start(runs.one_device)
    problem, numbers = runs.one_device.problem, batches(run)
    compared, versions = Comparison(runs), Versions(problem, delays.stages)
    versions.add(jax.tree.map(np.array, strategy.to_canonical(state)))
    zeros: Sums = jax.device_get(problem.task.zeros())
    expected = [Recurrence(compared.exact, delays.stages, zeros)]  # and its samples
    seeds = () if delays.differs else SEEDS
    expected += [Recurrence(compared.single, delays.stages, zeros, seed) for seed in seeds]
    entered: deque[HostBatch] = deque(maxlen=versions.delay + 1)
    of_steps: list[Metrics] = []
    snapshot = compared.single.snapshot
    initial = snapshot(single, alone)
    for count, number in enumerate(announced([*numbers, *range(run.num_steps, run.num_steps + versions.delay)])):
        batch = run.batches.batch(number)
        if count < len(numbers):
            alone, metrics_alone = single.step(alone, single.place(batch))
            check_finite(number, metrics_alone)
        state, metrics = strategy.step(state, strategy.place(batch))
        check_finite(number, metrics)
        after = snapshot(strategy, state)
        entered.append(batch)
        of_steps.append(jax.device_get(metrics))
        versions.add(after.tree)
        if versions.num >= 2:
            _compare_batch(compared, versions, expected, delays, entered[0])
        if count == max(versions.delay - 1, 0):  # the first version is complete
            compared.add("start", compared.single.split(versions[0]).params, initial.params)
        if versions.num == 2:  # continue as a resumed run does
            state = strategy.from_canonical(after.tree, jax.tree.map(np.array, strategy.to_private(state)))
            compared.resumed(after, snapshot(strategy, state))
    # Compared are the metrics of the steps with only microbatches and updates of the compared batches.
    first = min(*delays.stages[-1].computed_after, *(stage.updated_after for stage in delays.stages))
    for step in range(versions.num - 1 + first):
        exact, *samples = (step_metrics(of.metrics(step)) for of in expected)
        compared.add("", step_metrics(of_steps[step]), exact, samples)
    compared.evaluation(strategy.evaluate(state, strategy.place(batch)), alone, after, batch)
    newest = compared.single.split(versions[versions.num - 1])
    compared.add("drift", newest.params, snapshot(single, alone).params)
    return compared.measured(run, numbers, differs=bool(delays.differs))
