"""Searches for the largest batch or microbatch whose compiled training step fits into the memory of absent GPUs."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxpar import models, strategies
from jaxpar.choose.candidates import with_values
from jaxpar.choose.costs.layers import resized
from jaxpar.choose.stages import until_chosen, with_stages
from jaxpar.cluster.target import Target
from jaxpar.core.plan import Decision
from jaxpar.core.step import Problem
from jaxpar.data import DataInfo
from jaxpar.errors import UserError, check_choice, is_refused
from jaxpar.inspect import audit
from jaxpar.inspect.step_time import ONE_PROGRAM

BATCH, MICROBATCH = "batch", "microbatch"
MOST_GROWTH = 8  # largest size of a guess / the largest size that fits, until one does not fit


class Tried(NamedTuple):
    """A size whose step was compiled."""

    size: int  # examples in the global batch, or in the microbatch of a replica
    # memory that the step needs on a GPU; infinite if its plan needs more than the data sheet states
    needed_bytes: float
    reason: str = ""  # the reason why there is no plan; empty if there is one


class Fit(NamedTuple):
    """The largest size that fits, for one remat."""

    remat: str  # none, dots or full
    largest: Tried | None  # the largest size that fits; None if none does
    following: Tried | None  # the next size, which does not fit; None if all fit


class Sizes(NamedTuple):
    """The sizes to search, and the config key that sets them."""

    key: str  # the key of the config
    # its value for each size of the global batch, or of the microbatch of a replica, in ascending order
    values: Mapping[int, int]


def find_fits(
    config: ConfigDict,
    problem: Problem,
    info: DataInfo,
    target: Target,
    sizes: Sizes,
    remats: Sequence[str],
    report: Callable[[str, Tried], None],
) -> Iterator[Fit]:
    """Yield the largest of the sizes that fits, for each remat. `report` receives each size that is tried."""
    for remat in remats:

        def attempt(size: int, remat: str = remat) -> Tried:
            settings = {sizes.key: sizes.values[size], remat_key(config): remat}
            tried = _attempt(with_values(config, settings), problem, info, target, size)
            report(remat, tried)
            return tried

        yield Fit(remat, *largest_fitting([*sizes.values], attempt, target.usable_bytes))


def remat_key(config: ConfigDict) -> str:
    """Return the config key that selects what the strategy recomputes."""
    return "pipeline.remat" if config.strategy == "pipeline" else "model.remat"


def batch_sizes(decision: Decision[object], num_examples: int) -> Sizes:
    """Return the batch sizes that the strategy can train, up to the number of training examples (at least one)."""
    divisor = decision.batch_divisor
    sizes = range(divisor, max(num_examples, divisor) + 1, divisor)
    return Sizes("batch_size", {size: size for size in sizes})


def microbatch_sizes(config: ConfigDict, decision: Decision[object], target: Target) -> Sizes:
    """Return the sizes of microbatches into which the config's batch can be divided, with their numbers."""
    is_pipeline = config.strategy == "pipeline"
    key = "pipeline.num_microbatches" if is_pipeline else "optimizer.accumulation_steps"
    share = config.batch_size // decision.num_replicas

    def decide(number: int) -> None:
        strategies.decide(until_chosen(with_values(config, {key: number}), target.cluster), target.cluster)

    values = {size: share // size for size in range(1, share + 1) if share % size == 0}
    return Sizes(key, {size: number for size, number in values.items() if not is_refused(decide, number)})


def check_strategy(config: ConfigDict) -> None:
    """Raise UserError for a strategy whose step is several programs, which share the memory of a GPU."""
    check_choice("strategy", config.strategy, ONE_PROGRAM)


def _attempt(config: ConfigDict, problem: Problem, info: DataInfo, target: Target, size: int) -> Tried:
    """Compile the step of a config of this size."""
    problem = problem._replace(
        model=models.build(config, info, target.cluster),
        accumulation_steps=config.optimizer.accumulation_steps,
        batch=resized(problem.batch, config.batch_size),
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = with_stages(config, problem, target.cluster, Path(folder))
            plan = strategies.plan(config, problem, target.cluster)
        except UserError as error:
            return Tried(size, float("inf"), str(error))
    strategy = strategies.build(plan, problem, target.devices)
    return Tried(size, sum(audit.needed_bytes(strategy.compile(), strategy).values()))


def largest_fitting(
    sizes: Sequence[int], attempt: Callable[[int], Tried], limit: float
) -> tuple[Tried | None, Tried | None]:
    """Return the largest size that needs at most `limit` bytes and the next one, each None if there is none.

    The sizes ascend, and larger ones need more. Few are tried: the next guess is where a straight line through the last
    two results reaches the limit. Every third guess halves the interval that remains instead. Until a size does not
    fit, a guess without a line is at most MOST_GROWTH times the largest size that fits, because compiling a step that
    is far too large takes long.
    """
    found: dict[int, Tried] = {}  # by index, in the order of the attempts
    low, high = -1, len(sizes)  # the largest index that fits, and the smallest that does not
    while high - low > 1:
        finite = sorted([one for one in found.values() if one.needed_bytes < float("inf")][-2:])
        index = high - 1
        if high == len(sizes) and low >= 0:
            index = sum(size <= MOST_GROWTH * sizes[low] for size in sizes) - 1
        if len(found) < 2:
            index = low + 1  # the smallest two
        elif len(found) % 3 == 0 or len(finite) < 2:
            index = min(index, (low + high) // 2)
        elif finite[0].needed_bytes < finite[1].needed_bytes:
            (x, y, _), (x2, y2, _) = finite
            wanted = x + (limit - y) * (x2 - x) / (y2 - y)
            index = sum(size <= wanted for size in sizes[:high]) - 1  # the last size below it
        index = max(index, low + 1)
        found[index] = attempt(sizes[index])
        low, high = (index, high) if found[index].needed_bytes <= limit else (low, index)
    return found.get(low), found.get(high)
