"""Describes the schedule of a step that is compiled for GPUs: what its collectives overlap with, and what else it runs.

XLA starts an asynchronous collective with one instruction and waits for it with another. What lies between the two runs
at the same time. If that is nothing, the collective is exposed: the GPU waits for it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpar.analysis.audit import SENT
from jaxpar.measure.hlo import DTYPE_NAMES, HloArray, HloProgram, Instruction, by_scope
from jaxpar.measure.kernels import is_product
from jaxpar.strategies.strategy import CompiledProgram

SMALL = 8  # elements of a collective that is not reported, such as a norm
LARGE = 2**20  # bytes of a copy that is reported
LOOPS_AND_BRANCHES = ("while", "conditional", "call")
NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")


class ScheduledCollective(NamedTuple):
    """A collective of a step.

    Attributes:
      kind: the operation, such as all-gather.
      dtype: the NumPy name of the dtype sent.
      nbytes: bytes of its operands on a device.
      per_step: how often it runs in a step.
      kernels: number of kernels that run between its start and its end; 0 if it is not asynchronous.
      products: number of matrix products in these kernels.
      source: the path of named scopes in the JAX program.
    """

    kind: str
    dtype: str
    nbytes: int
    per_step: float
    kernels: int
    products: int
    source: str


class MatrixProduct(NamedTuple):
    """A matrix product, convolution or attention kernel of a step.

    Attributes:
      dtype: the NumPy name of the dtype of its first operand.
      per_step: how often it runs in a step.
      source: the path of named scopes in the JAX program.
    """

    dtype: str
    per_step: float
    source: str


class ProgramSchedule(NamedTuple):
    """The schedule of a step. All numbers are per step and device.

    Attributes:
      collectives: the collectives of more than SMALL elements, in the order of the program.
      products: the matrix products.
      copies: number of copies of at least LARGE bytes in loops.
      copied_bytes: bytes of these copies.
      kernels: number of kernels besides collectives.
      conditionals: number of conditionals that are not inside another one.
    """

    collectives: list[ScheduledCollective]
    products: list[MatrixProduct]
    copies: float
    copied_bytes: float
    kernels: float
    conditionals: float


def schedule_of(compiled: CompiledProgram) -> ProgramSchedule:
    """Return the schedule of a program.

    Raises:
      ValueError: it is unknown how often a loop or a branch runs.
    """
    text = compiled.compiled.as_text()
    assert text is not None
    program, frequency = HloProgram(text), by_scope(compiled.frequencies)
    per_step = program.total(_once, frequency)
    collectives: list[ScheduledCollective] = []
    products: list[MatrixProduct] = []
    copies = copied_bytes = kernels = 0.0
    for name, instructions in program.computations.items():
        for place, instruction in enumerate(instructions.values()):
            if not (times := per_step.get(id(instruction), 0.0)):
                continue
            operands = program.operand_types(name, instruction)
            if (kind := instruction.operation.removesuffix("-start")) in SENT:
                if sum(math.prod(array.dims) for array in operands) > SMALL:
                    nbytes, dtype = sum(array.nbytes for array in operands), _dtype(operands)
                    between = _until_done(program, name, place)
                    collectives.append(ScheduledCollective(kind, dtype, nbytes, times, *between, instruction.source))
                continue
            products += [one._replace(per_step=times) for one in _products(program, name, instruction)]
            if instruction.operation == "copy" and times > 1 and instruction.results[0].nbytes >= LARGE:
                copies, copied_bytes = copies + times, copied_bytes + times * instruction.results[0].nbytes
            kernels += times * is_kernel(instruction)
    conditionals = program.total(_conditional, frequency)[True]
    return ProgramSchedule(collectives, products, copies, copied_bytes, kernels, conditionals)


def _once(instruction: Instruction, _operands: Sequence[HloArray]) -> dict[int, float] | None:
    return None if instruction.operation in LOOPS_AND_BRANCHES else {id(instruction): 1.0}


def _conditional(instruction: Instruction, _operands: Sequence[HloArray]) -> dict[bool, float] | None:
    return {True: 1.0} if instruction.operation == "conditional" else None


def is_kernel(instruction: Instruction) -> bool:
    """Return whether an instruction of a scheduled computation runs a kernel that is no collective."""
    operation = instruction.operation
    is_collective = operation.removesuffix("-start") in SENT
    return not (is_collective or operation in NO_KERNELS or operation.endswith("-done"))


def _until_done(program: HloProgram, computation: str, place: int) -> tuple[int, int]:
    """Return the number of kernels, and of matrix products, between the start of a collective and its end.

    place: index of the start in its computation.
    """
    (name, start), *rest = list(program.computations[computation].items())[place:]
    if not start.operation.endswith("-start"):
        return 0, 0
    between = list(itertools.takewhile(lambda item: not _ends(name, item[1]), rest))
    if len(between) == len(rest):
        raise ValueError(f"{name} has no end")
    products = sum(len(list(_products(program, computation, instruction))) for _, instruction in between)
    return sum(is_kernel(instruction) for _, instruction in between), products


def _ends(start: str, instruction: Instruction) -> bool:
    return start in instruction.operands and instruction.operation.endswith("-done")


def _products(program: HloProgram, computation: str, instruction: Instruction) -> Iterator[MatrixProduct]:
    """Return the matrix products of one run of an instruction."""
    for name, inner in program.inside(computation, instruction):
        if is_product(inner):
            yield MatrixProduct(_dtype(program.operand_types(name, inner)), 1.0, inner.source)


def _dtype(arrays: Sequence[HloArray]) -> str:
    return DTYPE_NAMES.get(arrays[0].dtype, arrays[0].dtype)
