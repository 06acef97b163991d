"""Callbacks: functions that receive the metrics of a run while it trains, and can end it.

A callback is any function of one `Measurement`. It is called after each log interval and each evaluation, and returns
None, or the reason to end the run, as a text. It is called in process 0 only, which sends the reason to the other
processes, so that all of them stop after the same step. Early stopping is a callback, too.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxpar.errors import TrainingError, UserError, format_count
from jaxpar.launch import processes


class Measurement(NamedTuple):
    """The metrics of a log interval (split train) or of an evaluation (validation, test)."""

    step: int  # the number of completed steps
    num_steps: int  # the number of steps of the run, unless it stops early
    split: str  # train, validation or test
    metrics: dict[str, float]  # metrics by name, as in metrics.jsonl. They can be NaN or infinite.


Callback = Callable[[Measurement], str | None]


class Callbacks:
    """The callbacks of a run."""

    def __init__(self, callbacks: Sequence[Callback], reason: str | None = None):
        """reason: the first reason for which a callback ended the run, maybe before it was started again."""
        self._callbacks, self.reason = tuple(callbacks), reason

    def __call__(self, measurement: Measurement) -> None:
        """Call the callbacks, and raise what one raises, in process 0. All processes call this after the same steps."""
        if not self._callbacks:
            return
        reason, error = None, None
        try:
            for callback in self._callbacks if processes.is_first() else ():
                reply = callback(measurement._replace(metrics=dict(measurement.metrics)))
                if not (reply is None or isinstance(reply, str)):
                    raise TypeError(f"a callback returned {reply!r:.60}; it must return None, or a reason to stop")
                reason = reason or reply
        except BaseException as raised:  # a user's function can raise anything, and receive the Ctrl-C of a notebook
            error = raised
        reason, failed = json.loads(processes.from_first(json.dumps([reason, error is not None])))
        if error is not None:
            raise error
        if failed:
            raise TrainingError("a callback failed in process 0; see the error of that process")
        self.reason = self.reason or reason


class EarlyStopping:
    """A callback that ends the run after `patience` evaluations in a row without an improvement.

    An improvement is a validation loss that is lower than the lowest one before the first of these evaluations, by
    `min_delta` or more. A loss that is not finite is none. The decision depends on nothing but the losses of the run,
    so it does not depend on where a run resumed.
    """

    def __init__(self, patience: int, min_delta: float, losses: Iterable[tuple[int, float | None]] = ()):
        """losses: steps and validation losses from before the run was resumed; None: not finite."""
        self._patience, self._min_delta = patience, min_delta
        self._reference, self._count = math.inf, 0  # the loss to improve on, and the evaluations since then
        self._lowest: tuple[float, int] = (math.inf, 0)  # the lowest loss and its step
        self.reason: str | None = None  # why the run must end, with the step of the lowest loss; None: it must not
        for step, loss in losses:
            self._add(step, math.nan if loss is None else loss)

    def __call__(self, measurement: Measurement) -> str | None:
        """Return the reason to stop, or None."""
        if measurement.split == "validation":
            self._add(measurement.step, measurement.metrics["loss"])
        return self.reason

    def _add(self, step: int, loss: float) -> None:
        self._lowest = min(self._lowest, (loss if math.isfinite(loss) else math.inf, step))
        if loss < self._reference and self._reference - loss >= self._min_delta:
            self._reference, self._count = loss, 0
        else:
            self._count += 1
        if self.reason is None and self._count >= self._patience:
            lowest, best_step = self._lowest
            best = f"the lowest, {lowest:.4f}, is of step {best_step}" if math.isfinite(lowest) else "none was finite"
            evaluations = format_count(self._count, "evaluation")
            least = f" by {self._min_delta:g}" if self._min_delta else ""
            self.reason = f"the validation loss has not improved{least} for {evaluations}; {best}"


def check_early_stop(config: ConfigDict) -> None:
    """Raise UserError for an invalid config.early_stop."""
    patience, min_delta = config.early_stop.patience, config.early_stop.min_delta
    if patience < 0:
        raise UserError(f"config.early_stop.patience is {patience}; it must be at least 0 (0: no early stopping)")
    if not 0 <= min_delta < math.inf:
        raise UserError(f"config.early_stop.min_delta is {min_delta}; it must be finite and at least 0")
    if patience and not config.checkpoint.keep_best:
        raise UserError(
            f"config.early_stop.patience is {patience} and config.checkpoint.keep_best is False; it must be True, "
            "because the last weights are not the best ones when a run stops early"
        )
