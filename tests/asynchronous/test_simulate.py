"""The simulation against what policies promise, and against simulations that go tick by tick."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxpar.asynchronous.delays import Delays
from jaxpar.asynchronous.simulate import POLICIES, simulate
from jaxpar.asynchronous.table import COLUMNS, Table, staleness_summary, validate

DELAYS = {
    "constant": Delays(),
    "messages": Delays(compute_time=0.3, communication_time=0.1),
    "uniform": Delays("uniform", spread=0.3, slowdown=2.5),
    "lognormal": Delays("lognormal", spread=1.0, communication_time=0.3, jitter=1),
    "pareto": Delays("pareto", spread=1.5, slowdown=4),
    "trace": Delays("trace", trace=((1.0, 3.0, 2.0), (2.5,), (0.5, 0.25))),
}
# A policy with its own settings, as many as differ in kind.
CASES: list[tuple[str, dict[str, int]]] = [
    ("sync", {}),
    ("async", {}),
    ("ssp", {"bound": 0}),
    ("ssp", {"bound": 2}),
    ("softsync", {"groups": 1}),
    ("softsync", {"groups": 2}),
    ("local_sgd", {"interval": 1}),
    ("local_sgd", {"interval": 4}),
    ("diloco", {"interval": 500}),
    ("model_average", {"interval": 1}),
    ("model_average", {"interval": 3}),
]


def rows(table: Table) -> list[tuple[Any, ...]]:
    return list(zip(*(getattr(table, column).tolist() for column in COLUMNS), strict=True))


def test_all_policies_and_only_they_are_tried() -> None:
    assert tuple(dict.fromkeys(policy for policy, _ in CASES)) == POLICIES


@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize(("policy", "settings"), CASES)
def test_tables_are_valid_and_a_longer_run_begins_with_the_same_rows(
    policy: str, settings: dict[str, int], delays: Delays
) -> None:
    for num_workers in (2, 5):
        for seed in (0, 1):
            run: dict[str, Any] = {"num_workers": num_workers, "delays": delays, "seed": seed, **settings}
            longest = simulate(policy, num_gradients=400, **run)
            for num_gradients in (1, 2, 7, 39, 40, 41, 333):
                table = simulate(policy, num_gradients=num_gradients, **run)
                validate(table)
                assert rows(table) == rows(longest)[:num_gradients]
            validate(longest)
            assert longest.chunk.tolist() == list(range(400))
            assert longest.step.tolist() == [i // num_workers for i in range(400)]


def test_one_seed_one_table() -> None:
    tables = [simulate("async", num_workers=3, num_gradients=50, delays=DELAYS["uniform"], seed=s) for s in (0, 0, 1)]
    assert rows(tables[0]) == rows(tables[1]) != rows(tables[2])


@pytest.mark.parametrize("n", range(1, 9))
def test_equal_workers_go_round(n: int) -> None:
    """Without communication staleness is n - 1: of one worker always 0. The first n read version 0 together."""
    for compute_time in (1.0, 0.1):
        table = simulate("async", num_workers=n, num_gradients=10 * n, delays=Delays(compute_time=compute_time))
        assert table.worker.tolist() == list(range(n)) * 10
        assert table.update.tolist() == list(range(10 * n))
        assert table.staleness.tolist() == list(range(n)) + [n - 1] * (9 * n)


@pytest.mark.parametrize("name", ["constant", "lognormal", "pareto"])
@pytest.mark.parametrize("policy", POLICIES[:-1])
def test_one_worker_is_never_stale(policy: str, name: str) -> None:
    table = simulate(policy, num_workers=1, num_gradients=100, delays=DELAYS[name], interval=3)
    assert not table.staleness.any()


def lead(table: Table) -> np.ndarray:
    """Of every row: iterations its worker had done before, less the least that a worker had done when it began."""
    leads = []
    done: dict[int, int] = dict.fromkeys(range(table.num_workers), 0)
    for worker, start in zip(table.worker.tolist(), table.start.tolist(), strict=True):
        finished = [int(((table.worker == w) & (table.finish <= start)).sum()) for w in range(table.num_workers)]
        leads.append(done[worker] - min(finished))
        done[worker] += 1
    return np.array(leads)


@pytest.mark.parametrize("bound", [0, 1, 3, 7])
@pytest.mark.parametrize("name", ["uniform", "lognormal", "pareto"])
def test_ssp_keeps_to_its_bound_and_goes_up_to_it(name: str, bound: int) -> None:
    for seed in range(3):
        run: dict[str, Any] = {"num_workers": 4, "num_gradients": 300, "seed": seed}
        delays = DELAYS[name]._replace(slowdown=5)
        leads = lead(simulate("ssp", bound=bound, delays=delays, **run))
        assert leads.max() == bound
        assert lead(simulate("async", delays=delays, **run)).max() > bound  # which nothing keeps back


def test_ssp_0_is_lock_step() -> None:
    for delays in DELAYS.values():
        table = simulate("ssp", num_workers=4, num_gradients=100, delays=delays)
        worker, finish, start = (column.reshape(25, 4) for column in (table.worker, table.finish, table.start))
        assert (np.sort(worker, axis=1) == np.arange(4)).all()
        assert (start[1:] == finish[:-1, -1:]).all()  # all begin when the slowest is done
        if not delays.communication_time:
            assert table.read.tolist() == [4 * (i // 4) for i in range(100)]


@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS)
def test_what_equals_async(delays: Delays) -> None:
    run: dict[str, Any] = {"num_workers": 5, "num_gradients": 300, "delays": delays, "seed": 2}
    table = simulate("async", **run)
    assert rows(simulate("ssp", bound=10**6, **run)) == rows(table)
    assert rows(simulate("softsync", groups=5, **run)) == rows(table)
    assert rows(simulate("softsync", groups=3, **run)) == rows(table)  # floor(5 / 3) is 1
    assert rows(simulate("ssp", bound=4, **run)) != rows(table) or delays in (DELAYS["constant"], DELAYS["messages"])


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 15, 30])
def test_softsync_staleness(groups: int) -> None:
    """Zhang et al. with 30 workers: the mean is about n, and none above 2 n.

    Exactly it is (workers - 1) / size: other gradients between two of a worker, by size of an update.
    """
    size = 30 // groups
    for seed in range(3):
        delays = Delays("lognormal", spread=0.1)
        table = simulate("softsync", num_workers=30, num_gradients=9000, delays=delays, groups=groups, seed=seed)
        assert np.bincount(table.update).tolist() == [size] * (9000 // size)
        settled = table.staleness[600:]
        assert settled.mean() == pytest.approx(29 / size, rel=0.01)
        assert settled.mean() == pytest.approx(groups, rel=0.05)
        assert settled.max() <= 2 * groups


def test_softsync_by_hand() -> None:
    """Two gradients an update; worker 0 takes 2 s, worker 1 takes 3 s, and nobody waits."""
    delays = Delays("trace", trace=((2.0,), (3.0,)))
    table = simulate("softsync", num_workers=2, num_gradients=7, delays=delays)
    columns = [getattr(table, column).tolist() for column in ("worker", "read", "update", "start", "finish")]
    assert list(zip(*columns, strict=True)) == [
        (0, 0, 0, 0, 3),
        (1, 0, 0, 0, 3),
        (0, 0, 1, 2, 6),  # comes at 4; worker 0 began it before update 0 was made
        (0, 1, 1, 4, 6),  # comes at 6, before the one of worker 1, as 0 is before 1
        (1, 1, 2, 3, 8),
        (0, 2, 2, 6, 8),
        (1, 2, 3, 6, 10),  # comes at 9 and waits for worker 0's of 10
    ]


def test_throughput_with_one_slow_worker() -> None:
    """Four workers, one of them 4 times as slow: sync makes 1/4 of the updates, async 3.25/4."""

    def time_of(policy: str, num_gradients: int, slowdown: float, **settings: int) -> float:
        delays = Delays(slowdown=slowdown)
        table = simulate(policy, num_workers=4, num_gradients=num_gradients, delays=delays, **settings)
        return float(table.finish[-1])

    for policy in ("sync", "local_sgd", "ssp"):
        assert time_of(policy, 1600, 1) == 400
        assert time_of(policy, 400, 4) == 400
    for policy in ("async", "model_average"):
        assert time_of(policy, 1600, 1) == 400
        assert time_of(policy, 1300, 4) == 400
        assert time_of(policy, 1301, 4) == 401
    assert time_of("ssp", 400, 4, bound=10) < 400  # at first workers run ahead, but then
    assert time_of("ssp", 4000, 4, bound=10) > 4000 - 4 * 10  # the slow one sets the pace


def test_sync() -> None:
    for name, delays in DELAYS.items():
        table = simulate("sync", num_workers=4, num_gradients=400, delays=delays, seed=3)
        assert not table.staleness.any()
        assert table.worker.tolist() == list(range(4)) * 100
        assert table.update.tolist() == [i // 4 for i in range(400)]
        start, finish = table.start.reshape(100, 4), table.finish.reshape(100, 4)
        assert (start == start[:, :1]).all() and (finish == finish[:, :1]).all()
        assert (start[1:] == finish[:-1]).all() and not start[0].any()
        if name == "messages":
            np.testing.assert_allclose(table.update_times, 0.5 * np.arange(1, 101))
        assert rows(simulate("local_sgd", num_workers=4, num_gradients=400, delays=delays, seed=3)) == rows(table)


# Random whole times, by worker, for the simulations below.
def whole_times(seed: int) -> Iterator[tuple[int, list[list[int]], int]]:
    """(workers, times of their gradients, time of a message)."""
    rng = np.random.default_rng(seed)
    for n in (1, 2, 3, 5):
        for most in (2, 4, 9):
            for communication in (0, 1, 3):
                yield n, rng.integers(1, most, (n, 23)).tolist(), communication


def whole_delays(times: list[list[int]], communication: int) -> Delays:
    return Delays("trace", communication_time=communication, trace=tuple(tuple(map(float, row)) for row in times))


def server_by_ticks(
    times: list[list[int]], communication: int, num_gradients: int, size: int, bound: float
) -> list[tuple[int, ...]]:
    """(worker, read, update, start, finish): a clock ticks, and at every tick the first worker that can move does."""
    n = len(times)
    phase, left = ["wait"] * n, [0] * n
    done, version, start = [0] * n, [0] * n, [0] * n
    arrived: list[tuple[int, int, int, int]] = []
    now = 0

    def move(worker: int) -> bool:
        if phase[worker] == "wait" and done[worker] - min(done) <= bound:
            phase[worker], left[worker], start[worker] = "pull", communication, now
        elif phase[worker] == "wait" or left[worker]:
            return False
        elif phase[worker] == "pull":
            version[worker] = len(arrived) // size
            phase[worker], left[worker] = "compute", times[worker][done[worker] % len(times[worker])]
        elif phase[worker] == "compute":
            phase[worker], left[worker] = "push", communication
        else:
            arrived.append((worker, version[worker], start[worker], now))
            done[worker] += 1
            phase[worker] = "wait"
        return True

    while len(arrived) < num_gradients + size:
        while any(move(worker) for worker in range(n)):
            pass
        now += 1
        left = [max(0, time - 1) for time in left]
    result: list[tuple[int, ...]] = []
    for i, (worker, read, begun, _) in enumerate(arrived[:num_gradients]):
        update = i // size
        result.append((worker, read, update, begun, arrived[update * size + size - 1][3]))
    return result


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
            columns = [getattr(table, column).tolist() for column in ("worker", "read", "update", "start", "finish")]
            assert list(zip(*columns, strict=True)) == server_by_ticks(times, communication, 60, size, bound)


def rounds_one_by_one(
    times: list[list[int]], communication: int, num_gradients: int, interval: int
) -> list[tuple[int, ...]]:
    """(worker, read, update, start, finish) of local SGD."""
    result: list[tuple[int, ...]] = []
    begin = version = 0
    while len(result) < num_gradients:
        now = [begin + communication] * len(times)
        for step in range(version * interval, (version + 1) * interval):
            is_first, is_last = step == version * interval, step == (version + 1) * interval - 1
            starts = [begin] * len(times) if is_first else now
            now = [t + row[step % len(row)] for t, row in zip(now, times, strict=True)]
            finish = max(now) + communication * is_last
            result += [(worker, version, version, start, finish) for worker, start in enumerate(starts)]
        begin, version = max(now) + communication, version + 1
    return result[:num_gradients]


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
                columns = [
                    getattr(table, column).tolist() for column in ("worker", "read", "update", "start", "finish")
                ]
                expected = rounds_one_by_one(times, communication, num_gradients, interval)
                assert list(zip(*columns, strict=True)) == expected


def averaging_by_ticks(
    times: list[list[int]], communication: int, num_gradients: int, period: float
) -> list[tuple[int, ...]]:
    """(worker, read, update, start, finish): weights are sets of gradients, and those of a worker are its own.

    A second has 60 ticks. In a tick gradients finish, then an averaging ends, then one may begin (and, without
    communication, end), then gradients begin.
    """
    n = len(times)
    own: list[list[int]] = [[] for _ in range(n)]  # what it has finished, by row
    started, read = [0] * n, [0] * n
    left = [60 * row[0] for row in times]
    made: list[tuple[int, int, int, int]] = []
    update: dict[int, int] = {}
    begun = ended = 0
    ends_at = -1
    now = 0
    while len(update) < num_gradients:
        ending = [worker for worker in range(n) if left[worker] == 0]
        for worker in ending:
            own[worker].append(len(made))
            made.append((worker, read[worker], started[worker], now))
        if now == ends_at:
            ended += 1
        is_done = ended == begun
        fresh = [row for rows_of in own for row in rows_of if row not in update]
        if now and now % round(60 * period) == 0 and is_done and fresh:
            update |= dict.fromkeys(fresh, begun)
            begun += 1
            ends_at = now + 2 * 60 * communication
            ended += ends_at == now
        for worker in ending:
            read[worker], started[worker] = ended, now
            left[worker] = 60 * times[worker][len(own[worker]) % len(times[worker])]
        now += 1
        left = [time - 1 for time in left]
    result: list[tuple[int, ...]] = []
    for i, (worker, seen, start, end) in enumerate(made[:num_gradients]):
        result.append((worker, seen, update[i], start // 60, end // 60))
    return result


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_model_average_against_a_clock_that_ticks(interval: int) -> None:
    stale = 0
    for n, times, communication in whole_times(seed=1):
        times = [[*row, 48 - sum(row) % 24] for row in times]  # 24 of them, whose mean is whole
        mean = sum(map(sum, times)) / 24 / n
        delays = whole_delays(times, communication)
        table = simulate("model_average", num_workers=n, num_gradients=60, delays=delays, interval=interval)
        columns = [getattr(table, column).tolist() for column in ("worker", "read", "update", "start", "finish")]
        assert list(zip(*columns, strict=True)) == averaging_by_ticks(times, communication, 60, interval * mean)
        stale += int(table.staleness.sum())
    assert stale


def test_model_average_by_hand() -> None:
    """Averagings may begin at 2, 4, 6, .. and last 2 s; worker 1 takes 3 s for a gradient."""
    delays = Delays(slowdown=3, communication_time=1)
    table = simulate("model_average", num_workers=2, num_gradients=11, delays=delays, interval=2)
    columns = [getattr(table, column).tolist() for column in ("worker", "read", "update", "start", "finish")]
    assert list(zip(*columns, strict=True)) == [
        (0, 0, 0, 0, 1),
        (0, 0, 0, 1, 2),  # in the weights of averaging 0, which begins at 2
        (0, 0, 1, 2, 3),  # computed while it is under way
        (1, 0, 1, 0, 3),
        (0, 0, 1, 3, 4),  # averaging 0 ends at 4, and averaging 1 begins
        (0, 1, 2, 4, 5),
        (0, 1, 2, 5, 6),
        (1, 0, 2, 3, 6),  # began before averaging 0 ended, and finished after 1 began
        (0, 2, 3, 6, 7),
        (0, 2, 3, 7, 8),
        (0, 3, 4, 8, 9),
    ]


def test_an_averaging_has_a_new_gradient_and_none_overlap() -> None:
    slow = Delays("trace", trace=((5.0, 1.0, 1.0),))  # the mean is 7/3
    table = simulate("model_average", num_workers=2, num_gradients=60, delays=slow)
    assert set(np.diff(table.update).tolist()) == {0, 1}
    long = simulate("model_average", num_workers=2, num_gradients=2000, delays=Delays(communication_time=2))
    assert long.num_updates == pytest.approx(1000 / 4, abs=1)  # one every 4 s, as it takes 4 s


def test_no_drift_against_the_period() -> None:
    """0.1 s added up 20,000 times is not 2,000 s, but the gradient that finishes then is in that averaging."""
    delays = Delays(compute_time=0.1)
    table = simulate("model_average", num_workers=2, num_gradients=40_000, delays=delays, interval=4)
    assert table.finish[-1] != 2000
    assert not table.staleness.any()
    assert table.update.tolist() == [i // 8 for i in range(40_000)]


def test_staleness_of_a_slow_worker() -> None:
    """While the slow worker computes once, three others make 4 updates each."""
    table = simulate("async", num_workers=4, num_gradients=1300, delays=Delays(slowdown=4))
    slow = table.staleness[table.worker == 3]
    assert (slow == 12).all()
    assert staleness_summary(table)["max"] == 12
    assert set(table.staleness[table.worker == 0][2:].tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy": "asp"},
            "policy is 'asp'; it may be sync, async, ssp, softsync, local_sgd, diloco, model_average",
        ),
        ({"num_workers": 0}, "num_workers is 0; it must be at least 1"),
        ({"num_gradients": 0}, "num_gradients is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"policy": "ssp", "bound": -1}, "bound is -1; it must be at least 0"),
        ({"policy": "softsync", "groups": 0}, "groups is 0; it must be at least 1 and at most 4, the number of .*"),
        ({"policy": "softsync", "groups": 5}, "groups is 5; it must be at least 1 and at most 4, the number of .*"),
        ({"policy": "local_sgd", "interval": 0}, "interval is 0; it must be at least 1"),
        ({"policy": "diloco", "interval": 0}, "interval is 0; it must be at least 1"),
        ({"policy": "model_average", "interval": 0}, "interval is 0; it must be at least 1"),
        ({"delays": Delays(compute_time=-1)}, "compute_time is -1; it must be more than 0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        simulate(**{"policy": "async", "num_workers": 4, "num_gradients": 10, **settings})


def test_settings_of_other_policies_are_not_looked_at() -> None:
    validate(simulate("async", num_workers=2, num_gradients=10, bound=-1, groups=9, interval=0))


def test_tables_need_no_jax() -> None:
    code = "import sys, jaxpar.asynchronous.simulate; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
