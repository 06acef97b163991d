"""Predicts which arrays a program for CPUs holds in memory, from its trace and without compiling it.

XLA for CPUs runs an instruction as soon as its operands exist, so that many can run at the same time, and not when its
result is needed. So all that the backward pass needs of the forward pass is computed and held before the gradient
arrives: the values of activations and norms, both halves of random bits, broadcast operands, and zeros that are added
to. This file repeats the decisions that matter:

- Fusion. An elementwise operation is computed inside the operations that read it, unless one of them needs an array
  (a matrix product, a gather), or it is expensive and would be computed several times.
- Sums. They are computed by library functions, into which only an elementwise operation with no other reader is fused.
  Their operands are arrays, also if they are broadcast.
- Order. Instructions run first in, first out, once their operands exist (breadth first).
- Reuse. An array is freed after its last reader. Elementwise operations and updates write over an operand that nothing
  else reads.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxpar.measure.operations import UPDATING, FlatEquation, FlatJaxpr

SHAPING = ("broadcast_in_dim", "slice", "pad", "concatenate", "rev", "dynamic_slice", "iota")
CHEAP = (
    *("add", "add_any", "sub", "mul", "neg", "max", "min", "and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt"),
    *("ge", "select_n", "convert_element_type", "clamp", "abs", "sign", "floor", "ceil", "round", "is_finite"),
    *("integer_pow", "square", "shift_left", "shift_right_logical", "shift_right_arithmetic", "bitcast_convert_type"),
)
EXPENSIVE = (
    *("div", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "erf_inv", "sqrt", "rsqrt"),
    *("pow", "sin", "cos", "tan", "rem", "cbrt", "atan2"),
)
FUSIBLE = {*SHAPING, *CHEAP, *EXPENSIVE}
LOOPS = {"scan": "jaxpr", "while": "body_jaxpr"}  # and the parameter that is their body
SUMS = "reduce_"  # the beginning of their names


class PassMemory(NamedTuple):
    """Bytes of arrays besides the arguments that are always in memory.

    Attributes:
      held: when all has been computed that does not depend on the late arguments.
      peak: the most.
    """

    held: float
    peak: float


def pass_memory(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    resident: int = 0,
    late: int = 0,
    elsewhere: Callable[[Any], Any] = lambda _: (),
    early: Callable[..., Any] | None = None,
) -> PassMemory:
    """Return the memory of a function on a CPU.

    Args:
      function: the function.
      arguments: its arguments, trees of arrays or `jax.ShapeDtypeStruct`s.
      resident: number of first arguments that do not count, because they are in memory anyway.
      late: number of last arguments that exist only when all else has been computed: the gradient of the output.
      elsewhere: the part of the result that does not count.
      early: what `function` computes first, of the same arguments; the rest of it waits for the late arguments, and
        shares no result with it. None: what can be computed is computed, and equal operations are computed once.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat = FlatJaxpr(closed.jaxpr)
    sizes = [len(jax.tree.leaves(argument)) for argument in arguments]
    numbers = sorted(flat.inputs)[: sum(sizes)]  # constants come after the arguments
    uncounted = set(numbers[: sum(sizes[:resident])])
    places = jax.tree.unflatten(jax.tree.structure(shape), range(len(closed.jaxpr.outvars)))
    others = [flat.output_numbers[place] for place in jax.tree.leaves(elsewhere(places))]
    uncounted |= {number for number in others if number is not None}
    num_early = None if early is None else len(FlatJaxpr(jax.make_jaxpr(early)(*arguments).jaxpr).equations)
    operations = _Operations(flat, num_early)
    return _Run(operations, uncounted, set(numbers[sum(sizes[: len(sizes) - late]) :])).memory()


class _Operation(NamedTuple):
    """An operation. Arrays are numbered; inside: bytes that one iteration of a loop needs."""

    name: str
    read: list[int]
    written: list[int]
    inside: float = 0.0


class _Operations:
    """The operations of a jaxpr, as XLA sees them, and which of their results are arrays in memory."""

    def __init__(self, flat: FlatJaxpr, num_early: int | None) -> None:
        self.all: list[_Operation] = []
        self.nbytes, self.inputs, self.outputs = list(flat.nbytes), flat.inputs, flat.outputs
        self.first_late: int | None = None
        self._equal: dict[Any, list[int]] = {}
        self._representatives: dict[int, int] = {}
        for position, one in enumerate(flat.equations):
            if position == num_early:
                self.first_late, self._equal = len(self.all), {}
            self._lower(one)
        self.readers: dict[int, set[int]] = {}  # of each array that is read: the operations that run, by index
        self.runs: list[int] = []
        self._fuse()

    def _lower(self, one: FlatEquation) -> None:
        """Add the operations of an equation."""
        equation, name = one.equation, one.equation.primitive.name
        results = [(variable.aval.shape, str(variable.aval.dtype)) for variable in equation.outvars]  # type: ignore[attr-defined]
        literals = tuple(str(value) for value in equation.invars if isinstance(value, core.Literal))
        options = {key: value for key, value in equation.params.items() if key != "accuracy"}
        about = (literals, str(options), str(results))
        size = self.nbytes[one.written[0]]
        read = one.read
        if name == "random_bits":  # of two halves of a 64-bit hash
            halves = self._add("hash", read, [self._new(size), self._new(size)], about)
            self._add("xor", halves, one.written, about)
            return
        if name == "erfc":  # computed from exp(-x^2), as is its derivative
            power = read
            for step in ("square", "neg", "exp"):
                power = self._add(step, power, [self._new(size)], ((), "{}", str(results)))
            read = [*read, *power]
        elif name in FUSIBLE and name not in SHAPING:
            read = self._broadcast(one, str(results))
        self._add(name, read, one.written, about, _inside(equation))

    def _broadcast(self, one: FlatEquation, result: str) -> list[int]:
        """Return the operands of an elementwise operation, with those broadcast that have fewer elements."""
        size, read = one.equation.outvars[0].aval.size, []  # type: ignore[attr-defined]
        variables: list[Any] = [value for value in one.equation.invars if not isinstance(value, core.Literal)]
        for variable, array in zip(variables, one.read, strict=True):
            if 1 < variable.aval.size < size:
                whole = [self._new(size * variable.aval.dtype.itemsize)]
                read += self._add("broadcast_in_dim", [array], whole, result)
            else:
                read.append(array)
        return read

    def _new(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def _add(self, name: str, read: Sequence[int], written: list[int], about: Any, inside: float = 0.0) -> list[int]:
        """Add an operation, unless there is an equal one. Return the numbers of its results."""
        read = [self._representatives.get(array, array) for array in read]
        key = (name, tuple(read), about)
        if key in self._equal and not self.outputs & set(written):
            self._representatives.update(zip(written, self._equal[key], strict=True))
            return self._equal[key]
        self._equal[key] = written
        self.all.append(_Operation(name, read, written, inside))
        return written

    def _fuse(self) -> None:
        """Set `readers` and `runs`. An operation that is fused runs as a part of those that read it."""
        makers = {array: operation.name for operation in self.all for array in operation.written}
        uses = Counter(array for operation in self.all for array in operation.read) + Counter(self.outputs)
        in_memory, summed = self.inputs | self.outputs, set[int]()  # summed: fused into a sum
        for number in reversed(range(len(self.all))):
            name, read, written, _ = self.all[number]
            if not any(array in self.readers or array in self.outputs for array in written):
                continue  # nothing reads it
            first, is_fused = written[0], False
            if name in FUSIBLE and first not in in_memory:
                is_fused = name not in EXPENSIVE or len(self.readers[first]) == 1
            for array in read:
                self.readers.setdefault(array, set()).update(self.readers[first] if is_fused else {number})
                if name.startswith(SUMS) or first in summed:
                    into_sum = uses[array] == 1 and makers.get(array) in CHEAP
                    (summed if into_sum else in_memory).add(array)
                elif name not in FUSIBLE:
                    in_memory.add(array)
            if not is_fused:
                in_memory.update(written)
                self.runs.append(number)
        self.readers = {array: readers for array, readers in self.readers.items() if array in in_memory}
        self.runs.reverse()


class _Run:
    """Runs operations breadth first, and records the arrays in memory."""

    def __init__(self, operations: _Operations, uncounted: set[int], late: set[int]) -> None:
        self._operations, self._late = operations, late
        self._uncounted = set(uncounted)
        for name, read, written, _ in reversed(operations.all):
            if name in UPDATING and written[0] in self._uncounted:
                self._uncounted.add(read[0])  # what is updated is in the same memory
        self._waiting: dict[int, set[int]] = {number: set() for number in operations.runs}
        for array, readers in operations.readers.items():
            for number in readers:
                self._waiting[number].add(array)
        self._read_by = {number: sorted(arrays) for number, arrays in self._waiting.items()}
        self._left = {array: set(readers) for array, readers in operations.readers.items()}
        self._live: dict[int, int] = {}
        self._peak = 0.0

    def memory(self) -> PassMemory:
        """Return the memory."""
        inputs = self._operations.inputs
        first_late = self._operations.first_late
        is_late = [first_late is not None and number >= first_late for number in self._operations.runs]
        later = {number for number, late in zip(self._operations.runs, is_late, strict=True) if late}
        early_inputs = sorted(inputs - self._late)
        self._run(early_inputs, [number for number in self._operations.runs if number not in later], later)
        held = sum(self._live.values())
        self._run(sorted(self._late), sorted(later), set())
        assert not any(self._waiting.values())
        return PassMemory(float(held), float(max(self._peak, sum(self._live.values()))))

    def _run(self, arrays: Iterable[int], numbers: Iterable[int], blocked: set[int]) -> None:
        """Run all operations whose operands exist. arrays: new ones; blocked: operations that must not run yet."""
        queue = deque(number for number in numbers if not self._waiting[number])

        def exist(arrays: Iterable[int]) -> None:
            for array in arrays:
                self._allocate(array)
                for number in sorted(self._operations.readers.get(array, ())):
                    self._waiting[number].discard(array)
                    if not self._waiting[number] and number not in blocked:
                        queue.append(number)

        exist(arrays)
        while queue:
            number = queue.popleft()
            operation = self._operations.all[number]
            for array in operation.written:
                self._allocate(array)
            freed = self._freed(number)
            total = sum(self._live.values()) - self._overwritten(operation, freed)
            self._peak = max(self._peak, total + operation.inside)
            for array in freed:
                self._live.pop(array, None)
            exist(array for array in operation.written if array in self._operations.readers)

    def _allocate(self, array: int) -> None:
        is_wanted = array in self._operations.readers or array in self._operations.outputs
        if is_wanted and array not in self._uncounted:
            self._live[array] = self._operations.nbytes[array]

    def _freed(self, number: int) -> list[int]:
        """Return the operands of an operation that nothing reads later."""
        freed = []
        for array in self._read_by[number]:
            self._left[array].discard(number)
            if not self._left[array] and array not in self._operations.outputs:
                freed.append(array)
        return freed

    def _overwritten(self, operation: _Operation, freed: Iterable[int]) -> int:
        """Return the bytes of operands whose memory the results take."""
        if operation.name not in (*FUSIBLE, *UPDATING, *LOOPS):
            return 0
        free = Counter(self._live[array] for array in freed if array in self._live)
        results = Counter(self._live[array] for array in operation.written if array in self._live)
        return sum((free & results).elements())


def _inside(equation: core.JaxprEqn) -> float:
    """Return the bytes that an iteration of a loop needs besides what it reads from outside; 0 if it is no loop."""
    body = LOOPS.get(equation.primitive.name)
    if body is None:
        return 0.0
    operations = _Operations(FlatJaxpr(equation.params[body].jaxpr), None)
    return _Run(operations, set(operations.inputs), set()).memory().peak
