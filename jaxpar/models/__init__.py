"""Models by name: `build` finds the module, which makes the ordered sequence of layers."""

import importlib
from types import ModuleType

from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.data import DataInfo
from jaxpar.errors import UserError, check_choice, nearest
from jaxpar.models.model import REMAT_POLICIES, Batch, Context, LayerRun, Model, Params, Tie
from jaxpar.models.options import check_attention, with_attention_of

__all__ = ["MODELS", "Batch", "Context", "LayerRun", "Model", "Params", "Tie", "build", "check_model"]

# The models there are, with the least data that each can be built for.
MODELS = {
    "bert": DataInfo("text", (1,), 1, ("",), 1, 0),
    "gpt": DataInfo("text", (1,), 1, ("",), 1, 0),
    "resnet": DataInfo("image", (1, 1, 1), 1, ("",), 0, 0),
    "mlp": DataInfo("vector", (1,), 1, ("",), 0, 0),
    "vit": DataInfo("image", (0, 0, 1), 1, ("",), 0, 0),  # a size that every patch divides
}
DTYPES = ("float32", "bfloat16")


def check_model(config: ConfigDict, cluster: Cluster) -> Model | None:
    """Return the model for the least data, whose layers have the names that they have for any; None for a user's own.

    Args:
      config: of the run.
      cluster: that the model is to run on.

    Raises:
      UserError: something is wrong with config.model or config.task whatever the data.
    """
    if config.model.name in MODELS:
        return build(config, MODELS[config.model.name], cluster)  # abstract: no array is made
    _check_choices(config)
    _module(config.model.name)
    return None


def build(config: ConfigDict, info: DataInfo, cluster: Cluster) -> Model:
    """Build the model that config.model and config.task say, for this data. Makes no array.

    config.model.name is one of MODELS, or a module of the user's (with a dot in its name, on
    PYTHONPATH): both have `build(config, info) -> Model`.

    Args:
      config: of the run.
      info: what a model must know of the data.
      cluster: that the model is to run on.

    Raises:
      UserError: an unknown name, or options that do not fit each other, the task or the data.
    """
    _check_choices(config)
    name = config.model.name
    model = _module(name).build(with_attention_of(config, cluster), info)
    check_attention(config, cluster)  # after what the model says of the config, which holds on any cluster
    if not isinstance(model, Model):
        raise UserError(
            f"config.model.name is {name!r}, whose build returned a {type(model).__name__}; "
            "it must return a jaxpar.models.Model."
        )
    return model


def _check_choices(config: ConfigDict) -> None:
    check_choice("model.dtype", config.model.dtype, DTYPES)
    check_choice("model.remat", config.model.remat, ("none", *REMAT_POLICIES))
    check_choice("model.attention", config.model.attention, ("auto", "xla", "cudnn"))


def _module(name: str) -> ModuleType:
    if name in MODELS:
        return importlib.import_module(f"jaxpar.models.{name}")
    return _import_from_path(name)


def _import_from_path(name: str) -> ModuleType:
    if "." not in name:
        raise UserError(
            f"config.model.name is {name!r}; it must be {', '.join(MODELS)}, or a module of yours with a dot "
            f"in its name, such as my_package.my_model.{nearest(name, MODELS)}"
        )
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that is there but imports a missing one is the user's bug: show where.
        if error.name is None or not name.startswith(error.name):
            raise
        raise UserError(
            f"config.model.name is {name!r}, but there is no module {error.name!r} on PYTHONPATH; "
            f"it must be {', '.join(MODELS)}, or a module of yours."
        ) from error
    if not hasattr(module, "build"):
        raise UserError(f"config.model.name is {name!r}, but {module.__file__} has no function build(config, info).")
    return module
