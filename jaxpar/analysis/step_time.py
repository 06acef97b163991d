"""Predicts the time of a step that is compiled for GPUs, by a roofline over the schedule of the program.

A kernel takes as long as its FLOPs or its bytes do at the rates of the GPU, whichever is longer, and the time to launch
it. Kernels run one after the other, in the order of the schedule. A collective takes the time of a ring algorithm on
the slowest link that it crosses. If it is asynchronous, it runs at the same time as the kernels between its start and
its end; the time that the GPU then still waits is exposed. Collectives run one after the other. In a pipeline, each
clock takes as long as the actions of its slowest device.

Rates are those of data sheets (jaxpar/gpus, jaxpar/measure/flops.py) times the efficiencies below, which are
assumptions: docs/benchmarks.md compares predicted rates with published ones.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxpar.analysis.audit import SENT, groups_of
from jaxpar.analysis.schedule import is_kernel
from jaxpar.cluster import PEAK_DTYPES, Cluster
from jaxpar.errors import UserError
from jaxpar.measure.hlo import HloProgram, Instruction, by_scope
from jaxpar.measure.kernels import ATTENTION, call_target, is_product, kernel_bytes, product_flops
from jaxpar.strategies.strategy import CompiledProgram

EFFICIENCY = {
    "product": 0.7,  # of the peak FLOP/s, in matrix products and convolutions
    "attention": 0.5,  # of the peak FLOP/s, in attention kernels
    "memory": 0.85,  # of the rate of the memory
    "link": 0.8,  # of the rate of a link
}
# By the first digit of the compute capability, if it differs. A100s: matrix products reach 80% to 90% of the peak, and
# attention 50% to 73% (Dao, "FlashAttention-2", 2023, abstract and section 1).
EFFICIENCY_OF = {"8": {"product": 0.85, "attention": 0.6}}
LAUNCH_SECONDS = 2e-6  # from the end of a kernel to the start of the next one
HOP_SECONDS = {"host": 3e-6, "network": 1e-5}  # of each of the log2(n) hops of a collective of n GPUs
HALF_WIDTH = ("bf16", "f16", "f8e4m3fn", "f8e5m2")  # dtypes of products at the rate of bfloat16


class Part(NamedTuple):
    """A part of a step: the kind of a kernel or of an exposed collective, and its path of scopes in the JAX program."""

    kind: str
    source: str


class StepTime(NamedTuple):
    """The predicted time of a step on one device, or of a part of the step.

    Attributes:
      seconds: the time.
      exposed: the seconds in which the device waits for collectives.
      flops: FLOPs of the matrix products, convolutions and attention kernels.
      parts: the seconds of each part.
      collectives: of each collective, by the name of the instruction that starts it, the seconds on the link and the
        exposed seconds.
    """

    seconds: float
    exposed: float
    flops: float
    parts: Mapping[Part, float]
    collectives: Mapping[str, tuple[float, float]] = {}

    def by_kind(self) -> dict[str, float]:
        """Return the seconds by kind, from the largest."""
        total: dict[str, float] = {}
        for part, seconds in self.longest():
            total[part.kind] = total.get(part.kind, 0.0) + seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def longest(self) -> list[tuple[Part, float]]:
        """Return the parts and their seconds, from the longest."""
        return sorted(self.parts.items(), key=lambda item: -item[1])

    def plus(self, other: "StepTime", times: float = 1.0) -> "StepTime":
        """Return the time of this and then, `times` times, of another part."""
        parts = dict(self.parts)
        for part, seconds in other.parts.items():
            parts[part] = parts.get(part, 0.0) + times * seconds
        collectives = dict(self.collectives)
        for name, (on_link, exposed) in other.collectives.items():
            before = collectives.get(name, (0.0, 0.0))
            collectives[name] = (before[0] + times * on_link, before[1] + times * exposed)
        return StepTime(
            self.seconds + times * other.seconds,
            self.exposed + times * other.exposed,
            self.flops + times * other.flops,
            parts,
            collectives,
        )


NOTHING = StepTime(0.0, 0.0, 0.0, {})


def predict(programs: Sequence[CompiledProgram], cluster: Cluster) -> StepTime:
    """Return the predicted time of a step that runs these programs one after the other.

    Raises:
      UserError: a rate of the GPU is unknown.
    """
    total = NOTHING
    for program in programs:
        text = program.compiled.as_text()
        assert text is not None
        total = total.plus(_Roofline(HloProgram(text), program, cluster).time())
    return total


def can_predict(cluster: Cluster) -> bool:
    """Return whether all rates of the GPUs are known."""
    return bool(cluster.send_rates) and all(dtype in cluster.peak_flops for dtype in PEAK_DTYPES)


class _Roofline:
    """The times of a program's computations."""

    def __init__(self, program: HloProgram, compiled: CompiledProgram, cluster: Cluster) -> None:
        self._program, self._frequency, self._cluster = program, by_scope(compiled.frequencies), cluster
        self._branches = compiled.branches
        self._of_computation = cache(self._walk)

    def time(self) -> StepTime:
        return self._of_computation(self._program.entry)

    def _walk(self, computation: str, chosen: Mapping[str, StepTime] = {}) -> StepTime:
        """Follow the schedule of a computation: what its device does, and what its links do meanwhile.

        chosen: the times of some of its instructions, by name.
        """
        total, link_is_free = NOTHING, 0.0
        ends: dict[str, float] = {}
        on_link: dict[str, float] = {}
        for name, instruction in self._program.computations[computation].items():
            operation = instruction.operation
            if operation.removesuffix("-start") in SENT:
                on_link[name] = seconds = self._collective_seconds(computation, instruction)
                ends[name] = link_is_free = max(total.seconds, link_is_free) + seconds
            if operation in SENT or operation.endswith("-done"):
                started = name if operation in SENT else instruction.operands[0]
                wait = max(ends.get(started, 0.0) - total.seconds, 0.0)
                part = Part(operation.removesuffix("-done"), instruction.source)
                collectives = {started: (on_link[started], wait)} if started in on_link else {}
                total = total.plus(StepTime(wait, wait, 0.0, {part: wait}, collectives))
            elif name in chosen:
                total = total.plus(chosen[name])
            elif operation == "while":
                total = total.plus(self._loop(instruction))
            elif operation in ("conditional", "call"):
                total = total.plus(self._called(instruction))
            elif is_kernel(instruction):
                total = total.plus(self._kernel(computation, instruction))
        return total

    def _called(self, instruction: Instruction) -> StepTime:
        """Return the mean time of what an instruction calls.

        For a conditional in which devices differ, or whose fractions are unknown, this is the longest branch.
        """
        times = [self._of_computation(one) for one in self._program.called(instruction)]
        source = instruction.source
        differ = any(f"/{scope}/" in source for scope, branches in self._branches.items() if len(branches.taken) == 1)
        if instruction.operation == "conditional" and (differ or self._frequency(source) is None):
            return max(times, key=lambda one: one.seconds)
        total = NOTHING
        if any(one.seconds for one in times):
            for one, runs in zip(times, self._program.runs(instruction, self._frequency), strict=True):
                total = total.plus(one, runs)
        return total

    def _loop(self, instruction: Instruction) -> StepTime:
        """Return the time of a loop. In a loop over clocks, a clock takes as long as its slowest device."""
        [trips, *_] = self._program.runs(instruction, self._frequency)
        *others, body = self._program.called(instruction)
        by_clock = self._branches_of(body, int(trips))
        if not by_clock:
            return self._called(instruction)
        total = NOTHING
        for condition in others:
            total = total.plus(self._of_computation(condition), trips)
        of_branches = {
            name: [self._of_computation(one) for one in self._program.called(self._program.computations[body][name])]
            for name in by_clock
        }
        seconds = sum(
            np.array([one.seconds for one in of_branches[name]])[taken] for name, taken in by_clock.items()
        )  # [trip, device]
        slowest = np.argmax(seconds, axis=1)
        clocks = Counter(
            tuple(int(taken[trip, device]) for taken in by_clock.values()) for trip, device in enumerate(slowest)
        )
        for taken, number in clocks.items():
            chosen = {name: of_branches[name][branch] for name, branch in zip(by_clock, taken, strict=True)}
            total = total.plus(self._walk(body, chosen), number)
        return total

    def _branches_of(self, body: str, trips: int) -> dict[str, np.ndarray]:
        """Return the branches taken in the conditionals of a loop over clocks: int [trip, device], by instruction."""
        found: dict[str, np.ndarray] = {}
        for name, instruction in self._program.computations[body].items():
            for scope, branches in self._branches.items():
                is_inside = f"/{scope}/" in instruction.source and len(branches.taken) > 1
                if instruction.operation == "conditional" and is_inside:
                    assert len(branches.taken) == trips, "the loop is not over the clocks of the table"
                    found[name] = branches.taken
        return found

    def _kernel(self, computation: str, instruction: Instruction) -> StepTime:
        kind, flops, seconds = "kernel", 0.0, 0.0
        for inside, inner in self._program.inside(computation, instruction):
            if is_product(inner):
                operands = self._program.operand_types(inside, inner)
                of_product = product_flops(inner, operands)
                kind = "attention" if call_target(inner).startswith(ATTENTION) else "product"
                dtype = "bfloat16" if operands[0].dtype in HALF_WIDTH else "float32"
                flops, seconds = flops + of_product, seconds + of_product / self._flop_rate(kind, dtype)
        memory = kernel_bytes(self._program, computation, instruction) / self._memory_rate()
        seconds = max(seconds, memory) + LAUNCH_SECONDS
        return StepTime(seconds, 0.0, flops, {Part(kind, instruction.source): seconds})

    def _flop_rate(self, kind: str, dtype: str) -> float:
        peak = self._cluster.peak_flops.get(dtype)
        if peak is None:
            raise UserError(
                f"--time is set; it must be unset for the GPU {self._cluster.device_kind!r}, whose peak FLOP/s in "
                f"{dtype} are unknown"
            )
        generation = self._cluster.compute_capability.partition(".")[0]
        return (EFFICIENCY | EFFICIENCY_OF.get(generation, {}))[kind] * peak

    def _memory_rate(self) -> float:
        assert self._cluster.memory_bandwidth is not None  # every kind of GPU has its own
        return EFFICIENCY["memory"] * self._cluster.memory_bandwidth

    def _collective_seconds(self, computation: str, instruction: Instruction) -> float:
        groups = groups_of(instruction)
        size = max(map(len, groups), default=1)
        if size == 1:
            return 0.0
        if not self._cluster.send_rates:
            raise UserError(
                f"--time is set; it must be unset for the GPU {self._cluster.device_kind!r}, whose file has no links"
            )
        per_host = self._cluster.num_devices // self._cluster.num_processes
        rates, hops = self._cluster.send_rates, math.ceil(math.log2(size))
        rate, hop = rates["host"], HOP_SECONDS["host"]
        if any(len({device // per_host for device in group}) > 1 for group in groups):
            # The rings of a group share the network of all its GPUs on a host.
            together = min(Counter(device // per_host for device in group).most_common()[-1][1] for group in groups)
            rate, hop = min(rate, together * rates["network"]), HOP_SECONDS["network"]
        kind = instruction.operation.removesuffix("-start")
        nbytes = sum(array.nbytes for array in self._program.operand_types(computation, instruction))
        return SENT[kind](size) * nbytes / (EFFICIENCY["link"] * rate) + hops * hop


def short_source(source: str) -> str:
    """Return a path of scopes without those of JAX itself."""
    parts = re.sub(r"\b(jit|transpose|jvp|checkpoint|remat|vmap)\(([^()]*)\)", r"\2", source)
    parts = re.sub(r"\b(jit|transpose|jvp|checkpoint|remat|vmap)\(([^()]*)\)", r"\2", parts)
    dropped = {"", "step", "shard_map", "while", "body", "closed_call", "scan", "cond", "pjit"}
    return "/".join(part for part in parts.split("/") if part not in dropped)
