"""Lists what makes a step on GPUs slower than it should be, and what of it is normal for the strategy.

A finding is a pattern in the compiled program. EXPECTED has the patterns that a strategy has by design, each with the
reason; all others are defects, of jaxpar or of a config. Waits are normal only up to LARGE_SHARE of a step. What only
moves data is a defect above it. `remedies` has the keys of a config that help.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ml_collections import ConfigDict

from jaxpar.choose.costs.rates import launch_seconds, memory_seconds
from jaxpar.cluster import Cluster
from jaxpar.core.mesh import GROUP_AXES
from jaxpar.core.optimizer import OPTIMIZERS
from jaxpar.errors import format_bytes
from jaxpar.inspect.programs import Moves, ProgramSummary
from jaxpar.inspect.step_time import WAIT, StepTime
from jaxpar.models.options import scans_layers
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.table_file import is_table_file

Kind = Literal[
    "float32", "stacks", "copies", "exposed in a loop", "exposed", "other stages", "synchronization", "recomputation"
]
WAITS: tuple[Kind, ...] = ("exposed in a loop", "exposed")
FLOAT32_SHARE = 0.01  # of the FLOPs of a step; a head for classes computes less than this in float32
TIME_SHARE = 0.01  # of the time of a step: less is no finding
LARGE_SHARE = 0.03  # of the time of a step: more is not normal, whatever the strategy
EXPOSED_SHARE = 0.5  # of the time of a collective: less of it is exposed because of its length, not of its place
RECOMPUTED_SHARE = 0.1  # of the FLOPs of both passes: cuDNN attention computes its scores again, which is less
REMAT_SHARE = 0.02  # the same with remat, which is known to compute products again

NEGLIGIBLE = f"at most {LARGE_SHARE:.0%} of the step"
AT_THE_END = "too little is left to compute when the last gradients are sent, one message after the other"
AT_THE_END_OF_ZERO = "nothing is left to compute when the last gradients and the updated parameters are sent"
AFTER_WARMUP = "compression begins after the warm-up"
TOO_LONG = "they overlap, but take longer than what is computed meanwhile"
BETWEEN_PRODUCTS = "layers wait for the positions of the other devices of a group"
AT_BOTH_ENDS = "nothing is left to compute before the first parameters arrive, and after the last gradients"
# Findings that are normal: strategy or exchange -> kind -> reason. An exchange precedes its strategy.
EXPECTED: Mapping[str, Mapping[Kind, str]] = {
    "data_parallel": {"exposed": AT_THE_END},
    "pipeline": {
        "exposed": AT_THE_END,
        "other stages": "stages wait for each other's results",
        "synchronization": "in each clock, a device chooses the action of its row of the table",
    },
    "zero1": {"exposed": AT_BOTH_ENDS},
    "zero2": {"exposed": AT_BOTH_ENDS},
    "zero3": {"exposed": AT_BOTH_ENDS},
    "hsdp": {"exposed": AT_BOTH_ENDS},
    "bagua_decentralized": {"synchronization": "a step chooses the replica to average weights with"},
    "bagua_model_average": {"synchronization": "weights are averaged once in several steps"},
    "bagua_qadam": {"synchronization": AFTER_WARMUP},
    "onebit_adam": {"synchronization": AFTER_WARMUP},
    "powersgd": {"synchronization": AFTER_WARMUP},
}


class RunProgram(NamedTuple):
    """A program that devices run in a step."""

    summary: ProgramSummary
    time: StepTime  # the predicted time of one run
    runs: float = 1.0  # in a step
    is_busiest: bool = True  # whether the device that computes longest runs it


class Finding(NamedTuple):
    """A pattern that costs time."""

    kind: Kind  # the kind of pattern
    text: str  # a description with numbers
    share: float = 0.0  # of the time of the step, for waits and moves
    reason: str = ""  # the reason why the strategy has it, or why it does not matter; or empty
    remedy: str = ""  # the key of the config that avoids it, and its value; or empty

    @property
    def is_normal(self) -> bool:
        """Whether nothing need be done about it."""
        return bool(self.reason) and self.share <= LARGE_SHARE


def find(
    programs: Sequence[RunProgram],
    step: StepTime,
    cluster: Cluster,
    expected: Mapping[Kind, str],
    remedies: Mapping[str, str],
    *,
    dtype: str,
    model_flops: float,
) -> list[Finding]:
    """Return the findings of a step, from its programs. Moves and waits are those of the busiest device.

    step: the predicted time of the step; expected: the result of `expectations`; remedies: that of `remedies`.
    model_flops: FLOPs of both passes of the model for the global batch.
    """
    busiest = [one for one in programs if one.is_busiest]
    found = [
        *_float32_products(programs, dtype, remedies.get("float32", "")),
        *_moves(busiest, step.seconds, cluster, remedies),
    ]
    found += _exposed(busiest, step.seconds, remedies)
    waiting = step.by_kind().get(WAIT, 0.0)
    if waiting > TIME_SHARE * step.seconds:
        share = waiting / step.seconds
        text = f"the busiest GPU waits {1e3 * waiting:.3g} ms ({share:.1%} of the step) for other stages"
        found.append(Finding("other stages", text, share, remedy=remedies.get("other stages", "")))
    if number := sum(one.runs * one.summary.synchronizations for one in busiest):
        found.append(Finding("synchronization", f"the host waits for the GPU {format_times(number)}"))
    flops = sum(one.runs * one.summary.num_devices * one.summary.flops for one in programs)
    remedy = remedies.get("recomputation", "")
    if flops > (1 + (REMAT_SHARE if remedy or "recomputation" in expected else RECOMPUTED_SHARE)) * model_flops:
        ratio = f"{flops / model_flops:.2f}"
        text = f"the products have {ratio} times the FLOPs of both passes of the model"
        found.append(Finding("recomputation", text, remedy=remedy))
    return [one._replace(reason=one.reason or expected.get(one.kind, "")) for one in found]


def expectations(config: ConfigDict, *, has_memory: bool = False) -> Mapping[Kind, str]:
    """Return the kinds of findings that are normal for the config of a run, each with the reason.

    has_memory: whether half of the memory is free.
    """
    expected = {**EXPECTED.get(config.strategy, {}), **EXPECTED.get(config.exchange, {})}
    if config.strategy == "pipeline" and config.exchange in ("zero1", "zero2"):  # its stages keep whole parameters
        expected["exposed"] = AT_THE_END_OF_ZERO
    if any(config.mesh[axis] > 1 for axis in GROUP_AXES):
        expected |= {"exposed in a loop": BETWEEN_PRODUCTS, "exposed": expected.get("exposed", BETWEEN_PRODUCTS)}
    section = "pipeline" if config.strategy == "pipeline" else "model"
    if config[section].remat != "none":
        if not has_memory:
            expected["recomputation"] = f"config.{section}.remat is {config[section].remat!r}"
        if section == "model":
            expected["stacks"] = "with rematerialization, a scan computes the layers and stacks their parameters"
    return expected


def remedies(config: ConfigDict, cluster: Cluster, *, has_memory: bool = False) -> Mapping[str, str]:
    """Return what avoids the findings of a run, by the kind of finding or by the collective that the GPU waits for.

    has_memory: whether half of the memory is free.
    """
    found, is_pipeline = {}, config.strategy == "pipeline"
    section = "pipeline" if is_pipeline else "model"
    if has_memory and config[section].remat != "none":
        found["recomputation"] = f"config.{section}.remat=none avoids it if it fits, which `jaxpar fit` finds out"
    generation = cluster.compute_capability.partition(".")[0]
    if generation.isdigit() and int(generation) < 8 and config.model.dtype == "bfloat16":
        found["float32"] = "these GPUs compute bfloat16 in float32; config.model.dtype=float16 uses their tensor cores"
    scans = scans_layers(config.model.scan_layers, config.model.remat) and not is_pipeline
    may_unroll = scans and config.model.remat == "none"  # otherwise, the memory would be that without rematerialization
    if may_unroll:
        found["stacks"] = "config.model.scan_layers=False avoids it"
    elif is_pipeline and config.pipeline.executor != "dispatch":
        found["stacks"] = "config.pipeline.executor=dispatch avoids it"
    elif is_pipeline and config.pipeline.schedule not in CONTINUOUS and not is_table_file(config.pipeline.schedule):
        found["other stages"] = "a larger config.pipeline.num_microbatches shortens it"
    is_alone = all(config.mesh[axis] == 1 for axis in GROUP_AXES)
    if config.strategy == "data_parallel" and is_alone and config.exchange not in ("zero3", "hsdp"):
        late = config.exchange in ("ddp", "horovod", "byteps", "zero1") and config.optimizer.accumulation_steps == 1
        if may_unroll:
            earlier = "with config.model.scan_layers=False, most are sent during the backward pass"
            found |= dict.fromkeys(("all-reduce", "reduce-scatter"), earlier)
        elif scans and late and OPTIMIZERS[config.optimizer.name].elementwise:
            earlier = (
                "with config.exchange=zero2, a scan sends the gradients of a layer while it computes the one before"
            )
            found |= dict.fromkeys(("all-reduce", "reduce-scatter"), earlier)
        elif config.exchange in ("ddp", "horovod", "byteps") and not config.exchange_options.wire_dtype:
            found["all-reduce"] = "config.exchange_options.wire_dtype=bfloat16 halves the bytes, and rounds gradients"
        if scans and config.exchange in ("zero1", "zero2"):
            found["all-gather"] = "with config.exchange=zero3, layers gather their parameters during both passes"
    return found


def _float32_products(programs: Sequence[RunProgram], dtype: str, remedy: str) -> list[Finding]:
    """Find products in float32 of a model in another dtype, by source; with a remedy, all of them together."""
    total = sum(one.runs * one.summary.flops for one in programs)
    flops: dict[str, float] = {}
    for runs, product in ((one.runs, product) for one in programs for product in one.summary.products):
        if product.dtype == "float32" != dtype:
            flops[product.source] = flops.get(product.source, 0.0) + runs * product.per_step * product.flops
    if remedy and sum(flops.values()) > FLOAT32_SHARE * total:
        text = f"{sum(flops.values()) / total:.1%} of the FLOPs are products of float32 arrays"
        return [Finding("float32", text, remedy=remedy)]
    return [
        Finding("float32", f"{part / total:.1%} of the FLOPs are products of float32 arrays in {source}")
        for source, part in flops.items()
        if part > FLOAT32_SHARE * total
    ]


def _moves(programs: Sequence[RunProgram], step: float, cluster: Cluster, remedies: Mapping[str, str]) -> list[Finding]:
    """Find kernels that only move data. If the rates are unknown, their share is that of the bytes of all kernels."""
    found = []
    kinds: dict[Kind, str] = {
        "stacks": "kernels that only move slices of stacked arrays",
        "copies": "copies in loops",
    }
    for kind, what in kinds.items():
        number, nbytes = _total(programs, kind)
        if step:
            seconds = memory_seconds(cluster, nbytes) + number * launch_seconds(cluster)
            share, took = seconds / step, f" in {1e3 * seconds:.3g} ms, {seconds / step:.1%} of the step"
        else:
            share = nbytes / max(_total(programs, "kernels").nbytes, 1)
            took = f", {share:.1%} of the bytes of all kernels"
        if share > TIME_SHARE:
            text = f"{what} read and write {format_bytes(nbytes)}{took}"
            reason = NEGLIGIBLE if share <= LARGE_SHARE else ""
            found.append(Finding(kind, text, share, reason, remedies.get(kind, "")))
    return found


def _total(programs: Sequence[RunProgram], name: str) -> Moves:
    moves: list[tuple[float, Moves]] = [(one.runs, getattr(one.summary, name)) for one in programs]
    return Moves(*(sum(runs * of_run[part] for runs, of_run in moves) for part in range(2)))


def _exposed(programs: Sequence[RunProgram], step: float, remedies: Mapping[str, str]) -> list[Finding]:
    """Find collectives for which the GPU waits: all of a kind together, as a step can wait for many small ones."""
    groups: dict[tuple[Kind, str, str], list[tuple[float, float]]] = {}  # number and exposed seconds of each
    for program in programs:
        for one in program.summary.collectives:
            seconds, exposed = program.time.collectives.get(one.name, (0.0, 0.0))
            if exposed:
                kind: Kind = "exposed in a loop" if one.per_step > 1 else "exposed"
                reason = "" if exposed > EXPOSED_SHARE * seconds else TOO_LONG
                number = program.runs * one.per_step
                groups.setdefault((kind, one.kind, reason), []).append((number, program.runs * exposed))
    found = []
    for (kind, operation, reason), group in groups.items():
        number, exposed = map(sum, zip(*group, strict=True))
        if exposed > TIME_SHARE * step:
            where = " in loops" if kind == "exposed in a loop" else ""
            wait = f"the GPU waits {1e3 * exposed:.3g} ms ({exposed / step:.1%} of the step)"
            text = f"{wait} for {_counted(number, operation)}{where}"
            found.append(Finding(kind, text, exposed / step, reason, remedies.get(operation, "")))
    # Several kinds of collectives can each take a small share of the step.
    shares = {kind: sum(one.share for one in found if one.kind == kind) for kind in WAITS}
    return [one._replace(share=shares[one.kind]) for one in found]


def format_times(number: float) -> str:
    """Return how often something happens: once, 0 times, 12 times."""
    return "once" if round(number) == 1 else f"{number:,.0f} times"


def _counted(number: float, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number:,.0f} {noun if round(number) == 1 else noun + 's'}"
