"""Predicts the time of a step that is compiled for GPUs, by a roofline over the instructions of the program.

A kernel takes as long as its FLOPs or its bytes do at the rates of the GPU, whichever is longer, and a fixed time.
Kernels run one after the other, in the order of the program. A collective takes the time of a ring algorithm on the
slowest link that it crosses. If it is asynchronous, it runs at the same time as the kernels between its start and its
end; the time that the GPU then still waits is exposed. Collectives run one after the other. In a pipeline, each clock
takes as long as the actions of its slowest device. That the host waits for a value of the GPU costs nothing.

The rates are those of jaxpar/choose/costs/rates.py.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar.choose.costs.rates import (
    collective_seconds,
    host_copy_seconds,
    launch_seconds,
    memory_seconds,
    product_seconds,
)
from jaxpar.cluster import Cluster
from jaxpar.core.ring import PERMUTE, RING_COLLECTIVES, sent_of_operand
from jaxpar.errors import UserError
from jaxpar.inspect import enqueued
from jaxpar.inspect.audit import groups_of, pairs_of
from jaxpar.inspect.programs import is_kernel
from jaxpar.measure.hlo import DTYPE_NAMES, HloProgram, Instruction, by_scope
from jaxpar.measure.kernels import ATTENTION, call_target, is_product, kernel_bytes, product_flops
from jaxpar.strategies.pipeline.executor.enqueue import ENQUEUE_SECONDS
from jaxpar.strategies.strategy import CompiledProgram

ONE_PROGRAM = ("single", "data_parallel", "pipeline")  # strategies whose step is one program, except for exchange dp
BY_MASTER = "dp"


class Part(NamedTuple):
    """A part of a step: the kind of a kernel or of an exposed collective, and its path of scopes in the JAX program.

    For those that XLA adds, the path is a name and the first result, such as `copy f32[1024,512]`.
    """

    kind: str
    source: str


class StepTime(NamedTuple):
    """The predicted time of a step on one device, or of a part of the step."""

    seconds: float  # the time
    exposed: float  # the seconds in which the device waits for collectives
    flops: float  # FLOPs of the matrix products, convolutions and attention kernels
    parts: Mapping[Part, float]  # the seconds of each part
    # of each collective, by the name of the instruction that starts it, the seconds on the link and the exposed seconds
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
        parts, collectives = dict(self.parts), dict(self.collectives)
        for part, seconds in other.parts.items():
            parts[part] = parts.get(part, 0.0) + times * seconds
        for name, (on_link, exposed) in other.collectives.items():
            before = collectives.get(name, (0.0, 0.0))
            collectives[name] = (before[0] + times * on_link, before[1] + times * exposed)
        seconds, exposed, flops = (mine + times * its for mine, its in zip(self[:3], other[:3], strict=True))
        return StepTime(seconds, exposed, flops, parts, collectives)


WAIT = "wait"  # the kind of the time in which a device has nothing to run
NOTHING = StepTime(0.0, 0.0, 0.0, {})


def check_step(config: ConfigDict) -> None:
    """Raise UserError for a step that is more than one program that all its devices run: its time is not known."""
    not_predicted = "to predict the time of a step, because the prediction lacks"
    if config.strategy not in ONE_PROGRAM:
        raise UserError(
            f"config.strategy is {config.strategy!r}; it must be one of {', '.join(ONE_PROGRAM)} {not_predicted} "
            "programs that run at the same time or several times, and copies between them"
        )
    if config.exchange == BY_MASTER:
        raise UserError(
            f"config.exchange is {BY_MASTER!r}; it must be another one {not_predicted} copies that the host makes "
            "between devices"
        )


def predict(programs: Sequence[CompiledProgram], cluster: Cluster, offloaded_bytes: float = 0.0) -> StepTime:
    """Return the predicted time of the programs of a step on the device that is busy longest.

    Programs without calls run one after the other. For others, see enqueued.py. Raises UserError for an unknown rate.

    offloaded_bytes: of an optimizer state in host memory, which a step copies from there and back; programs for absent
    GPUs lack these copies.
    """
    return total_time(programs, [predict_program(program, cluster) for program in programs], cluster, offloaded_bytes)


def total_time(
    programs: Sequence[CompiledProgram], times: Sequence[StepTime], cluster: Cluster, offloaded_bytes: float = 0.0
) -> StepTime:
    """Return the predicted time of a step, as `predict` does. times: of one run of each program."""
    if any(program.calls for program in programs):
        return _time_of_calls(programs, times, cluster)
    return reduce(StepTime.plus, times, host_copies(cluster, offloaded_bytes))


def are_on_busiest(programs: Sequence[CompiledProgram], times: Sequence[StepTime]) -> list[bool]:
    """Return for each program whether the device that is busy longest runs it. times: of one run of each program."""
    if not any(program.calls for program in programs):
        return [True] * len(programs)
    of_devices = enqueued.busy(programs, [time.seconds for time in times])
    busiest = max(of_devices, key=lambda device: of_devices[device])
    return [busiest in enqueued.ids(program) for program in programs]


def host_copies(cluster: Cluster, offloaded_bytes: float) -> StepTime:
    """Return the time in which a step copies an optimizer state from the host and back."""
    copied = 2 * host_copy_seconds(cluster, offloaded_bytes)
    part = {Part("copy", "optimizer state from the host and back"): copied} if copied else {}
    return StepTime(copied, 0.0, 0.0, part)


def predict_program(program: CompiledProgram, cluster: Cluster) -> StepTime:
    """Return the predicted time of one run of a program. Raises UserError if a rate of the GPU is unknown."""
    text = program.compiled.as_text()
    assert text is not None
    roofline = _Roofline(HloProgram.parse(text), program, cluster)
    return roofline.walk(roofline.program.entry)


def _communicating(program: CompiledProgram) -> list[list[int]]:
    """Return the groups of devices that communicate in a program with calls, as their ids."""
    text, devices = program.compiled.as_text(), enqueued.ids(program)
    assert text is not None
    groups = {
        group
        for instructions in HloProgram.parse(text).computations.values()
        for one in instructions.values()
        if one.operation.removesuffix("-start") in RING_COLLECTIVES
        for group in groups_of(one)
    }
    return [[devices[number] for number in group] for group in sorted(groups)]


def _time_of_calls(programs: Sequence[CompiledProgram], times: Sequence[StepTime], cluster: Cluster) -> StepTime:
    def send(sender: int, receiver: int, nbytes: int) -> float:
        return collective_seconds(cluster, PERMUTE, [(sender, receiver)], nbytes)

    seconds = [time.seconds for time in times]
    per_process = cluster.num_devices // cluster.num_processes
    costs = enqueued.Costs(seconds, [*map(_communicating, programs)], send, ENQUEUE_SECONDS, per_process)
    step = enqueued.simulated_step(programs, costs)
    total = NOTHING
    for program, time, is_busiest in zip(programs, times, are_on_busiest(programs, times), strict=True):
        if is_busiest:
            total = total.plus(time, program.runs)
    wait = step - total.seconds
    return total.plus(StepTime(wait, wait, 0.0, {Part(WAIT, "of the busiest device for the others"): wait}))


class _Roofline:
    """The times of a program's computations."""

    def __init__(self, program: HloProgram, compiled: CompiledProgram, cluster: Cluster) -> None:
        self.program, self._frequency, self._cluster = program, by_scope(compiled.frequencies), cluster
        self._branches = compiled.branches
        self._devices = enqueued.ids(compiled) if compiled.mesh else None
        self._of_computation = cache(self.walk)

    def walk(self, computation: str, chosen: Mapping[str, StepTime] = {}) -> StepTime:
        """Return the time of a computation and its collectives. chosen: times of some instructions, by name."""
        total, link_is_free = NOTHING, 0.0
        ends: dict[str, float] = {}
        on_link: dict[str, float] = {}
        for name, instruction in self.program.computations[computation].items():
            operation = instruction.operation
            if operation.removesuffix("-start") in RING_COLLECTIVES:
                on_link[name] = seconds = self._collective_seconds(computation, instruction)
                ends[name] = link_is_free = max(total.seconds, link_is_free) + seconds
            if operation in RING_COLLECTIVES or operation.endswith("-done"):
                started = name if operation in RING_COLLECTIVES else instruction.operands[0]
                wait = max(ends.get(started, 0.0) - total.seconds, 0.0)
                part = Part(operation.removesuffix("-done"), _source(name, instruction))
                collectives = {started: (on_link[started], wait)} if started in on_link else {}
                total = total.plus(StepTime(wait, wait, 0.0, {part: wait}, collectives))
            elif name in chosen:
                total = total.plus(chosen[name])
            elif operation == "while":
                total = total.plus(self._loop(instruction))
            elif operation in ("conditional", "call"):
                total = total.plus(self._called(instruction))
            elif is_kernel(instruction):
                total = total.plus(self._kernel(computation, name, instruction))
        return total

    def _called(self, instruction: Instruction) -> StepTime:
        """Return the mean time of what an instruction calls; of the longest branch if devices differ."""
        times = [self._of_computation(one) for one in self.program.called(instruction)]
        source = instruction.source
        differ = any(f"/{scope}/" in source for scope, branches in self._branches.items() if len(branches.taken) == 1)
        if instruction.operation == "conditional" and (differ or self._frequency(source) is None):
            return max(times, key=lambda one: one.seconds)
        total = NOTHING
        if any(one.seconds for one in times):
            for one, runs in zip(times, self.program.runs(instruction, self._frequency), strict=True):
                total = total.plus(one, runs)
        return total

    def _loop(self, instruction: Instruction) -> StepTime:
        """Return the time of a loop. In a loop over clocks, a clock takes as long as its slowest device."""
        [trips, *_] = self.program.runs(instruction, self._frequency)
        *others, body = self.program.called(instruction)
        by_clock = self._branches_of(body, int(trips))
        if not by_clock:
            return self._called(instruction)
        total = NOTHING
        for condition in others:
            total = total.plus(self._of_computation(condition), trips)
        of_branches = {
            name: [self._of_computation(one) for one in self.program.called(self.program.computations[body][name])]
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
            total = total.plus(self.walk(body, chosen), number)
        return total

    def _branches_of(self, body: str, trips: int) -> dict[str, np.ndarray]:
        """Return the branches taken in the conditionals of a loop over clocks: int [trip, device], by instruction."""
        found: dict[str, np.ndarray] = {}
        for name, instruction in self.program.computations[body].items():
            for scope, branches in self._branches.items():
                is_inside = f"/{scope}/" in instruction.source and len(branches.taken) > 1
                if instruction.operation == "conditional" and is_inside:
                    assert len(branches.taken) == trips, "the loop is not over the clocks of the table"
                    found[name] = branches.taken
        return found

    def _kernel(self, computation: str, name: str, instruction: Instruction) -> StepTime:
        kind, flops, seconds = "kernel", 0.0, 0.0
        for inside, inner in self.program.inside(computation, instruction):
            if is_product(inner):
                operands = self.program.operand_types(inside, inner)
                of_product = product_flops(inner, operands)
                kind = "attention" if call_target(inner).startswith(ATTENTION) else "product"
                dtype = DTYPE_NAMES.get(operands[0].dtype, operands[0].dtype)
                flops += of_product
                seconds += product_seconds(self._cluster, kind, dtype, of_product, operands[0].dims[-1])
        memory = memory_seconds(self._cluster, kernel_bytes(self.program, computation, instruction))
        seconds = max(seconds, memory) + launch_seconds(self._cluster)
        return StepTime(seconds, 0.0, flops, {Part(kind, _source(name, instruction)): seconds})

    def _collective_seconds(self, computation: str, instruction: Instruction) -> float:
        groups: Sequence[Sequence[int]] = pairs_of(instruction) or groups_of(instruction)
        if self._devices:  # the groups number the devices of the program
            groups = [[self._devices[number] for number in group] for group in groups]
        kind, size = instruction.operation.removesuffix("-start"), max(map(len, groups), default=1)
        nbytes = sum(array.nbytes for array in self.program.operand_types(computation, instruction))
        return collective_seconds(self._cluster, kind, groups, sent_of_operand(kind, size) * nbytes)


def _source(name: str, instruction: Instruction) -> str:
    if instruction.has_source:
        return instruction.source
    shape = "".join(f" {one.dtype}[{','.join(map(str, one.dims))}]" for one in instruction.results[:1])
    return re.sub(r"[.\d]+$", "", name) + shape


def short_source(source: str) -> str:
    """Return a path of scopes without those of JAX itself."""
    parts = re.sub(r"\b(jit|transpose|jvp|checkpoint|remat|vmap)\(([^()]*)\)", r"\2", source)
    parts = re.sub(r"\b(jit|transpose|jvp|checkpoint|remat|vmap)\(([^()]*)\)", r"\2", parts)
    dropped = {"", "step", "shard_map", "while", "body", "closed_call", "scan", "cond", "pjit"}
    return "/".join(part for part in parts.split("/") if part not in dropped)
