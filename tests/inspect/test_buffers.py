"""The largest temporary arrays of programs of known size. tests/cluster/test_target.py compiles for GPUs."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.inspect import audit_report
from jaxpar.inspect.programs import Buffers, buffers_at_peak
from jaxpar.strategies.strategy import CompiledProgram
from tests.strategies.pipelines import BATCH, LENGTH, TRANSFORMER, Task, make

pytestmark = pytest.mark.usefixtures("lines_in_programs")
FILE = "tests/inspect/test_buffers.py"
B, T, D, V = 8, 32, 16, 2000
FLOAT32 = 4
# Of the activations within the MLP of a block, for a batch.
MLP_BYTES = BATCH * LENGTH * TRANSFORMER["mlp_size"] * FLOAT32


def loss(params: dict[str, jax.Array], inputs_BT: jax.Array) -> jax.Array:
    """Return the loss of a language model of two layers, with all logits in float32 at once."""
    with jax.named_scope("embed"):
        x_BTD = params["embed"][inputs_BT]
    with jax.named_scope("head"):
        logits_BTV = x_BTD @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), inputs_BT[:, :, None], 2))


def test_whole_logits_are_largest() -> None:
    """The logits, their exponentials and their gradients, all [B, T, V], need nearly everything."""
    params = {"embed": jax.ShapeDtypeStruct((V, D), jnp.float32), "head": jax.ShapeDtypeStruct((D, V), jnp.float32)}
    compiled = jax.jit(jax.grad(loss)).lower(params, jax.ShapeDtypeStruct((B, T), jnp.int32)).compile()
    small = jax.jit(jnp.sin).lower(1.0).compile()
    groups = buffers_at_peak([CompiledProgram(small), CompiledProgram(compiled)], ["embed", "head"])
    largest = [group for group in groups if group.nbytes == group.number * B * T * V * FLOAT32]
    assert largest == groups[: len(largest)]
    assert sum(group.nbytes for group in largest) > 0.95 * sum(group.nbytes for group in groups)
    lines, start = inspect.getsourcelines(loss)
    of_logits = [start + number for number, line in enumerate(lines) if "logits_BTV" in line]
    assert {group.source for group in largest} <= {f"{FILE}:{number} in loss" for number in of_logits}
    assert {group.dtype for group in largest} == {"float32"}
    of_gradient = [group for group in groups if group.shape == (B * T, D)]
    assert {group.layers for group in of_gradient} <= {("embed",), ("head",)}


def of_bert(layers: int, *overrides: str) -> list[Buffers]:
    strategy = make(Task("bert", "classification", "sgd", layers=layers), "--config.model.dropout=0", *overrides)
    names = ["embed", *(f"block_{index}" for index in range(layers)), "head"]
    return buffers_at_peak(strategy.compile(), names)


def test_saved_activations_of_each_block() -> None:
    """Without rematerialization, equal arrays of the two blocks form a group; neither is in the scope of the other."""
    groups = [group for group in of_bert(2) if group.nbytes == group.number * MLP_BYTES and group.number > 1]
    assert ("block_0", "block_1") in {group.layers for group in groups}


@pytest.mark.parametrize(("remat", "is_saved"), [("none", True), ("full", False)])
def test_saved_activations_of_a_scan(remat: str, is_saved: bool) -> None:
    """The scan stacks the activations of its 3 blocks, unless they are computed again in the backward pass."""
    groups = of_bert(3, f"--config.model.remat={remat}")
    stacked = [group for group in groups if group.nbytes == group.number * 3 * MLP_BYTES]
    assert bool(stacked) == is_saved
    assert all(group.layers == ("block_0-block_2",) for group in stacked)


def test_lines() -> None:
    rows: list[dict[str, Any]] = [
        Buffers(4096, 2, "float32", (4, 128), ("block_0", "block_11"), "a.py:1 in f")._asdict(),
        Buffers(2048, 1, "bool", (2048,), ("block_0-block_11",), "a.py:2 in f")._asdict(),
        *[Buffers(1, 1, "bool", (), (), "pad added by XLA")._asdict()] * 5,
    ]
    assert audit_report.format_buffers(rows) == [
        "largest temporary arrays at the peak                     bytes  layer and line",
        "2 x float32[4,128]                                       4,096  block_*  a.py:1 in f",
        "bool[2048]                                               2,048  block_0-block_11  a.py:2 in f",
        *["bool[]                                                       1  pad added by XLA"] * 3,
        "2 others                                                     2",
    ]
