"""The options of the named exchanges: which there are, and their ranges."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from jaxpar.exchange.around import AROUND
from jaxpar.exchange.compress import FLOAT8
from jaxpar.exchange.gradients import GRADIENTS
from jaxpar.exchange.presets import AVERAGE, PASSES

POSITIVE = ("bucket_bytes", "group", PASSES, "rank")
CHOICES = {
    "wire_dtype": ("float16", "bfloat16", *FLOAT8),
    "algorithm": ("psum", "ring"),
    "peers": ("shift_one", "all"),
}
QUANTIZED = ("quantized_weights", "quantized_gradients")
INT32 = 2**31 - 1  # seeds and steps are int32
RANGES = {
    "momentum": (0.0, 0.9999),
    "predivide": (0.0001, 10000),  # gradients in float16 would overflow or become 0
    "levels": (1, 127),
    "block": (0, 2**31),
    "min_compress_bytes": (0, 2**31),
    "seed": (0, INT32),
    "interval": (1, INT32),
}


def options(name: str) -> dict[str, Any]:
    """Return the options of an exchange, with their defaults."""
    function = AROUND[name].make if name in AROUND else GRADIENTS.get(name)
    parameters = inspect.signature(function).parameters.values() if function else ()
    keywords = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return keywords | ({PASSES: 1, AVERAGE: False} if name.startswith("horovod") else {})


def obstacle(name: str, num_replicas: int, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why an exchange is impossible, as (the option or "exchange", what is wrong with it), or None."""
    allowed = options(name)
    for key, value in settings.items():
        if key not in allowed:
            has = f"whose options are {', '.join(allowed)}" if allowed else "which has no options"
            return key, f"is {value!r}; it must be None with exchange {name!r}, {has}"
        if isinstance(allowed[key], int) and not isinstance(value, int):
            return key, f"is {value!r}; it must be an integer"
        if isinstance(allowed[key], float) and not isinstance(value, int | float):
            return key, f"is {value!r}; it must be a number"
        if key in CHOICES and value not in CHOICES[key]:
            return key, f"is {value!r}; it must be one of {', '.join(CHOICES[key])}"
        if key in POSITIVE and not 0 < value < math.inf:
            return key, f"is {value!r}; it must be {'finite and ' if isinstance(value, float) else ''}greater than 0"
        if key == "ratio" and not 0 < value <= 1:
            return key, f"is {value!r}; it must be greater than 0 and at most 1"
        if key == "warmup" and not 0 < value < 1:
            return key, f"is {value!r}; it must be greater than 0 and less than 1"
        if key in RANGES and not RANGES[key][0] <= value <= RANGES[key][1]:
            return key, f"is {value!r}; it must be between {RANGES[key][0]} and {RANGES[key][1]}"
    if settings.get(AVERAGE) and settings.get(PASSES, 1) == 1:
        return AVERAGE, f"is True; it has no effect without exchange_options.{PASSES} of at least 2"
    group = settings.get("group", 1)
    if num_replicas % group:
        return "group", f"is {group}; it must divide the number of replicas, {num_replicas}"
    if group == num_replicas > 1 and settings.get("momentum"):
        reason = "the number of replicas, because nothing is compressed"
        return "momentum", f"is {settings['momentum']}; it must be 0 with group={group}, {reason}"
    if group > 1 and settings.get("algorithm") == "ring":
        return "algorithm", f"is 'ring'; it must be 'psum' with group={group}"
    if (wire := settings.get("wire_dtype")) in FLOAT8:
        for key in ("algorithm", "predivide"):
            if key in settings:
                return key, f"is {settings[key]!r}; it must be None with wire_dtype={wire!r}, whose sums are in float32"
    if name in ("zero3", "hsdp") and "block" in settings and not any(settings.get(key) for key in QUANTIZED):
        return (
            "block",
            f"is {settings['block']}; it must be None with exchange {name!r} without {' or '.join(QUANTIZED)}",
        )
    if name == "horovod_adasum" and num_replicas & (num_replicas - 1):
        return "exchange", f"is {name!r} with {num_replicas} replicas; their number must be a power of 2"
    if name == "bagua_decentralized" and num_replicas % 2 and settings.get("peers") != "all":
        return "exchange", f"is {name!r} with {num_replicas} replicas; their number must be even"
    return None
