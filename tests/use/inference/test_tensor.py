"""A model whose layers are split over devices answers like one device: outputs, predictions, and generated texts."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar import cluster, models, tasks
from jaxpar.commands import predict
from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import DATA, TENSOR
from jaxpar.errors import UserError
from jaxpar.tasks import token_logits
from jaxpar.use.inference.generate import Generator, Sampling, stack_samplings
from jaxpar.use.inference.load import Trained, load_trained, place
from tests.models.small import CPU, LLAMA, info_of, make_batch, make_params, small_config
from tests.runs import run_script
from tests.use.inference.conftest import records
from tests.use.inference.test_generate import make_tokenizer

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # all for up to four devices; the vocabulary has 50 words
    "bert": ("bert", "classification", {"num_heads": 4, "scan_layers": True}),
    "masked bert": ("bert", "masked_lm", {"num_heads": 4}),
    "vit": ("vit", "classification", {"num_heads": 4}),
    "gpt of texts": ("gpt", "classification", {"num_heads": 4}),
    "gpt": ("gpt", "causal_lm", {"num_heads": 4, "bottlenecks": "block_1"}),
    "llama": ("gpt", "causal_lm", LLAMA | {"num_heads": 8, "num_kv_heads": 4, "tied_embeddings": False}),
}
TEXTS = [str(one["text"]) for one in records(13, seed=3)]
LENGTH = 40  # of the longest text
PROMPTS = ["t6", "t26 t9 t34 t37"]
SAMPLINGS = [Sampling(), Sampling(2.0, seed=3), Sampling(3.0, top_k=9, seed=4), Sampling(3.0, top_p=0.6)]


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the JAX settings of the tests."""
    monkeypatch.setattr(meshes, "prepare_jax", lambda *_: None)


def make_model(name: str, data: int, tensor: int, **overrides: Any) -> Trained:
    """Return a model with random parameters on data x tensor devices."""
    model, task, options = MODELS.get(name, (name, "classification", {}))
    config, info = small_config(model, task, **options, **overrides), info_of(model, task)
    if info.kind == "text":
        info = info._replace(input_shape=(LENGTH,))
    built = models.build(config, info, CPU)
    mesh = meshes.make_mesh({DATA: data, TENSOR: tensor}, cluster.devices())
    params, tokenizer = make_params(built), make_tokenizer()
    return place(Trained(Path(), 0, config, info, tasks.find_task(config), built, params, tokenizer, mesh))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt"])
def test_outputs_equal_those_of_one_device(name: str) -> None:
    trained, batch = make_model(name, 2, 4), make_batch(*MODELS[name][:2])
    by_replica = PartitionSpec(DATA)

    def outputs(params: Any, batch: Any) -> jax.Array:
        return token_logits.whole(trained.local_model.outputs(params, batch))

    found = jax.jit(trained.program(outputs, (by_replica,), by_replica))(trained.params, batch)
    expected = jax.jit(trained.model.apply)(make_params(trained.model), batch)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "tensor"), [("gpt", 2), ("llama", 4)])
def test_generated_texts_equal_those_of_one_device(name: str, tensor: int) -> None:
    """With the same random numbers, for texts of different lengths and options at the same time."""
    one, several = Generator(make_model(name, 1, 1)), Generator(make_model(name, 2, tensor))
    requests = [one.request(prompt, 30, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    expected, found = (list(generator.stream_requests(requests)) for generator in (one, several))
    assert found == expected
    drawn = [[piece.token for piece in expected if piece.number == number] for number in range(len(requests))]
    assert sum(len({*tokens}) > 5 for tokens in drawn) > len(requests) / 2


def test_a_device_has_its_part_of_the_parameters_and_of_the_cache() -> None:
    trained = make_model("llama", 2, 4, hidden_size=256)
    generator = Generator(trained)
    params, one = generator._trained.params, trained.mesh.devices[0, 0]

    def on_one(x: jax.Array) -> jax.Array:
        [mine] = [shard.data for shard in x.addressable_shards if shard.device == one]
        return mine

    for mine, loaded in zip(jax.tree.leaves(params), jax.tree.leaves(trained.params), strict=True):
        assert on_one(mine).unsafe_buffer_pointer() == on_one(loaded).unsafe_buffer_pointer()  # no copy
    whole = sum(leaf.size for leaf in jax.tree.leaves(trained.model.shapes))
    assert whole / 4 < sum(on_one(x).size for x in jax.tree.leaves(params)) < whole / 3.9
    samplings = stack_samplings([Sampling()] * 2, 40)
    _, stored = generator._read(params, np.ones((2, 8), np.int32), np.ones(2, np.int32), samplings, 16)
    assert {on_one(x).shape for x in jax.tree.leaves(stored)} == {(2, 16, 1, 32)}


def test_predictions_and_metrics_equal_those_of_one_device(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, several = jaxpar.load(classifier, devices=jax.devices()[:1]), jaxpar.load(classifier, tensor=2)
    given, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    given.write_text("".join(f"{text}\n" for text in TEXTS))
    flags = f"--workdir={classifier}", f"--input={given}", f"--output={output}", "--tensor=2"
    assert run_script(monkeypatch, predict, *flags) == 0
    assert f"of {classifier}, on 8 devices, each layer on 2\n" in capsys.readouterr().err
    for line, prediction in zip(output.read_text().splitlines(), one.predict(TEXTS), strict=True):
        found, expected = json.loads(line), dict(prediction)
        assert found["class"] == expected["class"]
        assert found["probability"] == pytest.approx(expected["probability"], rel=1e-5)
    table = classifier.parent / "data.csv"
    assert several.evaluate(table) == pytest.approx(one.evaluate(table), rel=1e-5)


def test_mistakes(classifier: Path) -> None:
    with pytest.raises(UserError, match=r"^tensor is 4; it must divide config\.model\.num_heads, 2$"):
        load_trained(classifier, tensor=4)
    for tensor in (0, 9, 2.0):
        with pytest.raises(UserError, match=rf"^tensor is {tensor}; it must be from 1 to 8, the number of devices \("):
            load_trained(classifier, tensor=tensor)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^tensor is 2; it must be 1 with config\.model\.name='mlp', whose layers"):
        make_model("mlp", 1, 2)
