"""Compares the search for the engine with all divisions of small instances, and its costs with tables and plans."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from jaxpar.choose import partition_search as partitions
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.partition_search import (
    PartitionSearch,
    TableCosts,
    continuous_candidates,
    continuous_costs,
    even_replicas,
    flushing_candidates,
    flushing_costs,
    possible_replicas,
)
from jaxpar.strategies.pipeline.tables.periodic import (
    CONTINUOUS,
    continuous_obstacle,
    fewest_microbatches,
    periodic_table,
    unroll,
    versions_kept,
)
from jaxpar.strategies.pipeline.tables.schedule import make_table, replicated_table
from jaxpar.strategies.pipeline.tables.simulate import Times, lockstep, simulate_table
from jaxpar.strategies.pipeline.tables.validate import peak_in_flight
from tests.choose.search.test_stage_search import random_layers


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """Yield all lists of positive numbers with this sum."""
    for length in range(1, total + 1):
        for cuts in itertools.combinations(range(1, total), length - 1):
            yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def price(
    layers: Sequence[LayerProfile], bounds: Sequence[int], costs: TableCosts, bandwidth: float
) -> tuple[float, float]:
    """Return the seconds of a step and the bytes of a device, by the definition of the costs."""
    seconds, weights, activations = [], [], []
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        of_stage, r = layers[begin:end], costs.replicas[stage]
        before = layers[begin - 1].output_bytes if begin else 0
        after = layers[end - 1].output_bytes if end < len(layers) else 0
        one = sum(layer.forward_s + layer.backward_s for layer in of_stage) + 2 * (before + after) / bandwidth
        weights.append(sum(layer.weight_bytes for layer in of_stage))
        seconds.append(costs.passes[stage] * one + 2 * (r - 1) / r * weights[-1] / bandwidth)
        stashes = costs.stash_slots * sum(layer.stash_bytes for layer in of_stage)
        activations.append(stashes + costs.transfer_slots * max(before, after))
    return max(seconds), costs.weight_copies * max(weights) + max(activations)


def brute_force(
    layers: Sequence[LayerProfile], candidates: Sequence[TableCosts], bandwidth: float, limit: float
) -> float:
    """Return the time of the fastest division that fits."""
    times = [math.inf]
    for costs in candidates:
        places = [n for n in range(1, len(layers)) if layers[n - 1].can_cut]
        for cuts in itertools.combinations(places, len(costs.replicas) - 1):
            seconds, nbytes = price(layers, (0, *cuts, len(layers)), costs, bandwidth)
            if nbytes <= limit:
                times.append(seconds)
    return min(times)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed: int) -> None:
    """All replicas that add up to the devices are tried, if the engine can run them: see `continuous_obstacle`."""
    rng = random.Random(seed)
    layers, devices, bandwidth = random_layers(rng, rng.randint(2, 7)), rng.randint(2, 6), 0.5 + 10 * rng.random()
    limit, moments = rng.choice([math.inf, 60 * rng.random(), 150 * rng.random()]), rng.choice([0.0, 2.0])
    if seed % 3:
        name, m, batch_size = rng.choice(list(CONTINUOUS)), rng.choice([0, 4, 6, 12]), rng.choice([4, 6, 12])

        def accepts(number: int) -> bool:
            return bool(m) or batch_size % number == 0

        lists = [one for one in compositions(devices) if 2 <= len(one) <= len(layers)]
        runs = [(one, m or fewest_microbatches(name, one)) for one in lists]
        runs = [
            (one, number)
            for one, number in runs
            if not continuous_obstacle(name, one, num_microbatches=number, num_chunks=1) and accepts(number)
        ]
        found = list(continuous_candidates(name, devices, m, len(layers), batch_size, accepts, moments))
        assert sorted(costs.replicas for costs in found) == sorted(one for one, _ in runs)
        of_profile = dict(runs)[found[0].replicas] if found else 1
        candidates = [continuous_costs(name, one, number, moments, of_profile / number) for one, number in runs]
    else:
        name, m = rng.choice(["1f1b", "gpipe"]), rng.choice([4, 6, 12])
        found = list(flushing_candidates(name, devices, m, len(layers), 2.0, moments))
        lists = [even_replicas(devices, number) for number in range(2, min(devices, len(layers)) + 1)]
        candidates = [flushing_costs(replicated_table(name, one, m), 2.0, moments) for one in lists if max(one) <= m]
    expected = brute_force(layers, candidates, bandwidth, limit)
    plan = PartitionSearch(layers, bandwidth=bandwidth, memory_limit=limit).find(found)
    if plan is None:
        assert expected == math.inf
        return
    assert plan.seconds == pytest.approx(expected, rel=1e-9)
    bounds = [stage.first_layer for stage in plan.stages] + [len(layers)]
    assert (plan.seconds, plan.nbytes) == pytest.approx(price(layers, bounds, plan.costs, bandwidth), rel=1e-9)
    assert plan.nbytes <= limit
    assert tuple(stage.replicas for stage in plan.stages) == plan.costs.replicas


@pytest.mark.parametrize("name", CONTINUOUS)
def test_buffers_of_a_schedule_without_a_flush(name: str) -> None:
    """The numbers of versions and stashes are those of the periodic table, which the simulator unrolls."""
    for replicas in ((1, 1), (1, 1, 1, 1), (2, 1), (1, 2, 1), (4, 1, 1), (1, 3, 2)):
        for multiple in (1, 2):
            m = multiple * fewest_microbatches(name, replicas)
            if continuous_obstacle(name, replicas, num_microbatches=m, num_chunks=1):
                continue
            table, costs = periodic_table(name, replicas, m), continuous_costs(name, replicas, m, moments=2.0)
            assert costs.weight_copies == max(versions_kept(table)) + 1 + 2
            assert costs.stash_slots == peak_in_flight(unroll(table, 30)).max()


def test_the_time_without_a_flush_is_that_of_the_simulator() -> None:
    """By the simulator, 20 more batches take 20 times the predicted step: the pipeline never drains in between."""
    replicas, times = (2, 1, 1), [4.0, 1.5, 1.0]
    layers = [LayerProfile(f"l{n}", time, 2 * time, 0, 0, 0) for n, time in enumerate(times)]
    costs = continuous_costs("pipedream", replicas, 2, moments=0)
    plan = PartitionSearch(layers, bandwidth=1).price(costs, [0, 1, 2, 3])
    by_device = [4.0, 4.0, 1.5, 1.0]
    table = periodic_table("pipedream", replicas, 2)
    ends = [
        simulate_table(unroll(table, number), Times(by_device, by_device, by_device)).makespan for number in (20, 40)
    ]
    assert plan.seconds == pytest.approx((ends[1] - ends[0]) / 20)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("1f1b", 1), ("gpipe", 1), ("eager_1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zb_v", 2)],
)
def test_the_time_with_a_flush_is_the_lockstep_of_the_simulator(name: str, chunks: int) -> None:
    """Equal stages. By hand for 1f1b: 4 clocks with forwards alone, 18 with a backward."""
    table = make_table(name, num_devices=4, num_microbatches=8, num_chunks=chunks)
    stages = 4 * chunks
    layers = [LayerProfile(f"l{n}", 1.0, 2.0, 0, 3, 5) for n in range(stages)]
    plan = PartitionSearch(layers, bandwidth=1).price(flushing_costs(table, 2.0, moments=2), range(stages + 1))
    assert plan.seconds == pytest.approx(lockstep(table, Times(*[float(chunks)] * 3)))
    if name == "1f1b":
        assert plan.seconds == 4 * 1 + 18 * 2
        assert plan.nbytes == (1 + 1 + 2) * 5 + 4 * 3


def test_replicas_do_not_shorten_a_lockstep() -> None:
    """A stage with most of the work has replicas without a flush. With one, all stages wait for it in every clock."""
    seconds = [0.1, 0.1, 3.0, 0.1]
    layers = [LayerProfile(f"l{n}", time, 2 * time, 0, 0, 0) for n, time in enumerate(seconds)]
    search = PartitionSearch(layers, bandwidth=1e9)
    free = search.find(continuous_candidates("pipedream", 4, 12, 4, 12, lambda _: True, 0.0))
    flush = search.find(flushing_candidates("1f1b", 4, 12, 4, 2.0, 0.0))
    assert free is not None
    assert max(free.costs.replicas) > 1
    assert flush is not None
    assert flush.costs.replicas == (2, 2)


def test_few_lists_of_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = set(possible_replicas(8, 8, 8))
    assert everything == {one for one in compositions(8) if len(one) > 1 and all(8 % number == 0 for number in one)}
    monkeypatch.setattr(partitions, "MAX_CANDIDATES", 10)
    changes = {one: sum(a != b for a, b in itertools.pairwise(one)) for one in everything}
    few = list(possible_replicas(8, 8, 8))
    assert set(few) == {one for one, number in changes.items() if number <= 1}
    assert len(few) == len(set(few))


def test_large_tables_have_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "MAX_ACTIONS", 10)
    tried = [costs.replicas for costs in flushing_candidates("1f1b", 6, 12, 5, 2.0, 0.0)]
    assert tried == [(1, 1, 1, 1, 2), (2, 2, 2), (3, 3)]


@pytest.mark.slow
def test_a_thousand_layers_on_64_devices() -> None:
    rng = random.Random(0)
    layers = [layer._replace(can_cut=True) for layer in random_layers(rng, 1000)]
    search = PartitionSearch(layers, bandwidth=1e3)
    found = search.find(continuous_candidates("pipedream", 64, 64, 1000, 64, lambda _: True, 2.0))
    straight = search.find([continuous_costs("pipedream", (1,) * 64, 64, 2.0)])
    assert found is not None
    assert straight is not None
    assert found.seconds <= straight.seconds
    assert sum(stage.replicas for stage in found.stages) == 64
