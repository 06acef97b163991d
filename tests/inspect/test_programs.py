"""The summary of a program, from text as XLA writes it for GPUs. tests/cluster/test_target.py compiles for GPUs."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.inspect.programs import MatrixProduct, OverlappedCollective, summarize
from jaxpar.strategies.strategy import CompiledProgram

META = 'metadata={op_name="jit(step)/%s"}'
TEXT = f"""HloModule jit_step, is_scheduled=true, replica_count=2, num_partitions=4

%fused (p: bf16[8,8], q: bf16[8,8]) -> bf16[8,8] {{
  %p = bf16[8,8]{{1,0}} parameter(0)
  %q = bf16[8,8]{{1,0}} parameter(1)
  ROOT %dot.1 = bf16[8,8]{{1,0}} dot(%p, %q), lhs_contracting_dims={{1}}, {META % "fused"}
}}

%body (arg: (s32[], bf16[8,8], f32[1024,1024])) -> (s32[], bf16[8,8], f32[1024,1024]) {{
  %arg = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) parameter(0)
  %x = bf16[8,8]{{1,0}} get-tuple-element(%arg), index=1
  %large = f32[1024,1024]{{1,0}} get-tuple-element(%arg), index=2
  %bits = u16[512]{{0}} bitcast(%large)
  %all-gather-start = (u16[512]{{0}}, u16[2,512]{{1,0}}) all-gather-start(%bits), {META % "gather"}
  %first = bf16[8,8]{{1,0}} fusion(%x, %x), kind=kCustom, calls=%fused
  %second = bf16[8,8]{{1,0}} custom-call(%first, %x), custom_call_target="__cublas$gemm", {META % "library"}, \
backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}
  %all-gather-done = u16[2,512]{{1,0}} all-gather-done(%all-gather-start), {META % "gather"}
  %third = bf16[8,8]{{1,0}} fusion(%second, %x), kind=kCustom, calls=%fused
  %all-reduce-start = f32[1024,1024]{{1,0}} all-reduce-start(%large), {META % "reduce"}
  %all-reduce-done = f32[1024,1024]{{1,0}} all-reduce-done(%all-reduce-start)
  %norm-start = f32[] all-reduce-start(%scalar), {META % "norm"}
  %norm-done = f32[] all-reduce-done(%norm-start)
  %copy.1 = f32[1024,1024]{{1,0}} copy(%large)
  %copy.4 = f32[1024,1024]{{0,1}} fusion(%large), kind=kLoop, calls=%copied
  %copy.2 = bf16[8,8]{{1,0}} copy(%x)
  ROOT %out = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) tuple(%arg, %third, %copy.1)
}}

%copied (c: f32[1024,1024]) -> f32[1024,1024] {{
  %c = f32[1024,1024]{{1,0}} parameter(0)
  ROOT %copy.5 = f32[1024,1024]{{0,1}} copy(%c)
}}

%condition (arg: (s32[], bf16[8,8], f32[1024,1024])) -> pred[] {{
  %arg.2 = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) parameter(0)
  ROOT %less = pred[] custom-call(%arg.2), custom_call_target="compare"
}}

%yes (y: f32[8,8]) -> f32[8,8] {{
  %y = f32[8,8]{{1,0}} parameter(0)
  ROOT %dot.2 = f32[8,8]{{1,0}} dot(%y, %y), lhs_contracting_dims={{1}}, {META % "branch"}
}}

%no (n: f32[8,8]) -> f32[8,8] {{
  ROOT %n = f32[8,8]{{1,0}} parameter(0)
}}

ENTRY %main (a: f32[1024,1024], choice: pred[]) -> f32[8,8] {{
  %a = f32[1024,1024]{{1,0}} parameter(0)
  %choice = pred[] parameter(1)
  %start = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) tuple(%a, %a, %a)
  %loop = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) while(%start), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}, {META % "loop/while"}
  %copy.3 = f32[1024,1024]{{1,0}} copy(%a)
  %small = f32[8,8]{{1,0}} fusion(%a), kind=kLoop, calls=%no
  ROOT %chosen = f32[8,8]{{1,0}} conditional(%choice, %small, %small), true_computation=%yes, false_computation=%no, \
{META % "choose/x"}
}}
"""


def program(text: str = TEXT, **frequencies: Any) -> Any:
    compiled: Any = SimpleNamespace(as_text=lambda: text)
    return CompiledProgram(compiled, {"choose": (0.25, 0.75)} | frequencies)


def test_schedule() -> None:
    found = summarize(program())
    assert found.collectives == [
        OverlappedCollective("all-gather", "uint16", 1024, 5.0, 2, 2, "jit(step)/gather", "all-gather-start"),
        OverlappedCollective("all-reduce", "float32", 2**22, 5.0, 0, 0, "jit(step)/reduce", "all-reduce-start"),
    ]
    assert sorted(found.products) == [
        MatrixProduct("bfloat16", 5.0, 1024.0, "", "jit(step)/fused"),
        MatrixProduct("bfloat16", 5.0, 1024.0, "", "jit(step)/fused"),
        MatrixProduct("bfloat16", 5.0, 1024.0, "__cublas$gemm", "jit(step)/library"),
        MatrixProduct("float32", 0.75, 1024.0, "", "jit(step)/branch"),
    ]
    assert (found.copies, found.copied_bytes) == (10, 10 * 2**22)  # of the large array, inside the loop
    assert found.num_devices == 8
    assert found.flops == 1024 * 15.75
    # Of an iteration: three fusions, the library call, two copies and the condition. Outside: a copy and a fusion, and
    # the product of a branch.
    assert found.kernels == 5 * 7 + 2 + 0.75
    assert found.synchronizations == 1  # the conditional
    # Of the loop, the host now also asks before each iteration, and at the end.
    text = TEXT.replace('"known_trip_count"', '"other"')
    assert summarize(program(text, loop=(5.0,))).synchronizations == 1 + 6


def test_a_collective_without_an_end() -> None:
    text = TEXT.replace("all-gather-done(%all-gather-start)", "all-gather-done(%other)")
    with pytest.raises(ValueError, match="all-gather-start has no end"):
        summarize(program(text))
