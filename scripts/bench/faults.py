"""Measures the cost of faults: lost steps, seconds to the first step after a kill, and the stall of a checkpoint save.

scripts/python scripts/bench/faults.py [--results=faults,save] [--kills=20] [--terms=5] [--rounds=15] [--seed=0]

faults  steps lost on SIGTERM, and on kill -9 for both values of config.checkpoint.asynchronous; the number of random
        kills after which the run ends with bitwise the same checkpoint and ledger as an uninterrupted run; seconds from
        a kill to the next step / seconds from a fresh start to the first step
save    stall that an asynchronous save adds to a step / seconds to copy the state to host memory

The runs train a tiny MLP in separate processes. They are killed at random times after their start or after their first
step, and restarted.
"""

import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from jaxpar import checkpoint, data
from jaxpar import config as configs
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.run.restore import Past, save_info
from scripts.bench.tables import COLUMNS, show

RESULTS = ("faults", "save")
STEPS, EVERY = 400, 10
RUN = {
    "data.source": "synthetic",
    "data.synthetic_examples": 400,
    "model.name": "mlp",
    "mesh.data": 2,
    "mesh.virtual_cpu_devices": 2,
    "batch_size": 24,
    "num_steps": STEPS,
    "log.every_steps": 1,
    "log.tensorboard": False,
    "checkpoint.every_steps": EVERY,
    "eval.every_steps": 40,
}
LARGE = {
    "data.source": "synthetic",
    "data.synthetic_examples": 400,
    "model.name": "mlp",
    "model.hidden_size": 2048,
    "model.num_layers": 5,
    "mesh.data": 1,
    "batch_size": 8,
    "strategy": "single",
}


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--results", type=names(RESULTS), default=list(RESULTS), help="results to measure")
    parser.add_argument("--kills", type=integer(1), default=20, help="number of random kills")
    parser.add_argument("--terms", type=integer(1), default=5, help="number of runs that SIGTERM stops")
    parser.add_argument("--rounds", type=integer(1), default=15, help="number of repetitions of a save")
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of the random times")
    arguments = parser.parse()
    logging.set_verbosity(logging.FATAL)  # as in the training command
    with tempfile.TemporaryDirectory() as folder:
        if "faults" in arguments.results:
            show(COLUMNS, faults(Path(folder), arguments.kills, arguments.terms, random.Random(arguments.seed)))
        if "save" in arguments.results:
            show(COLUMNS, save(Path(folder) / "save", arguments.rounds))


# ---- faults -------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """A process that has exited or was killed. Fields about steps are None if it completed no step."""

    code: int
    first_step_after: float | None  # seconds from `since` to the end of the first step
    resumed_from: int
    reached: int | None  # the last step that the process printed
    stopped_after: int | None  # the step after which SIGTERM stopped the process


class Signal(NamedTuple):
    """A signal to send `seconds` after a run starts, or after the run prints a line that begins with `after`."""

    number: signal.Signals
    seconds: float
    after: str = ""


def go(workdir: Path, since: float, sent: Signal | None = None, *, asynchronous: bool = True) -> Ended:
    """Start a run and wait until it exits. asynchronous: config.checkpoint.asynchronous of the run."""
    values = [f"--config.{key}={value}" for key, value in (RUN | {"checkpoint.asynchronous": asynchronous}).items()]
    command = [sys.executable, "-m", "jaxpar", "train", "--config=configs/default.py", f"--workdir={workdir}", *values]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines: list[tuple[float, str]] = []
    seen = threading.Event()

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.append((time.perf_counter(), line))
            if sent and line.startswith(sent.after):
                seen.set()

    reader = threading.Thread(target=read)
    reader.start()
    if sent:
        if sent.after:
            seen.wait(120)
        time.sleep(sent.seconds)
        process.send_signal(sent.number)
    code = process.wait()
    reader.join()
    steps = [(at, int(match[1])) for at, line in lines if (match := re.match(r"step (\d+)/\d+  loss", line))]
    text = "".join(line for _, line in lines)
    resumed, stopped = (re.search(rf"{words} step (\d+)", text) for words in ("resumed   from", "stopped after"))
    return Ended(
        code,
        steps[0][0] - since if steps else None,
        int(resumed[1]) if resumed else 0,
        steps[-1][1] if steps else None,
        int(stopped[1]) if stopped else None,
    )


def faults(folder: Path, kills: int, terms: int, draw: random.Random) -> Iterator[list[str]]:
    """Measure the result `faults`."""
    whole = folder / "whole"
    go(folder / "warm", time.perf_counter())  # fills the compilation cache
    ended = go(whole, time.perf_counter())
    assert ended.code == 0
    assert ended.first_step_after
    yield terminated(folder / "terminated", whole, terms, draw)
    fresh = [ended.first_step_after]
    lost: dict[bool, list[int]] = {True: [], False: []}
    again = list[float]()
    done = run = here = bitwise = 0
    since = time.perf_counter()
    while done < kills or here:
        first, later = draw.uniform(0, ended.first_step_after + 4), draw.uniform(0, 3)
        at = draw.choice((Signal(signal.SIGKILL, first), Signal(signal.SIGKILL, later, after="step ")))
        asynchronous = run % 2 == 0
        # The last run is not killed.
        now = go(folder / str(run), since, at if done < kills else None, asynchronous=asynchronous)
        if now.first_step_after:
            (again if here else fresh).append(now.first_step_after)
        since = time.perf_counter()
        if now.code == -signal.SIGKILL:
            if now.reached:
                saved = max(checkpoint.steps(folder / str(run) / "checkpoints"), default=0)
                lost[asynchronous].append(now.reached - saved)
            done, here = done + 1, here + 1
            continue
        assert now.code == 0, now
        bitwise += here * same(folder / str(run), whole)
        run, here = run + 1, 0
    for asynchronous, steps in lost.items():
        if not steps:
            continue
        what = f"steps lost on `kill -9`, most and median of {len(steps)}, asynchronous={asynchronous}"
        yield [what, f"{max(steps)}, {statistics.median(steps):g}", f"<= {EVERY}"]
    yield [f"random kills, in {run} runs, after which the run ends bitwise the same", f"{bitwise} of {done}", f"{done}"]
    first, after = statistics.median(fresh), statistics.median(again)
    yield [
        "time to the first step after a kill / a fresh start",
        f"{after:.2f} / {first:.2f} s = {after / first:.2f}",
        "",
    ]


def terminated(workdir: Path, whole: Path, terms: int, draw: random.Random) -> list[str]:
    """Measure the steps lost on SIGTERM."""
    lost, before = list[int](), 0
    while len(lost) < terms and before < STEPS // 2:  # every signal arrives before the run is finished
        now = go(workdir, 0, Signal(signal.SIGTERM, draw.uniform(0, 1), after="step "))
        assert now.code == 0, (now, before)
        assert now.resumed_from == before, (now, before)
        assert now.stopped_after
        assert now.reached
        assert now.stopped_after >= now.reached
        before = now.stopped_after
        lost.append(before - checkpoint.steps(workdir / "checkpoints")[-1])
    go(workdir, 0)
    assert same(workdir, whole)
    return [f"steps lost on SIGTERM, most of {len(lost)}", f"{max(lost)}", "0"]


def same(workdir: Path, whole: Path) -> bool:
    """Return whether a run ended with bitwise the same state and used every example exactly once per epoch."""
    result = json.loads((workdir / "result.json").read_text())
    trees = [checkpoint.read(path / "checkpoints" / str(STEPS)).tree for path in (workdir, whole)]
    equal = jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), *trees)
    return all(jax.tree.leaves(equal)) and result["ledger"].endswith("was used exactly once")


# ---- save ---------------------------------------------------------------------------------------


def save(workdir: Path, rounds: int) -> list[list[str]]:
    """Measure the result `save`.

    Save, copy and nothing take turns. Each runs after a step, so that the host has no copies of the arrays yet, and
    before another step.
    """
    config = configs.load_config("configs/default.py")
    configs.override(config, [f"--config.{key}={value}" for key, value in LARGE.items()])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    workdir.mkdir()
    build.check_run(config, workdir)
    run = build.make_run(config, workdir, Phases())
    saver = checkpoint.Saver(workdir / "checkpoints", keep=1, keep_best=False)
    batch = run.strategy.place(run.batches.batch(0))
    state = run.strategy.init(jax.random.key(0))
    calls: dict[str, list[float]] = {"save": [], "copy": [], "nothing": []}  # seconds until the call returns
    with_step: dict[str, list[float]] = {name: [] for name in calls}  # seconds until the step after it is finished
    size = 0
    for number in range(rounds + 2):
        for name in calls:
            state, _ = run.strategy.step(state, batch)
            jax.block_until_ready(state)
            start = time.perf_counter()
            tree = run.strategy.to_canonical(state)
            if name == "save":
                saver.save(tree, save_info(run, int(tree["step"]), 0, Past(0)))
            elif name == "copy":
                copied = copy(tree)
                size = sum(x.nbytes for x in jax.tree.leaves(copied))
            call = time.perf_counter() - start
            state, _ = run.strategy.step(state, batch)
            jax.block_until_ready(state)
            if number >= 2:
                calls[name].append(call)
                with_step[name].append(time.perf_counter() - start)
            saver.wait()
    saver.close()
    stall, copying = (statistics.median(calls[name]) for name in ("save", "copy"))
    saving, with_copy, step = (statistics.median(with_step[name]) for name in ("save", "copy", "nothing"))
    return [
        [f"time until a save returns / a copy of {size / 1e6:.0f} MB", in_ms(stall, copying), "<= 1.1"],
        ["time that a save / a copy adds to the next step", in_ms(saving - step, with_copy - step), ""],
    ]


def in_ms(seconds: float, reference: float) -> str:
    """Return both times in ms and their ratio, as text."""
    return f"{seconds * 1000:.0f} / {reference * 1000:.0f} ms = {seconds / reference:.2f}"


def copy(tree: Any) -> Any:
    """Return copies of the arrays in host memory; on CPUs, `device_get` would return views without copying."""
    on_cpu = jax.default_backend() == "cpu"
    return jax.tree.map(np.array, tree) if on_cpu else jax.device_get(tree)


if __name__ == "__main__":
    sys.exit(exit_code(main))
