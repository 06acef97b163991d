"""Lists what makes a step on GPUs slower than it should be, and what of it is normal for the strategy.

A finding is a pattern in the compiled program. EXPECTED has the patterns that a strategy has by design,
each with the reason; all others are defects, of jaxpar or of a config.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ml_collections import ConfigDict

from jaxpar.choose.costs.rates import memory_seconds
from jaxpar.cluster import Cluster
from jaxpar.core.mesh import GROUP_AXES
from jaxpar.errors import format_bytes
from jaxpar.inspect.programs import OverlappedCollective, ProgramSummary
from jaxpar.inspect.step_time import StepTime

Kind = Literal["float32", "copies", "exposed in a loop", "exposed", "synchronization", "recomputation"]
FLOAT32_SHARE = 0.01  # of the FLOPs of a step; a head for classes computes less than this in float32
TIME_SHARE = 0.01  # of the time of a step: less is no finding
EXPOSED_SHARE = 0.5  # of the time of a collective
RECOMPUTED_SHARE = 0.1  # of the FLOPs of both passes: cuDNN attention computes its scores again, which is less

AT_THE_END = "gradients are exchanged after the backward pass"
AFTER_WARMUP = "compression begins after the warm-up"
BETWEEN_PRODUCTS = "layers wait for the positions of the other devices of a group"
AT_BOTH_ENDS = "nothing is left to compute before the first parameters arrive, and after the last gradients"
# Findings that are normal: strategy or exchange -> kind -> reason. An exchange precedes its strategy.
EXPECTED: Mapping[str, Mapping[Kind, str]] = {
    "data_parallel": {"exposed": AT_THE_END},
    "pipeline": {
        "exposed": AT_THE_END,
        "synchronization": "in each clock, a device chooses the action of its row of the table",
    },
    "zero3": {"exposed": AT_BOTH_ENDS},
    "hsdp": {"exposed": AT_BOTH_ENDS},
    "bagua_decentralized": {"synchronization": "a step chooses the replica to average weights with"},
    "bagua_model_average": {"synchronization": "weights are averaged once in several steps"},
    "bagua_qadam": {"synchronization": AFTER_WARMUP},
    "onebit_adam": {"synchronization": AFTER_WARMUP},
    "powersgd": {"synchronization": AFTER_WARMUP},
}


class Finding(NamedTuple):
    """A pattern that costs time."""

    kind: Kind  # the kind of pattern
    text: str  # a description with numbers
    reason: str = ""  # the reason why it is normal for the strategy; empty if it is not


def find(
    summaries: Sequence[ProgramSummary],
    times: Sequence[StepTime],
    cluster: Cluster,
    expected: Mapping[Kind, str],
    *,
    dtype: str,
    model_flops: float,
) -> list[Finding]:
    """Return the findings of a step, from the summaries of its programs and their predicted times.

    expected: the result of `expectations`. model_flops: FLOPs of both passes of the model for the global batch.
    """
    found = [*_float32_products(summaries, dtype), *_copies(summaries, times, cluster), *_exposed(summaries, times)]
    if number := sum(summary.synchronizations for summary in summaries):
        found.append(Finding("synchronization", f"the host waits for the GPU {format_times(number)}"))
    flops = sum(summary.num_devices * summary.flops for summary in summaries)
    if flops > (1 + RECOMPUTED_SHARE) * model_flops:
        ratio = f"{flops / model_flops:.2f}"
        text = f"the products have {ratio} times the FLOPs of both passes of the model"
        found.append(Finding("recomputation", text))
    return [one._replace(reason=expected.get(one.kind, "")) for one in found]


def expectations(config: ConfigDict, cluster: Cluster) -> Mapping[Kind, str]:
    """Return the kinds of findings that are normal for the config of a run on a cluster, each with the reason."""
    expected = {**EXPECTED.get(config.strategy, {}), **EXPECTED.get(config.exchange, {})}
    if any(config.mesh[axis] > 1 for axis in GROUP_AXES):
        expected |= {"exposed in a loop": BETWEEN_PRODUCTS, "exposed": expected.get("exposed", BETWEEN_PRODUCTS)}
    section = "pipeline" if config.strategy == "pipeline" else "model"
    if config[section].remat != "none":
        expected["recomputation"] = f"config.{section}.remat is {config[section].remat!r}"
    generation = cluster.compute_capability.partition(".")[0]
    if generation.isdigit() and int(generation) < 8:
        expected["float32"] = f"{cluster.device_kind} computes bfloat16 in float32"
    return expected


def _float32_products(summaries: Sequence[ProgramSummary], dtype: str) -> list[Finding]:
    """Find products in float32 of a model in another dtype, by source."""
    total = sum(summary.flops for summary in summaries)
    flops: dict[str, float] = {}
    for product in (product for summary in summaries for product in summary.products):
        if product.dtype == "float32" != dtype:
            flops[product.source] = flops.get(product.source, 0.0) + product.per_step * product.flops
    return [
        Finding("float32", f"{part / total:.1%} of the FLOPs are products of float32 arrays in {source}")
        for source, part in flops.items()
        if part > FLOAT32_SHARE * total
    ]


def _copies(summaries: Sequence[ProgramSummary], times: Sequence[StepTime], cluster: Cluster) -> list[Finding]:
    """Find copies that take a part of the step, each byte being read and written. All, if the rate is unknown."""
    number, nbytes = (sum(getattr(one, name) for one in summaries) for name in ("copies", "copied_bytes"))
    took = ""
    if cluster.memory_bandwidth:
        seconds = memory_seconds(cluster, 2 * nbytes)
        if seconds <= TIME_SHARE * sum(time.seconds for time in times):
            return []
        took = f", {1e3 * seconds:.3g} ms"
    text = f"{_counted(number, 'copy', 'copies')} of large arrays in loops, of {format_bytes(nbytes)}{took}"
    return [Finding("copies", text)] if number else []


def _exposed(summaries: Sequence[ProgramSummary], times: Sequence[StepTime]) -> list[Finding]:
    """Find collectives for which the GPU waits most of their time: all of a kind, as a step can wait for small ones."""
    groups: dict[tuple[Kind, str], list[tuple[OverlappedCollective, float]]] = {}
    for summary, time in zip(summaries, times, strict=True):
        for one in summary.collectives:
            seconds, exposed = time.collectives.get(one.name, (0.0, 0.0))
            if exposed > EXPOSED_SHARE * seconds:
                kind: Kind = "exposed in a loop" if one.per_step > 1 else "exposed"
                groups.setdefault((kind, one.kind), []).append((one, exposed))
    found, least = [], TIME_SHARE * sum(time.seconds for time in times)
    for (kind, operation), group in groups.items():
        number, exposed = sum(one.per_step for one, _ in group), sum(seconds for _, seconds in group)
        if exposed > least:
            where = " in loops" if kind == "exposed in a loop" else ""
            text = f"the GPU waits {1e3 * exposed:.3g} ms for {_counted(number, operation)}{where}"
            found.append(Finding(kind, text))
    return found


def format_times(number: float) -> str:
    """Return how often something happens: once, 0 times, 12 times."""
    return "once" if round(number) == 1 else f"{number:,.0f} times"


def _counted(number: float, noun: str, nouns: str = "") -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number:,.0f} {noun if round(number) == 1 else nouns or noun + 's'}"
