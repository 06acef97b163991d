r"""Trains with the workers of an outer step on this machine: killed and joining at random, and with slow messages.

    PYTHONPATH=. scripts/python scripts/bench/outer.py [--runs=1] [--seed=0]

In each run, worker 1 of three is killed at a random time and starts again, and worker 3 joins. All must end, and the
replay must be equal bit by bit. Then two workers whose answers take a second longer train without and with streaming:
two fragments, which are averaged while the worker trains on. A step takes at least 50 ms.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from jaxpar.command_line import Parser, integer
from jaxpar.errors import TrainingError, exit_code
from jaxpar.launch.place import free_port
from jaxpar.strategies.outer.table import OuterEvent, read_contributions
from scripts.bench.tables import COLUMNS, show

ROOT, STEP_SECONDS, DELAY_SECONDS = Path(__file__).parents[2], 0.05, 1.0
SLOWED = """
import os, sys, time

if any(one.startswith("--config.outer.worker=") for one in sys.argv):
    from jaxpar import training
    from jaxpar.strategies.outer.live import RayLink

    def step(self, *others):
        time.sleep(float(os.environ["STEP_SECONDS"]))
        return before(self, *others)

    def offer(self, *others):
        self.sent = time.monotonic()
        send(self, *others)

    def result(self, *others):
        answer = receive(self, *others)
        time.sleep(max(self.sent + float(os.environ["DELAY_SECONDS"]) - time.monotonic(), 0))
        return answer

    before, training.Loop._step = training.Loop._step, step
    send, RayLink.offer, receive, RayLink.result = RayLink.offer, offer, RayLink.result, result
"""
VALUES: dict[str, Any] = {
    **{"model.name": "mlp", "model.hidden_size": 64, "data.source": "synthetic", "data.validation_fraction": 0},
    **{"strategy": "single", "batch_size": 16, "log.curves": False, "log.report": False, "log.tensorboard": False},
    **{"checkpoint.every_steps": 10, "outer.compression": "int8", "outer.silence_seconds": 3},
}


class Workers:
    """Workers of one run, in a folder."""

    def __init__(self, folder: Path, address: str, delay: float, settings: Mapping[str, Any]) -> None:
        self.folder, self._values = folder, {**VALUES, "outer.address": address, "outer.name": folder.name, **settings}
        slow = {"STEP_SECONDS": str(STEP_SECONDS), "DELAY_SECONDS": str(delay)}
        self._environment = {**os.environ, **slow, "PYTHONPATH": f"{ROOT}:{folder}"}
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SLOWED)

    def start(self, worker: int) -> subprocess.Popen[bytes]:
        """Start a worker."""
        flags = [f"--config.{key}={value}" for key, value in (self._values | {"outer.worker": worker}).items()]
        command = [sys.executable, "-m", "jaxpar", "--config=configs/default.py", f"--workdir={self.folder}/w{worker}"]
        with (self.folder / f"log{worker}").open("ab") as log:
            return subprocess.Popen([*command, *flags], cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def wait_for_step(self, worker: int) -> None:
        """Wait for the first step of a worker."""
        while "\nstep " not in (self.folder / f"log{worker}").read_text():
            time.sleep(0.1)

    def result(self, worker: int) -> Any:
        """Return the result of a worker that has ended."""
        return json.loads((self.folder / f"w{worker}" / "result.json").read_text())


def check_ended(folder: Path, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Wait for workers. Raises TrainingError, with the last lines of its log, if one fails."""
    for worker, process in processes.items():
        if process.wait(200):
            raise TrainingError((folder / f"log{worker}").read_text()[-2000:])


def run_killed(folder: Path, address: str, rng: random.Random) -> list[list[str]]:
    """Run four workers, of which one is killed and one joins. Returns rows of what they did."""
    every = 10
    settings = {"outer.num_workers": 4, "outer.min_workers": 3, "outer.every_steps": every, "num_steps": 400}
    workers = Workers(folder, address, 0.0, settings)
    processes = {worker: workers.start(worker) for worker in range(3)}
    workers.wait_for_step(1)
    time.sleep(rng.uniform(0, 3))
    processes[1].send_signal(signal.SIGKILL)
    time.sleep(rng.uniform(0, 4))
    processes |= {1: workers.start(1), 3: workers.start(3)}
    check_ended(folder, processes)
    rows = read_contributions(folder / "w0" / "outer" / "contributions.csv")
    counts = {event: sum(row.event == event for row in rows) for event in OuterEvent}
    sizes = {row.nbytes for row in rows if row.nbytes >= 0}
    planned = workers.result(0)["wire_bytes"]  # per step, rounded
    as_planned = {round(size / every) for size in sizes} == {planned}
    replay = [sys.executable, "-m", "jaxpar", "replay", *(f"{folder}/w{worker}" for worker in range(4))]
    shown = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True)
    equal = shown.stdout.count("equal bitwise")
    if not as_planned or equal != 4:
        raise TrainingError(shown.stderr or "the bytes are not those of the plan")
    of_event = [[f"number of events `{event}`", f"{count}", ""] for event, count in counts.items()]
    same = ["workers whose replay is equal bitwise", f"{equal} of 4", "4"]
    return [
        *of_event,
        ["bytes of a message per step / by the plan", f"{max(sizes) / every:,.0f} / {planned:,}", ""],
        same,
    ]


def waited(folder: Path, address: str, streaming: Mapping[str, Any]) -> float:
    """Return the seconds that a worker waits per round."""
    settings = {"outer.num_workers": 2, "outer.every_steps": 60, "num_steps": 240, **streaming}
    workers = Workers(folder, address, DELAY_SECONDS, settings)
    processes = {worker: workers.start(worker) for worker in range(2)}
    check_ended(folder, processes)
    rounds = settings["num_steps"] / settings["outer.every_steps"]
    return sum(workers.result(worker)["outer"]["waited_seconds"] for worker in range(2)) / 2 / rounds


def main() -> None:
    """Run the measurement."""
    parser = Parser(__doc__)
    parser.add_argument("--runs", type=integer(0), default=1, help="runs with a killed and a joining worker")
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of the times")
    arguments = parser.parse()
    rng, port, ray = random.Random(arguments.seed), free_port(), str(Path(sys.executable).parent / "ray")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        begin = [ray, "start", "--head", f"--port={port}", f"--temp-dir={name}/ray", "--num-cpus=1"]
        begin += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1", "--block"]
        node = subprocess.Popen(begin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(8)
        try:
            folder, address = Path(name), f"127.0.0.1:{port}"
            runs = (run_killed(folder / f"killed{number}", address, rng) for number in range(arguments.runs))
            show(COLUMNS, chain.from_iterable(runs))
            whole = waited(folder / "whole", address, {})
            streaming = {"outer.fragments": 2, "outer.overlap_steps": 25}
            overlapped = waited(folder / "streaming", address, streaming)
            ratio = f"{overlapped:.3f} / {whole:.3f} s = {overlapped / whole:.3f}"
            show(COLUMNS, [["wait of a round, with streaming / without", ratio, ""]])
        finally:
            node.terminate()
            node.wait()


if __name__ == "__main__":
    sys.exit(exit_code(main))
