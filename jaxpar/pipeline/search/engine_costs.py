"""The costs of the pipeline engine: how often a device computes in a step, and how many buffers it allocates.

A pipeline without a flush never waits in the steady state: a replica of a stage computes its share of the microbatches,
and then exchanges their gradients. In a schedule with a flush, all devices step through the clocks together, so every
stage takes as long as all clocks do: the passes are those of the most expensive stage, waiting included.

All devices run one program (jaxpar/pipeline/executor/lowering.py), so each allocates the largest number of slots and of
versions of the weights that any of them needs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxpar.pipeline.search.stage_costs import Rates
from jaxpar.pipeline.tables.periodic import (
    continuous_obstacle,
    fewest_microbatches,
    microbatches_in_flight,
    most_versions,
)
from jaxpar.pipeline.tables.replicated import replicated_table
from jaxpar.pipeline.tables.simulate import Times, lockstep
from jaxpar.pipeline.tables.table import Table
from jaxpar.pipeline.tables.validate import peak_stashed

MAX_CANDIDATES = 40_000  # lists of replicas, which a search compares in about 10 s
MAX_ACTIONS = 4096  # devices x microbatches; a table of this size for each number of stages takes about 4 s
SEND_BUFFERS = 2  # for activations and for gradients


class EngineCosts(NamedTuple):
    """The costs of a step, for stages with given numbers of replicas.

    Attributes:
      replicas: number of devices of each stage.
      num_microbatches: number of microbatches of a step, of the size in the profile.
      rates: the work of a replica in a step, by stage.
      weight_copies: arrays with the size of the weights: versions, gradients, and the state of the optimizer.
      stash_slots: number of microbatches of the profile for which a device has a stash.
      transfer_slots: number of buffers for transfers, in microbatches of the profile.
    """

    replicas: tuple[int, ...]
    num_microbatches: float
    rates: tuple[Rates, ...]
    weight_copies: float
    stash_slots: float
    transfer_slots: float


def continuous_costs(
    name: str, replicas: Sequence[int], num_microbatches: int, moments: float, size: float = 1.0
) -> EngineCosts:
    """Return the costs of a schedule without a flush.

    Args:
      name: one of CONTINUOUS.
      replicas: number of devices of each stage.
      num_microbatches: number of microbatches per batch.
      moments: bytes of the optimizer state / bytes of the weights.
      size: examples of a microbatch / examples of a microbatch of the profile, to which its times are proportional.
    """
    in_flight = microbatches_in_flight(replicas)
    inboxes = 1 + (1 if len(set(replicas)) == 1 else 2)
    return EngineCosts(
        tuple(replicas),
        size * num_microbatches,
        tuple(Rates(size * num_microbatches / number, 1, overlap=False) for number in replicas),
        most_versions(name, replicas, num_microbatches) + 1 + moments,
        size * max(-(-number // of_stage) for number, of_stage in zip(in_flight, replicas, strict=True)),
        size * (inboxes + SEND_BUFFERS),
    )


def flushing_costs(table: Table, backward_ratio: float, moments: float) -> EngineCosts:
    """Return the costs of a table with a flush.

    Args:
      table: the table.
      backward_ratio: time of a backward pass / time of a forward pass. B and W each take a half.
      moments: bytes of the optimizer state / bytes of the weights.
    """
    half = backward_ratio / 2
    times = Times(*(table.num_chunks * time for time in (1, half, half)))
    passes = lockstep(table, times) / (1 + backward_ratio)
    return EngineCosts(
        table.replicas or (1,) * table.num_stages,
        table.num_microbatches,
        (Rates(passes, 1, overlap=False),) * table.num_stages,
        (1 + 1 + moments) * table.num_chunks,
        int(peak_stashed(table).max()),
        2 + SEND_BUFFERS,
    )


def even_replicas(num_devices: int, num_stages: int) -> tuple[int, ...]:
    """Return replicas that differ by at most one; later stages have more, which shortens the fill of the pipeline."""
    each, more = divmod(num_devices, num_stages)
    return (each,) * (num_stages - more) + (each + 1,) * more


def flushing_candidates(
    name: str, num_devices: int, num_microbatches: int, most_stages: int, ratio: float, moments: float
) -> Iterator[EngineCosts]:
    """Yield the costs of a schedule with a flush for each number of stages, the largest first.

    In lockstep, the stage with the fewest replicas determines the number of clocks, so replicas are spread evenly. If
    the tables are large, only the largest number of stages may have different numbers of replicas.
    """
    most = min(num_devices, most_stages)
    is_large = num_devices * num_microbatches > MAX_ACTIONS
    for num_stages in range(most, 1, -1):
        replicas = even_replicas(num_devices, num_stages)
        is_tried = not is_large or num_stages == most or replicas[0] == replicas[-1]
        if is_tried and replicas[-1] <= num_microbatches:
            yield flushing_costs(replicated_table(name, replicas, num_microbatches), ratio, moments)


def continuous_candidates(
    name: str,
    num_devices: int,
    num_microbatches: int,
    most_stages: int,
    batch_size: int,
    accepts: Callable[[int], bool],
    moments: float,
) -> Iterator[EngineCosts]:
    """Yield the costs of a schedule without a flush for all replicas that it can have.

    The profile is of microbatches with as many examples as those of the first result.

    Args:
      name: one of CONTINUOUS.
      num_devices: number of devices.
      num_microbatches: number of microbatches per batch; 0: the fewest possible.
      most_stages: largest number of stages.
      batch_size: examples of a batch.
      accepts: whether a batch can have this number of microbatches.
      moments: bytes of the optimizer state / bytes of the weights.
    """
    of_profile = 0
    for replicas in possible_replicas(num_devices, num_microbatches or batch_size, most_stages):
        m = num_microbatches or fewest_microbatches(name, replicas)
        if continuous_obstacle(name, replicas, num_microbatches=m, num_chunks=1) is None and accepts(m):
            of_profile = of_profile or m
            yield continuous_costs(name, replicas, m, moments, of_profile / m)


def possible_replicas(num_devices: int, multiple: int, most_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the lists of at least two divisors of `multiple` that add up to `num_devices`.

    If there are more than MAX_CANDIDATES, only those in which the number of replicas changes at most once.
    """
    divisors = [number for number in range(1, num_devices) if multiple % number == 0]
    most = min(num_devices, most_stages)
    if num_lists(divisors, num_devices, most) <= MAX_CANDIDATES:
        yield from _lists(divisors, num_devices, most)
        return
    for first in divisors:
        for count in range(num_devices // first, 0, -1):
            rest = num_devices - count * first
            for second in [0] if rest == 0 else [number for number in divisors if number != first]:
                more = rest // second if second else 0
                if more * second == rest and 2 <= count + more <= most:
                    yield (first,) * count + (second,) * more


def num_lists(numbers: Sequence[int], total: int, most: int) -> int:
    """Return the number of lists of at least two and at most `most` of the numbers that add up to `total`."""
    counts, result = [1] + [0] * total, 0
    for length in range(1, most + 1):
        counts = [sum(counts[rest - one] for one in numbers if one <= rest) for rest in range(total + 1)]
        result += counts[total] if length > 1 else 0
    return result


def _lists(numbers: Sequence[int], total: int, most: int) -> Iterator[tuple[int, ...]]:
    for first in numbers:
        if first == total:
            yield (first,)
        elif first < total and most > 1:
            yield from ((first, *rest) for rest in _lists(numbers, total - first, most - 1))
