"""The contract of a strategy: a tuple of functions. See the package for the table of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.exchange.reduce import Traffic
from jaxpar.state import Canonical
from jaxpar.step import Metrics
from jaxpar.tasks import Sums

ON_HOST = " on the host"  # after the name of a part of the state


class Description(NamedTuple):
    """What a strategy uses: printed at the start of a run and kept in result.json."""

    devices: tuple[jax.Device, ...]
    layout: str  # in words
    num_replicas: int  # ways a batch is divided
    memory: tuple[Mapping[str, int], ...]  # of each device: bytes of parameters, optimizer, own (of the exchange)
    traffic: tuple[Traffic, ...]  # what a device sends in a step, in theory; but for figures, such as the loss

    @property
    def state_bytes(self) -> int:
        """On the fullest device."""
        return max(sum(n for part, n in parts.items() if not part.endswith(ON_HOST)) for parts in self.memory)

    @property
    def wire_bytes(self) -> int:
        """Sent by a device in a step."""
        return round(sum(one.nbytes for one in self.traffic))


class CompiledProgram(NamedTuple):
    """A compiled program of a step.

    Attributes:
      compiled: what XLA made of it.
      branches: by the name of a conditional, in which share of the steps each of its branches is taken.
      arguments: names of its positional arguments, where it has parts of a state as such.
    """

    compiled: jax.stages.Compiled
    branches: Mapping[str, tuple[float, ...]] = {}
    arguments: tuple[str, ...] = ()


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Abstract arrays with these shardings; `shardings`: of each, or one for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


class Strategy(NamedTuple):
    """How a problem is trained. `state` has the strategy's own form; `batch` is what `place` returns."""

    init: Callable[[jax.Array], Any]  # key -> state
    place: Callable[[Mapping[str, np.ndarray]], Any]  # rows of this host -> batch on devices
    step: Callable[[Any, Any], tuple[Any, Metrics]]  # (state, batch) -> (state, metrics); the old state is donated
    evaluate: Callable[[Any, Any], Sums]  # (state, batch) -> sums
    to_canonical: Callable[[Any], Canonical]
    from_canonical: Callable[..., Any]  # (tree, private=None) -> state; leaves may be NumPy arrays
    describe: Callable[[], Description]
    compile: Callable[[], list[CompiledProgram]]  # a step's programs, for the problem's batch, without running them
    to_private: Callable[[Any], Canonical] = lambda state: {}  # what of the state is not in the canonical one
    private_of: str = ""  # only a strategy of which this is the same can go on with it
    differs: str = ""  # what it does otherwise than `single`, and so gets other numbers; empty: they are the same
    # Writes what it has to show at the end of a run, and returns figures for result.json.
    report: Callable[[Any, Path], Mapping[str, Any]] = lambda state, workdir: {}  # (state, workdir)
