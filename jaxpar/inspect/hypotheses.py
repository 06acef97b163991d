"""Hypotheses about a wrong gradient or update: what known kinds of mistakes would have given, computed on one device.

Each is a `Guess`. cause.py chooses among them. Those with fewer free numbers come first.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from jaxpar.core.mesh import CONTEXT, TENSOR
from jaxpar.core.step import Metrics
from jaxpar.errors import format_count
from jaxpar.inspect.copies import has_equal_copies, with_copy
from jaxpar.inspect.reference import HostBatch, Leaves, Reference, Runs, Snapshot
from jaxpar.run.build import StrategyState

MOST_UNEXPLAINED = 0.05  # part of the difference that a cause may leave unexplained
NUMBERS_OF_PART = 10  # numbers of the gradient for each part, so that shares are determined
MOST_PARTS = 32  # of a batch, whose shares in a gradient are determined
OLDEST_PART = 3  # updates that the weights of some layers alone are supposed to lack
NEAR = 0.02  # error of a share that counts as a whole number
SMALLEST_NORM = float(np.finfo(np.float32).tiny)


class Guess(NamedTuple):
    """A hypothesis: its name, the arrays that it predicts, and further evidence for it."""

    name: str
    predicted: np.ndarray  # one vector
    evidence: str = ""


class Evidence(NamedTuple):
    """A step that fails."""

    runs: Runs
    number: int  # number of the batch
    batch: HostBatch
    before: Sequence[Snapshot]  # the states before the step, the newest last, and those before earlier steps
    after: Snapshot
    resumed: Snapshot  # the state after it, saved and resumed
    state: StrategyState  # the state after it on the devices
    copies: list[str]  # `describe_copies` of the state before it
    metrics: Metrics  # on the host

    @property
    def num_replicas(self) -> int:
        """Number of shards of a batch."""
        return self.runs.ours.plan.num_replicas

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a shard."""
        return max(self.runs.ours.plan.decision.batch_divisor // self.num_replicas, 1)


def stages_of(runs: Runs) -> list[tuple[str, ...]]:
    """Return the names of the layers of each stage of a pipeline; empty for other strategies."""
    plan: Any = runs.ours.plan
    if plan.strategy != "pipeline":
        return []
    names = [layer.name for layer in runs.ours.problem.model.layers]
    return [tuple(names[first:end]) for first, end in itertools.pairwise(plan.details.stages.bounds)]


def joined(layers: Mapping[str, Leaves], names: Sequence[str]) -> np.ndarray:
    """Return the arrays of some layers as one vector of float64."""
    arrays = [np.ravel(layers[name][key]) for name in names for key in sorted(layers[name])]
    return np.concatenate([array.astype(np.float64) for array in arrays])


def fitted_scale(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the factor by which one vector is most like the other."""
    return float(got @ expected / max(float(expected @ expected), SMALLEST_NORM))


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradient_guesses(
    evidence: Evidence, names: Sequence[str], *, has_loss: bool
) -> tuple[np.ndarray, np.ndarray, Iterator[Guess]]:
    """Return a gradient, that of one device, and hypotheses about the difference. has_loss: whether losses differ."""
    reference, batch, before = Reference(evidence.runs.exact), evidence.batch, evidence.before[-1].tree
    total = batch["weights"].sum()

    def gradient(
        weights: np.ndarray | None = None, *, tree: Any = None, index: np.ndarray | None = None, weight: Any = None
    ) -> np.ndarray:
        changed = {"weights": batch["weights"] if weights is None else weights}
        changed |= {} if index is None else {"index": index}
        made, _ = reference.gradient(tree or before, {**batch, **changed}, total if weight is None else weight)
        return joined(made, names)

    got, expected = joined(evidence.after.gradient, names), gradient()
    guesses = _guesses_of_gradient(evidence, got, expected, gradient, has_loss=has_loss)
    if not has_loss:
        made, _ = reference.gradient(before, batch, total)
        guesses = itertools.chain(_not_summed(evidence, names, got, made), guesses)
        guesses = itertools.chain(guesses, _of_some_arrays(evidence, names, made, expected))
        guesses = itertools.chain(guesses, _untied(evidence, reference, names, expected))
    return got, expected, guesses


def _not_summed(
    evidence: Evidence, names: Sequence[str], got: np.ndarray, expected: Mapping[str, Leaves]
) -> Iterator[Guess]:
    """Yield an axis of the mesh along which the copies of the gradient differ, if their sum or mean is right.

    Arrays that are right without it, such as those that are split over the axis, are not summed.
    """
    run, reference = evidence.runs.ours, Reference(evidence.runs.one_device)
    for axis, size in run.plan.axes.items():
        if size == 1 or has_equal_copies(evidence.state):
            continue
        states = (with_copy(evidence.state, {axis: index}) for index in range(size))
        copies = [reference.snapshot(run.strategy, state).gradient for state in states]
        if all(np.array_equal(joined(copy, names), got) for copy in copies):
            continue
        apart = max(np.linalg.norm(joined(copy, names) - got) for copy in copies) / np.linalg.norm(got)
        words = f"the gradients along the {axis} axis, which should be equal, differ by up to {apart:.2g}"
        for kind, scale in (("sum", 1), ("mean", 1 / size)):
            errors = []
            for name in names:
                for key in sorted(expected[name]):
                    parts = np.stack([np.ravel(copy[name][key]).astype(np.float64) for copy in copies])
                    whole = np.ravel(expected[name][key]).astype(np.float64)
                    either = [parts[0] - whole, scale * parts.sum(axis=0) - whole]
                    errors.append(min(either, key=lambda error: float(np.linalg.norm(error))))
            name = f"a missing sum over the {axis} axis: the {kind} of what its devices have is right"
            yield Guess(name, got - np.concatenate(errors), words)


def _of_some_arrays(
    evidence: Evidence, names: Sequence[str], expected: Mapping[str, Leaves], whole: np.ndarray
) -> Iterator[Guess]:
    """Yield the hypothesis that some arrays are scaled by one factor, and the others are right."""
    wrong, listed = [], []
    for name in names:
        for key in sorted(expected[name]):
            got, array = (np.ravel(of[name][key]).astype(np.float64) for of in (evidence.after.gradient, expected))
            is_wrong = bool(np.linalg.norm(got - array) > NEAR * np.linalg.norm(array))
            wrong.append(np.full(array.size, is_wrong))
            listed += [f"{name}{key.removeprefix('[]')}"] if is_wrong else []
    mask = np.concatenate(wrong)
    if not mask.any() or mask.all():
        return
    scale = fitted_scale(joined(evidence.after.gradient, names)[mask], whole[mask])
    name = f"{name_of_scale(scale, _numbers(evidence))}, of some arrays only"
    yield Guess(name, np.where(mask, scale, 1) * whole, f"{scale:.7g} times those expected: {', '.join(listed)}")


def _untied(evidence: Evidence, reference: Reference, names: Sequence[str], expected: np.ndarray) -> Iterator[Guess]:
    """Yield gradients of arrays that two layers share, of one of these layers alone."""
    ties = evidence.runs.ours.problem.model.ties
    if not ties:
        return
    batch = evidence.batch
    of_source = joined(reference.untied_gradient(evidence.before[-1].tree, batch, batch["weights"].sum()), names)
    arrays = " and ".join(f"{tie.source_name} of {tie.source}, which {tie.layer} shares" for tie in ties)
    name = "a missing sum over the stages that share an array"
    yield Guess(name, of_source, f"{arrays}: only the gradient of {ties[0].source}")
    shared = np.concatenate(
        [
            np.full(evidence.after.gradient[of][key].size, any(of == t.source and t.source_name in key for t in ties))
            for of in names
            for key in sorted(evidence.after.gradient[of])
        ]
    )
    of_user = np.where(shared, expected - of_source, expected)
    yield Guess(name, of_user, f"{arrays}: only the gradient of {ties[0].layer}")


def _guesses_of_gradient(
    evidence: Evidence,
    got: np.ndarray,
    expected: np.ndarray,
    gradient: Callable[..., np.ndarray],
    *,
    has_loss: bool,
) -> Iterator[Guess]:
    """Yield hypotheses, those with fewer free numbers first. gradient: of some weights, keys or parameters."""
    n, m, batch = evidence.num_replicas, evidence.num_microbatches, evidence.batch
    weights, size = batch["weights"], len(batch["weights"])
    per_replica = size // n
    position = np.arange(size)
    replica, microbatch = position // per_replica, position % per_replica % m
    for words, index in (("replica", position % per_replica), ("microbatch", position % per_replica // m)):
        yield Guess(
            f"dropout keys: the position of an example in its {words} instead of in the batch",
            gradient(index=batch["index"][index]),
            "the index of an example in the batch is folded into the key of the step",
        )
    yield Guess("dropout keys: one for all examples", gradient(index=np.full_like(batch["index"], batch["index"][0])))
    tree = evidence.before[-1].tree
    for offset in (1, -1):
        keys = {**tree, "step": tree["step"] + np.asarray(offset, tree["step"].dtype)}
        yield Guess(f"dropout keys: those of the step {'after' if offset > 0 else 'before'}", gradient(tree=keys))
    ones = np.ones_like(weights)
    if (weights != ones).any():
        yield Guess("padding examples are counted", gradient(ones, weight=weights.sum()))
        yield Guess("padding examples are counted", gradient(ones, weight=np.float32(ones.size)))
    for dtype in (jnp.bfloat16, jnp.float16):
        narrow = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype).astype(x.dtype), tree["params"])
        yield Guess(f"weights in {np.dtype(dtype).name}", gradient(tree={**tree, "params": narrow}))
    yield from _stale(evidence, gradient)
    if not expected.any():
        return
    scale = fitted_scale(got, expected)
    yield Guess(
        name_of_scale(scale, _numbers(evidence)), scale * expected, f"the gradient is {scale:.7g} times that expected"
    )
    parts = [(k, j) for k in range(n) for j in range(m)] if n * m <= MOST_PARTS else [(k, -1) for k in range(n)]
    if not 1 < len(parts) <= MOST_PARTS or len(got) < NUMBERS_OF_PART * len(parts):
        return
    masks = [(replica == k) & ((microbatch == j) | (j < 0)) for k, j in parts]
    kept = [np.where(mask.reshape(-1, *[1] * (weights.ndim - 1)), weights, 0).astype(weights.dtype) for mask in masks]
    of_parts = np.stack([gradient(one) for one in kept], axis=1)
    for words, whole in (
        ("replicas", [float(weights[replica == k].sum()) for k, _ in parts]),
        ("microbatches", [float(one.sum()) for one in kept]),
    ):
        if min(whole) != max(whole) and min(whole) > 0:
            number = n if words == "replicas" else len(parts)
            means = float(weights.sum()) / (number * np.array(whole))
            listed = ", ".join(f"{one:g}" for one in whole)
            name = f"a mean of the means of {words}, whatever their weights"
            yield Guess(name, of_parts @ means, f"weights of {listed}")
    shares = np.linalg.lstsq(of_parts, got, rcond=None)[0]
    yield Guess(name_of_shares(shares, parts, has_loss=has_loss), of_parts @ shares, list_shares(shares, parts))
    yield from _rounded(got, expected, list(of_parts.T))


def _stale(evidence: Evidence, gradient: Callable[..., np.ndarray]) -> Iterator[Guess]:
    """Yield gradients at earlier parameters, of all layers or of those of one stage."""
    newest = evidence.before[-1].tree
    names = [layer.name for layer in evidence.runs.ours.problem.model.layers]
    held: list[tuple[str, Sequence[str]]] = [
        (f" in stage {stage}", layers) for stage, layers in enumerate(stages_of(evidence.runs))
    ]
    held += [(f" of {name}", [name]) for name in names]
    if len(names) <= MOST_PARTS:
        held += [(f" from {names[first]} on", names[first:]) for first in range(1, len(names) - 1)]
        held += [(f" up to {names[last]}", names[: last + 1]) for last in range(1, len(names) - 1)]
    earlier = [*enumerate(reversed(evidence.before[:-1]), 1)]
    places: list[tuple[int, Snapshot, str, Sequence[str]]] = [(*of, "", names) for of in earlier]
    places += [(*of, *where) for of in earlier[:OLDEST_PART] for where in held]
    for count, state, where, layers in places:
        old = {layer: state.tree["params"][layer] for layer in layers if layer in newest["params"]}
        stale = {**newest, "params": {**newest["params"], **old}}
        yield Guess(f"stale weights{where}: they lack {format_count(count, 'update')}", gradient(tree=stale))


def _numbers(evidence: Evidence) -> dict[str, int]:
    """Return the numbers that a gradient can be multiplied or divided by, by name."""
    n, m, axes = evidence.num_replicas, evidence.num_microbatches, evidence.runs.ours.plan.axes
    numbers = {"replicas": n, "microbatches": m, "all devices that share the batch": n * m}
    return numbers | {f"the devices of the {axis} axis": axes[axis] for axis in (TENSOR, CONTEXT) if axis in axes}


def name_of_scale(scale: float, numbers: Mapping[str, int]) -> str:
    """Return the likely reason why all gradients are too large or too small by the same factor.

    numbers: how many there are of what could be summed, by name.
    """
    if abs(scale) < NEAR:
        return "the gradient is 0: lost, or not computed"
    if math.isclose(scale, -1, rel_tol=NEAR):
        return "the gradient has the wrong sign"
    for factor, text in (
        (scale, "a sum over {} instead of their mean, or a sum that is taken twice"),
        (1 / scale, "divided by the number of {} twice, or a missing sum over them"),
    ):
        same = [words for words, number in numbers.items() if number > 1 and math.isclose(factor, number, rel_tol=NEAR)]
        if same:
            return text.format(" or ".join(same))
    return "scaled by a wrong factor"


def name_of_shares(shares: np.ndarray, parts: Sequence[tuple[int, int]], *, has_loss: bool) -> str:
    """Return what is wrong with the shares of replicas and microbatches in a gradient. Each should be 1."""
    rounded = np.round(shares)
    if np.max(np.abs(shares - rounded)) > NEAR * max(float(np.max(np.abs(shares))), 1.0):
        return "replicas or microbatches have wrong weights"
    replicas = {k for k, _ in parts}
    present = {k for (k, _), share in zip(parts, rounded, strict=True) if share}
    if len(replicas) > len(present) == 1 and not has_loss:  # a sum of gradients does not change the loss
        return f"a missing sum over replicas: the gradient is that of replica {min(present)} alone"
    lost = [part for part, share in zip(parts, rounded, strict=True) if share == 0]
    doubled = [part for part, share in zip(parts, rounded, strict=True) if share > 1]
    texts = [f"those of {_named(lost, parts)} are missing"] if lost else []
    texts += [f"those of {_named(doubled, parts)} count several times"] if doubled else []
    kind = "lost and doubled" if lost and doubled else "lost" if lost else "doubled"
    return f"{kind} examples: {', and '.join(texts)}" if texts else "replicas or microbatches have wrong weights"


def _named(some: Sequence[tuple[int, int]], parts: Sequence[tuple[int, int]]) -> str:
    """Return the names of some parts: microbatches of all replicas, whole replicas, or single microbatches."""
    for axis, name in ((1, "microbatch"), (0, "replica")):
        numbers = sorted({part[axis] for part in some})
        if set(some) == {part for part in parts if part[axis] in numbers}:
            return f"{name} {', '.join(map(str, numbers))}"
    return ", ".join(f"microbatch {j} of replica {k}" for k, j in some)


def list_shares(shares: np.ndarray, parts: Sequence[tuple[int, int]]) -> str:
    """Return the shares of replicas and microbatches in a gradient, as evidence."""
    listed = ", ".join(f"{round(float(share), 3):g}" for share in shares)
    kind = "replicas" if all(j <= 0 for _, j in parts) else "microbatches"
    kind += ", replica by replica," if parts[-1][0] and kind == "microbatches" else ""
    return f"shares of the {kind} in the gradient, each of which should be 1: {listed}"


def _rounded(got: np.ndarray, expected: np.ndarray, of_parts: Sequence[np.ndarray]) -> Iterator[Guess]:
    """Yield a guess if the difference is like that of a sum in 16 bits.

    Rounding depends on the order of the sum, so the difference cannot be predicted; but part of it is that of rounding
    each addend, and it has the size that rounding makes.
    """
    difference = got - expected
    for dtype in (jnp.bfloat16, jnp.float16):
        addends = [part.astype(np.float32).astype(dtype) for part in of_parts]
        in_float32 = sum(part.astype(np.float64) for part in addends)
        in_dtype = addends[0]
        for addend in addends[1:]:
            in_dtype = (in_dtype.astype(np.float32) + addend.astype(np.float32)).astype(dtype)
        for made in (np.asarray(in_float32), in_dtype.astype(np.float64)):
            error = made - expected
            size = float(np.linalg.norm(error))
            if not size:
                continue
            alike = float(difference @ error) / (size * float(np.linalg.norm(difference)))
            ratio = float(np.linalg.norm(difference)) / size
            if alike > 0.5 and 0.3 < ratio < 3:
                name = f"a reduction in {np.dtype(dtype).name} instead of float32"
                words = (
                    f"the error is {ratio:.2g} times that of a sum in this dtype, and their correlation is {alike:.2g}"
                )
                unexplained = MOST_UNEXPLAINED * (1 - alike)  # so that the clearest one is chosen
                yield Guess(name, expected + (1 - unexplained) * difference, words)


# ---- updates and other quantities -----------------------------------------------------------------------------------


def update_guesses(evidence: Evidence, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, Iterator[Guess]]:
    """Return an update, that of one device for the same gradient, and hypotheses about the difference."""
    reference, before, after = Reference(evidence.runs.one_device), evidence.before[-1], evidence.after
    metrics = evidence.metrics

    def update(norm: Any = None, **changed: Any) -> np.ndarray:
        tree, of = {**before.tree, **changed}, metrics if norm is None else metrics._replace(grad_norm=norm)
        return joined(reference.update(tree, after.tree, of).update, names)

    got, expected = joined(after.update, names), update()
    if np.array_equal(got, expected):  # the optimizer is right, but not what is done with its result
        got = joined(after.params, names) - joined(before.params, names)
        return got, expected, _guesses_of_change(got, expected, before, after)
    return got, expected, _guesses_of_update(evidence, names, got, expected, update)


def _guesses_of_change(got: np.ndarray, expected: np.ndarray, before: Snapshot, after: Snapshot) -> Iterator[Guess]:
    """Yield hypotheses about parameters that do not change by the update."""
    same = [
        name
        for name, leaves in before.params.items()
        if all(np.array_equal(leaves[k], after.params[name][k]) for k in leaves)
    ]
    yield Guess("the update is computed, but not applied", np.zeros_like(got), f"unchanged: {', '.join(same)}")
    scale = fitted_scale(got, expected)
    yield Guess("the update is scaled before it is applied", scale * expected, f"scaled by {scale:.7g}")


def _guesses_of_update(
    evidence: Evidence,
    names: Sequence[str],
    got: np.ndarray,
    expected: np.ndarray,
    update: Callable[..., np.ndarray],
) -> Iterator[Guess]:
    """Yield hypotheses. update: with another norm of the gradient, or other parts of the state."""
    run, before, n = evidence.runs.ours, evidence.before[-1], evidence.num_replicas
    yield Guess("no update", np.zeros_like(got))
    if before.tree["step"] > 0:
        moments = jax.tree.map(lambda x: np.zeros_like(x) if x.ndim else x, before.tree["optimizer"])
        yield Guess("the moments of the optimizer are reset before the update", update(optimizer=moments))
        moments = evidence.before[-2].tree["optimizer"]
        yield Guess("the moments of the optimizer lack the last update", update(optimizer=moments))
    step, scale = int(before.tree["step"]), fitted_scale(got, expected)
    rates = [float(run.learning_rate(max(number, 0))) for number in (step, step + 1, step - 1)]
    words = f"the update is {scale:.7g} times that expected"
    for name, rate in zip(("after", "before"), rates[1:], strict=True):
        if rates[0] and rate not in (rates[0], 0.0):
            yield Guess(f"the learning rate of the step {name}", rate / rates[0] * expected, words)
    for offset, where in ((1, "ahead"), (-1, "behind")) if step else ((1, "ahead"),):
        counters = jax.tree.map(
            lambda x, offset=offset: x if x.ndim else x + np.asarray(offset, x.dtype), before.tree["optimizer"]
        )
        yield Guess(f"the step counters of the optimizer are {where} by 1", update(optimizer=counters))
        both = update(optimizer=counters, step=before.tree["step"] + np.asarray(offset, before.tree["step"].dtype))
        yield Guess(f"the step counters of the optimizer and of the learning rate are {where} by 1", both)
    if run.config.optimizer.clip_norm:
        norm = np.float32(evidence.metrics.grad_norm)
        wrong = {"no clipping": 0.0, f"{n} times the norm": n * norm, f"1/{n} of the norm": norm / n}
        wrong |= {f"the norm times the square root of {n}": n**0.5 * norm, "twice the norm": 2 * norm}
        for stage, layers in enumerate(stages_of(evidence.runs)):
            gradient = {layer: evidence.after.gradient[layer] for layer in layers if layer in evidence.after.gradient}
            wrong[f"the norm of the gradient of stage {stage} alone"] = np.linalg.norm(joined(gradient, list(gradient)))
        for words_of, value in wrong.items():
            name = words_of if not value else f"clipping by {words_of}"
            yield Guess(f"wrong clipping: {name}", update(np.asarray(value, np.float32)), f"the norm is {norm:.4g}")

        def error(log: float) -> float:
            return float(np.linalg.norm(got - update(np.float32(norm * np.exp(log)))))

        ratio = np.exp(optimize.minimize_scalar(error, bounds=(-3, 3), method="bounded", options={"xatol": 1e-6}).x)
        name = f"wrong clipping: clipping by {ratio:.4g} times the norm"
        yield Guess(
            name, update(np.float32(norm * ratio)), f"the norm is {norm:.4g}, and that which fits {norm * ratio:.4g}"
        )
    decay = expected - update(params=jax.tree.map(np.zeros_like, before.tree["params"]))
    if decay @ decay:
        share = 1 + float((got - expected) @ decay / (decay @ decay))
        name = "no weight decay" if abs(share) < NEAR else "wrong weight decay"
        yield Guess(name, expected + (share - 1) * decay, f"weight decay is {share:.3g} times that expected")
        others = np.where(decay == 0, joined(before.params, names), 0)  # such as biases
        share = float((got - expected) @ others / max(float(others @ others), SMALLEST_NORM))
        words_of = f"{share:.2g} times the parameters that have no decay is added"
        yield Guess("wrong weight decay: of parameters that have none", expected + share * others, words_of)
    yield Guess("the update is scaled by a wrong factor", scale * expected, words)


def moment_guesses(evidence: Evidence, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, Iterator[Guess]]:
    """Return the moments after a step, those of one device for the same gradient, and hypotheses."""
    reference, before, after = Reference(evidence.runs.one_device), evidence.before[-1], evidence.after

    def moments(optimizer: Any) -> np.ndarray:
        tree = {**before.tree, "optimizer": optimizer}
        return joined(reference.update(tree, after.tree, evidence.metrics).optimizer, names)

    def guesses() -> Iterator[Guess]:
        yield Guess("the moments of the optimizer are not updated", joined(before.optimizer, names))
        yield Guess("the moments of the optimizer are reset after the update", np.zeros_like(got))
        zeros = jax.tree.map(lambda x: np.zeros_like(x) if x.ndim else x, before.tree["optimizer"])
        yield Guess("the moments of the optimizer are reset before the update", moments(zeros))
        scale = fitted_scale(got, expected)
        name = "the moments of the optimizer are scaled by a wrong factor after the update"
        yield Guess(name, scale * expected, f"they are {scale:.7g} times those expected")

    got, expected = joined(after.optimizer, names), moments(before.tree["optimizer"])
    return got, expected, guesses()
