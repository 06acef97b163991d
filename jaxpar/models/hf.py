"""Reads weights from Hugging Face `transformers` directories; jaxpar/use/export writes them.

A directory contains config.json, model.safetensors (or several files with an index) and a tokenizer. The weights are
the same numbers in both formats, so the logits agree to float32 rounding. `id2label` and `problem_type` of config.json
give the outputs of a classifier their meaning.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from jaxpar.data import DataInfo
from jaxpar.errors import UserError
from jaxpar.files import file_of, parse_json, path_state
from jaxpar.models import gpt, hf_tensors
from jaxpar.models.hf_families import FAMILIES, Family, rope_options, sliding_window
from jaxpar.models.model import Model, Params

VALID = {  # what the values of `Family.varied` must be
    "norm_eps": "a number, greater than 0 and less than 1",
    "tied_embeddings": "true or false",
    "head_dim": "a positive integer",
}
PROBLEMS = ("regression", "single_label_classification")
UNNAMED = re.compile(r"LABEL_\d+")  # the names that `transformers` gives to classes without names


def apply_directory(config: ConfigDict) -> None:
    """Set the sizes in config.model to the sizes of the model in directory config.model.init_from.

    A dropout rate set in the config has priority over the directory's.

    Raises:
      UserError: the directory does not exist, the kind of model is unsupported, or a size conflicts with the config.
    """
    check_blocks(config)
    path, family, theirs = _read_config(Path(config.model.init_from).expanduser())
    if config.model.name != family.model:
        raise UserError(
            f"config.model.name is {config.model.name!r}, but {path} describes a {family.model!r} model; "
            f"set config.model.name={family.model}"
        )
    for key, option in _options(family, theirs, path, config.task).items():
        if config.model[key] is None and gpt.LM_DEFAULTS[key] != option:
            config.model[key] = option
        elif config.model[key] not in (None, option):
            raise UserError(
                f"config.model.{key} is {config.model[key]!r}, but {path} describes a model with {option!r}; "
                f"do not set config.model.{key}"
            )
    longest = sliding_window({**family.defaults, **theirs})
    if longest is not None and config.data.max_length > longest:
        raise UserError(
            f"config.data.max_length is {config.data.max_length}; it must be at most {longest}, the sliding_window in "
            f"{path}, because models here attend to all earlier tokens"
        )
    if "dropout" not in family.keys and config.model.dropout is None:
        config.model.dropout = 0.0
    for key, name in family.keys.items():
        value: Any = {**family.defaults, **theirs}[name]
        if key == "activation":
            value = {name: ours for ours, name in family.activations.items()}[value]
        if key == "dropout" and config.model.dropout is None:
            _check_other_rates(family, theirs, name, value, path)
        if config.model[key] is None:
            config.model[key] = value
        elif config.model[key] != value and key != "dropout":
            raise UserError(
                f"config.model.{key} is {config.model[key]!r}, but {path} has {name} {value!r}; "
                f"do not set config.model.{key}"
            )


def longest_text(directory: Path) -> int:
    """Return the length of the longest text of the model in a directory. Raises UserError if it has none."""
    path, family, theirs = _read_config(directory)
    settings = {**family.defaults, **theirs}
    name = family.keys.get("max_length", "max_position_embeddings")
    if not _is_size(settings.get(name)):
        raise UserError(f"{path} has {name} {settings.get(name)!r:.60}; it must be a positive integer")
    return min(settings[name], sliding_window(settings) or settings[name])


def _options(family: Family, theirs: Mapping[str, Any], path: Path, task: str) -> dict[str, Any]:
    """Return the keys of config.model that have defaults here, with the values that the model in a directory has."""
    settings = {**family.defaults, **theirs}
    options: dict[str, Any] = {**family.options}
    for key, name in family.varied.items():
        value: Any = settings.get(name, gpt.LM_DEFAULTS[key])
        is_valid = {
            "norm_eps": type(value) in (int, float) and 0 < value < 1,
            "tied_embeddings": isinstance(value, bool),
            "head_dim": value is None or _is_size(value),
        }
        if not is_valid[key]:
            raise UserError(f"{path} has {name} {value!r:.60}; it must be {VALID[key]}")
        options[key] = value
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
                "it must be a model with positions as in docs/models.md"
            ) from error
    return options


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_blocks(config: ConfigDict) -> None:
    """Raise UserError if config.model has repeated or extra layers, which no Hugging Face model has."""
    for key in ("num_applications", "bottlenecks"):
        if config.model[key] not in (None, 1):
            raise UserError(
                f"config.model.{key} is {config.model[key]!r}, which Hugging Face models do not have; it must be None"
            )


def _check_other_rates(family: Family, theirs: dict[str, Any], name: str, rate: float, path: Path) -> None:
    for other, default in family.rates.items():
        value = theirs.get(other, default)
        if value not in (None, rate):
            raise UserError(
                f"{path} has {name} {rate!r} and {other} {value!r}; they must be equal, because a model here "
                "has one dropout rate, or config.model.dropout must be set"
            )


def _read_config(directory: Path) -> tuple[Path, Family, dict[str, Any]]:
    """Return the path of config.json, the family and the contents.

    Raises:
      UserError: the file is missing or damaged, or the model is not supported exactly.
    """
    if not directory.is_dir():
        raise UserError(
            f"config.model.init_from is {str(directory)!r}, which {path_state(directory)}; it must be a model directory"
        )
    path = file_of(directory, "config.json")
    if not path.is_file():
        raise UserError(
            f"config.model.init_from is {str(path.parent)!r}; it must be a directory that contains config.json"
        )
    try:
        theirs = parse_json(path.read_text())
        kind = theirs["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the config.json of a model: {error!r}") from error
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"config.model.init_from is {str(path.parent)!r} with model_type {kind!r:.60}; it must be one of "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    for name in ("quantization_config", "pruned_heads"):
        if theirs.get(name):
            raise UserError(
                f"config.model.init_from is {str(path.parent)!r} with {name} in config.json; "
                f"it must be a model that is not {'quantized' if name == 'quantization_config' else 'pruned'}"
            )
    check_labels(theirs, path)
    missing = [name for name in family.keys.values() if name not in theirs and name not in family.defaults]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; it must be the config.json of a {kind} model")
    for key, name in family.keys.items():
        value = {**family.defaults, **theirs}[name]
        if key == "dropout" and not (isinstance(value, int | float) and 0 <= value < 1):
            raise UserError(f"{path} has {name} {value!r}; it must be a number, at least 0 and less than 1")
        if (
            key not in ("dropout", "activation")
            and not _is_size(value)
            and not (name in family.defaults and value is None)
        ):
            raise UserError(f"{path} has {name} {value!r}; it must be a positive integer")
    _check_fixed(family, {**family.defaults, **theirs}, path)
    window = sliding_window({**family.defaults, **theirs})
    if window is not None and not _is_size(window):
        raise UserError(f"{path} has sliding_window {window!r:.60}; it must be a positive integer")
    return path, family, theirs


def _check_fixed(family: Family, settings: Mapping[str, Any], path: Path) -> None:
    """Raise UserError if a setting has another value than the models here."""
    accepted = {name: [value] for name, value in family.fixed.items()}
    accepted[family.keys["activation"]] = list(family.activations.values())
    for name, values in accepted.items():
        if name in settings and settings[name] not in values:
            possible = [repr(value) for value in values if value is not None or len(values) == 1]
            raise UserError(
                f"config.model.init_from is {str(path.parent)!r} with {name} {settings[name]!r:.80} in config.json; "
                f"it must be {'one of ' * (len(possible) > 1)}{', '.join(possible)}"
            )


def load_params(
    model: Model, params: Params, directory: Path, info: DataInfo, log: Callable[[str], None] = print
) -> Params:
    """Return `params` with the arrays in the directory in place of the initial ones, as NumPy arrays.

    Heads that the directory lacks, and a classifier of other classes, stay as in `params`. A classifier of the same
    classes in another order is reordered.

    Args:
      model: the model, built from a config processed by `apply_directory`.
      params: initial parameters, which fill in for arrays that the directory lacks, or only their shapes.
      directory: the directory that config.model.init_from named.
      info: properties of the data set.
      log: called with one line that lists the directory, the parameters that keep their initial values, and the dropout
        rate that is not applied.

    Raises:
      UserError: a file or tensor is missing, a file is damaged, or a tensor has the wrong shape or is not finite.
    """
    _, family, theirs = _read_config(directory)
    order = output_order(theirs, info)
    sources = hf_tensors.find_tensors(directory)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in sources) else ""
    flat = flatten_dict(params, sep=".")
    fresh = []
    for tensor in family.tensors(len(model.layers) - 2):
        if tensor.keys[0] not in flat:  # belongs to the head of another task
            continue
        name = prefix * tensor.prefixed + tensor.name
        if name not in sources and not tensor.head:
            raise UserError(f"{directory} has no tensor {name}; its files do not match its config.json")
        arrays = tensor.to_ours(hf_tensors.read_tensor(sources[name])) if name in sources else []
        shapes = [(key, np.shape(flat[key]), array.shape) for key, array in zip(tensor.keys, arrays, strict=False)]
        wrong = [f"{key} {there}, but the model has {here}" for key, here, there in shapes if here != there]
        is_classifier = tensor.keys[0].startswith("head.classifier")
        if not arrays or (is_classifier and (wrong or order is None)):
            fresh.append(tensor.keys[0])
        elif wrong:
            raise UserError(f"{sources[name].path}: tensor {name} has the wrong shape: {'; '.join(wrong)}")
        elif not all(np.isfinite(array).all() for array in arrays):
            raise UserError(
                f"{sources[name].path}: tensor {name} has values that are not finite in float32; they must be finite"
            )
        else:
            arrays = [array[..., order] for array in arrays] if is_classifier else arrays
            flat |= dict(zip(tensor.keys, arrays, strict=True))
    rate = {**family.defaults, **theirs}[family.unapplied]
    notes = [f"newly initialized: {', '.join(fresh)}"] if fresh else []
    notes += [f"{family.unapplied} {rate!r:.60} is not applied"] if rate else []
    log("; ".join([f"init      from {directory}", *notes]))
    return unflatten_dict(flat, sep=".")


def check_labels(settings: Mapping[str, Any], path: Path) -> None:
    """Raise UserError if the labels in a config.json are invalid. path: of the file."""
    problem, names = settings.get("problem_type"), settings.get("id2label")
    if problem is not None and problem not in PROBLEMS:
        why = ", because no task here has several labels per example"
        raise UserError(
            f"config.model.init_from is {str(path.parent)!r} with problem_type {problem!r} in config.json; it must be "
            f"{' or '.join(PROBLEMS)}{why * (problem == 'multi_label_classification')}"
        )
    if names is None:
        return
    ids = {str(index) for index in range(len(names))} if isinstance(names, dict) else None
    if ids is None or names.keys() != ids or not all(isinstance(name, str) for name in names.values()):
        raise UserError(
            f'{path} has id2label {names!r:.60}; it must be the name of each class by number: {{"0": "no"}}'
        )


def output_order(settings: Mapping[str, Any], info: DataInfo) -> Sequence[int] | None:
    """Return the output of the directory's classifier for each output of a model of this data set.

    Class names that are the numbers 0 to n - 1 select outputs by number. Without names, the order is the same.

    Args:
      settings: the contents of a config.json that `check_labels` accepts.
      info: the data set.

    Returns:
      None if the classifier has other classes, or predicts numbers in place of classes or classes in place of numbers.
    """
    problem, ours = settings.get("problem_type"), info.targets or info.class_names
    if problem is not None and (problem == "regression") != bool(info.targets):
        return None
    theirs = [settings["id2label"][str(i)] for i in range(len(settings["id2label"]))] if "id2label" in settings else []
    if len(theirs) != len(ours):
        return range(len(ours))  # the shapes decide
    if set(theirs) == set(ours):
        return [theirs.index(name) for name in ours]
    if set(ours) == {str(index) for index in range(len(ours))}:
        return [int(name) for name in ours]
    return range(len(ours)) if all(map(UNNAMED.fullmatch, theirs)) else None
