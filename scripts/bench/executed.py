"""Counts the FLOPs that a compiled program executes, from the text of its optimized HLO.

Multiplications and additions of matrix products and convolutions, wherever XLA has put them. The body of a loop
counts as often as the loop goes round; a branch of a conditional in the share of the runs in which it is taken.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache

# Of a conditional, by its name in the program's source: how often each branch is taken, in shares. None: not known.
Shares = Callable[[str], Sequence[float] | None]

COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*)$")
ARRAY = re.compile(r"\(?\w+\[([\d,]*)\]")  # a result, or the first of several
OPERATION = re.compile(r"(?:^|[\]})] )([a-z][a-z0-9-]*)\((.*)$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%([\w.-]+)")
CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
LIBRARIES = ("gemm", "matmul", "conv", "cublas", "cudnn", "onednn", "triton")


class Program:
    """The computations of a program, as their lines."""

    def __init__(self, text: str):
        """text: of `jax.stages.Compiled.as_text`."""
        self._lines: dict[str, list[str]] = {}
        self._dims: dict[tuple[str, str], list[int]] = {}  # of arrays, by computation and name
        name = self._entry = ""
        for line in text.splitlines():
            if header := COMPUTATION.match(line):
                name = header[2]
                self._lines[name] = []
                self._entry = name if header[1] else self._entry
            elif instruction := INSTRUCTION.match(line):
                self._lines[name].append(instruction[2])
                self._dims[name, instruction[1]] = self._result(instruction[2])

    def flops(self, shares: Shares = lambda name: None) -> float:
        """Executed by one device, of those that take each branch in these shares.

        Raises:
          ValueError: how often products are computed is not known: a loop, a conditional, or a call of a library.
        """

        @cache
        def of_computation(name: str) -> float:
            return sum(of_line(name, line) for line in self._lines[name])

        def of_line(name: str, line: str) -> float:
            operation, rest = _operation(line)
            if operation == "dot" or "__cublas$" in line:
                return 2 * math.prod(self._result(line)) * self._contracted(name, rest)
            if operation == "convolution":
                return 2 * math.prod(self._result(line)) * self._window(name, rest)
            inner = [of_computation(called) for called in _called(line)]
            if not any(inner) and any(word in _target(line) for word in LIBRARIES):
                raise ValueError(f"a library's product is not counted: {line}")
            if operation == "while" and any(inner):
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                if trips is None:
                    raise ValueError(f"a loop of unknown length: {_source(line)}")
                return int(trips[1]) * sum(inner)
            if operation == "conditional" and any(flops != inner[0] for flops in inner):
                weights = shares(_source(line))
                if weights is None or len(weights) != len(inner):
                    raise ValueError(f"how often each of {len(inner)} branches is taken is not known: {_source(line)}")
                return sum(weight * flops for weight, flops in zip(weights, inner, strict=True))
            return inner[0] if operation == "conditional" else sum(inner)

        return of_computation(self._entry)

    def _result(self, line: str) -> list[int]:
        array = ARRAY.match(line)
        return _numbers(array[1]) if array else []

    def _contracted(self, name: str, rest: str) -> int:
        """The numbers in each sum of a product."""
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}|lhs_contracting_dimensions\":\[([\d,\"]*)\]", rest)
        left = self._dims[name, _operands(rest)[0]]
        return math.prod(left[dim] for dim in _numbers((dims[1] or dims[2] or "").replace('"', ""))) if dims else 1

    def _window(self, name: str, rest: str) -> int:
        """Each output sums over the window and over the input channels of its group: the kernel but its out dim."""
        labels = re.search(r"dim_labels=\w+_(\w+)->", rest)
        assert labels, rest
        kernel = self._dims[name, _operands(rest)[1]]
        return math.prod(kernel) // kernel[labels[1].index("o")]


def _operation(line: str) -> tuple[str, str]:
    """Of `type operation(operands), attributes`: the operation, and what follows its bracket."""
    found = OPERATION.search(re.sub(r"/\*.*?\*/", "", line))
    assert found, line
    return found[1], found[2]


def _operands(rest: str) -> list[str]:
    return re.findall(r"%([\w.-]+)", rest[: rest.index(")")])


def _called(line: str) -> Iterator[str]:
    if lists := CALLED_LISTS.search(line):
        yield from re.findall(r"%([\w.-]+)", lists[1])
    else:
        yield from CALLED.findall(line)
        yield from re.findall(r"(?:true|false)_computation=%([\w.-]+)", line)


def _source(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    return name[1] if name else "?"


def _target(line: str) -> str:
    """Of a custom call: what it calls."""
    target = re.search(r'custom_call_target="([^"]*)"', line)
    return target[1] if target else ""


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
