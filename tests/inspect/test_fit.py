"""The search for the largest size that fits. tests/cluster/test_target.py compiles for GPUs."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar import cluster, strategies
from jaxpar.choose.stages import until_chosen
from jaxpar.cluster.target import Target
from jaxpar.config import default_config, override
from jaxpar.errors import UserError
from jaxpar.inspect import fit
from jaxpar.inspect.fit import Tried

LIMIT = 1000.0


def searched(sizes: list[int], needed: Callable[[int], float]) -> tuple[int | None, int | None, list[int]]:
    """Return the largest size that fits, the next one, and the sizes that were tried."""
    tried: list[int] = []

    def attempt(size: int) -> Tried:
        tried.append(size)
        return Tried(size, needed(size))

    largest, following = fit.largest_fitting(sizes, attempt, LIMIT)
    return largest and largest.size, following and following.size, tried


@pytest.mark.parametrize(
    ("needed", "largest", "attempts"),
    [
        (lambda size: 100 + 2.5 * size, 360, 5),
        (lambda _: 100.0, 4000, 6),
        (lambda _: 2000.0, None, 1),
        (lambda _: math.inf, None, 1),
        (lambda size: 10.0 * size if size <= 64 else math.inf, 64, 14),
        (lambda size: 100 + 2.5 * size - 0.5 * max(0, size - 200), 400, 8),
        (lambda size: 2.0 * 1.01**size, 624, 16),
        (lambda size: max(100.0, size), 1000, 7),
    ],
)
def test_largest_size(needed: Callable[[int], float], largest: int | None, attempts: int) -> None:
    sizes = list(range(8, 4001, 8))
    found, following, tried = searched(sizes, needed)
    assert found == largest
    assert following == (8 if largest is None else None if largest == 4000 else largest + 8)
    assert len(tried) <= attempts
    assert len(set(tried)) == len(tried)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60, unique=True), st.data())
def test_any_growing_need(sizes: list[int], data: st.DataObject) -> None:
    sizes = sorted(sizes)
    amounts = st.lists(st.floats(0, 3000) | st.just(math.inf), min_size=len(sizes), max_size=len(sizes))
    of_size = dict(zip(sizes, sorted(data.draw(amounts)), strict=True))
    found, following, tried = searched(sizes, of_size.__getitem__)
    fitting = [size for size in sizes if of_size[size] <= LIMIT]
    assert found == max(fitting, default=None)
    assert following == min(set(sizes) - set(fitting), default=None)
    assert len(set(tried)) == len(tried)


H100 = Target(cluster.named_cluster("h100", 8), [], 80e9, 60e9)


@pytest.mark.parametrize(
    ("overrides", "key", "sizes"),
    [
        ((), "optimizer.accumulation_steps", {1: 24, 2: 12, 3: 8, 4: 6, 6: 4, 8: 3, 12: 2, 24: 1}),
        (("strategy=pipeline", "mesh.data=2", "mesh.stage=4"), "pipeline.num_microbatches", None),
        (  # its number of microbatches must be a multiple of the stages
            ("strategy=pipeline", "mesh.data=2", "mesh.stage=4", "pipeline.schedule=interleaved_1f1b"),
            "pipeline.num_microbatches",
            {1: 96, 2: 48, 3: 32, 4: 24, 6: 16, 8: 12, 12: 8, 24: 4},
        ),
    ],
)
def test_sizes(overrides: tuple[str, ...], key: str, sizes: dict[int, int] | None) -> None:
    config = default_config()
    override(config, ["--config.batch_size=192", *(f"--config.{one}" for one in overrides)])
    decision = strategies.decide(until_chosen(config, H100.cluster), H100.cluster)
    found = fit.microbatch_sizes(config, decision, H100)
    assert found.key == key
    if sizes is None:  # the divisors of 96 with as many microbatches as 1f1b accepts
        sizes = {size: 96 // size for size in range(1, 97) if 96 % size == 0}
    assert found.values == sizes
    batches = fit.batch_sizes(decision, 1000)
    divisor = decision.batch_divisor
    assert batches.values == {size: size for size in range(divisor, 1001, divisor)}
    assert fit.batch_sizes(decision, 1).values == {divisor: divisor}


def test_strategies_of_several_programs_are_refused() -> None:
    config = default_config()
    override(config, ["--config.strategy=swarm"])
    with pytest.raises(
        UserError, match=r"config\.strategy is .swarm.; it must be one of single, data_parallel, pipeline"
    ):
        fit.check_strategy(config)
