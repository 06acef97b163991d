"""Counts what a traced function computes and moves, so that its time on a GPU can be estimated without compiling it.

The count assumes what XLA does on GPUs: a matrix product, a convolution or attention is a kernel that reads its
operands and writes its results. All other operations are fused into passes, which write an array only if a product or
the caller reads it, and read only what products, the caller or another pass wrote. A reduction ends a pass. Collectives
are not counted.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jaxpar.measure.flops import attention_flops, equation_flops

ATTENTION_FORWARD = ("dot_product_attention_fwd_wrapper", "cudnn_attention_forward")
ATTENTION_BACKWARD = ("dot_product_attention_bwd_wrapper", "cudnn_attention_backward")
BACKWARD_RATIO = 2.5  # products of the backward pass of attention / those of the forward pass; scores are repeated
# Operations whose result is their operand in another shape, which a product or a fusion reads as it is.
VIEWS = (
    *("reshape", "squeeze", "expand_dims", "transpose", "stop_gradient", "copy", "optimization_barrier"),
    "bitcast_convert_type",
)
SLICING = ("gather", "dynamic_slice")  # a slice at a fixed position is fused
REDUCTIONS = (  # they end a pass
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("argmax", "argmin", "cumsum", "sort"),
)
COLLECTIVES = (
    *("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter"),
    *("ppermute", "all_to_all"),
)
UPDATING = ("scatter", "scatter-add", "scatter_add", "dynamic_update_slice")
PASS, PRODUCT, ATTENTION_KERNEL = "pass", "product", "attention"
PRODUCTS = ("dot_general", "conv_general_dilated")
KERNELS = (
    *PRODUCTS,
    *ATTENTION_FORWARD,
    *ATTENTION_BACKWARD,
    *SLICING,
    *UPDATING,
    *COLLECTIVES,
    "scan",
    "while",
    "cond",
)


class Operation(NamedTuple):
    """A kernel, or what passes move.

    Attributes:
      kind: pass, product or attention.
      dtype: the NumPy name of the dtype of the first operand of a product or of attention.
      flops: FLOPs of the products in one call.
      nbytes: bytes that are read and written in one call.
      calls: number of calls.
    """

    kind: str
    dtype: str
    flops: float
    nbytes: float
    calls: float = 1.0


def operations(function: Callable[..., Any], *args: Any) -> list[Operation]:
    """Return the operations of one call of a function on one device, without executing it.

    Args:
      function: the function.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


class FlatEquation(NamedTuple):
    """An equation of a jaxpr in which calls are replaced by what they call. Arrays are numbered."""

    equation: core.JaxprEqn
    read: list[int]
    written: list[int]


class FlatJaxpr:
    """The equations of a jaxpr, in order.

    Attributes:
      equations: the equations.
      nbytes: bytes by number of the array.
      inputs: the numbers of the arguments, in their order, then of constants.
      output_numbers: the numbers of the results, in order; None for literals.
      outputs: the same as a set.
    """

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.equations: list[FlatEquation] = []
        self.nbytes: list[int] = []
        numbers: dict[Any, int] = {}  # of variables
        self.inputs = {self._number(numbers, variable) for variable in (*jaxpr.invars, *jaxpr.constvars)}
        self._add(jaxpr, numbers)
        self.output_numbers = [
            None if isinstance(variable, core.Literal) else self._number(numbers, variable)
            for variable in jaxpr.outvars
        ]
        self.outputs = {number for number in self.output_numbers if number is not None}

    def _number(self, numbers: dict[Any, int], variable: Any) -> int:
        if variable not in numbers:
            numbers[variable] = len(self.nbytes)
            self.nbytes.append(_nbytes(variable))
        return numbers[variable]

    def _read(self, numbers: dict[Any, int], variables: Any) -> list[int]:
        return [self._number(numbers, one) for one in variables if not isinstance(one, core.Literal)]

    def _add(self, jaxpr: core.Jaxpr, numbers: dict[Any, int]) -> None:
        for equation in jaxpr.eqns:
            inner = _called(equation)
            if equation.primitive.name in VIEWS and not isinstance(equation.invars[0], core.Literal):
                for source, view in zip(equation.invars, equation.outvars, strict=True):
                    numbers[view] = self._number(numbers, source)
            elif inner is not None and len(inner.invars) == len(equation.invars):
                inside: dict[Any, int] = {}
                for variable, outer in zip(inner.invars, equation.invars, strict=True):
                    if not isinstance(outer, core.Literal):
                        inside[variable] = self._number(numbers, outer)
                self._add(inner, inside)
                for result, outer in zip(inner.outvars, equation.outvars, strict=True):
                    if not isinstance(result, core.Literal):
                        numbers[outer] = self._number(inside, result)
            else:
                read = self._read(numbers, equation.invars)
                written = [self._number(numbers, variable) for variable in equation.outvars]
                self.equations.append(FlatEquation(equation, read, written))


def _nbytes(variable: Any) -> int:
    aval = variable.aval
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", np.dtype(bool))
    return math.prod(shape) * int(getattr(dtype, "itemsize", 8))  # keys of random numbers have no fixed size


def _called(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """Return the jaxpr that an equation calls once with its own operands; None if it calls none, or differently."""
    if equation.primitive.name in ("scan", "while", "cond"):
        return None
    for value in equation.params.values():
        if isinstance(value, core.ClosedJaxpr):
            return value.jaxpr
        if isinstance(value, core.Jaxpr):
            return value
    return None


def _count(jaxpr: core.Jaxpr) -> list[Operation]:
    flat = FlatJaxpr(jaxpr)
    found, in_memory, for_products = list[Operation](), set(flat.inputs), set(flat.outputs)
    for one in flat.equations:
        name = one.equation.primitive.name
        if _is_kernel(name):
            in_memory.update(one.written)
            for_products.update(one.read)
            found += _kernel(one, flat)
    return [*found, _passes(flat, in_memory, for_products)]


def _is_kernel(name: str) -> bool:
    return name in KERNELS


def _kernel(one: FlatEquation, flat: FlatJaxpr) -> Iterator[Operation]:
    """Yield the operations of an equation that is not fused."""
    equation, name = one.equation, one.equation.primitive.name
    read, written = (sum(flat.nbytes[number] for number in numbers) for numbers in (one.read, one.written))
    if name == "scan":
        length = equation.params["length"]
        yield from (op._replace(calls=op.calls * length) for op in _count(equation.params["jaxpr"].jaxpr))
    elif name == "while":
        yield from _count(equation.params["body_jaxpr"].jaxpr)
    elif name == "cond":
        branches = [_count(branch.jaxpr) for branch in equation.params["branches"]]
        yield from max(branches, key=lambda branch: sum(op.calls * (op.flops + op.nbytes) for op in branch))
    elif name in COLLECTIVES:
        return
    elif name in SLICING:
        yield Operation(PASS, "", 0.0, 2.0 * written)
    elif name in UPDATING:
        update = _nbytes(equation.invars[1 if name == "dynamic_update_slice" else 2])
        yield Operation(PASS, "", 0.0, 3.0 * update)  # in place
    else:
        dtype = equation.invars[0].aval.dtype.name  # type: ignore[attr-defined]
        if name in (*ATTENTION_FORWARD, *ATTENTION_BACKWARD):
            flops = attention_flops(equation) * (BACKWARD_RATIO if name in ATTENTION_BACKWARD else 1)
            yield Operation(ATTENTION_KERNEL, dtype, flops * (0.5 if _is_causal(equation) else 1), read + written)
        else:
            yield Operation(PRODUCT, dtype, equation_flops(equation), read + written)


def _is_causal(equation: core.JaxprEqn) -> bool:
    """Return whether an attention kernel skips the positions after each position."""
    return bool(equation.params.get("is_causal", "CAUSAL" in str(equation.params.get("mask_type", ""))))


def _passes(flat: FlatJaxpr, in_memory: set[int], wanted: set[int]) -> Operation:
    """Return what the fused operations move. in_memory: arrays that others wrote; wanted: those that others read."""
    read, written, reduced = set[int](), set[int](), 0
    for one in flat.equations:
        name = one.equation.primitive.name
        if _is_kernel(name):
            continue
        read.update(number for number in one.read if number in in_memory)
        written.update(number for number in one.written if number in wanted)
        if name in REDUCTIONS:
            reduced += sum(flat.nbytes[number] for number in one.read if number not in in_memory)
    moved = sum(flat.nbytes[number] for number in (*read, *written)) + reduced
    return Operation(PASS, "", 0.0, float(moved))
