"""Delays: their distributions, that a time depends only on its seed, worker and index, and traces."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxpar.errors import UserError
from jaxpar.strategies.asynchronous.delays import (
    DISTRIBUTIONS,
    Delays,
    communication_times,
    compute_times,
    mean_compute_time,
    read_trace,
)
from jaxpar.strategies.asynchronous.simulate import simulate

COUNT = 100_000
TRACE = ((1.0, 2.0, 4.0), (3.0,))
SETTINGS = {
    "constant": Delays("constant", 2.5),
    "uniform": Delays("uniform", 2.5, 0.4),
    "lognormal": Delays("lognormal", 2.5, 0.8),
    "pareto": Delays("pareto", 2.5, 3.5),
    "trace": Delays("trace", trace=TRACE),
}


def first(times: Iterator[float], count: int = COUNT) -> np.ndarray:
    return np.array(list(itertools.islice(times, count)))


def assert_mean(values: np.ndarray, mean: float, deviation: float) -> None:
    """Check the mean to within five standard errors."""
    assert abs(values.mean() - mean) < 5 * deviation / math.sqrt(len(values))


def test_all_distributions_are_tried() -> None:
    assert tuple(SETTINGS) == DISTRIBUTIONS


@pytest.mark.parametrize("seed", range(3))
def test_distributions(seed: int) -> None:
    times = {name: first(compute_times(SETTINGS[name], 1, seed)[0]) for name in ("constant", "uniform")}
    assert (times["constant"] == 2.5).all()

    assert_mean(times["uniform"], 2.5, 1 / math.sqrt(3))
    assert 1.5 <= times["uniform"].min() < 1.501
    assert 3.499 < times["uniform"].max() <= 3.5

    lognormal = first(compute_times(SETTINGS["lognormal"], 1, seed)[0])
    assert_mean(lognormal, 2.5, 2.5 * math.sqrt(math.exp(0.8**2) - 1))
    assert np.log(lognormal).std() == pytest.approx(0.8, rel=0.02)
    assert np.median(lognormal) == pytest.approx(2.5 * math.exp(-0.32), rel=0.02)

    pareto, least = first(compute_times(SETTINGS["pareto"], 1, seed)[0]), 2.5 * 2.5 / 3.5
    assert_mean(pareto, 2.5, least * math.sqrt(3.5 / (2.5**2 * 1.5)))
    assert least <= pareto.min() < least * 1.001
    assert (pareto > 2 * least).mean() == pytest.approx(2**-3.5, rel=0.05)


def test_the_last_worker_is_slow() -> None:
    for delays in SETTINGS.values():
        plain, slow = (compute_times(delays._replace(slowdown=s), 3, seed=1) for s in (1, 4))
        for worker, factor in enumerate((1, 1, 4)):
            np.testing.assert_allclose(first(slow[worker], 3000), factor * first(plain[worker], 3000), rtol=1e-14)
        assert mean_compute_time(delays._replace(slowdown=4)) == mean_compute_time(delays)
    messages = communication_times(Delays(slowdown=4, communication_time=0.5), 3, seed=1)
    assert [next(worker) for worker in messages] == [0.5] * 3


def test_jitter() -> None:
    for jitter in (0.0, 0.3, 2.0):
        times = first(communication_times(Delays(communication_time=0.5, jitter=jitter), 2, seed=0)[1])
        assert_mean(times, 0.5 * (1 + jitter), 0.5 * jitter) if jitter else np.testing.assert_array_equal(times, 0.5)
        assert times.min() >= 0.5
        if jitter:  # exponential: a share of 1 / e is above the mean
            assert (times > 0.5 * (1 + jitter)).mean() == pytest.approx(math.exp(-1), rel=0.03)
    assert next(communication_times(Delays(jitter=2), 1, seed=0)[0]) == 0


@pytest.mark.parametrize("delays", [*SETTINGS.values(), Delays(communication_time=1, jitter=1)])
def test_a_time_depends_on_seed_worker_and_number_alone(delays: Delays) -> None:
    for times in (compute_times, communication_times):
        alone = [first(times(delays, 4, seed=5)[worker], 2500) for worker in range(4)]
        for count in (1, 1023, 1024, 1025):  # around the block size
            assert first(times(delays, 4, seed=5)[2], count).tolist() == alone[2][:count].tolist()
        together, others = times(delays, 4, seed=5), times(delays, 9, seed=5)
        for k in range(2500):
            for worker in (3, 0, 1, 2):
                assert next(together[worker]) == next(others[worker]) == alone[worker][k]


def test_streams_differ() -> None:
    delays = Delays("uniform", spread=0.5, communication_time=1, jitter=1)
    streams = [
        tuple(first(worker, 5))
        for seed in (0, 1)
        for t in (compute_times, communication_times)
        for worker in t(delays, 3, seed)
    ]
    assert len(set(streams)) == 12
    workers = np.array([first(worker) for worker in compute_times(delays, 2, 0)])
    assert abs(np.corrcoef(workers)[0, 1]) < 5 / math.sqrt(COUNT)
    computing, messages = (
        [next(times) for times in of(delays, 1000, 0)] for of in (compute_times, communication_times)
    )
    assert abs(np.corrcoef(computing, messages)[0, 1]) < 5 / math.sqrt(1000)


def test_a_trace_is_replayed_in_order_and_by_workers_in_turn() -> None:
    times = compute_times(SETTINGS["trace"]._replace(slowdown=2), 4, seed=3)
    assert [first(worker, 7).tolist() for worker in times] == [
        [1, 2, 4, 1, 2, 4, 1],
        [3] * 7,
        [1, 2, 4, 1, 2, 4, 1],
        [6] * 7,
    ]
    assert mean_compute_time(SETTINGS["trace"]) == (7 / 3 + 3) / 2
    assert mean_compute_time(SETTINGS["pareto"]) == 2.5


@pytest.mark.parametrize(
    ("delays", "message"),
    [
        (Delays("normal"), "distribution is 'normal'; it must be one of constant, uniform, lognormal, pareto, trace"),
        (Delays(compute_time=0), r"compute_time is 0; it must be between 1e-09 and 1e\+09"),
        (Delays(compute_time=math.nan), r"compute_time is nan; it must be between 1e-09 and 1e\+09"),
        (Delays(compute_time=math.inf), r"compute_time is inf; it must be between 1e-09 and 1e\+09"),
        (Delays(slowdown=0.9), r"slowdown is 0.9; it must be between 1 and 1e\+09"),
        (Delays(slowdown=math.inf), r"slowdown is inf; it must be between 1 and 1e\+09"),
        (Delays(communication_time=-1), r"communication_time is -1; it must be between 0 and 1e\+09"),
        (Delays(communication_time=math.nan), r"communication_time is nan; it must be between 0 and 1e\+09"),
        (Delays(jitter=-0.1), r"jitter is -0.1; it must be between 0 and 1e\+09"),
        (Delays("uniform", spread=1), "spread is 1; it must be at least 0 and less than 1 with distribution 'uniform'"),
        (
            Delays("lognormal", spread=-1),
            "spread is -1; it must be between 0 and 10.0 with distribution 'lognormal'",
        ),
        (Delays("lognormal", spread=11), "spread is 11; it must be .* 'lognormal'"),
        (Delays("pareto", spread=1), "spread is 1; it must be finite and greater than 1 with distribution 'pareto'"),
        (
            Delays("pareto", spread=math.nan),
            "spread is nan; it must be finite and greater than 1 with distribution 'pareto'",
        ),
        (Delays("constant", spread=0.3), "spread is 0.3; it must be 0 with distribution 'constant'"),
        (Delays(jitter=0.5), "jitter is 0.5; it must be 0 if communication_time is 0"),
        (
            Delays("trace", 2.0, trace=TRACE),
            "compute_time is 2.0; it must be 1 with distribution 'trace', which has its own times",
        ),
        (Delays("trace"), "trace has no times for some worker; it must have at least one for each worker"),
        (Delays("trace", trace=((1.0,), ())), "trace has no times for some worker; .*"),
        (Delays("trace", trace=((1.0, 0.0),)), "trace has a time of 0.0; every time must be finite and greater than 0"),
    ],
)
def test_settings_that_cannot_be(delays: Delays, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        simulate("async", num_workers=2, num_gradients=4, delays=delays)


def test_settings_that_can_be() -> None:
    for delays in SETTINGS.values():
        simulate("async", num_workers=2, num_gradients=4, delays=delays)


def test_a_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("worker,seconds\n1,3\n0,1.0\n0, 2e0\n\n0,4.0\n")
    assert read_trace(path) == TRACE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "which does not exist; it must be the path of a CSV file"),
        ("seconds,worker\n1,0\n", "line 1 must be the header worker,seconds"),
        ("", "line 1 must be the header worker,seconds"),
        ("worker,seconds\n", "no times for worker 0; workers must be numbered from 0 without gaps"),
        ("worker,seconds\n0,1\n2,1\n", "no times for worker 1; workers must be numbered from 0 without gaps"),
        ("worker,seconds\n0,1\n\n0\n", "line 4 has 1 values; it must have 2, one per column"),
        ("worker,seconds\n-1,1\n", "line 2: worker is '-1'; it must be an integer between 0 and 2147483647"),
        ("worker,seconds\n0,1\n0,0\n", "line 3: seconds is 0; it must be greater than 0"),
        ("worker,seconds\n0,fast\n", "line 2: seconds is 'fast'; it must be a non-negative number of seconds"),
        ("worker,seconds\n0,inf\n", "line 2: seconds is 'inf'; it must be a non-negative number of seconds"),
    ],
)
def test_a_bad_trace_file_is_one_line_with_the_place(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"^'{path}'{',' if text is None else ':'} {message}$"):
        read_trace(path)
