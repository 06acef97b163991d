"""Kills processes of elastic runs at random moments, and compares the results with a run that lost nobody.

scripts/python scripts/bench/elastic.py [--runs=30] [--first_runs=10] [--stop_runs=2] [--hang_runs=1]
    [--at_once=2] [--seed=0] [--picture=FILE.png]

Each run trains a tiny MLP on 3 or 4 processes that the launcher starts. In half of the runs, a moment is random between
the start of the run and its end, in the others between its first log line and LATEST seconds after it. The line of a
run contains the processes and the moments, its seconds, how it continued, and the largest relative difference of a
parameter from the run without losses.

runs        one or two processes are killed (SIGKILL), never process 0, and nobody is started again
first_runs  process 0 is killed once; the launcher restarts the run with one process less
stop_runs   a process other than 0 is stopped (SIGSTOP) and continued after 20 seconds
hang_runs   process 0 is stopped and never continued; the launcher kills it after 300 seconds, and restarts the run

Each line of the ledger must be there once. A run that is not finished after --limit seconds counts as one that hangs.

With --picture, only draws the throughput of one run over time, of whose 3 processes one is killed and later comes back.
"""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from matplotlib.figure import Figure

from jaxpar import checkpoint
from jaxpar.colors import CURVE_COLORS
from jaxpar.command_line import Parser, integer, output_path
from jaxpar.errors import TrainingError, exit_code, format_count
from jaxpar.run.history import LOST_PREFIX, read_starts
from scripts.bench.tables import show

TIMEOUT = 5  # config.elastic_seconds
STOPPED_SECONDS = 20.0  # until a stopped process continues
LARGEST_ERROR = 1e-6
LATEST = 10.0  # seconds after the first log line
STEPS = 600
BIN_SECONDS = 2.0  # of a value in the picture
HAPPENS = {
    "kill": "1 or 2 others are killed",
    "first": "process 0 is killed",
    "stop": "another is stopped for 20 s",
    "hang": "process 0 is stopped for ever",
}
RUN = {
    "data.source": "synthetic",
    "data.synthetic_examples": 400,
    "model.name": "mlp",
    "batch_size": 26,  # that 3 and 4 processes do not divide
    "num_steps": STEPS,
    "optimizer.name": "sgd",
    "log.every_steps": 20,
    "log.tensorboard": False,
    "log.curves": False,
    "log.report": False,
    "checkpoint.every_steps": 100,
    "eval.every_steps": 70,
    "elastic_seconds": TIMEOUT,
}


class Kill(NamedTuple):
    """A signal to a process."""

    process: int
    seconds: float  # after the start of the run, or its first log line
    is_late: bool  # whether after its first log line
    number: signal.Signals = signal.SIGKILL


class Ended(NamedTuple):
    """A run that has ended, or hangs."""

    code: int | None  # exit code; None: it hangs
    seconds: float
    memory: int  # times that processes continued from memory
    restarts: int  # times that the launcher restarted the run
    error: float  # largest relative difference of a parameter
    ledger: str
    sent: int  # signals that reached a process

    @property
    def is_right(self) -> bool:
        """Whether the run has the result of one without losses."""
        return self.code == 0 and self.error < LARGEST_ERROR and "exactly once" in self.ledger


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    for name, default in (("runs", 30), ("first_runs", 10), ("stop_runs", 2), ("hang_runs", 1)):
        parser.add_argument(f"--{name}", type=integer(0), default=default, help="number of runs")
    parser.add_argument("--at_once", type=integer(1), default=2, help="number of runs at the same time")
    parser.add_argument(
        "--limit", type=integer(1), default=800, help="seconds after which a run counts as one that hangs"
    )
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of the random moments")
    parser.add_argument("--picture", type=output_path, metavar="FILE.png", help="only draw the throughput of one run")
    arguments = parser.parse()
    if arguments.picture:
        draw_throughput(arguments.picture)
        return
    logging.set_verbosity(logging.FATAL)  # as in the training command
    kinds = ["kill"] * arguments.runs + ["first"] * arguments.first_runs + ["stop"] * arguments.stop_runs
    kinds += ["hang"] * arguments.hang_runs
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.at_once) as pool:
        folder = Path(name)
        whole = [go(folder / f"whole{number}", number, [], folder, arguments.limit) for number in (3, 4)]
        longest = max(one.seconds for one in whole)
        print(f"elastic   without losses: {longest:.1f} s", flush=True)
        draw = random.Random(arguments.seed)
        planned = [plan(kind, longest, draw) for kind in kinds]
        futures = [
            pool.submit(go, folder / str(index), number, kills, folder, arguments.limit)
            for index, (number, kills) in enumerate(planned)
        ]
        ended = []
        for kind, (number, kills), future in zip(kinds, planned, futures, strict=True):
            ended.append(one := future.result())
            where = ", ".join(map(name_kill, kills[: one.sent])) or "nobody"
            print(
                f"{kind:9} {number} processes, {where}: {describe(one)}{'' if one.is_right else '  WRONG'}", flush=True
            )
    columns = [
        "fault",
        "correct runs",
        "signals sent",
        "recoveries from memory",
        "restarts",
        "largest relative error",
        "longest run",
    ]
    show(columns, [summary(kind, list(itertools.compress(ended, map(kind.__eq__, kinds)))) for kind in HAPPENS])


def summary(kind: str, ended: list[Ended]) -> list[str]:
    """Return the row of the runs of a kind."""
    signals, memory = sum(one.sent for one in ended), sum(one.memory for one in ended)
    restarts, error = sum(one.restarts for one in ended), max((one.error for one in ended), default=0.0)
    right, seconds = sum(one.is_right for one in ended), max((one.seconds for one in ended), default=0.0)
    counts = [f"{right} of {len(ended)}", *map(str, (signals, memory, restarts))]
    return [HAPPENS[kind], *counts, f"{error:.1e}", f"{seconds:.0f} s"]


def plan(kind: str, longest: float, draw: random.Random) -> tuple[int, list[Kill]]:
    """Return the number of processes of a run, and the signals in order. longest: seconds of a run without losses."""
    number = draw.choice((3, 4))
    processes = draw.sample(range(1, number), draw.choice((1, 2)) if kind == "kill" else 1)
    is_late = draw.random() < 0.5
    moments = sorted(draw.uniform(0, LATEST if is_late else longest) for _ in processes)
    if kind in ("first", "hang"):
        processes = [0]
    sent = signal.SIGSTOP if kind in ("stop", "hang") else signal.SIGKILL
    return number, [Kill(process, at, is_late, sent) for process, at in zip(processes, moments, strict=True)]


def name_kill(kill: Kill) -> str:
    """Return the process and the moment of a signal, for the line of a run."""
    return f"{kill.process} at {kill.seconds:.1f} s{' after the first step' * kill.is_late}"


def describe(one: Ended) -> str:
    """Return how a run ended, for its line."""
    end = "hangs" if one.code is None else f"exit code {one.code}"
    times = f"{one.memory} times from memory, {one.restarts} restarts"
    return f"{end} after {one.seconds:.1f} s; {times}; error {one.error:.1e}"


def go(workdir: Path, number: int, kills: list[Kill], folder: Path, limit: float) -> Ended:
    """Run with this number of processes, send the signals, and compare the result with that without losses."""
    command = launch(workdir, number, 10_000, RUN)
    log = folder / f"{workdir.name}.log"
    since, sent = time.monotonic(), 0
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        began = since
        while kills and kills[0].is_late and process.poll() is None and "[0] step" not in log.read_text():
            time.sleep(0.05)
            began = time.monotonic()
        for kill in kills:
            time.sleep(max(0.0, began + kill.seconds - time.monotonic()))
            sent += kill_worker(process, kill)
        if kills and kills[0].number == signal.SIGSTOP and kills[0].process:
            time.sleep(STOPPED_SECONDS)
            kill_worker(process, kills[0]._replace(number=signal.SIGCONT))
        try:
            code: int | None = process.wait(max(0.0, since + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
    seconds, text = time.monotonic() - since, log.read_text()
    if code != 0:
        print(f"{workdir.name}:\n{text[-6000:]}", flush=True)
        return Ended(code, seconds, 0, 0, float("nan"), "", sent)
    memory = sum(line.startswith(LOST_PREFIX) for start in read_starts(workdir) for line in start.changed)
    trees = [checkpoint.read(path / "checkpoints" / str(STEPS)).tree for path in (workdir, folder / f"whole{number}")]
    pairs = zip(*(map(np.asarray, jax.tree.leaves(tree["params"])) for tree in trees), strict=True)
    error = max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs if y.any())
    ledger = json.loads((workdir / "result.json").read_text())["ledger"]
    return Ended(code, seconds, memory, text.count("launch: restart"), error, ledger, sent)


def launch(workdir: Path, number: int, grow_seconds: int, config: Mapping[str, Any]) -> list[str]:
    """Return the command that starts a run with this number of processes."""
    values = [f"--config.{key}={value}" for key, value in config.items()]
    flags = [f"--num_processes=1:{number}", "--max_restarts=3", f"--grow_seconds={grow_seconds}"]
    run = ["--config=configs/default.py", f"--workdir={workdir}", *values]
    return [sys.executable, "-m", "jaxpar", "launch", *flags, "--", *run]


def draw_throughput(path: Path) -> None:
    """Draw the throughput over time of a run that loses process 1, and gets it back."""
    config: dict[str, Any] = {
        **RUN,
        "num_steps": 1600,
        "log.every_steps": 40,
        "checkpoint.every_steps": 1600,
        "eval.every_steps": 0,
    }
    steps: list[tuple[float, int]] = []  # seconds since the first line of a step, and its number
    cores = format_count(os.cpu_count() or 1, "core")
    events = [(0.0, f"3 processes on {cores}")]
    since, killed = 0.0, Kill(1, 15.0, is_late=True)
    with tempfile.TemporaryDirectory() as name:
        command = launch(Path(name) / "run", 3, 30, config)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout
        for line in process.stdout:
            now = time.monotonic()
            if match := re.match(r"\[0\] step (\d+)/", line):
                since = since or now
                steps.append((now - since, int(match[1])))
                if now - since > killed.seconds and len(events) == 1:
                    kill_worker(process, killed)
                    events.append((time.monotonic() - since, "process 1 is killed"))
            elif match := re.match(r"\[0\] lost .*; (\d) left|launch: all (3) processes are started", line):
                events.append((now - since, f"{match[1] or match[2]} processes on {cores}"))
    if process.wait() or len(events) < 4:
        raise TrainingError(f"the run ended with exit code {process.returncode} and {events}; it must end with 0")
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    edges = np.arange(0, steps[-1][0], BIN_SECONDS)
    seconds, numbers = np.asarray(steps).T
    done = np.interp(edges, seconds, numbers)
    axes.stairs(np.maximum(np.diff(done), 0) * config["batch_size"] / BIN_SECONDS, edges, color=CURVE_COLORS[1])
    for height, (when, text) in enumerate(reversed(events)):  # the first is the highest, so that no line crosses a text
        style: dict[str, Any] = {"color": CURVE_COLORS[2], "linestyle": "--", "linewidth": 1}
        stem = {"arrowstyle": "-", "relpos": (0, 0), "shrinkA": 0, "shrinkB": 0, **style}
        of_text: dict[str, Any] = {"textcoords": "offset points", "arrowprops": stem, "fontsize": 9}
        axes.axvline(when, **style)
        axes.annotate(text, (when, 1), (0, 4 + 13 * height), axes.get_xaxis_transform(), **of_text)
    axes.set(xlabel="time since the first log line (s)", ylabel="throughput (examples/s)", xlim=0, ylim=0)
    figure.savefig(path, dpi=150)


def kill_worker(launcher: "subprocess.Popen[Any]", kill: Kill) -> bool:
    """Send a signal to a process of the launcher by its number, and return whether it was there."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            variables = path.read_text().split("\0") if parent == launcher.pid else []
        except OSError:  # it has ended
            continue
        if f"JAXPAR_PROCESS_ID={kill.process}" in variables:
            os.kill(int(path.parent.name), kill.number)
            return True
    return False


if __name__ == "__main__":
    sys.exit(exit_code(main))
