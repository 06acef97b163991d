"""Layers whose activations are a pytree: a pipeline sends and stashes all of its arrays.

tests/strategies/test_cases.py trains a model like this.
"""

from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.errors import UserError
from jaxpar.strategies.pipeline.details import PipelineDetails
from jaxpar.strategies.pipeline.executor.partition import stage_bounds
from tests.models.two_streams import FEATURES, SUMMARY, Streams
from tests.strategies.pipelines import (
    BATCH,
    LENGTH,
    NUM_MICROBATCHES,
    TWO_STREAMS,
    Task,
    make,
    make_config,
    make_problem,
    outcome,
    pipeline,
    relative_error,
)

TASK = Task(TWO_STREAMS, "classification", "sgd", layers=4)
MICROBATCH = BATCH // NUM_MICROBATCHES


def test_streams_of_two_dtypes() -> None:
    """In bfloat16, the pipeline rounds like one device: they differ less than one device differs from float32."""
    task = TASK._replace(dtype="bfloat16")
    got, single, exact = outcome(task, *pipeline("zb_h1", 2)), outcome(task), outcome(TASK)
    flat = [np.concatenate([leaf.ravel() for leaf in of.gradients.values()]) for of in (got, single, exact)]
    assert 1e-4 < relative_error(flat[1], flat[2]) < 0.1
    assert relative_error(flat[0], flat[1]) < 0.1 * relative_error(flat[1], flat[2])
    np.testing.assert_allclose(got.losses, single.losses, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_the_plan_counts_both_streams(dtype: str, width: int) -> None:
    """Every array is sent over every route in every clock. Stashes hold at least the input of F, in both streams."""
    strategy = make(TASK._replace(dtype=dtype), *pipeline("1f1b", 2, remat="full"))
    details = strategy.plan.details
    assert isinstance(details, PipelineDetails)
    clocks = details.table.num_clocks
    tokens, summary = MICROBATCH * LENGTH * FEATURES * 4, MICROBATCH * SUMMARY * width
    sent = [(one.dtype, one.nbytes) for one in strategy.plan.traffic if one.kind == "collective-permute"]
    assert sorted(sent) == sorted([("float32", clocks * tokens), (dtype, clocks * summary)])
    (memory, *_) = strategy.plan.memory
    in_flight, slots = 2, 1  # microbatches between F and B on device 0; slots of each inbox and of each send buffer
    assert memory["transfers"] == 2 * (slots + 1) * (tokens + summary)
    assert memory["stashes"] == in_flight * (tokens + summary)


def test_an_integer_stream_cannot_be_cut() -> None:
    problem = make_problem(make_config(TASK), TASK)
    count: Any = {"count": jax.ShapeDtypeStruct((BATCH,), np.int32)}
    inputs = [x._replace(summary=count) if isinstance(x, Streams) else x for x in problem.model.inputs(problem.batch)]
    with pytest.raises(UserError, match=r"cuts before mix_1; .* the input of mix_1 is int32, which has no gradient"):
        stage_bounds(problem.model, problem.batch, inputs, "mix_1", 2)
