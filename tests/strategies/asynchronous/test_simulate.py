"""Checks the simulation against the properties of policies; test_by_ticks.py compares it row by row."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jaxpar.strategies.asynchronous.delays import Delays
from jaxpar.strategies.asynchronous.simulate import POLICIES, simulate
from jaxpar.strategies.asynchronous.table import UpdateTable, validate
from tests.strategies.asynchronous.by_ticks import rows

DELAYS = {
    "constant": Delays(),
    "messages": Delays(compute_time=0.3, communication_time=0.1),
    "uniform": Delays("uniform", spread=0.3, slowdown=2.5),
    "lognormal": Delays("lognormal", spread=1.0, communication_time=0.3, jitter=1),
    "pareto": Delays("pareto", spread=1.5, slowdown=4),
    "trace": Delays("trace", trace=((1.0, 3.0, 2.0), (2.5,), (0.5, 0.25))),
}
# Policies, with different values of their settings.
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
    """Without communication time, staleness is n - 1 (0 for one worker). The first n gradients all read version 0."""
    for compute_time in (1.0, 0.1):
        table = simulate("async", num_workers=n, num_gradients=10 * n, delays=Delays(compute_time=compute_time))
        assert table.worker.tolist() == list(range(n)) * 10
        assert table.update.tolist() == list(range(10 * n))
        assert table.staleness.tolist() == list(range(n)) + [n - 1] * (9 * n)


def test_messages_do_not_lower_staleness() -> None:
    """A server sends the weights that it has when it is asked, so seven updates come between a read and its write."""
    table = simulate("async", num_workers=8, num_gradients=800, delays=Delays(communication_time=1.0))
    assert (table.staleness[8:] == 7).all()


@pytest.mark.parametrize("name", ["constant", "lognormal", "pareto"])
@pytest.mark.parametrize("policy", POLICIES[:-1])
def test_one_worker_is_never_stale(policy: str, name: str) -> None:
    table = simulate(policy, num_workers=1, num_gradients=100, delays=DELAYS[name], interval=3)
    assert not table.staleness.any()


def lead(table: UpdateTable) -> np.ndarray:
    """Return for every row how many iterations its worker was ahead of the slowest worker when it began."""
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
        assert lead(simulate("async", delays=delays, **run)).max() > bound  # async has no bound


def test_ssp_0_is_lock_step() -> None:
    for delays in DELAYS.values():
        table = simulate("ssp", num_workers=4, num_gradients=100, delays=delays)
        worker, finish, start = (column.reshape(25, 4) for column in (table.worker, table.finish, table.start))
        assert (np.sort(worker, axis=1) == np.arange(4)).all()
        assert (start[1:] == finish[:-1, -1:]).all()  # all begin when the slowest has finished
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
    """As in Zhang et al. with 30 workers, the mean is about n, and the maximum at most 2 n.

    Exactly, the mean is (workers - 1) / size: between two gradients of a worker there is one of each other worker, and
    an update takes `size` of them.
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


def test_throughput_with_one_slow_worker() -> None:
    """With four workers, one of them 4 times slower, sync makes 1/4 of the updates, async 3.25/4."""

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
    assert time_of("ssp", 400, 4, bound=10) < 400  # at first the other workers run ahead, but later
    assert time_of("ssp", 4000, 4, bound=10) > 4000 - 4 * 10  # the slow worker sets the pace


def test_sync() -> None:
    for name, delays in DELAYS.items():
        table = simulate("sync", num_workers=4, num_gradients=400, delays=delays, seed=3)
        assert not table.staleness.any()
        assert table.worker.tolist() == list(range(4)) * 100
        assert table.update.tolist() == [i // 4 for i in range(400)]
        start, finish = table.start.reshape(100, 4), table.finish.reshape(100, 4)
        assert (start == start[:, :1]).all()
        assert (finish == finish[:, :1]).all()
        assert (start[1:] == finish[:-1]).all()
        assert not start[0].any()
        if name == "messages":
            np.testing.assert_allclose(table.update_times, 0.5 * np.arange(1, 101))
        assert rows(simulate("local_sgd", num_workers=4, num_gradients=400, delays=delays, seed=3)) == rows(table)


def test_staleness_of_a_slow_worker() -> None:
    """While the slow worker computes one gradient, the three others make 4 updates each."""
    table = simulate("async", num_workers=4, num_gradients=1300, delays=Delays(slowdown=4))
    slow = table.staleness[table.worker == 3]
    assert (slow == 12).all()
    assert table.staleness.max() == 12
    assert set(table.staleness[table.worker == 0][2:].tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy": "asp"},
            "policy is 'asp'; it must be one of sync, async, ssp, softsync, local_sgd, diloco, model_average",
        ),
        ({"num_workers": 0}, "num_workers is 0; it must be at least 1"),
        ({"num_gradients": 0}, "num_gradients is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"policy": "ssp", "bound": -1}, "bound is -1; it must be at least 0"),
        ({"policy": "softsync", "groups": 0}, "groups is 0; it must be between 1 and 4, the number of .*"),
        ({"policy": "softsync", "groups": 5}, "groups is 5; it must be between 1 and 4, the number of .*"),
        ({"policy": "local_sgd", "interval": 0}, "interval is 0; it must be at least 1"),
        ({"policy": "diloco", "interval": 0}, "interval is 0; it must be at least 1"),
        ({"policy": "model_average", "interval": 0}, "interval is 0; it must be at least 1"),
        ({"delays": Delays(compute_time=-1)}, r"compute_time is -1; it must be between 1e-09 and 1e\+09"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        simulate(**{"policy": "async", "num_workers": 4, "num_gradients": 10, **settings})


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_of_other_policies_do_not_matter(policy: str) -> None:
    setting = {"ssp": "bound", "softsync": "groups"}.get(policy, "interval" if policy not in ("sync", "async") else "")
    run: dict[str, Any] = {"num_workers": 3, "num_gradients": 50, "delays": DELAYS["lognormal"]}
    plain = rows(simulate(policy, **run))
    for value in (-1, 2):
        others: dict[str, Any] = {name: value for name in ("bound", "groups", "interval") if name != setting}
        assert rows(simulate(policy, **run, **others)) == plain
    assert not setting or rows(simulate(policy, **(run | {setting: 2}))) != plain


def test_tables_need_no_jax() -> None:
    code = "import sys, jaxpar.strategies.asynchronous.simulate; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
