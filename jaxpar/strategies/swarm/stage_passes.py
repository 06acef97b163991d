"""Passes of a stage as compiled programs, whose inputs and outputs are messages, and the update of all stages.

Messages are activations and their gradients, in 8 bits or as they are. Every result depends only on the weights and the
data of a microbatch, and not on the peer that computes it.
"""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core import step as steps
from jaxpar.core.loss_scale import LossScale, find_scale
from jaxpar.core.state import State, nbytes
from jaxpar.core.step import Metrics, Problem
from jaxpar.exchange.compress import Compressor, absmax_int8
from jaxpar.models.model import Activations, Batch, Params
from jaxpar.strategies.pipeline.executor.stage_programs import StageInputs, StageOutputs, StagePrograms
from jaxpar.strategies.pipeline.executor.stages import Stages, sum_over_stages
from jaxpar.strategies.placement import product_options
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS
from jaxpar.tasks import Sums

MESSAGE_BLOCK = 4096  # elements that share a scale (Ryabinin et al., "SWARM Parallelism", 2023, section 4.3)


class MessageFormat(NamedTuple):
    """The form in which activations and their gradients are sent."""

    compressor: Compressor | None  # compressor of each array; None: arrays are sent as they are

    def pack(self, tree: Activations | None) -> Any:
        """Return the message with the arrays of a tree. Jittable, like `unpack`."""
        if self.compressor is None or tree is None:
            return tree
        encode = self.compressor.encode
        return [encode(x.astype(jnp.float32).reshape(-1), ())[0] for x in jax.tree.leaves(tree)]

    def unpack(self, message: Any, like: Activations | None) -> Activations | None:
        """Return the arrays of a message. like: their shapes and dtypes."""
        if self.compressor is None or message is None:
            return message
        leaves, structure = jax.tree.flatten(like)
        arrays = [
            self.compressor.decode(payload, x.size).reshape(x.shape).astype(x.dtype)
            for payload, x in zip(message, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, arrays)

    def nbytes(self, like: Activations) -> int:
        """Return the bytes of a message with arrays of these shapes and dtypes."""
        if self.compressor is None:
            return nbytes(like)
        return sum(self.compressor.nbytes(x.size) for x in jax.tree.leaves(like))


MESSAGE_FORMATS = {"none": MessageFormat(None), "int8": MessageFormat(absmax_int8(MESSAGE_BLOCK))}


class SwarmPrograms:
    """The programs of a swarm, compiled when they are first called on a device.

    Stages that differ only in their position share the programs of their kind.
    """

    def __init__(self, problem: Problem, stages: Stages, messages: MessageFormat, *, keeps_params: bool):
        """keeps_params: whether the old parameters are still needed after an update."""
        self._problem, self._stages, self.messages = problem, stages, messages
        # by FORWARD_PASS and BACKWARD_PASS, (kind, inputs) -> outputs; x, y, dy and dx are messages
        self.passes = [
            jax.jit(partial(self._pass, phase), static_argnums=0, compiler_options=product_options(problem.model))
            for phase in (FORWARD_PASS, BACKWARD_PASS)
        ]
        self.add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
        self._scaling = find_scale(jax.eval_shape(problem.optimizer.init, problem.model.shapes))
        self._begin = jax.jit(_begin)
        # (params, state without params, gradients by stage, sums by microbatch) -> state, metrics. Donates the state.
        self.update = jax.jit(self._update, donate_argnums=1 if keeps_params else (0, 1))

    def begin(self, state: State, step: int, weights: np.ndarray) -> tuple[jax.Array, ...]:
        """Return what all passes of a step read: data of its dropout key, divisor of the loss, and its scale, if any.

        state: before the step; weights: of the examples.
        """
        scalars = self._begin(state.key, np.int32(step), weights, find_scale(state.optimizer))
        return tuple(jax.tree.leaves(scalars))

    def of_stages(self, microbatch: Batch) -> StagePrograms:
        """Return the stage programs for microbatches of these shapes."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        scale: Any = None if self._scaling is None else self._scaling.scale
        return StagePrograms(self._stages, steps.abstract(microbatch), key, scale, num_phases=2, remat="none")

    def compute(
        self, phase: int, stage: int, params: Params, microbatch: Batch, scalars: Sequence[Any], x: Any, dy: Any
    ) -> StageOutputs:
        """Compute a pass of a stage. scalars: from `begin`; x, dy: the messages that it reads, or None."""
        key, weight, *scale = scalars
        inputs = StageInputs(params, microbatch, key, self._stages.shifts[stage, 0], weight, x, dy, *scale)
        return self.passes[phase](self._stages.kinds[stage], inputs)

    def _pass(self, phase: int, kind: int, inputs: StageInputs) -> StageOutputs:
        """Compute a pass. A backward pass computes the inside of the stage again."""
        programs, pack, unpack = self.of_stages(inputs.microbatch), self.messages.pack, self.messages.unpack
        like, key = programs.programs[kind].inputs, jax.random.wrap_key_data(inputs.key)
        inputs = inputs._replace(key=key, x=unpack(inputs.x, like.x), dy=unpack(inputs.dy, like.dy))
        outputs, saved = programs.run(kind, FORWARD_PASS, inputs, {})
        if phase == BACKWARD_PASS:
            outputs, _ = programs.run(kind, BACKWARD_PASS, inputs, saved)
        return outputs._replace(y=pack(outputs.y), dx=pack(outputs.dx))

    def _update(
        self, params: Params, rest: State, gradients: Sequence[Params], sums: Sequence[Sums]
    ) -> tuple[State, Metrics]:
        total, added = sum_over_stages(gradients), reduce(partial(jax.tree.map, jnp.add), sums)
        return steps.update(self._problem, rest._replace(params=params), total, added)


def _begin(key: jax.Array, step: jax.Array, weights: jax.Array, scaling: LossScale | None) -> Any:
    scale = None if scaling is None else jnp.copy(scaling.scale)  # the update donates its own
    return jax.random.key_data(steps.dropout_key(key, step)), steps.batch_weight({"weights": weights}), scale


def microbatches_of(batch: Mapping[str, np.ndarray], number: int) -> list[dict[str, np.ndarray]]:
    """Return the microbatches of a batch on the host: each takes every `number`-th example."""
    return [{name: x[i::number] for name, x in batch.items()} for i in range(number)]


def stage_params(stages: Stages, params: Params, stage: int) -> Params:
    """Return the parameters of a stage, including copies of arrays tied to it, named as in the program of its kind."""
    selected = stages.select(params, stage)
    return {name: selected[layer] for name, layer in stages.local_names(stage).items()}


def by_layer(stages: Stages, gradient: Params, stage: int) -> Params:
    """Return the gradient of a stage by the names of its layers. The inverse of `stage_params`."""
    names = stages.local_names(stage)
    return {names[name]: arrays for name, arrays in gradient.items()}
