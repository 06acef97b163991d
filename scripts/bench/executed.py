"""Counts the FLOPs that a compiled program executes in matrix products and convolutions anywhere in its HLO."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.measure.hlo import Frequency, HloArray, HloProgram, Instruction

LIBRARIES = ("gemm", "matmul", "conv", "cublas", "cudnn", "onednn", "triton")


def flops(text: str, shares: Frequency = lambda _name: None) -> float:
    """Return the FLOPs that one device executes, averaged over devices that take branches in the given shares.

    Args:
      text: HLO from `jax.stages.Compiled.as_text`.
      shares: shares in which the branches of a conditional are taken, by the name of the conditional.

    Raises:
      ValueError: the number of executions of a product is unknown, because of a loop, a conditional or a library call.
    """
    return float(HloProgram(text).total(_flops, shares)["flops"])


def _flops(instruction: Instruction, operands: Sequence[HloArray]) -> Mapping[Any, float] | None:
    if instruction.operation == "dot" or "__cublas$" in instruction.line:
        return {"flops": 2 * math.prod(instruction.results[0].dims) * _contracted(instruction, operands)}
    if instruction.operation == "convolution":
        return {"flops": 2 * math.prod(instruction.results[0].dims) * _window(instruction, operands)}
    target = re.search(r'custom_call_target="([^"]*)"', instruction.line)
    if target and "calls=" not in instruction.line and any(word in target[1] for word in LIBRARIES):
        raise ValueError(f"cannot count the FLOPs of a library call: {instruction.line}")
    return None


def _contracted(instruction: Instruction, operands: Sequence[HloArray]) -> int:
    """Return the number of terms in each sum of a matrix product."""
    pattern = r"lhs_contracting_dims=\{([\d,]*)\}|lhs_contracting_dimensions\":\[([\d,\"]*)\]"
    dims = re.search(pattern, instruction.attributes)
    numbers = (dims[1] or dims[2] or "").replace('"', "").split(",") if dims else []
    return math.prod(operands[0].dims[int(dim)] for dim in numbers if dim)


def _window(instruction: Instruction, operands: Sequence[HloArray]) -> int:
    """Return the number of terms of each output of a convolution: the kernel size without the output dim."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    assert labels, instruction.line
    kernel = operands[1].dims
    return math.prod(kernel) // kernel[labels[1].index("o")]
