"""Measures the seconds from the command to the end of the first training step, with warm caches.

    scripts/python scripts/bench/startup.py [--config=configs/quickstart.py] [--config.KEY=VALUE ...]

The first run fills the caches (token arrays, compiled programs) and does not count. For comparison, measures the time
to start Python and import JAX, in alternating runs.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench.tables import COLUMNS, show

ROUNDS = 3


def first_step(arguments: list[str]) -> float:
    """Return the seconds until a run logs its first step, and kill the run then."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "jaxpar",
            "train",
            *arguments,
            f"--workdir={folder}",
            "--config.log.every_steps=1",
        ]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        metrics = Path(folder) / "metrics.jsonl"
        while not (metrics.is_file() and metrics.stat().st_size):
            if process.poll():
                raise SystemExit(f"the run failed with exit code {process.returncode}")
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        process.kill()
        process.wait()
    return seconds


def import_jax() -> float:
    """Return the seconds to start Python, import JAX and find the devices."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], check=True)
    return time.perf_counter() - start


def main(arguments: list[str]) -> None:
    """Print both medians and their ratio."""
    if not any(argument.startswith("--config=") for argument in arguments):
        arguments = ["--config=configs/quickstart.py", *arguments]
    first_step(arguments)
    times = [(first_step(arguments), import_jax()) for _ in range(ROUNDS)]
    ours, jax_alone = (statistics.median(column) for column in zip(*times, strict=True))
    what = "time from the command to the end of the first step / to import JAX"
    show(COLUMNS, [[what, f"{ours:.1f} / {jax_alone:.1f} s = {ours / jax_alone:.1f}", ""]])


if __name__ == "__main__":
    main(sys.argv[1:])
