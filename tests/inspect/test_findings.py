"""Each kind of finding, in a program that has it and in one without. tests/cluster/test_target.py compiles for GPUs."""

import re
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from jaxpar.choose.costs.rates import EFFICIENCY, LAUNCH_SECONDS
from jaxpar.cluster import named_cluster
from jaxpar.config import default_config
from jaxpar.errors import format_bytes
from jaxpar.inspect import findings
from jaxpar.inspect.audit_report import describe_program, format_findings, format_program, format_programs
from jaxpar.inspect.findings import Finding, Kind, RunProgram
from jaxpar.inspect.programs import summarize
from jaxpar.inspect.step_time import NOTHING, WAIT, Part, StepTime, predict
from tests.inspect.test_programs import LARGE, ROW, TEXT, program
from tests.inspect.test_step_time import cluster

GROUPS = ", replica_groups=[1,8]<=[8]"
SEND = "%{0}-start = f32[1024,1024]{{1,0}} all-reduce-start(%{1})" + GROUPS
DONE = "%{0}-done = f32[1024,1024]{{1,0}} all-reduce-done(%{0}-start)"
LAST = f"{SEND.format('last', 'a')}\n  {DONE.format('last')}\n  %copy.3 ="
BEFORE = TEXT.replace("-start(%large)", f"-start(%large){GROUPS}").replace("-start(%bits)", f"-start(%bits){GROUPS}")
ALL = BEFORE.replace("-start(%scalar)", f"-start(%scalar){GROUPS}").replace("%copy.3 =", LAST)
PRODUCTS = 8 * 1024 * (5 * 3 + 0.75)  # FLOPs: three products in five iterations, and one in a branch, on 8 devices
CONDITIONAL = "conditional(%choice, %small, %small), true_computation=%yes, false_computation=%no"
REMEDIES = {"stacks": "do not scan", "all-reduce": "send earlier"}
OF_A_PROGRAM = set(get_args(Kind)) - {"other stages"}
KERNEL = "%between = f32[1024,1024]{1,0} negate(%large)"


def find(text: str, dtype: str = "bfloat16", flops: float = PRODUCTS / 1.2, **expected: str) -> list[Finding]:
    compiled, gpus = program(text), cluster(num_processes=1)
    reasons: Mapping[Any, str] = expected
    time = predict([compiled], gpus)
    ran = [RunProgram(summarize(compiled), time)]
    return findings.find(ran, time, gpus, reasons, REMEDIES, dtype=dtype, model_flops=flops)


def test_every_kind() -> None:
    found = {one.kind: one for one in find(ALL, exposed="a reason", synchronization="another")}
    assert found.keys() == OF_A_PROGRAM
    text: Mapping[str, str] = {kind: one.text for kind, one in found.items()}
    assert text["float32"] == "4.8% of the FLOPs are products of float32 arrays in jit(step)/branch"
    step = predict([program(ALL)], cluster(num_processes=1))
    for kind, number, nbytes in (("stacks", 16, 5 * (6 * ROW + 4) + 4 * LARGE), ("copies", 15, 10 * (2 * LARGE + 128))):
        [words, took] = text[kind].split(" read and write ")
        seconds = nbytes / (EFFICIENCY["memory"] * 1e9) + number * LAUNCH_SECONDS
        share = seconds / step.seconds
        assert took == f"{format_bytes(nbytes)} in {1e3 * seconds:.3g} ms, {share:.1%} of the step", words
    assert text["copies"].startswith("copies in loops read")
    for kind, waited in (("exposed in a loop", "5 all-reduces in loops"), ("exposed", "1 all-reduce")):
        pattern = rf"the GPU waits [\d.]+ ms \([\d.]+% of the step\) for {waited}"
        assert re.fullmatch(pattern, text[kind])
    assert text["synchronization"] == "the host waits for the GPU once"
    assert text["recomputation"] == "the products have 1.20 times the FLOPs of both passes of the model"
    lines = format_findings([one._asdict() | {"is_normal": one.is_normal} for one in found.values()])
    assert [line.partition(":")[0] for line in lines] == ["finding"] * 6 + ["normal"]
    assert f"finding: {text['stacks']}; do not scan" in lines
    assert f"finding: {text['exposed']} (a reason); send earlier" in lines  # more than 3% of the step
    assert lines[-1] == f"normal: {text['synchronization']} (another)"
    assert format_findings([]) == ["no findings"]


@pytest.mark.parametrize(
    ("kind", "changes", "arguments"),
    [
        ("float32", {}, {"dtype": "float32"}),
        (
            "stacks",
            {
                "= f32[1,1024]{1,0} dynamic-slice(": "= f32[1,1024]{1,0} gather(",
                " dynamic-update-slice(": " add(",
                "/stack": "",
            },
            {},
        ),
        ("copies", {" copy(%large)": " negate(%large)", " copy(%c)": " negate(%c)"}, {}),
        ("exposed in a loop", {"%all-reduce-done =": f"{KERNEL}\n  %all-reduce-done ="}, {}),
        ("exposed", {DONE.format("last"): f"{KERNEL.replace('large', 'a')}\n  {DONE.format('last')}"}, {}),
        ("synchronization", {CONDITIONAL: "fusion(%small), kind=kLoop, calls=%yes"}, {}),
        ("recomputation", {}, {"flops": PRODUCTS / 1.05}),
    ],
)
def test_a_program_without_one(kind: Kind, changes: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
    text = ALL
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    assert {one.kind for one in find(text, **arguments)} == OF_A_PROGRAM - {kind}


def test_expectations() -> None:
    """A pipeline chooses actions and exchanges at the end. Gathers in a loop must overlap under every strategy."""
    h100s, config = named_cluster("h100", 8), default_config()

    def kinds(**overrides: str) -> set[Kind]:
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(overrides)
        return set(findings.expectations(changed))

    assert kinds(exchange="zero3") == {"exposed"}
    for strategy, end in (("data_parallel", "before the first parameters"), ("pipeline", "the updated parameters")):
        config.strategy, config.exchange = strategy, "zero1"
        assert end in findings.expectations(config)["exposed"]
    config = default_config()
    assert kinds(strategy="single") == set()
    assert kinds(strategy="pipeline") == {"exposed", "other stages", "synchronization"}
    assert kinds(strategy="single", **{"model.remat": "dots"}) == {"recomputation", "stacks"}
    assert kinds(strategy="single", **{"pipeline.remat": "full"}) == set()
    config.model.remat = "full"
    assert findings.expectations(config, has_memory=True).keys() == {"stacks", "exposed"}
    assert findings.remedies(config, h100s, has_memory=True)["recomputation"].startswith(
        "config.model.remat=none avoids it"
    )
    config.model.remat = "none"
    assert "recomputation" not in findings.remedies(config, h100s, has_memory=True)
    for dtype, more in (("bfloat16", {"float32"}), ("float16", set[str]())):  # V100s multiply float16, not bfloat16
        config.model.dtype = dtype
        remedies = findings.remedies(config, named_cluster("v100", 8))
        assert more == {"float32"}.intersection(remedies)
    every = {kind for reasons in findings.EXPECTED.values() for kind in reasons}
    assert every.isdisjoint({"float32", "copies", "recomputation"})


def test_format_program() -> None:
    compiled, gpus = program(ALL), cluster(num_processes=1)
    text = "\n".join(format_program(describe_program(summarize(compiled), predict([compiled], gpus))))
    [reduced] = [line.split() for line in text.splitlines() if line.startswith("all-reduce") and " 5.00 " in line]
    assert reduced[1:6] == ["float32", "4,194,304", "5.00", "0", "0"]
    assert float(reduced[6]) == float(reduced[7]) > 0  # ms in five iterations, all exposed
    assert "matrix products: 15 of bfloat16, 1 of float32; attention kernels: none" in text
    assert "    of float32: jit(step)/branch" in text
    assert text.endswith("the host waits for the GPU: once")
    assert "kernels: 59; slices of stacked arrays: 16 (16.9 MB); copies in loops: 15 (83.9 MB); " in text
    unknown = format_program(describe_program(summarize(compiled), NOTHING))
    assert all(line.split()[-1] == "0" for line in unknown if line.startswith("all-reduce"))  # without times


def test_many_small_collectives() -> None:
    """Four permutes of 4 KB between two GPUs, 8 us each, are as much a finding as one large collective."""
    sends = "".join(
        f"  %s.{n} = f32[1000]{{0}} collective-permute(%x), source_target_pairs={{{{0,1}},{{1,0}}}}\n" for n in range(4)
    )
    kernel = "  ROOT %y = f32[{0}]{{0}} negate(%x)\n"
    before = "HloModule jit_step\n\nENTRY %main (x: f32[1000]) -> f32[1000] {\n  %x = f32[1000]{0} parameter(0)\n"

    def of(size: int) -> list[Finding]:
        compiled = program(f"{before}{sends}{kernel.format(size)}}}\n")
        gpus = cluster(num_processes=1)
        time = predict([compiled], gpus)
        ran = [RunProgram(summarize(compiled), time)]
        return findings.find(ran, time, gpus, {}, {}, dtype="float32", model_flops=1)

    [found] = of(1000)
    assert (found.kind, found.text) == (
        "exposed",
        "the GPU waits 0.032 ms (70.5% of the step) for 4 collective-permutes",
    )
    assert of(1_000_000) == []  # the step takes 4.7 ms


def test_moves_without_a_known_rate() -> None:
    """On GPUs of an unknown kind, the share is that of the bytes of all kernels."""
    gpus, summary = cluster(num_processes=1, memory_bandwidth=None), summarize(program(ALL))
    ran = [RunProgram(summary, NOTHING)]
    found = findings.find(ran, NOTHING, gpus, {}, {}, dtype="float32", model_flops=PRODUCTS)
    text = {one.kind: one.text for one in found}
    shares = {kind: getattr(summary, kind).nbytes / summary.kernels.nbytes for kind in ("stacks", "copies")}
    assert (
        text["copies"] == f"copies in loops read and write 83.9 MB, {shares['copies']:.1%} of the bytes of all kernels"
    )
    assert text["stacks"].endswith(f" read and write 16.9 MB, {shares['stacks']:.1%} of the bytes of all kernels")
    assert 0.5 < shares["copies"] < 0.8


def test_several_programs() -> None:
    """Equal programs are printed once."""
    row = describe_program(summarize(program(ALL)), NOTHING)
    assert row["name"] == "jit_step"
    other, alone = row | {"name": "jit_update"}, [line for line in format_programs([row | {"devices": [0, 1]}]) if line]
    assert alone == format_program(row)
    lines = format_programs([row | {"devices": [3]}, row | {"devices": [1]}, other | {"devices": [0]}])
    assert [line for line in lines if line.startswith("program ")] == [
        "program jit_step on devices 1, 3",
        "program jit_update on device 0",
    ]


def test_a_step_of_several_programs() -> None:
    """Moves and waits are those of the busiest device, in all runs of its programs; products those of all devices."""
    gpus, compiled = cluster(num_processes=1), program(ALL)
    once, summary = predict([compiled], gpus), summarize(compiled)
    waits = StepTime(once.seconds, once.seconds, 0.0, {Part(WAIT, ""): once.seconds})
    step = NOTHING.plus(once, 3).plus(waits)
    ran = [RunProgram(summary, once, runs, is_busiest) for runs, is_busiest in ((3, True), (2, False))]
    remedy = {"other stages": "add microbatches"}
    found = findings.find(ran, step, gpus, {}, remedy, dtype="bfloat16", model_flops=5 * PRODUCTS / 1.2)
    [wait] = [one for one in found if one.kind == "other stages"]
    assert wait.text == f"the busiest GPU waits {1e3 * once.seconds:.3g} ms (25.0% of the step) for other stages"
    assert (wait.share, wait.remedy) == (0.25, "add microbatches")
    of_one = {one.kind: one for one in find(ALL)}
    assert {one.kind for one in found} == of_one.keys() | {"other stages"}
    for one in found:
        if one.kind != "other stages":
            assert one.share == pytest.approx(0.75 * of_one[one.kind].share)  # three runs in the time of four
    text = {one.kind: one.text for one in found}
    assert "for 15 all-reduces in loops" in text["exposed in a loop"]
    assert text["synchronization"] == "the host waits for the GPU 3 times"
    assert text["float32"] == of_one["float32"].text
    assert text["recomputation"] == of_one["recomputation"].text


@pytest.mark.parametrize(
    ("columns", "normal", "defects"),
    [
        (2**21, set(), set()),
        (2**20, {"copies"}, set()),
        (2**19, set(), {"copies", "exposed in a loop"}),
        (2**17, {"stacks", "exposed"}, {"copies", "exposed in a loop"}),
    ],
)
def test_small_parts(columns: int, normal: set[Kind], defects: set[Kind]) -> None:
    """Moves and waits of less than 1% of the step are not listed, those of up to 3% are normal, larger ones are not.

    Waits that the strategy does not have by design are defects from 1% on: here those in a loop.
    """
    huge = f"%huge = f32[1024,{columns}]{{1,0}} negate(%a)\n  %last-start ="
    found = {one.kind: one for one in find(ALL.replace("%last-start =", huge), exposed="a reason")}
    of_time = {kind: one.is_normal for kind, one in found.items() if one.share}
    assert of_time == dict.fromkeys(normal, True) | dict.fromkeys(defects, False)


def test_waits_of_several_collectives() -> None:
    """Two kinds of collectives, of 2.5% and 1.2% of the step, are together more than 3% of it."""
    scatter = LAST.replace("all-reduce", "reduce-scatter").replace("%last", "%other").split("\n  %copy.3")[0]
    huge = f"{scatter}\n  %huge = f32[1024,32768]{{1,0}} negate(%a)\n  %last-start ="
    found = find(ALL.replace("%last-start =", huge), exposed="a reason")
    waits = [one for one in found if one.kind == "exposed"]
    assert [re.search(r"\(([\d.]+)%", one.text)[1] for one in waits] == ["1.2", "2.4"]  # type: ignore[index]
    assert not any(one.is_normal for one in waits)


def test_waits_for_collectives_that_overlap_in_part() -> None:
    """Waits for them are listed with a reason, however small the exposed part of their time is."""
    between = "%between = f32[1024,1200]{1,0} negate(%small)"
    text = ALL.replace(DONE.format("last"), f"{between}\n  {DONE.format('last')}")
    [part] = [one for one in find(text, exposed="a reason") if one.kind == "exposed"]
    on_link, exposed = predict([program(text)], cluster(num_processes=1)).collectives["last-start"]
    assert 0 < exposed < 0.5 * on_link
    assert part.text.startswith(f"the GPU waits {1e3 * exposed:.3g} ms ")
    assert part.reason == findings.TOO_LONG


def test_remedies() -> None:
    """The remedies name keys that apply to the strategy."""
    config = default_config()

    def kinds(**overrides: Any) -> set[str]:
        changed = config.copy_and_resolve_references()
        with changed.ignore_type():  # `auto` becomes a boolean
            changed.update_from_flattened_dict({"model.scan_layers": True} | overrides)
        return set(findings.remedies(changed, named_cluster("h100", 8)))

    at_the_end = {"all-reduce", "reduce-scatter"}
    assert kinds() == kinds(**{"optimizer.accumulation_steps": 2}) == {"stacks", *at_the_end}
    assert kinds(exchange="zero2") == {"stacks", *at_the_end, "all-gather"}
    assert kinds(strategy="pipeline") == {"stacks"}
    dispatched = {"strategy": "pipeline", "pipeline.executor": "dispatch"}
    assert kinds(**dispatched) == {"other stages"}
    for schedule in ("pipedream", "mine.csv"):
        assert kinds(**dispatched, **{"pipeline.schedule": schedule}) == set()
    for unrolled in (False, "auto"):
        assert kinds(exchange="zero2", **{"model.scan_layers": unrolled}) == set()
    remat = {"model.scan_layers": "auto", "model.remat": "full"}
    assert kinds(**remat) == at_the_end  # zero2
    assert kinds(**remat, exchange="zero2") == {"all-gather"}
    assert kinds(**remat, **{"optimizer.name": "muon"}) == {"all-reduce"}  # a narrower dtype
    narrow = {"model.scan_layers": False, "exchange_options.wire_dtype": "bfloat16"}
    assert kinds(**narrow) == set()
    others: Mapping[str, Any]
    for others in (
        {"exchange": "zero3"},
        {"strategy": "single"},
        {"mesh.tensor": 2},
    ):
        assert kinds(**others) == {"stacks"}
