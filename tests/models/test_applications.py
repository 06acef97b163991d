"""Checks layers that are applied several times: the same as copies of the layer, whose gradients are added."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar.core.step import abstract
from jaxpar.errors import UserError
from jaxpar.models import Context
from jaxpar.strategies.pipeline.executor.partition import layer_flops, parameters
from tests.models.small import dropout_keys, fast_jit, small


def copied(params: dict[str, Any], times: int) -> dict[str, Any]:
    """Return the parameters of the model in which each block is written `times` times."""
    blocks = [name for name in params if name.startswith("block_")]
    copies = {f"block_{times * i + j}": params[name] for i, name in enumerate(blocks) for j in range(times)}
    return {"embed": params["embed"], **copies, "head": params["head"]}


@pytest.mark.parametrize("how", [{}, {"scan_layers": True}, {"scan_layers": True, "remat": "full"}, {"remat": "dots"}])
def test_a_gradient_is_the_sum_over_applications(how: dict[str, Any]) -> None:
    """The reference is a model with a copy of each block for each application."""
    model, params, batch = small("mlp", "classification", num_layers=3, num_applications=2, **how)
    other, _, _ = small("mlp", "classification", num_layers=6, scan_layers=False)
    copies = copied(params, 2)
    assert jax.tree.map(np.shape, copies) == jax.tree.map(np.shape, other.shapes)

    @fast_jit
    def gradients(params: Any, copies: Any) -> Any:
        loss, loss_of_copies = (lambda p, m=m: (m.apply(p, batch) ** 2).sum() for m in (model, other))
        return jax.value_and_grad(loss)(params), jax.value_and_grad(loss_of_copies)(copies)

    (loss, found), (expected_loss, expected) = gradients(params, copies)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for index in range(3):
        total = jax.tree.map(np.add, expected[f"block_{2 * index}"], expected[f"block_{2 * index + 1}"])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found[f"block_{index}"], total)
    for name in ("embed", "head"):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found[name], expected[name])


def test_every_application_has_its_own_dropout() -> None:
    """The reference applies the blocks by hand, with a key for each block and application."""
    model, params, batch = small("mlp", "classification", num_layers=2, num_applications=3, dropout=0.4)
    x, keys_B = batch["inputs"], dropout_keys()
    outputs = []
    for index, layer in enumerate(model.layers):
        of_layer = jax.vmap(jax.random.fold_in, (0, None))(keys_B, index)
        is_block = layer.name.startswith("block_")
        for number in range(3 if is_block else 1):
            keys = jax.vmap(jax.random.fold_in, (0, None))(of_layer, number) if is_block else of_layer
            x = nnx.merge(layer.graphdef, params[layer.name])(x, Context(batch, keys))
            outputs.append(x)
    np.testing.assert_allclose(model.apply(params, batch, keys_B), x, rtol=1e-5, atol=1e-6)
    assert len({(np.asarray(output) == 0).tobytes() for output in outputs[1:7]}) == 6


def test_costs_count_applications() -> None:
    flops, sizes = [], []
    for times in (None, 5):
        model, _, batch = small("gpt", "causal_lm", num_applications=times)
        shapes = abstract(batch)
        flops.append(layer_flops(model, shapes, model.inputs(shapes)))
        sizes.append(parameters(model))
    once, repeated = flops
    assert repeated[1:-1] == [5 * number for number in once[1:-1]]
    assert (repeated[0], repeated[-1]) == (once[0], once[-1])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("times", "rule"), [(0, "at least 1"), (10_001, "at most 10,000"), (2**62, "at most 10,000")])
def test_numbers_that_cannot_be(times: int, rule: str) -> None:
    with pytest.raises(UserError, match=rf"^config.model.num_applications is {times}; it must be {rule}$"):
        small("mlp", "classification", num_applications=times)


def test_models_without_blocks() -> None:
    with pytest.raises(UserError, match=r"^config.model.num_applications is 2; it must be None with model 'resnet' "):
        small("resnet", "classification", num_applications=2)
