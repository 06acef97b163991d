"""The live transport of an outer step: the server is an actor on Ray, which worker 0 creates on its machine.

The actor outlives the processes of the workers. It ends when its last member leaves, or falls silent and does not come
back for as long again. Before it answers, it writes what
it has decided to the folder `outer` of worker 0, from which worker 0 can create it again:

    contributions.csv   the table (table.py)
    anchors.npz         anchors, momenta and versions after the last closed round

A process that is killed falls silent, as its thread of heartbeats ends. The others wait for it only so long.
"""

import asyncio
import atexit
import contextlib
import os
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import files
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch.signals import Interrupt, Stopped, print_from_thread
from jaxpar.strategies import ray_cluster
from jaxpar.strategies.outer.options import OuterDetails, OuterSettings
from jaxpar.strategies.outer.server import Anchor, Difference, Joined, OuterAnswer, OuterServer, Vector
from jaxpar.strategies.outer.table import Contribution, OuterEvent, append_rows, read_contributions, write_rows

SERVER_NAME = "outer"
TABLE, ANCHORS = "contributions.csv", "anchors.npz"
ROUND_POLL_SECONDS, RETRY_SECONDS, STOP_SECONDS = 0.02, 0.5, 0.5  # STOP_SECONDS: how often a signal is looked for
BEATS = 4  # heartbeats in config.outer.silence_seconds
LINGER_SECONDS = 1.0  # in which the actor sends its last answers, when all workers have left
# Settings that are not keys of config.outer, in messages.
WHAT = {"num_steps": "config.num_steps", "seed": "config.seed", "lengths": "the number of parameters of each fragment"}
ANNOUNCED = {  # what the workers print of the table
    OuterEvent.JOIN: "worker {worker} joined at step {step}",
    OuterEvent.RESUME: "worker {worker} continued from step {step}",
    OuterEvent.SILENT: "worker {worker} is silent; the others no longer wait for it",
    OuterEvent.RETURN: "worker {worker} contributes again",
    OuterEvent.LEAVE: "worker {worker} left",
}


def read_anchors(path: Path, settings: OuterSettings) -> list[Anchor]:
    """Read the anchors that the actor wrote. Raises UserError for a damaged file."""
    try:
        with path.open("rb") as file, np.load(file) as saved:
            return [
                Anchor(settings, saved[f"anchor_{n}"], saved[f"momentum_{n}"], int(saved[f"version_{n}"]))
                for n in range(len(settings.lengths))
            ]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error!r:.100}); restore it, or use a new --workdir") from error


def write_anchors(path: Path, anchors: Sequence[Anchor]) -> None:
    """Replace the file of the anchors."""
    arrays: dict[str, Any] = {}
    for n, anchor in enumerate(anchors):
        one = {"anchor": anchor.vector, "momentum": anchor.momentum, "version": anchor.version}
        arrays |= {f"{name}_{n}": np.asarray(value) for name, value in one.items()}
    temporary = path.with_name(f"{path.name}.tmp")
    with files.naming(path), temporary.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(path)


class OuterActor:
    """The actor. Its methods run one at a time, except while they wait."""

    def __init__(self, settings: OuterSettings, folder: Path, initial: Sequence[Vector]) -> None:
        """Continue the server in a folder, or begin one there with these anchors."""
        jax.config.update("jax_platforms", "cpu")  # the devices belong to the workers
        self._folder, anchors, table = folder, [Anchor(settings, vector) for vector in initial], []
        folder.mkdir(exist_ok=True)
        if (folder / ANCHORS).exists():
            anchors = read_anchors(folder / ANCHORS, settings)
            rows = read_contributions(folder / TABLE) if (folder / TABLE).exists() else []
            # The rows of a round are written before its anchor.
            table = [row for row in rows if row.fragment < 0 or row.got <= anchors[row.fragment].version]
        write_rows(folder / TABLE, table)
        write_anchors(folder / ANCHORS, anchors)
        began = time.monotonic() - max((row.seconds for row in table), default=0.0)
        self._server = OuterServer(settings, anchors, table, began)
        self._num_written, self._versions = len(table), [anchor.version for anchor in anchors]
        self._watch: asyncio.Task[None] | None = None

    def place(self) -> tuple[OuterSettings, Path]:
        """Return the settings and the folder."""
        return self._server.settings, self._folder

    async def join(self, worker: int, step: int | None, read: int) -> Joined:
        """See `OuterServer.join`."""
        joined = self._server.join(worker, step, read, time.monotonic())
        self._write()
        self._watch = self._watch or asyncio.create_task(self._look_for_silence())
        return joined

    async def exchange(self, worker: int, sent: Difference) -> OuterAnswer:
        """Take a difference, and return the anchor when its round is closed."""
        self._server.offer(worker, sent, time.monotonic())
        self._write()
        while (found := self._server.answer(worker, sent.start, sent.fragment, sent.step)) is None:
            await asyncio.sleep(ROUND_POLL_SECONDS)
        return found

    async def alive(self, worker: int, start: int, num_rows: int | None) -> tuple[int, list[Contribution]]:
        """Note that a member lives. Return the number of rows, and those from `num_rows` on that are announced."""
        self._server.alive(worker, start, time.monotonic())
        table = self._server.table
        new = [] if num_rows is None else table[num_rows:]
        return len(table), [row for row in new if row.event in ANNOUNCED and row.fragment <= 0]

    async def leave(self, worker: int, start: int, fragment: int, step: int) -> bool:
        """End the membership of a run, and soon this actor, if it was the last one. See `OuterServer.leave`."""
        is_answered = self._server.leave(worker, start, time.monotonic(), fragment, step)
        self._write()
        return is_answered

    async def _look_for_silence(self) -> None:
        """Stop waiting for silent members, and end this process when there are none."""
        had_members, patience = time.monotonic(), LINGER_SECONDS
        try:
            while (now := time.monotonic()) < had_members + patience:
                self._server.tick(now)
                self._write()
                if not self._server.is_empty:
                    had_members = now
                is_silent = self._server.table[-1].event == OuterEvent.SILENT
                patience = self._server.settings.silence_seconds if is_silent else LINGER_SECONDS
                await asyncio.sleep(ROUND_POLL_SECONDS)
        except OSError:  # the table cannot be written, and nobody else would stop waiting for silent members
            ray_cluster.end_actor()
            raise
        ray_cluster.end_actor()

    def _write(self) -> None:
        rows = self._server.table[self._num_written :]
        versions = [anchor.version for anchor in self._server.anchors]
        if rows:
            append_rows(self._folder / TABLE, rows)
            self._num_written += len(rows)
        if versions != self._versions:
            write_anchors(self._folder / ANCHORS, self._server.anchors)
            self._versions = versions


class RayLink:
    """The connection of a worker to the actor. See `OuterLink`."""

    def __init__(self, details: OuterDetails, workdir: Path) -> None:
        """Join the Ray cluster. Raises UserError if none answers at config.outer.address."""
        self._details, self._folder = details, workdir.resolve() / "outer"
        self._ray = ray_cluster.connect("outer.address", details.address, 0)
        self._actor: Any = None
        self._answer: Any = None  # reference to the answer to the last difference
        self._start, self._has_left = 0, threading.Event()

    def join(self, step: int | None, read: int, initial: Sequence[Vector]) -> Joined:
        """See OuterLink. Raises UserError or TrainingError if the server is that of another run."""
        is_announced = False
        while not Interrupt.is_requested():
            self._actor = self._find(initial)
            if self._actor is not None:
                try:
                    self._check_place()
                    joined: Joined = self._ray.get(self._actor.join.remote(self._details.worker, step, read))
                    break
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except self._ray.exceptions.RayActorError as error:  # it has ended meanwhile
                    if getattr(error, "actor_init_failed", False):
                        reason = str(error).strip().splitlines()[-1]
                        raise TrainingError(f"the server of the outer step does not start: {reason}") from error
            if not is_announced:
                name = f"config.outer.name={self._details.name}"
                print(f"outer     waits for worker 0 at {self._details.address}, with {name}", flush=True)
                is_announced = True
            time.sleep(RETRY_SECONDS)
        else:
            raise Stopped("stopped while waiting for worker 0, before the first step")
        self._start = joined.start
        threading.Thread(target=self._beat, name="outer", daemon=True).start()
        atexit.register(self.leave)
        newest = max(answer.version for answer in joined.anchors)
        print(f"outer     worker {self._details.worker} joined at step {joined.step}, {newest} rounds", flush=True)
        return joined

    def _find(self, initial: Sequence[Vector]) -> Any:
        """Return the actor; None if there is none and this is not worker 0."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._details.worker:
            try:
                return self._ray.get_actor(SERVER_NAME, namespace=self._details.name)
            except ValueError:
                return None
        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        named = {"name": SERVER_NAME, "namespace": self._details.name, "lifetime": "detached", "get_if_exists": True}
        options = self._ray.remote(OuterActor).options(num_cpus=0, max_restarts=0, scheduling_strategy=here, **named)
        return options.remote(self._details.settings, self._folder, initial)

    def _check_place(self) -> None:
        """Raise UserError if the server is that of another run, or the settings differ."""
        settings, folder = self._ray.get(self._actor.place.remote())
        name = f"config.outer.name is {self._details.name!r}"
        if self._details.worker == 0 and folder != self._folder:
            raise UserError(
                f"{name}, which the run in {folder.parent} uses, until all of its workers "
                "have left or are silent; it must be the name of this run alone"
            )
        for key, value in self._details.settings._asdict().items():
            if value != (other := getattr(settings, key)):
                what = WHAT.get(key, f"config.outer.{key}")
                raise UserError(f"{name}, a run of another config: {what} is {value} here and must be {other}")

    def offer(self, difference: Difference) -> None:
        """See OuterLink."""
        self._answer = self._actor.exchange.remote(self._details.worker, difference)

    def result(self, fragment: int, step: int) -> OuterAnswer | None:
        """See OuterLink. Raises TrainingError if the server has ended, or another process has taken the place."""
        exceptions, is_answered = self._ray.exceptions, False
        while True:
            try:
                if Interrupt.is_requested() and not is_answered:
                    is_answered = self._leave(fragment, step)
                    if not is_answered:
                        return None
                return self._ray.get(self._answer, timeout=STOP_SECONDS)
            except exceptions.GetTimeoutError:
                continue
            except exceptions.RayTaskError as error:
                raise error.cause from error
            except exceptions.RayActorError as error:
                raise TrainingError(
                    "the server of the outer step has ended; start worker 0 again, then this worker, with the same "
                    "commands"
                ) from error

    def leave(self) -> None:
        """See OuterLink."""
        if not self._has_left.is_set():
            with contextlib.suppress(self._ray.exceptions.RayActorError):  # it has ended, and with it the membership
                self._leave(0, 0)

    def _leave(self, fragment: int, step: int) -> bool:
        """Leave, and return whether there was an answer to the difference of `step` before."""
        self._has_left.set()
        return self._ray.get(self._actor.leave.remote(self._details.worker, self._start, fragment, step))

    def _beat(self) -> None:
        """Send heartbeats, and print what the others have done since."""
        num_rows: int | None = None
        while not self._has_left.wait(self._details.settings.silence_seconds / BEATS):
            beat = self._actor.alive.remote(self._details.worker, self._start, num_rows)
            try:
                num_rows, rows = self._ray.get(beat)
            except self._ray.exceptions.RayActorError:
                return  # the next difference reports it
            for row in rows:
                print_from_thread(f"outer     {ANNOUNCED[row.event].format_map(row._asdict())}")
