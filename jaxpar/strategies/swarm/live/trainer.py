"""Trains with a live swarm: the training step, and the copy of the state outside the swarm.

One step:

 1. The peers compute the passes of all microbatches, and average the gradients of each stage (step.py).
 2. The trainer reads the total gradients, and computes their norm over all stages. From here on, the step is decided:
    whoever fails now has lost nothing, because the trainer can complete it alone.
 3. Each peer takes the optimizer step of its stage. The trainer takes the same step for its copy of the whole state.
    Nobody waits: a peer computes its calls in order, so that its next pass reads the new weights.

A peer that joins, moves or returns loads its stage from the copy. If the loss or the gradient is not finite, no state
changes.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.models.model import Params
from jaxpar.strategies import ray_cluster
from jaxpar.strategies.pipeline.executor.stage_programs import StagePrograms
from jaxpar.strategies.pipeline.executor.stages import sum_over_stages
from jaxpar.strategies.swarm.executor import SwarmState
from jaxpar.strategies.swarm.live import cluster
from jaxpar.strategies.swarm.live.events import EventKind, LinePrinter, LiveEvent, PeerStatus, emit, listeners
from jaxpar.strategies.swarm.live.members import SUSPECTED, Members, StateSource
from jaxpar.strategies.swarm.live.peer import StepShapes, SwarmSpec, find_fault_of_shard, joined_shards, shard_sizes
from jaxpar.strategies.swarm.live.step import Averaging, Diverged, LiveStep
from jaxpar.strategies.swarm.options import LiveDetails
from jaxpar.strategies.swarm.progress import FORWARD_PASS, LOST, OUTPUT_GRADIENT, REPEATED, STAGE_INPUT
from jaxpar.strategies.swarm.stage_passes import SwarmPrograms, microbatches_of
from jaxpar.strategies.swarm.table import RoutingTable, write_routing
from jaxpar.tasks import Sums, mean_loss


@jax.jit
def _combined(gradients: Sequence[Params], sums: Sequence[Sums]) -> tuple[Params, Sums, jax.Array]:
    """Return the gradient of all layers, the metric sums of all microbatches, and the norm of the gradient."""
    total = sum_over_stages(gradients)
    return total, reduce(partial(jax.tree.map, jnp.add), sums), optax.tree.norm(total)


class LiveTrainer:
    """The trainer of a live swarm."""

    def __init__(self, details: LiveDetails, problem: Problem) -> None:
        """Join or start the Ray cluster of a run, and start its peers, without waiting for them.

        Raises UserError if no cluster answers at config.swarm.address, or it has room for fewer peers than stages.
        """
        if not listeners:  # otherwise it is they who show what happens
            listeners.append(LinePrinter())
        s, stages, work = details.settings, details.stages, (details.workload.forward, details.workload.backward)
        self._ray = ray_cluster.connect("swarm.address", s.address, math.ceil(int(s.peers) * s.peer_cpus))
        cluster.check_room(self._ray, s)
        self._spec, self._num_microbatches = SwarmSpec(problem, stages, details.messages), details.num_microbatches
        self.members = Members(self._ray, self._ray.put(self._spec), work, s, details.seed)
        self._programs = SwarmPrograms(problem, stages, details.messages, keeps_params=False)
        self._update = jax.jit(partial(steps.update, problem), donate_argnums=0)
        self._likes = [stages.select(problem.model.shapes, stage) for stage in range(stages.num_stages)]
        self._shapes: dict[Any, StepShapes] = {}
        self._compiled: set[Any] = set()
        self._newest: State | None = None
        self.num_steps = 0  # with an update, since the start
        self.members.gather()
        if not s.namespace:
            weakref.finalize(self, self.members.end_all)

    def report(self, workdir: Path) -> dict[str, Any]:
        """End the peers, write the routing table of this process's steps, and return the results of the run."""
        self.members.end_all()
        table = self.routing_table()
        write_routing(workdir / "routing.csv", table)
        lost, repeated = (int((table.outcome == outcome).sum()) for outcome in (LOST, REPEATED))
        return {**self.members.counts, "lost_passes": lost, "repeated_passes": repeated}

    def routing_table(self) -> RoutingTable:
        """Return the passes of all steps with an update since the trainer started, numbered from 0."""
        return self.members.engine.record.table(len(self._likes), self._num_microbatches, 0, self.num_steps)

    def step(self, before: SwarmState, batch: Mapping[str, np.ndarray]) -> tuple[SwarmState, Metrics]:
        """Take a step. batch: on the host. Raises TrainingError, see `Members.turn`."""
        number, state, _ = before
        members = self.members
        scalars = [np.asarray(one) for one in self._programs.begin(state, number, batch["weights"])]
        microbatches = microbatches_of(batch, self._num_microbatches)
        references = [self._ray.put(one) for one in microbatches]
        members.step_number = number
        members.calls.restart()
        members.source = source = StateSource(self._trees(state), references[0], scalars)
        if state is not self._newest:  # it is not the result of the step before, so the peers must load it
            self._newest = state
            members.distribute(source)
            members.begin_periods()
        expected = self._expected(microbatches[0])
        step = LiveStep(members, self.num_steps, expected, references, scalars, self._compiled)
        try:
            while True:
                members.turn()
                averaging = step.averaging
                if averaging and averaging.is_complete and (gradients := self._read(step, averaging)) is not None:
                    break
        except Diverged:
            return self._skip(before, step)
        finally:
            step.end()
        return self._apply(before, step, averaging, gradients)

    def _read(self, step: LiveStep, averaging: Averaging) -> list[Params] | None:
        """Return the total gradient of each stage, by layer; None if they must be computed again."""
        gradients = []
        for stage, (totals, peers) in enumerate(zip(averaging.totals, averaging.contributors, strict=True)):
            try:
                shards = [self._ray.get(total) for total in totals]
            except self._ray.exceptions.ObjectLostError:
                step.average_again()
                return None
            for peer, shard, size in zip(peers, shards, shard_sizes(step.shapes.sizes[stage], len(peers)), strict=True):
                if kind := find_fault_of_shard(shard, size):
                    step.blame_gradient(stage, peer, kind)
                    return None
            gradients.append(joined_shards(shards, self._likes[stage]))
        return gradients

    def _apply(
        self, before: SwarmState, step: LiveStep, averaging: Averaging, gradients: Sequence[Params]
    ) -> tuple[SwarmState, Metrics]:
        """Apply the total gradients, on the peers and to the copy."""
        members, stages = self.members, self._spec.stages
        for peer in step.suspects:
            members.give_up(peer, SUSPECTED, is_gone=True, is_hostile=True)
        structure = jax.tree.structure(self._spec.problem.task.zeros())
        sums = [jax.tree.unflatten(structure, step.sums[number]) for number in range(self._num_microbatches)]
        total, added, norm = _combined(gradients, sums)
        if np.isfinite(norm) and np.isfinite(added.loss):
            tied = jax.device_get([tied_gradients(stages, total, stage) for stage in range(stages.num_stages)])
            for peer, one in enumerate(members.peers):
                if one.status in (PeerStatus.LOADING, PeerStatus.SERVING):
                    stage = members.engine.swarm.stage[peer]
                    arguments = np.asarray(norm), tied[stage], *averaging.totals[stage]
                    members.call(peer, "update", *arguments, label=("update", stage))
        after = self._updated(before, total, added, norm)
        self.num_steps += 1
        loss = float(mean_loss(*jax.device_get((added.loss, added.weight))))
        emit(LiveEvent(EventKind.UPDATED, number=before.step, value=loss))
        return after

    def _skip(self, before: SwarmState, step: LiveStep) -> tuple[SwarmState, Metrics]:
        """End a step whose loss or gradient is not finite: no state changes."""
        self.members.engine.record.forget(step.number)
        for peer in step.suspects:
            self.members.clear(peer)
        nan = jnp.float32(jnp.nan)
        zeros = jax.tree.map(jnp.zeros_like, before.state.params)
        return self._updated(before, zeros, self._spec.problem.task.zeros()._replace(loss=nan), nan)

    def _updated(self, before: SwarmState, total: Params, sums: Sums, norm: jax.Array) -> tuple[SwarmState, Metrics]:
        """Take the optimizer step for the copy, which peers load from now on."""
        self._newest, metrics = self._update(before.state, total, sums, norm)
        assert self.members.source is not None
        self.members.source = self.members.source._replace(tree=self._trees(self._newest))
        return SwarmState(before.step + 1, self._newest, None), metrics

    def _trees(self, state: State) -> Callable[[int], Any]:
        """Return a reference to the part of a state by stage, copied to the object store when it is first needed."""
        stages, optimizer = self._spec.stages, self._spec.problem.optimizer

        @cache
        def tree(stage: int) -> Any:
            return self._ray.put(jax.device_get(stage_tree(stages, optimizer, states.to_canonical(state), stage)))

        return tree

    def _expected(self, microbatch: Mapping[str, Any]) -> StepShapes:
        """Return the shapes of what peers send for a microbatch like this."""
        key = tuple((name, x.shape, str(x.dtype)) for name, x in sorted(microbatch.items()))
        if key not in self._shapes:
            programs: StagePrograms = self._programs.of_stages(microbatch)
            messages: dict[tuple[int, int], Sequence[Any]] = {}
            sums: Sequence[Any] = []
            for stage, kind in enumerate(self._spec.stages.kinds):
                program = programs.programs[kind]
                for value, like in ((STAGE_INPUT, program.inputs.x), (OUTPUT_GRADIENT, program.inputs.dy)):
                    messages[value, stage] = jax.tree.leaves(jax.eval_shape(self._spec.messages.pack, like))
                sums = jax.tree.leaves(program.outputs[FORWARD_PASS].sums) or sums
            sizes = [states.nbytes(like) // np.dtype(np.float32).itemsize for like in self._likes]
            self._shapes[key] = StepShapes(key, messages, sums, sizes)
        return self._shapes[key]


def tied_gradients(stages: Any, total: Params, stage: int) -> Params:
    """Return the gradients of the arrays of a stage that other stages use, too."""
    tied: Params = {}
    held = [stages.select(total, other) for other in range(stages.num_stages)]
    for layer, arrays in held[stage].items():
        shared = {name for other, of_other in enumerate(held) if other != stage for name in of_other.get(layer, ())}
        if common := {name: arrays[name] for name in arrays if name in shared}:
            tied[layer] = common
    return tied


def stage_tree(stages: Any, optimizer: Any, tree: Canonical, stage: int) -> Canonical:
    """Return the part of a canonical state that the peers of a stage hold, with copies of tied arrays."""

    def picked(of_all: Any, like: Any) -> Any:
        return {key: picked(of_all[key], value) for key, value in like.items()} if isinstance(like, dict) else of_all

    params = stages.select(tree["params"], stage)
    like = serialization.to_state_dict(jax.eval_shape(optimizer.init, params))
    return tree | {"params": params, "optimizer": picked(tree["optimizer"], like)}
