"""Compares predicted with measured rates of live workers and live swarms, on the virtual devices of this machine.

    scripts/python scripts/bench/planned_rates.py [--rounds=5] [--only=TEXT]

Calibrates the machine and measures the layers of each model, as scripts/bench/planner.py does, predicts the time of a
step of each config, and measures it. Live workers are threads, whose table records when each gradient was applied. The
peers of a live swarm are processes, each with one thread. Configs take turns, NUM_STEPS steps at a time, and one is
`single`, so that other programs on the same cores affect all of them. Prints predicted / measured times, and both mean
stalenesses.
"""

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar import cluster as clusters
from jaxpar import strategies
from jaxpar.choose.asynchronous import predicted
from jaxpar.choose.candidates import AsyncCandidate, Candidate, state_ratios
from jaxpar.command_line import Parser, integer
from jaxpar.errors import exit_code
from jaxpar.strategies import Strategy
from scripts.bench.planner import format_ratio, measure_model, prepare_devices
from scripts.bench.tables import show

NUM_STEPS = 8  # of a config at a time
SINGLE = "single"
MODELS: dict[str, tuple[int, int, tuple[str, ...]]] = {  # as in scripts/bench/planner.py
    "bert 4 x 128": (64, 64, ("model.num_layers=4", "model.hidden_size=128", "model.num_heads=2")),
}
LIVE = ("strategy=async_data_parallel", "asynchronous.mode=live", "asynchronous.mitigations=")
FOUR = (*LIVE, "asynchronous.num_workers=4", "mesh.data=4")
SLOW = "asynchronous.delays.slowdown=3"
SWARM = ("strategy=swarm", "swarm.mode=live", "mesh.data=1", "swarm.peer_cpus=0.2")
CONFIGS: dict[str, tuple[str, ...]] = {
    SINGLE: ("strategy=single",),
    "async, 1 worker": (*LIVE, "asynchronous.num_workers=1", "mesh.data=1"),
    "async, 2 workers": (*LIVE, "asynchronous.num_workers=2", "mesh.data=2"),
    "async, 2 workers and a server": (*LIVE, "asynchronous.num_workers=2", "mesh.data=3"),
    "async, 4 workers": FOUR,
    "async, 4 workers, one 3 times slower": (*FOUR, SLOW),
    "ssp with bound 1, one 3 times slower": (*FOUR, SLOW, "asynchronous.policy=ssp", "asynchronous.bound=1"),
    "ssp with bound 0, one 3 times slower": (*FOUR, SLOW, "asynchronous.policy=ssp", "asynchronous.bound=0"),
    "swarm, 2 peers in 2 stages": (*SWARM, "swarm.peers=2", "swarm.stages=2"),
    "swarm, 3 peers in 3 stages": (*SWARM, "swarm.peers=3", "swarm.stages=3", "swarm.num_microbatches=8"),
}


def main() -> None:
    """Print the table."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=integer(1), default=5, help="runs of each config, and measurements of a layer")
    parser.add_argument("--only", default="", help="run the configs whose name contains this text, and single")
    arguments = parser.parse()
    prepare_devices()
    errors: list[float] = []
    for model in MODELS:
        errors += compare(model, arguments.rounds, arguments.only)
    print(f"median error {statistics.median(errors):.1%}; {sum(e <= 0.2 for e in errors)} of {len(errors)} within 20%")


def compare(model: str, rounds: int, only: str) -> list[float]:
    """Predict and measure the configs, print both, and return the relative errors of the times."""
    on_machine = measure_model(model, *MODELS[model], rounds)
    candidates: dict[str, Candidate | AsyncCandidate] = {}
    running: dict[str, Running] = {}
    ratios = state_ratios(on_machine.space(("strategy=single",)).problem)
    for name, more in CONFIGS.items():
        if only in name or name == SINGLE:
            space = on_machine.space(more)
            one = predicted(space, space.config, ratios)
            assert not isinstance(one, str), one
            plan = strategies.plan(space.config, space.problem, on_machine.machine.cluster)
            candidates[name] = one
            running[name] = Running(strategies.build(plan, space.problem, clusters.devices()), on_machine.batch)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds + 1):  # the first one compiles
        for name, run in running.items():
            measured = run.step_seconds()
            if number:
                seconds[name].append(measured)
    measured_s = {name: statistics.median(values) for name, values in seconds.items()}
    predicted_s = {
        name: one.seconds if isinstance(one, AsyncCandidate) else one.costs.seconds for name, one in candidates.items()
    }
    rows = []
    for name, run in running.items():
        one, of_run = candidates[name], run.mean_staleness()
        staleness = (
            f"{one.mean_staleness:.2f} / {of_run:.2f}" if of_run is not None and isinstance(one, AsyncCandidate) else ""
        )
        rows.append([name, format_ratio(predicted_s[name], measured_s[name]), staleness])
    show(["config", "step time, predicted / measured", "mean staleness, predicted / measured"], rows)
    return [abs(predicted_s[name] / measured_s[name] - 1) for name in running]


class Running:
    """A run that can be continued."""

    def __init__(self, strategy: Strategy[Any], batch: Mapping[str, np.ndarray]) -> None:
        """Begin the run."""
        self._strategy, self._batch = strategy, strategy.place(batch)
        self._state, self._num_rows = strategy.init(jax.random.key(0)), 0
        self._staleness: list[float] = []

    def step_seconds(self) -> float:
        """Return the mean time of some more steps, without the first and the last one."""
        times = []
        has_workers = self._strategy.plan.strategy == "async_data_parallel"
        for _ in range(NUM_STEPS):
            self._state, metrics = self._strategy.step(self._state, self._batch)
            if not has_workers:  # workers compute while the server waits
                jax.block_until_ready((self._state, metrics))
            times.append(time.perf_counter())
        if not has_workers:
            return (times[-2] - times[0]) / (NUM_STEPS - 2)
        self._strategy.drain(self._state)  # the next config has all cores
        table = self._state.transport.table()
        n = table.num_workers
        first, last = self._num_rows + n, self._num_rows + (NUM_STEPS - 1) * n
        self._num_rows = len(table.finish)
        self._staleness += table.staleness[first:last].tolist()
        return float(table.finish[last - 1] - table.finish[first - 1]) / (NUM_STEPS - 2)

    def mean_staleness(self) -> float | None:
        """Return the mean staleness in these steps; None without workers."""
        return statistics.fmean(self._staleness) if self._staleness else None


if __name__ == "__main__":
    sys.exit(exit_code(main))
