"""Model FLOPs, counted on the jaxpr, and the peak FLOP/s of GPUs: numerator and denominator of MFU.

The count covers matrix products, convolutions and attention of the forward pass, with two FLOPs per multiply-add. It
ignores all other operations, such as norms, activations and lookups. A training step counts as three forward passes,
because the backward pass has two products for each product of the forward pass. Rematerialization is not counted, and
masked positions that a kernel skips are not subtracted.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# (words of `jax.Device.device_kind`, peak FLOP/s in bfloat16, peak FLOP/s in float32); the first matching row applies.
# The peaks are for dense matrix products accumulated in float32. The float32 peak is that of XLA's default, which is
# TF32 if the GPU has it. From NVIDIA's data sheets; for Ada, Hopper and Blackwell these list twice the values, for
# sparse matrices.
PEAK_FLOPS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250e12, 1125e12),  # HGX B200: 36 and 18 PFLOP/s, sparse, of eight
    ("H200 NVL", 835.5e12, 417.5e12),
    ("H200", 989.5e12, 494.5e12),
    ("GH200", 989.5e12, 494.5e12),
    ("H100 NVL", 835.5e12, 417.5e12),
    ("H100 PCIe", 756.5e12, 378e12),
    ("H100", 989.5e12, 494.5e12),
    ("A100", 312e12, 156e12),
    ("L40S", 362e12, 183e12),
    ("L4", 121e12, 60e12),
    ("A6000", 154.8e12, 77.4e12),  # NVIDIA Ampere GA102 whitepaper, appendix
    ("4090", 165.2e12, 82.6e12),  # NVIDIA Ada whitepaper, appendix A
    ("3090", 71e12, 35.6e12),  # NVIDIA Ampere GA102 whitepaper, appendix A
    # These GPUs have no bfloat16 units: XLA computes in float32.
    ("V100 PCIE", 14e12, 14e12),
    ("V100", 15.7e12, 15.7e12),
    ("T4", 8.1e12, 8.1e12),
)
PEAK_FLOAT16 = {"V100 PCIE": 112e12, "V100": 125e12, "T4": 65e12}  # of the same data sheets; of others, as in bfloat16


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device in matrix products of float32, bfloat16 or float16; None if unknown."""
    words = set(device_kind.replace("-", " ").split())
    for key, bfloat16, float32 in PEAK_FLOPS:
        if words.issuperset(key.split()):
            return {"bfloat16": bfloat16, "float32": float32, "float16": PEAK_FLOAT16.get(key, bfloat16)}[dtype]
    return None


def forward_flops(function: Callable[..., Any], *args: Any) -> int:
    """Count the FLOPs of one call of a single-device function on its jaxpr, without executing it.

    For a `cond`, the most expensive branch is counted. args: arrays or `jax.ShapeDtypeStruct`s. Raises ValueError if a
    `while_loop` contains a matrix product, so that the number of products is unknown.
    """
    return sum(map(_count_equation, jax.make_jaxpr(function)(*args).jaxpr.eqns))


def equation_flops(equation: core.JaxprEqn) -> int:
    """Count the FLOPs of a matrix product, a convolution or the forward pass of attention; 0 for other primitives."""
    count = _PRODUCTS.get(equation.primitive.name)
    return count(equation) if count else 0


def _count_equation(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name in _PRODUCTS:
        return equation_flops(equation)
    inner = [sum(map(_count_equation, jaxpr.eqns)) for value in params.values() for jaxpr in jaxprs_in(value)]
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "cond":
        return max(inner)
    if name == "while" and any(inner):
        raise ValueError(
            "a matrix product inside a while_loop cannot be counted; use scan, or fori_loop with constant bounds"
        )
    return sum(inner)


def jaxprs_in(value: object) -> Iterator[core.Jaxpr]:
    """Yield the jaxprs in a parameter of an equation: of jit, remat, custom_jvp, custom_vjp, scan, cond or while."""
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from jaxprs_in(item)


def _shape(variable: Any) -> tuple[int, ...]:  # Any: the type of an aval in JAX has no shape
    return variable.aval.shape


def _matrix_product(equation: core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = _shape(equation.invars[0]), _shape(equation.outvars[0])
    return 2 * math.prod(out) * math.prod(left[dim] for dim in contracted)


def _convolution(equation: core.JaxprEqn) -> int:
    """Count a convolution: each output sums over the kernel divided by its number of output features."""
    kernel, out = _shape(equation.invars[1]), _shape(equation.outvars[0])
    out_features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(out) * math.prod(kernel) // out_features


def attention_flops(equation: core.JaxprEqn) -> int:
    """Count the forward pass of attention: queries [B, T, H, K] x keys [B, S, G, K], and probabilities x values."""
    (B, T, H, K), S = _shape(equation.invars[0]), _shape(equation.invars[1])[1]
    return 4 * B * T * S * H * K


_PRODUCTS: dict[str, Callable[[core.JaxprEqn], int]] = {
    "dot_general": _matrix_product,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": attention_flops,
    "cudnn_attention_forward": attention_flops,  # the same, traced where cuDNN is not installed
}
