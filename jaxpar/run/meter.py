"""Aggregates the metrics of steps over log intervals: loss, rates, model FLOP/s and MFU.

Model FLOPs are the FLOPs of the matrix products and convolutions of a forward pass, counted on the model's jaxpr
(jaxpar/measure/flops.py), times 3 for forward and backward pass. Work repeated by remat is not counted; padding is.
MFU = model FLOP/s / (number of devices x peak FLOP/s of one device), after Chowdhery et al., "PaLM", 2022, appendix B.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar.core.loss_scale import AVOID_NONFINITE, AVOID_OVERFLOW, LEAST_SCALE
from jaxpar.core.step import Metrics
from jaxpar.errors import TrainingError
from jaxpar.launch import processes
from jaxpar.measure import flops
from jaxpar.models.model import Model
from jaxpar.run.build import Run
from jaxpar.tasks import Sums, Task, add_up, mean_loss


class Meter:
    """Receives steps as they are dispatched and reads the metrics of each step one step later.

    Reading waits for the device. At most two steps are therefore in flight, and a step that is not finite is detected
    before the second step after it starts.
    """

    def __init__(self, model: Model, *, task: Task, peak_flops: float | None, max_skipped: int, shares: float = 1):
        """Create a meter.

        peak_flops: of all devices together; None if unknown. max_skipped: most steps in a row that are not finite.
        shares: size of the global batch / size of this process's shard, which `add` receives.
        """
        self._model, self._task, self._shares = model, task, shares
        self._peak, self._max_skipped = peak_flops, max_skipped
        self._flops: dict[tuple[int, ...], int] = {}  # input shape -> model FLOPs of a step
        self._pending: tuple[int, Metrics] | None = None
        self._skipped = 0  # steps in a row, up to the last one that was read, for which no loss scale is small enough
        self._loss_scale: float | None = None  # of the last step that was read
        self.loss: float | None = None  # of the last step that was read and has one
        self._reset()

    def _reset(self) -> None:
        self._sums = self._task.zeros()
        self._counts: dict[str, float] = dict.fromkeys(("examples", "tokens", "flops", "skipped"), 0)
        self._grad_norm: float | None = None  # of the last step whose update was applied

    def interval(self) -> dict[str, Any]:
        """Return JSON values of the log interval so far, without rates, from which `resume` continues."""
        sums: dict[str, Any] = jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), self._sums._asdict())
        skipped = {"skipped_steps": self._counts["skipped"], "skipped_in_a_row": self._skipped}
        return {**sums, "grad_norm": self._grad_norm, **skipped}

    def resume(self, interval: Mapping[str, Any]) -> None:
        """Continue a log interval from the result of `interval`."""
        terms = {name: np.asarray(value) for name, value in interval["terms"].items()}
        self._sums = Sums(interval["loss"], terms, interval["weight"])
        self._grad_norm = interval["grad_norm"]
        self._counts["skipped"], self._skipped = interval["skipped_steps"], interval["skipped_in_a_row"]

    def is_new(self, batch: Mapping[str, np.ndarray]) -> bool:
        """Return whether this is the first batch of its shape, so that its step will be compiled."""
        return batch["inputs"].shape not in self._flops

    def add(self, step: int, batch: Mapping[str, np.ndarray], metrics: Metrics) -> None:
        """Add the step number `step`, which was just dispatched, and read the step before it."""
        inputs, weights = batch["inputs"], batch["weights"]
        if self.is_new(batch):
            self._flops[inputs.shape] = 3 * flops.forward_flops(self._model.apply, self._model.shapes, dict(batch))
        else:  # rates cover only steps without compilation
            self._counts["flops"] += self._shares * self._flops[inputs.shape]
            self._counts["examples"] += self._shares * int((weights.reshape(len(weights), -1) > 0).any(axis=1).sum())
            if inputs.dtype == np.int32:
                tokens = int(batch["mask"].sum()) if "mask" in batch else inputs.size
                self._counts["tokens"] += self._shares * tokens
        self.read()
        self._pending = (step, metrics)

    def revise(self, metrics: Metrics | None) -> None:
        """Replace the metrics of the step added last; None: keep them."""
        if metrics is not None and self._pending is not None:
            self._pending = (self._pending[0], metrics)

    def read(self) -> None:
        """Wait for the step added last and add its metrics. Raises TrainingError if the step is not finite."""
        if self._pending is None:
            return
        step, metrics = self._pending[0], jax.device_get(self._pending[1])
        self._pending = None
        if metrics.sums.weight or not metrics.finite:  # while a pipeline fills, no example has a loss yet
            self.loss = float(mean_loss(metrics.sums.loss, metrics.sums.weight))
        self._loss_scale = None if metrics.loss_scale is None else float(metrics.loss_scale)
        can_fall = self._loss_scale is not None and self._loss_scale > LEAST_SCALE
        self._skipped = 0 if metrics.finite else self._skipped + (not can_fall)
        if metrics.finite:
            self._sums = add_up([self._sums, metrics.sums])
            self._grad_norm = float(metrics.grad_norm)
        elif can_fall or self._skipped <= self._max_skipped:
            self._counts["skipped"] += 1
        else:
            raise self._error(step, metrics)

    def _error(self, step: int, metrics: Metrics) -> TrainingError:
        """Return the error for a step that is not finite, after which no step is skipped."""
        if self._max_skipped:
            skipped = f"steps {step - self._skipped + 1} to {step} were skipped"
            problem = f"{skipped}, because their losses or gradients were not finite"
            instead = "raise config.optimizer.max_skipped_steps"
        else:
            problem = f"step {step} has loss {self.loss} and gradient norm {metrics.grad_norm}"
            problem += "; its update was not applied"
            instead = "skip such steps with config.optimizer.nonfinite='skip'"
        if self._loss_scale is None:
            return TrainingError(f"{problem}; {AVOID_NONFINITE}, or {instead}")
        fallen = f"although the loss scale has fallen to its floor, {LEAST_SCALE:g}"
        return TrainingError(f"{problem}, {fallen}; {AVOID_OVERFLOW}, or {instead}")

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the metrics of the interval, which took `seconds`, and start the next one.

        Losses are means over the steps whose update was applied. They are missing if all steps were skipped, in which
        case the gradient norm is NaN, and while no example has passed a pipeline that never drains.
        """
        counts, sums = self._counts, self._sums
        result = self._task.all_metrics(sums) if sums.weight else {}
        grad_norm = math.nan if self._grad_norm is None else self._grad_norm
        result |= {"grad_norm": grad_norm, "skipped_steps": counts["skipped"]}
        if self._loss_scale is not None:
            result["loss_scale"] = self._loss_scale
        if counts["examples"]:
            result["examples_per_second"] = counts["examples"] / seconds
            result["model_flops_per_second"] = counts["flops"] / seconds
        if counts["tokens"]:
            result["tokens_per_second"] = counts["tokens"] / seconds
        if self._peak and counts["examples"]:
            result["mfu"] = counts["flops"] / seconds / self._peak
        self._reset()
        return result


def build_meter(run: Run) -> Meter:
    """Build the meter for the model and the devices of a run."""
    devices, size = run.strategy.devices, run.config.batch_size
    shard = processes.local_shard(devices, run.plan.num_replicas, run.batches.padded_size)
    peak = run.config.log.peak_flops or run.cluster.peak_flops.get(run.config.model.dtype)
    return Meter(
        run.problem.model,
        task=run.problem.task,
        peak_flops=peak * len(devices) if peak else None,
        max_skipped=run.config.optimizer.max_skipped_steps if run.config.optimizer.nonfinite == "skip" else 0,
        shares=size / max(1, len(range(size)[shard])),  # without padding examples, which may fill the shard
    )
