"""Reconstructs which temporary arrays of a compiled program are in memory at the same time.

XLA assigns memory to arrays in the order in which a compiled program runs its instructions. An array needs its memory
from the instruction that computes it to the last one that reads it. Compiled programs state only the total, so this
file repeats the analysis on the text of the program. It leaves out alignment, gaps between arrays in memory, and
temporary arrays that XLA puts into the memory of donated arguments.
"""

import itertools
from collections import Counter
from typing import NamedTuple

from jaxpar.measure.aliases import FLOW, FORWARDS, Aliases, HloPlace, attribute, parameter_number
from jaxpar.measure.hlo import HloArray, HloProgram, Instruction

MOVING_OPERATIONS = (
    "bitcast",
    "copy",
    "copy-done",
    "copy-start",
    "reshape",
    "transpose",
)  # these do not change the contents
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


class LiveArray(NamedTuple):
    """An array in temporary memory."""

    type: HloArray  # its dtype and shape
    computed_by: Instruction  # the instruction that computes what it contains. It can be inside a fusion.


def live_at_peak(program: HloProgram) -> list[LiveArray]:
    """Return the temporary arrays that are in memory when they need most, in the order in which they are computed.

    These are arrays on the device, but not the arguments, results and constants of the program.

    Args:
      program: a compiled program: the instructions of a computation are in the order in which they run.
    """
    lifetimes = _Lifetimes(program)
    temporary = lifetimes.of_temporary()
    changes = Counter[int]()
    for array, first, last in temporary:
        changes[first] += lifetimes.type_of(array).nbytes
        changes[last + 1] -= lifetimes.type_of(array).nbytes
    times = sorted(changes)
    totals = itertools.accumulate(changes[time] for time in times)
    _, peak = max(zip(totals, times, strict=True), key=lambda item: item[0], default=(0, 0))
    until = lifetimes.end_of_loop(peak)
    written = [lifetimes.last_write(array, until) for array, first, last in temporary if first <= peak <= last]
    return [LiveArray(lifetimes.type_of(place), lifetimes.computed_by(place, until)) for place in written]


class _Lifetimes:
    """The times in which each array of a program is needed, and what writes to it.

    Times are indices in the order. As in `Aliases`, an array is represented by a place. It can have several
    lifetimes: its memory is free from the last instruction that reads its contents until something else is written.
    """

    def __init__(self, program: HloProgram):
        self._aliases = Aliases(program)
        self.type_of = self._aliases.type_of
        self._permanent = set(map(self._aliases.find, self._aliases.arguments_and_results()))
        self._lifetimes: dict[HloPlace, list[list[int]]] = {}  # array -> [first, last] of each, in order
        steps = list(enumerate(self._aliases.order))
        for time, (computation, name) in steps:
            self._use(time, computation, name)
        for time, (computation, name) in steps:
            self._overwrite(time, computation, name)
        self._writes: dict[HloPlace, list[tuple[int, HloPlace]]] = {}
        for time, (computation, name) in steps:
            if self._aliases.instruction(computation, name).operation not in (*FORWARDS, *FLOW):
                for place in self._aliases.results(computation, name):
                    self._writes.setdefault(self._aliases.find(place), []).append((time, place))

    def of_temporary(self) -> list[tuple[HloPlace, int, int]]:
        """Return (array, first time, last time) of the temporary arrays on the device."""
        return [
            (array, first, last)
            for array in self._writes
            if array not in self._permanent and not self.type_of(array).is_on_host
            for first, last in self._lifetimes[array]
        ]

    def end_of_loop(self, time: int) -> int:
        """Return when the loop ends that runs at a time, or else the time.

        Until then, all of the loop has run already, in an earlier iteration.
        """
        return max((last for first, last in self._aliases.loops if first <= time <= last), default=time)

    def last_write(self, array: HloPlace, until: int) -> HloPlace:
        """Return the last place up to a time where an array is written, or else the first place after it."""
        writes = self._writes[array]
        return [place for time, place in writes if time <= until or time == writes[0][0]][-1]

    def computed_by(self, place: HloPlace, until: int) -> Instruction:
        """Return the instruction that computes what is written at a place. until: the time up to which others write.

        An instruction that copies an array or writes it into a larger one does not compute it. A scan over layers, for
        example, writes the activations of each layer into one array.
        """
        aliases = self._aliases
        fusions: list[HloPlace] = []  # those that contain the place, outermost first
        visited: dict[HloPlace, Instruction] = {}
        while place not in visited:  # the state of a loop can be moved back and forth
            visited[place] = instruction = aliases.instruction(place.computation, place.instruction)
            operands = [place._replace(instruction=operand, number=0) for operand in instruction.operands]
            match instruction.operation:
                case "fusion":
                    fusions.append(place)
                    fused = attribute(instruction, "calls")
                    place = HloPlace(fused, aliases.program.roots[fused], place.number)
                case "tuple" if fusions:
                    place = operands[place.number]
                case "parameter" if fusions:
                    fusion = fusions.pop()
                    operand = aliases.instruction(*fusion[:2]).operands[parameter_number(instruction)]
                    place = fusion._replace(instruction=operand, number=0)
                case operation if operation in MOVING_OPERATIONS:
                    place = operands[0]
                case "dynamic-update-slice":
                    place = operands[1]
                case operation if operation in (*FORWARDS, *FLOW) and aliases.find(place) in self._writes:
                    place = self.last_write(aliases.find(place), until)
        # XLA leaves some instructions within fusions without a source, but rarely the fusion.
        return next((one for one in reversed(visited.values()) if one.has_source), instruction)

    def _use(self, time: int, computation: str, name: str) -> None:
        """Extend the lifetimes of what an instruction reads, and begin those of what it writes."""
        aliases, instruction = self._aliases, self._aliases.instruction(computation, name)
        if instruction.operation in FORWARDS:
            return
        read = aliases.operands(computation, name)
        if instruction.operation.endswith("-done"):  # until then, an asynchronous operation reads its operands
            for operand in instruction.operands:
                read += aliases.operands(computation, operand)
        contents = {aliases.find(place) for places in read for place in places}
        written = set(map(aliases.find, aliases.results(computation, name)))
        for array in contents | written:
            lifetimes = self._lifetimes.setdefault(array, [])
            if lifetimes and (array in contents or instruction.operation in FLOW):
                lifetimes[-1][1] = time
            else:
                lifetimes.append([time, time])

    def _overwrite(self, time: int, computation: str, name: str) -> None:
        """Give a result the memory of an operand of equal size that nothing reads later, if its instruction can."""
        aliases, instruction = self._aliases, self._aliases.instruction(computation, name)
        if instruction.operation not in OVERWRITING:
            return
        for result in map(aliases.find, aliases.results(computation, name)):
            begins = [lifetime for lifetime in self._lifetimes[result] if lifetime[0] == time]
            if result in self._permanent or not begins:
                continue
            for number, operand in enumerate(aliases.operands(computation, name)):
                array = aliases.find(operand[0])
                ends = [lifetime for lifetime in self._lifetimes[array] if lifetime[0] < time == lifetime[1]]
                is_equal = len(operand) == 1 and self.type_of(array).nbytes == self.type_of(result).nbytes
                is_free = array not in self._permanent and array != result and ends
                if is_free and is_equal and self._can_overwrite(instruction, number):
                    begins[0][0] = ends[0][0]
                    self._lifetimes[array].remove(ends[0])
                    self._lifetimes[result] = sorted(self._lifetimes[array] + self._lifetimes[result])
                    aliases.join(array, result)
                    break

    def _can_overwrite(self, instruction: Instruction, number: int) -> bool:
        """Return whether an instruction reads each element of an operand before it writes that of the result."""
        if instruction.operation != "fusion":
            return True
        instructions = self._aliases.program.computations[attribute(instruction, "calls")]
        reached = {name for name, one in instructions.items() if f" parameter({number})" in one.line}
        for name, one in instructions.items():  # operands come first
            if reached & set(one.operands) and one.operation != "reduce":
                if one.operation not in ELEMENTWISE_OPERATIONS | {"bitcast", "tuple"}:
                    return False
                reached.add(name)
        return True
