"""Compares pipelines with a single device and with a scan-and-mask pipeline: FLOPs, time, memory and compilation time.

    scripts/python scripts/bench/pipeline.py [--results=a,b,c,d,e,f,g] [--stages=4,8]
        [--schedules=1f1b,eager_1f1b,zb_h1] [--rounds=3] [--examples=4] [--config.KEY=VALUE ...]

The model is a GPT with 8 layers and hidden size 256 on random tokens. Unless overridden, a microbatch has `--examples`
examples of 128 tokens, and there are four microbatches per stage. The benchmark runs on GPUs if there are any, with
--stages defaulting to their number, and otherwise on as many virtual CPU devices as the largest of --stages.

  a  FLOPs of matrix products on all devices in the compiled program / FLOPs on a single device (times 4/3 with full
     rematerialization)
  b  step time of a single device / step time of the pipeline, on the same batch and the same cores
  c  temporary memory of a device: growth of 1f1b from m = p to m = 4p / growth of gpipe; and memory of the compiled
     program / memory predicted from the table
  d  bytes of parameters on the fullest device / bytes of the layers of its stage
  e  time to trace, lower and compile / the same time for a single device, without a compilation cache
  f  bytes that a microbatch saves between F and B in all stages, without rematerialization / temporary bytes of a
     single device
  g  pipelines without a flush / 1f1b: time of a microbatch of the same size, once the pipeline is full, and time to
     trace, lower and compile; for BERT, as GPT is tied
"""

import subprocess
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax

from jaxpar import config as configs
from jaxpar import data
from jaxpar.cluster import find_cluster
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.core.step import abstract
from jaxpar.errors import exit_code
from jaxpar.measure import flops
from scripts.bench import executed, pipeline_memory
from scripts.bench.pipeline_case import (
    BERT,
    CLASSIFIER,
    FAST,
    RESNET,
    Case,
    Maker,
    Parts,
    compiled,
    nbytes,
    step_lowering,
)
from scripts.bench.steps import race
from scripts.bench.tables import COLUMNS, show

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v")
REMATS = ("none", "full")
REMAT_FLOPS = {"none": 1.0, "full": 4 / 3}
DEEP = 24  # layers


Rows = Iterator[list[str]]


class Options(NamedTuple):
    """The options of the command line."""

    maker: Maker
    stages: list[int]
    schedules: list[str]
    rounds: int


def row(result: str, what: str, value: float, aim: str = "", *, of: str = "") -> list[str]:
    """Return a row. of: the two measured values whose ratio it is."""
    return [f"({result}) {what}", f"{of} = {value:.3f}" if of else f"{value:.3f}", aim]


def executed_flops(options: Options) -> Rows:
    """Measure result (a)."""
    p, maker = options.stages[0], options.maker
    m = 4 * p
    single = maker.single(m)
    reference = executed.flops(compiled(single, FAST).text)
    counted = 3 * flops.forward_flops(single.problem.model.apply, single.problem.model.shapes, abstract(single.batch))
    print(f"FLOPs of one device / of three forward passes in the jaxpr: {reference / counted:.3f}", flush=True)
    for remat in REMATS:
        ratios = []
        for schedule in SCHEDULES:
            case = maker.pipeline(p, schedule, remat)
            shares = partial(of_switch, shares=Parts(case).shares())
            total = p * executed.flops(compiled(case, FAST).text, shares)
            ratios.append(total / reference / REMAT_FLOPS[remat])
            print(f"{schedule}, remat {remat}: {ratios[-1]:.3f}", flush=True)
        extent = f"{min(ratios):.3f} to {max(ratios):.3f}"
        yield [f"(a) FLOPs of {len(SCHEDULES)} schedules / of one device, remat {remat}", extent, "<= 1.02"]
        masked = p * executed.flops(compiled(maker.scan_and_mask(p, remat), FAST).text)
        yield row(
            "a", f"FLOPs of scan and mask / of one device, remat {remat}", masked / reference / REMAT_FLOPS[remat]
        )


def of_switch(name: str, shares: Sequence[Sequence[float]]) -> Sequence[float] | None:
    """Return the shares of the branches of a switch in the engine, identified by its name."""
    phases = [phase for phase in range(len(shares)) if name.endswith(f"/phase_{phase}/cond")]
    return shares[phases[0]] if phases else None


def step_time(options: Options) -> Rows:
    """Measure result (b)."""
    for p in options.stages:
        for remat in REMATS:
            maker, m = options.maker, 4 * p
            singles = {
                "single, scanned": maker.single(m, remat),
                "single, unrolled": maker.single(m, remat, scan=False),
            }
            pipelines = {schedule: maker.pipeline(p, schedule, remat) for schedule in options.schedules}
            cases = {**singles, **pipelines, "scan and mask": maker.scan_and_mask(p, remat)}
            contenders = {name: case.contender for name, case in cases.items()}
            timings = race(contenders, cases["scan and mask"].batch, rounds=options.rounds, warm_up=1)
            losses = [timing.first_loss for timing in timings.values()]
            assert max(losses) - min(losses) <= 1e-5 * max(losses), losses  # all contenders compute the same step
            reference = min(singles, key=lambda name: timings[name].seconds)
            for name in (*pipelines, "scan and mask"):
                both = timings[reference].seconds, timings[name].seconds
                what = f"time of one device / of {name}, {p} stages, remat {remat}"
                aim = ">= 0.95" if name in pipelines else ""
                yield row("b", what, both[0] / both[1], aim, of=f"{both[0]:.2f} / {both[1]:.2f} s")


def parameter_bytes(options: Options) -> Rows:
    """Measure result (d)."""
    p = options.stages[-1]
    makers = {
        "gpt, tied": options.maker,
        "bert, tied": options.maker.more(*BERT),
        "resnet": Maker(tuple(RESNET), options.maker.num_examples),
    }
    for name, maker in makers.items():
        case = maker.pipeline(p, "1f1b")
        stored = dict.fromkeys(range(p), 0)
        state = case.contender.init(jax.random.key(0))
        numbers = {device: number for number, device in enumerate(Parts(case).mesh.devices.flat)}
        for leaf in jax.tree.leaves(state.params):
            for shard in leaf.addressable_shards:
                stored[numbers[shard.device]] += shard.data.nbytes
        stages = Parts(case).stages
        layers = [case.problem.model.layers[slice(*stages.span(device, 0))] for device in range(p)]
        # A tied array counts in both layers.
        expected = [sum(nbytes(layer.shapes) for layer in stage) for stage in layers]
        fullest = max(range(p), key=lambda device: (stored[device], expected[device]))
        ratio = stored[fullest] / expected[fullest]
        yield row("d", f"bytes of the fullest device / of its stage, {name}, {p} stages", ratio, "<= 1.05")


def compile_time(options: Options) -> Rows:
    """Measure result (e)."""
    p, seconds = options.stages[-1], compile_seconds
    seconds(options.maker.more("--config.model.num_layers=1").single(1))  # one-time costs of the first compilation
    for maker in (options.maker, options.maker.more(f"--config.model.num_layers={DEEP}")):
        for remat in REMATS:
            case = maker.pipeline(p, "1f1b", remat)
            pipeline, single = seconds(case), seconds(maker.single(4 * p, remat))
            what = f"compilation of {p} stages / of one device, {len(case.problem.model.layers)} layers, remat {remat}"
            yield row("e", what, pipeline / single, "<= 3", of=f"{pipeline:.1f} / {single:.1f} s")


def compile_seconds(case: Case) -> float:
    """Return the time to trace, lower and compile a step."""
    lower = step_lowering(case)
    jax.clear_caches()
    start = time.perf_counter()
    lower().compile()
    return time.perf_counter() - start


def without_flush(options: Options) -> Rows:
    """Measure result (g)."""
    p, maker = options.stages[0], options.maker.more(*CLASSIFIER)
    m = 4 * p
    cases = {name: maker.pipeline(p, name) for name in ("1f1b", "pipedream", "pipedream_2bw")}
    alone = maker.pipeline(p, "pipedream", m=1)
    timings = race({name: case.contender for name, case in cases.items()}, cases["1f1b"].batch, rounds=options.rounds)
    # Of batches of one microbatch, p fill the pipeline.
    of_one = race({"pipedream": alone.contender}, alone.batch, rounds=m * options.rounds, warm_up=2 * p)["pipedream"]
    flush = timings.pop("1f1b")
    results = {f"{name}, {m} microbatches": (of.seconds, of.cpu_seconds) for name, of in timings.items()}
    results["pipedream, 1 microbatch"] = (m * of_one.seconds, m * of_one.cpu_seconds)
    for name, (seconds, cpu) in results.items():
        what = f"{name} / of 1f1b, {p} stages"
        yield row("g", f"time of {what}", seconds / flush.seconds, "<= 1.03")
        yield row("g", f"CPU time of {what}", cpu / flush.cpu_seconds)
    compile_seconds(alone)  # one-time costs
    reference = compile_seconds(cases["1f1b"])
    del cases["1f1b"]
    for name, case in {**cases, "pipedream, 1 microbatch": alone}.items():
        yield row("g", f"compilation of {name} / of 1f1b, {p} stages", compile_seconds(case) / reference, "<= 1.3")


def memory_growth(options: Options) -> Rows:
    """Measure result (c)."""
    p, maker = options.stages[0], options.maker
    for remat in REMATS:

        def size(schedule: str, m: int, remat: str = remat) -> int:
            return compiled(maker.pipeline(p, schedule, remat, m=m), FAST).temporary

        sizes = {schedule: size(schedule, 4 * p) for schedule in ("1f1b", "gpipe", "zb_h1")}
        growth = {schedule: sizes[schedule] - size(schedule, p) for schedule in ("1f1b", "gpipe")}
        what = f"memory of {3 * p} more microbatches, 1f1b / gpipe, {p} stages, remat {remat}"
        yield row("c", what, growth["1f1b"] / growth["gpipe"], "<= 0.05")
        for schedule, temporary in sizes.items():
            predicted = pipeline_memory.total(pipeline_memory.terms(Parts(maker.pipeline(p, schedule, remat))))
            what = f"memory of {schedule}, compiled / predicted, {p} stages, remat {remat}"
            of = f"{temporary / 1e6:.1f} / {predicted / 1e6:.1f} MB"
            yield row("c", what, temporary / predicted, "0.85 to 1.15", of=of)


def saved(options: Options) -> Rows:
    """Measure result (f)."""
    p, maker = options.stages[0], options.maker
    parts = Parts(maker.pipeline(p, "1f1b"))
    programs = parts.engine().programs.programs
    of_stages = [nbytes(programs[kind].cut.saved.get((0, 1), [])) for kind in parts.stages.kinds]
    one = pipeline_memory.single_microbatch(maker.single(1, scan=False))
    of = f"{sum(of_stages) / 1e6:.1f} / {one / 1e6:.1f} MB"
    yield row("f", f"saved between F and B, {p} stages / temporary memory of one device", sum(of_stages) / one, of=of)


RESULTS: dict[str, Callable[[Options], Rows]] = {
    "a": executed_flops,
    "b": step_time,
    "c": memory_growth,
    "d": parameter_bytes,
    "e": compile_time,
    "f": saved,
    "g": without_flush,
}


def stage_counts(text: str) -> list[int]:
    """Return the value of --stages."""
    try:
        return [integer(1)(number) for number in text.split(",")]
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r}; it must be one or more positive integers, such as 4,8") from None


def main(arguments: list[str]) -> None:
    """Parse the command line and print the results."""
    parser = Parser(__doc__)
    parser.add_argument("--results", type=names(RESULTS), default=list(RESULTS), help="results to measure")
    parser.add_argument("--stages", type=stage_counts, default=[], help="numbers of stages (default: 4,8)")
    parser.add_argument("--schedules", type=names(SCHEDULES), default=["1f1b", "eager_1f1b", "zb_h1"], help="schedules")
    parser.add_argument("--rounds", type=integer(1), default=3, help="number of repetitions")
    parser.add_argument("--examples", type=integer(1), default=4, help="examples per microbatch")
    parsed, overrides = parser.parse_with_overrides(arguments)
    results, stages = parsed.results, parsed.stages or [4, 8]
    config = configs.default_config()
    configs.override(config, [f"--config.mesh.virtual_cpu_devices={max(stages)}", *overrides])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    mesh.partition_by_gspmd()
    jax.config.update("jax_enable_compilation_cache", False)
    there = find_cluster()
    is_gpu = there.platform == "gpu"
    if is_gpu and not parsed.stages:
        stages = [there.num_devices]
    print(f"{there.num_devices} devices of kind {there.device_kind}", flush=True)
    options = Options(Maker(tuple(overrides), parsed.examples), stages, parsed.schedules, parsed.rounds)
    for result in results:
        start = time.perf_counter()
        if result == "b" and len(stages) > 1 and not is_gpu:
            # One process per number of stages: splitting the CPU into more devices slows down each of them.
            for p in stages:
                command = [sys.executable, __file__, *arguments, "--results=b", f"--stages={p}"]  # the last flags win
                subprocess.run(command, check=True)
        else:
            show(COLUMNS, RESULTS[result](options))
        print(f"    ({result}) took {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
