"""Models by name: `build` finds the model's module and calls it to create the sequence of layers."""

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.data import DataInfo
from jaxpar.errors import UserError, check_choice, format_count, nearest
from jaxpar.models.model import Batch, Context, Model, Params, Tie
from jaxpar.models.options import OVERRIDES, check_attention, decide_computation
from jaxpar.models.remat import REMAT_POLICIES

__all__ = ["MODELS", "Batch", "Context", "Model", "Params", "Tie", "build", "check_model", "describe_model"]

# The models, each with the smallest data set that it can be built for.
MODELS = {
    "bert": DataInfo("text", (1,), 1, ("",), 1, 0),
    "gpt": DataInfo("text", (1,), 1, ("",), 1, 0),
    "resnet": DataInfo("image", (1, 1, 1), 1, ("",), 0, 0),
    "mlp": DataInfo("vector", (1,), 1, ("",), 0, 0),
    "vit": DataInfo("image", (0, 0, 1), 1, ("",), 0, 0),  # size 0 is divisible by every patch size
}
DTYPES = ("float32", "bfloat16", "float16")


def check_model(config: ConfigDict, cluster: Cluster) -> Model | None:
    """Check config.model as far as possible without data.

    Returns the model for the smallest possible data set; the names of its layers do not depend on the data. Returns
    None for a user-defined model. Raises UserError if config.model or config.task is invalid for every data set.
    """
    if config.model.name in MODELS:
        return build(config, MODELS[config.model.name], cluster)  # abstract: allocates no arrays
    _check_choices(config)
    _module(config.model.name)
    return None


def build(config: ConfigDict, info: DataInfo, cluster: Cluster) -> Model:
    """Build the model of config.model and config.task for a data set. Allocates no arrays.

    config.model.name is one of MODELS or the name of a user's module, which must contain a dot and be on PYTHONPATH.
    Either module has a function `build(config, info) -> Model`. Raises UserError if the name is unknown, or options are
    incompatible with each other, the task or the data.
    """
    _check_choices(config)
    name = config.model.name
    model = _module(name).build(decide_computation(config, cluster), info)
    check_attention(config, cluster)  # last, because the model's own errors do not depend on the cluster
    if not isinstance(model, Model):
        what = f"{name!r}, whose function build returned {type(model).__name__}"
        raise UserError(f"config.model.name is {what}; it must return a jaxpar.models.Model")
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
        if leaf.dtype != jnp.float32:
            what = f"{name!r}, whose parameter {jax.tree_util.keystr(path)} is {leaf.dtype}"
            how = "(layers can cast their parameters to the dtype of the computation)"
            raise UserError(f"config.model.name is {what}; it must be float32 {how}")
    return model


def num_parameters(model: Model) -> int:
    """Return the number of parameters of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.shapes))


def describe_model(config: ConfigDict, model: Model, batch: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> str:
    """Return what is trained, in one line: the model, the keys that override its size, and the shape of a batch.

    batch: a batch of the longest examples, or its shapes.
    """
    name, size, first = config.model.name, config.model.size, model.layers[0]
    words, inputs = [], batch["inputs"]
    if name in MODELS:
        of_size = _module(name).SIZES[size]
        changed = {key: config.model[key] for key in OVERRIDES if config.model[key] is not None}
        values = of_size | changed
        others = [key for key, value in changed.items() if of_size.get(key, value) != value]
        name += f" from {config.model.init_from}" if config.model.init_from else f" of size {size}"
        if others and not config.model.init_from:
            listed = ", ".join(f"{key}={changed[key]}" for key in others)
            name += f", but config.model has {listed} (not {', '.join(f'{of_size[key]}' for key in others)})"
        words = [f"width {values['hidden_size']:,}"]
        words += [format_count(values["num_heads"], "head")] if "num_heads" in values else []
        words += [f"vocabulary {first.shapes['tokens'].shape[0]:,}"] if "tokens" in first.shapes else []
    if inputs.ndim == 2 and jnp.issubdtype(inputs.dtype, jnp.integer):
        words.append(f"batches of {inputs.shape[0]:,} x {inputs.shape[1]:,} tokens")
    names = [layer.name for layer in model.layers]
    layers = ", ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-2]}, {names[-1]}"
    size = f"{num_parameters(model):,} parameters, {config.model.dtype}"
    return "; ".join(filter(None, (f"{name}, layers {layers}", size, ", ".join(words))))


def _check_choices(config: ConfigDict) -> None:
    check_choice("model.dtype", config.model.dtype, DTYPES)
    check_choice("model.remat", config.model.remat, ("none", *REMAT_POLICIES))
    check_choice("model.attention", config.model.attention, ("auto", "xla", "batched", "cudnn"))
    for key in ("scan_layers", "flatten_positions", "recompute_activations"):
        if config.model[key] not in ("auto", True, False):
            raise UserError(f"config.model.{key} is {config.model[key]!r}; it must be True, False or 'auto'")


def _module(name: str) -> ModuleType:
    if name in MODELS:
        return importlib.import_module(f"jaxpar.models.{name}")
    known = ", ".join(MODELS)
    if "." not in name:
        hint = nearest(name, MODELS)
        own = f"the dotted name of your own module, such as my_package.my_model{hint and '.' + hint}"
        raise UserError(f"config.model.name is {name!r}; it must be one of {known}, or {own}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"config.model.name is {name!r}; it must be one of {known}, or a dotted module name")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If the user's module exists but imports a missing one, the traceback must show where.
        if error.name is None or not name.startswith(error.name):
            raise
        what = f"{name!r}, but PYTHONPATH contains no module {error.name!r}"
        raise UserError(f"config.model.name is {what}; it must be one of {known}, or your own module") from error
    try:
        inspect.signature(module.build).bind(None, None)  # of a function of two arguments
    except (AttributeError, TypeError, ValueError):
        what = f"{name!r}, but {module.__file__} has no function build(config, info)"
        raise UserError(f"config.model.name is {what}") from None
    return module
