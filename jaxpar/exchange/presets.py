"""The named exchanges of config.exchange: what their names stand for, and how they differ from a single device.

ddp, horovod, byteps, ..         average gradients (gradients.py)
horovod_adasum, bagua_qadam, ..  wrap an optimizer (around.py)
dp                               is a program for the master device (jaxpar/strategies/master.py)
"""

from collections.abc import Mapping
from typing import Any

from jaxpar.exchange.around import AROUND, Rule
from jaxpar.exchange.compress import FLOAT8
from jaxpar.exchange.exchange import AllReduce, Exchange, every
from jaxpar.exchange.fuse import averaged
from jaxpar.exchange.gradients import ERROR_FEEDBACK, GRADIENTS
from jaxpar.exchange.reduce import Axis

EXCHANGES = ("ddp", "dp", *(name for name in (*GRADIENTS, *AROUND) if name != "ddp"))
# How training with an exchange differs from a single device. Exchanges not listed here differ only by rounding.
DIFFERS = {
    "horovod_adasum": "combines updates with Adasum instead of averaging gradients",
    "powersgd": "sends low-rank approximations of gradients after its warm-up",
    **dict.fromkeys(("byteps_onebit", "bagua_bytegrad", "byteps_dithering"), "compresses gradients lossily"),
    **dict.fromkeys(("byteps_topk", "byteps_randomk"), "sends only part of the gradients in each step"),
    **dict.fromkeys(
        (name for name, one in AROUND.items() if one.has_adamw), "compresses momentum lossily after its warm-up"
    ),
    **dict.fromkeys(("bagua_decentralized", "bagua_model_average"), "has different weights on each replica"),
    "bagua_low_precision_decentralized": "has different weights on each replica",
}
BUCKET_BYTES = "bucket_bytes"
HAS_BUCKETS = (*ERROR_FEEDBACK, "onebit_adam")  # their private state is divided into buckets, as what they send is
AVERAGE = "average_aggregated_gradients"  # the other option of Horovod's passes
PASSES = "backward_passes_per_step"  # an option of Horovod, with any reduction


def exchange_differs(name: str, settings: Mapping[str, Any], num_replicas: int) -> str:
    """Return how training with this exchange differs from a single device; '' if it differs only by rounding."""
    is_compressor = name in GRADIENTS and (name in DIFFERS or settings.get("wire_dtype") in FLOAT8)
    if is_compressor and settings.get("group") == num_replicas > 1:
        return ""  # it compresses between groups only
    if name in DIFFERS:
        return f"{name} {DIFFERS[name]}"
    if settings.get(PASSES, 1) > 1:
        return f"{name} takes one optimizer step for every {settings[PASSES]} training steps"
    quantized = [what for what in ("weights", "gradients") if settings.get(f"quantized_{what}")]
    if quantized:
        return f"{name} sends {' and '.join(quantized)} with 8 bits per element"
    return f"{name} sends gradients in {settings['wire_dtype']}" if settings.get("wire_dtype") else ""


def make_all_reduce(name: str, axis: Axis, clip_norm: float, **settings: Any) -> AllReduce:
    """Return the named exchange of gradients with these options. clip_norm: as in `Rule`."""
    all_reduce = GRADIENTS[name](axis, **settings)
    return all_reduce._replace(clip_norm=clip_norm) if name in ERROR_FEEDBACK else all_reduce


def make_exchange(name: str, axis: Axis, rule: Rule, **settings: Any) -> Exchange:
    """Return the named exchange with these options, around an optimizer. dp is not supported."""
    passes, average = settings.pop(PASSES, 1), settings.pop(AVERAGE, False)
    if name in GRADIENTS:
        exchange = averaged(rule.in_order(make_all_reduce(name, axis, rule.clip_norm, **settings)), rule.optimizer)
    else:
        exchange = AROUND[name].make(axis, rule, **settings)
    return exchange if passes == 1 else every(passes, exchange, average=average)
