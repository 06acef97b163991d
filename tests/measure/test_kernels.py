"""FLOPs and bytes of kernels, against counts by hand."""

import json

import pytest

from jaxpar.measure.hlo import HloProgram
from jaxpar.measure.kernels import is_product, kernel_bytes, product_flops


def attention(mask: str) -> str:
    shape = {"dimensions": ["2", "3", "8", "16"]}  # batch, heads, queries, keys
    return json.dumps({"cudnn_fmha_backend_config": {"intermediate_tensor_shape": shape, "mask_type": mask}})


# An instruction, and its FLOPs. p is [2,8,4], q [2,4,5], image [1,6,6,3], window [3,3,3,7] and out [1,4,4,7].
PRODUCTS = {
    "%r = f32[2,8,5]{2,1,0} dot(%p, %q), lhs_batch_dims={0}, lhs_contracting_dims={2}": 2 * 2 * 8 * 5 * 4,
    '%r = f32[2,8,5]{2,1,0} custom-call(%p, %q), custom_call_target="__cublas$gemm", backend_config={'
    '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}': 2 * 2 * 8 * 5 * 4,
    "%r = f32[1,4,4,7]{3,2,1,0} convolution(%image, %window), window={size=3x3}, dim_labels=b01f_01io->b01f": (
        2 * 4 * 4 * 7 * 3 * 3 * 3
    ),
    '%r = (f32[1,4,4,7]{3,2,1,0}, u8[9]{0}) custom-call(%image, %window), custom_call_target="__cudnn$convForward", '
    "window={size=3x3}, dim_labels=b01f_01io->b01f": 2 * 4 * 4 * 7 * 3 * 3 * 3,
    '%r = (f32[1,6,6,3]{3,2,1,0}) custom-call(%out, %window), custom_call_target="__cudnn$convBackwardInput", '
    "window={size=3x3}, dim_labels=b01f_01io->b01f": 2 * 4 * 4 * 7 * 3 * 3 * 3,
    '%r = (f32[3,3,3,7]{3,2,1,0}) custom-call(%image, %out), custom_call_target="__cudnn$convBackwardFilter", '
    "window={size=3x3}, dim_labels=b01f_01io->b01f": 2 * 4 * 4 * 7 * 3 * 3 * 3,
    # Scores and values: [8,4] x [4,16] and [8,16] x [16,4], for each of 2 x 3 heads.
    '%r = (bf16[2,3,8,4]{3,2,1,0}) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax", backend_config='
    f"{attention('NO_MASK')}": 2 * 3 * 2 * (2 * 8 * 4 * 16),
    '%r = (bf16[2,3,8,4]{3,2,1,0}) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config='
    f"{attention('CAUSAL')}": 2 * 3 * 5 * (2 * 8 * 4 * 16) / 2,
}
ARGUMENTS = """  %p = f32[2,8,4]{2,1,0} parameter(0)
  %q = f32[2,4,5]{2,1,0} parameter(1)
  %image = f32[1,6,6,3]{3,2,1,0} parameter(2)
  %window = f32[3,3,3,7]{3,2,1,0} parameter(3)
  %out = f32[1,4,4,7]{3,2,1,0} parameter(4)
"""


@pytest.mark.parametrize("line", PRODUCTS)
def test_flops_of_products(line: str) -> None:
    program = HloProgram(f"ENTRY %main (p: f32[2,8,4]) -> f32[] {{\n{ARGUMENTS}  {line}\n}}\n")
    instruction = program.computations["main"]["r"]
    assert is_product(instruction)
    assert product_flops(instruction, program.operand_types("main", instruction)) == PRODUCTS[line]


# The body of a fusion of a stack [12,32] of float32, a row of it and an index, and the bytes that it reads and writes.
STACK, ROW = 12 * 32 * 4, 32 * 4
FUSIONS = {
    "a sum": ("ROOT %r = f32[12,32]{1,0} add(%stack, %stack)", 2 * STACK),
    "a row": ("ROOT %r = f32[1,32]{1,0} dynamic-slice(%stack, %index)", 2 * ROW + 4),
    "a row by other names": (
        "%b = f32[12,32,1]{2,1,0} bitcast(%stack)\n  ROOT %r = f32[1,32,1]{2,1,0} dynamic-slice(%b, %index)",
        2 * ROW + 4,
    ),
    "a row, and all": (
        "%s = f32[1,32]{1,0} dynamic-slice(%stack, %index)\n  ROOT %r = f32[12,32]{1,0} multiply(%stack, %s)",
        2 * STACK + 4,
    ),
    "a row of products": (
        "%p = f32[12,32]{1,0} multiply(%stack, %stack)\n  ROOT %r = f32[1,32]{1,0} dynamic-slice(%p, %index)",
        2 * ROW + 4,
    ),
    "two rows of products": (
        "%p = f32[12,32]{1,0} negate(%stack)\n  %b = f32[384]{0} bitcast(%p)\n  %x = f32[32]{0} slice(%b)\n"
        "  %y = f32[32]{0} slice(%b)\n  ROOT %r = (f32[32]{0}, f32[32]{0}) tuple(%x, %y)",
        4 * ROW,
    ),
    "a row that is written": (
        "%d = f32[1,32]{1,0} negate(%row)\n  ROOT %r = f32[12,32]{1,0} dynamic-update-slice(%stack, %d, %index)",
        2 * ROW + 4,
    ),
    "rows of sums that many others use": (  # in 2 ** 60 ways
        "%v0 = f32[12,32]{1,0} negate(%stack)\n"
        + "".join(
            f"  %n{n} = f32[12,32]{{1,0}} negate(%v{n})\n  %v{n + 1} = f32[12,32]{{1,0}} add(%v{n}, %n{n})\n"
            for n in range(60)
        )
        + "  ROOT %r = f32[1,32]{1,0} dynamic-slice(%v60, %index)",
        STACK + ROW + 4,
    ),
    "two results": (
        "%d = f32[1,32]{1,0} negate(%row)\n  %w = f32[12,32]{1,0} dynamic-update-slice(%stack, %d, %index)\n"
        "  ROOT %r = (f32[12,32]{1,0}, f32[1,32]{1,0}) tuple(%w, %d)",
        3 * ROW + 4,
    ),
}


@pytest.mark.parametrize("operation", ["fusion", "fusion-start"])  # the latter by JAX 0.11, for slices of stacks
@pytest.mark.parametrize("name", FUSIONS)
def test_bytes_of_fusions(name: str, operation: str) -> None:
    body, expected = FUSIONS[name]
    used = [word for word in ("stack", "row", "index") if f"%{word}" in body]
    types = {"stack": "f32[12,32]{1,0}", "row": "f32[1,32]{1,0}", "index": "s32[]"}
    parameters = "".join(f"  %{word} = {types[word]} parameter({n})\n" for n, word in enumerate(used))
    names = ", ".join(f"%{word}" for word in used)
    text = f"%inner (x: f32[]) -> f32[] {{\n{parameters}  {body}\n}}\n\n"
    text += f"ENTRY %main (x: f32[]) -> f32[] {{\n{parameters}  ROOT %f = f32[12,32]{{1,0}} {operation}({names}), "
    program = HloProgram(text + "kind=kLoop, calls=%inner\n}\n")
    assert kernel_bytes(program, "main", program.computations["main"]["f"]) == expected
