"""Finds which instructions of a compiled program mention the same array in memory.

Examples are the state of a loop, outside and inside its body; an array and its bitcast; and an array before and after
an update in place. XLA copies an array beforehand where sharing its memory would be wrong, so what may be the same
array in the final program is the same.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxpar.measure.hlo import ARRAY, HloArray, HloProgram, Instruction, without_bitcasts

FORWARDS = ("bitcast", "get-tuple-element", "optimization-barrier", "parameter", "tuple")  # these compute nothing
FLOW = ("call", "conditional", "while")  # these run other computations
UPDATES = ("dynamic-update-slice", "scatter")  # in place: they write to their first operand
ALIASING = re.compile(r"\{([\d,]*)\}: \((\d+), \{([\d,]*)\}")  # {index of a result}: (operand, {index in it}


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
        return [
            HloPlace(computation, name, number) for number in range(len(self.instruction(computation, name).results))
        ]

    def operands(self, computation: str, name: str) -> list[list[HloPlace]]:
        """Return the places of the arrays in each operand of an instruction."""
        return [self.results(computation, operand) for operand in self.instruction(computation, name).operands]

    def arguments_and_results(self) -> Iterator[HloPlace]:
        """Yield the places of the arguments, results and constants of the program."""
        entry = self.program.entry
        yield from self._root(entry)
        for parameter in self._parameters(entry):
            yield from parameter
        for computation, name in self.order:
            if self.instruction(computation, name).operation == "constant":
                yield from self.results(computation, name)

    def _append(self, computation: str) -> None:
        """Append the instructions of a computation to the order, each after those that it runs."""
        for name, instruction in self.program.computations[computation].items():
            start = len(self.order)
            for called in _flow(instruction):
                self._append(called)
            if instruction.operation == "while":
                self.loops.append((start, len(self.order)))
            self.order.append((computation, name))

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
                for called in _flow(instruction):
                    self._same(self._parameters(called)[0], results)
                self._same(self._root(attribute(instruction, "body")), results)
                self._same(together, results)
            case "conditional":
                for called, operand in zip(_flow(instruction), operands[1:], strict=True):
                    self._same(self._parameters(called)[0], operand)
                    self._same(self._root(called), results)
            case "call":
                [called] = _flow(instruction)
                self._same([place for parameter in self._parameters(called) for place in parameter], together)
                self._same(self._root(called), results)
            case operation if operation in UPDATES:
                self._same(results, operands[0])
            case "copy-start":  # its result is (copy, operand, ...)
                self._same(results[1:2], operands[0])
            case operation if operation.endswith("-start") and operation != "all-reduce-start":
                self._same(_element(instruction, results, 0), together)  # its result is (operands, results, ...)
            case operation if operation.endswith("-done"):
                self._same(results, self._started(computation, instruction.operands[0]))
        for number, updated, number_in_operand in self._in_place(instruction):
            self.join(results[number], operands[updated][number_in_operand])

    def _started(self, computation: str, name: str) -> list[HloPlace]:
        """Return the places of what an asynchronous operation computes, in the result of its start."""
        start, places = self.instruction(computation, name), self.results(computation, name)
        if start.operation == "all-reduce-start":
            return places
        return _element(start, places, 0 if start.operation == "copy-start" else 1)

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


def _flow(instruction: Instruction) -> list[str]:
    """Return the computations that an instruction runs one instruction at a time, in the order of their operands."""
    match instruction.operation:
        case "while":
            return [attribute(instruction, "condition"), attribute(instruction, "body")]
        case "call":
            return [attribute(instruction, "to_apply")]
        case "conditional":
            if listed := re.search(r"branch_computations=\{([^}]*)\}", instruction.line):
                return re.findall(r"%([\w.-]+)", listed[1])
            return [attribute(instruction, "true_computation"), attribute(instruction, "false_computation")]
    return []


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
