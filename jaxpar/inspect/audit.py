"""The audit compares the traffic and memory of the compiled programs of a step with the theoretical values."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.core.mesh import STAGE
from jaxpar.core.plan import ACTIVATION_PARTS, COPY, ON_HOST, Plan
from jaxpar.core.ring import RING_COLLECTIVES, sent_of_operand
from jaxpar.core.state import State
from jaxpar.exchange.exchange import DistributedState
from jaxpar.inspect import enqueued
from jaxpar.layout import Tree
from jaxpar.measure import hlo
from jaxpar.run.build import StrategyState
from jaxpar.strategies import Strategy
from jaxpar.strategies.asynchronous.programs import Server
from jaxpar.strategies.pipeline.executor.continuous import BUFFERS, WorkInFlight
from jaxpar.strategies.pipeline.executor.stage_programs import StageInputs
from jaxpar.strategies.pipeline.executor.state import PackedState
from jaxpar.strategies.strategy import CompiledProgram
from jaxpar.tasks import Task

OTHERS = ("collective-broadcast", "ragged-all-to-all", "send", "recv")  # no strategy uses them
SCALARS = "scalars"  # small all-reduces: the task's sums, norms and batch weights
MAX_SCALARS = 8  # most elements of an all-reduce of sums, unless the task's sums + 3 is larger
SCALAR_BYTES = 128  # most bytes sent per step for each of these elements
TOLERANCE = 0.05
INPUTS, TEMPORARY = "inputs", "temporary"
PASSING = ("stashes", "transfers")  # values that come and go in a step of several calls, of which a call reads some

Groups = tuple[tuple[int, ...], ...]  # groups of device indices
Sent = tuple[str, Groups, str]  # (kind, groups, dtype)


class CollectiveRow(NamedTuple):
    """The measured and theoretical traffic of one device per step, for one kind of collective."""

    kind: str  # the operation, such as all-reduce
    axis: str  # the mesh axis, or the groups of devices if they do not match an axis
    dtype: str  # the NumPy name of the dtype sent, or SCALARS
    number: float  # the number of collectives per step, after XLA combined some
    nbytes: float  # the bytes sent by the compiled programs
    theory: float | None  # the theoretical number of bytes; None if no formula predicts this collective
    required: float = 0.0  # the theoretical bytes that XLA cannot optimize away
    limit: float = SCALAR_BYTES * MAX_SCALARS  # the maximum number of bytes for scalars, which have no formula

    @property
    def ratio(self) -> float | None:
        """Ratio of the measured bytes to the theoretical bytes."""
        return self.nbytes / self.theory if self.theory else None

    @property
    def is_explained(self) -> bool:
        """Whether theory predicts the measured bytes, within the tolerance."""
        if self.kind == COPY and not self.nbytes:  # the host makes them; only those between calls are known
            return True
        if self.dtype == SCALARS or (self.kind == COPY and self.theory is None):
            return self.nbytes <= self.limit
        if self.theory is None:
            return False
        more = self.limit if self.kind == COPY else 0  # scalars are copied too
        return (1 - TOLERANCE) * self.required <= self.nbytes <= (1 + TOLERANCE) * self.theory + more


def audit(programs: Sequence[CompiledProgram], plan: Plan[object], task: Task) -> list[CollectiveRow]:
    """Return one row per kind of collective, for those in the programs of a step and those that theory predicts."""
    num_scalars = max(MAX_SCALARS, task.num_sums + 3)
    # By kind, axis and dtype: [number, bytes] of each device, and in theory [bytes, required bytes].
    by_device: dict[tuple[str, str, str], dict[int, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    theory: dict[tuple[str, str, str], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for dtype, sender, copied in enqueued.copies(programs):
        by_device[COPY, STAGE, dtype][sender] += (1, copied)
    for program in programs:
        text, axes = program.compiled.as_text(), program.mesh.shape if program.mesh else plan.axes
        assert text is not None
        for (kind, groups, dtype), sent in _collectives(text, program.frequencies, num_scalars).items():
            for device in devices_of(program):
                by_device[kind, axis_of(groups, axes), dtype][device.id] += np.multiply(program.runs, sent)
    # Of the device that sends most.
    measured = {key: max(of.values(), key=lambda sent: float(sent[1])).tolist() for key, of in by_device.items()}
    for one in plan.traffic:
        theory[one.kind, one.axis, one.dtype] += (one.nbytes, one.nbytes * one.required)
    expected = {key: nbytes.tolist() for key, nbytes in theory.items()}
    keys = sorted(measured.keys() | {key for key, (nbytes, _) in expected.items() if nbytes})
    rows = [CollectiveRow(*key, *measured.get(key, [0.0, 0.0]), *expected.get(key, [None, 0.0])) for key in keys]
    return [row._replace(limit=SCALAR_BYTES * num_scalars) for row in rows]


def _collectives(
    text: str, frequencies: Mapping[str, tuple[float, ...]], num_scalars: int
) -> dict[Sent, tuple[float, float]]:
    """Return the number per step of collectives, and the bytes sent. num_scalars: most elements of those of SCALARS."""

    def value(
        instruction: hlo.Instruction, operands: Sequence[hlo.HloArray]
    ) -> Mapping[tuple[str, Sent], float] | None:
        kind = instruction.operation.removesuffix("-start")
        if kind in OTHERS:
            other = (kind, (), "?")
            return {("bytes", other): sum(array.nbytes for array in operands), ("count", other): 1.0}
        if kind not in RING_COLLECTIVES:
            return None
        groups = groups_of(instruction)
        counts: dict[tuple[str, Sent], float] = {}
        for array in operands:
            is_scalars = math.prod(array.dims) <= num_scalars and kind == "all-reduce"
            key = (kind, groups, SCALARS if is_scalars else hlo.DTYPE_NAMES.get(array.dtype, array.dtype))
            size = max(len(group) for group in groups) if groups else 1
            counts["bytes", key] = counts.get(("bytes", key), 0.0) + sent_of_operand(kind, size) * array.nbytes
            counts["count", key] = 1.0
        return counts

    total = hlo.HloProgram.parse(text).total(value, hlo.by_scope(frequencies))
    return {key: (total["count", key], nbytes) for (what, key), nbytes in total.items() if what == "bytes"}


def groups_of(instruction: hlo.Instruction) -> Groups:
    """Return the groups of devices that communicate. For a permute, these are the devices connected by its pairs."""
    groups: Sequence[Collection[int]] = []
    if pairs := pairs_of(instruction):
        for pair in pairs:  # those that share a device are in one group
            joined = set(pair).union(*(group for group in groups if set(group) & set(pair)))
            groups = [*(group for group in groups if not set(group) & joined), joined]
    elif listed := re.search(r"replica_groups=\{(\{.*?\})\}", instruction.line):
        groups = [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.line):
        shape, dims, order = [[int(x) for x in part.split(",")] if part else [] for part in iota.groups()]
        numbers = np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims))).reshape(shape)
        groups = numbers.tolist()
    elif named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        along = [list(sizes).index(axis) for axis in re.findall(r"'([^']+)'", named[2])]
        numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        rows = np.moveaxis(numbers, along, range(-len(along), 0))
        groups = rows.reshape(-1, math.prod(numbers.shape[axis] for axis in along)).tolist()
    else:
        raise ValueError(f"unknown format of the replica groups: {instruction.line}")
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def pairs_of(instruction: hlo.Instruction) -> tuple[tuple[int, int], ...]:
    """Return the senders and receivers of a permute; empty for other collectives."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", instruction.line)
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{?(\d+),(\d+)", pairs[1])) if pairs else ()


def axis_of(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> str:
    """Return the mesh axis along which each group lies. If there is none, return a description of the groups.

    A single group along no axis is described by the names of all axes joined by `+`, several groups by their indices.
    """
    numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    for index, (axis, size) in enumerate(mesh.items()):
        lines = np.moveaxis(numbers, index, -1).reshape(-1, size)
        if size > 1 and all(any(set(group) <= set(line) for line in lines.tolist()) for group in groups):
            return axis
    return "+".join(axis for axis, size in mesh.items() if size > 1) if len(groups) == 1 else str(groups)


class DeviceBytes(NamedTuple):
    """The bytes of one kind on a device: measured in the compiled programs, and theoretical; None if not available."""

    nbytes: int | None
    theory: int | None


def devices_of(program: CompiledProgram) -> set[jax.Device]:
    """Return the devices that run a program."""
    if program.mesh:
        return set(program.mesh.devices.flat)
    shardings = jax.tree.leaves(program.compiled.input_shardings)
    return {device for sharding in shardings for device in sharding.device_set}


def memory(programs: Sequence[CompiledProgram], strategy: Strategy[StrategyState]) -> list[dict[str, DeviceBytes]]:
    """Return the bytes on each device by kind: parts of the state, inputs (such as batches) and temporary arrays."""
    measured: list[dict[str, int]] = [{} for _ in strategy.devices]
    for program in programs:
        analysis = program.compiled.memory_analysis()
        assert analysis is not None
        arguments = _arguments(program, strategy.plan)
        for device, parts in zip(strategy.devices, measured, strict=True):
            if device in arguments:
                local = arguments[device] | {TEMPORARY: analysis.temp_size_in_bytes}
                kept = {name: nbytes for name, nbytes in local.items() if not (program.calls and name in PASSING)}
                parts |= {name: max(parts.get(name, 0), nbytes) for name, nbytes in kept.items()}
    return [
        {
            name: DeviceBytes(parts.get(name, theory.get(name) and None), theory.get(name))
            for name in {**theory, **parts}
        }
        for parts, theory in zip(measured, strategy.plan.memory, strict=True)
    ]


def needed_bytes(programs: Sequence[CompiledProgram], strategy: Strategy[StrategyState]) -> dict[str, int]:
    """Return the bytes by kind on the device that needs most, while it runs the program that needs most.

    These are the bytes of XLA's buffer assignment, and the state that the plan has on the device and the program does
    not read. Results that reuse the memory of an argument do not count, nor do arguments that the plan keeps on the
    host. JAX has no host memory for devices that are absent, and assigns these arguments to the device. In a run, the
    step copies them to the device for the update, when there are temporary arrays of at least `Plan.update_bytes`.
    """
    found, plan = [], strategy.plan
    for program in programs:
        analysis = program.compiled.memory_analysis()
        assert analysis is not None
        arguments = _arguments(program, plan, of_stage="parameters")
        assigned = max(map(host_bytes_of, arguments.values())) - analysis.host_argument_size_in_bytes
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        # Activations are temporary arrays of the program of a whole step, and none is left for the exchange and the
        # update of a schedule with a flush. The results of a call are among what the plan has.
        has_none = not program.calls or ("private" in program.arguments and plan.delays is None)
        planned_results, not_read = results if program.calls and not has_none else 0, []
        for device, planned in zip(strategy.devices, plan.memory, strict=True):
            if device in arguments:
                kinds = [kind for kind in planned if not (has_none and kind in ACTIVATION_PARTS)]
                on_device = (kind for kind in kinds if not kind.endswith(ON_HOST))
                left = sum(max(planned[kind] - arguments[device].get(kind, 0), 0) for kind in on_device)
                not_read.append(max(left - planned_results, 0))
        found.append(
            {
                "arguments": analysis.argument_size_in_bytes - assigned,
                "results": results,
                "temporary arrays": max(analysis.temp_size_in_bytes, plan.update_bytes if assigned else 0),
                "machine code": analysis.generated_code_size_in_bytes,
                "other state": max(not_read),
            }
        )
    return max(found, key=lambda parts: sum(parts.values()))


def host_bytes_of(parts: Mapping[str, int]) -> int:
    """Return the bytes on the host, of bytes by kind that a plan has for a device."""
    return sum(nbytes for kind, nbytes in parts.items() if kind.endswith(ON_HOST))


def _arguments(
    program: CompiledProgram, plan: Plan[object], of_stage: str = INPUTS
) -> dict[jax.Device, dict[str, int]]:
    """Return the bytes of the arguments of a program by device and kind. of_stage: as in `_kinds`."""
    planned = {kind for parts in plan.memory for kind in parts}  # the shardings of absent devices lack the host
    arguments, _ = program.compiled.args_info
    shardings, _ = program.compiled.input_shardings
    kinds = [*program.arguments, *(_kinds(one, of_stage) for one in arguments[len(program.arguments) :])]
    nbytes_on: dict[jax.Device, dict[str, int]] = {device: {} for device in devices_of(program)}

    def add(kind: str, info: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None) -> None:
        if sharding is None:  # the program does not read it
            return
        kind += ON_HOST if kind + ON_HOST in planned else ""
        nbytes = math.prod(sharding.shard_shape(info.shape)) * np.dtype(info.dtype).itemsize
        for device in sharding.device_set:
            parts = nbytes_on[device]
            parts[kind] = parts.get(kind, 0) + nbytes

    jax.tree.map(add, jax.tree.broadcast(tuple(kinds), arguments), arguments, shardings)
    return nbytes_on


def _kinds(argument: Tree, of_stage: str) -> Tree:
    """Return the kinds of bytes of an argument, as a prefix of its tree. of_stage: for the parameters of a stage."""
    match argument:
        case StageInputs():
            return StageInputs._make((of_stage, *[INPUTS] * (len(argument) - 1)))
        case State(optimizer=DistributedState()):
            return State._make((INPUTS, INPUTS, "parameters", DistributedState("optimizer", "private")))
        case State():
            return State._make((INPUTS, INPUTS, "parameters", "optimizer"))
        case PackedState(private=WorkInFlight()):
            buffers = dict.fromkeys(BUFFERS, "transfers") | {"stashes": "stashes", "grads": "gradients"}
            return PackedState(
                INPUTS, INPUTS, "parameters", "optimizer", WorkInFlight(INPUTS, "private", buffers, "batches", INPUTS)
            )
        case PackedState():
            return PackedState(INPUTS, INPUTS, "parameters", "optimizer", "private")
        case Server():
            return Server._make(("optimizer", "waiting", "mitigations", INPUTS))
    return INPUTS
