"""Pipelines with a flush whose stages have different numbers of replicas train as one device.

tests/strategies/test_cases.py trains a small model with them.
"""

from pathlib import Path

import pytest

from jaxpar.errors import UserError
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.table_file import write_table
from tests.strategies import cases
from tests.strategies.pipelines import (
    NUM_MICROBATCHES,
    Outcome,
    Task,
    assert_survives,
    filled,
    make,
    outcome,
    plan_of,
    relative_error,
    shared,
    start,
)

BERT, GPT = Task("bert", "classification"), Task("gpt", "causal_lm", "sgd")  # the head of GPT is tied
CASES = [("1f1b", (2, 1), BERT, 2), ("1f1b", (1, 2, 1), GPT, 1), ("gpipe", (3, 1), GPT, 1), ("gpipe", (1, 3), BERT, 2)]


def settings(schedule: str, replicas: tuple[int, ...], data: int = 1, *more: str) -> tuple[str, ...]:
    return (
        "--config.strategy=pipeline",
        f"--config.pipeline.schedule={schedule}",
        f"--config.mesh.stage={sum(replicas)}",
        f"--config.mesh.data={data}",
        f"--config.pipeline.replicas={','.join(map(str, replicas))}",
        f"--config.pipeline.num_microbatches={NUM_MICROBATCHES}",
        *more,
    )


def worst(got: Outcome, expected: Outcome) -> float:
    assert got.params.keys() == expected.params.keys()
    names = [name for name in got.params if "['key']['bias']" not in name]  # whose gradients are rounding
    return max(relative_error(got.params[name], expected.params[name]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "replicas", "task", "data"), CASES, ids=str)
def test_equals_single(schedule: str, replicas: tuple[int, ...], task: Task, data: int) -> None:
    overrides = settings(schedule, replicas, data)
    got, expected = outcome(task, *overrides), outcome(task)
    assert worst(got, expected) < 1e-6
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.norms == pytest.approx(expected.norms, rel=1e-6)
    assert_survives(shared(task, *overrides), filled(start(task)))


def test_replicas_share_their_program() -> None:
    assert len(plan_of(cases.TASK, *settings("1f1b", (1, 2, 1))).details.stages.examples) == 3


@pytest.mark.slow
def test_clipping_before_a_compressor() -> None:
    """Error feedback clips the gradient of a replica of the pipeline, in which each stage counts once."""
    exchange = (
        "--config.exchange=byteps_topk",
        *(f"--config.exchange_options.{one}" for one in ("ratio=1.0", "min_compress_bytes=0")),
    )
    plain, replicated = (outcome(GPT, *settings("1f1b", of, 2, *exchange)) for of in ((1, 1), (2, 1)))
    assert worst(replicated, plain) < 1e-6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            settings("zb_h1", (2, 1)),
            r"config\.pipeline\.replicas is '2,1'; it must be empty with config\.pipeline\.schedule",
        ),
        (
            (*settings("1f1b", (2, 1)), "--config.mesh.stage=4"),
            r"config\.pipeline\.replicas is '2,1', 3 devices; they must be as many as config\.mesh\.stage, 4",
        ),
        (
            (*settings("1f1b", (2, 1)), "--config.pipeline.replicas=2,x"),
            r"config\.pipeline\.replicas is '2,x'; it must list the number of devices of each stage",
        ),
        (
            (*settings("1f1b", (2, 1)), "--config.pipeline.schedule={csv}"),
            r"config\.pipeline\.replicas is '2,1'; it must be empty with the table of config\.pipeline\.schedule",
        ),
        (
            settings("pipedream", (3, 1)),
            r"config\.pipeline\.num_microbatches is 8; it must be a multiple of 3, because the replicas of",
        ),
    ],
)
def test_refused(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_table(make_table("1f1b", num_devices=3, num_microbatches=8, num_chunks=1), path)
    overrides = tuple(text.format(csv=path) for text in overrides)
    with pytest.raises(UserError, match=message):
        make(BERT, *overrides)
