"""Counts the FLOPs and the bytes of kernels in the optimized HLO of a GPU program.

A kernel is one instruction of a compiled program: a fusion, or a call of a library such as cuDNN. It reads each of its
operands and writes its results once, except that it touches only the slices that it takes out of an operand, or writes
into one.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.measure.hlo import HloArray, HloProgram, Instruction, without_bitcasts

SLICES = ("dynamic-slice", "slice", "gather")
# Operations that read an element of an operand for each element that is read of their result.
READ_BY_ELEMENT = (
    *("bitcast", "convert", "copy", "add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs"),
    *("exponential", "log", "sqrt", "rsqrt", "tanh", "power", "compare", "select", "and", "or", "not", "xor"),
)
GEMM, ATTENTION, CONVOLUTION = "__cublas$", "__cudnn$fmha", "__cudnn$conv"  # beginnings of library targets
CALL_TARGET = re.compile(r'custom_call_target="([^"]*)"')
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # of attention: scores and values; these scores again and four gradients


def call_target(instruction: Instruction) -> str:
    """Return the name of the library function that an instruction calls; empty if it calls none."""
    target = CALL_TARGET.search(instruction.line)
    return target[1] if target else ""


def is_product(instruction: Instruction) -> bool:
    """Return whether an instruction is a matrix product, a convolution or attention."""
    return instruction.operation in ("dot", "convolution") or call_target(instruction).startswith(
        (GEMM, ATTENTION, CONVOLUTION)
    )


def product_flops(instruction: Instruction, operands: Sequence[HloArray]) -> float:
    """Return the FLOPs of a matrix product, a convolution or attention; two for each multiply-add.

    Masked positions that a causal attention kernel skips are not counted.
    """
    target = call_target(instruction)
    if target.startswith(ATTENTION):
        return _attention_flops(instruction, target)
    result = math.prod(instruction.results[0].dims)
    if instruction.operation == "convolution" or target.startswith(CONVOLUTION):
        return _convolution_flops(instruction, operands, target)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.line)
    if not contracted:  # the product is a library call
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.line.replace(" ", ""))
    assert contracted, instruction.line
    return 2.0 * result * math.prod(operands[0].dims[int(dim)] for dim in re.findall(r"\d+", contracted[1]))


def _convolution_flops(instruction: Instruction, operands: Sequence[HloArray], target: str) -> float:
    """Count a convolution: each output sums over the kernel's window and input features."""
    found = re.search(r"dim_labels=\w+_(\w+)->", instruction.line)
    assert found, instruction.line
    result = instruction.results[0]
    # The gradient of the kernel is the result, and one of the input has the output as its first operand.
    backward_kernel, backward_input = "BackwardFilter" in target, "BackwardInput" in target
    kernel = (result if backward_kernel else operands[1]).dims
    output = (operands[1] if backward_kernel else operands[0] if backward_input else result).dims
    return 2.0 * math.prod(output) * math.prod(kernel) / kernel[found[1].index("o")]


def _attention_flops(instruction: Instruction, target: str) -> float:
    found = re.search(r"backend_config=(\{.*\})", instruction.line)
    assert found, instruction.line
    config: Mapping[str, Any] = json.loads(found[1])["cudnn_fmha_backend_config"]
    scores = math.prod(int(size) for size in config["intermediate_tensor_shape"]["dimensions"])
    number = BACKWARD_PRODUCTS if target.endswith("Backward") else FORWARD_PRODUCTS
    is_causal = "CAUSAL" in config["mask_type"]
    return 2.0 * number * scores * instruction.results[0].dims[-1] * (0.5 if is_causal else 1)


def kernel_bytes(program: HloProgram, computation: str, instruction: Instruction) -> float:
    """Return the bytes that a kernel reads and writes."""
    operands = program.operand_types(computation, instruction)
    if instruction.operation in ("fusion", "fusion-start"):  # the latter, while other kernels run
        [called] = program.called(instruction)
        body = program.computations[called]
        shares = _read_shares(body)
        read = sum(shares[name] * _size(one.results) for name, one in body.items() if one.operation == "parameter")
        return read + sum(_written_bytes(body, name) for name in program.returned(called))
    if instruction.operation in SLICES:
        return 2.0 * _size(instruction.results)
    if instruction.operation == "dynamic-update-slice":
        return 2.0 * operands[1].nbytes
    return float(_size(instruction.results) + _size(operands))


def _size(arrays: Sequence[HloArray]) -> int:
    return sum(array.nbytes for array in arrays)


def _read_shares(body: Mapping[str, Instruction]) -> dict[str, float]:
    """Return the share of the elements of each value that a fusion computes or reads: all of those that it returns."""
    users: dict[str, list[str]] = {}
    for name, one in body.items():
        for operand in dict.fromkeys(one.operands):
            users.setdefault(operand, []).append(name)
    shares: dict[str, float] = {}

    def read_by(user: str, name: str) -> float:
        one = body[user]
        if one.operation in SLICES and one.operands[0] == name:
            return _num_elements(one) / max(_num_elements(body[name]), 1)
        if one.operation in READ_BY_ELEMENT:
            return shares[user]
        return float(one.operation != "dynamic-update-slice" or one.operands[0] != name)

    for name in reversed(tuple(body)):  # users are after what they use
        shares[name] = min(sum(read_by(user, name) for user in users[name]), 1.0) if name in users else 1.0
    return shares


def _num_elements(value: Instruction) -> int:
    return sum(math.prod(array.dims) for array in value.results)


def _written_bytes(body: Mapping[str, Instruction], name: str) -> float:
    """Return the bytes that a fusion writes for one of its results."""
    value = without_bitcasts(body, name)
    written = body[value.operands[1]] if value.operation == "dynamic-update-slice" else value
    return float(_size(written.results))
