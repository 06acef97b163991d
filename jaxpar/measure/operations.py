"""Counts what a traced function computes and moves, so that its time on a GPU can be estimated without compiling it.

The count assumes what XLA does on GPUs: a matrix product, a convolution or attention is a kernel that reads its
operands and writes its results. All other operations are fused into passes, which write an array only if a product or
the caller reads it, and read only what products, the caller or another pass wrote. A reduction ends a pass. Collectives
are not counted.

`residuals` counts what a function holds for its backward pass. `jax.vjp` decides what the forward pass saves, and
a scan stacks all of it. Without a scan, XLA fuses elementwise operations into the kernels that read their results,
forward and backward. It then holds what other kernels write or read anyway. A pipeline recomputes other values
(jaxpar/strategies/pipeline/executor).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxpar.measure.flops import attention_flops, equation_flops, jaxprs_in

ATTENTION_FORWARD = ("dot_product_attention_fwd_wrapper", "cudnn_attention_forward")
ATTENTION_BACKWARD = ("dot_product_attention_bwd_wrapper", "cudnn_attention_backward")
BACKWARD_RATIO = 2.5  # products of the backward pass of attention / those of the forward pass; scores are repeated
# Operations whose result is their operand in another shape, which a product or a fusion reads as it is.
VIEWS = (
    *("reshape", "squeeze", "expand_dims", "transpose", "stop_gradient", "copy", "optimization_barrier"),
    *("bitcast_convert_type", "name"),
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
PASS, SLICE, PRODUCT, ATTENTION_KERNEL = "pass", "slice", "product", "attention"
PRODUCTS = ("dot_general", "conv_general_dilated")
LOOPS = ("scan", "while", "cond")
KERNELS = (*PRODUCTS, *ATTENTION_FORWARD, *ATTENTION_BACKWARD, *SLICING, *UPDATING, *COLLECTIVES, *LOOPS)
READING = (*KERNELS, "random_bits", "threefry2x32")  # operations whose operands and results are arrays in memory


class Operation(NamedTuple):
    """A kernel, or what passes move."""

    kind: str  # pass, slice (taken, or updated in place, such as rows of an embedding), product or attention
    dtype: str  # the NumPy name of the dtype of the first operand of a product or of attention
    flops: float  # FLOPs of the products in one call
    nbytes: float  # bytes that are read and written in one call
    calls: float = 1.0  # number of calls
    head: int = 0  # size of the heads of attention


def operations(function: Callable[..., Any], *args: Any) -> list[Operation]:
    """Return the operations of one call of a function on one device, without executing it. args: arrays or shapes."""
    return _count(FlatJaxpr(jax.make_jaxpr(function)(*args).jaxpr))


class FlatEquation(NamedTuple):
    """An equation of a `FlatJaxpr`, and the numbers of the arrays that it reads and writes."""

    equation: core.JaxprEqn
    read: list[int]
    written: list[int]


class FlatJaxpr:
    """The equations of a jaxpr, in order, in which calls are replaced by what they call. Arrays are numbered.

    What depends on no argument, such as a mask of positions, is a constant: XLA computes it once for all layers.
    """

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.equations: list[FlatEquation] = []
        self.nbytes: list[int] = []  # bytes by number of the array
        numbers: dict[Any, int] = {}  # of variables
        # the numbers of the arguments, in their order, then of constants
        self.inputs = {self._number(numbers, variable) for variable in (*jaxpr.invars, *jaxpr.constvars)}
        self.constants = {self._number(numbers, variable) for variable in jaxpr.constvars}
        self._add(jaxpr, numbers)
        # the numbers of the results, in order; None for literals
        self.output_numbers = [
            None if isinstance(variable, core.Literal) else self._number(numbers, variable)
            for variable in jaxpr.outvars
        ]
        self.outputs = {number for number in self.output_numbers if number is not None}  # the same as a set

    def _number(self, numbers: dict[Any, int], variable: Any) -> int:
        if variable not in numbers:
            numbers[variable] = len(self.nbytes)
            self.nbytes.append(_nbytes(variable))
        return numbers[variable]

    def _add(self, jaxpr: core.Jaxpr, numbers: dict[Any, int]) -> None:
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params.values()
            jaxprs = (jaxpr for value in params if not isinstance(value, tuple | list) for jaxpr in jaxprs_in(value))
            inner = None if name in LOOPS else next(jaxprs, None)  # what the equation calls with its own operands
            if name in VIEWS and not isinstance(equation.invars[0], core.Literal):
                for source, view in zip(equation.invars, equation.outvars, strict=True):
                    numbers[view] = self._number(numbers, source)
            elif inner is not None and len(inner.invars) == len(equation.invars):
                inside: dict[Any, int] = {}
                for variable, outer in zip(inner.invars, equation.invars, strict=True):
                    if isinstance(outer, core.Literal):
                        self.constants.add(self._number(inside, variable))
                    else:
                        inside[variable] = self._number(numbers, outer)
                self._add(inner, inside)
                for result, outer in zip(inner.outvars, equation.outvars, strict=True):
                    if not isinstance(result, core.Literal):
                        numbers[outer] = self._number(inside, result)
            else:
                operands = (one for one in equation.invars if not isinstance(one, core.Literal))
                read = [self._number(numbers, one) for one in operands]
                written = [self._number(numbers, variable) for variable in equation.outvars]
                if self.constants.issuperset(read):
                    self.constants.update(written)
                self.equations.append(FlatEquation(equation, read, written))


def _nbytes(variable: Any) -> int:
    aval = variable.aval
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", np.dtype(bool))
    return math.prod(shape) * int(getattr(dtype, "itemsize", 8))  # keys of random numbers have no fixed size


def _count(flat: FlatJaxpr) -> list[Operation]:
    found, in_memory, for_products = list[Operation](), set(flat.inputs), set(flat.outputs)
    for one in flat.equations:
        name = one.equation.primitive.name
        if name in KERNELS:
            in_memory.update(one.written)
            is_attention = name in (*ATTENTION_FORWARD, *ATTENTION_BACKWARD)  # which can read masks
            for_products.update(set(one.read) - flat.constants if is_attention else one.read)
            found += _kernel(one, flat)
    return [*found, _passes(flat, in_memory, for_products)]


def _add_in_place(body: FlatJaxpr, carried: set[int]) -> None:
    """Let the kernels of products that a loop adds up, such as gradients, read and write the sums that it carries."""
    products = {one.written[0]: one for one in body.equations if one.equation.primitive.name in PRODUCTS}
    uses = Counter(number for one in body.equations for number in one.read)
    for one in [one for one in body.equations if one.equation.primitive.name == "add"]:
        sums, added = carried.intersection(one.read), products.keys() & set(one.read)
        if sums and added and uses[product := added.pop()] == 1 and product not in body.outputs:
            place = body.equations.index(products[product])
            read = [*products[product].read, *sums]
            body.equations[place] = products[product]._replace(read=read, written=one.written)
            body.equations.remove(one)


def _carried(scan: core.JaxprEqn) -> range:
    """Return the places of the operands that a scan carries: after its constants, and before the arrays that it slices.

    JAX 0.10 and 0.11 write these numbers in different parameters, so they are counted by the dims: the body has slices.
    """
    body = scan.params["jaxpr"].jaxpr

    def num_whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(one.aval.ndim == other.aval.ndim for one, other in zip(outside, inside, strict=True))

    first_slice = num_whole(scan.invars, body.invars)
    return range(first_slice - num_whole(scan.outvars, body.outvars), first_slice)


def _kernel(one: FlatEquation, flat: FlatJaxpr) -> Iterator[Operation]:
    """Yield the operations of an equation that is not fused."""
    equation, name = one.equation, one.equation.primitive.name
    read, written = (sum(flat.nbytes[number] for number in numbers) for numbers in (one.read, one.written))
    if name == "scan":
        length = equation.params["length"]
        body = FlatJaxpr(equation.params["jaxpr"].jaxpr)
        _add_in_place(body, set(_carried(equation)))
        yield from (op._replace(calls=op.calls * length) for op in _count(body))
    elif name == "while":
        yield from _count(FlatJaxpr(equation.params["body_jaxpr"].jaxpr))
    elif name == "cond":
        branches = [_count(FlatJaxpr(branch.jaxpr)) for branch in equation.params["branches"]]
        yield from max(branches, key=lambda branch: sum(op.calls * (op.flops + op.nbytes) for op in branch))
    elif name in COLLECTIVES:
        return
    elif name in SLICING:
        yield Operation(SLICE, "", 0.0, 2.0 * written)
    elif name in UPDATING:
        update = _nbytes(equation.invars[1 if name == "dynamic_update_slice" else 2])
        yield Operation(SLICE, "", 0.0, 3.0 * update)  # in place
    else:
        dtype = equation.invars[0].aval.dtype.name  # type: ignore[attr-defined]
        if name in (*ATTENTION_FORWARD, *ATTENTION_BACKWARD):
            flops = attention_flops(equation) * (BACKWARD_RATIO if name in ATTENTION_BACKWARD else 1)
            # A causal kernel skips the positions after each position.
            is_causal = equation.params.get("is_causal", "CAUSAL" in str(equation.params.get("mask_type", "")))
            head = equation.invars[0].aval.shape[-1]  # type: ignore[attr-defined]
            yield Operation(ATTENTION_KERNEL, dtype, flops * (0.5 if is_causal else 1), read + written, head=head)
        else:
            yield Operation(PRODUCT, dtype, equation_flops(equation), read + written)


def _passes(flat: FlatJaxpr, in_memory: set[int], wanted: set[int]) -> Operation:
    """Return what the fused operations move. in_memory: arrays that others wrote; wanted: those that others read."""
    read, written, reduced = set[int](), set[int](), 0
    writers = {number: one for one in flat.equations for number in one.written}
    for one in flat.equations:
        name = one.equation.primitive.name
        if name in KERNELS:
            continue
        written.update(number for number in one.written if number in wanted)
        if name in REDUCTIONS:  # reads what its operands are computed from
            for number in one.read:
                sources = _sources(number, writers, in_memory)
                reduced += min(flat.nbytes[number], sum(flat.nbytes[source] for source in sources))
        else:
            read.update(number for number in one.read if number in in_memory)
    moved = sum(flat.nbytes[number] for number in (*read, *written)) + reduced
    return Operation(PASS, "", 0.0, float(moved))


class Residuals(NamedTuple):
    """Bytes that a function holds besides its weights."""

    saved: float  # what the forward pass saves for the backward pass, with its input
    fused: float  # the same without a scan, where XLA repeats elementwise operations in the backward pass
    # of the loop that needs most, the results of the products of an iteration, and what was computed for them
    looped: float
    chunked: float = 0.0  # what the backward pass of attention to chunks of texts holds besides
    probabilities: float = 0.0  # those of attention without a kernel
    score_gradients: float = 0.0  # the gradients of these probabilities and of the scores, in its backward pass


def residuals(function: Callable[[Any, Any, Any], Any], weights: Any, x: Any, others: Any) -> Residuals:
    """Return the residuals of a function of weights, an input x and others, given as arrays or their shapes.

    It is differentiated with respect to the weights and, if it consists of floats, x. Copies of the weights in another
    dtype are not counted, and an array that is saved in two shapes counts once.
    """
    has_gradient = all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x))

    def forward(weights: Any, x: Any, others: Any) -> tuple[Any, Any]:
        if has_gradient:
            y, backward = jax.vjp(lambda weights, x: function(weights, x, others), weights, x)
        else:
            y, backward = jax.vjp(lambda weights: function(weights, x, others), weights)
        return jax.tree.leaves(y), jax.tree.leaves(backward)

    traced, (outputs, _) = jax.make_jaxpr(forward, return_shape=True)(weights, x, others)
    flat = FlatJaxpr(traced.jaxpr)
    num_weights, num_inputs = len(jax.tree.leaves(weights)), len(jax.tree.leaves(x))
    of_weights = set(range(num_weights))  # and what is computed from nothing else
    for one in flat.equations:
        if one.read and of_weights.issuperset(one.read):
            of_weights.update(one.written)
    inputs = flat.inputs - (set(range(num_weights, num_weights + num_inputs)) if has_gradient else set())
    saved = {number for number in flat.output_numbers[len(outputs) :] if number is not None}
    ignored = of_weights | inputs | flat.constants
    fused = _fused(flat, saved - ignored, ignored)
    of_saved, of_fused = (sum(flat.nbytes[number] for number in numbers) for numbers in (saved - ignored, fused))
    scans = (one for one in flat.equations if one.equation.primitive.name == "scan")
    looped = max((float(sum(_arrays_of_products(one))) for one in scans), default=0.0)
    scores, narrow = max(map(_bytes_of_scores, flat.equations), default=(0.0, 0.0))
    return Residuals(float(of_saved), float(of_fused), looped, probabilities=narrow, score_gradients=scores + narrow)


def _bytes_of_scores(one: FlatEquation) -> tuple[float, float]:
    """Return the bytes of the product of queries and keys, and the same in the dtype of its operands; 0 for others."""
    if one.equation.primitive.name != "dot_general" or not any(one.equation.params["dimension_numbers"][1]):
        return 0.0, 0.0
    [scores], operand = one.equation.outvars, one.equation.invars[0]
    wide, narrow = (np.dtype(variable.aval.dtype).itemsize for variable in (scores, operand))  # type: ignore[attr-defined]
    nbytes = float(_nbytes(scores))
    return nbytes, nbytes * narrow / wide


def _fused(flat: FlatJaxpr, saved: set[int], ignored: set[int]) -> set[int]:
    """Return the arrays that are held instead of those that are saved, if elementwise operations are repeated.

    An array that no kernel needs in memory is computed again from those that are, if these take no more memory.
    """
    writers = {number: one for one in flat.equations for number in one.written}
    in_memory = set(flat.inputs)
    for one in flat.equations:
        name = one.equation.primitive.name
        if name in (*READING, *REDUCTIONS):
            in_memory.update(one.written)
        if name in READING:
            in_memory.update(one.read)
    held = saved & in_memory
    for number in sorted(saved - in_memory, key=lambda number: -flat.nbytes[number]):
        sources = _sources(number, writers, in_memory) - ignored - held
        is_cheaper = sum(flat.nbytes[source] for source in sources) <= flat.nbytes[number]
        held |= sources if is_cheaper else {number}
    return held


def _sources(number: int, writers: Mapping[int, FlatEquation], in_memory: set[int]) -> set[int]:
    """Return the arrays in memory from which elementwise operations compute an array, or the array if it is there."""
    if number in in_memory or number not in writers:
        return {number}
    sources, seen, left = set[int](), {number}, [number]
    while left:
        for read in writers[left.pop()].read:
            if read in seen:
                continue
            seen.add(read)
            if read in in_memory or read not in writers:
                sources.add(read)
            else:
                left.append(read)
    return sources


def bytes_gathered(axis: str, function: Callable[..., Any], *args: Any) -> float:
    """Return the bytes of the results of the all-gathers of a function over an axis."""
    equations = FlatJaxpr(jax.make_jaxpr(function)(*args).jaxpr).equations
    of_axis = [one.equation for one in equations if axis in one.equation.params.get("axis_name", ())]
    return float(sum(_nbytes(x) for one in of_axis if one.primitive.name.startswith("all_gather") for x in one.outvars))


def loop_bytes(function: Callable[..., Any], *args: Any) -> float:
    """Return the bytes that the loop of a function holds which needs most: what is computed for it, and its results.

    What the backward passes of attention kernels read and write is added: keys and values of whole texts, and masks.
    """
    flat = FlatJaxpr(jax.make_jaxpr(function)(*args).jaxpr)
    kernels = [one for one in flat.equations if one.equation.primitive.name in ATTENTION_BACKWARD]
    of_kernels = {number for one in kernels for number in (*one.read, *one.written)} - flat.inputs
    by_kernels = sum(flat.nbytes[number] for number in of_kernels)
    return max((_held_by_loop(one, flat) for one in flat.equations), default=0.0) + by_kernels


def _held_by_loop(one: FlatEquation, flat: FlatJaxpr) -> float:
    """Return the bytes that a scan holds besides the arguments of the function."""
    if one.equation.primitive.name != "scan":
        return 0.0
    carried = {id(one.equation.invars[place]) for place in _carried(one.equation)}  # they become results in place
    operands = [x for x in one.equation.invars if not isinstance(x, core.Literal)]
    arrays = {number for number, x in zip(one.read, operands, strict=True) if id(x) not in carried}
    outside = sum(flat.nbytes[number] for number in (arrays - flat.inputs) | set(one.written))
    inside = _arrays_of_products(one)
    # XLA does not overwrite the largest one, the scores, by what is computed from it.
    return float(outside + sum(inside) + max(inside, default=0))


def _arrays_of_products(one: FlatEquation) -> list[int]:
    """Return the bytes of each array that a kernel in a scan's body writes, or reads after it is computed there."""
    body, arrays = FlatJaxpr(one.equation.params["jaxpr"].jaxpr), set[int]()
    for inner in body.equations:
        if inner.equation.primitive.name in (*PRODUCTS, *ATTENTION_FORWARD, *ATTENTION_BACKWARD):
            arrays.update(inner.written, set(inner.read) - body.inputs)
    return [body.nbytes[number] for number in arrays]
