"""Stage programs: gradients are compared with jax.grad, and FLOPs and saved values with closed forms.

Dims: B examples, T positions, D features, M features inside the MLP, V vocabulary.
"""

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.core.step import abstract
from jaxpar.models import Model, build
from jaxpar.models.model import Batch
from jaxpar.strategies.pipeline.executor.split_backward import Origin
from jaxpar.strategies.pipeline.executor.stage_programs import StageInputs, StageProgram, input_origins, trace_stage
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.tables.table import loop_stages
from jaxpar.tasks.language_models import CAUSAL_LM
from jaxpar.tasks.token_logits import whole
from tests.models.small import CPU, LENGTH, VOCAB, fast_jit, info_of, make_params, small_config
from tests.strategies.pipeline.cuts import flops_of, primitives, run_actions

B, T, D, M, V = 7, LENGTH, 16, 64, VOCAB  # 7 divides no weight size, so a multiple of 7 indicates activations
WEIGHT_FLOPS = 2 * B * T * (4 * D * D + 2 * D * M)  # products with weights in one block
ATTENTION_FLOPS = 4 * B * T * T * D  # attention scores, and the weighted sum of values
WEIGHT = jnp.float32(3.5)


class Stage(NamedTuple):
    """A stage of a small model, and all inputs of its phases."""

    stages: Stages
    device: int
    given: StageInputs

    def trace(self, num_phases: int, remat: str) -> StageProgram:
        given = abstract(self.given._replace(dy=None))
        return trace_stage(self.stages, self.device, given, num_phases=num_phases, remat=remat)

    @property
    def leaves(self) -> list[jax.Array]:
        return jax.tree.leaves(self.given)

    @property
    def origins(self) -> list[Origin]:
        return input_origins(self.given)


def make_rows(name: str, task: str) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    shape = (B,) if task == "classification" else (B, T)
    rows = {
        "index": np.arange(B, dtype=np.int32) + 20,
        "inputs": rng.integers(1, V, (B, T), np.int32),
        "labels": rng.integers(0, 5, shape, np.int32),
        "weights": rng.uniform(0, 2, shape).astype(np.float32),
    }
    return rows | ({"mask": np.arange(T) < rng.integers(1, T + 1, (B, 1))} if name == "bert" else {})


def make_stage(name: str, task: str, bounds: tuple[int, ...], device: int, **overrides: Any) -> Stage:
    """Return stage `device` of a small model with dropout. `bounds` are the cuts, up to the number of layers."""
    model = build(
        small_config(name, task, num_layers=bounds[-1] - 2, **{"dropout": 0.3, **overrides}), info_of(name, task), CPU
    )
    rows, rng = make_rows(name, task), np.random.default_rng(3)
    stages = Stages(model, bounds, loop_stages(len(bounds) - 1, 1), model.inputs(abstract(rows)), CAUSAL_LM)
    held = stages.select(make_params(model), device)
    dtype = jnp.dtype(overrides.get("dtype", "float32"))
    x, dy = (jnp.asarray(rng.normal(size=(B, T, D)), dtype) for _ in range(2))
    first, last = device == 0, device == len(bounds) - 2
    params = stages.part(held, device, 0)
    given = StageInputs(
        params, rows, jax.random.key(5), jnp.int32(0), WEIGHT, None if first else x, None if last else dy
    )
    return Stage(stages, device, given)


def expected(stage: Stage) -> list[Any]:
    """Compute the results of a stage with jax.grad, without cuts: outputs, dX if it has one, and dW.

    The outputs of the last stage are the sums of loss, correct predictions and weights.
    """
    model, given = stage.stages.model, stage.given
    start, stop = stage.stages.span(stage.device, 0)
    keys_B = jnp.stack([jax.random.fold_in(given.key, int(i)) for i in given.microbatch["index"]])

    def forward(params: Any, x: Any) -> jax.Array:
        x = given.microbatch["inputs"] if x is None else x
        return model.apply_layers(params, x, given.microbatch, keys_B, start, stop)

    def target(params: Any, x: Any) -> tuple[jax.Array, Any]:
        y = forward(params, x)
        if given.dy is not None:
            return jnp.vdot(y, given.dy), y
        loss, sums = by_hand(whole(y), given.microbatch)
        return loss / WEIGHT, sums

    number = (0,) if given.x is None else (0, 1)
    gradients, outputs = fast_jit(jax.grad(target, number, has_aux=True))(given.params, given.x)
    return [*jax.tree.leaves(outputs), *gradients[1:], *jax.tree.leaves(gradients[0])]


def by_hand(logits: jax.Array, rows: Batch) -> tuple[jax.Array, list[jax.Array]]:
    """Return the weighted loss, and the weighted sums of cross entropy, correct predictions and weights."""
    probability = jnp.sum(jax.nn.softmax(logits) * jax.nn.one_hot(rows["labels"], logits.shape[-1]), -1)
    loss = -jnp.sum(rows["weights"] * jnp.log(probability))
    correct = jnp.sum(rows["weights"] * (logits.argmax(-1) == rows["labels"]))
    return loss, [loss, correct, jnp.sum(rows["weights"])]


FIRST, MIDDLE, LAST = range(3)
BOUNDS = (0, 3, 5, 7)  # stages: embed and two blocks; two blocks; a block and head
GPT, BERT = ("gpt", "causal_lm"), ("bert", "classification")


@pytest.mark.parametrize(
    ("model", "bounds", "stage", "num_phases", "remat", "num_dx"),
    [
        (GPT, (0, 2, 3), 0, 3, "none", 1),  # dX of the second layer, which is discarded
        (GPT, (0, 3), 0, 2, "none", 0),  # one stage
        (BERT, (0, 2, 3), 0, 2, "full", 0),
        (BERT, (0, 1, 3), 0, 3, "full", 0),  # a stage of embed alone
        (GPT, (0, 1, 2, 3), 1, 3, "dots", 1),
        (BERT, (0, 1, 2, 3), 1, 3, "none", 1),
        (GPT, (0, 1, 3), 1, 3, "full", 1),
        (BERT, (0, 1, 3), 1, 2, "dots", 1),
    ],
)
def test_actions_of_a_stage_give_its_gradients(
    model: tuple[str, str], bounds: tuple[int, ...], stage: int, num_phases: int, remat: str, num_dx: int
) -> None:
    this = make_stage(*model, bounds, stage)
    actions = fast_jit(partial(run_actions, this.trace(num_phases, remat).cut, this.origins))(this.leaves)
    is_last, results = stage == len(bounds) - 2, expected(this)
    num_outputs, num_weights = 3 if is_last else 1, len(jax.tree.leaves(this.given.params))
    sizes = [num_outputs, num_dx, num_weights]
    if is_last and remat == "full":  # B also computes what F does
        sizes = [0, num_outputs + num_dx, num_weights]
    sizes = sizes if num_phases == 3 else [sizes[0], sum(sizes[1:])]
    assert [len(outputs) for outputs in actions] == sizes
    if num_dx and stage == 0:
        assert actions[1].pop().shape == (B, T, D)
        num_dx = 0
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(this.given.params)]
    names = [*["output"] * num_outputs, *["dX"] * num_dx, *paths]
    for name, got, wanted in zip(names, [value for outputs in actions for value in outputs], results, strict=True):
        assert got.shape == wanted.shape
        if "['key']['bias']" in name:  # softmax cancels this bias, so its gradient is rounding error
            assert jnp.abs(got).max() < 1e-5
        else:
            assert jnp.linalg.norm(got - wanted) <= 3e-6 * jnp.linalg.norm(wanted), name


@pytest.mark.parametrize(
    ("remat", "again", "again_in_w"),
    [
        ("none", 0, 0),
        # The forward pass again, except the last product of the last block, which no gradient depends on.
        ("full", 2 * (WEIGHT_FLOPS + ATTENTION_FLOPS) - 2 * B * T * M * D, 0),
        # Products with batch dims. Only W needs the weighted sum of values, as the output of the next product is saved.
        ("dots", 2 * ATTENTION_FLOPS, ATTENTION_FLOPS),
    ],
)
def test_flops_of_actions(remat: str, again: int, again_in_w: int) -> None:
    """For every product with weights in F, B has one for dX and W has one for dW. For other products, B has two."""
    stage = make_stage(*GPT, BOUNDS, MIDDLE)
    weights, attention = 2 * WEIGHT_FLOPS, 2 * ATTENTION_FLOPS
    forward, dx, dw = flops_of(stage.trace(3, remat).cut, stage.origins, stage.leaves)
    assert (forward, dx + dw) == (weights + attention, 2 * (weights + attention) + again)
    assert dw == weights + again_in_w
    fused = flops_of(stage.trace(2, "none").cut, stage.origins, stage.leaves)
    assert fused == [weights + attention, 2 * (weights + attention)]


@pytest.mark.parametrize("num_phases", [2, 3])
def test_the_last_stage_computes_nothing_twice(num_phases: int) -> None:
    """With full remat, F of the last stage only keeps its input, and B computes the rest."""
    stage = make_stage(*GPT, BOUNDS, LAST)
    forward, *backward = flops_of(stage.trace(num_phases, "none").cut, stage.origins, stage.leaves)
    program = stage.trace(num_phases, "full")
    nothing, *all_of_it = flops_of(program.cut, stage.origins, stage.leaves)
    assert (nothing, sum(all_of_it)) == (0, forward + sum(backward))
    assert [x.shape for key, values in program.cut.saved.items() if key[0] == 0 for x in values] == [(B, T, D)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_flops_of_the_first_stage(dropout: float) -> None:
    """No stage needs dX of the first stage. Its B computes dX of the blocks, and its W their dW.

    Without dropout, all values depend on weights and batch alone, but nothing must be computed twice.
    """
    stage = make_stage(*GPT, BOUNDS, FIRST, dropout=dropout)
    weights, attention = 2 * WEIGHT_FLOPS, 2 * ATTENTION_FLOPS
    assert flops_of(stage.trace(3, "none").cut, stage.origins, stage.leaves) == [
        weights + attention,
        weights + 2 * attention,
        weights,
    ]


def test_w_is_nothing_but_dw() -> None:
    """W has six products per block and sums over examples, and must not recompute any activation function."""
    stage = make_stage(*GPT, BOUNDS, MIDDLE)
    names = primitives(stage.trace(3, "none").cut, stage.origins, stage.leaves, 2)
    assert names["dot_general"] == 2 * 6
    assert set(names) <= {"dot_general", "transpose", "optimization_barrier", "reshape", "reduce_sum", "mul", "add"}


@pytest.mark.parametrize("model", [GPT, BERT])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved(model: tuple[str, str], dtype: str) -> None:
    """No weight, cast weight, transpose or attention mask is saved. The four dropout masks are drawn once and saved."""
    stage = make_stage(*model, BOUNDS, MIDDLE, dtype=dtype)
    for num_phases in (2, 3):
        pieces = stage.trace(num_phases, "none").cut
        saved = [value for values in pieces.saved.values() for value in values]
        assert all(value.size % B == 0 for value in saved)
        forward = [value for key, values in pieces.saved.items() if key[0] == 0 for value in values]
        assert {str(value.dtype) for value in forward if value.size >= B * T * D} == {dtype, "bool"}
        assert Counter((v.shape) for v in saved if v.dtype == bool) == {(B, T, D): 4}
        drawn = [primitives(pieces, stage.origins, stage.leaves, a)["random_bits"] for a in range(num_phases)]
        assert drawn == [4, 0, 0][:num_phases]


def test_what_is_saved_with_full_remat() -> None:
    """Only the input of the stage is saved for B. Dropout masks are drawn again."""
    stage = make_stage(*GPT, BOUNDS, MIDDLE)
    for num_phases in (2, 3):
        pieces = stage.trace(num_phases, "full").cut
        saved = [value.shape for key, values in pieces.saved.items() if key[0] == 0 for value in values]
        assert saved == [(B, T, D)]
        drawn = [primitives(pieces, stage.origins, stage.leaves, a)["random_bits"] for a in range(num_phases)]
        assert drawn == [4, 4, 0][:num_phases]


def test_a_program_stands_for_other_layers() -> None:
    """Device 4 runs the program of device 1. The shift gives its block the right dropout masks."""
    bounds = (0, 1, 2, 3, 6, 7)
    one = make_stage(*GPT, bounds, 1)
    model: Model = one.stages.model
    stages = Stages(
        model, (0, 1, 2, 3, 4, 5, 7), loop_stages(6, 1), model.inputs(abstract(one.given.microbatch)), CAUSAL_LM
    )
    assert (stages.kinds[4], stages.examples[1]) == (1, 1)
    params = make_params(model)
    names = stages.local_names(4)
    given = one.given._replace(
        params={name: params[own] for name, own in names.items()}, shift=jnp.int32(stages.shifts[4, 0])
    )
    program = trace_stage(stages, 1, abstract(given._replace(dy=None)), num_phases=2, remat="none")
    (y_BTD,), _ = fast_jit(partial(run_actions, program.cut, one.origins))(jax.tree.leaves(given))
    keys_B = jnp.stack([jax.random.fold_in(given.key, int(i)) for i in given.microbatch["index"]])
    wanted = fast_jit(partial(model.apply_layers, start=4, stop=5))(params, given.x, given.microbatch, keys_B)
    np.testing.assert_allclose(y_BTD, wanted, rtol=1e-5, atol=1e-6)


def test_a_stage_is_traced_once() -> None:
    """A stage is traced again only for different inputs, phases or remat, or for another model."""
    stage = make_stage("gpt", "causal_lm", (0, 2, 4, 6), 1)
    cut = stage.trace(2, "none").cut
    assert stage.trace(2, "none").cut is cut
    rows = {name: x if x.ndim == 1 else x[:, 1:] for name, x in stage.given.microbatch.items()}
    x = jax.tree.map(lambda x: x[:, 1:], stage.given.x)
    shorter = stage._replace(given=stage.given._replace(microbatch=rows, x=x))
    others = [stage.trace(3, "none"), stage.trace(2, "full"), shorter.trace(2, "none")]
    assert all(other.cut is not cut for other in others)
    again = make_stage("gpt", "causal_lm", (0, 2, 4, 6), 1)  # a stage of another model
    assert again.trace(2, "none").cut is not cut
