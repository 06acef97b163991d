"""Every implementation of `data_parallel` computes the gradient of one device, and sums over replicas in float32."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import cluster, strategies
from jaxpar.strategies.data_parallel import IMPLEMENTATIONS
from tests.strategies.pipelines import (
    GRADIENTS,
    RESNET_BLOCKS,
    Task,
    make,
    make_batch,
    make_config,
    make_problem,
    named,
    plan_of,
    relative_error,
    start,
)

RESNET = Task("resnet", "classification", "sgd", layers=2)  # the first trace of SGD is the gradient
UNCLIPPED = "--config.optimizer.clip_norm=0"
DTYPES = ("float32", "bfloat16")
CASES = [(way, dtype) for dtype in DTYPES for way in IMPLEMENTATIONS if (way, dtype) != ("sharding", "bfloat16")]


@functools.cache
def gradient(dtype: str, *keys: str) -> dict[str, np.ndarray]:
    """Return the gradient of the first step of a ResNet, by default on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RESNET_BLOCKS, RESNET.layers, (1, 1))  # one block of each stride
        patch.setattr(jax.nn, "relu", jax.nn.gelu)  # as in `advance`
        task = RESNET._replace(dtype=dtype)
        strategy = make(task, UNCLIPPED, *(f"--config.{key}" for key in keys))
        state = strategy.from_canonical(start(task, UNCLIPPED))
        state, _ = strategy.step(state, strategy.place(make_batch(RESNET, 0)))
    optimizer = named(strategy.to_canonical(state)["optimizer"])
    return {name: leaf for name, leaf in optimizer.items() if GRADIENTS["sgd"] in name}


@pytest.mark.parametrize(("implementation", "dtype"), CASES)
def test_gradient_of_a_resnet(implementation: str, dtype: str) -> None:
    """The gradient equals that of one device, in bfloat16 too: each example is rounded in the same way.

    If XLA chose the dtype of the sums, it would round those of a bfloat16 model to 8 bits.
    """
    keys = ("strategy=data_parallel", "mesh.data=2", f"data_parallel.implementation={implementation}")
    got, expected = gradient(dtype, *keys), gradient(dtype)
    assert got.keys() == expected.keys()
    for name, leaf in got.items():
        assert relative_error(leaf, expected[name]) < 1e-5, name
        assert leaf.dtype == np.float32
        rounded = leaf == leaf.astype(jnp.bfloat16).astype(np.float32)
        assert rounded.mean() < 0.5, f"{name} was rounded to 8 bits"


@pytest.mark.parametrize("exchange", ["ddp", "zero1"])
def test_moments_are_updated_in_place(exchange: str) -> None:
    """The update of a step copies no moments, so that they are not in memory twice."""
    mlp = Task("mlp", "classification", "adamw", layers=2)
    (program,) = make(mlp, "--config.strategy=data_parallel", f"--config.exchange={exchange}").compile()
    text = program.compiled.as_text()
    assert text is not None
    assert not re.findall(r" = f32\[\d+,\d+\]\S* copy\(", text.partition("ENTRY")[2])


MLP, GPT = Task("mlp", "classification", "adamw", layers=2), Task("gpt", "causal_lm", layers=2)


@pytest.mark.parametrize(
    ("task", "overrides", "by_xla"),
    [
        (MLP, ("mesh.data=2",), True),
        (MLP._replace(dtype="bfloat16"), ("mesh.data=2",), False),
        (MLP, ("mesh.data=2", "optimizer.accumulation_steps=2"), False),
        (GPT, ("mesh.data=2",), False),  # with a tied head
        (GPT, ("mesh.data=1", "optimizer.accumulation_steps=2"), True),
    ],
)
def test_auto_sums_each_gradient_once_and_in_float32(task: Task, overrides: tuple[str, ...], by_xla: bool) -> None:
    plan = plan_of(task, "--config.strategy=data_parallel", *(f"--config.{one}" for one in overrides))
    assert (plan.details == "sharding") == by_xla


@pytest.mark.parametrize(
    ("gpus", "override", "apart"),
    [
        ("H100", "exchange=ddp", True),
        ("H100", "exchange=zero1", True),
        ("H100", "exchange=zero3", False),  # it scatters the gradients of every microbatch
        ("H100", "exchange=onebit_adam", False),  # it is in a conditional
        ("H100", "mesh.data=1", False),  # there is none
        ("H100", "model.scan_layers=True", False),  # the gradients of all layers exist after the scan
        ("cpu", "exchange=ddp", False),  # nothing overlaps
    ],
)
def test_the_last_backward_pass_overlaps_with_the_exchange(gpus: str, override: str, apart: bool) -> None:
    shard_map = "--config.data_parallel.implementation=shard_map"
    config = make_config(
        GPT, "--config.strategy=data_parallel", "--config.mesh.data=2", f"--config.{override}", shard_map
    )
    plan = strategies.plan(config, make_problem(config, GPT), cluster.named_cluster(gpus, 2))
    details: Any = plan.details
    assert details.last_apart == apart
