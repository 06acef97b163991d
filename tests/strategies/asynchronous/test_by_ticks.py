"""Compares the simulation with simulations tick by tick, and with tables made by hand."""

import math

import numpy as np
import pytest

from jaxpar.strategies.asynchronous.delays import Delays, communication_times
from jaxpar.strategies.asynchronous.simulate import simulate
from jaxpar.strategies.asynchronous.table import validate
from tests.strategies.asynchronous.by_ticks import (
    TIMED,
    averaging_by_ticks,
    rounds_one_by_one,
    rows,
    server_by_ticks,
    whole_delays,
    whole_times,
)


def test_softsync_by_hand() -> None:
    """Two gradients per update; worker 0 takes 2 s, worker 1 takes 3 s, and neither waits."""
    delays = Delays("trace", trace=((2.0,), (3.0,)))
    table = simulate("softsync", num_workers=2, num_gradients=7, delays=delays)
    assert rows(table, TIMED) == [
        (0, 0, 0, 0, 3),
        (1, 0, 0, 0, 3),
        (0, 0, 1, 2, 6),  # arrives at 4; worker 0 began it before update 0 was made
        (0, 1, 1, 4, 6),  # arrives at 6, before worker 1's, because ties go in order
        (1, 1, 2, 3, 8),
        (0, 2, 2, 6, 8),
        (1, 2, 3, 6, 10),  # arrives at 9, and waits for worker 0's at 10
    ]


@pytest.mark.parametrize("seed", range(3))
def test_server_policies_against_a_clock_that_ticks(seed: int) -> None:
    for n, times, communication in whole_times(seed):
        cases: list[tuple[str, dict[str, int], int, float]] = [("async", {}, 1, np.inf)]
        cases += [("ssp", {"bound": s}, 1, s) for s in (0, 1, 4)]
        cases += [("softsync", {"groups": g}, n // g, np.inf) for g in range(1, n + 1)]
        for policy, settings, size, bound in cases:
            table = simulate(
                policy, num_workers=n, num_gradients=60, delays=whole_delays(times, communication), **settings
            )
            assert rows(table, TIMED) == server_by_ticks(times, communication, 60, size, bound)


@pytest.mark.parametrize("interval", [1, 2, 7, 100])
def test_local_sgd_against_rounds_one_by_one(interval: int) -> None:
    for n, times, communication in whole_times(seed=0):
        for policy in ("local_sgd", "diloco"):
            for num_gradients in (60, 7 * n):
                table = simulate(
                    policy,
                    num_workers=n,
                    num_gradients=num_gradients,
                    delays=whole_delays(times, communication),
                    interval=interval,
                )
                expected = rounds_one_by_one(times, communication, num_gradients, interval)
                assert rows(table, TIMED) == expected


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_model_average_against_a_clock_that_ticks(interval: int) -> None:
    stale = 0
    for n, times, communication in whole_times(seed=1):
        times = [[*row, 48 - sum(row) % 24] for row in times]  # 24 times, whose mean is a whole number
        mean = sum(map(sum, times)) / 24 / n
        delays = whole_delays(times, communication)
        table = simulate("model_average", num_workers=n, num_gradients=60, delays=delays, interval=interval)
        assert rows(table, TIMED) == averaging_by_ticks(times, communication, 60, interval * mean)
        stale += int(table.staleness.sum())
    assert stale


def test_model_average_by_hand() -> None:
    """Averagings may begin at 2, 4, 6, .. and take 2 s; worker 1 takes 3 s for a gradient."""
    delays = Delays(slowdown=3, communication_time=1)
    table = simulate("model_average", num_workers=2, num_gradients=11, delays=delays, interval=2)
    assert rows(table, TIMED) == [
        (0, 0, 0, 0, 1),
        (0, 0, 0, 1, 2),  # included in averaging 0, which begins at 2
        (0, 0, 1, 2, 3),  # computed during averaging 0
        (1, 0, 1, 0, 3),
        (0, 0, 1, 3, 4),  # averaging 0 ends at 4, and averaging 1 begins
        (0, 1, 2, 4, 5),
        (0, 1, 2, 5, 6),
        (1, 0, 2, 3, 6),  # began before averaging 0 ended, finished after averaging 1 began
        (0, 2, 3, 6, 7),
        (0, 2, 3, 7, 8),
        (0, 3, 4, 8, 9),
    ]


def test_an_averaging_has_a_new_gradient_and_none_overlap() -> None:
    slow = Delays("trace", trace=((5.0, 1.0, 1.0),))  # the mean is 7/3
    table = simulate("model_average", num_workers=2, num_gradients=60, delays=slow)
    assert set(np.diff(table.update).tolist()) == {0, 1}
    long = simulate("model_average", num_workers=2, num_gradients=2000, delays=Delays(communication_time=2))
    assert long.num_updates == pytest.approx(1000 / 4, abs=1)  # one every 4 s, because an averaging takes 4 s


def test_no_drift_against_the_period() -> None:
    """The sum of 20,000 times 0.1 s is not 2,000 s, but the gradient that finishes then belongs to that averaging."""
    delays = Delays(compute_time=0.1)
    table = simulate("model_average", num_workers=2, num_gradients=40_000, delays=delays, interval=4)
    assert table.finish[-1] != 2000
    assert not table.staleness.any()
    assert table.update.tolist() == [i // 8 for i in range(40_000)]


def test_an_averaging_lasts_until_the_slowest_messages_are_through() -> None:
    delays = Delays(compute_time=0.01, communication_time=0.2, jitter=2)
    table = simulate("model_average", num_workers=3, num_gradients=9000, delays=delays, interval=100, seed=4)
    messages = [[next(times) + next(times) for _ in range(20)] for times in communication_times(delays, 3, seed=4)]
    begin, ends = 1.0, []
    for lasts in map(max, zip(*messages, strict=True)):
        ends.append(begin + lasts)
        begin = math.ceil(ends[-1])  # the next whole second, because workers always have a new gradient
    assert table.finish[-1] < ends[-1]
    assert table.read.tolist() == [sum(end <= start for end in ends) for start in table.start.tolist()]


def test_a_gradient_shorter_than_the_rounding() -> None:
    short = Delays("trace", trace=((1.0, 1e-12),))
    validate(simulate("model_average", num_workers=1, num_gradients=9, delays=short, interval=2))
