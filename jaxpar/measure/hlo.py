"""Parses the HLO text of compiled programs: how often each instruction runs, and from which line of Python it comes."""

import contextlib
import functools
import math
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax

import jaxpar

Key = TypeVar("Key", bound=Hashable)
# How often parts of a program run: op_name of a conditional -> the fraction of runs in which each branch is taken;
# op_name of a loop whose trip count varies -> (mean trip count,); None if unknown.
Frequency = Callable[[str], Sequence[float] | None]

NUM_DEVICES = re.compile(r"(?:replica_count|num_partitions)=(\d+)")
COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*)$")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")  # dtype, dims, layout
HOST_MEMORY = "S(5)"  # part of the layout of an array in the memory of the host
OPERATION = re.compile(r"(?:^|[\]})] )([a-z][a-z0-9-]*)\((.*)$")
TRIP_COUNT = re.compile(r'known_trip_count":\{"n":"(\d+)"')
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%([\w.-]+)")
CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
WIDTHS |= {"f8e4m3fn": 1, "f8e5m2": 1, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "token": 0}
DTYPE_NAMES = {"u8": "uint8", "u16": "uint16", "u32": "uint32", "s8": "int8", "s32": "int32"}
DTYPE_NAMES |= {"pred": "bool", "s64": "int64", "u64": "uint64", "f64": "float64"}
DTYPE_NAMES |= {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


class HloArray(NamedTuple):
    """The type of an HLO array."""

    dtype: str
    dims: tuple[int, ...]
    is_on_host: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of an array of this type."""
        return math.prod(self.dims) * WIDTHS[self.dtype]


class Instruction(NamedTuple):
    """An HLO instruction, one line of text: `%name = type operation(operands), attributes`."""

    line: str
    operation: str
    results: tuple[HloArray, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def source(self) -> str:
        """The op_name: the path of named scopes in the JAX program. It is "?" for some instructions that XLA adds."""
        name = re.search(r'op_name="([^"]*)"', self.line)
        return name[1] if name else "?"

    @property
    def has_source(self) -> bool:
        """Whether the instruction has an op_name."""
        return self.source != "?"


class HloProgram:
    """The computations of a compiled program."""

    def __init__(self, text: str):
        """text: the result of `jax.stages.Compiled.as_text`."""
        # The instructions of each computation by name, in the order in which they run if the program is scheduled.
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}  # the name of the instruction that each computation returns
        header = text.partition("\n")[0]
        self.num_devices = math.prod(map(int, NUM_DEVICES.findall(header)))  # devices that run the program
        self.name = header.removeprefix("HloModule ").partition(",")[0]  # such as jit_step
        name = self.entry = ""  # the computation that the program runs
        for line in text.splitlines():
            if begin := COMPUTATION.match(line):
                name = begin[2]
                self.computations[name] = {}
                self.entry = name if begin[1] else self.entry
            elif match := INSTRUCTION.match(line):
                self.computations[name][match[2]] = _instruction(match[3])
                if match[1]:
                    self.roots[name] = match[2]

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def parse(text: str) -> "HloProgram":
        """Return the program of a text. An audit reads the same one for its traffic, its memory and its time."""
        return HloProgram(text)

    def called(self, instruction: Instruction) -> list[str]:
        """Return the names of the computations that an instruction calls: of a loop, the condition and the body."""
        line = instruction.line
        if lists := CALLED_LISTS.search(line):
            return re.findall(r"%([\w.-]+)", lists[1])
        # Some backends compile a conditional with an index to one with a predicate. Index 0 is false.
        branches = [re.findall(rf"{value}_computation=%([\w.-]+)", line) for value in ("false", "true")]
        return [*CALLED.findall(line), *branches[0], *branches[1]]

    def runs(self, instruction: Instruction, frequency: Frequency) -> list[float]:
        """Return how often each of the computations in `called` runs when an instruction runs once.

        Raises ValueError for a loop of unknown trip count or a conditional of unknown fractions.
        """
        called = self.called(instruction)
        if instruction.operation == "while":
            trips = TRIP_COUNT.search(instruction.line)
            expected = (int(trips[1]),) if trips else frequency(instruction.source)
            if expected is None or len(expected) != 1:
                raise ValueError(f"unknown trip count of the loop {instruction.source}")
            return [float(expected[0])] * len(called)
        if instruction.operation == "conditional":
            weights = frequency(instruction.source)
            if weights is None or len(weights) != len(called):
                raise ValueError(
                    f"unknown branch fractions of the conditional {instruction.source} with {len(called)} branches"
                )
            return list(weights)
        return [1.0] * len(called)

    def has_known_trip_count(self, loop: Instruction) -> bool:
        """Return whether XLA knows how often a loop runs. On GPUs, the host otherwise asks before each iteration."""
        return TRIP_COUNT.search(loop.line) is not None

    def returned(self, computation: str) -> Sequence[str]:
        """Return the names of the instructions whose results a fused computation returns, one for each array."""
        root = self.roots[computation]
        instruction = self.computations[computation][root]
        return instruction.operands if instruction.operation == "tuple" else (root,)

    def inside(self, computation: str, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Return an instruction and all that it calls, such as those of a fusion, each with its computation."""
        yield computation, instruction
        for called in self.called(instruction):
            for inner in self.computations[called].values():
                yield from self.inside(called, inner)

    def operand_types(self, computation: str, instruction: Instruction) -> list[HloArray]:
        """Return the types of the operands of an instruction."""
        local = self.computations[computation]
        return [array for name in instruction.operands if name in local for array in local[name].results]

    def total(
        self,
        value: Callable[[Instruction, Sequence[HloArray]], Mapping[Key, float] | None],
        frequency: Frequency = lambda _name: None,
    ) -> Counter[Key]:
        """Sum the counts of all instructions, each multiplied by how often the instruction runs.

        The body of a loop is multiplied by its trip count, and a branch of a conditional by the fraction of runs in
        which it is taken. Raises ValueError if these are unknown and there is something to count.

        value: (instruction, operand types) -> counts, or None to count the computations that the instruction calls.
        """

        @cache
        def of_computation(name: str) -> Counter[Key]:
            return sum((of(name, instruction) for instruction in self.computations[name].values()), Counter())

        def of(name: str, instruction: Instruction) -> Counter[Key]:
            if (counts := value(instruction, self.operand_types(name, instruction))) is not None:
                return Counter(dict(counts))
            inner = [of_computation(called) for called in self.called(instruction)]
            if instruction.operation == "conditional" and all(branch == inner[0] for branch in inner):
                return inner[0]
            if not any(inner):
                return Counter()
            total = Counter[Key]()
            for counts, number in zip(inner, self.runs(instruction, frequency), strict=True):
                total += Counter({key: count * number for key, count in counts.items()})
            return total

        return of_computation(self.entry)


def without_bitcasts(instructions: Mapping[str, Instruction], name: str) -> Instruction:
    """Return what an instruction is a bitcast of, or the instruction itself."""
    while instructions[name].operation == "bitcast":
        name = instructions[name].operands[0]
    return instructions[name]


def by_scope(frequencies: Mapping[str, tuple[float, ...]]) -> Frequency:
    """Return how often parts of a program run, given the frequencies by the innermost named scope of the part."""

    def frequency(source: str) -> Sequence[float] | None:
        names = [name for name in frequencies if f"/{name}/" in source]
        return frequencies[max(names, key=lambda name: source.rindex(f"/{name}/"))] if names else None

    return frequency


def _instruction(line: str) -> Instruction:
    plain = re.sub(r"/\*.*?\*/", "", line)
    match = OPERATION.search(plain)
    assert match, line
    found = ARRAY.findall(plain[: match.start(1)])
    results = tuple(
        HloArray(dtype, tuple(int(size) for size in dims.split(",") if size), HOST_MEMORY in layout)
        for dtype, dims, layout in found
    )
    operands, _, attributes = match[2].partition(")")
    return Instruction(line, match[1], results, tuple(re.findall(r"%([\w.-]+)", operands)), attributes)


SOURCE_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")  # at the top of the text
ENTRY = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")
PACKAGE = Path(jaxpar.__file__).parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


@contextlib.contextmanager
def present_lines() -> Iterator[None]:
    """Compile a program again if it is cached with other lines, such as those before a change of a comment."""
    name = "jax_compilation_cache_include_metadata_in_key"
    former = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, former)


class SourceLine(NamedTuple):
    """A line of Python, and the function that it is in."""

    file: Path
    line: int
    function: str

    @property
    def is_own(self) -> bool:
        """Whether the file is one of jaxpar or of the user, and not one of an installed package."""
        is_installed = "site-packages" in self.file.parts or self.file.is_relative_to(STANDARD_LIBRARY)
        return self.file.is_relative_to(PACKAGE) or not is_installed

    def __str__(self) -> str:
        """Return `file:line in function`; files of jaxpar and of the current directory have relative paths."""
        roots = [path for path in (PACKAGE.parent, Path.cwd()) if self.file.is_relative_to(path)]
        return f"{self.file.relative_to(roots[0]) if roots else self.file}:{self.line} in {self.function}"


class SourceLines:
    """The lines of Python of a compiled program."""

    def __init__(self, text: str):
        """text: the result of `jax.stages.Compiled.as_text`."""
        self._names: dict[str, dict[int, str]] = {name: {} for name in SOURCE_TABLES[:2]}
        self._numbers: dict[str, dict[int, dict[str, int]]] = {name: {} for name in SOURCE_TABLES[2:]}
        table = ""
        for line in text.splitlines():
            if line in SOURCE_TABLES:
                table = line
            elif line.endswith("{"):  # the first computation
                break
            elif table and (entry := ENTRY.match(line)):
                if table in self._names:
                    self._names[table][int(entry[1])] = entry[2]
                else:
                    fields = re.findall(r"(\w+)=(\d+)", entry[3])
                    self._numbers[table][int(entry[1])] = {name: int(number) for name, number in fields}
        frames = self._numbers["StackFrames"]
        # XLA prints the number of the parent plus 1: an outermost frame, whose parent is 0, seems to be its own parent.
        self._shift = int(any(frame.get("parent_frame_id") == number for number, frame in frames.items()))

    def stack(self, instruction: Instruction) -> Iterator[SourceLine]:
        """Yield the lines that an instruction comes from, the innermost first; none if the program has none."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.line)
        number = int(found[1]) if found else 0
        while frame := self._numbers["StackFrames"].get(number):
            location = self._numbers["FileLocations"][frame["file_location_id"]]
            names = self._names
            yield SourceLine(
                Path(names["FileNames"][location["file_name_id"]]),
                location["line"],
                names["FunctionNames"][location["function_name_id"]],
            )
            number = frame.get("parent_frame_id", 0) - self._shift

    def own(self, instruction: Instruction) -> SourceLine | None:
        """Return the innermost line that is in jaxpar or in a module of the user, or else the innermost one."""
        stack = list(self.stack(instruction))
        return next((line for line in stack if line.is_own), stack[0] if stack else None)
