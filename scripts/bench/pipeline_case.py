"""Cases for the pipeline benchmarks: a training step with its config, batch, pipeline plan and compiled program."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import strategies, tasks
from jaxpar.choose.stages import until_chosen, with_stages
from jaxpar.core import mesh as meshes
from jaxpar.core import step as steps
from jaxpar.core.step import Problem
from jaxpar.data import DataInfo, Labels
from jaxpar.strategies.pipeline import lockstep
from jaxpar.strategies.pipeline import strategy as pipeline
from jaxpar.strategies.pipeline.details import PipelineDetails
from jaxpar.strategies.pipeline.executor.engine import PipelineEngine
from jaxpar.strategies.pipeline.executor.lowering import NONE
from jaxpar.strategies.pipeline.tables.table import Table
from scripts.bench import scan_and_mask
from scripts.bench.scan_and_mask import ScanAndMask
from scripts.bench.steps import Contender, make_problem

MODEL = {
    "name": "gpt",
    "num_layers": 8,
    "hidden_size": 256,
    "num_heads": 4,
    "max_length": 128,
    "vocab_size": 1024,
    "dropout": 0.0,
}
BERT = ["--config.model.name=bert", "--config.task=masked_lm"]
CLASSIFIER = ["--config.model.name=bert", "--config.task=classification"]
RESNET = ["--config.model.name=resnet", "--config.model.size=18", "--config.task=classification"]
FAST: dict[str, Any] = {"xla_backend_optimization_level": 0}  # affects only machine code; the optimized HLO is the same
IMAGE, NUM_CLASSES = (32, 32, 3), 10


class Case(NamedTuple):
    """A training step to measure."""

    config: ConfigDict
    batch: dict[str, np.ndarray]
    problem: Problem
    is_masked: bool  # whether to use the scan-and-mask reference

    @property
    def contender(self) -> Contender:
        """Build the strategy or the reference that runs the step."""
        if self.is_masked:
            return scan_and_mask.build(self.config, self.problem)
        return strategies.make(self.config, self.problem)


class Maker(NamedTuple):
    """Creates cases of one size.

    Attributes:
      overrides: the user's config overrides.
      num_examples: number of examples in a microbatch.
    """

    overrides: tuple[str, ...]
    num_examples: int

    def more(self, *overrides: str) -> "Maker":
        """Return a maker with more overrides; the user's overrides have priority."""
        return self._replace(overrides=(*overrides, *self.overrides))

    def single(self, m: int, remat: str = "none", *, scan: bool = True) -> Case:
        """Return a case for a single device that accumulates over m microbatches."""
        more = [f"--config.optimizer.accumulation_steps={m}", f"--config.model.remat={remat}"]
        return self._case(m, ["--config.strategy=single", f"--config.model.scan_layers={scan}", *more])

    def pipeline(self, p: int, schedule: str, remat: str = "none", *, m: int = 0) -> Case:
        """Return a case for a pipeline of p devices and m microbatches (by default 4p)."""
        return self._case(m or 4 * p, self._pipeline(p, schedule, remat, m or 4 * p))

    def scan_and_mask(self, p: int, remat: str = "none") -> Case:
        """Return a case for the scan-and-mask reference with p devices and 4p microbatches."""
        return self._case(4 * p, self._pipeline(p, "gpipe", remat, 4 * p), is_masked=True)

    def _pipeline(self, p: int, schedule: str, remat: str, m: int) -> list[str]:
        settings = {"schedule": schedule, "remat": remat, "num_microbatches": m}
        mesh = [
            "--config.strategy=pipeline",
            "--config.mesh.data=1",
            f"--config.mesh.stage={p}",
        ]
        return [*mesh, *[f"--config.pipeline.{key}={value}" for key, value in settings.items()]]

    def _case(self, m: int, overrides: Sequence[str], *, is_masked: bool = False) -> Case:
        config = configs.default_config()
        is_image = RESNET[0] in self.overrides
        model = [] if is_image else [f"--config.model.{key}={value}" for key, value in MODEL.items()]
        base = ["--config.task=causal_lm", "--config.pipeline.executor=lockstep"]
        configs.override(config, [*base, *model, *self.overrides, *overrides])
        configs.override(config, [f"--config.batch_size={m * self.num_examples}"])
        strategies.decide(until_chosen(config, clusters.find_cluster()), clusters.find_cluster())
        info, batch = random_data(config)
        problem = make_problem(config, info, batch)
        folder = Path(tempfile.mkdtemp())  # of a table that is searched, which is read when the step is built
        config = with_stages(config, problem, clusters.find_cluster(), folder)
        return Case(config, batch, problem, is_masked)


def random_data(config: ConfigDict) -> tuple[DataInfo, dict[str, np.ndarray]]:
    """Return a batch of random tokens or images, and its DataInfo."""
    random, num = np.random.default_rng(0), config.batch_size
    batch: dict[str, np.ndarray] = {"index": np.arange(num, dtype=np.int32)}
    if config.model.name == "resnet":
        batch["inputs"] = random.integers(0, 256, (num, *IMAGE), np.uint8)
        batch["labels"] = random.integers(0, NUM_CLASSES, num).astype(np.int32)
        batch["weights"] = np.ones(num, np.float32)
        return DataInfo("image", IMAGE, NUM_CLASSES, tuple(map(str, range(NUM_CLASSES))), 0, 0), batch
    length, vocab = config.model.max_length, config.model.vocab_size
    if config.task == "classification":
        batch["inputs"] = random.integers(0, vocab, (num, length)).astype(np.int32)
        batch["labels"] = random.integers(0, NUM_CLASSES, num).astype(np.int32)
        batch["weights"], batch["mask"] = np.ones(num, np.float32), np.ones((num, length), bool)
        return DataInfo("text", (length,), NUM_CLASSES, tuple(map(str, range(NUM_CLASSES))), vocab, 0), batch
    batch["inputs"] = random.integers(0, vocab, (num, length)).astype(np.int32)
    batch["labels"] = np.roll(batch["inputs"], -1, axis=1)
    batch["weights"] = np.ones((num, length), np.float32)
    if tasks.find_task(config).labels is Labels.MASKED:
        batch["mask"] = np.ones((num, length), bool)
    return DataInfo("text", (length,), 0, (), vocab, 0), batch


def step_lowering(case: Case) -> Callable[[], jax.stages.Lowered]:
    """Return a function that traces and lowers the step for abstract arguments."""
    if case.config.strategy == "pipeline" and not case.is_masked:
        parts = Parts(case)
        return lambda: lockstep.lower_step(parts.plan, case.problem, parts.mesh)
    contender = case.contender
    jitted: Any = contender.jitted if isinstance(contender, ScanAndMask) else contender.step  # jitted on one device
    state = jax.eval_shape(contender.init, jax.random.key(0))
    return lambda: jitted.lower(state, steps.abstract(case.batch))


def compiled(case: Case, options: dict[str, Any] | None = None) -> "Compiled":
    """Compile the step with the given compiler options."""
    program = step_lowering(case)().compile(options)
    text = program.as_text()
    assert text is not None
    return Compiled(text, temporary_bytes(program))


class Compiled(NamedTuple):
    """The compiled step on one device: the optimized HLO and the bytes of temporary memory."""

    text: str
    temporary: int


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes that one device needs in addition to arguments and results."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


class Parts:
    """The plan, stages, table and mesh of a pipeline case."""

    def __init__(self, case: Case):
        self.case = case
        self.plan = strategies.plan(case.config, case.problem, clusters.find_cluster())
        self.details: PipelineDetails = self.plan.details
        self.table: Table = self.details.table
        self.mesh = meshes.make_mesh(self.plan.axes, clusters.devices())
        self.stages, self.lowered = self.details.stages, self.details.lowered

    def engine(self) -> PipelineEngine:
        """Trace the stage programs of a step."""
        microbatches = pipeline.abstract_microbatches(self.case.problem, 1, self.table.num_microbatches)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return PipelineEngine(self.details.staged, self.lowered.shape, microbatches, key, self.details.remat)

    def shares(self) -> list[list[float]]:
        """Return the share of (device, clock) pairs that take each branch, by phase and branch of the switches."""
        number = self.engine().programs.numbers
        result = []
        for actions in self.lowered.arrays.actions:
            taken = np.take_along_axis(number, np.maximum(actions.chunk, 0), axis=1) + 1
            counts = np.bincount(np.where(actions.chunk == NONE, 0, taken).reshape(-1), minlength=number.max() + 2)
            result.append((counts / actions.chunk.size).tolist())
        return result


def nbytes(tree: Mapping[str, Any] | Sequence[Any]) -> int:
    """Return the bytes of the arrays of a tree, which can be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
