"""Config files and command-line overrides; a mistake in either is reported in one line.

A config file defines `get_config(preset="")`, which takes `default_config()`, changes some of its
values and returns it. The default config declares every key and is locked, so no key can be added.
"""

import ast
import functools
import importlib.util
import inspect
import json
import math
import operator
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from ml_collections import ConfigDict

from jaxpar import files
from jaxpar.errors import UserError, nearest

# Former name -> current name of dotted keys.
RENAMED = {"asynchronous.cures": "asynchronous.mitigations"}
# Names of keys in torch, DeepSpeed and Hugging Face's Trainer -> the key here.
OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("epochs", "max_epochs", "num_train_epochs"), "num_epochs"),
    **dict.fromkeys(("steps", "max_steps", "total_steps"), "num_steps"),
    **dict.fromkeys(("train_batch_size", "global_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps"), "optimizer.accumulation_steps"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping", "clip_grad_norm"), "optimizer.clip_norm"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), "optimizer.warmup"),
    **dict.fromkeys(("beta1", "adam_beta1"), "optimizer.b1"),
    **dict.fromkeys(("beta2", "adam_beta2"), "optimizer.b2"),
    **dict.fromkeys(("fp16", "bf16", "precision", "mixed_precision"), "model.dtype"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "model.remat"),
    **dict.fromkeys(("max_seq_length", "seq_length", "sequence_length", "block_size"), "data.max_length"),
    **dict.fromkeys(("topk", "top_k", "k"), "exchange_options.ratio"),
    **dict.fromkeys(("zero", "zero_stage"), "exchange"),
    "logging_steps": "log.every_steps",
    "save_steps": "checkpoint.every_steps",
    "eval_steps": "eval.every_steps",
}
LARGEST = 2**63  # magnitudes of integers are less
BOOL_OR_NAME = bool | str  # type of a key that is true, false or a name, such as auto


Values = Mapping[str, Any]  # dotted key -> value of a config
KeyRule = tuple[str, bool, str]  # a dotted key, whether its value is valid, and what it must be: `at least 1`


def config_folder() -> Path:
    """Return the directory of the configs shipped with jaxpar: inside the wheel, or next to the package in a clone."""
    package = Path(__file__).parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def default_config() -> ConfigDict:
    """Return the config of configs/default.py, locked so that only declared keys can be set."""
    return _import(config_folder() / "default.py").get_config().lock()


def load_config(name: str | Path) -> ConfigDict:
    """Load the config `PATH[:PRESET]`. The path can also name a config shipped with jaxpar: configs/quickstart.py."""
    if not isinstance(name, str | Path):
        raise UserError(f"the config is {name!r:.60}; it must be the path of a config file")
    name = str(name)
    path_name, _, preset = name.partition(":")
    path = Path(path_name)
    if not path.is_file():
        shipped = {file.name: file for file in sorted(config_folder().glob("*.py"))}
        path = shipped.get(path.name if path.suffix == ".py" else path.name + ".py", path)
        if not path.is_file():
            names = [f"configs/{file}" for file in shipped]
            hint = nearest(name, names)
            stop = "." if hint else ""
            raise UserError(
                f"--config is {name!r}, which {files.path_state(Path(path_name))}; it must be a config file or one of "
                f"{', '.join(names)}{stop}{hint}"
            )
    if path.suffix != ".py":
        raise UserError(f"--config is {name!r}; it must be a Python file (.py) that defines get_config")
    try:
        module = _import(path)
        if preset and not inspect.signature(module.get_config).parameters:
            raise UserError(f"--config is {name!r}; it must be {path_name}, because this config has no presets")
        config = module.get_config(preset) if preset else module.get_config()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's file can raise anything
        raise UserError(_where(path, error)) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"{path}: get_config returned an object of type {type(config).__name__}; it must return a ConfigDict"
        )
    odd = keys(config).keys() ^ keys(default_config()).keys()
    if odd:
        state = "lacks" if min(odd) in keys(default_config()) else "adds"
        raise UserError(f"{path}: get_config {state} config.{min(odd)}; it must return a modified default_config()")
    return config.lock()


def override(config: ConfigDict, arguments: Sequence[str]) -> set[str]:
    """Set keys of `config` in place from arguments such as --config.optimizer.lr=1e-4, and return the keys.

    Raises UserError for an invalid argument, and for an integer beyond int64. ml_collections.config_flags reads only
    sys.argv and words its errors differently.
    """
    known, default = keys(config), keys(default_config())
    rest, given = list(arguments), set()
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        negated = name.lstrip("-").startswith("noconfig.")
        key = name.lstrip("-").removeprefix("no" if negated else "").removeprefix("config.")
        if not name.lstrip("-").removeprefix("no").startswith("config."):
            raise UserError(f"{argument!r} is not an argument; an override must be written --config.KEY=VALUE")
        if key in RENAMED:
            raise UserError(f"config.{key} was renamed; use config.{RENAMED[key]}")
        if key not in known:
            inside = [leaf for leaf in known if leaf.startswith(key + ".")]
            if inside:
                name = f"; to set its name, use config.{key}.name" if f"{key}.name" in known else ""
                raise UserError(f"config.{key} is a section{name}; its keys are {', '.join(inside)}")
            end = key.rpartition(".")[2]
            same_end = [name for name in known if name.rpartition(".")[2] == end]
            same_end = [OTHER_NAMES[end]] if end in OTHER_NAMES else same_end
            same_end = [name for name in same_end if name.startswith("optimizer.")] or same_end
            hint = f" Did you mean {same_end[0]!r}?" if len(same_end) == 1 else nearest(key, known)
            raise UserError(f"config.{key} does not exist{'.' if hint else ''}{hint}")
        *sections, name = key.split(".")
        kind = functools.reduce(operator.getitem, sections, config).get_type(name)
        if not equals:
            if kind in (bool, BOOL_OR_NAME):
                text = str(not negated)
            elif not rest:
                raise UserError(f"config.{key} has no value; it must be written --config.{key}=VALUE")
            else:
                text = rest.pop(0)
        is_optional = key in default and default[key] is None
        value = None if is_optional and text == "None" else _parse(key, text, kind, known[key])
        config.update_from_flattened_dict({key: value})
        given.add(key)
    for key, value in keys(config).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and abs(number) >= LARGEST:
                raise UserError(f"config.{key} is {files.shortened(value)}; its magnitude must be less than 2^63")
    return given


def check_rules(config: ConfigDict, rules: Iterable[KeyRule]) -> None:
    """Raise UserError for the first rule that does not hold. The rules after it are not evaluated."""
    values = keys(config)
    for key, holds, rule in rules:
        if not holds:
            raise UserError(f"config.{key} is {values[key]!r}; it must be {rule}")


def check_no_nan(config: ConfigDict) -> None:
    """Raise UserError for a key that is NaN: no key can be, and two configs with NaN would differ."""
    for key, value in keys(config).items():
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"config.{key} is nan; it must be a number")


def _parse(key: str, text: str, kind: type | UnionType, now: Any) -> Any:
    """Parse `text` as a `kind`, for the config key `key` whose current value is `now`. Raises UserError."""
    if kind in (bool, BOOL_OR_NAME) and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    if kind in (str, BOOL_OR_NAME):
        return text
    try:
        value = ast.literal_eval(text)
        if kind is int and type(value) is int:
            return value
        if kind is float and type(value) in (int, float):
            return float(value)
        if kind is tuple:
            value = tuple(value) if isinstance(value, tuple | list) else (value,)
            if now and {type(item) for item in value} <= {type(item) for item in now}:
                return value
    except OverflowError:
        raise UserError(f"config.{key} is {files.shortened(text)}; it must be a number less than 1.8e308") from None
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply
        if kind is tuple and now and type(now[0]) is str:
            return tuple(name.strip() for name in text.strip("()").split(","))
        if kind is float and text.lower() in ("inf", "nan"):
            return float(text)
    example = f", such as {now!r}" if now and kind is not bool else ""  # 0 often means that a key is not set
    items = {str: " of strings", int: " of integers"}.get(type(now[0]), "") if kind is tuple and now else ""
    names: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", tuple: f"a tuple{items}"}
    raise UserError(f"config.{key} is {files.shortened(text)}; it must be {names[kind]}{example}")


def keys(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Return all leaves of the config by dotted key, sorted by name."""
    leaves: dict[str, Any] = {}
    for name in sorted(config.keys()):
        value = config[name]
        leaves |= keys(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else {prefix + name: value}
    return leaves


def changed_keys(config: ConfigDict) -> dict[str, Any]:
    """Return the dotted keys, with their values, that differ from configs/default.py."""
    default = keys(default_config())
    return {key: value for key, value in keys(config).items() if value != default[key]}


def save(config: ConfigDict, workdir: Path) -> None:
    """Write the dotted keys and values of the config to workdir/config.json."""
    files.write_text(workdir / "config.json", json.dumps(keys(config), indent=1) + "\n")


def read_config(workdir: Path) -> ConfigDict:
    """Return the config of the run in `workdir`. Raises UserError if there is no run."""
    saved = read_saved(workdir)
    if saved is None:
        raise UserError(
            f"{workdir} contains no run: {workdir / 'config.json'} {files.path_state(workdir / 'config.json')}"
        )
    return from_keys(saved)


def from_keys(saved: Mapping[str, Any]) -> ConfigDict:
    """Return the config with these JSON values by dotted key, also former ones, with defaults for all other keys."""
    config = default_config()
    with config.unlocked(), config.ignore_type():
        for key, value in saved.items():
            value = tuple(value) if isinstance(value, list) else value
            config.update_from_flattened_dict({RENAMED.get(key, key): value})
    return config


def read_saved(workdir: Path) -> dict[str, Any] | None:
    """Return the keys and JSON values that `save` wrote, or None if there is no run."""
    path = workdir / "config.json"
    if not path.is_file():
        return None
    try:
        saved = files.parse_json(path.read_text(), nonfinite=True)  # of numbers such as clip_norm
    except ValueError:
        saved = None
    if not isinstance(saved, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object; it must be the file that the run wrote")
    return saved


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"jaxpar_config_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _where(path: Path, error: BaseException) -> str:
    """Return `file, line N: error` for an exception raised by a config file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = str(error)
    if "config is locked" in text:  # ml_collections lists all fields over several lines
        key = text.split('"')[1]
        known = keys(default_config())
        renamed = [f" It was renamed to {new}." for old, new in RENAMED.items() if old.rpartition(".")[2] == key]
        hint = renamed[0] if renamed else nearest(key, [name.rpartition(".")[2] for name in known])
        text = f"config has no key {key!r}{'.' if hint else ''}{hint}"
    place = f"{path}, line {line}" if line else str(path)
    return f"{place}: {type(error).__name__}: {' '.join(text.split())}" if "no key" not in text else f"{place}: {text}"
