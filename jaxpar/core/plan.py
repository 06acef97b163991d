"""Plans: the array layouts, traffic and memory of a strategy on a cluster, computed without devices.

A plan is plain data. `strategies.plan` makes one for any cluster, on any machine, without touching a device or
compiling. `strategies.build` builds the strategy from a plan and real devices. A run, the audit and the certificate
all read the same plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jaxpar.core.mesh import GROUP_AXES
from jaxpar.core.ring import ring_sends
from jaxpar.errors import format_count
from jaxpar.layout import Layout

Source = TypeVar("Source", covariant=True)
Details = TypeVar("Details", covariant=True)
ARRAYS = "arrays"  # key of the hash of the private arrays in a private key
ON_HOST = " on the host"  # suffix of the name of a part of the state that is in host memory
NARROW_PARAMETERS = "narrow parameters"  # copies in the dtype in which the layers of a pipeline read them
ACTIVATION_PARTS = ("stashes", "transfers", NARROW_PARAMETERS)  # parts of a pipeline's memory that are not state
PREVIOUS = "previous state"  # the part of a plan's memory with the state before a step
COPY = "copy"  # the kind of traffic that the host sends between programs
# The purposes of the parts of a state whose names differ from their parts', and of the scalars, which are not counted.
PURPOSES = {"params": "parameters", "copies": "parameters", "step": "", "key": ""}


class Traffic(NamedTuple):
    """The bytes and messages that one device sends per step by one kind of collective.

    A message goes from one device to one other device. It contains an array, a vector of several arrays, or the chunk
    that one step of the ring algorithm sends: an all-reduce of a vector over n devices is 2 (n - 1) messages each.
    """

    # all-reduce, reduce-scatter, all-gather, all-to-all or collective-permute, as XLA calls them, or copy for a copy
    # that the host makes between programs
    kind: str
    dtype: str  # the NumPy name of the dtype sent
    axis: str  # the mesh axis of the collective
    nbytes: float  # the theoretical number of bytes, for the ring algorithm if XLA chooses the algorithm
    messages: float  # the number of messages before XLA combines any
    required: float = 1.0  # the fraction of `nbytes` that is sent even if XLA can optimize some transfers away
    # positions on the axis of the devices of the first group, if groups of them communicate; empty: all do
    members: tuple[int, ...] = ()
    # of a collective-permute: positions between partners, which exchange; 1: each device sends to the next one
    distance: int = 1


def ring_traffic(
    kind: str,
    ways: int,
    axis: str,
    size: int,
    nbytes: float,
    dtype: str,
    *,
    num_vectors: int = 1,
    members: tuple[int, ...] = (),
) -> Traffic:
    """Return a device's traffic under ring algorithms over `size` devices, for vectors of `nbytes` bytes together.

    ways: number of passes: those of RING_PASSES, times the number of such collectives for each vector.
    """
    return Traffic(kind, dtype, axis, *ring_sends(ways, size, nbytes, num_vectors), members=members)


class StageDelay(NamedTuple):
    """The delays of one stage of a pipeline that never drains."""

    layers: tuple[str, ...]  # names of the layers of the stage, which are updated together
    updated_after: int  # number of steps from that in which a batch enters to that in which its gradient is applied
    computed_after: tuple[int, ...]  # the same for the forward pass of each microbatch of a batch
    lags: tuple[int, ...]  # by microbatch, the number of earlier batches whose updates its weights lack


class DelayedUpdates(NamedTuple):
    """The recurrence that a pipeline that never drains follows: an update for each batch, from delayed weights."""

    stages: tuple[StageDelay, ...]  # the delays of each stage
    differs: str  # the reason why the results differ from those of the recurrence; empty if they are the same


@dataclass(frozen=True)
class Decision(Generic[Source]):
    """The mesh of a config on a cluster and the batch divisor, both known before the data and shapes are."""

    axes: Mapping[str, int]  # size of each mesh axis, slowest-varying first
    batch_divisor: int  # config.batch_size must be a multiple of this number
    batch_words: str  # explanation of the divisor for messages
    num_replicas: int  # the number of shards of a batch
    source: Source  # other inputs of `plan`, such as the table of a pipeline, with all files already read


@dataclass(frozen=True, eq=False)
class Plan(Generic[Details]):
    """A strategy for a problem on a cluster. Plans are equal only if they are the same object."""

    strategy: str  # name of the strategy in STRATEGIES
    decision: Decision[object]  # mesh axes and batch divisor
    summary: str  # one-line description of the placement
    # layout of each part of the state, leaf by leaf: step, key, params, optimizer and any strategy-specific parts.
    # A pipeline packs the leaves of each device (jaxpar/strategies/pipeline/executor/state.py)
    layouts: Mapping[str, Layout]
    details: Details  # strategy-specific inputs of the strategy's `build`, such as the table of a pipeline
    # for each device, bytes by purpose: the parts of the state, and the ACTIVATION_PARTS of a pipeline. For an estimate
    # of the other memory that a step needs, see `strategies.in_flight_bytes`
    memory: Sequence[Mapping[str, int]]
    traffic: Sequence[Traffic] = ()  # theoretical traffic of one device per step, except scalars such as the loss
    exchange: str = ""  # name and options of the gradient exchange; empty if nothing is exchanged
    # JSON values that identify the private state in a checkpoint. Only a plan with an equal key can resume from that
    # private state. Empty if the strategy has no private state
    private_key: Mapping[str, Any] = field(default_factory=dict)
    differs: str = ""  # the reason why the results differ from those of `single`; empty if they are the same
    advice: str = ""  # which setting is known to train badly, and what to use instead; empty if there is none
    delays: DelayedUpdates | None = None  # the delays of a pipeline that never drains; None for all other strategies
    # bytes that a device holds, besides its part of the state, while it updates an optimizer state that is in host
    # memory between steps: a copy of that state, and the gradients. 0 if none is there
    update_bytes: int = 0
    gathered_bytes: int = 0  # of the parameters that a device gathers before the passes of a step, and holds meanwhile
    keeps_previous: bool = False  # whether a step leaves its input state intact, instead of reusing its memory
    outer: object | None = None  # details of the outer step between runs (config.outer); None if there is none

    @property
    def axes(self) -> Mapping[str, int]:
        """Size of each mesh axis, slowest-varying first."""
        return self.decision.axes

    @property
    def num_replicas(self) -> int:
        """Number of shards of a batch."""
        return self.decision.num_replicas

    @property
    def num_devices(self) -> int:
        """Number of devices that the strategy uses."""
        return len(self.memory)

    @property
    def device_bytes(self) -> list[int]:
        """Bytes that each device holds, by device index, without the temporary arrays of the compiled step."""
        return [sum(n for part, n in parts.items() if not part.endswith(ON_HOST)) for parts in self.memory]

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the optimizer state of a device that are in host memory between steps."""
        return max(parts.get(f"optimizer{ON_HOST}", 0) for parts in self.memory)

    @property
    def device_state_bytes(self) -> list[int]:
        """Bytes of the state that each device holds, by device index."""
        activations = [sum(parts.get(part, 0) for part in ACTIVATION_PARTS) for parts in self.memory]
        return [total - n for total, n in zip(self.device_bytes, activations, strict=True)]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on the device that holds the largest part of it."""
        return max(self.device_state_bytes)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends per step."""
        return round(sum(one.nbytes for one in self.traffic))

    def sent_by_axis(self) -> dict[str, tuple[float, float]]:
        """Return the bytes and messages that one device sends per step, by mesh axis."""
        total: dict[str, tuple[float, float]] = {}
        for one in self.traffic:
            nbytes, messages = total.get(one.axis, (0.0, 0.0))
            total[one.axis] = (nbytes + one.nbytes, messages + one.messages)
        return total


def state_memory(layouts: Mapping[str, Layout]) -> tuple[dict[str, int], ...]:
    """Return the bytes on each device, by purpose, of a state with these layouts, without the scalars step and key."""
    memory: tuple[dict[str, int], ...] = tuple({} for _ in next(iter(layouts.values())).nbytes_by_device)
    for part, layout in layouts.items():
        purpose = PURPOSES.get(part, part) + (ON_HOST if layout.on_host else "")
        for on_device, nbytes in zip(memory, layout.nbytes_by_device, strict=True):
            if nbytes and purpose:
                on_device[purpose] = on_device.get(purpose, 0) + nbytes
    return memory


def keeping_previous(plan: Plan[Details]) -> Plan[Details]:
    """Return the plan with steps that leave their input state intact, so that devices hold two states."""
    memory = [{**parts, PREVIOUS: total} for parts, total in zip(plan.memory, plan.device_bytes, strict=True)]
    return replace(plan, memory=memory, keeps_previous=True)


def format_private_key(key: Mapping[str, Any]) -> str:
    """Format a private key in one line: `byteps_onebit block=2048 .. on 2 replicas`."""
    words, counts = [], []
    for name, value in key.items():
        if isinstance(value, Mapping):
            words += [f"{option}={chosen}" for option, chosen in sorted(value.items())]
        elif name == ARRAYS:
            continue  # a hash is of no use to the reader
        elif name in GROUP_AXES:
            counts.append(f"{name} {value}")
        elif isinstance(value, int):
            counts.append(format_count(value, name.removesuffix("es" if name.endswith("ches") else "s")))
        else:
            text = value if isinstance(value, str) else ",".join(map(str, value))
            words.append(text if isinstance(value, str) and name != "remat" else f"{name}={text}")
    return " ".join(words) + (f" on {', '.join(counts)}" if counts else "")
