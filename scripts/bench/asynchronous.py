"""Measures the overhead of emulated asynchronous updates and the speed-up of live ones.

scripts/python scripts/bench/asynchronous.py [--results=emulated,history,live] [--config=configs/quickstart.py]
[--rounds=20] [--config.KEY=VALUE ...]

Each result is a ratio of two measurements:

emulated  time of a step of 8 workers on one device / time of 8 steps of `single` on the same shards of the batch
history   bytes of older weights after a step of 8 equal workers on one device / 7 times the bytes of the weights
live      gradients per second of 4 live workers on 4 devices, one of them 4 times slower / the same in lockstep
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import data, strategies, tasks
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from jaxpar.strategies import Strategy
from scripts.bench.steps import make_problem, race
from scripts.bench.tables import COLUMNS, show

RESULTS = ("emulated", "history", "live")
WORKERS, LIVE_WORKERS, SLOWDOWN = 8, 4, 4


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--results", type=names(RESULTS), default=list(RESULTS), help="results to measure (default: all)"
    )
    parser.add_argument("--config", default="configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--rounds", type=integer(1), default=20, help="number of repetitions")
    arguments, overrides = parser.parse_with_overrides()
    config = configs.load_config(arguments.config)
    configs.override(config, [*overrides, f"--config.mesh.virtual_cpu_devices={LIVE_WORKERS}"])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    there = clusters.find_cluster()
    print(f"{arguments.config}, {there.num_devices} {there.device_kind} devices")
    with tempfile.TemporaryDirectory() as folder:
        dataset = data.load(config, tasks.find_task(config).labels, Path(folder))
    batches = data.Batches(dataset.train, batch_size=config.batch_size, seed=0, shuffle=True)

    def build(batch: Any, *more: str) -> Strategy[Any]:
        variant: ConfigDict = configs.load_config(arguments.config)
        configs.override(variant, [*overrides, f"--config.batch_size={len(batch['index'])}", *more])
        strategies.decide(variant, there)
        return strategies.make(variant, make_problem(variant, dataset.info, batch))

    measures: dict[str, Callable[..., Iterator[list[str]]]] = {"emulated": emulated, "history": history, "live": live}
    of_results = (measures[name](build, batches.batch(0), arguments.rounds) for name in arguments.results)
    show(COLUMNS, chain.from_iterable(of_results))


def asynchronous(workers: int, devices: int, *settings: str) -> list[str]:
    """Return the config overrides for the strategy."""
    chosen = [f"--config.asynchronous.{setting}" for setting in (f"num_workers={workers}", "mitigations=", *settings)]
    return ["--config.strategy=async_data_parallel", f"--config.mesh.data={devices}", *chosen]


def emulated(build: Any, batch: dict[str, np.ndarray], rounds: int) -> Iterator[list[str]]:
    """Measure the result `emulated`."""
    shards = [{name: x[i::WORKERS] for name, x in batch.items()} for i in range(WORKERS)]
    plain = build(shards[0], "--config.strategy=single", "--config.mesh.data=1")

    def step(state: Any, placed: list[Any]) -> tuple[Any, Any]:
        for shard in placed:
            state, metrics = plain.step(state, shard)
        return state, metrics

    contenders: dict[str, Any] = {
        policy: build(batch, *asynchronous(WORKERS, 1, f"policy={policy}")) for policy in ("async", "sync", "local_sgd")
    }
    contenders["single"] = SimpleNamespace(
        init=plain.init, place=lambda _batch: [plain.place(shard) for shard in shards], step=step
    )
    timings = race(contenders, batch, rounds=rounds)
    for name, timing in timings.items():
        if name != "single":
            ratio = timing.seconds / timings["single"].seconds
            yield [f"time of an emulated step of `{name}` / {WORKERS} steps of `single`", f"{ratio:.3f}", "<= 1.10"]


def history(build: Any, batch: dict[str, np.ndarray], _rounds: int) -> Iterator[list[str]]:
    """Measure the result `history`."""
    strategy = build(batch, *asynchronous(WORKERS, 1))
    state = strategy.init(jax.random.key(0))
    for _ in range(3):
        state, _ = strategy.step(state, strategy.place(batch))
    leaves = jax.tree.leaves(list(state.transport.history.values()))
    there = sum({leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in leaves}.values())
    formula = (WORKERS - 1) * sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    yield [f"bytes of older weights / {WORKERS - 1} x bytes of the weights", f"{there / formula:.4f}", "<= 1.05"]


def live(build: Any, batch: dict[str, np.ndarray], rounds: int) -> Iterator[list[str]]:
    """Measure the result `live`. Rounds alternate, so that a slow phase of the machine affects both contenders."""
    slow = ("mode=live", f"delays.slowdown={SLOWDOWN}")
    ways = {"async": ("policy=async",), "lockstep": ("policy=ssp", "bound=0")}
    built = {name: build(batch, *asynchronous(LIVE_WORKERS, LIVE_WORKERS, *slow, *way)) for name, way in ways.items()}
    states = {name: strategy.init(jax.random.key(0)) for name, strategy in built.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, strategy in built.items():
            start = time.perf_counter()
            for _ in range(4):
                states[name], _ = strategy.step(states[name], batch)
            strategy.to_canonical(states[name])  # waits for all workers, so that the next contender has all cores
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    ratio = statistics.median(seconds["lockstep"]) / statistics.median(seconds["async"])
    yield ["gradients per second of live workers / in lockstep", f"{ratio:.2f}", ">= 2"]


if __name__ == "__main__":
    sys.exit(exit_code(main))
