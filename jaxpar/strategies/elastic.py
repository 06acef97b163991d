"""Checks of the configs of runs that continue without lost processes (config.elastic_seconds), and their batches."""

from typing import Any

from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import DATA, GROUP_AXES
from jaxpar.errors import UserError, check_choice
from jaxpar.exchange.named import EXCHANGES, PASSES
from jaxpar.strategies import exchanges

# Exchanges after which every replica has the whole state, and nothing else.
WHOLE_STATE = [name for name, row in EXCHANGES.items() if row.averages and not row.residuals]
LONGEST_SILENCE = 100_000


def check_elastic(config: ConfigDict) -> None:
    """Raise UserError for an invalid config.elastic_seconds, or if a replica alone could not continue the run."""
    seconds = config.elastic_seconds
    if seconds != 0 and not 2 <= seconds <= LONGEST_SILENCE:
        allowed = f"0 (a lost process ends the run), or between 2 and {LONGEST_SILENCE:,}"
        raise UserError(f"config.elastic_seconds is {seconds}; it must be {allowed}")
    if seconds == 0:
        return
    check_choice("exchange", config.exchange, EXCHANGES)
    options = exchanges.chosen(config)
    fewer = "because groups could not be divided among fewer replicas"
    required: list[tuple[str, Any, list[Any], str]] = [
        ("strategy", config.strategy, ["data_parallel"], "the only one that can continue without a lost process"),
        ("exchange", config.exchange, WHOLE_STATE, "which leave the whole state on every replica"),
        *((f"exchange_options.{key}", options.get(key, 1), [1], fewer) for key in ("group", PASSES)),
        ("mesh.data", config.mesh.data, [-1], "as many replicas as there are devices"),
        *((f"mesh.{axis}", config.mesh[axis], [1], "so that a replica is a device") for axis in GROUP_AXES),
    ]
    for key, value, choices, reason in required:
        if value not in choices:
            one_of = "one of " if len(choices) > 1 else ""
            listed = ", ".join(map(str, choices))
            where = f"with config.elastic_seconds={seconds}"
            raise UserError(f"config.{key} is {value!r}; it must be {one_of}{listed}, {reason}, {where}")


def padded_batch_size(config: ConfigDict, cluster: Cluster) -> int:
    """Return the number of examples of a batch with the padding examples that elastic replicas need to divide it."""
    if not config.elastic_seconds:
        return int(config.batch_size)
    divisor = meshes.sizes(config, cluster)[DATA] * config.optimizer.accumulation_steps
    return int(-(-config.batch_size // divisor) * divisor)
