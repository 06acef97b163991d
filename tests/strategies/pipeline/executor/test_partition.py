"""Partitions are compared with all possible partitions, and layer costs with closed forms."""

import itertools

import numpy as np
import pytest

from jaxpar.core.step import abstract
from jaxpar.errors import UserError
from jaxpar.models.model import Model
from jaxpar.strategies.pipeline.executor.partition import balanced, layer_flops, parameters, stage_bounds, uniform
from tests.models.small import BATCH, LENGTH, VOCAB, small

B, T, D, M, V = BATCH, LENGTH, 16, 64, VOCAB  # M: features inside the MLP
MODEL, _, BATCH_OF = small("gpt", "causal_lm", num_layers=4)
ROWS = abstract(BATCH_OF)


def bounds_of(model: Model, method: str, num_stages: int) -> tuple[int, ...]:
    return stage_bounds(model, ROWS, model.inputs(ROWS), method, num_stages)


def test_balanced_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        costs = rng.integers(0, rng.choice([2, 10, 10**9]), rng.integers(1, 9)).tolist()
        for num_stages in range(1, len(costs) + 1):
            last = (rng.integers(0, 5, len(costs))).tolist() if num_stages % 2 == 0 else costs
            got = balanced(costs, num_stages, last)
            assert (got[0], got[-1], len(got)) == (0, len(costs), num_stages + 1)
            assert score(costs, last, got[1:-1]) == min(
                score(costs, last, cuts) for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
            )


def score(costs: list[int], last: list[int], cuts: tuple[int, ...]) -> tuple[int, int]:
    """Return the cost of the most expensive stage and the sum of squared costs; every stage must have a layer."""
    ends = [0, *cuts, len(costs)]
    assert ends == sorted(set(ends))
    stages = [sum(costs[start:stop]) for start, stop in itertools.pairwise(ends)]
    stages[-1] = sum(last[ends[-2] :])
    return max(stages), sum(cost * cost for cost in stages)


def test_costs() -> None:
    assert uniform(MODEL) == [1] * 6
    block = 4 * (D * D + D) + 2 * D * M + M + D + 4 * D  # attention, MLP, two norms
    assert parameters(MODEL) == [V * D + T * D, *[block] * 4, 2 * D + V * D]  # the tied array counts twice
    flops = 2 * B * T * (4 * D * D + 2 * D * M) + 4 * B * T * T * D
    assert layer_flops(MODEL, ROWS, MODEL.inputs(ROWS)) == [0, *[flops] * 4, 2 * B * T * D * V]


@pytest.mark.parametrize(
    ("method", "num_stages", "expected"),
    [
        ("uniform", 3, (0, 2, 4, 6)),
        ("flops", 2, (0, 3, 6)),  # embed costs nothing, the head a third of a block
        ("flops", 1, (0, 6)),
        ("flops", 6, (0, 1, 2, 3, 4, 5, 6)),
        ("parameters", 5, (0, 1, 2, 3, 4, 6)),  # the head is smaller than the embedding, which includes positions
        ("block_0, block_1,head", 4, (0, 1, 2, 5, 6)),
        ("block_3", 2, (0, 4, 6)),
    ],
)
def test_bounds(method: str, num_stages: int, expected: tuple[int, ...]) -> None:
    assert bounds_of(MODEL, method, num_stages) == expected


DEEP, _, _ = small("gpt", "causal_lm", num_layers=12)
IN_ORDER = "in model order and after embed"


@pytest.mark.parametrize(
    ("model", "method", "num_stages", "rule"),
    [
        (MODEL, "flop", 2, "'flop' is not a layer. Did you mean 'flops'?"),
        (MODEL, "block_1,blok_2", 3, "'blok_2' is not a layer. Did you mean 'block_2'?"),
        (MODEL, "block_1,", 3, "'' is not a layer"),
        (MODEL, "block_1", 3, f"the first layer of each stage but the first (2 layers), {IN_ORDER}"),
        (MODEL, "block_1", 1, f"the first layer of each stage but the first (0 layers), {IN_ORDER}"),
        (MODEL, "block_1,block_2,head", 3, IN_ORDER),
        (MODEL, "block_2,block_1", 3, IN_ORDER),
        (MODEL, "block_2,block_2", 3, IN_ORDER),
        (MODEL, "embed,block_1", 3, IN_ORDER),
        (DEEP, "block_10,block_9", 3, IN_ORDER),
    ],
)
def test_what_is_no_partition(model: Model, method: str, num_stages: int, rule: str) -> None:
    with pytest.raises(UserError) as error:
        bounds_of(model, method, num_stages)
    text = str(error.value)
    assert text.startswith(
        f"config.pipeline.partition is {method!r}; it must be one of uniform, parameters, flops, narrow, auto, or "
    )
    assert text.endswith(rule)
    assert "\n" not in text


def test_narrow_cuts() -> None:
    """Cuts are at bottlenecks; of more than are needed, those that balance the FLOPs are chosen."""
    model, _, _ = small("gpt", "causal_lm", num_layers=8, bottlenecks="block_1,block_4,block_7")
    names = [layer.name for layer in model.layers]
    cuts = [names.index(f"expand_{number}") for number in (1, 4, 7)]
    assert bounds_of(model, "narrow", 2) == (0, cuts[1], 16)
    assert bounds_of(model, "narrow", 4) == (0, *cuts, 16)
    with pytest.raises(UserError) as error:
        bounds_of(model, "narrow", 5)
    assert str(error.value) == (
        "config.pipeline.partition is 'narrow'; it must be another method for 5 stages, because the input is smallest "
        "only at expand_1, expand_4, expand_7"
    )


@pytest.mark.parametrize("method", ["flops", "block_0"])
def test_more_stages_than_layers(method: str) -> None:
    with pytest.raises(UserError) as error:
        bounds_of(MODEL, method, 7)
    expected = (
        "config.mesh.stage x config.pipeline.num_chunks is 7 stages; it must be at most 6, the number of layers of the "
        "model (embed .. head)"
    )
    assert str(error.value) == expected


def test_cuts_are_in_the_order_of_the_model_not_of_names() -> None:
    assert bounds_of(DEEP, "block_9,block_10", 3) == (0, 10, 11, 14)
