"""Compares weights and logits with references from `transformers`, written by scripts/make_hf_reference.py."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxpar import checkpoint
from jaxpar import config as configs
from jaxpar.commands import export as command
from jaxpar.commands.export import completed
from jaxpar.data import DataInfo, read_info, write_info
from jaxpar.errors import UserError
from jaxpar.models import Model, build, hf
from jaxpar.use.export import hugging_face
from jaxpar.use.export.hugging_face import save_directory
from tests.models.small import CPU, LLAMA, fast_jit, make_params, small_config
from tests.runs import script_error

REFERENCE = Path(__file__).parent / "reference"
MEAN = "bert_mean"  # its classifier is in a folder of its own
NAMES = sorted(path.name for path in REFERENCE.iterdir() if path.name != MEAN)
ANY = "bert_classification"


def config_of(name: str, directory: Path | None = None, **overrides: Any) -> ConfigDict:
    """Return a config that reads reference `name`."""
    kind, _, task = name.partition("_")
    sizes = {"num_layers": None, "hidden_size": None, "num_heads": None, **overrides}
    model = kind if kind == "bert" else "gpt"
    return small_config(model, task, init_from=str(directory or REFERENCE / name), **sizes)


def info_of(config: ConfigDict, **overrides: Any) -> DataInfo:
    classes = tuple("xyz") if config.task == "classification" else ()
    return DataInfo("text", (10,), len(classes), classes, 40, 0)._replace(**overrides)


def load(name: str, directory: Path | None = None, **overrides: Any) -> tuple[Model, Any, ConfigDict]:
    config = config_of(name, directory, **overrides)
    hf.apply_directory(config)
    model = build(config, info_of(config), CPU)
    fresh = make_params(model)
    directory = Path(config.model.init_from)
    return model, hf.load_params(model, fresh, directory, info_of(config), log=lambda _line: None), config


def export(params: Any, config: ConfigDict, tokenizer: Path, out: Path, info: DataInfo | None = None) -> None:
    with completed(out, "directory") as directory:
        save_directory(params, config, info or info_of(config), tokenizer, directory)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of a reference that a test can damage."""
    return Path(shutil.copytree(REFERENCE / ANY, tmp_path / ANY))


def rewrite(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    contents = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in contents.items() if value is not None}))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(35))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_references_are_complete() -> None:
    heads: dict[str, tuple[str, ...]] = {"bert": ("classification", "masked_lm")}
    heads |= dict.fromkeys(("gpt", "llama"), ("causal_lm", "classification"))
    heads |= dict.fromkeys(("llama3", "mistral", "qwen2"), ("causal_lm",))
    assert sorted(f"{kind}_{head}" for kind, kinds in heads.items() for head in kinds) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str) -> None:
    model, params, _ = load(name)
    example = load_file(REFERENCE / name / "example.safetensors")
    expected = example.pop("logits")
    example = {key: value if key == "mask" else value.astype(np.int32) for key, value in example.items()}
    np.testing.assert_allclose(fast_jit(model.apply)(params, example), expected, atol=1e-5, rtol=0)
    assert np.ptp(expected) > 1


@pytest.mark.parametrize("name", NAMES)
def test_export_equals_the_file_read(name: str, tmp_path: Path, tokenizer: Path) -> None:
    _, params, config = load(name)
    export(params, config, tokenizer, tmp_path / "out")
    theirs = load_file(REFERENCE / name / "model.safetensors")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        assert ours[key].dtype == np.float32
        np.testing.assert_array_equal(ours[key], array)
    before = json.loads((REFERENCE / name / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    # jaxpar has no attention dropout; n_inner None means 4 D.
    ignored = {"attn_pdrop", "attention_probs_dropout_prob", "n_inner"}
    if config.model.positions == "rotary":  # they have no limit here, so that of the texts is exported
        ignored.add("max_position_embeddings")
        assert after["max_position_embeddings"] == 10
        assert "lm_head.weight" in ours or after["tie_word_embeddings"] or config.task != "causal_lm"
    if name.startswith("mistral"):  # without a sliding window, it is Llama
        ignored |= {"model_type", "architectures"}
        assert after["architectures"] == ["LlamaForCausalLM"]
    differing = {key for key in before.keys() & after.keys() - ignored if before[key] != after[key]}
    assert differing <= {"id2label", "label2id", "pad_token_id", "bos_token_id", "eos_token_id"}
    if config.task == "classification":
        assert after["id2label"] == {"0": "x", "1": "y", "2": "z"}
        assert after["label2id"] == {"x": 0, "y": 1, "z": 2}
    uses = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert uses["pad_token"] == "[PAD]"
    assert uses["mask_token"] == "[MASK]"
    assert uses["model_max_length"] == 10
    # Reading the exported directory returns the same arrays.
    _, again, _ = load(name, tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_mean_pooling_is_exported_for_sentence_transformers(tmp_path: Path, tokenizer: Path) -> None:
    """The reference is a BERT encoder with the modules Pooling and Dense of `sentence-transformers`."""
    config = config_of("bert_classification", REFERENCE / MEAN, pooling="mean")
    hf.apply_directory(config)
    model = build(config, info_of(config), CPU)
    lines: list[str] = []
    params = hf.load_params(model, make_params(model), REFERENCE / MEAN, info_of(config), log=lines.append)
    assert "newly initialized: head.classifier.kernel, head.classifier.bias" in lines[0]
    dense = load_file(REFERENCE / MEAN / "2_Dense" / "model.safetensors")
    params["head"]["classifier"] = {"kernel": dense["linear.weight"].T, "bias": dense["linear.bias"]}
    example = load_file(REFERENCE / MEAN / "example.safetensors")
    batch = {"inputs": example["inputs"].astype(np.int32), "mask": example["mask"]}
    np.testing.assert_allclose(fast_jit(model.apply)(params, batch), example["logits"], atol=1e-5, rtol=0)
    assert np.ptp(example["logits"]) > 1

    out = tmp_path / "out"
    export(params, config, tokenizer, out)
    for name in ("model.safetensors", "2_Dense/model.safetensors"):
        theirs, ours = load_file(REFERENCE / MEAN / name), load_file(out / name)
        assert ours.keys() == theirs.keys()
        for key, array in theirs.items():
            np.testing.assert_array_equal(ours[key], array)
    files = {name: json.loads((out / name).read_text()) for name in SENTENCE_FILES}
    assert [one["path"] for one in files["modules.json"]] == ["", "1_Pooling", "2_Dense"]
    assert [one["type"].split(".")[-1] for one in files["modules.json"]] == ["Transformer", "Pooling", "Dense"]
    assert files["config.json"]["architectures"] == ["BertModel"]
    assert files["sentence_bert_config.json"]["max_seq_length"] == 10
    pooling = files["1_Pooling/config.json"]
    assert pooling.pop("word_embedding_dimension") == 16
    assert [mode for mode, is_on in pooling.items() if is_on] == ["pooling_mode_mean_tokens"]
    written = json.loads((REFERENCE / MEAN / "2_Dense" / "config.json").read_text())
    assert files["2_Dense/config.json"] == {key: written[key] for key in files["2_Dense/config.json"]}
    assert {"in_features", "out_features", "bias", "activation_function"} <= files["2_Dense/config.json"].keys()


SENTENCE_FILES = (
    *("config.json", "modules.json", "sentence_bert_config.json"),
    *("1_Pooling/config.json", "2_Dense/config.json"),
)


def test_llama_options_come_from_the_directory(tmp_path: Path) -> None:
    """Both forms of the rotary base are read: that of transformers 5, and that of earlier versions."""
    copy = Path(shutil.copytree(REFERENCE / "llama_causal_lm", tmp_path / "llama"))
    for changes in ({}, {"rope_parameters": None, "rope_theta": 10_000.0, "rope_scaling": None}):
        rewrite(copy / "config.json", **changes)
        config = config_of("llama_causal_lm", copy)
        hf.apply_directory(config)
        found = {key: config.model[key] for key in ("norm", "positions", "activation", "num_kv_heads", "mlp_size")}
        assert found == {
            **{"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu"},
            **{"num_kv_heads": 2, "mlp_size": 24},
        }
        assert (config.model.max_length, config.model.dropout) == (None, 0.0)
    config = config_of("llama_causal_lm", copy, dropout=0.2)
    hf.apply_directory(config)
    assert config.model.dropout == 0.2


LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}


def test_options_of_other_decoders() -> None:
    """Only values that differ from the defaults here are set; a classifier has no head that could be tied."""
    keys = ("head_dim", "norm_eps", "qkv_bias", "rope_base", "rope_scaling", "tied_embeddings")
    linear, llama3 = (json.dumps(one, sort_keys=True) for one in ({"rope_type": "linear", "factor": 2.0}, LLAMA3))
    expected: dict[str, tuple[Any, ...]] = {
        "llama_causal_lm": (None, None, None, None, None, None),
        "llama3_causal_lm": (8, 1e-6, None, 500.0, llama3, False),
        "mistral_causal_lm": (None, 1e-6, None, 1e6, linear, False),
        "qwen2_causal_lm": (None, 1e-6, True, 1e6, None, False),
    }
    for name, values in expected.items():
        config = config_of(name)
        hf.apply_directory(config)
        assert tuple(config.model[key] for key in keys) == values, name
    config = config_of("qwen2_classification", REFERENCE / "qwen2_causal_lm")
    hf.apply_directory(config)
    assert (config.model.qkv_bias, config.model.tied_embeddings) == (True, None)


def test_scalings_of_earlier_versions(tmp_path: Path) -> None:
    """Before transformers 5, rope_theta was a key of its own, and rope_type had the name type at first."""
    for name, old in (("llama3", LLAMA3), ("mistral", {"type": "linear", "factor": 2.0})):
        copy = Path(shutil.copytree(REFERENCE / f"{name}_causal_lm", tmp_path / name))
        base = json.loads((copy / "config.json").read_text())["rope_parameters"]["rope_theta"]
        rewrite(copy / "config.json", rope_parameters=None, rope_theta=base, rope_scaling=old)
        configs_read = [config_of(f"{name}_causal_lm", directory) for directory in (copy, REFERENCE / copy.name)]
        configs_read[1].model.init_from = str(REFERENCE / f"{name}_causal_lm")
        for config in configs_read:
            hf.apply_directory(config)
            config.model.init_from = ""
        assert configs_read[0].to_dict() == configs_read[1].to_dict()


def test_a_window_as_long_as_the_texts(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(REFERENCE / "mistral_causal_lm", tmp_path / "mistral"))
    rewrite(copy / "config.json", sliding_window=64)
    load("mistral_causal_lm", copy)
    assert hf.longest_text(copy) == 12
    rewrite(copy / "config.json", sliding_window=8)
    assert hf.longest_text(copy) == 8
    rewrite(copy / "config.json", max_position_embeddings=None)
    with pytest.raises(UserError, match="has max_position_embeddings None; it must be a positive integer"):
        hf.longest_text(copy)


def test_shards_are_written_and_read_one_at_a_time(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, params, config = load("qwen2_causal_lm")
    monkeypatch.setattr(hugging_face, "SHARD_BYTES", 4000)
    export(params, config, tokenizer, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    sizes = [sum(array.nbytes for array in load_file(file).values()) for file in files]
    assert sum(sizes) == index["metadata"]["total_size"]
    assert max(sizes) <= 4000
    jax.tree.map(np.testing.assert_array_equal, load("qwen2_causal_lm", tmp_path / "out")[1], params)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings 'no'; it must be true or false$"),
        ({"rms_norm_eps": 1}, "has rms_norm_eps 1; it must be a number, greater than 0 and less than 1$"),
        ({"head_dim": 0}, "has head_dim 0; it must be a positive integer$"),
        ({"head_dim": 8}, r"q_proj.weight has the wrong shape: .*\(16, 16\), but the model has \(16, 32\)"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "scaling .*'llama3'} .the keys must be rope_type, factor, low"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "scaling .*'yarn'} .rope_type must be linear or llama3. in"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
            "must be positive numbers, and factor at least 1",
        ),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4}}, "low_freq_factor must be less than high_freq_factor"),
        (
            {"rope_parameters": [1]},
            r"rotary positions have rope_parameters \[1\], which must be an object, in config.json",
        ),
        ({"rope_parameters": {"rope_theta": 1}}, "have rope_theta 1, which must be a number greater than 1, in"),
        ({"rope_parameters": None, "rope_theta": "1e6"}, "rope_theta '1e6', which must be a number greater than 1"),
        (
            {"model_type": "mistral", "sliding_window": 32},
            "max_length is 64; it must be at most 32, the sliding_window",
        ),
        ({"model_type": "mistral", "sliding_window": "8"}, "has sliding_window '8'; it must be a positive integer$"),
        ({"model_type": "qwen2"}, "has no tensor model.layers.0.self_attn.q_proj.bias; its files do not match"),
        ({"attention_bias": True}, "with attention_bias True in config.json; it must be False$"),
        ({"hidden_act": "gelu"}, "with hidden_act 'gelu' in config.json; it must be 'silu'$"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0; it must be a positive integer$"),
    ],
)
def test_other_llama_directories(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(REFERENCE / "llama_causal_lm", tmp_path / "llama"))
    rewrite(copy / "config.json", **changes)
    with pytest.raises(UserError, match=words):
        load("llama_causal_lm", copy)


def test_options_that_contradict_the_directory() -> None:
    words = "config.model.norm is 'rmsnorm', but .* describes a model with 'layernorm'; do not set config.model.norm"
    with pytest.raises(UserError, match=words):
        load("gpt_causal_lm", norm="rmsnorm")
    with pytest.raises(UserError, match=r"config.model.positions is 'learned', but .* a model with 'rotary'"):
        load("llama_causal_lm", positions="learned")


@pytest.mark.parametrize(
    ("task", "names", "architecture"),
    [
        ("regression", ("stars", "price"), "BertForSequenceClassification"),
        ("token_classification", ("O", "B-PER", "I-PER"), "BertForTokenClassification"),
    ],
)
def test_other_tasks_are_exported(
    task: str, names: tuple[str, ...], architecture: str, tmp_path: Path, tokenizer: Path
) -> None:
    """Exports name the `transformers` class with the same head, and reading them returns the same arrays."""
    config = small_config("bert", task)
    is_regression = task == "regression"
    labels = {"targets": names} if is_regression else {"num_classes": len(names), "class_names": names}
    info = DataInfo("text", (10,), 0, (), 40, 0)._replace(**labels)
    model = build(config, info, CPU)
    params = make_params(model)
    export(params, config, tokenizer, tmp_path / "out", info)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["architectures"] == [architecture]
    assert settings["id2label"] == {str(i): name for i, name in enumerate(names)}
    assert settings.get("problem_type") == ("regression" if is_regression else None)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert ("bert.pooler.dense.weight" in tensors) == is_regression
    np.testing.assert_array_equal(tensors["classifier.weight"], params["head"]["classifier"]["kernel"].T)
    again = hf.load_params(
        model, jax.eval_shape(model.init, jax.random.key(0)), tmp_path / "out", info, log=lambda _line: None
    )
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_sizes_come_from_the_directory() -> None:
    config = config_of(ANY, dropout=0.3)
    hf.apply_directory(config)
    found = {key: config.model[key] for key in ("num_layers", "hidden_size", "num_heads", "mlp_size", "vocab_size")}
    assert found == {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "mlp_size": 48, "vocab_size": 40}
    assert (config.model.max_length, config.model.activation, config.model.dropout) == (12, "gelu", 0.3)


def test_encoder_without_heads_and_prefix(copy: Path) -> None:
    """A directory as BertModel saves it, with the LayerNorm names from before 2019, in bfloat16."""
    weights = load_file(copy / "model.safetensors")
    half = {}
    for name, array in weights.items():
        if not name.startswith("classifier"):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            half[old.removeprefix("bert.")] = array.astype(ml_dtypes.bfloat16)
    save_file(half, copy / "model.safetensors")
    config = config_of(ANY, copy)
    hf.apply_directory(config)
    model = build(config, info_of(config, num_classes=7), CPU)
    lines: list[str] = []
    fresh = make_params(model)
    params = hf.load_params(model, fresh, copy, info_of(config, num_classes=7), log=lines.append)
    assert "newly initialized: head.classifier.kernel, head.classifier.bias" in lines[0]
    np.testing.assert_array_equal(params["head"]["classifier"]["kernel"], fresh["head"]["classifier"]["kernel"])
    kernel = weights["bert.encoder.layer.1.attention.self.query.weight"].T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(params["block_1"]["attention"]["query"]["kernel"], kernel.astype(np.float32))
    assert params["head"]["pooler"]["kernel"].dtype == np.float32
    # The directory has no masked-LM head either.
    config = config_of("bert_masked_lm", copy)
    hf.apply_directory(config)
    model = build(config, info_of(config), CPU)
    hf.load_params(model, make_params(model), copy, info_of(config), log=lines.append)
    assert "newly initialized: head.transform.kernel" in lines[1]
    assert "head.bias" in lines[1]


def test_classifier_of_other_classes_stays_fresh() -> None:
    config = config_of(ANY)
    hf.apply_directory(config)
    model = build(config, info_of(config, num_classes=7), CPU)
    lines: list[str] = []
    params = hf.load_params(
        model, make_params(model), REFERENCE / ANY, info_of(config, num_classes=7), log=lines.append
    )
    assert params["head"]["classifier"]["kernel"].shape == (16, 7)
    fresh = "newly initialized: head.classifier.kernel, head.classifier.bias"
    assert lines[0].endswith(f"; {fresh}; attention_probs_dropout_prob 0.1 is not applied")


# Changes of config.json, classes of the data -> the output of the directory for each class; None: newly initialized.
ORDERS: list[tuple[dict[str, Any], tuple[str, ...], list[int] | None]] = [
    ({"id2label": {"0": "y", "1": "z", "2": "x"}}, ("x", "y", "z"), [2, 0, 1]),
    ({"id2label": {"2": "x", "0": "y", "1": "z"}}, ("0", "1", "2"), [0, 1, 2]),
    ({"id2label": {"0": "y", "1": "z", "2": "x"}}, ("x", "y", "w"), None),
    ({}, ("2", "0", "1"), [2, 0, 1]),  # LABEL_0, LABEL_1, LABEL_2
    ({}, ("x", "y", "z"), [0, 1, 2]),
    ({"problem_type": "regression"}, ("x", "y", "z"), None),
    ({"problem_type": "single_label_classification"}, ("x", "y", "z"), [0, 1, 2]),
]


@pytest.mark.parametrize(("changes", "classes", "order"), ORDERS)
def test_the_meaning_of_outputs(
    changes: dict[str, Any], classes: tuple[str, ...], order: list[int] | None, copy: Path
) -> None:
    """The classifier of other classes is not taken, and one of the same classes in another order is reordered."""
    rewrite(copy / "config.json", **changes)
    config = config_of(ANY, copy)
    hf.apply_directory(config)
    info = info_of(config, class_names=classes)
    model = build(config, info, CPU)
    lines: list[str] = []
    params = hf.load_params(model, model.shapes, copy, info, log=lines.append)
    weights = load_file(copy / "model.safetensors")
    if order is None:
        assert "newly initialized: head.classifier.kernel, head.classifier.bias" in lines[0]
        assert params["head"]["classifier"]["kernel"] == model.shapes["head"]["classifier"]["kernel"]
        return
    np.testing.assert_array_equal(params["head"]["classifier"]["kernel"], weights["classifier.weight"][order].T)
    np.testing.assert_array_equal(params["head"]["classifier"]["bias"], weights["classifier.bias"][order])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_weights_that_are_not_finite(value: float, copy: Path) -> None:
    """Also without NumPy's warning, which would be an error here."""
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.endswith("query.weight"))
    array = weights[name].astype(np.float64)
    array[1, 2] = value
    save_file(weights | {name: array}, copy / "model.safetensors")
    with pytest.raises(UserError, match=rf"tensor {name} has values that are not finite in float32; they must be fini"):
        load(ANY, copy)


def test_shards(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:20], "model-2.safetensors": names[20:]}
    for file, keys in shards.items():
        save_file({key: weights[key] for key in keys}, copy / file)
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    _, whole, _ = load(ANY)
    _, sharded, _ = load(ANY, copy)
    jax.tree.map(np.testing.assert_array_equal, sharded, whole)
    (copy / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-2.safetensors is missing"):
        load(ANY, copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "roberta"}, ["with model_type 'roberta'; it must be one of bert, gpt2, llama"]),
        (
            {"model_type": "gpt2", "n_layer": 2},
            ["config.json lacks n_embd, n_head, n_positions; it must be the config.json of a gpt2 model"],
        ),
        ({"hidden_size": None}, ["config.json lacks hidden_size"]),
        ({"model_type": []}, ["with model_type []; it must be one of bert, gpt2, llama"]),
        ({"model_type": {}}, ["with model_type {}; it must be one of bert, gpt2, llama"]),
        ({"num_hidden_layers": 10_001}, ["config.model.num_layers is 10001; it must be at most 10,000"]),
        ({"id2label": ["x", "y", "z"]}, ["config.json has id2label ['x', 'y', 'z']; it must be the name of each"]),
        ({"id2label": {"0": "x", "2": "y"}}, ["config.json has id2label {'0': 'x', '2': 'y'}; it must be the name"]),
        ({"problem_type": []}, ["with problem_type [] in config.json; it must be regression or single_label_cl"]),
        ({"hidden_act": "silu"}, ["hidden_act 'silu'", "gelu_new"]),
        ({"type_vocab_size": 1}, ["type_vocab_size 1"]),
        ({"hidden_size": "many"}, ["config.json has hidden_size 'many'; it must be a positive integer"]),
        ({"num_hidden_layers": True}, ["config.json has num_hidden_layers True; it must be a positive integer"]),
        (
            {"hidden_dropout_prob": "0.1"},
            ["hidden_dropout_prob '0.1'; it must be a number, at least 0 and less than 1"],
        ),
        ({"quantization_config": {"bits": 8}}, ["with quantization_config", "must be a model that is not quantized"]),
        ({"pruned_heads": {"0": [1]}}, ["with pruned_heads", "must be a model that is not pruned"]),
        ({"problem_type": "multi_label_classification"}, ["with problem_type", "several labels per example"]),
        (
            {"classifier_dropout": 0.5},
            ["classifier_dropout 0.5; they must be equal", "config.model.dropout must be set"],
        ),
        ({"layer_norm_eps": 1e-5}, ["layer_norm_eps 1e-05"]),
        ({"num_hidden_layers": 3}, ["no tensor bert.encoder.layer.2.attention.self.query.weight"]),
        ({"intermediate_size": 64}, ["model.safetensors: tensor bert.encoder.layer.0", "(16, 48)", "(16, 64)"]),
    ],
)
def test_other_directories(copy: Path, changes: dict[str, Any], words: list[str]) -> None:
    rewrite(copy / "config.json", **changes)
    with pytest.raises(UserError) as caught:
        load(ANY, copy)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_directories(copy: Path, tmp_path: Path) -> None:
    file = copy / "model.safetensors"
    contents = file.read_bytes()
    for size in (4, 100, len(contents) - 4):
        file.write_bytes(contents[:size])
        with pytest.raises(UserError, match=r"model.safetensors is missing, truncated or not a safetensors file"):
            load(ANY, copy)
    file.rename(copy / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"must contain model.safetensors; convert pytorch_model.bin"):
        load(ANY, copy)
    (copy / "config.json").write_text("[" * 100_000)
    with pytest.raises(
        UserError, match=r"config.json is not the config.json of a model: .*nested more than 100 levels"
    ):
        load(ANY, copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not the config.json of a model"):
        load(ANY, copy)
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match=r"must be a directory that contains config.json"):
        load(ANY, copy)
    with pytest.raises(UserError, match=r"nothing', which does not exist; it must be a model directory"):
        load(ANY, tmp_path / "nothing")
    with pytest.raises(UserError, match=r"model.safetensors', which is a file; it must be a model directory"):
        load(ANY, REFERENCE / ANY / "model.safetensors")


def test_dropout_rates_that_differ_do_not_matter_if_the_config_sets_one(copy: Path) -> None:
    rewrite(copy / "config.json", classifier_dropout=0.5)
    load(ANY, copy, dropout=0.3)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.bool_])
def test_quantized_tensors(copy: Path, dtype: Any) -> None:
    """Without their scales, quantized weights are not the model's weights."""
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.endswith("query.weight"))
    save_file(weights | {name: weights[name].astype(dtype)}, copy / "model.safetensors")
    with pytest.raises(UserError, match=rf"tensor {name} has dtype '.*'; it must be one of F16, BF16, F32, F64"):
        load(ANY, copy)


def test_float8_tensors(copy: Path) -> None:
    file = copy / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    name = next(name for name in header if name.endswith("query.weight"))
    begin, end = header[name]["data_offsets"]
    header[name] |= {"dtype": "F8_E4M3", "shape": [*header[name]["shape"][:-1], 4 * header[name]["shape"][-1]]}
    assert end - begin == np.prod(header[name]["shape"])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + file.read_bytes()[8 + length :])
    with pytest.raises(UserError, match=rf"tensor {name} has dtype 'F8_E4M3'; it must be one of"):
        load(ANY, copy)


@pytest.mark.parametrize("contents", ["{", "[]", "{}", '{"weight_map": []}', "[" * 100_000, '{"weight_map": {"a": 3}}'])
def test_a_damaged_index(copy: Path, contents: str) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(contents)
    with pytest.raises(UserError, match=r"model.safetensors.index.json is not an index of safetensors files: \w+Error"):
        load(ANY, copy)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "pipe", "link"])
def test_an_index_that_names_other_files(copy: Path, tmp_path: Path, name: str) -> None:
    """None of them is opened: the pipe would block."""
    (tmp_path / "other").mkdir()
    (copy / "model.safetensors").rename(tmp_path / "other" / "model.safetensors")
    (copy / "link").symlink_to(tmp_path / "other" / "model.safetensors")
    os.mkfifo(copy / "pipe")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=f"{copy}: '{name}' is a .*; it must be a regular file of this folder"):
        load(ANY, copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_pipes_in_place_of_files(copy: Path, name: str) -> None:
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with pytest.raises(UserError, match=f"{copy}: '{name}' is a device or a pipe; it must be a regular file"):
        load(ANY, copy)


def test_the_cache_of_hugging_face(copy: Path, tmp_path: Path) -> None:
    """Its files are links."""
    blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "1a2b"
    shutil.copytree(copy, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    jax.tree.map(np.testing.assert_array_equal, load(ANY, snapshot)[1], load(ANY)[1])


def test_sizes_of_the_config_that_contradict() -> None:
    with pytest.raises(UserError, match=r"config.model.num_layers is 4, but .*config.json has num_hidden_layers 2"):
        load(ANY, num_layers=4)
    with pytest.raises(UserError, match=r"config.model.name is 'gpt', but .*'bert' model; set config.model.name=bert"):
        load("gpt_causal_lm", REFERENCE / ANY)
    with pytest.raises(UserError, match=r"num_applications is 2, which Hugging Face models do not have"):
        load(ANY, num_applications=2)


@pytest.mark.parametrize(
    ("name", "task", "overrides", "words"),
    [
        ("gpt", "causal_lm", {**LLAMA, "norm": "layernorm"}, "positions is 'rotary', .* gpt2 .* must be 'learned'$"),
        ("gpt", "causal_lm", {**LLAMA, "activation": "relu"}, "activation is 'relu', .* llama .* must be 'swiglu'$"),
        ("gpt", "causal_lm", {"num_heads": 4, "num_kv_heads": 2}, "config.model.num_kv_heads is 2; it must equal"),
        (
            "gpt",
            "causal_lm",
            {"activation": "swiglu"},
            "activation is 'swiglu'.*; it must be 'gelu' or 'gelu_tanh' or 'relu'$",
        ),
        ("gpt", "causal_lm", {"positions": "rotary"}, "config.model.positions is 'rotary'.*; it must be 'learned'$"),
        ("gpt", "causal_lm", {"head_dim": 6}, "config.model.head_dim is 6; it must be hidden_size / num_heads"),
        ("gpt", "causal_lm", {"tied_embeddings": False}, "config.model.tied_embeddings is False; it must be None"),
        ("gpt", "causal_lm", {"norm": "rmsnorm"}, "config.model.positions is 'learned'.*; it must be 'rotary'$"),
        ("mlp", "classification", {}, "config.model.name is 'mlp'; .* it must be one of bert, gpt"),
        ("bert", "classification", {"num_applications": 2}, "num_applications is 2, which Hugging Face models do not"),
        ("gpt", "causal_lm", {"bottlenecks": "block_1"}, "bottlenecks is 'block_1', which Hugging Face models do not"),
    ],
)
def test_models_that_transformers_lacks(
    name: str, task: str, overrides: dict[str, Any], words: str, tmp_path: Path, tokenizer: Path
) -> None:
    config = small_config(name, task, **overrides)
    with pytest.raises(UserError, match=words):
        export({}, config, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_is_refused_creates_nothing(tmp_path: Path, tokenizer: Path) -> None:
    _, params, config = load(ANY)
    with pytest.raises(UserError, match=r"missing.json does not exist; an export needs the tokenizer of the run"):
        export(params, config, tmp_path / "missing.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/out'; it must be in an existing directory, and '.*/file' is not one"):
        export(params, config, tokenizer, tmp_path / "file" / "out")


def test_export_overwrites_nothing(tmp_path: Path, tokenizer: Path) -> None:
    _, params, config = load(ANY)
    with pytest.raises(UserError, match=r"--output is '.*', which exists; it must be a new directory"):
        export(params, config, tokenizer, tmp_path)


DATA_JSON = {
    None: "data.json cannot be read (No such file or directory); it must be the file that the run wrote",
    "[]": "data.json is damaged (",
    "\xff": "data.json is damaged (it is not UTF-8); it must be the file that the run wrote",
    "[" * 100_000: "data.json is damaged (ValueError('nested more than 100 levels deep'))",
    "{}": "data.json is damaged (TypeError(",
    '{"kind": "text", "input_shape": [10], "num_classes": "3", "class_names": [], "vocab_size": 40, "pad_id": 0}': (
        "data.json is damaged (TypeError(\"num_classes is '3'\"))"
    ),
    '{"kind": "text", "input_shape": [10], "num_classes": 3, "class_names": "xyz", "vocab_size": 40, "pad_id": 0}': (
        "data.json is damaged (TypeError(\"class_names is 'xyz'\"))"
    ),
}


@pytest.mark.parametrize("text", DATA_JSON)
def test_an_export_of_a_damaged_run(
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of(ANY)
    saved = checkpoint.Checkpoint(0, {"params": {}}, {}, {"config": configs.keys(config)})
    monkeypatch.setattr(checkpoint, "of_run", lambda *_arguments, **_options: saved)
    if text is not None:
        (tmp_path / "data.json").write_text(text, encoding="latin-1")
    arguments = [f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}", "--format=hf"]
    _, message = script_error(monkeypatch, capsys, command, *arguments)
    assert DATA_JSON[text] in message
    assert not (tmp_path / "out").exists()


def test_an_export_with_a_damaged_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    _, params, config = load(ANY)
    tokenizer.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer.json is not a tokenizer.json or vocab.txt in Hugging Face format"):
        export(params, config, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_properties_of_the_data_read_back_equal(tmp_path: Path) -> None:
    info = DataInfo("text", (10,), 2, ("no", "yes"), 40, 3, ("stars",))
    write_info(tmp_path, info)
    assert read_info(tmp_path) == info
