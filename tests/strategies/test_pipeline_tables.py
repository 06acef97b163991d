"""Tables from CSV files and from the search. Tables are arguments of the compiled program."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpar.choose.search.lockstep_search import search_lockstep
from jaxpar.choose.search.search import search
from jaxpar.core import mesh as meshes
from jaxpar.core.step import abstract
from jaxpar.strategies.pipeline import lockstep
from jaxpar.strategies.pipeline.details import PipelineDetails
from jaxpar.strategies.pipeline.executor import engine
from jaxpar.strategies.pipeline.executor.lowering import lower_table
from jaxpar.strategies.pipeline.executor.stage_programs import StagePrograms
from jaxpar.strategies.pipeline.schedules import configured_table
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Times
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, BW, Action, F, Table, loop_stages, place_actions
from jaxpar.strategies.pipeline.tables.table_file import write_table
from jaxpar.strategies.pipeline.tables.validate import check_table
from jaxpar.strategies.placement import BatchPlacement
from tests.strategies.pipelines import (
    NUM_MICROBATCHES,
    Task,
    advance,
    make,
    make_batch,
    make_config,
    named,
    outcome,
    pipeline,
    relative_error,
    start,
)
from tests.strategies.test_pipeline import assert_equal

TASK = Task("gpt", "causal_lm", "sgd", layers=2)


def test_a_table_of_the_users_own(tmp_path: Path) -> None:
    """The table is 1F1B on two devices, except that device 0 starts two clocks later and pauses for two more.

    Every device runs the actions of 1f1b in the same order, so the results are bitwise equal.
    """
    table = make_table("1f1b", num_devices=2, num_microbatches=NUM_MICROBATCHES, num_chunks=1)
    write_table(table, tmp_path / "table.csv")
    header, *lines = (tmp_path / "table.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines]
    late = [[str(int(clock) + 2 + 2 * (int(clock) > 9)), *rest] for clock, *rest in rows]
    last = max(range(len(late)), key=lambda row: int(late[row][0]))
    late[last][0] = str(int(late[last][0]) + 2)  # delay the last action again
    text = "\n".join(
        ",".join(row[:5]) for row in [header.split(","), *late]
    )  # stages, versions and slots are left to the reader
    (tmp_path / "late.csv").write_text(text + "\n")
    config = make_config(TASK, *pipeline(f"{tmp_path}/late.csv", 2))
    changed = configured_table(config, ())
    assert changed.num_clocks == table.num_clocks + 6
    got = outcome(TASK, *pipeline(f"{tmp_path}/late.csv", 2))
    assert_equal(got, outcome(TASK))
    for name, expected in outcome(TASK, *pipeline("1f1b", 2)).params.items():
        np.testing.assert_array_equal(got.params[name], expected, err_msg=name)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_table_that_the_search_finds(num_chunks: int, tmp_path: Path) -> None:
    found = search(Times(4, 5, 3), 0.5, 4, 2, NUM_MICROBATCHES, num_chunks, evaluations=100)
    handmade = [
        make_table(name, num_devices=2, num_microbatches=NUM_MICROBATCHES, num_chunks=chunks)
        for name, chunks in (("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2))
    ]
    assert all(found.table.actions.tolist() != table.actions.tolist() for table in handmade)
    write_table(found.table, tmp_path / "found.csv")
    assert_equal(outcome(TASK, *pipeline(f"{tmp_path}/found.csv", 2)), outcome(TASK))


def test_a_table_that_the_search_in_lockstep_finds(tmp_path: Path) -> None:
    """The table has clocks with three actions of a device, and clocks with a W next to an F of another device."""
    found = search_lockstep(Times(1.74, 1.88, 1.61), 0, 3, 2, NUM_MICROBATCHES)
    assert found.policy == "zb_h2, improved in lockstep"
    sets = [
        {
            device: "".join(ACTION_KINDS[kind].name for kind in rows[rows["device"] == device]["kind"])
            for device in (0, 1)
        }
        for clock in range(found.table.num_clocks)
        for rows in [found.table.actions[found.table.actions["clock"] == clock]]
    ]
    assert any("FBW" in of_clock.values() for of_clock in sets)
    assert any("W" in one and "W" not in other and "F" in other for one, other in map(dict.values, sets))
    write_table(found.table, tmp_path / "found.csv")
    assert_equal(outcome(TASK, *pipeline(f"{tmp_path}/found.csv", 2)), outcome(TASK))


def newest_first(p: int, m: int) -> Table:
    """Return GPipe as drawn in the paper, with backwards in the order m - 1, .., 0."""
    order = [Action(F, k, 0) for k in range(m)] + [Action(BW, k, 0) for k in reversed(range(m))]
    return place_actions([order] * p, loop_stages(p, 1), m)


def test_tables_of_one_shape_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them share one compiled program. The same actions in the same order give bitwise equal results."""
    p = m = 4
    tables = {name: make_table(name, num_devices=p, num_microbatches=m, num_chunks=1) for name in ("gpipe", "1f1b")}
    tables["newest first"] = newest_first(p, m)
    check_table(tables["newest first"])
    assert len({(lower_table(table).shape, table.num_clocks) for table in tables.values()}) == 1
    assert len({table.actions.tobytes() for table in tables.values()}) == 3

    overrides = pipeline("gpipe", p, f"--config.pipeline.num_microbatches={m}", "--config.pipeline.partition=uniform")
    piped, traced = make(TASK, *overrides), []
    details, mesh = piped.plan.details, meshes.make_mesh(piped.plan.axes, piped.devices)
    assert isinstance(details, PipelineDetails)
    of_batch = BatchPlacement(mesh, abstract(make_batch(TASK, 0)))
    step = meshes.one_at_a_time(lockstep.jit_train_step(details, mesh, of_batch), mesh)

    class Programs(StagePrograms):
        def __init__(self, *args: Any, **options: Any):
            traced.append(args)
            super().__init__(*args, **options)

    monkeypatch.setattr(engine, "StagePrograms", Programs)
    after = {}
    for name, table in tables.items():
        lowered = lower_table(table)
        state = piped.from_canonical(start(TASK))
        for number in range(3):
            batch = piped.place(make_batch(TASK, number))
            state, _ = step(lowered.shape, state, batch, lowered.arrays)
        after[name] = named(details.state.gather(state).params)
    assert len(traced) == 1
    expected = advance(make(TASK, f"--config.optimizer.accumulation_steps={m}"), TASK, start(TASK), 0, 3).params
    for name, value in expected.items():
        np.testing.assert_array_equal(after["1f1b"][name], after["gpipe"][name], err_msg=name)
        if "['key']['bias']" not in name:
            assert relative_error(after["gpipe"][name], value) < 1e-6, name
            assert relative_error(after["newest first"][name], value) < 1e-6, name
