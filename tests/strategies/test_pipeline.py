"""A pipeline trains like `single` on the same microbatches, with any schedule, stages, replicas and model.

CASES covers all pairs: every schedule occurs with every number of stages, every number of replicas, every transformer
and every remat, and so on (`test_all_pairs_are_covered`). ResNets, which are the slowest to compile, do not occur with
every schedule. `scripts/test -m slow` runs those that are not in FAST, and all 144 combinations of schedule, stages,
replicas and model. All cases have dropout and clipping, gpt and bert have tied weights, and some partitions are
unequal.

Schedules are bitwise equal if they run the same actions on the same layers and sum the gradients of each stage in the
order of the microbatches: gpipe, 1f1b and eager_1f1b on the one hand, and zb_h1 and zb_h2 on the other
(`test_schedules_with_the_same_actions_are_bitwise_equal`). In all other cases, XLA compiles different programs, which
round differently even if the sums have the same order. Examples are a fused backward and separate B and W, different
remat or partitions, and `single`, whose microbatches are a scan of jax.grad, and any pipeline. Those agree to 1e-6.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.strategies.pipeline.tables.table import Table
from tests.selection import slow_except
from tests.strategies.pipelines import (
    NUM_MICROBATCHES,
    NUM_STEPS,
    RESNET_BLOCKS,
    TWO_STREAMS,
    Outcome,
    Task,
    assert_survives,
    filled,
    make_batch,
    named,
    outcome,
    pipeline,
    shared,
    start,
)
from tests.strategies.pipelines import relative_error as error

ROOT = Path(__file__).parents[2]
BERT, BERT_SGD = Task("bert", "masked_lm", layers=4), Task("bert", "classification", "sgd", layers=4)
GPT, GPT_SGD = Task("gpt", "causal_lm", layers=4), Task("gpt", "causal_lm", "sgd", layers=4)
RESNET, RESNET_SGD = Task("resnet", "classification"), Task("resnet", "classification", "sgd")
# Enough layers for 8 devices, or for two chunks on each.
BERT_8, GPT_8, DEEP_BERT = Task("bert", "masked_lm"), Task("gpt", "causal_lm", "sgd"), BERT._replace(layers=14)


class Case(NamedTuple):
    """A pipeline. `stages` is its number of devices; configs/default.py documents `partition`."""

    schedule: str
    stages: int
    replicas: int
    task: Task
    remat: str
    partition: str = "flops"

    @property
    def overrides(self) -> tuple[str, ...]:
        partition = f"--config.pipeline.partition={self.partition}"
        return pipeline(self.schedule, self.stages, partition, replicas=self.replicas, remat=self.remat)

    @property
    def table(self) -> Table:
        chunks = SCHEDULES[self.schedule].num_chunks
        return make_table(self.schedule, num_devices=self.stages, num_microbatches=NUM_MICROBATCHES, num_chunks=chunks)

    def __str__(self) -> str:
        return f"{self.schedule} {self.stages}x{self.replicas} {self.task.model} {self.remat} {self.partition}"


CASES = [
    Case("model_parallel", 2, 2, BERT, "none", "block_3"),
    Case("model_parallel", 4, 1, GPT, "dots"),
    Case("model_parallel", 8, 1, GPT_8, "full"),
    Case("gpipe", 2, 1, GPT_SGD, "full", "block_0"),
    Case("gpipe", 4, 2, RESNET_SGD, "none"),
    Case("gpipe", 8, 1, BERT_8, "dots"),
    Case("1f1b", 2, 2, BERT, "dots"),
    Case("1f1b", 4, 1, BERT_SGD, "full", "block_0,block_1,head"),
    Case("1f1b", 8, 1, GPT_8, "none"),
    Case("eager_1f1b", 2, 1, BERT_SGD, "none", "uniform"),
    Case("eager_1f1b", 4, 2, GPT, "dots", "block_1,block_2,block_3"),
    Case("eager_1f1b", 8, 1, BERT_8, "full"),
    Case("interleaved_1f1b", 2, 2, GPT, "full"),
    Case("interleaved_1f1b", 4, 1, BERT_8, "none"),
    Case("interleaved_1f1b", 8, 1, DEEP_BERT, "dots", "uniform"),
    Case("zb_h1", 2, 1, RESNET, "dots"),
    Case("zb_h1", 4, 2, BERT, "full", "parameters"),
    Case("zb_h1", 8, 1, GPT_8, "none"),
    Case("zb_h2", 2, 2, BERT, "none"),
    Case("zb_h2", 4, 1, GPT_SGD, "dots", "block_0,block_1,head"),
    Case("zb_h2", 8, 1, RESNET_SGD, "full"),
    Case("zb_v", 2, 1, GPT, "full", "block_0,block_2,block_3"),
    Case("zb_v", 4, 2, BERT_8, "none"),
    Case("zb_v", 8, 1, DEEP_BERT, "dots"),
]
# These cases need 16 devices, more than this process has.
LARGE_CASES = [Case("1f1b", 8, 2, GPT_8, "none"), Case("zb_v", 8, 2, DEEP_BERT, "full")]
ONE_STAGE_CASES = [Case("1f1b", 1, 1, GPT_SGD, "none"), Case("zb_v", 1, 2, BERT_SGD, "full")]

UNTIED = Case("1f1b", 2, 1, Task("untied llama", "causal_lm"), "none")


def assert_equal(got: Outcome, expected: Outcome, norm_error: float = 1e-6) -> None:
    """Assert equality with a relative error of 1e-6 per array, and of 2e-6 for the gradient of one step."""
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-6)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=norm_error)
    assert got.params.keys() == expected.params.keys()
    assert got.gradients.keys() == expected.gradients.keys()
    assert len(got.gradients) == len(got.params)
    # The bias of a key adds the same value to all scores of a query, so its gradient is rounding error.
    names = [[name for name in tree if "['key']['bias']" not in name] for tree in (got.params, got.gradients)]
    for name in names[0]:
        assert error(got.params[name], expected.params[name]) < 1e-6, name
    flat = [np.concatenate([of.gradients[name].ravel() for name in names[1]]) for of in (got, expected)]
    assert error(*flat) < 2e-6  # single precision, over the microbatches of one step
    for name in names[1]:  # some arrays are small sums of large terms
        assert error(got.gradients[name], expected.gradients[name]) < 5e-6, name


def test_all_pairs_are_covered() -> None:
    cases = [(c.schedule, c.stages, c.replicas, c.task.model, c.remat) for c in CASES + LARGE_CASES]
    values = [tuple(SCHEDULES), (2, 4, 8), (1, 2), ("bert", "gpt", "resnet"), ("none", "full", "dots")]
    for a, b in itertools.combinations(range(len(values)), 2):
        there = {(case[a], case[b]) for case in cases}
        all_pairs = set(itertools.product(values[a], values[b]))
        if (a, b) == (0, 3):  # schedules and models
            there, all_pairs = ({pair for pair in pairs if pair[1] != "resnet"} for pairs in (there, all_pairs))
        assert there == all_pairs
    assert {(c.task.model, c.task.optimizer) for c in CASES} == set(itertools.product(values[3], ("adamw", "sgd")))


# Both transformers. The small model of tests/strategies/cases.py has every schedule.
FAST = [CASES[6], CASES[21]]


@pytest.mark.parametrize("case", slow_except([*FAST, UNTIED], [*CASES, *ONE_STAGE_CASES, UNTIED]), ids=str)
def test_equals_single(case: Case) -> None:
    # After 14 blocks of convolutions and norms, rounding occasionally decides which of two pixels is the maximum.
    norm_error = 5e-6 if case.task.model == "resnet" and case.task.layers == 14 else 1e-6
    assert_equal(outcome(case.task, *case.overrides), outcome(case.task), norm_error)
    assert_survives(shared(case.task, *case.overrides), filled(start(case.task)))


TASKS = dict.fromkeys(case.task for case in CASES if case.task.model != "resnet")


@pytest.mark.parametrize("task", slow_except([case.task for case in FAST], TASKS), ids=str)
def test_training_learns_and_dropout_is_on(task: Task) -> None:
    """Guards the tests above: the equality of runs that do not train would prove nothing."""
    reference, strategy = outcome(task), shared(task)
    assert len(set(reference.losses)) == NUM_STEPS
    assert max(reference.norms) > 1  # clipping is active
    for name, before in named(start(task)["params"]).items():  # ten times the tolerance of equality
        moved = error(reference.params[name], before)
        assert moved > 1e-5 or "['key']['bias']" in name, f"{name} moved by {moved}"
    sums = strategy.evaluate(strategy.from_canonical(start(task)), strategy.place(make_batch(task, 0)))
    assert abs(float(sums.loss / sums.weight) - reference.losses[0]) > 1e-3


PROCESS = """
import sys
import jax
from jaxpar.core import host
host.keep_freed_memory()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
from tests.strategies import test_pipeline
for case in test_pipeline.LARGE[sys.argv[1]]:
    test_pipeline.test_equals_single(case)
    print("equal", case)
"""


def combinations(schedule: str, model: str) -> list[Case]:
    """Return cases of a schedule and model with every number of stages and replicas, with alternating remat."""
    cases: list[Case] = []
    name = {"bert": "masked_lm", "gpt": "causal_lm", "resnet": "classification"}[model]
    for stages, replicas in itertools.product((2, 4, 8), (1, 2)):
        num_layers = stages * SCHEDULES[schedule].num_chunks - 2
        layers = min(size for size in RESNET_BLOCKS if size >= num_layers) if model == "resnet" else max(2, num_layers)
        task = Task(model, name, "sgd" if model == "resnet" else "adamw", layers)
        remat = ("full", "none")[(len(cases) // 2 + replicas + (model == "gpt")) % 2]
        cases.append(Case(schedule, stages, replicas, task, remat))
    return cases


LARGE = {
    "pairs": LARGE_CASES,
    **{
        f"{schedule}, {model}": combinations(schedule, model)
        for schedule, model in itertools.product(SCHEDULES, ("bert", "gpt", "resnet"))
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_sixteen_devices(name: str) -> None:
    """The cases run in a subprocess, because JAX sets the number of devices once per process."""
    process = subprocess.run(
        [sys.executable, "-c", PROCESS, name],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines() == [f"equal {case}" for case in LARGE[name]]


@pytest.mark.parametrize("schedules", [("gpipe", "1f1b", "eager_1f1b"), ("zb_h1", "zb_h2")], ids=str)
def test_schedules_with_the_same_actions_are_bitwise_equal(schedules: tuple[str, ...]) -> None:
    task = Task(TWO_STREAMS, "causal_lm", "sgd", layers=2)
    first, *others = [outcome(task, *pipeline(schedule, 2)) for schedule in schedules]
    for other in others:
        assert (other.losses, other.norms) == (first.losses, first.norms)
        for name, expected in first.params.items():
            np.testing.assert_array_equal(other.params[name], expected, err_msg=name)


def test_bfloat16() -> None:
    """The pipeline rounds like one device: they differ less from each other than one device differs from float32."""
    task = Task("gpt", "causal_lm", "sgd", layers=2, dtype="bfloat16")
    got, single, exact = (
        outcome(task, *pipeline("zb_h1", 2)),
        outcome(task),
        outcome(task._replace(dtype="float32")),
    )
    flat = [np.concatenate([leaf.ravel() for leaf in of.gradients.values()]) for of in (got, single, exact)]
    assert 1e-4 < error(flat[1], flat[2]) < 0.1
    assert error(flat[0], flat[1]) < error(flat[1], flat[2])
    assert all(leaf.dtype == np.float32 for leaf in got.params.values())
    np.testing.assert_allclose(got.losses, single.losses, rtol=1e-2)
