"""Reports of simulated swarms for `jaxpar swarm simulate`: rebalancing, latency, width, and a run again."""

import argparse
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.command_line import missing, writing
from jaxpar.errors import UserError
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table
from jaxpar.strategies.swarm import availability
from jaxpar.strategies.swarm.availability import LEAVE, MAX_EVENTS, PeerEvent, SwarmPeer
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.fluid import FluidRun, run_fluid
from jaxpar.strategies.swarm.membership import REBALANCING_RULES
from jaxpar.strategies.swarm.run import run_swarm
from jaxpar.strategies.swarm.scenario import read_scenario
from jaxpar.strategies.swarm.table import OUTCOME_NAMES, check_routing

HOUR = 3600.0
PERIODS = (300.0, 60.0)
# Ryabinin et al., 2023: throughput / optimal on the trace of its authors, by period; 0: no rebalancing. A second source
# confirms none for a period of 60 s.
PUBLISHED = {0.0: 0.827, 300.0: 0.958}
LATENCIES = (0.0, 0.01, 0.05, 0.1, 0.2)
MAX_LATENCY_SIZE = 1000  # peers or microbatches of a simulation of all passes
MEGABIT = 1e6 / 8
LAYER_WIDTHS = {768: "base", 4096: "xxlarge", 12288: "GPT-3"}
V100_FLOPS = 15.7e12  # peak of float32, from NVIDIA's data sheet
# The published utilizations at 500 Mb/s that a second source confirms, by width and milliseconds.
PUBLISHED_UTILIZATION = {(768, 0): 0.18, (768, 200): 0.015, (12288, 0): 0.82, (12288, 100): 0.60, (12288, 200): 0.48}


def peers_of(arguments: argparse.Namespace, latency_seconds: float = 0.0) -> list[SwarmPeer]:
    """Return the peers of --peers, at least as many as stages."""
    text = arguments.peers
    peers = [peer._replace(latency=peer.latency + latency_seconds) for peer in availability.find_peers(text, "--peers")]
    if text.isdecimal():
        peers = [peer._replace(bandwidth=arguments.bandwidth * MEGABIT) for peer in peers]
    if len(peers) < arguments.stages:
        raise UserError(f"--peers is {text}, {len(peers)} peers; it must be at least --stages, {arguments.stages}")
    return peers


def find_trace(arguments: argparse.Namespace, peers: Sequence[SwarmPeer]) -> list[PeerEvent]:
    """Return the trace of --trace, or a generated one."""
    if arguments.trace:
        trace = availability.read_swarm_trace(arguments.trace, peers)
        left_at_once = {event.peer for event in trace if event.seconds == 0 and event.event == LEAVE}
        present = len(availability.present_at_start(len(peers), trace) - left_at_once)
        if present < arguments.stages:
            raise UserError(
                f"--trace is '{arguments.trace}', which begins with {present} peers; it must begin with at least "
                f"--stages, {arguments.stages}"
            )
        return trace
    if arguments.groups > len(peers):
        raise UserError(f"--groups is {arguments.groups}; it must be at most the number of peers, {len(peers)}")
    lifetime, rejoin, of_group = (HOUR * x for x in (arguments.lifetime, arguments.rejoin, arguments.group_lifetime))
    more = arguments.groups, of_group, arguments.group_share, arguments.seed
    rates = availability.RandomTrace(len(peers), lifetime, rejoin, *more)
    events = itertools.takewhile(lambda event: event.seconds < arguments.hours * HOUR, rates)
    trace = list(itertools.islice(events, MAX_EVENTS + 1))
    if len(trace) > MAX_EVENTS:
        raise UserError(
            f"--hours is {arguments.hours:g}; it must be less than {trace[-1].seconds / HOUR:g}, because by then peers "
            f"with these rates have failed and joined {MAX_EVENTS:,} times"
        )
    if arguments.make_trace:
        with writing("--make_trace", arguments.make_trace):
            availability.write_trace(arguments.make_trace, trace, peers)
    return trace


def rebalancing(arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the table of rules and periods, and its metrics."""
    if arguments.out and arguments.out.suffix not in (".png", ".svg"):
        raise UserError(f"--out is '{arguments.out}'; it must end in one of .png, .svg")
    periods = [arguments.rebalance_seconds] if arguments.rebalance_seconds else PERIODS
    if arguments.hours * HOUR > MAX_EVENTS * min(periods):
        raise UserError(
            f"--hours is {arguments.hours:g}; it must be at most {MAX_EVENTS * min(periods) / HOUR:g} with a period of "
            f"{min(periods):g} s"
        )
    peers = peers_of(arguments)
    trace = find_trace(arguments, peers)
    forward, backward = (arguments.forward,) * arguments.stages, (arguments.backward,) * arguments.stages
    workload = Workload(forward, backward, state_bytes=arguments.state_bytes)
    simulate = partial(run_fluid, peers, workload, trace, arguments.hours * HOUR)
    runs = {("none", 0.0): simulate(SwarmSettings(0, 0))}
    for rule in [arguments.rule] if arguments.rule else REBALANCING_RULES:
        for period in periods:
            runs[rule, period] = simulate(SwarmSettings(0, 0, rebalance_seconds=period, rule=rule))
    if arguments.out:
        _draw(runs, arguments.out)
    first, is_comparable = runs["none", 0.0], arguments.is_published
    lines = [
        f"{len(peers)} peers, {arguments.stages} stages, {arguments.hours:g} hours: {len(first.failures)} failures, "
        f"{first.num_present.min()} to {first.num_present.max()} peers present",
        f"{'rebalancing':<26}{'throughput / optimal':>20}{'moves':>8}" + is_comparable * f"{'published':>11}",
    ]
    metrics = []
    for (rule, period), run in runs.items():
        name = f"{rule}, every {period:g} s" if period else rule
        published = f"{PUBLISHED[period]:.3f}" if rule != "balance" and period in PUBLISHED else "-"
        line = f"{name:<26}{run.efficiency:>20.3f}{len(run.moves):>8}"
        lines.append(line + is_comparable * f"{published:>11}")
        metrics.append({"rule": rule, "period": period, "efficiency": run.efficiency, "moves": len(run.moves)})
    return lines, {"peers": len(peers), "stages": arguments.stages, "failures": len(first.failures), "cases": metrics}


def _draw(runs: dict[tuple[str, float], FluidRun], path: Path) -> None:
    """Draw the capacities of the stages over time: a panel without rebalancing, and one of each rule."""
    from matplotlib.figure import Figure  # imported here because the import takes almost a second

    drawn: dict[str, tuple[float, FluidRun]] = {}
    for (rule, period), run in runs.items():
        drawn.setdefault(rule, (period, run))  # with its first period
    figure = Figure(figsize=(8, 2.3 * len(drawn) + 0.6), layout="constrained")
    axes = figure.subplots(len(drawn), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, (rule, (period, run)) in zip(axes, drawn.items(), strict=True):
        hours, most = run.time / HOUR, 100 * run.capacity / run.optimal[:, None]
        slowest, fastest = most.min(axis=1), most.max(axis=1)
        axis.stairs(
            fastest,
            hours,
            baseline=slowest,
            fill=True,
            color="#56b4e9",
            alpha=0.5,
            label="from the slowest to the fastest stage",
        )
        axis.stairs(slowest, hours, baseline=None, color="#0072b2", lw=1.4, label="slowest stage: the throughput")
        axis.axhline(100, color="black", ls=":", lw=1, label="optimum of the peers present")
        failed = np.array(run.failures) / HOUR
        axis.plot(failed, np.full(len(failed), 4), "|", color="#d55e00", ms=6, label="failure of a peer")
        axis.set(xlim=(0, hours[-1]), ylim=(0, 200), ylabel="capacity (% of optimum)")
        axis.grid(alpha=0.3)
        name = f"rule {rule}, every {period:g} s" if period else "no rebalancing"
        axis.set_title(f"{name}: throughput {run.efficiency:.1%} of the optimum", fontsize=10)
    axes[-1].set_xlabel("time (hours)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    with writing("--out", path):
        figure.savefig(path, dpi=150)


def latency(arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the throughput of GPipe and of swarms at several latencies, and its metrics.

    GPipe has a pipeline for each --stages peers, and each of them an equal share of the microbatches.
    """
    stages, total, steps = arguments.stages, arguments.num_microbatches, 12
    if not arguments.peers.isdecimal():
        raise UserError(f"--peers is {arguments.peers!r}; for --report=latency it must be a number of equal peers")
    num_peers = len(peers_of(arguments))
    for flag, value in (("peers", num_peers), ("num_microbatches", total)):
        if value > MAX_LATENCY_SIZE:
            raise UserError(f"--{flag} is {value}; it must be at most {MAX_LATENCY_SIZE} for --report=latency")
    if num_peers % stages or total % (num_peers // stages):
        raise UserError(
            f"--peers is {num_peers}; for GPipe it must be a multiple of --stages, {stages}, and --num_microbatches, "
            f"{total}, a multiple of the number of pipelines"
        )
    pipelines = num_peers // stages
    table = make_table("gpipe", num_devices=stages, num_microbatches=total // pipelines, num_chunks=1)
    times = Times(arguments.forward, arguments.backward / 2, arguments.backward / 2)
    work = Workload((arguments.forward,) * stages, (arguments.backward,) * stages, arguments.activation_bytes)
    ideal = num_peers / (stages * (arguments.forward + arguments.backward))
    lines = [
        f"{num_peers} peers, {stages} stages, {total} microbatches, {arguments.bandwidth:g} Mb/s",
        f"{'latency':<10}{'GPipe':>8}{'swarm':>8}{'delayed updates':>18}",
    ]
    metrics = []
    for seconds in LATENCIES:
        peers = peers_of(arguments, seconds / 2)  # a message takes the latency of both peers
        message = seconds + arguments.activation_bytes / min(peer.bandwidth for peer in peers)
        step = simulate_table(table, times, message).makespan
        rates = [total / float(step) / ideal]
        for delayed in (False, True):
            run = run_swarm(peers, work, [], SwarmSettings(steps, total, delayed=delayed))
            # The fraction of the time in which peers compute, without the first two steps and the last one.
            begin, end = run.update_times[1], run.update_times[-2]
            busy = np.clip(run.table.finish, begin, end) - np.clip(run.table.start, begin, end)
            rates.append(float(busy.sum() / (end - begin) / num_peers))
        lines.append(f"{f'{1e3 * seconds:g} ms':<10}{rates[0]:>8.3f}{rates[1]:>8.3f}{rates[2]:>18.3f}")
        metrics.append({"latency": seconds, "gpipe": rates[0], "swarm": rates[1], "delayed": rates[2]})
    return lines, {"peers": num_peers, "stages": stages, "cases": metrics}


def transformer_layer_flops(width: int, tokens: int) -> float:
    """Return the FLOPs of both passes of a transformer's layer with a feed-forward network of 4 times its width."""
    return 3.0 * (24 * tokens * width**2 + 4 * tokens**2 * width)  # the backward pass takes twice the forward pass


def device_utilization(
    width: int, tokens: int, value_bytes: float, *, flops: float, bandwidth: float, latency: float
) -> float:
    """Return the fraction of the time in which a device computes, if its stage is one layer and nothing overlaps.

    The layer is a transformer's with a feed-forward network of 4 times its width. Each of its two passes waits for one
    message with the hidden states of a microbatch, of value_bytes per value, and one round trip (`latency`).

    The square-cube law: the work of the layer grows with the cube of its width, what it sends with the square. A
    pipeline over slow links therefore uses its devices better, the wider the model is (Ryabinin et al., "SWARM
    Parallelism", 2023, section 3.1).
    """
    compute = transformer_layer_flops(width, tokens) / flops
    return compute / (compute + 2 * (value_bytes * tokens * width / bandwidth + latency))


def width(_arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the utilization by width, bandwidth and latency, and its metrics."""
    lines = [
        "one layer, 512 tokens, float16 messages, V100 at its float32 peak; published: at 500 Mb/s",
        f"{'width':<16}{'latency':>8}{'100 Mb/s':>10}{'500 Mb/s':>10}{'1000 Mb/s':>11}{'8-bit, 500':>12}"
        f"{'published':>11}",
    ]
    links = ((2.0, 100), (2.0, 500), (2.0, 1000), (1.0, 500))  # bytes per value, Mb/s
    metrics = []
    for size, name in LAYER_WIDTHS.items():
        for seconds in LATENCIES:
            values = [
                device_utilization(size, 512, nbytes, flops=V100_FLOPS, bandwidth=rate * MEGABIT, latency=seconds)
                for nbytes, rate in links
            ]
            known = PUBLISHED_UTILIZATION.get((size, round(1e3 * seconds)))
            published = "-" if known is None else f"{known:.1%}"
            cells = "".join(f"{value:>{w}.1%}" for value, w in zip(values, (10, 10, 11, 12), strict=True))
            lines.append(f"{f'{size} ({name})':<16}{f'{1e3 * seconds:g} ms':>8}{cells}{published:>11}")
            metrics.append({"width": size, "latency": seconds, "utilization": values, "published": known})
    return lines, {"cases": metrics}


def replay(arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return what happened in the run of --scenario, and its metrics. The table of the run is checked."""
    if arguments.scenario is None:
        raise missing("--scenario", "--report=replay --scenario=runs/swarm/scenario.json")
    scenario = read_scenario(arguments.scenario, "--scenario")
    try:
        run = scenario.run()
    except UserError as error:
        raise UserError(f"--scenario is '{arguments.scenario}'; it must let the peers train, but {error}") from error
    check_routing(run.table, run.service)
    steps, seconds = scenario.settings.num_steps, run.update_times[-1]
    failures = sum(event.event == LEAVE for event in availability.events_before(scenario.trace, seconds))
    outcomes = dict(zip(OUTCOME_NAMES, np.bincount(run.table.outcome, minlength=3).tolist(), strict=True))
    metrics = {"steps": steps, "seconds": seconds, "failures": failures, "moves": len(run.moves), **outcomes}
    lines = [
        f"{len(scenario.peers)} peers, {run.table.num_stages} stages, {steps} steps: {failures} failures, "
        f"{len(run.moves)} moves, {seconds:.6g} s",
        "passes: " + ", ".join(f"{number} {name}" for name, number in outcomes.items()),
    ]
    return lines, metrics


REPORTS = {"rebalancing": rebalancing, "latency": latency, "width": width, "replay": replay}
