"""Workers that share devices, links and cores: against the simulator without sharing, and against sums by hand."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from jaxpar.strategies.asynchronous.contention import ServerTimes, simulate_contention
from jaxpar.strategies.asynchronous.delays import Delays, compute_times
from jaxpar.strategies.asynchronous.layouts import DeviceNumbers
from jaxpar.strategies.asynchronous.simulate import simulate
from jaxpar.strategies.asynchronous.table import UpdateTable, validate

N, NUM_GRADIENTS = 4, 480
APART = DeviceNumbers(N, N, server=N)  # all workers are on other devices than the server
RANDOM = Delays("lognormal", spread=0.7, slowdown=3.0)


def equal_times(
    number: int, compute: float, *, pull: float = 0.0, push: float = 0.0, update: float = 0.0
) -> ServerTimes:
    return ServerTimes([itertools.repeat(compute) for _ in range(number)], (1.0,) * number, pull, push, update)


def simulated(
    times: ServerTimes,
    numbers: DeviceNumbers = APART,
    bound: float = math.inf,
    crowding: Callable[[int], float] = lambda _: 1.0,
) -> UpdateTable:
    table = simulate_contention(numbers, times, NUM_GRADIENTS, bound=bound, crowding=crowding)
    validate(table)
    return table


def period(table: UpdateTable) -> float:
    """Return the seconds of a gradient in the second half of a table."""
    half = len(table.finish) // 2
    return float(table.finish[-1] - table.finish[half - 1]) / half


@pytest.mark.parametrize("bound", [0, 3, math.inf])
def test_with_nothing_to_share_it_is_the_simulation_in_virtual_time(bound: float) -> None:
    policy, settings = ("async", {}) if bound == math.inf else ("ssp", {"bound": int(bound)})
    expected = simulate(policy, num_workers=N, num_gradients=NUM_GRADIENTS, delays=RANDOM, seed=5, **settings)
    compute = compute_times(RANDOM, N, 5)
    found = simulated(ServerTimes(compute, (1.0,) * N), bound=bound)
    for column in ("worker", "read", "update", "chunk", "step"):
        np.testing.assert_array_equal(getattr(found, column), getattr(expected, column), column)
    np.testing.assert_allclose(found.start, expected.start, atol=1e-9)
    np.testing.assert_allclose(found.finish, expected.finish)


def test_the_bound_0_is_lockstep() -> None:
    """The times are those of synchronous training, which waits for the slowest worker of each step."""
    compute = compute_times(RANDOM, N, 5)
    found = simulated(ServerTimes(compute, (1.0,) * N), bound=0)
    seconds = np.array([list(itertools.islice(one, NUM_GRADIENTS // N)) for one in compute_times(RANDOM, N, 5)])
    np.testing.assert_allclose(found.finish[N - 1 :: N], np.cumsum(seconds.max(axis=0)))


@pytest.mark.parametrize("number", [1, 3, 8])
def test_equal_workers_with_free_links(number: int) -> None:
    table = simulated(equal_times(number, 0.5), DeviceNumbers(number, number, server=number))
    assert period(table) == pytest.approx(0.5 / number)


def test_a_worker_alone_does_one_thing_after_the_other() -> None:
    times = equal_times(1, 0.5, pull=0.25, push=0.125, update=1.0)
    assert period(simulated(times, DeviceNumbers(1, 1, server=1))) == pytest.approx(1.875)
    assert period(simulated(times, DeviceNumbers(1, 1, server=0))) == pytest.approx(1.5)  # nothing is sent


@pytest.mark.parametrize(
    ("pull", "push", "update"), [(0.4, 0.1, 0.0), (0.1, 0.4, 0.0), (0.1, 0.1, 0.4), (0.4, 0.4, 0.4)]
)
def test_a_saturated_server_gives_its_rate(pull: float, push: float, update: float) -> None:
    """Four workers ask for more than the slowest part of the server can do."""
    table = simulated(equal_times(N, 0.3, pull=pull, push=push, update=update))
    assert period(table) == pytest.approx(0.4)
    rare = simulated(equal_times(N, 10.0, pull=pull, push=push, update=update))
    assert period(rare) == pytest.approx((10 + pull + push + update) / N)  # takes turns without waiting


def test_workers_of_a_device_take_turns() -> None:
    assert period(simulated(equal_times(N, 0.5), DeviceNumbers(N, 2, server=2))) == pytest.approx(0.5 / 2)
    # The device of the server computes the gradients of one worker, and the updates of all.
    on_device = simulated(equal_times(N, 0.5, update=0.1), DeviceNumbers(N, N, server=0))
    assert period(on_device) == pytest.approx((0.5 + N * 0.1) / N)


def test_cores_are_shared() -> None:
    """Two cores: four gradients at a time take twice as long, and so do messages and updates."""
    times = equal_times(N, 1.0, pull=0.1, push=0.1, update=0.05)
    table = simulated(times, crowding=lambda number: max(1.0, number / 2))
    assert period(table) == pytest.approx((1.0 + 0.1 + 0.1 + 0.05) / 2, rel=0.02)
    assert period(simulated(times)) == pytest.approx(1.25 / N)


def test_a_slow_worker_leaves_the_cores_to_others() -> None:
    """One core is enough for two workers, one of which waits for 3 times as long as it has computed."""
    numbers, times = DeviceNumbers(2, 2, server=2), equal_times(2, 1.0)
    table = simulated(times._replace(slowdowns=(1.0, 4.0)), numbers, crowding=float)
    counts = np.bincount(table.worker)
    busy = counts.sum() / table.finish[-1]
    assert busy == pytest.approx(1.0, rel=0.01)  # the core is never idle
    assert 4 < counts[0] / counts[1] < 8
    fast = simulated(times._replace(slowdowns=(1.0, 4.0)), numbers)
    assert period(fast) == pytest.approx(1 / (1 + 1 / 4), rel=0.02)
    assert fast.staleness.max() == 4
