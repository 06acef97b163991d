"""Reads weights from Hugging Face `transformers` directories; jaxpar/use/export writes them.

A directory contains config.json, model.safetensors (or several files with an index) and a tokenizer. The weights are
the same numbers in both formats, so the logits agree to float32 rounding. `id2label` and `problem_type` of config.json
give the outputs of a classifier their meaning.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from safetensors import SafetensorError, safe_open

from jaxpar.data import DataInfo
from jaxpar.errors import UserError
from jaxpar.files import file_of, parse_json, path_state
from jaxpar.models import gpt
from jaxpar.models.hf_families import FAMILIES, Family, rope_options, sliding_window
from jaxpar.models.model import Model, Params

Settings = Mapping[str, Any]  # the contents of a config.json, with the defaults of the family
PROBLEMS = ("regression", "single_label_classification")
UNNAMED = re.compile(r"LABEL_\d+")  # the names that `transformers` gives to classes without names
FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes of safetensors that hold weights as they are


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# What the values of `Family.varied` must be.
VALID: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "norm_eps": ("a number, greater than 0 and less than 1", lambda x: type(x) in (int, float) and 0 < x < 1),
    "tied_embeddings": ("true or false", lambda x: isinstance(x, bool)),
    "head_dim": ("a positive integer", lambda x: x is None or _is_size(x)),
}


def apply_directory(config: ConfigDict) -> None:
    """Set the sizes in config.model to the sizes of the model in directory config.model.init_from.

    A dropout rate set in the config has priority over the directory's. Raises UserError if the directory does not
    exist, the kind of model is unsupported, or a size conflicts with the config.
    """
    check_blocks(config)
    path, family, settings = _read_config(Path(config.model.init_from).expanduser())
    if config.model.name != family.model:
        what = f"{config.model.name!r}, but {path} describes a {family.model!r} model"
        raise UserError(f"config.model.name is {what}; set config.model.name={family.model}")
    for key, option in _options(family, settings, path, config.task).items():
        if config.model[key] not in (None, option):
            what = f"{config.model[key]!r}, but {path} describes a model with {option!r}"
            raise UserError(f"config.model.{key} is {what}; do not set config.model.{key}")
        if gpt.LM_DEFAULTS[key] != option:
            config.model[key] = option
    longest = sliding_window(settings)
    if longest is not None and config.data.max_length > longest:
        raise UserError(
            f"config.data.max_length is {config.data.max_length}; it must be at most {longest}, the sliding_window in "
            f"{path}, because models here attend to all earlier tokens"
        )
    if "dropout" not in family.keys and config.model.dropout is None:
        config.model.dropout = 0.0
    for key, name in family.keys.items():
        value: Any = settings[name]
        if key == "activation":
            value = {name: ours for ours, name in family.activations.items()}[value]
        if key == "dropout" and config.model.dropout is None:
            others = {other: settings.get(other, default) for other, default in family.rates.items()}
            if other := next((other for other, rate in others.items() if rate not in (None, value)), None):
                raise UserError(
                    f"{path} has {name} {value!r} and {other} {others[other]!r}; they must be equal, because a model "
                    "here has one dropout rate, or config.model.dropout must be set"
                )
        if config.model[key] is None:
            config.model[key] = value
        elif config.model[key] != value and key != "dropout":
            what = f"{config.model[key]!r}, but {path} has {name} {value!r}"
            raise UserError(f"config.model.{key} is {what}; do not set config.model.{key}")


def longest_text(directory: Path) -> int:
    """Return the length of the longest text of the model in a directory. Raises UserError if it has none."""
    path, family, settings = _read_config(directory)
    name = family.keys.get("max_length", "max_position_embeddings")
    if not _is_size(settings.get(name)):
        raise UserError(f"{path} has {name} {settings.get(name)!r:.60}; it must be a positive integer")
    return min(settings[name], sliding_window(settings) or settings[name])


def _options(family: Family, settings: Settings, path: Path, task: str) -> dict[str, Any]:
    """Return the keys of config.model that have defaults here, with the values that the model in a directory has."""
    options: dict[str, Any] = {**family.options}
    for key, name in family.varied.items():
        options[key] = settings.get(name, gpt.LM_DEFAULTS[key])
        rule, is_valid = VALID[key]
        if not is_valid(options[key]):
            raise UserError(f"{path} has {name} {options[key]!r:.60}; it must be {rule}")
    if task != "causal_lm":
        options.pop("tied_embeddings", None)
    sizes = [settings[family.keys[key]] for key in ("hidden_size", "num_heads")]
    if options.get("head_dim") == sizes[0] / sizes[1]:
        options["head_dim"] = None
    if options.get("positions") == "rotary":
        try:
            options |= rope_options(settings)
        except ValueError as error:
            raise UserError(
                f"config.model.init_from is {str(path.parent)!r}, whose rotary positions have {error} in config.json; "
                "it must be a model with positions as in docs/howto/pretrained.md"
            ) from error
    return options


def check_blocks(config: ConfigDict) -> None:
    """Raise UserError if config.model has repeated or extra layers, which no Hugging Face model has."""
    for key in ("num_applications", "bottlenecks"):
        if config.model[key] not in (None, 1):
            what = f"{config.model[key]!r}, which Hugging Face models do not have"
            raise UserError(f"config.model.{key} is {what}; it must be None")


def _read_config(directory: Path) -> tuple[Path, Family, Settings]:
    """Return the path of config.json, the family and the settings.

    Raises UserError if the file is missing or damaged, or the model is not supported exactly.
    """
    if not directory.is_dir():
        what = f"{str(directory)!r}, which {path_state(directory)}"
        raise UserError(f"config.model.init_from is {what}; it must be a model directory (docs/howto/pretrained.md)")
    path = file_of(directory, "config.json")
    given = f"config.model.init_from is {str(path.parent)!r}"
    if not path.is_file():
        raise UserError(f"{given}; it must be a directory that contains config.json")
    try:
        theirs = parse_json(path.read_text())
        kind = theirs["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the config.json of a model: {error!r}") from error
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{given} with model_type {kind!r:.60}; it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    settings = {**family.defaults, **theirs}
    for name, state in (("quantization_config", "quantized"), ("pruned_heads", "pruned")):
        if settings.get(name):
            raise UserError(f"{given} with {name} in config.json; it must be a model that is not {state}")
    problem, names = settings.get("problem_type"), settings.get("id2label")
    if problem is not None and problem not in PROBLEMS:
        why = ", because no task here has several labels per example" * (problem == "multi_label_classification")
        possible = " or ".join(PROBLEMS)
        raise UserError(f"{given} with problem_type {problem!r} in config.json; it must be {possible}{why}")
    is_named = isinstance(names, dict) and names.keys() == {str(index) for index in range(len(names))}
    if names is not None and not (is_named and all(isinstance(name, str) for name in names.values())):
        rule = 'the name of each class by number: {"0": "no"}'
        raise UserError(f"{path} has id2label {names!r:.60}; it must be {rule}")
    if missing := [name for name in family.keys.values() if name not in settings]:
        raise UserError(f"{path} lacks {', '.join(missing)}; it must be the config.json of a {kind} model")
    for key, name in family.keys.items():
        value = settings[name]
        if key == "dropout" and not (isinstance(value, int | float) and 0 <= value < 1):
            raise UserError(f"{path} has {name} {value!r}; it must be a number, at least 0 and less than 1")
        is_default = name in family.defaults and value is None
        if key not in ("dropout", "activation") and not _is_size(value) and not is_default:
            raise UserError(f"{path} has {name} {value!r}; it must be a positive integer")
    accepted: dict[str, list[Any]] = {name: [value] for name, value in family.fixed.items()}
    accepted[family.keys["activation"]] = list(family.activations.values())
    for name, values in accepted.items():
        if name in settings and settings[name] not in values:
            rule = f"{'one of ' * (len(values) > 1)}{', '.join(map(repr, values))}"
            raise UserError(f"{given} with {name} {settings[name]!r:.80} in config.json; it must be {rule}")
    window = sliding_window(settings)
    if window is not None and not _is_size(window):
        raise UserError(f"{path} has sliding_window {window!r:.60}; it must be a positive integer")
    return path, family, settings


def load_params(
    model: Model, params: Params, directory: Path, info: DataInfo, log: Callable[[str], None] = print
) -> Params:
    """Return `params`, initial parameters or their shapes, with the arrays in the directory in place of them, in NumPy.

    Heads that the directory lacks, and a classifier of other classes, stay as in `params`. A classifier of the same
    classes in another order is reordered. The model is built from a config processed by `apply_directory`. `log` is
    called with one line: the directory, the parameters that stay, and the dropout rate that is not applied.

    Raises UserError if a file or tensor is missing or damaged, or a tensor has the wrong shape or is not finite.
    """
    _, family, settings = _read_config(directory)
    order = _output_order(settings, info)
    sources = _find_tensors(directory)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in sources) else ""
    flat = flatten_dict(params, sep=".")
    fresh = []
    for tensor in family.tensors(len(model.layers) - 2):
        if tensor.keys[0] not in flat:  # belongs to the head of another task
            continue
        name = prefix * tensor.prefixed + tensor.name
        if name not in sources and not tensor.head:
            raise UserError(f"{directory} has no tensor {name}; its files do not match its config.json")
        arrays = tensor.to_ours(_read_tensor(*sources[name])) if name in sources else []
        shapes = [(key, np.shape(flat[key]), array.shape) for key, array in zip(tensor.keys, arrays, strict=False)]
        wrong = [f"{key} {there}, but the model has {here}" for key, here, there in shapes if here != there]
        is_classifier = tensor.keys[0].startswith("head.classifier")
        if not arrays or (is_classifier and (wrong or order is None)):
            fresh.append(tensor.keys[0])
            continue
        where = f"{sources[name][0]}: tensor {name}"
        if wrong:
            raise UserError(f"{where} has the wrong shape: {'; '.join(wrong)}")
        if not all(np.isfinite(array).all() for array in arrays):
            raise UserError(f"{where} has values that are not finite in float32; they must be finite")
        arrays = [array[..., order] for array in arrays] if is_classifier else arrays
        flat |= dict(zip(tensor.keys, arrays, strict=True))
    rate = settings[family.unapplied]
    notes = [f"newly initialized: {', '.join(fresh)}"] if fresh else []
    notes += [f"{family.unapplied} {rate!r:.60} is not applied"] if rate else []
    log("; ".join([f"init      from {directory}", *notes]))
    return unflatten_dict(flat, sep=".")


def _output_order(settings: Settings, info: DataInfo) -> Sequence[int] | None:
    """Return the output of the directory's classifier for each output of a model of this data set.

    Class names that are the numbers 0 to n - 1 select outputs by number. Without names, the order is the same. None if
    the classifier has other classes, or predicts numbers in place of classes or classes in place of numbers.
    """
    problem, ours, names = settings.get("problem_type"), info.targets or info.class_names, settings.get("id2label", {})
    if problem is not None and (problem == "regression") != bool(info.targets):
        return None
    theirs = [names[str(index)] for index in range(len(names))]
    if len(theirs) != len(ours):
        return range(len(ours))  # the shapes decide
    if set(theirs) == set(ours):
        return [theirs.index(name) for name in ours]
    if set(ours) == {str(index) for index in range(len(ours))}:
        return [int(name) for name in ours]
    return range(len(ours)) if all(map(UNNAMED.fullmatch, theirs)) else None


def _find_tensors(directory: Path) -> dict[str, tuple[Path, str]]:
    """Return the file of each tensor of a directory, and its name there, by its current name.

    Files from before 2019 use gamma and beta for the weight and bias of LayerNorm. Raises UserError if a file is
    missing or damaged.
    """
    single, index = (file_of(directory, name) for name in ("model.safetensors", "model.safetensors.index.json"))
    if single.is_file():
        paths = [single]
    elif index.is_file():
        try:
            names = sorted(set(parse_json(index.read_text())["weight_map"].values()))
            paths = [file_of(directory, name) for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is not an index of safetensors files: {error!r}") from error
    else:
        hint = "; convert pytorch_model.bin by loading it in transformers and calling save_pretrained"
        hint *= (directory / "pytorch_model.bin").is_file()
        raise UserError(f"config.model.init_from is {str(directory)!r}; it must contain model.safetensors{hint}")
    sources = {}
    for path in paths:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                today = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
                sources[today] = path, name
    return sources


def _read_tensor(path: Path, name: str) -> np.ndarray:
    """Return the array of a tensor. Raises UserError if the file is truncated, or the tensor is quantized."""
    with _opened(path) as file:
        dtype = str(file.get_slice(name).get_dtype())
        if dtype not in FLOATS:
            raise UserError(f"{path}: tensor {name} has dtype {dtype!r}; it must be one of {', '.join(FLOATS)}")
        array: np.ndarray = file.get_tensor(name)
        return array


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is missing, truncated or not a safetensors file: {error}") from error
