"""Emulated training of a swarm: peers on the devices of this machine repeat the actions of a simulated run.

One step:

1. Do the actions of the step in their order: forward and backward passes, messages, failures (emulated.py).
2. Add up the gradients that the peers of each stage have accumulated.
3. Take the optimizer step for all stages together, as `single` does, so that it clips by the norm over all layers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpar import step as steps
from jaxpar.layout import Tree
from jaxpar.models.model import Params
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.state import State
from jaxpar.step import Metrics
from jaxpar.swarm.emulated import EmulatedStep
from jaxpar.swarm.ledger import FORWARD_PASS
from jaxpar.swarm.programs import SwarmPrograms, by_layer, split_params
from jaxpar.swarm.record import SwarmAction


class SwarmState(NamedTuple):
    """State between steps, on the first device.

    Attributes:
      step: the step, on the host.
      state: the newest state.
      older: the weights before the last update, which the next step reads; None without delayed updates.
    """

    step: int
    state: State
    older: Params | None


class SwarmExecutor:
    """Executes the steps of a simulated run."""

    def __init__(
        self,
        programs: SwarmPrograms,
        stages: Stages,
        actions_of: Callable[[int], Sequence[SwarmAction]],
        num_microbatches: int,
        devices: Sequence[jax.Device],
    ):
        """Take the devices of the peers, round-robin, of which the first one holds the state.

        actions_of: step -> its actions.
        """
        self._programs, self._stages, self._actions_of = programs, stages, actions_of
        self._num_microbatches, self._devices = num_microbatches, devices

    def step(self, before: SwarmState, batch: Mapping[str, np.ndarray]) -> tuple[SwarmState, Metrics]:
        """Take a step. batch: on the host."""
        number, state, older = before
        scalars = self._programs.begin(state.key, np.int32(number), batch["weights"])
        microbatches = [
            {name: x[i :: self._num_microbatches] for name, x in batch.items()} for i in range(self._num_microbatches)
        ]
        params = state.params if older is None else older
        step = EmulatedStep(self._programs, self._stages, self._devices, params, scalars, microbatches)
        for action in self._actions_of(number):
            step.act(action)
        gradients, sums = step.totals()
        del step  # with the weights on the devices, which the update donates
        after, metrics = self._programs.update(*split_params(state), gradients, sums)
        return SwarmState(number + 1, after, older if older is None else state.params), metrics

    def lower(self, like: State, batch: Mapping[str, Any]) -> list[jax.stages.Lowered]:
        """Lower the programs of a step, each on every device that can run it. like and batch: shapes."""
        stages = self._stages
        share: Any = steps.abstract_share(batch, self._num_microbatches)
        programs = self._programs.of_stages(share).programs
        lowered, gradients, sums = [], [], None
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        pack = partial(jax.eval_shape, self._programs.messages.pack)
        for kind, program in enumerate(programs):
            inputs = program.inputs._replace(microbatch=share, key=like.key, weight=scalar)
            inputs = inputs._replace(x=pack(inputs.x), dy=pack(inputs.dy))
            for device in self._devices:
                placed = on_device(inputs, device)
                lowered.append(self._programs.forward.lower(kind, placed._replace(dy=None)))
                lowered.append(self._programs.backward.lower(kind, placed))
            sums = program.outputs[FORWARD_PASS].sums or sums
        for stage, kind in enumerate(stages.kinds):
            gradients.append(by_layer(stages, programs[kind].inputs.params, stage))
        first = partial(on_device, device=self._devices[0])
        arguments = *first(split_params(like)), first(gradients), first([sums] * self._num_microbatches)
        return [*lowered, self._programs.update.lower(*arguments)]


def on_device(tree: Tree, device: jax.Device) -> Tree:
    """Return abstract arrays on a device."""
    return steps.with_shardings(tree, SingleDeviceSharding(device))
