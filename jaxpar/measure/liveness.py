"""Reconstructs which temporary arrays of a compiled program are in memory at the same time.

An array needs its memory from the instruction that computes it to the last one that reads it, in the order in which
the program runs them. Compiled programs state only the total, so this file repeats XLA's analysis on the text of the
program. It leaves out alignment, gaps between arrays, and temporary arrays in the memory of donated arguments.

Several instructions mention the same array: the state of a loop, outside and inside its body; an array and its bitcast;
and an array before and after an update in place. XLA copies an array beforehand where sharing its memory would be
wrong, so what may be the same array in the final program is the same (`Aliases`).
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxpar.measure.hlo import ARRAY, HloArray, HloProgram, Instruction, without_bitcasts

FORWARDS = ("bitcast", "get-tuple-element", "optimization-barrier", "parameter", "tuple")  # these compute nothing
FLOW = ("call", "conditional", "while")  # these run other computations
UPDATES = ("dynamic-update-slice", "scatter")  # in place: they write to their first operand
ALIASING = re.compile(r"\{([\d,]*)\}: \((\d+), \{([\d,]*)\}")  # {index of a result}: (operand, {index in it}
# These do not change the contents.
MOVING_OPERATIONS = ("bitcast", "copy", "copy-done", "copy-start", "reshape", "transpose")
# Operations whose result can have the memory of an operand that nothing reads later.
ELEMENTWISE_OPERATIONS = {
    *("abs", "add", "and", "atan2", "bitcast-convert", "cbrt", "ceil", "clamp", "compare", "complex", "convert"),
    *("copy", "cosine", "count-leading-zeros", "divide", "erf", "exponential", "exponential-minus-one", "floor"),
    *("imag", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or"),
    *("popcnt", "power", "real", "reduce-precision", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt"),
    *("select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract"),
    *("tan", "tanh", "xor"),
}
OVERWRITING = ELEMENTWISE_OPERATIONS | {"all-reduce", "all-reduce-start", "fusion", "sort"}


class HloPlace(NamedTuple):
    """A place where a program mentions an array: an instruction, and the number of the array in its flat result."""

    computation: str
    instruction: str
    number: int = 0


class Aliases:
    """The arrays of a compiled program. Each is represented by one of the places that mention it."""

    def __init__(self, program: HloProgram):
        self.program = program  # the program
        # (computation, instruction) in the order in which they run, those of a loop once
        self.order: list[tuple[str, str]] = []
        # times (indices in the order) of the first and last instruction of each loop
        self.loops: list[tuple[int, int]] = []
        self._parents: dict[HloPlace, HloPlace] = {}  # a forest: the places of one array form a tree
        self._append(program.entry)
        for computation, name in self.order:
            self._join(computation, name)

    def find(self, place: HloPlace) -> HloPlace:
        """Return the place that represents the array at a place."""
        while (parent := self._parents.get(place, place)) != place:
            self._parents[place] = place = self._parents.get(parent, parent)
        return place

    def join(self, place: HloPlace, other: HloPlace) -> None:
        """Make two arrays one. The result is represented by what represents the second."""
        self._parents[self.find(place)] = self.find(other)

    def instruction(self, computation: str, name: str) -> Instruction:
        """Return an instruction of the program."""
        return self.program.computations[computation][name]

    def type_of(self, place: HloPlace) -> HloArray:
        """Return the type of the array at a place."""
        return self.instruction(place.computation, place.instruction).results[place.number]

    def results(self, computation: str, name: str) -> list[HloPlace]:
        """Return the places of the arrays in the result of an instruction."""
        number = len(self.instruction(computation, name).results)
        return [HloPlace(computation, name, one) for one in range(number)]

    def operands(self, computation: str, name: str) -> list[list[HloPlace]]:
        """Return the places of the arrays in each operand of an instruction."""
        return [self.results(computation, operand) for operand in self.instruction(computation, name).operands]

    def _append(self, computation: str) -> None:
        """Append the instructions of a computation to the order, each after those that it runs."""
        for name, instruction in self.program.computations[computation].items():
            start = len(self.order)
            for called in self._flow(instruction):
                self._append(called)
            if instruction.operation == "while":
                self.loops.append((start, len(self.order)))
            self.order.append((computation, name))

    def _flow(self, instruction: Instruction) -> list[str]:
        """Return the computations that an instruction runs one instruction at a time, in the order of its operands."""
        called = self.program.called(instruction) if instruction.operation in FLOW else []
        return called[::-1] if "true_computation" in instruction.line else called

    def _parameters(self, computation: str) -> list[list[HloPlace]]:
        """Return the places of the arrays in each parameter of a computation."""
        numbers = {
            parameter_number(instruction): name
            for name, instruction in self.program.computations[computation].items()
            if instruction.operation == "parameter"
        }
        return [self.results(computation, numbers[number]) for number in sorted(numbers)]

    def _root(self, computation: str) -> list[HloPlace]:
        return self.results(computation, self.program.roots[computation])

    def _same(self, places: list[HloPlace], others: list[HloPlace]) -> None:
        for place, other in zip(places, others, strict=True):
            self.join(place, other)

    def _join(self, computation: str, name: str) -> None:
        """Join the results of an instruction with the arrays that they are by definition."""
        instruction, results = self.instruction(computation, name), self.results(computation, name)
        operands = self.operands(computation, name)
        together = [place for operand in operands for place in operand]
        match instruction.operation:
            case "bitcast" | "optimization-barrier" | "tuple":
                self._same(results, together)
            case "get-tuple-element":
                source = self.instruction(computation, instruction.operands[0])
                self._same(results, _element(source, together, int(attribute(instruction, "index"))))
            case "while":
                for called in self._flow(instruction):
                    self._same(self._parameters(called)[0], results)
                self._same(self._root(attribute(instruction, "body")), results)
                self._same(together, results)
            case "conditional":
                for called, operand in zip(self._flow(instruction), operands[1:], strict=True):
                    self._same(self._parameters(called)[0], operand)
                    self._same(self._root(called), results)
            case "call":
                [called] = self._flow(instruction)
                self._same([place for parameter in self._parameters(called) for place in parameter], together)
                self._same(self._root(called), results)
            case operation if operation in UPDATES:
                self._same(results, operands[0])
            case "copy-start":  # its result is (copy, operand, ...)
                self._same(results[1:2], operands[0])
            case operation if operation.endswith("-start") and operation != "all-reduce-start":
                self._same(_element(instruction, results, 0), together)  # its result is (operands, results, ...)
            case operation if operation.endswith("-done"):
                start, places = self.instruction(computation, instruction.operands[0]), operands[0]
                if start.operation != "all-reduce-start":
                    places = _element(start, places, 0 if start.operation == "copy-start" else 1)
                self._same(results, places)
        for number, updated, number_in_operand in self._in_place(instruction):
            self.join(results[number], operands[updated][number_in_operand])

    def _in_place(self, instruction: Instruction) -> Iterator[tuple[int, int, int]]:
        """Yield (number of a result, operand, number in the operand) of what a fusion or custom call updates."""
        if aliasing := re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.line):
            for number, operand, number_in_operand in ALIASING.findall(aliasing[1]):
                yield int(number or 0), int(operand), int(number_in_operand or 0)
        elif instruction.operation == "fusion":
            fused = attribute(instruction, "calls")
            instructions = self.program.computations[fused]
            for number, name in enumerate(self.program.returned(fused)):
                update = without_bitcasts(instructions, name)
                if update.operation in UPDATES:
                    target = without_bitcasts(instructions, update.operands[0])
                    if target.operation == "parameter":
                        yield number, parameter_number(target), 0


def attribute(instruction: Instruction, name: str) -> str:
    """Return an attribute of an instruction, such as the computation that a fusion calls."""
    found = re.search(rf"\b{name}=%?([\w.-]+)", instruction.line)
    assert found, instruction.line
    return found[1]


def parameter_number(parameter: Instruction) -> int:
    """Return which parameter of its computation an instruction is."""
    found = re.search(r" parameter\((\d+)\)", parameter.line)
    assert found, parameter.line
    return int(found[1])


def _element(instruction: Instruction, places: list[HloPlace], index: int) -> list[HloPlace]:
    """Return the places in one element of a tuple, given those in the whole tuple."""
    type_text = instruction.line.partition(f" {instruction.operation}(")[0].strip()
    if type_text.count("(") == 1:  # each element is an array
        return [places[index]]
    elements, depth = [""], 0
    for character in type_text[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    counts = [len(ARRAY.findall(element)) for element in elements]
    start = sum(counts[:index])
    return places[start : start + counts[index]]


# ---- lifetimes ------------------------------------------------------------------------------------------------------


class LiveArray(NamedTuple):
    """An array in temporary memory."""

    type: HloArray  # its dtype and shape
    computed_by: Instruction  # the instruction that computes what it contains. It can be inside a fusion.


def live_at_peak(program: HloProgram) -> list[LiveArray]:
    """Return the temporary arrays that are in memory when they need most, in the order in which they are computed.

    These are arrays on the device, but not the arguments, results and constants of the program, whose instructions are
    in the order in which they run.
    """
    arrays = _Lifetimes(program)
    temporary = [
        (array, first, last)
        for array in arrays.writes
        if array not in arrays.permanent and not arrays.type_of(array).is_on_host
        for first, last in arrays.lifetimes[array]
    ]
    changes = Counter[int]()
    for array, first, last in temporary:
        changes[first] += arrays.type_of(array).nbytes
        changes[last + 1] -= arrays.type_of(array).nbytes
    times = sorted(changes)
    totals = itertools.accumulate(changes[time] for time in times)
    _, peak = max(zip(totals, times, strict=True), key=lambda item: item[0], default=(0, 0))
    # Until the end of the loop that runs at the peak, all of the loop has run already, in an earlier iteration.
    until = max((last for first, last in arrays.loops if first <= peak <= last), default=peak)
    written = [arrays.last_write(array, until) for array, first, last in temporary if first <= peak <= last]
    return [LiveArray(arrays.type_of(place), arrays.computed_by(place, until)) for place in written]


class _Lifetimes(Aliases):
    """The times in which each array of a program is needed, and what writes to it.

    Times are indices in the order. An array can have several lifetimes: its memory is free from the last instruction
    that reads its contents until something else is written.
    """

    def __init__(self, program: HloProgram):
        super().__init__(program)
        permanent = [*self._root(program.entry), *itertools.chain.from_iterable(self._parameters(program.entry))]
        for computation, name in self.order:
            if self.instruction(computation, name).operation == "constant":
                permanent += self.results(computation, name)
        self.permanent = set(map(self.find, permanent))  # arguments, results and constants of the program
        self.lifetimes: dict[HloPlace, list[list[int]]] = {}  # array -> [first, last] of each, in order
        for time, (computation, name) in enumerate(self.order):
            self._use(time, computation, name)
        for time, (computation, name) in enumerate(self.order):
            self._overwrite(time, computation, name)
        self.writes: dict[HloPlace, list[tuple[int, HloPlace]]] = {}
        for time, (computation, name) in enumerate(self.order):
            if self.instruction(computation, name).operation not in (*FORWARDS, *FLOW):
                for place in self.results(computation, name):
                    self.writes.setdefault(self.find(place), []).append((time, place))

    def last_write(self, array: HloPlace, until: int) -> HloPlace:
        """Return the last place up to a time where an array is written, or else the first place after it."""
        writes = self.writes[array]
        return [place for time, place in writes if time <= until or time == writes[0][0]][-1]

    def computed_by(self, place: HloPlace, until: int) -> Instruction:
        """Return the instruction that computes what is written at a place. until: the time up to which others write.

        An instruction that copies an array or writes it into a larger one does not compute it. A scan over layers, for
        example, writes the activations of each layer into one array.
        """
        fusions: list[HloPlace] = []  # those that contain the place, outermost first
        visited: dict[HloPlace, Instruction] = {}
        while place not in visited:  # the state of a loop can be moved back and forth
            visited[place] = instruction = self.instruction(place.computation, place.instruction)
            operands = [place._replace(instruction=operand, number=0) for operand in instruction.operands]
            match instruction.operation:
                case "fusion":
                    fusions.append(place)
                    fused = attribute(instruction, "calls")
                    place = HloPlace(fused, self.program.roots[fused], place.number)
                case "tuple" if fusions:  # an operand can have several results
                    results = [self.instruction(*one[:2]).results for one in operands]
                    places = [
                        one._replace(number=n)
                        for one, of in zip(operands, results, strict=True)
                        for n in range(len(of))
                    ]
                    place = places[place.number]
                case "parameter" if fusions:
                    fusion = fusions.pop()
                    operand = self.instruction(*fusion[:2]).operands[parameter_number(instruction)]
                    place = fusion._replace(instruction=operand, number=0)
                case operation if operation in MOVING_OPERATIONS:
                    place = operands[0]
                case "dynamic-update-slice":
                    place = operands[1]
                case operation if operation in (*FORWARDS, *FLOW) and self.find(place) in self.writes:
                    place = self.last_write(self.find(place), until)
        # XLA leaves some instructions within fusions without a source, but rarely the fusion.
        return next((one for one in reversed(visited.values()) if one.has_source), instruction)

    def _use(self, time: int, computation: str, name: str) -> None:
        """Extend the lifetimes of what an instruction reads, and begin those of what it writes."""
        instruction = self.instruction(computation, name)
        if instruction.operation in FORWARDS:
            return
        read = self.operands(computation, name)
        if instruction.operation.endswith("-done"):  # until then, an asynchronous operation reads its operands
            for operand in instruction.operands:
                read += self.operands(computation, operand)
        contents = {self.find(place) for places in read for place in places}
        written = set(map(self.find, self.results(computation, name)))
        for array in contents | written:
            lifetimes = self.lifetimes.setdefault(array, [])
            if lifetimes and (array in contents or instruction.operation in FLOW):
                lifetimes[-1][1] = time
            else:
                lifetimes.append([time, time])

    def _overwrite(self, time: int, computation: str, name: str) -> None:
        """Give a result the memory of an operand of equal size that nothing reads later, if its instruction can."""
        instruction = self.instruction(computation, name)
        if instruction.operation not in OVERWRITING:
            return
        for result in map(self.find, self.results(computation, name)):
            begins = [lifetime for lifetime in self.lifetimes[result] if lifetime[0] == time]
            if result in self.permanent or not begins:
                continue
            for number, operand in enumerate(self.operands(computation, name)):
                array = self.find(operand[0])
                ends = [lifetime for lifetime in self.lifetimes[array] if lifetime[0] < time == lifetime[1]]
                is_equal = len(operand) == 1 and self.type_of(array).nbytes == self.type_of(result).nbytes
                is_free = array not in self.permanent and array != result and ends
                if is_free and is_equal and self._can_overwrite(instruction, number):
                    begins[0][0] = ends[0][0]
                    self.lifetimes[array].remove(ends[0])
                    self.lifetimes[result] = sorted(self.lifetimes[array] + self.lifetimes[result])
                    self.join(array, result)
                    break

    def _can_overwrite(self, instruction: Instruction, number: int) -> bool:
        """Return whether an instruction reads each element of an operand before it writes that of the result."""
        if instruction.operation != "fusion":
            return True
        instructions = self.program.computations[attribute(instruction, "calls")]
        reached = {name for name, one in instructions.items() if f" parameter({number})" in one.line}
        for name, one in instructions.items():  # operands come first
            if reached & set(one.operands) and one.operation != "reduce":
                if one.operation not in ELEMENTWISE_OPERATIONS | {"bitcast", "tuple"}:
                    return False
                reached.add(name)
        return True
