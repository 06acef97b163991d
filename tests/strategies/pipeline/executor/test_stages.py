"""Checks by hand which device holds which layers. With more than ten blocks, names do not sort in layer order."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.core.step import abstract
from jaxpar.models import Context, Model
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.tables.table import loop_stages, v_stages
from jaxpar.tasks.language_models import CAUSAL_LM
from tests.models.small import fast_jit, small

GPT, PARAMS, BATCH = small("gpt", "causal_lm", num_layers=12)  # embed, block_0 .. block_11, head: 14 layers
ROWS = abstract(BATCH)
TWO_EACH = tuple(range(0, 15, 2))
TIE = ("head", "tokens", "embed", "tokens")


def pipeline(bounds: tuple[int, ...], placement: np.ndarray) -> Stages:
    return Stages(GPT, bounds, placement, GPT.inputs(ROWS), CAUSAL_LM)


SEVEN = pipeline(TWO_EACH, loop_stages(7, 1))
CHUNKS = pipeline(tuple(range(15)), loop_stages(7, 2))
V = pipeline(tuple(range(15)), v_stages(7))


def test_one_chunk_a_device() -> None:
    """The stages are embed and a block, then five times two blocks, then a block and head."""
    assert SEVEN.num_stages == 7
    assert (SEVEN.kinds, SEVEN.examples) == ([0, 1, 1, 1, 1, 1, 2], [0, 1, 6])
    assert SEVEN.shifts.tolist() == [[0], [0], [2], [4], [6], [8], [0]]
    assert [SEVEN.span(device, 0) for device in (0, 5, 6)] == [(0, 2), (10, 12), (12, 14)]
    # Sorted by name, block_10 would come before block_9.
    assert SEVEN.local_names(5) == {"block_1": "block_9", "block_2": "block_10"}
    assert SEVEN.local_names(0) == {"embed": "embed", "block_0": "block_0"}
    assert SEVEN.local_names(6) == {"block_11": "block_11", "head": "head", "embed": "embed"}


def test_copies_of_tied_arrays() -> None:
    """The device of the head has a copy of the token embedding, and of no other array of embed."""
    assert [[tuple(tie) for tie in SEVEN.copies(device)] for device in range(7)] == [[]] * 6 + [[TIE]]
    held = SEVEN.select(PARAMS, 6)
    assert {name: set(layer) for name, layer in held.items()} == {
        "block_11": {"attention", "attention_norm", "mlp", "mlp_norm"},
        "head": {"norm"},
        "embed": {"tokens"},
    }
    assert held["embed"]["tokens"] is PARAMS["embed"]["tokens"]
    assert set(PARAMS["embed"]) == {"tokens", "positions"}  # unchanged
    assert SEVEN.select(PARAMS, 3) == {name: PARAMS[name] for name in ("block_5", "block_6")}


def test_two_chunks_in_a_loop() -> None:
    """The second stage of device d is 7 + d, so the blocks of a device are not consecutive."""
    assert (CHUNKS.kinds, CHUNKS.examples) == ([0, 1, 1, 1, 1, 1, 2], [0, 1, 6])
    assert CHUNKS.shifts.tolist() == [[0, 0], [0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [0, 0]]
    assert CHUNKS.local_names(4) == {"block_0": "block_3", "block_7": "block_10"}
    assert [len(CHUNKS.copies(device)) for device in range(7)] == [0] * 6 + [1]
    held = CHUNKS.select(PARAMS, 6)
    assert set(held) == {"block_5", "head", "embed"}
    assert set(CHUNKS.part(held, 6, 0)) == {"block_5"}
    assert {name: set(layer) for name, layer in CHUNKS.part(held, 6, 1).items()} == {
        "head": {"norm"},
        "embed": {"tokens"},
    }


def test_two_chunks_in_a_v_share_the_embedding() -> None:
    """Embed and head are on device 0, which needs no copy. The second chunks run in the opposite direction."""
    assert (V.kinds, V.examples) == ([0, 1, 1, 1, 1, 1, 1], [0, 1])
    assert V.shifts.tolist() == [[0, 0], [0, 0], [1, -1], [2, -2], [3, -3], [4, -4], [5, -5]]
    assert V.local_names(6) == {"block_0": "block_5", "block_11": "block_6"}
    assert not any(V.copies(device) for device in range(7))
    held = V.select(PARAMS, 0)
    assert {name: set(layer) for name, layer in held.items()} == {"embed": {"tokens", "positions"}, "head": {"norm"}}
    # The chunk of the head receives the embedding as a tied array.
    assert set(V.part(held, 0, 0)) == {"embed"}
    tokens = V.part(held, 0, 1)["embed"]
    assert set(tokens) == {"tokens"}
    assert tokens["tokens"] is PARAMS["embed"]["tokens"]
    assert set(held["embed"]) == {"tokens", "positions"}  # unchanged


def test_every_layer_is_on_one_device() -> None:
    for stages in (SEVEN, CHUNKS, V, pipeline((0, 3, 4, 9, 14), loop_stages(4, 1))):
        devices = range(len(stages.placement))
        copied = {(d, tie.source) for d in devices for tie in stages.copies(d)}
        names = [name for d in devices for name in stages.select(PARAMS, d) if (d, name) not in copied]
        assert sorted(names) == sorted(PARAMS)
        for device in devices:
            # Under the layer names of the example, the parameters have the same shapes as those of the example.
            own, example = (stages.select(PARAMS, d) for d in (device, stages.examples[stages.kinds[device]]))
            shapes = {name: jax.tree.map(jnp.shape, own[mine]) for name, mine in stages.local_names(device).items()}
            assert shapes == jax.tree.map(jnp.shape, example)


@pytest.mark.parametrize("stages", [SEVEN, V], ids=["loop", "v"])
def test_fresh_parameters_are_those_of_the_whole_model(stages: Stages) -> None:
    """Each device initializes its layers with the program of its kind, bitwise as the whole model does."""
    key, init = jax.random.key(11), [fast_jit(partial(stages.init, kind=k)) for k in range(len(stages.examples))]
    whole = fast_jit(GPT.init)(key)
    for device, kind in enumerate(stages.kinds):
        held = init[kind](key, shifts=stages.shifts[device])
        named = {own: held[name] for name, own in stages.local_names(device).items()}
        jax.tree.map(np.testing.assert_array_equal, named, stages.select(whole, device))


class Halve(nnx.Module):
    """Sums pairs of neighbours. It has no parameters, so they do not determine its input shape."""

    def __init__(self, rngs: nnx.Rngs):
        pass

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return x.reshape(x.shape[0], -1, 2).sum(-1)


class Scale(nnx.Module):
    def __init__(self, factor: float, rngs: nnx.Rngs):
        self.factor = factor
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return x * self.gain[...] * self.factor


def test_kinds_differ_by_input_definition_and_number() -> None:
    """Stages of equal layers need another program if input shapes, a constant or the number of layers differ."""
    rows: dict[str, Any] = {"inputs": jax.ShapeDtypeStruct((2, 64), jnp.float32)}
    twice, thrice = partial(Scale, 2.0), partial(Scale, 3.0)
    makers: list[Any] = [Halve, twice, twice, Halve, Halve, twice, thrice, twice, twice, twice]
    model = Model({f"layer_{i}": make for i, make in enumerate(makers)})

    def kinds(*bounds: int) -> list[int]:
        return Stages(model, bounds, loop_stages(len(bounds) - 1, 1), model.inputs(rows), CAUSAL_LM).kinds

    assert kinds(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == [0, 1, 1, 2, 3, 4, 5, 4, 4, 6]
    assert kinds(0, 1, 3, 4, 6, 7, 8, 9, 10) == [0, 1, 2, 3, 4, 5, 5, 6]
    assert kinds(0, 10) == [0]
