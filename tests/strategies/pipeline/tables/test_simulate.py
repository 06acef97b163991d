"""The simulator is compared with formulas and results from the literature, and with a slow recurrence."""

import itertools
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table
from jaxpar.strategies.pipeline.tables.table import BW, B, F, Table, W, v_stages
from jaxpar.strategies.pipeline.tables.validate import peak_in_flight
from tests.strategies.pipeline.named_tables import any_tables, make, named_tables

# Times of a pass. Fractions make all sums exact.
TIME: st.SearchStrategy[Any] = st.builds(Fraction, st.integers(1, 60), st.integers(1, 6))


def excess(table: Table, times: Times) -> Any:
    """Return the longest span minus the work."""
    return simulate_table(table, times).cost - table.num_microbatches * sum(times)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["model_parallel", "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b"])
@given(data=st.data(), times=st.builds(Times, TIME, TIME, TIME))
def test_idle_time_of_fused_schedules(name: str, data: st.DataObject, times: Any) -> None:
    """The closed forms are exact for all times, even with few microbatches."""
    p, v, m, *_ = table = data.draw(named_tables(name))
    idle = m * (p - 1) * sum(times) if name == "model_parallel" else (p - 1) * sum(times) / v
    simulation = simulate_table(table, times)
    assert simulation.idle == (idle,) * p
    assert simulation.idle_in_span[0] == idle  # device 0 is the first to start and the last to end
    assert simulation.makespan == simulation.cost == m * sum(times) + idle
    assert simulation.bubble_rate == idle / (m * sum(times) + idle)
    assert type(simulation.lockstep) is type(idle)


@given(named_tables("zb_h1"), named_tables("zb_h2"), TIME, TIME, TIME)
def test_idle_time_of_zb_h1_and_zb_h2(h1: Table, h2: Table, w: Any, above: Any, more: Any) -> None:
    """If W <= F and 2W <= F+B, the bubbles are (p-1)(F+B-W) for m >= p, and (p-1)(F+B-2W) for m >= 2p-1.

    With fewer microbatches the warm-up is not full, and every missing microbatch adds the time of a W.
    """
    f = w + above - Fraction(1, 6)  # at least w
    b = max(2 * w - f, 0) + more
    times = Times(f, b, w)
    p, _, m, *_ = h1
    bubble = (p - 1) * (f + b) - (min(m, p) - 1) * w
    assert excess(h1, times) == bubble
    if w <= b:  # then all devices end at the same time
        assert simulate_table(h1, times).idle == (bubble,) * p
    p, _, m, *_ = h2
    assert excess(h2, times) == (p - 1) * (f + b) - (min(m, 2 * p - 1) - 1) * w


@pytest.mark.parametrize("times", [(12, 12, 18), (6, 24, 24), (12, 30, 18)])
def test_zb_h1_and_zb_h2_lose_where_w_is_the_longest(times: tuple[int, int, int]) -> None:
    """If W > F, the bubble is larger than in the formulas, because W delays a B that other devices wait for."""
    f, b, w = times
    for p, m in itertools.product((2, 5, 8), (3, 8, 15, 16)):
        assert m < p or excess(make("zb_h1", p, m), Times(*times)) > (p - 1) * (f + b - w)
        assert m < 2 * p - 1 or excess(make("zb_h2", p, m), Times(*times)) > (p - 1) * (f + b - 2 * w)


@given(named_tables("zb_v"), TIME, TIME, TIME)
def test_idle_time_of_zb_v(table: Table, w: Any, above: Any, more: Any) -> None:
    """The bubble is (p-1)(B-W) if W <= F <= B and m >= 2p-1, so it is 0 if F = B = W.

    Below 2p-1 microbatches, every missing one adds the time of a W; below p, also that of an F.
    """
    f = w + above - Fraction(1, 6)
    b = f + more - Fraction(1, 6)
    p, _, m, *_ = table
    few = max(0, 2 * p - 1 - max(m, p)) * w + max(0, p - m) * f
    assert excess(table, Times(f, b, w)) == (p - 1) * (b - w) + few
    assert m < 2 * p - 1 or simulate_table(table, Times(f, f, f)).idle_in_span == (0,) * p


# Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (2401.10241): times of F, B, W and communication in milliseconds,
# profiled on A100 GPUs, and the bubble rates of 1F1B, ZB-H1 and ZB-H2, for models of 1.5B, 6.2B, 14.6B and 28.3B
# parameters.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
    (8, 24, (29.718, 29.444, 19.927), 0.527, (0.2347, 0.1323, 0.0698)),
    (16, 48, (11.347, 11.248, 8.132), 0.377, (0.2552, 0.1397, 0.0672)),
    (32, 96, (10.419, 10.207, 7.715), 0.408, (0.2646, 0.1421, 0.0641)),
]


@pytest.mark.parametrize(("p", "m", "times", "communication", "rates"), PUBLISHED)
def test_published_bubble_rates(
    p: int, m: int, times: tuple[float, float, float], communication: float, rates: tuple[float, ...]
) -> None:
    for name, rate in zip(("1f1b", "zb_h1", "zb_h2"), rates, strict=True):
        assert round(simulate_table(make(name, p, m), Times(*times), communication).bubble_rate, 4) == rate


def recurrence(table: Table, times: Times, communication: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end of every row: repeatedly apply the dependencies until no start changes."""
    actions, v = table.actions, table.num_chunks
    f, b, w = (np.broadcast_to(np.asarray(time, float), table.num_devices) / v for time in times)
    duration = np.stack([f, b, w, b + w])[actions["kind"], actions["device"]]
    row = {(int(a["kind"]), int(a["microbatch"]), int(a["stage"])): i for i, a in enumerate(actions)}
    edges = []  # from, to, delay
    for (kind, k, s), i in row.items():
        if kind == F:
            before = [(F, k, s - 1)]
        elif kind == W:
            before = [(B, k, s)]
        else:
            before = [(F, k, s), (B, k, s + 1), (BW, k, s + 1)]
        for key in before:
            if key in row:
                far = actions["device"][row[key]] != actions["device"][i]
                edges.append((row[key], i, communication * far))
    for d in range(table.num_devices):
        on = np.flatnonzero(actions["device"] == d)
        edges += [(a, b, 0.0) for a, b in itertools.pairwise(on.tolist())]
    sources, targets, delays = (np.array(column) for column in zip(*edges, strict=True))
    starts = np.zeros(len(actions))
    while True:
        later = starts.copy()
        np.maximum.at(later, targets, (starts + duration)[sources] + delays)
        if (later == starts).all():
            return starts, starts + duration
        starts = later


TIMES_OF_5 = st.lists(st.integers(1, 9).map(float), min_size=5, max_size=5)  # as many as the most devices


@given(
    any_tables() | st.sampled_from([*SCHEDULES]).flatmap(lambda name: named_tables(name, 5, 6)),
    st.tuples(TIMES_OF_5, TIMES_OF_5, TIMES_OF_5),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.5, 20.0]),
)
def test_timeline_against_a_recurrence(table: Table, drawn: Any, same: bool, communication: float) -> None:
    p, actions = table.num_devices, table.actions
    times = Times(*(of[0] if same else of[:p] for of in drawn))
    starts, ends = recurrence(table, times, communication)
    simulation = simulate_table(table, times, communication)
    np.testing.assert_allclose([span.start for span in simulation.timeline], starts, rtol=0, atol=1e-9)
    np.testing.assert_allclose([span.end for span in simulation.timeline], ends, rtol=0, atol=1e-9)
    assert [list(span[:4]) for span in simulation.timeline] == [
        list(row) for row in actions[["device", "kind", "microbatch", "chunk"]].tolist()
    ]
    on = [actions["device"] == d for d in range(p)]
    spans = [ends[rows].max() - starts[rows].min() for rows in on]
    work = [(ends - starts)[rows].sum() for rows in on]
    np.testing.assert_allclose(simulation.spans, spans)
    np.testing.assert_allclose(simulation.idle, ends.max() - np.array(work), atol=1e-9)
    np.testing.assert_allclose(simulation.idle_in_span, np.subtract(spans, work), atol=1e-9)
    assert simulation.makespan == pytest.approx(ends.max())
    assert simulation.cost == pytest.approx(max(spans))
    longest = int(np.argmax(np.round(spans, 6)))
    assert simulation.bubble_rate == pytest.approx(1 - work[longest] / max(spans))
    assert simulation.lockstep == pytest.approx(lockstep(table, times, communication))


def lockstep(table: Table, times: Times, communication: float) -> float:
    """Sum over clocks: the work of the busiest device, plus the communication time if any device sends."""
    f, b, w = (np.broadcast_to(np.asarray(time, float), table.num_devices) / table.num_chunks for time in times)
    duration = np.stack([f, b, w, b + w])
    total = 0.0
    for clock in range(table.num_clocks):
        work = np.zeros(table.num_devices)
        sends = False
        for row in table.actions[table.actions["clock"] == clock]:
            work[row["device"]] += duration[row["kind"], row["device"]]
            to = row["stage"] + {F: 1, B: -1, BW: -1, W: 0}[int(row["kind"])]
            sends |= bool(((table.stages == to).any(axis=1) & (np.arange(table.num_devices) != row["device"])).any())
        total += work.max() + communication * sends
    return total


def test_lockstep_of_schedules_made_for_it() -> None:
    """Lock step costs nothing extra if every clock has one F and one BW, or one of equally long actions."""
    for p, m in ((4, 16), (8, 32)):
        assert simulate_table(make("eager_1f1b", p, m), Times(2, 3, 1)).lockstep == (m + p - 1) * 6
        assert simulate_table(make("gpipe", p, m), Times(2, 3, 1)).lockstep == (m + p - 1) * 6
        assert simulate_table(make("zb_h1", p, m), Times(1, 1, 1)).lockstep == 3 * m + p - 1
        assert simulate_table(make("interleaved_1f1b", p, m, 2), Times(1, 1, 1)).lockstep == 3 * (m + (p - 1) / 2)
        # In 1F1B, forwards of some devices share clocks with the longer backwards of other devices.
        fused = simulate_table(make("1f1b", p, m), Times(1, 1, 1)).lockstep
        assert fused == 2 * 2 * (m + p - 1) - p  # every clock takes 2 (a backward), except the first p


def test_peaks_are_in_microbatches_of_a_device() -> None:
    simulation = simulate_table(make("interleaved_1f1b", 4, 8, 2), Times(1, 1, 1))
    assert simulation.peak_in_flight == tuple((2 * (3 - d) + 5) / 2 for d in range(4))
    assert simulation.peak_in_flight[0] == 4 + 3 / 2  # p + (p - 1) / v
    assert simulate_table(make("zb_v", 4, 8), Times(1, 1, 1)).peak_in_flight == (4, 4, 4, 4)
    assert simulate_table(make("zb_h2", 4, 8), Times(1, 1, 1)).peak_stashed == (7, 7, 7, 7)


def test_memory_of_peaks_grows_with_the_actions() -> None:
    """An array of all actions for each of 2,000 devices would take 16 MB."""
    table = make("1f1b", 2000, 2)
    tracemalloc.start()
    peaks = peak_in_flight(table)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peaks.tolist() == [2] * 1999 + [1]
    assert most < 4e6


def test_an_action_of_a_chunk_takes_its_part_and_nothing_travels_within_a_device() -> None:
    forward = make("zb_v", 2, 1)
    forward = forward._replace(actions=forward.actions[forward.actions["kind"] == F])
    timeline = simulate_table(forward, Times([4, 6], 1, 1), 10).timeline
    assert [(span.device, span.start, span.end) for span in timeline] == [
        (0, 0, 2),
        (1, 12, 15),
        (1, 15, 18),
        (0, 28, 30),
    ]
    assert v_stages(2).tolist() == forward.stages.tolist() == [[0, 3], [1, 2]]


def test_times_by_device_are_as_many_as_devices() -> None:
    with pytest.raises(ValueError, match=r"^backward has 3 times; it must have one, or one per device \(2\)$"):
        simulate_table(make("gpipe", 2, 2), Times(1, [1, 2, 3], 1))
