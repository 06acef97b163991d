"""Predicted times, against sums by hand. The GPU has 1 GB/s of memory and 1 GFLOP/s: a KB takes a microsecond."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar import config as configs
from jaxpar.choose.costs.rates import EFFICIENCY, HOP_SECONDS, LAUNCH_SECONDS, TREE_BANDWIDTH, check_rates
from jaxpar.cluster import Cluster
from jaxpar.errors import UserError
from jaxpar.inspect import step_time
from jaxpar.inspect.step_time import Part, check_step, predict, short_source
from jaxpar.strategies.pipeline.executor.lowering import DeviceBranches
from jaxpar.strategies.strategy import CompiledProgram

META = 'metadata={op_name="jit(step)/%s"}'
BRANCHES = "".join(
    f"%branch_{number} (b: f32[{size}]) -> f32[{size}] {{\n  %b = f32[{size}]{{0}} parameter(0)\n"
    f"  ROOT %n.{number} = f32[{size}]{{0}} negate(%b), {META % f'negate_{number}'}\n}}\n\n"
    for number, size in enumerate((0, 1000, 2000))
)
CHOICE = "branch_computations={%branch_0, %branch_1, %branch_2}"


def cluster(**changes: Any) -> Cluster:
    rates = {"peak_flops": {"float32": 1e9, "bfloat16": 2e9}, "send_rates": {"host": 1e9, "network": 1e8}}
    return Cluster("gpu", "A GPU", 8, **{"num_processes": 2, "memory_bandwidth": 1e9} | rates | changes)


def time_of(entry: str, others: str = "", frequencies: Any = None, branches: Any = None, **changes: Any) -> Any:
    text = f"{others}ENTRY %main (x: f32[1000]) -> f32[1000] {{\n  %x = f32[1000]{{0}} parameter(0)\n  {entry}\n}}\n"
    compiled = SimpleNamespace(as_text=lambda: text)
    program = CompiledProgram(compiled, frequencies or {}, branches=branches or {})  # type: ignore[arg-type]
    return predict([program], cluster(**changes))


def kernel(kilobytes: float, flops: float = 0.0, peak: float = 1e9, kind: str = "float32") -> float:
    """Return the seconds of a kernel."""
    of_memory = kilobytes * 1e-6 / EFFICIENCY["memory"]
    return max(of_memory, flops / (EFFICIENCY[kind] * peak)) + LAUNCH_SECONDS


def all_reduce(kilobytes: float, size: int, rate: float = 1e9, hop: str = "host") -> float:
    """Return the seconds of a group with the same number of GPUs on each of two hosts, or on one host."""
    seconds, hosts = 2 * (size - 1) / size * kilobytes * 1e3 / (EFFICIENCY[hop] * rate), 1 if hop == "host" else 2
    network = 2 * (hosts - 1) * HOP_SECONDS["network"]
    ring, tree = (2 * number * HOP_SECONDS["host"] + network for number in (size - hosts, size // hosts - 1))
    return min(seconds + ring, seconds / TREE_BANDWIDTH + tree)


def test_kernels() -> None:
    """A kernel is limited by the memory or by its products, at the rate of their dtype."""
    found = time_of(f"ROOT %y = f32[1000]{{0}} negate(%x), {META % 'a/negate'}")
    assert found.seconds == pytest.approx(kernel(8))
    assert dict(found.parts) == {Part("kernel", "jit(step)/a/negate"): pytest.approx(kernel(8))}
    for dtype, peak, capability in (("f32", 1e9, ""), ("bf16", 2e9, "9.0"), ("bf16", 2e9 * 0.8 / 0.7, "8.0")):
        line = f"%a = {dtype}[50,60]{{1,0}} copy(%x)\n  %b = {dtype}[60,70]{{1,0}} copy(%x)\n"
        line += f"  ROOT %y = {dtype}[50,70]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}"
        found = time_of(line, compute_capability=capability)
        assert found.flops == 2 * 50 * 60 * 70
        assert found.by_kind()["product"] == pytest.approx(kernel(0, found.flops, peak))


@pytest.mark.parametrize(
    ("groups", "size", "rate", "hop"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4, 1e9, "host"),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2, 1e8, "network"),
        ("{{0,1,2,3,4,5,6,7}}", 8, 4e8, "network"),  # four GPUs of a host share their links to the other one
    ],
)
def test_links(groups: str, size: int, rate: float, hop: str) -> None:
    found = time_of(f"ROOT %y = f32[1000]{{0}} all-reduce(%x), replica_groups={groups}")
    assert found.seconds == found.exposed == pytest.approx(all_reduce(4, size, rate, hop))


@pytest.mark.parametrize(
    ("pairs", "seconds"),
    [
        ("{{0,1},{1,2},{2,3},{3,0}}", 4e3 / 0.8e9 + 3e-6),  # within a host
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7}}", 4e3 / 0.8e8 + 1e-5),  # the pair 3, 4 has one network card
        ("{{0,4},{1,5},{2,6},{3,7}}", 4e3 / 0.8e8 + 1e-5),  # each pair has its own
    ],
)
def test_transfers_between_pairs(pairs: str, seconds: float) -> None:
    """A permute is one hop, and what a GPU sends to another host crosses its own network card alone."""
    found = time_of(f"ROOT %y = f32[1000]{{0}} collective-permute(%x), source_target_pairs={pairs}")
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("kernels", [0, 1, 40])
def test_overlap(kernels: int) -> None:
    """Two collectives run one after the other. The time that kernels between start and end do not hide is exposed."""
    lines = [f"%s.{n} = f32[1000]{{0}} all-reduce-start(%x), replica_groups=[2,4]<=[8]" for n in range(2)]
    lines += [f"%k.{n} = f32[1000]{{0}} negate(%x)" for n in range(kernels)]
    lines += [f"%d.{n} = f32[1000]{{0}} all-reduce-done(%s.{n})" for n in range(2)]
    found, hidden = time_of("\n  ".join(lines)), kernels * kernel(8)
    expected = max(2 * all_reduce(4, 4) - hidden, 0)
    assert found.exposed == pytest.approx(expected)
    assert found.seconds == pytest.approx(hidden + expected)
    assert found.by_kind().get("all-reduce", 0) == pytest.approx(expected)


LOOP = f"""%body (p: f32[1000]) -> f32[1000] {{
  %p = f32[1000]{{0}} parameter(0)
  ROOT %c = f32[1000]{{0}} conditional(%i, %p, %p, %p), {CHOICE}, {META % "while/body/phase_0/cond"}
  %e = f32[1000]{{0}} conditional(%i, %p, %p, %p), {CHOICE}, {META % "while/body/phase_1/cond"}
}}

%condition (q: f32[1000]) -> pred[] {{
  %q = f32[1000]{{0}} parameter(0)
}}

"""
WHILE = (
    'ROOT %w = f32[1000]{0} while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}'
)


def test_branches() -> None:
    """A conditional takes the mean of its branches; the longest if their fractions are unknown."""
    choice = f"ROOT %y = f32[1000]{{0}} conditional(%x, %x, %x, %x), {CHOICE}, {META % 'choose/cond'}"
    known = time_of(choice, BRANCHES, {"choose": (0.5, 0.25, 0.25)})
    assert known.seconds == pytest.approx(0.5 * kernel(0) + 0.25 * kernel(8) + 0.25 * kernel(16))
    assert time_of(choice, BRANCHES).seconds == pytest.approx(kernel(16))
    assert time_of(WHILE, BRANCHES + LOOP).seconds == pytest.approx(3 * 2 * kernel(16))


def test_a_clock_lasts_as_long_as_its_slowest_device() -> None:
    """Two devices, three clocks of two phases: the devices wait for each other at the end of a clock only."""
    first, second = np.array([[1, 0], [2, 1], [0, 0]]), np.array([[0, 1], [0, 2], [0, 1]])  # [clock, device]
    branches = {"phase_0": DeviceBranches(first, 3), "phase_1": DeviceBranches(second, 3)}
    found = time_of(WHILE, BRANCHES + LOOP, branches=branches)
    none, short, long = kernel(0), kernel(8), kernel(16)
    assert found.seconds == pytest.approx((short + none) + (short + long) + (none + short))
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    with pytest.raises(AssertionError, match="not over the clocks"):
        time_of(WHILE, BRANCHES + LOOP, branches={"phase_0": DeviceBranches(first[:2], 3)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"send_rates": {}}, "the GPU is 'A GPU', whose file has no links; it must have them to predict times"),
        ({"peak_flops": {}}, "the GPU is 'A GPU', whose peak FLOP/s are unknown; its file, or a cluster file, must"),
    ],
)
def test_unknown_rates(changes: dict[str, Any], message: str) -> None:
    line = "%y = f32[1000]{0} all-reduce(%x), replica_groups={{0,1}}\n  ROOT %z = f32[] dot(%y, %y), "
    with pytest.raises(UserError, match=re.escape(message)):
        time_of(line + "lhs_contracting_dims={0}", **changes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("strategy=swarm",),
            "config.strategy is 'swarm'; it must be one of single, data_parallel, pipeline to predict",
        ),
        (("strategy=async_data_parallel",), "config.strategy is 'async_data_parallel'; it must be one of single,"),
        (("exchange=dp",), "config.exchange is 'dp'; it must be another one to predict the time of a step, because"),
    ],
)
def test_steps_that_are_not_one_program(overrides: tuple[str, ...], message: str) -> None:
    """Programs run at the same time or several times, and the host copies: the sum of the programs is no time."""
    config = configs.default_config()
    check_step(config)
    configs.override(config, [f"--config.{one}" for one in overrides])
    with pytest.raises(UserError, match=re.escape(message)):
        check_step(config)


def test_an_offloaded_state_takes_the_time_of_its_copies() -> None:
    """A GPU with PCI Express 3 copies at 0.9 of 16 GB/s, in a program without these copies."""
    program = CompiledProgram(SimpleNamespace(as_text=lambda: "ENTRY %main () -> f32[] {\n}\n"))  # type: ignore[arg-type]
    time = predict([program], cluster(compute_capability="7.0"), offloaded_bytes=14.4e9)
    assert time.seconds == pytest.approx(2.0)
    assert time.exposed == 0  # not a wait for other GPUs
    assert time.by_kind() == {"copy": pytest.approx(2.0)}


def test_sources() -> None:
    source = "jit(step)/shard_map/transpose(jvp())/while/body/closed_call/block/mlp/nv,nd->vd/dot_general"
    assert short_source(source) == "block/mlp/nv,nd->vd/dot_general"
    assert short_source("jit(step)/transpose(jvp(loss))/add") == "loss/add"
    assert step_time.NOTHING.seconds == 0
    of_xla = time_of("%copy.12 = f32[100,10]{0,1} copy(%x)\n  ROOT %copy.3 = f32[100,10]{0,1} copy(%copy.12)")
    assert list(of_xla.parts) == [Part("kernel", "copy f32[100,10]")]  # both, instead of `?`


def test_unknown_memory() -> None:
    """GPUs of this machine of a kind without a file have no known bandwidth."""
    check_rates(cluster())
    message = "the GPU is 'A GPU', whose memory bandwidth is unknown; it must be one of a kind with a file"
    with pytest.raises(UserError, match=re.escape(message)):
        check_rates(cluster(memory_bandwidth=None))
