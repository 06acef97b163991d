"""A worker of an outer step: any strategy, whose parameters meet those of the other workers every few steps.

After a step that is due, the worker sends the difference between the anchor of a fragment and its own parameters, and
receives the new anchor, which replaces its parameters. Its optimizer state is its own. With `overlap_steps`, it trains
on while the message is in flight, and then mixes the anchor with its parameters (Douillard et al., "Streaming DiLoCo",
2025, algorithm 2). After the last step, all fragments are sent, one after the other, and nothing overlaps.

A run that is to stop while it waits leaves the others, and saves a state whose message has no answer. It is sent again
when the run continues.

A worker that has not joined, such as that of an audit or a certificate, takes the steps of its strategy alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxpar.core.state import Canonical
from jaxpar.core.step import Metrics, Problem
from jaxpar.errors import TrainingError, UserError, format_bytes, format_count
from jaxpar.exchange.compress import to_bytes
from jaxpar.launch.signals import Stopped
from jaxpar.strategies.outer.options import OuterDetails, OuterSettings, abstract_params
from jaxpar.strategies.outer.server import Difference, Joined, OuterAnswer, Vector
from jaxpar.strategies.strategy import Strategy


class OuterLink(Protocol):
    """The connection of a worker to the server."""

    def join(self, step: int | None, read: int, initial: Sequence[Vector]) -> Joined:
        """Become a member, as `OuterServer.join` describes. initial: the first anchors, if there is no server yet."""

    def offer(self, difference: Difference) -> None:
        """Send a difference, without waiting for its round."""

    def result(self, fragment: int, step: int) -> OuterAnswer | None:
        """Wait for the anchor for the difference that was sent after `step` steps.

        None: the run is to stop, and has left the others before there was an answer.
        """

    def leave(self) -> None:
        """End the membership."""


class HeldAnchor(NamedTuple):
    """An anchor of a worker, on the host."""

    vector: Vector
    version: int
    residual: Vector  # what compression has lost so far; empty without compression


class OuterState(NamedTuple):
    """State of a worker."""

    inner: Any  # state of its strategy
    step: int
    start: int = 0  # number of the start that made it
    anchors: tuple[HeldAnchor, ...] = ()  # of each fragment; none before the run begins
    sent: Difference | None = None  # the one that was sent, and for which no anchor has arrived


class FragmentVectors:
    """Converts between canonical parameters and the vectors of their fragments."""

    def __init__(self, problem: Problem, fragments: Sequence[Sequence[str]]):
        """fragments: names of the layers of each fragment."""
        shapes = abstract_params(problem)
        self._shapes = [{layer: shapes[layer] for layer in layers} for layers in fragments]

    def vector(self, params: Canonical, fragment: int) -> Vector:
        """Return a copy of the parameters of a fragment."""
        leaves = jax.tree.leaves({layer: params[layer] for layer in self._shapes[fragment]})
        return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.device_get(leaves)])

    def layers(self, vector: Vector, fragment: int) -> Canonical:
        """Return copies of the arrays of a fragment, by layer."""
        leaves, structure = jax.tree.flatten(self._shapes[fragment])
        parts = np.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
        arrays = [np.array(x, leaf.dtype).reshape(leaf.shape) for x, leaf in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(structure, arrays)


class OuterWorker:
    """The functions of a strategy with an outer step."""

    def __init__(self, strategy: Strategy[Any], problem: Problem, connect: Callable[[Path], OuterLink]):
        """strategy: built from a plan with an outer step. connect: makes the connection of a run in this workdir."""
        details: Any = strategy.plan.outer
        self._details: OuterDetails = details
        self._settings: OuterSettings = details.settings
        self._strategy, self._connect = strategy, connect
        self._vectors = FragmentVectors(problem, details.fragments)
        self._link: OuterLink | None = None
        self._encode = jax.jit(self._compressed)
        self._waited, self._num_sent, self._sent_bytes, self._received_bytes = 0.0, 0, 0, 0

    def init(self, key: jax.Array) -> OuterState:
        """Return the state at step 0. Parameters are equal on all workers, dropout is not."""
        tree = self._strategy.to_canonical(self._strategy.init(key))
        own = jax.random.fold_in(jax.random.wrap_key_data(tree["key"]), self._details.worker)
        return self.from_canonical({**tree, "key": jax.random.key_data(own)})

    def begin(self, state: OuterState, step: int, workdir: Path) -> tuple[OuterState, int]:
        """Join the other workers. Raises UserError for a checkpoint without the anchors of the worker."""
        is_new = not state.anchors
        if is_new and step:
            raise UserError(
                f"config.outer.worker is {self._details.worker}, whose checkpoint of step {step} has no anchors for "
                "the changed settings of this run; use the settings of the checkpoint, or a new --workdir"
            )
        params, fragments = self._params(state.inner), range(len(self._details.fragments))
        self._link = link = self._connect(workdir)
        initial = [self._vectors.vector(params, fragment) for fragment in fragments]
        joined = link.join(None if is_new else step, state.start, initial)
        if is_new:
            anchors = [
                HeldAnchor(np.array(anchor), version, self._no_residual(len(anchor)))
                for version, anchor in joined.anchors
            ]
            inner = self._changed(state.inner, {n: one.vector for n, one in enumerate(anchors)}, joined.step)
            state = state._replace(inner=inner, anchors=tuple(anchors))
        state = state._replace(step=joined.step, start=joined.start)
        if state.sent:  # again, as the message can be lost with the server or this process
            sent = state.sent._replace(start=joined.start)
            self._offer(sent)
            state = self._receive_due(state._replace(sent=sent))
            if self._is_due(state):
                raise Stopped("stopped while waiting for the other workers, before the first step")
        return state, joined.step

    def step(self, state: OuterState, batch: Any) -> tuple[OuterState, Metrics]:
        """Take a step of the strategy, and send and receive what is due after it."""
        inner, metrics = self._strategy.step(state.inner, batch)
        state, s = state._replace(inner=inner, step=state.step + 1), self._settings
        if self._link is None:
            return state, metrics
        state = self._receive_due(state)
        for fragment in s.due(state.step):
            state = self._receive_due(self._send(state, fragment))
        return state, metrics

    def _is_due(self, state: OuterState) -> bool:
        """Whether the run waits for an anchor after this step."""
        return state.sent is not None and state.step >= self._settings.received_at(state.sent.step)

    def _receive_due(self, state: OuterState) -> OuterState:
        return self._receive(state) if self._is_due(state) else state

    def _send(self, state: OuterState, fragment: int) -> OuterState:
        """Send a difference. Raises TrainingError for parameters that are not finite, which all workers would get."""
        held = state.anchors[fragment]
        own = self._vectors.vector(self._params(state.inner), fragment)
        if not np.isfinite(own).all():
            raise TrainingError(
                f"worker {self._details.worker} has parameters that are not finite after step {state.step}; they are "
                "not sent to the others"
            )
        payload, residual = self._encode(held.vector, own, held.residual)
        sent = Difference(state.start, state.step, held.version, np.asarray(payload), fragment)
        self._offer(sent)
        return self._with_anchor(state, fragment, held._replace(residual=np.asarray(residual)))._replace(sent=sent)

    def _offer(self, sent: Difference) -> None:
        assert self._link
        self._link.offer(sent)
        self._num_sent += 1
        self._sent_bytes += len(sent.payload)

    def _receive(self, state: OuterState) -> OuterState:
        """Wait for the anchor. If the run stops before it arrives, the state stays as it is.

        Raises Stopped after the last step, which has to be complete.
        """
        assert self._link
        assert state.sent
        fragment, step = state.sent.fragment, state.sent.step
        overlaps = self._settings.received_at(step) > step
        mix = self._settings.mix if overlaps else 0.0  # share of the local parameters in the new ones
        own = self._vectors.vector(self._params(state.inner), fragment)  # waits for the step
        begin = time.perf_counter()
        answer = self._link.result(fragment, step)
        self._waited += time.perf_counter() - begin
        if answer is None and state.step == self._settings.num_steps:
            raise Stopped(
                "stopped while waiting for the last averages; the same command continues from the last checkpoint"
            )
        if answer is None:
            return state
        version, anchor = answer.version, np.array(answer.anchor)
        self._received_bytes += anchor.nbytes
        params = np.float32(mix) * own + np.float32(1 - mix) * anchor if mix else anchor
        state = state._replace(inner=self._changed(state.inner, {fragment: params}), sent=None)
        return self._with_anchor(state, fragment, state.anchors[fragment]._replace(vector=anchor, version=version))

    def _compressed(self, anchor: Any, own: Any, residual: Any) -> tuple[jax.Array, Any]:
        """Return the payload of a difference as bytes, and the new residual."""
        state = {"residual": residual, "code": ()} if len(residual) else ()
        payload, state = self._settings.compressor.encode(anchor - own, state)
        return to_bytes(payload), state["residual"] if len(residual) else residual

    def _no_residual(self, length: int) -> Vector:
        return np.zeros(0 if self._settings.compression == "none" else length, np.float32)

    def _with_anchor(self, state: OuterState, fragment: int, held: HeldAnchor) -> OuterState:
        anchors = (*state.anchors[:fragment], held, *state.anchors[fragment + 1 :])
        return state._replace(anchors=anchors)

    def _params(self, inner: Any) -> Canonical:
        return self._strategy.to_canonical(inner)["params"]

    def _changed(self, inner: Any, vectors: Mapping[int, Vector], step: int | None = None) -> Any:
        """Return the state of the strategy with other parameters of these fragments, and at another step."""
        tree, private = self._strategy.to_canonical(inner), self._strategy.to_private(inner)
        params = dict(tree["params"])
        for fragment, vector in vectors.items():
            params |= self._vectors.layers(vector, fragment)
        at = tree["step"] if step is None else np.asarray(step, np.int32)
        return self._strategy.from_canonical({**tree, "params": params, "step": at}, private)

    def from_canonical(self, tree: Canonical, private: Canonical | None = None) -> OuterState:
        """Return the state of a canonical one. Without private state, it has no anchors."""
        private = private or {}
        state = OuterState(self._strategy.from_canonical(tree, private.get("inner", {})), int(tree["step"]))
        if not (outer := private.get("outer")):
            return state
        anchors = [outer["anchors"][str(number)] for number in range(len(outer["anchors"]))]
        held = [
            HeldAnchor(one["vector"], int(one["version"]), one.get("residual", self._no_residual(0))) for one in anchors
        ]
        sent = None
        if one := outer.get("sent"):
            fragment = int(one["fragment"])
            sent = Difference(int(outer["start"]), int(one["step"]), held[fragment].version, one["payload"], fragment)
        return state._replace(start=int(outer["start"]), anchors=tuple(held), sent=sent)

    def to_private(self, state: OuterState) -> Canonical:
        """Return the private state of the strategy, the anchors, the residuals and what was sent."""
        inner = self._strategy.to_private(state.inner)
        private: Canonical = {"inner": inner} if inner else {}
        if not state.anchors:
            return private
        anchors: Canonical = {}
        for number, one in enumerate(state.anchors):
            anchors[str(number)] = {"vector": one.vector, "version": np.asarray(one.version, np.int32)}
            if len(one.residual):
                anchors[str(number)]["residual"] = one.residual
        outer: Canonical = {"start": np.asarray(state.start, np.int32), "anchors": anchors}
        if state.sent:
            numbers = {"fragment": state.sent.fragment, "step": state.sent.step}
            outer["sent"] = {name: np.asarray(one, np.int32) for name, one in numbers.items()}
            outer["sent"]["payload"] = state.sent.payload
        return {**private, "outer": outer}

    def report(self, state: OuterState, workdir: Path) -> dict[str, Any]:
        """Leave the other workers, and return what this process has sent, and how long it waited for anchors."""
        if self._link:
            self._link.leave()
        messages = format_count(self._num_sent, "message")
        waited = f"waited {self._waited:.1f} s for anchors"
        print(f"outer     sent {messages} of {format_bytes(self._sent_bytes)} together, {waited}", flush=True)
        outer = {
            "messages": self._num_sent,
            "sent_bytes": self._sent_bytes,
            "received_bytes": self._received_bytes,
            "waited_seconds": round(self._waited, 3),
        }
        return {**self._strategy.report(state.inner, workdir), "outer": outer}


def as_worker(strategy: Strategy[Any], problem: Problem, connect: Callable[[Path], OuterLink]) -> Strategy[OuterState]:
    """Return a strategy with the outer step of its plan. See `OuterWorker`."""
    worker = OuterWorker(strategy, problem, connect)
    return strategy._replace(
        init=worker.init,
        step=worker.step,
        evaluate=lambda state, batch: strategy.evaluate(state.inner, batch),
        to_canonical=lambda state: strategy.to_canonical(state.inner),
        from_canonical=worker.from_canonical,
        to_private=worker.to_private,
        num_in_flight=lambda state: strategy.num_in_flight(state.inner),
        drain=lambda state: strategy.drain(state.inner),
        begin=worker.begin,
        report=worker.report,
    )
