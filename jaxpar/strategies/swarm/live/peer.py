"""A peer of a live swarm: computes the passes of its stage, averages gradients, and takes the optimizer step.

`StagePeer` is the class of a Ray actor, whose methods the trainer calls one at a time and in order. It does not use Ray
itself: Ray passes the arrays that another peer returned, without the trainer, as arguments. Every call has a `Ticket`.
With it, the peer recognizes calls of a trainer that has been replaced, calls from before it was given up, and that its
accumulated gradients are void.

All that a peer receives from other peers are lists of NumPy arrays, whose number, shapes, dtypes and values it checks
before it uses them. It reports a fault instead of a result.
"""

import os
import socket
import time
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Problem
from jaxpar.models.model import Params
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS, OUTPUT_GRADIENT, STAGE_INPUT
from jaxpar.strategies.swarm.stage_passes import MessageFormat, SwarmPrograms, by_layer, stage_params

SUPERSEDED, STALE = "superseded", "stale"  # faults: the trainer has been replaced; the call is of an earlier generation
MALFORMED, NONFINITE_VALUES = "malformed", "nonfinite"  # faults of what was received
Arrays = list[np.ndarray]
Examples = Mapping[str, Any]  # arrays of a microbatch by name, on the host


class PeerPlace(NamedTuple):
    """The place of a peer."""

    node: str  # Ray's identifier of its machine
    host: str  # name of the machine
    pid: int


class SwarmSpec(NamedTuple):
    """The problem of a run, its stages, and the form of messages, from which a peer builds its programs."""

    problem: Problem
    stages: Stages
    messages: MessageFormat


class Ticket(NamedTuple):
    """Identifies a call."""

    trainer: str  # the trainer that calls; a peer obeys the one that attached it last
    generation: int  # number of times that the trainer has given up this peer. With a new one, the peer starts over.
    step: int  # the step. With a new one, the accumulated gradients are void.


class PeerAnswer(NamedTuple):
    """The small part of the result of a call, which the trainer reads."""

    fault: str = ""  # why there is no result: SUPERSEDED, STALE, MALFORMED or NONFINITE_VALUES; empty if there is one
    # what was wrong: STAGE_INPUT, OUTPUT_GRADIENT, or the position of a peer in an averaging; -1 if nothing
    source: int = -1
    seconds: float = 0.0  # the time that the peer measured for a pass
    # leaves of the metric sums of a microbatch, from the forward pass of the last stage; otherwise empty
    sums: Sequence[np.ndarray] = ()


class StepShapes(NamedTuple):
    """Expected shapes and dtypes in a step with microbatches of one shape."""

    key: Hashable  # identifies the shapes of the microbatches
    # of the arrays of a message, by (STAGE_INPUT or OUTPUT_GRADIENT, stage)
    messages: Mapping[tuple[int, int], Sequence[Any]]
    sums: Sequence[Any]  # of the metric sums of a microbatch
    sizes: Sequence[int]  # by stage, the number of parameters, with copies of tied arrays


def find_fault(received: Any, like: Sequence[Any]) -> str:
    """Return "" if a received value is a list of NumPy arrays like these, else MALFORMED or NONFINITE_VALUES."""
    if type(received) is not list or len(received) != len(like):
        return MALFORMED
    for array, expected in zip(received, like, strict=True):
        if type(array) is not np.ndarray or array.shape != expected.shape or array.dtype != expected.dtype:
            return MALFORMED
    # Also of bfloat16 and the other types of ml_dtypes.
    is_finite = all(array.dtype.kind in "biu" or np.isfinite(array).all() for array in received)
    return "" if is_finite else NONFINITE_VALUES


def find_fault_of_shard(received: Any, size: int) -> str:
    """Return the fault of a shard of a gradient with this number of elements, as `find_fault`."""
    return find_fault(received, [jax.ShapeDtypeStruct((size,), np.float32)])


class StagePeer:
    """A peer. Its methods return a `PeerAnswer`, and arrays for other peers."""

    def __init__(self, node: str, cpus: float, gpus: float, cache: str = "") -> None:
        """Configure JAX for these resources, before it touches a device.

        node: Ray's identifier of the machine; cache: folder of compiled programs; empty: none.
        """
        self._node = node
        if not gpus and int(cpus) == 1:
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
        if 0 < gpus < 1:
            os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(0.75 * gpus)
        jax.config.update("jax_platforms", "cuda" if gpus else "cpu")
        if cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

    def attach(self, trainer: str, spec: SwarmSpec) -> PeerPlace:
        """Take a new run: everything of the one before is void."""
        self._spec = spec
        self._programs = SwarmPrograms(spec.problem, spec.stages, spec.messages, keeps_params=False)
        self._update = jax.jit(self._update_stage, donate_argnums=0)
        self._ticket = Ticket(trainer, -1, -1)  # the newest one
        self._gradients: dict[int, Params] = {}  # accumulated with this ticket, by stage
        self._likes: dict[Any, tuple[Any, Any]] = {}  # expected messages by kind of stage and shapes
        self._stage = -1
        jax.devices()  # starts JAX, and fails without the platform of the settings
        return PeerPlace(self._node, socket.gethostname(), os.getpid())

    def serve(self, ticket: Ticket, stage: int, tree: Canonical, microbatch: Examples, scalars: Arrays) -> PeerAnswer:
        """Load the state of a stage, and compile its programs for microbatches of this shape.

        tree: its part of the canonical state: step, key, params and optimizer; scalars: as in `compute`.
        """
        if fault := self._refuse(ticket):
            return PeerAnswer(fault)
        like = jax.eval_shape(self._spec.problem.optimizer.init, tree["params"])
        optimizer = serialization.from_state_dict(like, tree["optimizer"])
        state = State(tree["step"], tree["key"], tree["params"], optimizer)
        self._state = jax.tree.map(partial(jnp.array, copy=True), state)  # not memory of the object store
        self._stage, self._params = stage, stage_params(self._spec.stages, self._state.params, stage)
        # Compute both passes, a sum and an update, so that they are compiled.
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._inputs_like(microbatch))
        outputs: list[Any] = [
            self._programs.compute(phase, stage, self._params, microbatch, scalars, zeros[STAGE_INPUT], dy)
            for phase, dy in ((FORWARD_PASS, None), (BACKWARD_PASS, zeros[OUTPUT_GRADIENT]))
        ]
        copy, gradient = jax.tree.map(partial(jnp.array, copy=True), (self._state, self._state.params))
        outputs.append(self._update(copy, self._programs.add(gradient, self._state.params), np.float32(0)))
        jax.block_until_ready(outputs)
        return PeerAnswer()

    def compute(
        self,
        ticket: Ticket,
        phase: int,
        stage: int,
        microbatch: Examples,
        scalars: Arrays,
        is_counted: bool,
        x: Arrays | None = None,
        dy: Arrays | None = None,
    ) -> tuple[PeerAnswer, Arrays]:
        """Compute a pass, and return the message for the stage after it, or before it in a backward pass.

        phase: FORWARD_PASS or BACKWARD_PASS; scalars: from `SwarmPrograms.begin`;
        is_counted: whether to accumulate the gradient of the parameters; x: the message with the input of the stage,
        None at stage 0; dy: that with the gradient of its output, None in a forward pass and at the last stage.
        """
        begin, is_backward = time.perf_counter(), phase == BACKWARD_PASS
        if fault := self._refuse(ticket, stage):
            return PeerAnswer(fault), []
        messages: dict[int, Any] = {STAGE_INPUT: x, OUTPUT_GRADIENT: dy}
        received: dict[int, Any] = {STAGE_INPUT: None, OUTPUT_GRADIENT: None}
        for value in (STAGE_INPUT, OUTPUT_GRADIENT) if is_backward else (STAGE_INPUT,):
            leaves, structure = jax.tree.flatten(self._inputs_like(microbatch)[value])
            if messages[value] is not None or leaves:
                if kind := find_fault(messages[value], leaves):
                    return PeerAnswer(kind, value), []
                received[value] = jax.tree.unflatten(structure, messages[value])
        x, dy = received[STAGE_INPUT], received[OUTPUT_GRADIENT]
        outputs = self._programs.compute(phase, stage, self._params, microbatch, scalars, x, dy)
        if is_counted:
            gradients, gradient = self._gradients, by_layer(self._spec.stages, outputs.dparams, stage)
            gradients[stage] = self._programs.add(gradients[stage], gradient) if stage in gradients else gradient
        message = (outputs.dx if stage else None) if is_backward else outputs.y
        sums, message = jax.device_get((jax.tree.leaves(outputs.sums), jax.tree.leaves(message)))
        jax.block_until_ready(self._gradients.get(stage))
        return PeerAnswer(seconds=time.perf_counter() - begin, sums=sums), message

    def publish(self, ticket: Ticket, stage: int, number: int) -> tuple[Any, ...]:
        """Return the accumulated gradient of a stage in `number` shards, each as a list of one array."""
        if fault := self._refuse(ticket):
            return (PeerAnswer(fault), *([] for _ in range(number)))
        flat = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(self._gradients[stage])])
        return (PeerAnswer(), *([shard] for shard in np.array_split(flat, number)))

    def reduce(self, ticket: Ticket, size: int, *shards: Arrays) -> tuple[PeerAnswer, Arrays]:
        """Return the sum of one shard of each peer, in their order. size: the number of elements."""
        if fault := self._refuse(ticket):
            return PeerAnswer(fault), []
        for source, shard in enumerate(shards):
            if kind := find_fault_of_shard(shard, size):
                return PeerAnswer(kind, source), []
        total = np.array(shards[0][0])
        for shard in shards[1:]:
            total += shard[0]
        return PeerAnswer(), [total]

    def update(self, ticket: Ticket, norm: np.ndarray, tied: Params, *totals: Arrays) -> PeerAnswer:
        """Take the optimizer step of the stage that this peer serves.

        norm: of the gradient of all stages; tied: gradients of arrays that several stages share, from all of them
        together; totals: the shards of the total gradient of this stage, in order.
        """
        if fault := self._refuse(ticket):
            return PeerAnswer(fault)
        like = self._state.params
        size = states.nbytes(like) // np.dtype(np.float32).itemsize
        for source, (shard, length) in enumerate(zip(totals, shard_sizes(size, len(totals)), strict=True)):
            if kind := find_fault_of_shard(shard, length):
                return PeerAnswer(kind, source)
        gradient = joined_shards(totals, like)
        for layer, arrays in tied.items():
            gradient[layer] = {**gradient[layer], **arrays}
        # A peer does not take part in skipped steps. So passes read the scale of the loss from the scalars instead.
        state = self._state._replace(step=jnp.int32(ticket.step))
        self._state = jax.block_until_ready(self._update(state, gradient, norm))
        self._params = stage_params(self._spec.stages, self._state.params, self._stage)
        return PeerAnswer()

    def answer(self, ticket: Ticket) -> PeerAnswer:
        """Answer, so that the trainer knows that this peer lives."""
        return PeerAnswer(self._refuse(ticket))

    def read_state(self) -> tuple[int, Canonical]:
        """Return the stage that this peer serves, and its part of the canonical state."""
        return self._stage, jax.device_get(states.to_canonical(self._state))

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _update_stage(self, state: State, gradient: Params, norm: jax.Array) -> State:
        return steps.update(self._spec.problem, state, gradient, self._spec.problem.task.zeros(), norm)[0]

    def _refuse(self, ticket: Ticket, stage: int = -1) -> str:
        """Return the fault of a call that must not be computed, and start over if the ticket demands it."""
        if ticket.trainer != self._ticket.trainer:
            return SUPERSEDED
        if ticket.generation < self._ticket.generation or stage not in (-1, self._stage):
            return STALE
        if ticket != self._ticket:
            self._ticket, self._gradients = ticket, {}
        return ""

    def _inputs_like(self, microbatch: Examples) -> tuple[Any, Any]:
        """Return the expected messages with the input of the stage and the gradient of its output."""
        kind = self._spec.stages.kinds[self._stage]
        key = (kind, *((name, x.shape, x.dtype) for name, x in sorted(microbatch.items())))
        if key not in self._likes:
            inputs, pack = self._programs.of_stages(microbatch).programs[kind].inputs, self._spec.messages.pack
            self._likes[key] = jax.eval_shape(pack, inputs.x), jax.eval_shape(pack, inputs.dy)
        return self._likes[key]


def shard_sizes(size: int, number: int) -> list[int]:
    """Return the sizes of `number` shards of an array of `size` elements, as in `np.array_split`."""
    return [size // number + (shard < size % number) for shard in range(number)]


def joined_shards(shards: Sequence[Arrays], like: Params) -> Params:
    """Return the tree of float32 arrays whose leaves, one after the other, are in these shards. like: their shapes."""
    leaves, structure = jax.tree.flatten(like)
    flat = np.concatenate([shard[0] for shard in shards])
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = [part.reshape(leaf.shape) for part, leaf in zip(np.split(flat, ends), leaves, strict=True)]
    return jax.tree.unflatten(structure, parts)
