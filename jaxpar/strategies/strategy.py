"""The contract of a strategy: a tuple of functions. See the package for the table of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.state import Canonical
from jaxpar.step import Metrics
from jaxpar.tasks import Sums


class Description(NamedTuple):
    """What a strategy uses: printed at the start of a run and kept in result.json."""

    devices: tuple[jax.Device, ...]
    layout: str  # in words
    num_replicas: int  # ways a batch is divided
    state_bytes: int  # parameters and optimizer state on the fullest device
    wire_bytes: int  # sent by each device in a step


class Strategy(NamedTuple):
    """How a problem is trained. `state` has the strategy's own form; `batch` is what `place` returns."""

    init: Callable[[jax.Array], Any]  # key -> state
    place: Callable[[Mapping[str, np.ndarray]], Any]  # rows of this host -> batch on devices
    step: Callable[[Any, Any], tuple[Any, Metrics]]  # (state, batch) -> (state, metrics); the old state is donated
    evaluate: Callable[[Any, Any], Sums]  # (state, batch) -> sums
    to_canonical: Callable[[Any], Canonical]
    from_canonical: Callable[[Canonical], Any]  # leaves may be NumPy arrays
    describe: Callable[[], Description]
    report: Callable[[Path], None] = lambda workdir: None  # writes what it has to show at the end of a run
