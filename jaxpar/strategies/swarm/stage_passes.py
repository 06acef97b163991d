"""Compiled programs of a swarm: passes of a stage, whose inputs and outputs are messages, and the update of all stages.

Every result depends only on the weights and the data of a microbatch, and not on the peer that computes it.
"""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core import step as steps
from jaxpar.core.state import State
from jaxpar.core.step import Metrics, Problem
from jaxpar.models.model import Batch, Params
from jaxpar.strategies.pipeline.executor.stage_programs import StageInputs, StageOutputs, StagePrograms
from jaxpar.strategies.pipeline.executor.stages import Stages, sum_over_stages
from jaxpar.strategies.swarm.messages import MessageFormat
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS
from jaxpar.tasks import Sums


class SwarmPrograms:
    """The programs of a swarm, compiled when they are first called on a device.

    Stages that differ only in their position share the programs of their kind.

    Attributes:
      messages: form of activations and their gradients between peers.
      forward: (kind, inputs) -> outputs; x and y are messages.
      backward: (kind, inputs) -> outputs. Computes the inside of the stage again; x, dy and dx are messages.
      add: (tree, tree) -> their sum; the first one is donated.
      begin: (run's key, step, weights of the examples) -> data of the step's dropout key, divisor of the loss.
      update: (params, state without params, gradients by stage, sums by microbatch) -> state, metrics. Donates the
        state.
    """

    def __init__(self, problem: Problem, stages: Stages, messages: MessageFormat, *, keeps_params: bool):
        """keeps_params: whether the old parameters are still needed after an update."""
        self._problem, self._stages, self.messages = problem, stages, messages
        self.forward = jax.jit(self._forward, static_argnums=0)
        self.backward = jax.jit(self._backward, static_argnums=0)
        self.add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
        self.begin = jax.jit(_begin)
        self.update = jax.jit(self._update, donate_argnums=1 if keeps_params else (0, 1))

    def of_stages(self, microbatch: Batch) -> StagePrograms:
        """Return the stage programs for microbatches of these shapes."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return StagePrograms(self._stages, steps.abstract(microbatch), key, num_phases=2, remat="none")

    def _unpacked(self, programs: StagePrograms, kind: int, inputs: StageInputs) -> StageInputs:
        like, unpack = programs.programs[kind].inputs, self.messages.unpack
        key = jax.random.wrap_key_data(inputs.key)
        return inputs._replace(key=key, x=unpack(inputs.x, like.x), dy=unpack(inputs.dy, like.dy))

    def _forward(self, kind: int, inputs: StageInputs) -> StageOutputs:
        programs = self.of_stages(inputs.microbatch)
        outputs, _ = programs.run(kind, FORWARD_PASS, self._unpacked(programs, kind, inputs), {})
        return outputs._replace(y=self.messages.pack(outputs.y))

    def _backward(self, kind: int, inputs: StageInputs) -> StageOutputs:
        programs = self.of_stages(inputs.microbatch)
        unpacked = self._unpacked(programs, kind, inputs)
        _, saved = programs.run(kind, FORWARD_PASS, unpacked, {})
        outputs, _ = programs.run(kind, BACKWARD_PASS, unpacked, saved)
        return outputs._replace(dx=self.messages.pack(outputs.dx))

    def _update(
        self, params: Params, rest: State, gradients: Sequence[Params], sums: Sequence[Sums]
    ) -> tuple[State, Metrics]:
        state, total = rest._replace(params=params), sum_over_stages(gradients)
        added = reduce(partial(jax.tree.map, jnp.add), sums)
        return steps.update(self._problem, state, total, added)


def microbatches_of(batch: Mapping[str, np.ndarray], number: int) -> list[dict[str, np.ndarray]]:
    """Return the microbatches of a batch on the host: each takes every `number`-th example."""
    return [{name: x[i::number] for name, x in batch.items()} for i in range(number)]


def split_params(state: State) -> tuple[Params, State]:
    """Return the parameters, and the state without them."""
    rest: Any = state._asdict() | {"params": None}
    return state.params, State(**rest)


def _begin(key: jax.Array, step: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.random.key_data(steps.dropout_key(key, step)), steps.batch_weight({"weights": weights})


def stage_params(stages: Stages, params: Params, stage: int) -> Params:
    """Return the parameters of a stage, including copies of arrays tied to it, named as in the program of its kind."""
    selected = stages.select(params, stage)
    return {name: selected[layer] for name, layer in stages.local_names(stage).items()}


def by_layer(stages: Stages, gradient: Params, stage: int) -> Params:
    """Return the gradient of a stage by the names of its layers. The inverse of `stage_params`."""
    names = stages.local_names(stage)
    return {names[name]: arrays for name, arrays in gradient.items()}
