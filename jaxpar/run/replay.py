"""Repeats the runs of an outer step in one process, without Ray, from their configs and the table of worker 0.

A worker can have been started several times: from step 0, from the step of the others, or from a checkpoint that one of
its earlier starts has written. Each start is repeated as far as something depends on it: a difference that it sent, a
checkpoint from which a later start continued, or the newest checkpoint of its run, with which the result is compared.
"""

import contextlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar import checkpoint, strategies
from jaxpar import cluster as clusters
from jaxpar.checkpoint import checksums
from jaxpar.core.state import Canonical
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch.signals import Stopped
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.run.build import Run
from jaxpar.run.evaluate import load_batches
from jaxpar.run.restore import fresh
from jaxpar.strategies.outer.live import TABLE
from jaxpar.strategies.outer.recorded import LocalLink, RecordedServer, Turns
from jaxpar.strategies.outer.table import Contribution, OuterEvent, read_contributions
from jaxpar.strategies.outer.worker import FragmentVectors

StartPlace = tuple[int, int]  # worker and number of its start
HostState = tuple[Canonical, Canonical]  # copies of a state and of its private state on the host


class SavedRun(NamedTuple):
    """A run to be compared: its workdir, and its newest checkpoint."""

    workdir: Path
    saved: checkpoint.Checkpoint
    place: StartPlace  # the start that wrote the checkpoint


def read_runs(workdirs: Sequence[Path]) -> tuple[list[SavedRun], list[Contribution]]:
    """Return the runs, and the table of worker 0. Raises UserError if a run or the table is missing."""
    runs, tables = list[SavedRun](), []
    for workdir in workdirs:
        saved = checkpoint.of_run(workdir)
        worker = checkpoint.config_of(saved, workdir).outer.worker
        if "outer" not in saved.private:
            raise UserError(f"{workdir} is not the run of a worker; it must be one with config.outer.num_workers")
        if other := next((run for run in runs if run.place[0] == worker), None):
            raise UserError(f"{workdir} is a run of worker {worker}, as {other.workdir} is; it must be another worker")
        runs.append(SavedRun(workdir, saved, (worker, int(saved.private["outer"]["start"]))))
        if (path := workdir / "outer" / TABLE).exists():
            tables.append(read_contributions(path))
    if len(tables) != 1:
        raise UserError(f"{len(tables)} of the runs have a table outer/{TABLE}; it must be one, that of worker 0")
    [table] = tables
    starts = {(row.worker, row.start) for row in table}
    if missing := {row.worker for row in table if row.event == OuterEvent.COUNTED} - {run.place[0] for run in runs}:
        raise UserError(
            f"worker {min(missing)} has contributed, and its run is missing; it must be one of the workdirs"
        )
    if other := next((run for run in runs if run.place not in starts), None):
        worker, start = other.place
        raise UserError(
            f"{other.workdir} is of start {start} of worker {worker}, which the table lacks; it must be of the same "
            "training as the others"
        )
    return runs, table


def needed_steps(runs: Sequence[SavedRun], table: Sequence[Contribution]) -> dict[StartPlace, set[int]]:
    """Return the steps after which the state of each start is compared, or continued by a later start."""
    steps: dict[StartPlace, set[int]] = defaultdict(set)
    for run in runs:
        steps[run.place].add(run.saved.step)
    for row in table:
        if row.event == OuterEvent.RESUME:
            steps[row.worker, row.read].add(row.step)
    return steps


class Replay:
    """The workers of an outer step, which take turns in this process."""

    def __init__(self, runs: Sequence[SavedRun], table: Sequence[Contribution], folder: Path):
        """folder: for files that the runs of a replay write."""
        self._table, self.needed = table, needed_steps(runs, table)
        self._runs: dict[int, Run] = {}
        self.states: dict[tuple[StartPlace, int], HostState] = {}  # by start and step
        for run in runs:
            worker, config = run.place[0], checkpoint.config_of(run.saved, run.workdir)
            if worker not in self._runs:
                workdir = folder / str(worker)
                workdir.mkdir()
                if (tokenizer := run.workdir / "tokenizer.json").exists():
                    shutil.copy(tokenizer, workdir)
                self._runs[worker] = build.make_run(config, workdir, Phases())
        first = self._runs[min(self._runs)]
        details: Any = first.plan.outer
        vectors = FragmentVectors(first.problem, details.fragments)
        params = first.strategy.to_canonical(fresh(first))["params"]
        initial = [vectors.vector(params, fragment) for fragment in range(len(details.fragments))]
        self._server, self._turns = RecordedServer(details.settings, initial, table), Turns(len(self._runs))

    def run(self) -> None:
        """Repeat all starts. Raises TrainingError if a worker does not contribute what is in the table."""
        with ThreadPoolExecutor(len(self._runs)) as threads:
            for done in [threads.submit(self._repeat_worker, worker) for worker in self._runs]:
                done.result()

    def _repeat_worker(self, worker: int) -> None:
        run = self._runs[worker]
        with self._turns:
            link = LocalLink(self._server, self._turns, worker)
            strategy = strategies.build(run.plan, run.problem, clusters.devices(), lambda _workdir: link)
            run = run._replace(strategy=strategy)
            starts = {
                row.start: row
                for row in self._table
                if row.worker == worker and row.event in (OuterEvent.JOIN, OuterEvent.RESUME)
            }
            for start, row in sorted(starts.items()):
                self._repeat_start(run, row, start)

    def _repeat_start(self, run: Run, row: Contribution, start: int) -> None:
        place = row.worker, start
        sent = [
            one.step
            for one in self._table
            if (one.worker, one.start) == place and one.event in (OuterEvent.COUNTED, OuterEvent.REPEATED)
        ]
        last = max([row.step, *sent, *self.needed[place]])
        self._server.starts[row.worker] = start
        if row.event == OuterEvent.RESUME:
            state = run.strategy.from_canonical(*self.states[(row.worker, row.read), row.step])
            step = row.step
        else:
            state, step = fresh(run), 0
        with contextlib.suppress(Stopped):  # nothing depends on what would have followed
            state, step = run.strategy.begin(state, step, run.workdir)
            self._keep(run, state, place, step)
            batches = load_batches(run, run.batches, step, last)
            for number, batch in enumerate(batches, start=step + 1):
                state, _ = run.strategy.step(state, run.strategy.place(batch))
                self._keep(run, state, place, number)

    def _keep(self, run: Run, state: Any, place: StartPlace, step: int) -> None:
        if step in self.needed[place]:
            trees = run.strategy.to_canonical(state), run.strategy.to_private(state)
            self.states[place, step] = jax.tree.map(np.array, jax.device_get(trees))


def first_difference(run: SavedRun, repeated: HostState) -> str:
    """Return the first array in which the checkpoint of a run and its replay differ; empty if all bits are equal."""
    theirs = checksums.by_path({"state": run.saved.tree, "private": run.saved.private})
    ours = checksums.by_path(dict(zip(("state", "private"), repeated, strict=True)))
    if odd := sorted(theirs.keys() ^ ours.keys()):
        return f"{odd[0]} is missing in one of them"
    for name, array in theirs.items():
        if array.tobytes() != ours[name].tobytes():
            largest = np.abs(np.asarray(array, np.float64) - np.asarray(ours[name], np.float64)).max()
            return f"{name} differs by up to {largest:.3g}"
    return ""


def replay_runs(workdirs: Sequence[Path]) -> list[str]:
    """Repeat runs, and return a line for each: that its newest checkpoint is equal, bit by bit.

    Raises UserError if a run or the table is missing, and TrainingError for the first difference.
    """
    runs, table = read_runs(workdirs)
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(runs, table, Path(folder))
        replay.run()
    lines = []
    for run in runs:
        worker, start = run.place
        name = f"{run.workdir}  worker {worker}, start {start}, step {run.saved.step}"
        if difference := first_difference(run, replay.states[run.place, run.saved.step]):
            raise TrainingError(f"{name}: {difference}")
        lines.append(f"{name}: equal bitwise")
    return lines
