"""The small values that a trainer and its peers send each other, and checks of the arrays that they receive."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpar.core.step import Problem
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.swarm.messages import MessageFormat

SUPERSEDED, STALE = "superseded", "stale"  # faults: the trainer has been replaced; the call is of an earlier generation
MALFORMED, NONFINITE_VALUES = "malformed", "nonfinite"  # faults of what was received
Arrays = list[np.ndarray]
Examples = Mapping[str, Any]  # arrays of a microbatch by name, on the host


class PeerSettings(NamedTuple):
    """Settings of a peer's process."""

    platform: str = ""  # the JAX platform: cpu, cuda; empty: the default of its machine
    num_threads: int = 0  # threads of a peer on CPUs; 0: JAX's default
    memory_fraction: float = 0.0  # the fraction of the memory of a GPU that it takes; 0: JAX's default
    cache: str = ""  # folder of compiled programs; empty: none


class PeerPlace(NamedTuple):
    """The place of a peer: Ray's identifier of its machine, the machine's name, the process, and the kind of device."""

    node: str
    host: str
    pid: int
    device: str


class SwarmSpec(NamedTuple):
    """The problem of a run, its stages, and the form of messages, from which a peer builds its programs."""

    problem: Problem
    stages: Stages
    messages: MessageFormat


class Ticket(NamedTuple):
    """Identifies a call."""

    trainer: str  # the trainer that calls; a peer obeys the one that attached it last
    generation: int  # number of times that the trainer has given up this peer. With a new one, the peer starts over.
    step: int  # the step. With a new one, the accumulated gradients are void.


class Fault(NamedTuple):
    """A reason for not computing."""

    kind: str  # SUPERSEDED, STALE, MALFORMED or NONFINITE_VALUES
    # what was received: STAGE_INPUT, OUTPUT_GRADIENT, or the position of a peer in an averaging; -1 if nothing
    source: int = -1


class PeerAnswer(NamedTuple):
    """The small part of the result of a call, which the trainer reads."""

    fault: Fault | None = None  # why there is no result, or None
    seconds: float = 0.0  # the time that the peer measured for a pass
    # leaves of the metric sums of a microbatch, from the forward pass of the last stage; otherwise empty
    sums: Sequence[np.ndarray] = ()


class StepShapes(NamedTuple):
    """Expected shapes and dtypes in a step with microbatches of one shape."""

    key: Hashable  # identifies the shapes of the microbatches
    # of the arrays of a message, by (STAGE_INPUT or OUTPUT_GRADIENT, stage)
    messages: Mapping[tuple[int, int], Sequence[Any]]
    sums: Sequence[Any]  # of the metric sums of a microbatch
    sizes: Sequence[int]  # by stage, the number of parameters, with copies of tied arrays


def find_fault(received: Any, like: Sequence[Any]) -> str:
    """Return "" if a received value is as expected, else MALFORMED or NONFINITE_VALUES.

    Args:
      received: the value; it must be a list of NumPy arrays.
      like: the expected shapes and dtypes.
    """
    if type(received) is not list or len(received) != len(like):
        return MALFORMED
    for array, expected in zip(received, like, strict=True):
        if type(array) is not np.ndarray or array.shape != expected.shape or array.dtype != expected.dtype:
            return MALFORMED
    return "" if all(is_finite_array(array) for array in received) else NONFINITE_VALUES


def is_finite_array(array: np.ndarray) -> bool:
    """Return whether all elements are finite. Supports bfloat16 and the other types of ml_dtypes."""
    return bool(array.dtype.kind in "biu" or np.isfinite(array).all())
