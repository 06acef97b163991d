"""The optimizer step of what a device holds: by kind of device, as layers differ between them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import step as steps
from jaxpar.pipeline.executor.packing import Packed
from jaxpar.pipeline.executor.state import PackedState, StagedState
from jaxpar.state import State
from jaxpar.step import Metrics
from jaxpar.tasks import Sums

ArrayName = tuple[str, str]  # layer and name of an array of the model


class StageUpdate:
    """For use inside `shard_map`. Parameters and gradients are packed.

    Attributes:
      copied: arrays that several devices hold, as layers on each are tied to them.
    """

    def __init__(self, staged: StagedState, device: jax.Array):
        """device: number of this one on the stage axis."""
        self._problem, stages = staged.problem, staged.stages
        self._params, self._optimizer = staged.params.packing, staged.optimizer.packing
        self._copies = [{(tie.source, tie.source_name) for tie in stages.copies(d)} for d in stages.examples]
        self._kind = jnp.asarray(stages.kinds)[device]
        self.copied: list[ArrayName] = sorted(set().union(*self._copies))

    def part(self, array: ArrayName, grads: Packed) -> jax.Array:
        """This device's part of the gradient of an array; zeros where it does not hold it."""
        layer, name = array

        def of_kind(kind: int, grads: Packed) -> jax.Array:
            held = self._params.unpack(kind, grads)
            return held[layer][name] if name in held.get(layer, ()) else jnp.zeros_like(self._shape(array))

        return self._switch(of_kind, grads)

    def replace(self, array: ArrayName, grads: Packed, total: jax.Array) -> Packed:
        """The gradients with another one for an array, where the device holds it."""
        layer, name = array

        def of_kind(kind: int, grads: Packed, total: jax.Array) -> Packed:
            held = self._params.unpack(kind, grads)
            if name not in held.get(layer, ()):
                return grads
            return self._params.pack(kind, {**held, layer: {**held[layer], name: total}})

        return self._switch(of_kind, grads, total)

    def squares(self, grads: Packed) -> jax.Array:
        """The sum of squares of the gradients, without those of copies: so devices' sums make that of all."""

        def of_kind(kind: int, grads: Packed) -> jax.Array:
            leaves = jax.tree_util.tree_leaves_with_path(self._params.unpack(kind, grads))
            own = [leaf for path, leaf in leaves if (path[0].key, path[1].key) not in self._copies[kind]]
            return sum((jnp.sum(jnp.square(leaf)) for leaf in own), jnp.zeros(()))

        return self._switch(of_kind, grads)

    def __call__(
        self, state: PackedState, grads: Packed, sums: Sums, grad_norm: jax.Array
    ) -> tuple[PackedState, Metrics]:
        """One optimizer step; sums and grad_norm: of all layers and the global batch."""
        params, optimizer = self._params, self._optimizer

        def of_kind(kind: int, state: PackedState, grads: Packed) -> tuple[PackedState, Metrics]:
            held = State(
                state.step, state.key, params.unpack(kind, state.params), optimizer.unpack(kind, state.optimizer)
            )
            held, metrics = steps.update(self._problem, held, params.unpack(kind, grads), sums, grad_norm)
            packed = params.pack(kind, held.params), optimizer.pack(kind, held.optimizer)
            return PackedState(held.step, held.key, *packed), metrics

        return self._switch(of_kind, state, grads)

    def _shape(self, array: ArrayName) -> jax.ShapeDtypeStruct:
        return self._problem.model.shapes[array[0]][array[1]]

    def _switch(self, of_kind: Callable[..., Any], *operands: Any) -> Any:
        kinds = range(len(self._copies))
        return jax.lax.switch(self._kind, [partial(of_kind, kind) for kind in kinds], *operands)
