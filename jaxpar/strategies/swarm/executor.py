"""Emulated training of a swarm: peers on the devices of this machine repeat the actions of a simulated run.

A step does its actions in their order, adds up the gradients that the peers of each stage have accumulated, and takes
the optimizer step for all stages together, as `single` does, so that it clips by the norm over all layers.

Each peer holds what its machine would hold: messages and gradients, until the update of the step. A peer that fails
loses them. A pass reads only what its peer holds, so it fails with a KeyError if the simulated run lacks a message. The
weights of a step, which all peers of a stage have downloaded, come from the state on the first device: the copy outside
the swarm.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpar.core import step as steps
from jaxpar.core.state import State
from jaxpar.core.step import Metrics
from jaxpar.layout import Tree
from jaxpar.models.model import Params
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS, OUTPUT_GRADIENT, STAGE_INPUT
from jaxpar.strategies.swarm.record import FAILURE, RECEIVE, SwarmAction
from jaxpar.strategies.swarm.stage_passes import SwarmPrograms, by_layer, microbatches_of, stage_params
from jaxpar.tasks import Sums


@dataclass
class EmulatedPeer:
    """The values that a peer holds until the update."""

    # by (STAGE_INPUT or OUTPUT_GRADIENT, stage, microbatch)
    messages: dict[tuple[int, int, int], Tree] = field(default_factory=dict)
    gradients: dict[int, Params] = field(default_factory=dict)  # accumulated gradients by stage
    # the microbatches that the accumulated gradients contain, by stage
    counted: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class EmulatedStep:
    """A step on the peers."""

    programs: SwarmPrograms
    stages: Stages
    devices: Sequence[jax.Device]
    params: Params  # the weights that the step reads
    scalars: tuple[jax.Array, ...]  # from `SwarmPrograms.begin`
    microbatches: Sequence[Mapping[str, np.ndarray]]
    peers: defaultdict[int, EmulatedPeer] = field(default_factory=lambda: defaultdict(EmulatedPeer))
    # the sums of each microbatch that has passed the last stage. They are sent to the trainer, and never lost.
    sums: dict[int, Sums] = field(default_factory=dict)
    placed: dict[tuple[str, int, jax.Device], Any] = field(default_factory=dict)

    def act(self, action: SwarmAction) -> None:
        """Do one action."""
        if action.kind == FAILURE:
            self.peers.pop(action.peer, None)
        elif action.kind in RECEIVE:
            key = (RECEIVE.index(action.kind), action.stage, action.microbatch)
            message = self.peers[action.source].messages[key]
            self.peers[action.peer].messages[key] = jax.device_put(message, self._device(action.peer))
        else:
            self._compute(action)

    def totals(self) -> tuple[list[Params], list[Sums]]:
        """Return the gradient of each stage, by layer, and the sums of each microbatch, on the first device."""
        gradients, everything = [], [*range(len(self.microbatches))]
        for stage in range(self.stages.num_stages):
            contributors = [peer for _, peer in sorted(self.peers.items()) if stage in peer.gradients]
            counted = sorted(number for peer in contributors for number in peer.counted[stage])
            assert counted == everything, (stage, counted)
            first, *others = (jax.device_put(peer.gradients[stage], self.devices[0]) for peer in contributors)
            gradients.append(by_layer(self.stages, reduce(self.programs.add, others, first), stage))
        return gradients, jax.device_put([self.sums[number] for number in everything], self.devices[0])

    def _compute(self, action: SwarmAction) -> None:
        """Compute a pass."""
        phase, microbatch, stage, peer, *_ = action
        held, device = self.peers[peer], self._device(peer)
        is_last, is_backward = stage == self.stages.num_stages - 1, phase == BACKWARD_PASS
        scalars = self._place("scalars", 0, device, lambda: self.scalars)
        params = self._place("params", stage, device, lambda: stage_params(self.stages, self.params, stage))
        examples = self._place("microbatch", microbatch, device, lambda: self.microbatches[microbatch])
        x = held.messages[STAGE_INPUT, stage, microbatch] if stage else None
        dy = held.messages[OUTPUT_GRADIENT, stage, microbatch] if is_backward and not is_last else None
        outputs: Any = self.programs.compute(phase, stage, params, examples, scalars, x, dy)
        if is_backward and stage > 0:
            held.messages[OUTPUT_GRADIENT, stage - 1, microbatch] = outputs.dx
        elif not is_backward and is_last:
            self.sums[microbatch] = outputs.sums
        elif not is_backward:
            held.messages[STAGE_INPUT, stage + 1, microbatch] = outputs.y
        if is_backward and action.is_counted:
            before = held.gradients.get(stage)
            held.gradients[stage] = outputs.dparams if before is None else self.programs.add(before, outputs.dparams)
            held.counted[stage].append(microbatch)

    def _device(self, peer: int) -> jax.Device:
        return self.devices[peer % len(self.devices)]

    def _place(self, name: str, number: int, device: jax.Device, make: Callable[[], Tree]) -> Any:
        """Return a value on a device, where it remains until the end of the step."""
        key = (name, number, device)
        if key not in self.placed:
            self.placed[key] = jax.device_put(make(), device)
        return self.placed[key]


class SwarmState(NamedTuple):
    """State between steps, on the first device."""

    step: int  # the step, on the host
    state: State  # the newest state
    older: Params | None  # the weights before the last update, which the next step reads; None without delayed updates


@dataclass
class SwarmExecutor:
    """Executes the steps of a simulated run."""

    programs: SwarmPrograms
    stages: Stages
    actions_of: Callable[[int], Sequence[SwarmAction]]  # step -> its actions
    num_microbatches: int
    devices: Sequence[jax.Device]  # of the peers, round-robin; the first one holds the state

    def step(self, before: SwarmState, batch: Mapping[str, np.ndarray]) -> tuple[SwarmState, Metrics]:
        """Take a step. batch: on the host."""
        number, state, older = before
        scalars = self.programs.begin(state, number, batch["weights"])
        microbatches = microbatches_of(batch, self.num_microbatches)
        params = state.params if older is None else older
        step = EmulatedStep(self.programs, self.stages, self.devices, params, scalars, microbatches)
        for action in self.actions_of(number):
            step.act(action)
        gradients, sums = step.totals()
        del step  # with the weights on the devices, which the update donates
        after, metrics = self.programs.update(*split_params(state), gradients, sums)
        return SwarmState(number + 1, after, older if older is None else state.params), metrics

    def lower(self, like: State, batch: Mapping[str, Any]) -> list[jax.stages.Lowered]:
        """Lower the programs of a step, each on every device that can run it. like and batch: shapes."""
        share: Any = steps.abstract_share(batch, self.num_microbatches)
        programs = self.programs.of_stages(share).programs
        lowered, sums = [], None
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        pack = partial(jax.eval_shape, self.programs.messages.pack)
        for kind, program in enumerate(programs):
            inputs = program.inputs._replace(microbatch=share, key=like.key, weight=scalar)
            inputs = inputs._replace(x=pack(inputs.x), dy=pack(inputs.dy))
            for device in self.devices:
                placed = on_device(inputs, device)
                lowered.append(self.programs.passes[FORWARD_PASS].lower(kind, placed._replace(dy=None)))
                lowered.append(self.programs.passes[BACKWARD_PASS].lower(kind, placed))
            sums = program.outputs[FORWARD_PASS].sums or sums
        kinds = enumerate(self.stages.kinds)
        gradients = [by_layer(self.stages, programs[kind].inputs.params, stage) for stage, kind in kinds]
        rest = [gradients, [sums] * self.num_microbatches]
        arguments = [on_device(one, self.devices[0]) for one in (*split_params(like), *rest)]
        return [*lowered, self.programs.update.lower(*arguments)]


def split_params(state: State) -> tuple[Params, State]:
    """Return the parameters, and the state without them."""
    rest: Any = state._asdict() | {"params": None}
    return state.params, State(**rest)


def on_device(tree: Tree, device: jax.Device) -> Tree:
    """Return abstract arrays on a device."""
    return steps.with_shardings(tree, SingleDeviceSharding(device))
