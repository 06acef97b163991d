"""Summarizes what the programs of a step run, and which temporary arrays they hold at the peak of the memory.

XLA starts an asynchronous collective with one instruction and waits for it with another. What lies between the two runs
at the same time. If that is nothing, the collective is exposed: the GPU waits for it.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpar.core.ring import RING_COLLECTIVES
from jaxpar.measure.hlo import DTYPE_NAMES, Frequency, HloArray, HloProgram, Instruction, SourceLines, by_scope
from jaxpar.measure.kernels import call_target, is_product, kernel_bytes, product_flops
from jaxpar.measure.liveness import FLOW, live_at_peak
from jaxpar.strategies.strategy import CompiledProgram

SMALL = 8  # elements of a collective that is not reported, such as a norm
NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
SLICE_MOVES = {"dynamic-slice", "dynamic-update-slice"}
STACK = re.compile(r"[\w.]+-[\w.]+\)*/stack\b")  # the scope of what a scan over layers stacks before the loop


class OverlappedCollective(NamedTuple):
    """A collective of a step."""

    kind: str  # the operation, such as all-gather
    dtype: str  # the NumPy name of the dtype sent
    nbytes: int  # bytes of its operands on a device
    per_step: float  # how often it runs in a step
    kernels: int  # number of kernels that run between its start and its end; 0 if it is not asynchronous
    products: int  # number of matrix products in these kernels
    source: str  # the path of named scopes in the JAX program
    name: str  # the name of the instruction that starts it


class MatrixProduct(NamedTuple):
    """A matrix product, convolution or attention kernel of a step."""

    dtype: str  # the NumPy name of the dtype of its first operand
    per_step: float  # how often it runs in a step
    flops: float  # FLOPs of one run
    library: str  # the library function that computes it; empty for code of XLA
    source: str  # the path of named scopes in the JAX program


class Moves(NamedTuple):
    """Kernels that only move data."""

    number: float = 0.0  # the number of runs of these kernels
    nbytes: float = 0.0  # bytes that they read and write together

    def plus(self, times: float, nbytes: float) -> "Moves":
        """Return these and `times` runs of a kernel that reads and writes `nbytes` bytes."""
        return Moves(self.number + times, self.nbytes + times * nbytes)


class ProgramSummary(NamedTuple):
    """The collectives, products and copies of a program. All numbers are for one run on one device."""

    name: str  # the name of the program, such as jit_step
    num_devices: int  # the number of devices that run the program
    collectives: list[OverlappedCollective]  # the collectives of more than SMALL elements, in the order of the program
    products: list[MatrixProduct]  # the matrix products
    # kernels that only move slices of stacks in loops, or stack the parameters of layers for a scan
    stacks: Moves
    copies: Moves  # copies in loops
    kernels: Moves  # all kernels besides collectives
    # how often the host waits for a value of the GPU: to choose the branch of a conditional, or to end a loop whose
    # trip count XLA does not know
    synchronizations: float

    @property
    def flops(self) -> float:
        """FLOPs of the matrix products on a device."""
        return sum(product.per_step * product.flops for product in self.products)


def summarize(compiled: CompiledProgram) -> ProgramSummary:
    """Return what a program runs. Raises ValueError if it is unknown how often a loop or a branch runs."""
    text = compiled.compiled.as_text()
    assert text is not None
    program, frequency = HloProgram.parse(text), by_scope(compiled.frequencies)
    collectives: list[OverlappedCollective] = []
    products: list[MatrixProduct] = []
    stacks = copies = kernels = Moves()
    synchronizations = 0.0
    for computation, times in _runs(program, frequency).items():
        for place, (name, instruction) in enumerate(program.computations[computation].items()):
            operands = program.operand_types(computation, instruction)
            if (kind := instruction.operation.removesuffix("-start")) in RING_COLLECTIVES:
                if sum(math.prod(array.dims) for array in operands) > SMALL:
                    nbytes, dtype = sum(array.nbytes for array in operands), _dtype(operands)
                    meanwhile, source = _until_done(program, computation, place), instruction.source
                    collectives.append(OverlappedCollective(kind, dtype, nbytes, times, *meanwhile, source, name))
            elif instruction.operation in FLOW:
                synchronizations += times * _synchronizations(program, instruction, frequency)
            elif is_kernel(instruction):
                products += [one._replace(per_step=times) for one in _products(program, computation, instruction)]
                moved, what = kernel_bytes(program, computation, instruction), _moved(program, computation, instruction)
                kernels = kernels.plus(times, moved)
                if what == "stack" or (what == "slices" and times > 1):
                    stacks = stacks.plus(times, moved)
                elif what == "copies" and times > 1:
                    copies = copies.plus(times, moved)
    numbers = (stacks, copies, kernels, synchronizations)
    return ProgramSummary(program.name, program.num_devices, collectives, products, *numbers)


def _runs(program: HloProgram, frequency: Frequency) -> Mapping[str, float]:
    """Return how often each scheduled computation runs in a step: the entry, and what loops and branches contain."""
    runs: dict[str, float] = {}

    def visit(computation: str, times: float) -> None:
        runs[computation] = runs.get(computation, 0.0) + times
        for instruction in program.computations[computation].values():
            if times and instruction.operation in FLOW:
                inner = program.runs(instruction, frequency)
                for called, number in zip(program.called(instruction), inner, strict=True):
                    visit(called, times * number)

    visit(program.entry, 1.0)
    return {computation: times for computation, times in runs.items() if times}


def _synchronizations(program: HloProgram, instruction: Instruction, frequency: Frequency) -> float:
    """Return how often the host waits for the GPU in one run of an instruction."""
    if instruction.operation == "while" and not program.has_known_trip_count(instruction):
        return program.runs(instruction, frequency)[0] + 1
    return 1.0 if instruction.operation == "conditional" else 0.0


def _moved(program: HloProgram, computation: str, instruction: Instruction) -> str:
    """Return what a kernel moves without computing: "slices", "copies", or the layers of a "stack"; otherwise ""."""
    kernel = [one for _, one in program.inside(computation, instruction)]
    arrays = [one for one in kernel if any(array.dims for array in one.results)]  # scalars are indices
    operations = {one.operation.removesuffix("-start") for one in arrays} - {"fusion", "copy", *NO_KERNELS}
    if operations == {"concatenate"} and any(STACK.search(one.source) for one in kernel):
        return "stack"
    if operations:
        return "slices" if operations <= SLICE_MOVES else ""
    return "copies" if any("copy" in one.operation for one in arrays) else ""


def is_kernel(instruction: Instruction) -> bool:
    """Return whether an instruction of a scheduled computation runs a kernel that is no collective."""
    operation = instruction.operation
    is_collective = operation.removesuffix("-start") in RING_COLLECTIVES
    return not (is_collective or operation in NO_KERNELS or operation.endswith("-done"))


def _until_done(program: HloProgram, computation: str, place: int) -> tuple[int, int]:
    """Return the numbers of kernels and products between the start of a collective, at this place, and its end."""
    (name, start), *rest = list(program.computations[computation].items())[place:]
    if not start.operation.endswith("-start"):
        return 0, 0
    following = [instruction for _, instruction in rest]
    between = list(
        itertools.takewhile(lambda one: name not in one.operands or not one.operation.endswith("-done"), following)
    )
    if len(between) == len(following):
        raise ValueError(f"{name} has no end")
    products = sum(len(list(_products(program, computation, instruction))) for instruction in between)
    return sum(map(is_kernel, between)), products


def _products(program: HloProgram, computation: str, instruction: Instruction) -> Iterator[MatrixProduct]:
    """Return the matrix products of one run of an instruction."""
    for name, inner in program.inside(computation, instruction):
        if is_product(inner):
            operands = program.operand_types(name, inner)
            yield MatrixProduct(_dtype(operands), 1.0, product_flops(inner, operands), call_target(inner), inner.source)


def _dtype(arrays: Sequence[HloArray]) -> str:
    return DTYPE_NAMES.get(arrays[0].dtype, arrays[0].dtype)


# ---- temporary arrays -----------------------------------------------------------------------------------------------


class Buffers(NamedTuple):
    """Equal temporary arrays that one line of code computes, such as one in each of several layers."""

    nbytes: int  # bytes of all arrays together
    number: int  # number of arrays
    dtype: str  # the NumPy name of their dtype
    shape: tuple[int, ...]  # their shape
    layers: tuple[str, ...]  # names of the layers; `block_0-block_11` for a scan over layers. Empty outside of layers.
    # `file:line in function`. For a copy of an argument, the argument. If the program does not contain the line, the
    # path of named scopes, or else the operation.
    source: str


def buffers_at_peak(programs: Sequence[CompiledProgram], layers: Iterable[str]) -> list[Buffers]:
    """Return the temporary arrays at the peak of the program that has most, by names of layers, the largest first."""

    def temporary_bytes(program: CompiledProgram) -> int:
        analysis = program.compiled.memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    text = max(programs, key=temporary_bytes).compiled.as_text()
    assert text is not None
    lines, names = SourceLines(text), "|".join(map(re.escape, sorted(layers, key=len, reverse=True)))
    of_layer = re.compile(rf"[/(]((?:{names})(?:-(?:{names}))?)[)/]")  # in the named scopes of an instruction
    groups: dict[tuple[HloArray, str, str], list[str]] = {}  # the layers of the arrays in each group
    for array in live_at_peak(HloProgram.parse(text)):
        found = of_layer.search(array.computed_by.source)
        layer = found[1] if found else ""
        key = (array.type, re.sub(r"\d+", "*", layer), _source(array.computed_by, lines))
        groups.setdefault(key, []).append(layer)
    buffers = [
        Buffers(
            array.nbytes * len(group), len(group), _dtype([array]), array.dims, tuple(sorted({*group} - {""})), source
        )
        for (array, _, source), group in groups.items()
    ]
    return sorted(buffers, key=lambda group: -group.nbytes)


def _source(instruction: Instruction, lines: SourceLines) -> str:
    if line := lines.own(instruction):
        return str(line)
    if instruction.operation == "parameter":
        return f"copy of {instruction.source}".replace("\\'", "'")
    return instruction.source if instruction.has_source else f"{instruction.operation} added by XLA"
