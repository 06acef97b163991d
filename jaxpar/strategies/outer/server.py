"""The server of an outer step, a state machine without clock and network: anchors, rounds and members.

Each fragment of the parameters has an anchor, and a version, which is the number of its closed rounds. A round closes
when every member has contributed to it. The anchor then moves by the mean of the differences (anchor minus the
parameters of a worker), with Nesterov momentum:

    m = momentum * m + mean,    anchor = anchor - lr * (mean + momentum * m)

which is DiLoCo (Douillard et al., 2023, algorithm 1), and with lr 1 and momentum 0 the mean of the parameters, local
SGD. Differences are added in the order of their workers, in float32, so the order in which they arrive does not matter.

A difference counts once, in the round that is open when it arrives. A worker of which nothing was heard for a while is
no longer waited for, until it contributes again. For a worker and fragment, there are at most two differences in
memory, one that waits for its round and one that a later start has sent again, and one answer.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpar.errors import TrainingError
from jaxpar.strategies.outer.options import OuterSettings
from jaxpar.strategies.outer.table import Contribution, OuterEvent

Vector = np.ndarray  # float32 [L], the parameters of a fragment, or a difference


class OuterAnswer(NamedTuple):
    """An anchor that a worker receives."""

    version: int
    anchor: Vector


class Joined(NamedTuple):
    """The place of a run that begins or continues."""

    start: int  # number of this start of the worker
    step: int  # completed steps
    anchors: Sequence[OuterAnswer]  # of each fragment


class Difference(NamedTuple):
    """A difference that a worker sends."""

    start: int  # number of its start
    step: int  # completed steps
    read: int  # version of the anchor from which it was measured
    payload: np.ndarray  # uint8, the bytes of the compressed vector
    fragment: int = 0


class Anchor:
    """The anchor of a fragment, which closing a round replaces by a new array."""

    def __init__(self, settings: OuterSettings, vector: Vector, momentum: Vector | None = None, version: int = 0):
        self._settings = settings
        self.vector: Vector = np.array(vector, np.float32)
        self.momentum: Vector = np.zeros_like(self.vector) if momentum is None else momentum
        self.version = version

    def close(self, differences: Mapping[int, Difference]) -> None:
        """Close a round. differences: by worker."""
        s, total = self._settings, np.zeros_like(self.vector)
        for worker in sorted(differences):
            payload = jnp.asarray(differences[worker].payload)
            total += np.asarray(s.compressor.decode_bytes(payload, len(self.vector)))
        mean, momentum = total / np.float32(len(differences)), np.float32(s.momentum)
        self.momentum = momentum * self.momentum + mean
        self.vector = self.vector - np.float32(s.lr) * (mean + momentum * self.momentum)
        self.version += 1

    @property
    def answer(self) -> OuterAnswer:
        """The newest version."""
        return OuterAnswer(self.version, self.vector)


class Member(NamedTuple):
    """A worker for which rounds wait."""

    start: int
    heard: float  # when the last message came


class OuterServer:
    """Mutable state of an outer step. Times are in seconds, on any clock."""

    def __init__(
        self, settings: OuterSettings, anchors: Sequence[Anchor], table: Sequence[Contribution] = (), began: float = 0.0
    ):
        """table: rows of rounds that have been closed. began: when the server started, on the clock of the others."""
        self.settings, self.anchors, self.table, self._began = settings, anchors, list(table), began
        self._members: dict[int, Member] = {}
        self._silent: dict[int, int] = {}  # starts of the silent workers
        self._open: list[dict[int, Difference]] = [{} for _ in anchors]  # the open round of each fragment, by worker
        self._repeats: dict[tuple[int, int], Difference] = {}  # by worker and fragment: sent again in an open round
        # By worker and fragment, with the step of the difference: answers that nobody has received
        self._answers: dict[tuple[int, int], tuple[int, OuterAnswer]] = {}
        self._starts: dict[int, int] = {}  # number of starts of each worker
        self._counted: dict[tuple[int, int], int] = {}  # by worker and fragment: step of the last one that counted
        for row in table:
            if row.event in (OuterEvent.JOIN, OuterEvent.RESUME):
                self._starts[row.worker] = row.start + 1
            elif row.event == OuterEvent.COUNTED:
                self._counted[row.worker, row.fragment] = row.step

    @property
    def is_empty(self) -> bool:
        """Whether there is no member."""
        return not self._members

    def join(self, worker: int, step: int | None, read: int, now: float) -> Joined:
        """Make a run a member, and return its place.

        step: of the checkpoint from which it continues, which the start number `read` wrote; None: it begins, at the
        latest step of a closed round. Raises TrainingError if there was no such start.
        """
        start, furthest = self._starts.get(worker, 0), max(self._counted.values(), default=0)
        if step is not None and read >= start:
            raise TrainingError(f"{self._stranger(worker)} start {read}, and the server knows {start} starts of it")
        self._starts[worker] = start + 1
        self._members[worker] = Member(start, now)
        self._silent.pop(worker, None)
        for fragment, anchor in enumerate(self.anchors):
            self._answers.pop((worker, fragment), None)
            self._repeats.pop((worker, fragment), None)
            if step is None:
                self._open[fragment].pop(worker, None)  # of a run whose state is lost
                self._add(OuterEvent.JOIN, worker, start, now, step=furthest, fragment=fragment, got=anchor.version)
        if step is not None:
            self._add(OuterEvent.RESUME, worker, start, now, step=step, read=read)
        self._close_rounds(now)
        return Joined(start, furthest if step is None else step, [anchor.answer for anchor in self.anchors])

    def offer(self, worker: int, difference: Difference, now: float) -> None:
        """Take a difference. Raises TrainingError if another process has taken its place, or it is of another run."""
        fragment = difference.fragment
        self._check_start(worker, difference.start)
        if difference.read > (version := self.anchors[fragment].version):
            raise TrainingError(f"{self._stranger(worker)} version {difference.read}, and the server has {version}")
        if worker not in self._members:
            self._silent.pop(worker, None)
            self._add(OuterEvent.RETURN, worker, difference.start, now, step=difference.step)
        self._members[worker] = Member(difference.start, now)
        waiting = self._open[fragment].get(worker)
        if difference.step <= self._counted.get((worker, fragment), -1):
            self._repeat(worker, difference, now)
        elif waiting is not None:
            assert waiting.step == difference.step, "a worker waits for its round before the next one"
            self._repeats[worker, fragment] = difference
        else:
            assert len(difference.payload) == self.settings.message_bytes[fragment]
            self._open[fragment][worker] = difference
        self._close_rounds(now)

    def answer(self, worker: int, start: int, fragment: int, step: int) -> OuterAnswer | None:
        """Return, once, the anchor for a difference; None if its round is open.

        Raises TrainingError if another process has taken the place of the worker.
        """
        self._check_start(worker, start)
        found = self._answers.get((worker, fragment))
        if found is None or found[0] != step:
            return None
        del self._answers[worker, fragment]
        return found[1]

    def alive(self, worker: int, start: int, now: float) -> None:
        """Note that a member lives."""
        if worker in self._members and self._members[worker].start == start:
            self._members[worker] = Member(start, now)

    def leave(self, worker: int, start: int, now: float, fragment: int = 0, step: int = 0) -> bool:
        """End the membership of a run, and return whether there was an answer to its difference of `step` before.

        What it has sent counts.
        """
        is_answered = self._counted.get((worker, fragment), -1) >= step
        member = self._members.get(worker)
        if start == (member.start if member else self._silent.get(worker)):
            self._members.pop(worker, None)
            self._silent.pop(worker, None)
            self._add(OuterEvent.LEAVE, worker, start, now)
            self._close_rounds(now)
        return is_answered

    def tick(self, now: float) -> None:
        """Stop waiting for silent members."""
        for worker, member in list(self._members.items()):
            if now - member.heard > self.settings.silence_seconds:
                del self._members[worker]
                self._silent[worker] = member.start
                self._add(OuterEvent.SILENT, worker, member.start, now)
        self._close_rounds(now)

    def _stranger(self, worker: int) -> str:
        return f"worker {worker} continues another training (use a new --workdir): its checkpoint is from"

    def _check_start(self, worker: int, start: int) -> None:
        if start != self._starts.get(worker, 0) - 1:
            raise TrainingError(f"another process has taken the place of worker {worker} (config.outer.worker)")

    def _close_rounds(self, now: float) -> None:
        for fragment, anchor in enumerate(self.anchors):
            waiting = self._open[fragment]
            is_early = not anchor.version and len(self._starts) < self.settings.min_workers
            if not waiting or is_early or not self._members.keys() <= waiting.keys():
                continue
            counted = anchor.version
            anchor.close(waiting)
            self._open[fragment] = {}
            for worker, one in sorted(waiting.items()):
                self._counted[worker, fragment] = one.step
                self._answers[worker, fragment] = one.step, anchor.answer
                self._add_difference(OuterEvent.COUNTED, worker, one, now, counted=counted, got=anchor.version)
                if again := self._repeats.pop((worker, fragment), None):
                    self._repeat(worker, again, now)

    def _repeat(self, worker: int, again: Difference, now: float) -> None:
        """Answer a difference that has been counted with the newest anchor."""
        anchor = self.anchors[again.fragment]
        self._answers[worker, again.fragment] = again.step, anchor.answer
        self._add_difference(OuterEvent.REPEATED, worker, again, now, got=anchor.version)

    def _add_difference(self, event: OuterEvent, worker: int, one: Difference, now: float, **columns: int) -> None:
        sent = {"step": one.step, "fragment": one.fragment, "read": one.read, "nbytes": len(one.payload)}
        self._add(event, worker, one.start, now, **sent, **columns)

    def _add(self, event: OuterEvent, worker: int, start: int, now: float, **columns: int) -> None:
        self.table.append(Contribution(now - self._began, event, worker, start, **columns))
