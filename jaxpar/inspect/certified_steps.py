"""Certifies steps of a run while it trains (config.certify_every).

The strategy of the run is wrapped: before every N-th step, its canonical state is copied to the host, and after the
step, one device takes the same step from this copy. The program of the step is the one that trains, and the state is
never changed, so checkpoints do not depend on it. Compared are the metrics, and for each layer the change of the
parameters and of the moments. Unlike `jaxpar certify`, this shows a gradient only through the moments, because the
optimizer of a run does not record it.

The tolerances are those of certificate.py, with one difference: the samples of an update begin with the samples of the
gradient, because the update of the run follows from its own gradient.

`workdir/certified` lists the steps since which the run is certified, one a line, so that a resumed run knows the last
one. If a step fails, later checkpoints may be wrong, too: they are renamed, and the run can only continue from others.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import checkpoint, files
from jaxpar.core.state import Canonical, nbytes
from jaxpar.core.step import Metrics
from jaxpar.errors import TrainingError, UserError, format_bytes, format_count
from jaxpar.host_memory import check_host_memory
from jaxpar.inspect.certificate import (
    Comparison,
    host_metrics,
    outside,
    squared_norm,
    step_metrics,
)
from jaxpar.inspect.copies import describe_copies
from jaxpar.inspect.reference import HostBatch, Reference, Snapshot, compare, compare_change, make_references
from jaxpar.inspect.rounding import SEEDS
from jaxpar.run.build import Run, StrategyState
from jaxpar.strategies.fits import check_memory, in_flight_bytes

HOST_STATES = 6  # about, of which the host holds copies while it compares them
# Temporary bytes of a gradient per byte of the activations of `in_flight_bytes`. XLA needed 1.9 to 2.2 on CPUs.
OF_ACTIVATIONS = 2.2


class NotCertified(TrainingError):
    """A step outside its tolerances."""

    def __init__(self, step: int, found: Sequence[str], last: int):
        """found: the errors outside their tolerances. last: the last certified step."""
        super().__init__(f"step {step} differs from the same step on one device: {'; '.join(found)}")
        self.last = last


@contextlib.contextmanager
def certified(run: Run) -> Iterator[Run]:
    """Yield the run that certifies its steps, and print the cost; without config.certify_every, yield the run as it is.

    If a step is outside its tolerances, the checkpoints after the last certified step are set aside, once all of them
    are written. The TrainingError names the checkpoint from which the run can be resumed.

    Raises UserError if the steps cannot be compared one by one, or the memory is too small.
    """
    if not run.config.certify_every:
        yield run
        return
    strategy = run.strategy
    with run.phases("setup"):
        steps = CertifiedSteps(run)
        print(f"certify   {steps.describe_cost()}", flush=True)
    wrapped = strategy._replace(
        init=steps.init,
        from_canonical=steps.from_canonical,
        place=lambda batch: (batch, strategy.place(batch)),
        step=steps.step,
        evaluate=lambda state, batch: strategy.evaluate(state, batch[1]),
        report=steps.report,
    )
    try:
        yield run._replace(strategy=wrapped)
    except NotCertified as error:
        directory = run.workdir / "checkpoints"
        later = [step for step in checkpoint.steps(directory) if step > error.last]
        checkpoint.set_aside(directory, after=error.last, kind="uncertified")
        intact = checkpoint.steps(directory)
        renamed = f", so the checkpoints of step {', '.join(map(str, later))} are renamed to STEP.uncertified"
        resumed = f"continues from the checkpoint of step {intact[-1]}" if intact else "begins at step 0"
        raise TrainingError(
            f"{error}; the state after it is not saved. The last certified step is {error.last or 'none'}"
            f"{renamed if later else ''}. `jaxpar certify` finds the cause; if the run is started again, it {resumed}"
        ) from error


def check_comparable(run: Run) -> None:
    """Raise UserError if the steps of a run cannot be compared one by one with those of one device."""
    every, total = run.config.certify_every, run.num_steps
    if every > total:
        raise UserError(f"config.certify_every is {every}; it must be at most {total}, the number of steps, or 0")
    key = f"config.certify_every is {every}; it must be 0"
    if run.plan.differs:
        raise UserError(f"{key}, because the steps differ from those of one device: {run.plan.differs}")
    if run.cluster.num_processes > 1:
        raise UserError(f"{key} in a run of {run.cluster.num_processes} processes, each of which has a part of a batch")


class CertifiedSteps:
    """The functions of a strategy that certifies some of its steps."""

    def __init__(self, run: Run):
        check_comparable(run)
        # As many examples in one pass as the devices of the run have.
        self._run, self._runs = run, make_references(run, run.plan.decision.batch_divisor)
        self._compared = Comparison(self._runs)
        self._step = 0  # number of completed steps
        self._is_due = False  # whether a step to certify was not finite, so that the next one is certified
        # the step since which the run is certified, and the certified steps
        self._certified: list[int] = []

    def describe_cost(self) -> str:
        """Return what a certified step costs. Raises UserError if the memory is too small."""
        run, on_device = self._run, self.device_bytes()
        state = sum(self._runs.one_device.plan.memory[0].values())
        memory = [dict(parts) for parts in run.plan.memory]
        memory[0]["certificate"] = on_device
        check_memory(replace(run.plan, memory=memory), run.cluster)
        every, on_host = run.config.certify_every, HOST_STATES * state
        check_host_memory(f"config.certify_every is {every}", on_host, "comparing states")
        number = run.num_steps // every
        work = number * (1 + len(SEEDS))
        return (
            f"every {format_count(every, 'step')}, with the work of {1 + len(SEEDS)} more steps on the first device "
            f"alone, about {format_bytes(on_device)} of its memory and {format_bytes(on_host)} of the host's; "
            f"{format_count(number, 'certificate')} in {format_count(run.num_steps, 'step')}, about "
            f"{work / (work + run.num_steps):.0%} of the compute of the run"
        )

    def device_bytes(self) -> int:
        """Return about how many bytes the first device needs for a certified step in addition to those of the run.

        It computes a gradient in the dtype of the exact reference, and then an update, which needs two states.
        """
        reference, exact = self._runs.one_device, self._runs.exact
        working = in_flight_bytes(exact.plan, exact.problem)
        parameters, state = nbytes(reference.problem.model.shapes), sum(reference.plan.memory[0].values())
        return working["gradients"] + max(2 * state, parameters + round(OF_ACTIVATIONS * working["activations"]))

    def init(self, key: jax.Array) -> StrategyState:
        """Return the state at step 0."""
        self._begin(0)
        return self._run.strategy.init(key)

    def from_canonical(self, tree: Canonical, private: Canonical | None = None, /) -> StrategyState:
        """Return the state of a canonical one."""
        self._begin(int(tree["step"]))
        return self._run.strategy.from_canonical(tree, private)

    def _begin(self, step: int) -> None:
        """Continue after `step`. Certified steps after it are taken again."""
        before = checkpoint.certified_steps(self._run.workdir)
        self._step, self._certified = step, [number for number in before if number <= step] or [step]
        self._write()

    def _write(self) -> None:
        text = "".join(f"{number}\n" for number in self._certified)
        files.write_text(self._run.workdir / checkpoint.CERTIFIED, text)

    def step(self, state: StrategyState, batch: tuple[HostBatch, Any]) -> tuple[StrategyState, Metrics]:
        """Take a step, and certify it if it is due. Raises TrainingError if it is outside its tolerances.

        batch: on the host, and as the strategy places it.
        """
        strategy, (on_host, placed) = self._run.strategy, batch
        self._step += 1
        if not (self._is_due or self._step % self._run.config.certify_every == 0):
            return strategy.step(state, placed)
        before = jax.tree.map(np.array, strategy.to_canonical(state))  # a copy, because the step donates the state
        state, metrics = strategy.step(state, placed)
        metrics = jax.device_get(metrics)
        self._is_due = not metrics.finite  # parameters and moments have not changed
        if metrics.finite:
            after = jax.tree.map(np.array, strategy.to_canonical(state))
            self._certify(before, after, on_host, metrics, state)
        return state, metrics

    def _certify(
        self, before: Canonical, after: Canonical, batch: HostBatch, metrics: Metrics, state: StrategyState
    ) -> None:
        compared, phases = self._compared, self._run.phases
        start, end = (with_records(tree, compared.single) for tree in (before, after))
        expected, expected_metrics = self._reference_step(compared.exact, start, batch)
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        sampled_metrics = []
        for seed in SEEDS:
            phases.alive()
            sample, of_sample = self._reference_step(compared.single, start, batch, seed)
            sampled_metrics.append(step_metrics(of_sample))
            for layer, leaves in sample.update.items():
                samples[layer, "update"].append(compare(leaves, expected.update[layer]).relative)
            for layer, leaves in sample.optimizer.items():
                error = compare_change(start.optimizer[layer], leaves, expected.optimizer[layer])
                samples[layer, "moments"].append(error.relative)
        compared.add("", step_metrics(metrics), step_metrics(expected_metrics), sampled_metrics)
        for layer, leaves in end.params.items():
            error = compare_change(start.params[layer], leaves, expected.params[layer])
            compared.append(layer, "update", error, samples[layer, "update"])
        for layer, leaves in end.optimizer.items():
            error = compare_change(start.optimizer[layer], leaves, expected.optimizer[layer])
            compared.append(layer, "moments", error, samples[layer, "moments"])
        compared.compare_counters(end, expected)
        found = outside(compared.measured(self._run, [self._step - 1], differs=False))
        found += describe_copies(self._run, compared.single, state, start)
        compared.next_step()
        if found:
            raise NotCertified(self._step, found, self._certified[-1])
        self._certified.append(self._step)
        self._write()

    def report(self, state: StrategyState, workdir: Path) -> dict[str, Any]:
        """Return the results of the strategy, and the number of certified steps."""
        return {**self._run.strategy.report(state, workdir), "certified_steps": len(self._certified) - 1}

    def _reference_step(
        self, reference: Reference, before: Snapshot, batch: HostBatch, seed: int = 0
    ) -> tuple[Snapshot, Metrics]:
        """Take a step on one device. seed: of a sample of the rounding errors; 0: none."""
        grads, sums = reference.gradient_tree(before.tree, batch, batch["weights"].sum(), seed)
        metrics = host_metrics(sums, squared_norm(reference.by_layer(grads)))
        return self._compared.single.update_with(before.tree, grads, metrics, seed), metrics


def with_records(tree: Canonical, reference: Reference) -> Snapshot:
    """Return a canonical state of a run in the form of the reference, whose optimizer records gradients and updates."""
    nothing: Mapping[str, Any] = {
        "last": jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), tree["params"])
    }
    return reference.split({**tree, "optimizer": {"0": nothing, "1": tree["optimizer"], "2": nothing}})
