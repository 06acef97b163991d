"""Small models and batches for the tests of jaxpar.models."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxpar.cluster import named_cluster
from jaxpar.config import default_config
from jaxpar.data import DataInfo
from jaxpar.models import MODELS, Model, build

CPU = named_cluster("cpu", 1)
VOCAB, CLASSES, LENGTH, BATCH = 50, 5, 12, 4
TEXT = DataInfo("text", (LENGTH,), CLASSES, tuple("abcde"), VOCAB, 0)
IMAGE = DataInfo("image", (8, 8, 3), CLASSES, tuple("abcde"), 0, 0)
VECTOR = DataInfo("vector", (6,), CLASSES, tuple("abcde"), 0, 0)

SMALL: dict[str, dict[str, Any]] = {
    "bert": {"size": "tiny", "num_layers": 3, "hidden_size": 16, "num_heads": 2},
    "gpt": {"size": "tiny", "num_layers": 3, "hidden_size": 16, "num_heads": 2},
    "resnet": {"size": "18", "hidden_size": 32},
    "vit": {"size": "tiny", "num_layers": 3, "hidden_size": 12, "num_heads": 3, "patch_size": 4},
    "mlp": {"size": "tiny", "num_layers": 3, "hidden_size": 16},
}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "num_heads": 4, "num_kv_heads": 2}


def small_config(name: str, task: str, **overrides: Any) -> ConfigDict:
    """Return the default config with a small model."""
    config = default_config()
    config.task = task
    config.model.name = name
    config.model.update({**SMALL.get(name, {}), **overrides})
    return config


def kind_of(name: str) -> str:
    """Return the kind of data that a model reads, or text for a model that does not exist."""
    return MODELS[name].kind if name in MODELS else "text"


def info_of(name: str, task: str) -> DataInfo:
    """Return the DataInfo of the batches of `make_batch`."""
    info = {"text": TEXT, "image": IMAGE, "vector": VECTOR}[kind_of(name)]
    return info if task == "classification" else info._replace(num_classes=0)


def make_batch(name: str, task: str, *, seed: int = 0) -> dict[str, Any]:
    """Return random inputs. Texts have 12, 7, 1 and 10 real tokens, except for causal_lm."""
    random = np.random.default_rng(seed)
    if kind_of(name) == "image":
        return {"inputs": random.integers(0, 256, (BATCH, 8, 8, 3), np.uint8)}
    if kind_of(name) == "vector":
        return {"inputs": random.normal(size=(BATCH, 6)).astype(np.float32)}
    batch: dict[str, Any] = {"inputs": random.integers(1, VOCAB, (BATCH, LENGTH), np.int32)}
    if task != "causal_lm":
        batch["mask"] = np.arange(LENGTH)[None, :] < np.array([12, 7, 1, 10])[:, None]
        batch["inputs"] *= batch["mask"]
    return batch


def make_params(model: Model) -> Any:
    """Return random parameters larger than initial ones, with which many mistakes would not be noticed."""
    random = np.random.default_rng(1)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        start = 1.0 if path[-1].key == "scale" else 0.0
        return (start + 0.2 * random.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def small(name: str, task: str, **overrides: Any) -> tuple[Model, Any, dict[str, Any]]:
    """Return a small model with parameters and a batch. `overrides` are keys of config.model."""
    model = build(small_config(name, task, **overrides), info_of(name, task), CPU)
    return model, make_params(model), make_batch(name, task)


def fast_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit a function with little compilation time."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def dropout_keys(step: int = 3) -> jax.Array:
    """Return one dropout key per example."""
    key = jax.random.fold_in(jax.random.key(7), step)
    return jnp.stack([jax.random.fold_in(key, i) for i in range(BATCH)])
