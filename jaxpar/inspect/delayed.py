"""The certificate of PipeDream compares it with its recurrence of delayed updates, batch by batch.

So does that of a swarm with delayed updates. It applies the gradient of a batch at once, but computes it from weights
that lack one update. All its layers are updated together, like those of one stage.

A stage of a pipeline that never drains applies the gradient of a batch some steps after the batch has entered, and it
computes this gradient from weights that lack some earlier updates. `Plan.delays` states both delays. With them, one
device can compute the gradient and the update of each batch, which must agree with those of the pipeline, as in
jaxpar/inspect/certificate.py:

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
is resumed when all stages have been updated once and work is in flight.

A pipeline without weight stashing follows no recurrence, because its backward passes read newer weights than its
forward passes. It is compared with the gradient at the weights of the forward passes, so its certificate fails and
shows how wrong its gradients are.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core import state as states
from jaxpar.core.leaf_paths import LeafPath, leaf_paths
from jaxpar.core.plan import DelayedUpdates, StageDelay
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.inspect.certificate import Comparison, Measured, announced, batches, check_finite
from jaxpar.inspect.errors import Leaves
from jaxpar.inspect.reference import HostBatch, Reference, Runs, Snapshot
from jaxpar.models import Params
from jaxpar.run.restore import start
from jaxpar.tasks import Sums, add_up


class MicrobatchGroup(NamedTuple):
    """The microbatches of a batch that have the same delays."""

    microbatches: list[int]  # their numbers within the batch
    lags: tuple[int, ...]  # by stage, as in StageDelay
    counted_after: int  # number of steps from the step in which the batch enters to the step whose metrics count them


def groups(stages: Sequence[StageDelay]) -> list[MicrobatchGroup]:
    """Return the microbatches of a batch, grouped by their delays."""
    of: dict[tuple[tuple[int, ...], int], list[int]] = {}
    lags = zip(*(stage.lags for stage in stages), strict=True)
    for number, key in enumerate(zip(lags, stages[-1].computed_after, strict=True)):
        of.setdefault(key, []).append(number)
    return [MicrobatchGroup(microbatches, *key) for key, microbatches in of.items()]


def masked(batch: HostBatch, microbatches: Sequence[int], num_microbatches: int) -> HostBatch:
    """Return a batch in which the weights of all examples outside some of its microbatches are 0."""
    weights = batch["weights"].copy()
    weights[~np.isin(np.arange(len(weights)) % num_microbatches, microbatches)] = 0
    return {**batch, "weights": weights}


def compose(trees: Mapping[str | None, Canonical], within: Sequence[LeafPath]) -> Canonical:
    """Return a tree with the leaves of each layer from another tree.

    Args:
      trees: the tree of each layer, and for key None that of the leaves of no layer.
      within: where each leaf of the trees is.
    """
    leaves = {layer: jax.tree.leaves(tree) for layer, tree in trees.items()}
    structure = jax.tree.structure(trees[None])
    return jax.tree.unflatten(structure, [leaves[path.layer][i] for i, path in enumerate(within)])


def state_paths(problem: Problem) -> list[LeafPath]:
    """Return where each leaf of the canonical state is."""
    like = states.abstract_state(problem.model, problem.optimizer)

    def init(params: Params) -> Canonical:
        step, key = (jnp.zeros(x.shape, x.dtype) for x in (like.step, like.key))
        return states.to_canonical(State(step, key, params, problem.optimizer.init(params)))

    return leaf_paths(init, problem.model.shapes)


class Versions:
    """The latest versions of the canonical state, composed of the states of successive steps.

    Attributes:
      num: number of versions so far; the newest one is num - 1.
      delay: number of steps from the step in which a batch enters to the step after which all layers have its update.
    """

    def __init__(self, problem: Problem, stages: Sequence[StageDelay]):
        self._paths = state_paths(problem)
        self._delays: dict[str | None, int] = {layer: of.updated_after for of in stages for layer in of.layers}
        self._delays[None] = stages[0].updated_after  # these leaves are taken from the first device
        self.num, self.delay, self._num_states = 0, max(self._delays.values()), 0
        self._states: deque[Canonical] = deque(maxlen=1 + self.delay - min(self._delays.values()))
        self._kept: deque[Canonical] = deque(maxlen=2 + max(max(of.lags) for of in stages))

    def add(self, tree: Canonical) -> None:
        """Add the state after the next step; the first one is that before the first step."""
        self._states.append(tree)
        self._num_states += 1
        if self._num_states <= self.delay:
            return
        trees = {layer: self._states[after - self.delay - 1] for layer, after in self._delays.items()}
        composed = compose(trees, self._paths)
        self._kept.append({**composed, "step": composed["step"] - self._delays[None]})
        self.num += 1

    def __getitem__(self, version: int) -> Canonical:
        """Return the canonical state at a version that is not too old. There is none before version 0."""
        return self._kept[max(version, 0) - self.num]


def squared_norm(gradient: Mapping[str, Leaves], layers: Sequence[str]) -> float:
    """Return the squared norm of the gradient of some layers."""
    leaves = [leaf for layer in layers for leaf in gradient.get(layer, {}).values()]
    return sum(float((leaf.astype(np.float64) ** 2).sum()) for leaf in leaves)


def host_metrics(sums: Sums, squared_norm: float) -> Metrics:
    """Return the metrics of a step in float32, from sums and the squared norm of the gradient."""
    return Metrics(sums, jnp.asarray(squared_norm**0.5, jnp.float32), jnp.asarray(True))


class Recurrence:
    """The gradients and metrics of the recurrence, computed by one of the references."""

    def __init__(self, reference: Reference, stages: Sequence[StageDelay], zeros: Sums):
        """zeros: the sums of no examples."""
        self._reference, self._stages, self._groups = reference, stages, groups(stages)
        self._sums: dict[int, list[Sums]] = defaultdict(lambda: [zeros])  # by step
        self._squared_norms: dict[int, float] = defaultdict(float)  # by step

    def gradient(self, versions: Versions, number: int, batch: HostBatch) -> Mapping[str, Leaves]:
        """Return the gradient of a batch by layer, and count its metrics. number: number of the batch in the run."""
        num_microbatches, weight, parts = len(self._stages[0].lags), batch["weights"].sum(), []
        for group in self._groups:
            params = {
                layer: versions[number - lag]["params"][layer]
                for stage, lag in zip(self._stages, group.lags, strict=True)
                for layer in stage.layers
                if layer in versions[number]["params"]
            }
            examples = masked(batch, group.microbatches, num_microbatches)
            gradient, sums = self._reference.gradient({**versions[number], "params": params}, examples, weight)
            parts.append(gradient)
            self._sums[number + group.counted_after].append(sums)
        total: Mapping[str, Leaves] = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)
        for stage in self._stages:
            self._squared_norms[number + stage.updated_after] += squared_norm(total, stage.layers)
        return total

    def metrics(self, step: int) -> Metrics:
        """Return the metrics of a step, for which all batches have been counted. step: its number in the run."""
        return host_metrics(jax.tree.map(np.float32, add_up(self._sums[step])), self._squared_norms[step])


class DelayedComparison:
    """The batches of a pipeline that never drains, compared one by one with the recurrence.

    Attributes:
      compared: the comparison.
      versions: the latest versions of the state.
    """

    def __init__(self, runs: Runs, delays: DelayedUpdates, initial: Canonical):
        """initial: the canonical state before the first step."""
        problem = runs.one_device.problem
        self.compared, self.versions, self._delays = Comparison(runs), Versions(problem, delays.stages), delays
        self.versions.add(initial)
        self._zeros: Sums = jax.device_get(problem.task.zeros())
        self._expected = [Recurrence(of, delays.stages, self._zeros) for of in self.compared.references]
        self._batches: deque[HostBatch] = deque(maxlen=self.versions.delay + 1)
        self._metrics: list[Metrics] = []

    def add(self, batch: HostBatch, after: Canonical, metrics: Metrics) -> None:
        """Add the state after the next step, and compare the batch that all layers have now applied, if any.

        Args:
          batch: the batch that entered in this step.
          after: the canonical state.
          metrics: the metrics of the step.
        """
        self._batches.append(batch)
        self._metrics.append(jax.device_get(metrics))
        self.versions.add(after)
        if self.versions.num >= 2:
            self._compare_batch(self.versions.num - 2, self._batches[0])

    def _compare_batch(self, number: int, batch: HostBatch) -> None:
        """Compare the gradient and the update of a batch. number: number of the batch in the run."""
        compared, versions = self.compared, self.versions
        before, after = (compared.single.split(versions[version]) for version in (number, number + 1))
        compared.gradients(after.gradient, *(of.gradient(versions, number, batch) for of in self._expected))
        if self._delays.differs:
            return
        for stage in self._delays.stages:
            metrics = host_metrics(self._zeros, squared_norm(after.gradient, stage.layers))
            compared.update(before, of_layers(after, stage.layers), metrics)

    def compare_metrics(self) -> None:
        """Compare the metrics of all steps that contain only microbatches and updates of the compared batches."""
        stages = self._delays.stages
        first = min(*stages[-1].computed_after, *(stage.updated_after for stage in stages))
        for step in range(self.versions.num - 1 + first):
            self.compared.metrics(self._metrics[step], *(of.metrics(step) for of in self._expected))


def measure_recurrence(runs: Runs) -> Measured:
    """Run the pipeline, and compare it with its recurrence. Raises TrainingError if a gradient is not finite."""
    run, strategy, single, delays = runs.ours, runs.ours.strategy, runs.one_device.strategy, runs.ours.plan.delays
    assert delays is not None
    (state, _), (alone, _) = start(run), start(runs.one_device)
    delayed = DelayedComparison(runs, delays, jax.tree.map(np.array, strategy.to_canonical(state)))
    compared, versions, numbers = delayed.compared, delayed.versions, batches(run)
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
        delayed.add(batch, after.tree, metrics)
        if count == max(versions.delay - 1, 0):  # the first version is complete
            compared.add("start", compared.single.split(versions[0]).params, initial.params)
        if versions.num == 2:  # continue as a resumed run does
            state = strategy.from_canonical(after.tree, jax.tree.map(np.array, strategy.to_private(state)))
            compared.resumed(after, snapshot(strategy, state))
    delayed.compare_metrics()
    compared.evaluation(strategy.evaluate(state, strategy.place(batch)), alone, after, batch)
    newest = compared.single.split(versions[versions.num - 1])
    compared.add("drift", newest.params, snapshot(single, alone).params)
    return compared.measured(run, numbers)


def of_layers(snapshot: Snapshot, layers: Sequence[str]) -> Snapshot:
    """Return a snapshot with only some layers. Its canonical state remains whole."""
    fields = ("params", "gradient", "update", "optimizer")
    parts = {field: {name: of for name, of in getattr(snapshot, field).items() if name in layers} for field in fields}
    return snapshot._replace(**parts)
