"""The time of a pipeline stage, by one function; PipeDream's formulas and the engine of this package differ in data."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

COMMUNICATION_MODELS = ("ring", "paper", "released")


class Rates(NamedTuple):
    """Numbers of times that a replica of a stage does its work in the time that is predicted.

    Attributes:
      passes: number of microbatches that it computes.
      exchanges: number of times that it exchanges gradients with the other replicas.
      overlap: whether the exchange and the computation run at the same time; otherwise one after the other.
    """

    passes: float
    exchanges: float
    overlap: bool


def paper_rates(model: str, num_replicas: int) -> Rates:
    """Return the rates of PipeDream's formulas, for one microbatch: each replica runs one of `num_replicas`.

    The released code adds the two times. model: one of COMMUNICATION_MODELS.
    """
    return Rates(1 / num_replicas, 1 / num_replicas, model != "released")


def stage_seconds(rates: Rates, compute: np.ndarray, sync: np.ndarray) -> np.ndarray:
    """Return the time of a stage.

    Args:
      rates: how often a replica does its work.
      compute: seconds of a microbatch on one replica.
      sync: seconds of one exchange of gradients.
    """
    passes, exchanges = rates.passes * compute, rates.exchanges * sync
    return np.maximum(passes, exchanges) if rates.overlap else passes + exchanges


def sync_seconds(model: str, nbytes: np.ndarray, num_replicas: int, bandwidth: float) -> np.ndarray:
    """Return the seconds in which replicas of a stage exchange gradients of `nbytes` bytes.

    Args:
      model: ring: ring all-reduce. paper: the formula of the paper, in which every replica exchanges all bytes with
        every other one. released: the formula of PipeDream's released code.
      nbytes: bytes of the weights.
      num_replicas: number of replicas.
      bandwidth: bytes per second.
    """
    others = num_replicas - 1
    factor = {"ring": 2 * others / num_replicas, "paper": 2 * others, "released": 4 * others / num_replicas}[model]
    return factor * nbytes / bandwidth


def spans(values: Sequence[float]) -> np.ndarray:
    """Return the sums of values first to last, [last, first]; infinite where last < first."""
    sums = np.cumsum([0.0, *values])
    return np.where(np.tri(len(values), dtype=bool), sums[1:, None] - sums[None, :-1], np.inf)


COMPARED_ROWS = 64  # rows that are compared at a time, so that they stay in the cache of the CPU


def fastest_cut(before: np.ndarray, times: np.ndarray, first: int) -> np.ndarray:
    """Return the shortest time of layers first to j if they are cut anywhere, by j.

    Args:
      before: time of layers first to s and of the transfer after s, by s.
      times: time of a stage, by [last layer, first layer].
      first: the first layer.
    """
    result = np.full(len(times), np.inf)
    for start in range(first + 1, len(times), COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, len(times))
        last_stage = times[start:stop, first + 1 : stop]
        result[start:stop] = np.maximum(last_stage, before[first : stop - 1]).min(axis=1)
    return result
