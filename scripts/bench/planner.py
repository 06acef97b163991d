"""Compares predicted with measured times of a step, on the virtual devices of this machine.

    scripts/python scripts/bench/planner.py [--rounds=15] [--only=TEXT]

Calibrates the machine, measures the layers of each model, predicts the time of a step of each config, and measures it.
Prints predicted / measured for each, the median error, the share within 20%, and for each model and number of devices
how much slower the config that is predicted to be the fastest is than the fastest one.
"""

import statistics
import sys
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.choose import planner
from jaxpar.choose.candidates import Space
from jaxpar.choose.costs.calibrate import MeasuredLayers, calibrate
from jaxpar.choose.costs.machine import CpuMachine
from jaxpar.command_line import Parser, integer
from jaxpar.core import mesh
from jaxpar.data import DataInfo
from jaxpar.errors import exit_code
from jaxpar.host_memory import host_bytes
from scripts.bench.steps import make_problem, race
from scripts.bench.tables import show

DEVICES = 4
PIPELINE = ("strategy=pipeline", "pipeline.executor=lockstep")
# By name: the settings of a config. Each is run with each model.
CONFIGS: dict[str, tuple[str, ...]] = {
    "single": ("strategy=single",),
    "ddp 2": ("mesh.data=2",),
    "ddp 4": ("mesh.data=4",),
    "ddp 4, shard_map": ("mesh.data=4", "data_parallel.implementation=shard_map"),
    "ddp 4, 2 microbatches": ("mesh.data=4", "optimizer.accumulation_steps=2"),
    "horovod 4": ("mesh.data=4", "exchange=horovod"),
    "zero1 4": ("mesh.data=4", "exchange=zero1"),
    "zero2 2": ("mesh.data=2", "exchange=zero2"),
    "zero3 4": ("mesh.data=4", "exchange=zero3"),
    "gpipe 2": (*PIPELINE, "mesh.stage=2", "mesh.data=1", "pipeline.schedule=gpipe", "pipeline.num_microbatches=4"),
    "1f1b 2": (*PIPELINE, "mesh.stage=2", "mesh.data=1", "pipeline.schedule=1f1b", "pipeline.num_microbatches=8"),
    "1f1b 4": (*PIPELINE, "mesh.stage=4", "mesh.data=1", "pipeline.schedule=1f1b", "pipeline.num_microbatches=8"),
    "zb_h1 2": (*PIPELINE, "mesh.stage=2", "mesh.data=1", "pipeline.schedule=zb_h1", "pipeline.num_microbatches=4"),
    "zb_h1 4": (*PIPELINE, "mesh.stage=4", "mesh.data=1", "pipeline.schedule=zb_h1", "pipeline.num_microbatches=8"),
    "1f1b 2 x 2": (*PIPELINE, "mesh.stage=2", "mesh.data=2", "pipeline.schedule=1f1b", "pipeline.num_microbatches=4"),
}
MODELS: dict[str, tuple[int, int, tuple[str, ...]]] = {  # name: examples, tokens of each, settings
    "bert 4 x 128": (64, 64, ("model.num_layers=4", "model.hidden_size=128", "model.num_heads=2")),
    "bert 6 x 256": (32, 128, ("model.num_layers=6", "model.hidden_size=256", "model.num_heads=4")),
}
VOCABULARY, CLASSES = 2000, 10


class Row(NamedTuple):
    """A config, its predicted and its measured time of a step, in seconds."""

    model: str
    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the predicted time."""
        return abs(self.predicted / self.measured - 1)


def main() -> None:
    """Print the table."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=integer(1), default=15, help="measurements of each step")
    parser.add_argument("--only", default="", help="run the configs whose name contains this text")
    arguments = parser.parse()
    prepare_devices()
    rows = []
    for model in MODELS:
        rows += measured(model, arguments.rounds, arguments.only)
    ratios = {(row.name, row.model): f"{row.predicted / row.measured:.3f}" for row in rows}
    names = dict.fromkeys(row.name for row in rows)
    show(["config", *MODELS], [[name, *(ratios[name, model] for model in MODELS)] for name in names])
    errors = [row.error for row in rows]
    print(
        f"median error {statistics.median(errors):.1%}; {sum(error <= 0.2 for error in errors)} of {len(rows)} within "
        "20%"
    )
    for model in MODELS:
        of_model = [row for row in rows if row.model == model]
        first, best = min(of_model, key=lambda row: row.predicted), min(of_model, key=lambda row: row.measured)
        slower = first.measured / best.measured - 1
        print(f"{model}: the first choice, {first.name}, is {slower:.1%} slower than the fastest, {best.name}")


def format_ratio(predicted: float, measured: float) -> str:
    """Return two times in milliseconds, given in seconds, and their ratio."""
    return f"{1e3 * predicted:.1f} / {1e3 * measured:.1f} ms = {predicted / measured:.3f}"


def rounded(values: Any) -> str:
    """Return numbers by key in a short form."""
    return ", ".join(f"{key}: {value:.3g}" for key, value in values.items())


class Measured(NamedTuple):
    """A model on this machine: what its configs have in common, and the costs of its layers and of the devices."""

    info: DataInfo
    batch: dict[str, np.ndarray]
    size: int
    length: int
    settings: tuple[str, ...]
    machine: CpuMachine
    layers: MeasuredLayers

    def space(self, more: tuple[str, ...]) -> Space:
        """Return the space of a config with these settings in addition."""
        config = text_config(self.size, self.length, (*self.settings, *more))
        problem = make_problem(config, self.info, self.batch)
        return Space(config, problem, self.layers, self.machine, host_bytes())


def texts(size: int, length: int) -> tuple[DataInfo, dict[str, np.ndarray]]:
    """Return a batch of `size` random texts of `length` tokens, and its description."""
    random = np.random.default_rng(0)
    batch = {
        "inputs": random.integers(1, VOCABULARY, (size, length), np.int32),
        "mask": np.ones((size, length), bool),
        "labels": random.integers(0, CLASSES, size, np.int32),
        "weights": np.ones(size, np.float32),
        "index": np.arange(size, dtype=np.int32),
    }
    return DataInfo("text", (length,), CLASSES, tuple(map(str, range(CLASSES))), VOCABULARY, 0), batch


def text_config(size: int, length: int, settings: tuple[str, ...]) -> ConfigDict:
    """Return the config that classifies such texts. settings: `KEY=VALUE`."""
    config: ConfigDict = configs.default_config()
    base = (f"batch_size={size}", f"data.max_length={length}", "model.pooling=mean")
    configs.override(config, [f"--config.{value}" for value in (*base, *settings)])
    return config


def measure_model(model: str, size: int, length: int, settings: tuple[str, ...], rounds: int) -> Measured:
    """Measure the layers of a model, and what several devices slow each other down by. See MODELS."""
    info, batch = texts(size, length)
    problem = make_problem(text_config(size, length, (*settings, "strategy=single")), info, batch)
    share = {name: x[: size // DEVICES] for name, x in batch.items()}
    machine = calibrate(clusters.find_cluster(), clusters.devices(), problem, share)
    print(f"{model}: slowdown {rounded(machine.slowdown)}, clock {machine.clock_seconds * 1e6:.0f} us")
    layers = MeasuredLayers(problem, batch, (size // 8, size), rounds, machine.started(1))
    return Measured(info, batch, size, length, settings, machine, layers)


def prepare_devices() -> None:
    """Use virtual CPU devices, and cache compiled programs."""
    config: Any = configs.default_config()
    config.mesh.virtual_cpu_devices, config.strategy, config.pipeline.executor = DEVICES, "pipeline", "lockstep"
    mesh.prepare_jax(config, configs.config_folder().parent / ".cache")


def measured(model: str, rounds: int, only: str) -> list[Row]:
    """Return the rows of a model."""
    on_machine = measure_model(model, *MODELS[model], rounds)
    contenders, predicted = {}, {}
    for name, more in CONFIGS.items():
        if only in name:
            space = on_machine.space(more)
            plan = strategies.plan(space.config, space.problem, on_machine.machine.cluster)
            candidate = planner.candidate_of_plan(space, space.config, plan)
            predicted[name] = candidate.costs
            contenders[name] = strategies.build(plan, space.problem, clusters.devices())
    timings = race(contenders, on_machine.batch, rounds=rounds)
    rows = [Row(model, name, costs.seconds, timings[name].seconds) for name, costs in predicted.items()]
    for row in rows:
        print(f"{model:14} {row.name:24} {format_ratio(row.predicted, row.measured)}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(exit_code(main))
