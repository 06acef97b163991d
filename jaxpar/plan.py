"""Plans: where a run's arrays live, what its step sends and what its devices hold, known without devices.

A plan is data. `strategies.plan` makes one for any cluster, on any machine, without touching a device or compiling;
`strategies.build` makes of it, and of devices, what trains. The start of a run, the audit and the certificate read the
same plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from jaxpar.cluster import Cluster
from jaxpar.errors import Refusals, UserError
from jaxpar.layout import Layout

Source = TypeVar("Source", covariant=True)
Details = TypeVar("Details", covariant=True)
ON_HOST = " on the host"  # after the name of a part of the state
ACTIVATIONS = ("stashes", "transfers")  # parts of a pipeline's memory that are no part of the state


class Traffic(NamedTuple):
    """Bytes and messages that a device sends in a step by one kind of collective.

    Attributes:
      kind: all-reduce, reduce-scatter, all-gather, all-to-all or collective-permute, as XLA calls them; copy: by the
        host, between programs.
      dtype: of what is sent, as NumPy calls it.
      axis: of the mesh, over which it is sent.
      nbytes: in theory; by the ring algorithm where XLA chooses.
      messages: that these bytes are sent in, before XLA combines any. A message goes from one device to one other, and
        has an array, or a vector of several, or the part of one that a step of the ring algorithm sends: an all-reduce
        of a vector over n devices is 2 (n - 1) messages of each.
      required: the share of `nbytes` that is sent even where XLA can save some.
    """

    kind: str
    dtype: str
    axis: str
    nbytes: float
    messages: float
    required: float = 1.0


@dataclass(frozen=True)
class Decision(Generic[Source]):
    """The mesh of a config on a cluster, and what a batch divides into: known before data and shapes are.

    Attributes:
      axes: size of each mesh axis, the slowest first.
      batch_divisor: that config.batch_size must be a multiple of.
      batch_words: what the divisor consists of.
      num_replicas: ways in which a batch is divided.
      source: what else the strategy's `plan` starts from, such as a pipeline's table; its files have been read.
    """

    axes: Mapping[str, int]
    batch_divisor: int
    batch_words: str
    num_replicas: int
    source: Source


@dataclass(frozen=True)
class Plan(Generic[Details]):
    """A strategy for a problem on a cluster.

    Attributes:
      strategy: its name in STRATEGIES.
      decision: mesh axes, and what a batch divides into.
      summary: what is where, in one line.
      layouts: of the parts of the state: step, key, params, optimizer, and what else the strategy has.
      details: what else the strategy's `build` needs, of a type of the strategy: a pipeline's has its table.
      memory: of each device, by number: bytes by what they are for; parts of the state, and ACTIVATIONS of a pipeline.
        Of what else a step needs there are estimates: `strategies.in_flight_bytes`.
      traffic: what a device sends in a step, in theory, except scalars such as the loss.
      exchange: how replicas agree: an exchange's name and its options; empty where nothing is exchanged.
      private_key: what private state in a checkpoint depends on; only a plan with the same key can continue with it.
        JSON values; empty where the strategy has no private state.
      differs: why its numbers differ from those of `single`; empty: they are the same.
    """

    strategy: str
    decision: Decision[object]
    summary: str
    layouts: Mapping[str, Layout]
    details: Details
    memory: Sequence[Mapping[str, int]]
    traffic: Sequence[Traffic] = ()
    exchange: str = ""
    private_key: Mapping[str, Any] = field(default_factory=dict)
    differs: str = ""

    @property
    def axes(self) -> Mapping[str, int]:
        """Size of each mesh axis, the slowest first."""
        return self.decision.axes

    @property
    def num_replicas(self) -> int:
        """Ways in which a batch is divided."""
        return self.decision.num_replicas

    @property
    def num_devices(self) -> int:
        """Number of devices that the strategy uses."""
        return len(self.memory)

    @property
    def device_bytes(self) -> list[int]:
        """Bytes that each device must hold at least, by number: the compiled step has temporary arrays on top."""
        return [sum(n for part, n in parts.items() if not part.endswith(ON_HOST)) for parts in self.memory]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on the device that holds most of it."""
        return max(
            sum(n for part, n in parts.items() if not part.endswith(ON_HOST) and part not in ACTIVATIONS)
            for parts in self.memory
        )

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in a step."""
        return round(sum(one.nbytes for one in self.traffic))

    def sent_by_axis(self) -> dict[str, tuple[float, float]]:
        """Return bytes and messages that a device sends in a step, by mesh axis."""
        total: dict[str, tuple[float, float]] = {}
        for one in self.traffic:
            nbytes, messages = total.get(one.axis, (0.0, 0.0))
            total[one.axis] = (nbytes + one.nbytes, messages + one.messages)
        return total


def transfer_seconds(plan: Plan[object], cluster: Cluster) -> dict[str, float]:
    """Return how long a device sends in a step, in seconds by mesh axis; an axis is missing where its link is.

    A message takes the link's latency and its bytes by the link's bandwidth (Hockney, "The communication challenge for
    MPP: Intel Paragon and Meiko CS-2", 1994). Messages of an axis go one after another, and none waits for computing.
    """
    return {
        axis: messages * cluster.links[axis].latency + nbytes / cluster.links[axis].bandwidth
        for axis, (nbytes, messages) in plan.sent_by_axis().items()
        if axis in cluster.links
    }


def refuse_memory(plan: Plan[object], cluster: Cluster) -> Refusals[None]:
    """Refuse a plan in which a device must hold more than it has; where the cluster's memory is not known, nothing."""
    needed = max(plan.device_bytes)
    if cluster.memory_bytes is None or needed <= cluster.memory_bytes:
        return
    device = plan.device_bytes.index(needed)
    parts = [f"{part} {format_gb(n)}" for part, n in plan.memory[device].items() if n and not part.endswith(ON_HOST)]
    yield UserError(
        f"config.strategy is {plan.strategy!r}, which needs {format_gb(needed)} on device {device} "
        f"({', '.join(parts)}); it must need at most the {format_gb(cluster.memory_bytes)} of {cluster.device_kind}: "
        + _relief(plan, device)
    )


def _relief(plan: Plan[object], device: int) -> str:
    """Return what a user can change so that a device needs less."""
    if sum(plan.memory[device].get(part, 0) for part in ACTIVATIONS) > plan.device_bytes[device] / 2:
        return "more config.pipeline.num_microbatches, config.pipeline.remat='full' or a lower config.batch_size may do"
    ways = ["more stages (config.strategy='pipeline', config.mesh.stage)", "a smaller config.model"]
    if not plan.exchange.startswith("zero3") and plan.strategy != "pipeline":
        ways.insert(0, "shards of the state (config.strategy='data_parallel', config.exchange='zero3')")
    return " or ".join(ways) + " may do"


def format_gb(nbytes: float) -> str:
    """Return a number of bytes as `80 GB`, in three digits."""
    return f"{nbytes / 1e9:.3g} GB"


def format_private_key(key: Mapping[str, Any]) -> str:
    """Return a private key as one line: `byteps_onebit block=2048 .. on 2 replicas`."""
    words = []
    for name, value in key.items():
        if isinstance(value, Mapping):
            words += [f"{option}={chosen}" for option, chosen in sorted(value.items())]
        elif isinstance(value, str):
            words.append(value)
        else:
            words.append(f"on {value} {name}" if isinstance(value, int) else f"{name} {value}")
    return " ".join(words)
