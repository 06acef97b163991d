"""The activations of a layer are divided by the tensor axis: by the temporary arrays of compiled steps."""

import functools

import pytest

from jaxpar import cluster, strategies
from jaxpar.config import default_config, override
from scripts.bench.planned_memory import Case, make_problem
from tests.selection import slow_except

TEXTS, TOKENS, WORDS, LAYERS = 2, 64, 128, (2, 4)
MODELS = {
    "bert": "model.name=bert",
    "gpt": "task=causal_lm model.name=gpt",
    "llama": "task=causal_lm model.name=gpt model.norm=rmsnorm model.activation=swiglu model.positions=rotary"
    " model.num_kv_heads=4",
}
SIZES = "model.hidden_size=64 model.num_heads=4 model.mlp_size=256 model.dropout=0.1 model.scan_layers=True"
TRAINING = f"strategy=single optimizer.name=sgd optimizer.momentum=0.0 batch_size={TEXTS} data.max_length={TOKENS}"


@functools.cache
def temporary_bytes(model: str, tensor: int, layers: int) -> int:
    """Return the bytes of the temporary arrays of a step on a device."""
    config, there = default_config(), cluster.find_cluster()
    settings = f"{TRAINING} {SIZES} {MODELS[model]} model.num_layers={layers} mesh.tensor={tensor}".split()
    override(config, [f"--config.{one}" for one in settings])
    problem = make_problem(config, Case(TEXTS, TOKENS, WORDS, ()), there)
    strategy = strategies.build(strategies.plan(config, problem, there), problem, cluster.devices())
    [program] = strategy.compile()
    analysis = program.compiled.memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


def bytes_per_layer(model: str, tensor: int) -> float:
    """Return the temporary bytes that a layer adds: the activations that the backward pass reads."""
    few, many = LAYERS
    return (temporary_bytes(model, tensor, many) - temporary_bytes(model, tensor, few)) / (many - few)


@pytest.mark.parametrize(
    ("model", "tensor"), slow_except([("gpt", 4)], [(model, tensor) for model in MODELS for tensor in (2, 4)])
)
def test_a_device_saves_its_part_of_the_activations(model: str, tensor: int) -> None:
    """Masks of dropout and inputs of products and norms are divided, too, though norms have no split arrays."""
    assert bytes_per_layer(model, tensor) == pytest.approx(bytes_per_layer(model, 1) / tensor, rel=0.04)
