"""Tests that `build` creates the published sizes, and that it rejects invalid configs with one clear line."""

import math
from typing import Any

import jax
import pytest

from jaxpar import config as configs
from jaxpar.data import DataInfo
from jaxpar.errors import UserError
from jaxpar.models import MODELS, bert, build, check_model, describe_model, gpt
from tests.models.small import CPU, IMAGE, TEXT, VECTOR, info_of, small_config


def num_params(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def shapes_of(name: str, size: str, task: str, info: DataInfo, **overrides: Any) -> Any:
    config = small_config(name, task)
    with config.unlocked():
        for key in ("num_layers", "hidden_size", "num_heads"):
            config.model[key] = None
    config.model.update({"size": size, **overrides})
    return jax.eval_shape(build(config, info, CPU).init, jax.random.key(0))


# Number of parameters of the encoder with pooler, from https://github.com/google-research/bert and `transformers`.
BERT_PARAMS = {
    "tiny": 4_385_920,
    "mini": 11_170_560,
    "small": 28_763_648,
    "base": 109_482_240,
    "large": 335_141_888,
}
GPT_PARAMS = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}
# Llama 3.2 1B has 1,235,814,400 parameters. Llama 3 8B has 8,030,261,248, of which the head is not tied here.
LLAMA_PARAMS = {"llama_1b": 1_235_814_400, "llama_8b": 8_030_261_248 - 128_256 * 4096}


@pytest.mark.parametrize("size", bert.SIZES)
def test_bert_sizes(size: str) -> None:
    shapes = shapes_of("bert", size, "classification", TEXT, vocab_size=30522, max_length=512)
    assert num_params(shapes) - num_params(shapes["head"]["classifier"]) == BERT_PARAMS[size]


@pytest.mark.parametrize("size", GPT_PARAMS)
def test_gpt_sizes(size: str) -> None:
    assert set(gpt.SIZES) == {"tiny", *GPT_PARAMS, *LLAMA_PARAMS}
    shapes = shapes_of("gpt", size, "causal_lm", TEXT, vocab_size=50257, max_length=1024)
    assert num_params(shapes) == GPT_PARAMS[size]


@pytest.mark.parametrize("size", LLAMA_PARAMS)
def test_llama_sizes(size: str) -> None:
    assert num_params(shapes_of("gpt", size, "causal_lm", TEXT, vocab_size=128_256)) == LLAMA_PARAMS[size]


def test_the_description_of_a_model() -> None:
    """The line names the keys that override the size, which the config of a small model sets."""
    config, tokens = configs.load_config("configs/gpt_wordnet.py"), jax.ShapeDtypeStruct((8, 1024), "int32")
    configs.override(config, ["--config.model.size=gpt2_xl", "--config.model.max_length=1024"])
    line = describe_model(config, build(config, TEXT._replace(vocab_size=50257), CPU), {"inputs": tokens})
    assert line.startswith("gpt of size gpt2_xl, but config.model has num_layers=4 (not 48), layers embed .. block_3, ")
    assert line.endswith("float32; width 1,600, 25 heads, vocabulary 50,257, batches of 8 x 1,024 tokens")
    config.model.num_layers = None
    line = describe_model(config, build(config, TEXT._replace(vocab_size=50257), CPU), {"inputs": tokens})
    assert line.startswith("gpt of size gpt2_xl, layers embed .. block_47, head; 1,557,611,200 parameters, float32; ")


@pytest.mark.parametrize(("size", "count"), [("18", 11_689_512), ("50", 25_557_032)])
def test_resnet_sizes(size: str, count: int) -> None:
    info = IMAGE._replace(input_shape=(224, 224, 3), num_classes=1000)
    assert num_params(shapes_of("resnet", size, "classification", info)) == count


def test_resnet_keeps_small_images_large() -> None:
    for size, spatial in ((32, 32), (224, 56)):
        info = IMAGE._replace(input_shape=(size, size, 3))
        model = build(small_config("resnet", "classification"), info, CPU)
        params = jax.eval_shape(model.init, jax.random.key(0))
        images = jax.ShapeDtypeStruct((2, size, size, 3), "uint8")
        stem = jax.eval_shape(lambda p, x, m=model: m.apply_layers(p, x, {}, None, 0, 1), params, images)
        last = jax.eval_shape(lambda p, x, m=model: m.apply_layers(p, x, {}, None, 0, 9), params, images)
        assert (stem.shape, last.shape) == ((2, spatial, spatial, 32), (2, spatial // 8, spatial // 8, 256))


ONE = {"bert": "classification", "gpt": "causal_lm", "resnet": "classification", "mlp": "classification"}


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("bert", {"size": "bass"}, ["config.model.size is 'bass'", "tiny, mini, small, base, large", "mean 'base'"]),
        ("bert", {"hidden_size": 30, "num_heads": 4}, ["hidden_size is 30", "num_heads (4)"]),
        ("gpt", {"num_heads": 4, "num_kv_heads": 3}, ["num_heads is 4", "num_kv_heads (3)"]),
        ("gpt", {"hidden_size": 12, "num_heads": 4, "positions": "rotary"}, ["12 / 4 = 3", "even"]),
        ("gpt", {"head_dim": 3, "positions": "rotary"}, ["head_dim is 3; it must be even"]),
        ("gpt", {"rope_base": 500.0}, ["rope_base is 500.0; it must be None", "positions is 'learned'"]),
        ("gpt", {"rope_base": 1.0, "positions": "rotary"}, ["rope_base is 1.0; it must be a number greater than 1"]),
        (
            "gpt",
            {"rope_scaling": "{", "positions": "rotary"},
            ["rope_scaling is '{' (", "it must be None or JSON like"],
        ),
        ("gpt", {"rope_scaling": "[]", "positions": "rotary"}, ["(rope_type must be linear or llama3); it must be"]),
        ("gpt", {"qkv_bias": True}, ["qkv_bias is True; it must be None with config.model.norm='layernorm'"]),
        ("gpt", {"norm_eps": 0.0}, ["norm_eps is 0.0; it must be greater than 0 and less than 1"]),
        ("bert", {"tied_embeddings": False}, ["tied_embeddings is False; it must be None with model 'bert'"]),
        ("gpt", {"positions": "rotary", "max_length": 64}, ["max_length is 64", "rotary"]),
        ("gpt", {"positions": "rotery"}, ["model.positions is 'rotery'", "mean 'rotary'"]),
        ("gpt", {"norm": "rms"}, ["model.norm is 'rms'", "layernorm, rmsnorm"]),
        ("gpt", {"activation": "swish"}, ["model.activation is 'swish'", "swiglu"]),
        ("gpt", {"pooling": "mean"}, ["model.pooling is 'mean'", "it must be None with model 'gpt'"]),
        ("bert", {"max_length": 8}, ["max_length is 8", "12"]),
        ("bert", {"vocab_size": 40}, ["vocab_size is 40", "at least 50"]),
        ("bert", {"num_layers": 0}, ["num_layers is 0", "at least 1"]),
        ("bert", {"dropout": 1.0}, ["dropout is 1.0", "less than 1"]),
        ("bert", {"norm": "rmsnorm"}, ["model.norm is 'rmsnorm'", "it must be None with model 'bert'", "activation"]),
        ("bert", {"activation": "swiglu"}, ["model.activation is 'swiglu'", "gelu, gelu_tanh, relu"]),
        ("bert", {"pooling": "max"}, ["model.pooling is 'max'", "cls, mean"]),
        ("bert", {"dtype": "bf16"}, ["model.dtype is 'bf16'", "float32, bfloat16"]),
        ("bert", {"remat": "dot"}, ["model.remat is 'dot'", "mean 'dots'"]),
        ("bert", {"scan_layers": "maybe"}, ["model.scan_layers is 'maybe'", "must be True, False or 'auto'"]),
        ("bert", {"scan_layers": "False"}, ["model.scan_layers is 'False'"]),
        ("bert", {"flatten_positions": "no"}, ["model.flatten_positions is 'no'", "True, False or 'auto'"]),
        ("bert", {"recompute_activations": "no"}, ["model.recompute_activations is 'no'", "True, False or 'auto'"]),
        ("bert", {"attention": "flash"}, ["model.attention is 'flash'", "auto, xla, batched, cudnn"]),
        ("bert", {"attention": "cudnn"}, ["float32, not bfloat16"]),
        ("bert", {"attention": "cudnn", "dtype": "bfloat16"}, ["NVIDIA GPU"]),
        ("resnet", {"size": "tiny"}, ["model.size is 'tiny'", "18, 50"]),
        ("resnet", {"hidden_size": 40}, ["hidden_size is 40", "32"]),
        ("resnet", {"positions": "rotary"}, ["model.positions", "it must be None with model 'resnet'"]),
        ("resnet", {"attention": "cudnn"}, ["model.attention is 'cudnn'", "resnet"]),
        ("mlp", {"num_heads": 2}, ["model.num_heads is 2", "it must be None with model 'mlp'"]),
        ("berd", {}, ["model.name is 'berd'", ", ".join(MODELS), "mean 'bert'"]),
        ("no.such.model", {}, ["no module 'no'", "PYTHONPATH"]),
        ("jaxpar.errors", {}, ["errors.py has no function build"]),
    ],
)
def test_mistakes(name: str, overrides: dict[str, Any], words: list[str]) -> None:
    task = ONE.get(name, "classification")
    config = small_config(name, task, **overrides)
    with pytest.raises(UserError) as caught:
        build(config, info_of(name, task), CPU)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    if not {"max_length", "vocab_size"} & overrides.keys() or "positions" in overrides:  # found without data
        with pytest.raises(UserError):
            check_model(config, CPU)


@pytest.mark.parametrize(
    ("name", "task", "info"),
    [
        ("bert", "causal_lm", TEXT),
        ("gpt", "masked_lm", TEXT),
        ("resnet", "causal_lm", IMAGE),
        ("mlp", "masked_lm", VECTOR),
        ("bert", "classification", IMAGE),
        ("resnet", "classification", TEXT),
        ("resnet", "classification", VECTOR),
        ("mlp", "classification", TEXT),
    ],
)
def test_pairs_that_make_no_sense(name: str, task: str, info: DataInfo) -> None:
    with pytest.raises(UserError, match=f"config.task is '{task}'|config.model.name='{name}'"):
        build(small_config(name, task), info, CPU)


def test_pooling_is_no_option_of_masked_lm() -> None:
    with pytest.raises(UserError, match=r"model.pooling is 'mean'.*for task 'masked_lm'"):
        build(small_config("bert", "masked_lm", pooling="mean"), TEXT, CPU)
