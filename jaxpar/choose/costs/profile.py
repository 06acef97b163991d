"""Profiles: the times and sizes of a model's layers, as a JSON file that can also be written by hand.

{"layers": [{"name": "embed", "forward_s": 0.001, "backward_s": 0.002, "output_bytes": 4096, "stash_bytes": 8192,
             "weight_bytes": 65536}, ...]}
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.errors import UserError, nearest
from jaxpar.files import open_text, parse_json, path_error, write_text
from jaxpar.strategies.pipeline.tables.simulate import LARGEST_VALUE


class LayerProfile(NamedTuple):
    """One layer of a profile, for one microbatch."""

    name: str  # name of the layer
    forward_s: float  # seconds of the forward pass
    backward_s: float  # seconds of the backward pass
    output_bytes: float  # bytes of the output, which the next layer reads
    stash_bytes: float  # bytes that the forward pass saves for the backward pass
    weight_bytes: float  # bytes of the weights
    # whether a pipeline can be cut after the layer: not if its output has no gradient. Files can omit it.
    can_cut: bool = True


MAX_PROFILED_LAYERS = 10_000
NUMBERS = LayerProfile._fields[1:-1]


def write_profile(layers: list[LayerProfile], path: Path) -> None:
    """Write a profile."""
    listed = [layer._asdict() for layer in layers]
    for layer in listed:
        if layer["can_cut"]:
            del layer["can_cut"]
    write_text(path, json.dumps({"layers": listed}, indent=1) + "\n")


def read_profile(path: Path, key: str = "--profile") -> list[LayerProfile]:
    """Read a profile. key: the flag or config key that names it, for messages.

    Raises UserError if the file cannot be read, has no layers, or a layer has a missing or invalid value.
    """
    try:
        with open_text(path) as file:
            content = parse_json(file.read(), nonfinite=True)  # `_read_layer` refuses it
    except OSError as error:
        raise UserError(f"{key} is {str(path)!r}, {path_error(error)}; it must be the path of a profile") from None
    except ValueError as error:
        raise UserError(f"{key} is {str(path)!r}, which is not JSON ({error}); it must be a profile") from None
    if not isinstance(content, dict):
        raise UserError(f'{path} is {_short(content)}; it must be an object: {{"layers": [...]}}')
    layers = content.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= MAX_PROFILED_LAYERS:
        stated = f"a list of {len(layers)}" if isinstance(layers, list) and layers else _short(layers)
        raise UserError(f"{path}: layers is {stated}; it must be a list of 1 to {MAX_PROFILED_LAYERS} layers")
    read = [_read_layer(layer, f"{path}: layers[{number}]") for number, layer in enumerate(layers)]
    numbers: dict[str, int] = {}  # by name
    for index, layer in enumerate(read):
        if (first := numbers.setdefault(layer.name, index)) != index:
            raise UserError(
                f"{path}: layers[{index}].name is {_short(layer.name)}, which is the name of layers[{first}]; names "
                "must be different"
            )
    return read


def _read_layer(layer: Any, where: str) -> LayerProfile:
    if not isinstance(layer, dict):
        raise UserError(f"{where} is {_short(layer)}; it must be an object with {', '.join(LayerProfile._fields)}")
    for key in ("name", *NUMBERS):
        if key not in layer:
            raise UserError(f"{where}.{key} is missing; it must be set")
    for key in layer:
        if key not in LayerProfile._fields:
            known = ", ".join(LayerProfile._fields)
            raise UserError(f"{where}.{key} is not a key; it must be one of {known}.{nearest(key, NUMBERS)}")
    if not isinstance(layer["name"], str) or not layer["name"] or not layer["name"].isprintable():
        raise UserError(f"{where}.name is {_short(layer['name'])}; it must be a string of printable characters")
    for key in NUMBERS:
        value = layer[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST_VALUE:
            raise UserError(f"{where}.{key} is {_short(value)}; it must be a number between 0 and {LARGEST_VALUE:g}")
    if not isinstance(layer.get("can_cut", True), bool):
        raise UserError(f"{where}.can_cut is {_short(layer['can_cut'])}; it must be true or false")
    return LayerProfile(**layer)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
