"""Finds where a failed certificate differs first, and the likely cause.

The strategy takes its steps again, up to the first one with an error outside its tolerance. There, hypotheses
(hypotheses.py) are tested: each predicts the gradient or the update that a known kind of mistake would have given,
computed by the reference on one device. The hypothesis that leaves the least of the difference unexplained is the
cause. Its evidence is what was fitted, such as a scale, and how much of the difference it explains.

The kinds of mistakes are those that were reported of other systems (Jiang et al., "TTrace", arXiv 2506.09280, table 1;
NVIDIA/Megatron-LM#7452): a sum instead of a mean, a missing sum, lost or doubled examples, stale weights, wrong keys of
dropout masks, a reduction in 16 bits, wrong clipping, weight decay or learning rate, and lost state.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.inspect.certificate import EVALUATION, Failure, Measured, batches
from jaxpar.inspect.copies import describe_copies
from jaxpar.inspect.hypotheses import (
    MOST_UNEXPLAINED,
    NEAR,
    SMALLEST_NORM,
    Evidence,
    Guess,
    gradient_guesses,
    moment_guesses,
    stages_of,
    update_guesses,
)
from jaxpar.inspect.reference import Reference, Runs
from jaxpar.run.restore import start

MOST_IN_16_BITS = 0.3  # MOST_UNEXPLAINED for a model in 16 bits, whose rounding is in the difference
NOT_EXPLAINED = "unknown"
OTHER_COPIES = "devices hold different copies of the state: an update that some missed, or a lost broadcast"
CLEARLY_BETTER = 0.25  # what a later hypothesis may leave / what the best one so far leaves
MOST_LEFT = 0.01  # part of an array's norm that a cause may leave unexplained, unless the model is in 16 bits
AS_ROUNDED = 1e-6  # relative error of a prediction that no later hypothesis improves, because it is that of rounding
OLDEST = 8  # steps by which stale weights are looked for
# quantities of a step, the earliest cause first
CAUSAL_ORDER = ("start", "gradient", "", "update", "moments", "resume")


class Cause(NamedTuple):
    """The place where a certificate fails first, and the likely cause."""

    where: str  # step, pass, layers, stages
    cause: str  # the likely cause, or that none is known
    evidence: list[str]  # the numbers that support it


def find_cause(runs: Runs, measured: Measured) -> Cause | None:
    """Return the cause of a certificate that failed; None if all errors are within their tolerances."""
    if not measured.failures:
        if measured.copies:
            return Cause("the state after the last step", OTHER_COPIES, [*measured.copies])
        listed = ", ".join(measured.counters)
        return Cause("the counters of the state", f"{listed}: not counted as on one device", []) if listed else None
    of_steps = [failure for failure in measured.failures if not failure.name.startswith(EVALUATION)]
    if not of_steps:  # an evaluation is after all steps
        return _cause_of_metrics(measured.failures, "an evaluation")
    step = min(failure.step for failure in of_steps)
    failed = [failure for failure in of_steps if failure.step == step]
    quantity = min((failure.quantity for failure in failed), key=CAUSAL_ORDER.index)
    names = [failure.name for failure in failed if failure.quantity == quantity]
    if runs.ours.plan.delays:
        return Cause(_where(runs, step, quantity, names), "not searched for in pipelines that never drain", [])
    evidence = _again(runs, step)
    has_loss = any(failure.name in ("loss", "weight") for failure in failed)
    where = _where(runs, evidence.number, quantity, names, has_loss=has_loss)
    if evidence.copies and quantity in ("gradient", ""):
        return Cause(where, OTHER_COPIES, evidence.copies)
    most = MOST_UNEXPLAINED if runs.ours.config.model.dtype == "float32" else MOST_IN_16_BITS
    if quantity == "gradient":
        return best_cause(where, *gradient_guesses(evidence, names, has_loss=has_loss), most)
    if quantity == "update":
        return best_cause(where, *update_guesses(evidence, names), most)
    if quantity == "moments":
        return best_cause(where, *moment_guesses(evidence, names), most)
    if quantity == "resume":
        return Cause(where, *_of_resume(evidence))
    if quantity == "start":
        return Cause(where, "other initial parameters, or other copies of them on some devices", [])
    return _cause_of_metrics(failed, f"the step of batch {evidence.number}")


def _again(runs: Runs, step: int) -> Evidence:
    """Take the steps of the strategy again, up to this one."""
    run, strategy, reference = runs.ours, runs.ours.strategy, Reference(runs.one_device)
    state, _ = start(run)
    snapshots, copies = [reference.snapshot(strategy, state)], list[str]()
    for count, number in enumerate(batches(run)[: step + 1]):
        batch = run.batches.batch(number)
        if count == step > 0:
            copies = describe_copies(run, reference, state, snapshots[-2])
        state, metrics = strategy.step(state, strategy.place(batch))
        snapshots, last = [*snapshots[-OLDEST - 1 :], reference.snapshot(strategy, state)], state
        resumed = snapshots[-1]
        if count == 0:  # continue as a resumed run does
            state = strategy.from_canonical(resumed.tree, jax.tree.map(np.array, strategy.to_private(state)))
            resumed = reference.snapshot(strategy, state)
    after = snapshots[-1]
    return Evidence(runs, number, batch, snapshots[:-1], after, resumed, last, copies, jax.device_get(metrics))


def _where(runs: Runs, number: int, quantity: str, names: Sequence[str], *, has_loss: bool = False) -> str:
    """Return the place: step, pass, and the layers in the order of the model, with their stages."""
    layers = [layer.name for layer in runs.ours.problem.model.layers]
    wrong = [layer for layer in layers if layer in names]
    passes = {
        "start": "initial parameters",
        "gradient": "forward pass (the loss differs, too)" if has_loss else "backward pass",
        "update": "update",
        "moments": "optimizer state",
        "resume": "resumed state",
        "": "metrics",
    }
    text = f"step of batch {number}, {passes[quantity]}"
    if not wrong:
        return text
    # A backward pass begins with the last layer.
    first = wrong[-1] if quantity == "gradient" and not has_loss else wrong[0]
    right = len(layers) - len(wrong)
    text += f": {first} first, " if len(wrong) > 1 else f": {first}, "
    text += f"{len(wrong)} of {len(layers)} layers" if right else "all layers"
    held = stages_of(runs)
    stages = sorted({stage for stage, of_stage in enumerate(held) if set(of_stage) & set(wrong)})
    return text + (f", of stage {', '.join(map(str, stages))}" if stages else "")


def best_cause(where: str, got: np.ndarray, expected: np.ndarray, guesses: Iterator[Guess], most: float) -> Cause:
    """Return the cause that leaves the least of the difference unexplained, at most this part."""
    difference = float(np.linalg.norm(got - expected))
    if not difference:
        return Cause(where, f"{NOT_EXPLAINED}: the step has no error when it is taken again", [])
    relative = difference / max(float(np.linalg.norm(expected)), SMALLEST_NORM)
    tried, best = 0, None
    least = most if most == MOST_IN_16_BITS else min(most, MOST_LEFT / relative)
    for guess in guesses:
        if best and least * relative < AS_ROUNDED:
            break
        tried += 1
        unexplained = float(np.linalg.norm(got - guess.predicted)) / difference
        if unexplained < (least if best is None else CLEARLY_BETTER * least):
            best, least = guess, unexplained
    error = f"relative error {relative:.2g}"
    if best is None:
        return Cause(where, f"{NOT_EXPLAINED}: none of {tried} hypotheses explains it", [error])
    evidence = [f"{error}, of which this leaves {least:.1g} unexplained"]
    return Cause(where, best.name, [best.evidence, *evidence] if best.evidence else evidence)


def _of_resume(evidence: Evidence) -> tuple[str, list[str]]:
    """Return why a resumed state differs, with the parts that do."""
    lost = []
    for part in ("params", "gradient", "update", "optimizer"):
        saved, resumed = getattr(evidence.after, part), getattr(evidence.resumed, part)
        wrong = [
            name for name in saved if any(not np.array_equal(saved[name][k], resumed[name][k]) for k in saved[name])
        ]
        if wrong:
            zero = all(not np.any(leaf) for name in wrong for leaf in resumed[name].values())
            lost.append(f"{part} of {', '.join(wrong)}{' is 0' if zero else ''}")
    return "lost or changed state when a run is resumed", lost


def _cause_of_metrics(failed: Sequence[Failure], where: str) -> Cause:
    """Return the cause of metrics that differ although the gradients agree."""
    ratios = [f"{failure.name}: relative error {failure.relative:.3g}" for failure in failed if not failure.quantity]
    doubled = all(math.isclose(failure.relative, 1, rel_tol=NEAR) for failure in failed if not failure.quantity)
    return Cause(where, "examples are counted twice" if doubled else "metrics are summed wrongly", ratios)
