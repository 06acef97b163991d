"""Models whose scans over layers scatter the gradient of a layer while they compute the one before (ZeRO, stage 2).

Otherwise a scan returns the gradients of all its layers at its end: a device then holds all of them, and has nothing
left to compute while they are sent.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.layout import Tree
from jaxpar.models.makers import LayerParams
from jaxpar.models.model import Activations, Batch, Layer, Model, Params


class LayerScatter(NamedTuple):
    """Scatters the gradients of a layer in the backward pass, and those outside of scans at its end."""

    at_end: Callable[[Tree], Tree]  # gradients -> the shards of the sum over replicas
    shards: Callable[[Tree], Tree]  # arrays -> the shards of this replica
    pack: Callable[[Tree, Tree], Tree]  # (shapes of the arrays; shards of them) -> the shards as they are sent
    # (the shapes; the arrays in any dtypes; packed shards) -> the arrays, whose gradient is that of the shards
    read: Callable[[Tree, Tree, Tree], Tree]


class Scattered(NamedTuple):
    """The arrays of a layer, and shards whose gradient is this replica's part of theirs. Their values are not read."""

    whole: Tree
    shards: Tree


class ScatteringModel(Model):
    """A model that takes `Scattered` parameters of the layers that it scans."""

    scatter: LayerScatter

    def pack(
        self, params: Params, layers: Sequence[Layer], x: Activations, batch: Batch, keys_B: jax.Array | None
    ) -> list[Tree]:
        """Return the arrays and the packed shards of each layer of a scan."""

        def packed(layer: Layer, stored: Any) -> Scattered:
            whole = jax.lax.stop_gradient(self.narrowed(stored.whole, layer, x, batch, keys_B))
            return Scattered(whole, self.scatter.pack(layer.shapes, stored.shards))

        return [packed(layer, params[layer.name]) for layer in layers]

    def read(self, layer: Layer, stored: Tree, *_: Any, packed: bool) -> LayerParams:
        """Return the arrays of a layer."""
        return self.scatter.read(layer.shapes, *stored) if packed else stored

    def differentiated(self, params: Params) -> Params:
        """Return parameters with the shards of which the gradient is computed."""

        def scattered(name: str) -> Any:
            shards = jax.eval_shape(self.scatter.shards, self.shapes[name])
            return Scattered(params[name], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shards))

        return params | {name: scattered(name) for name in self.scanned}

    def shards(self, grads: Params) -> Params:
        """Return the shards of a gradient of `differentiated` parameters."""
        done: dict[str, Any] = {name: grads[name] for name in self.scanned}
        others = self.scatter.at_end(self.as_stored({name: grads[name] for name in grads if name not in done}))
        return {name: done[name].shards if name in done else others[name] for name in grads}


def can_scatter(model: Model) -> bool:
    """Return whether a scan can scatter the gradients of its layers: those that share an array need the whole sum."""
    in_runs = {model.layers[number].name for run in model.runs if len(run) > 1 for number in run}
    return not any(tie.source in in_runs for tie in model.ties)


def scattering(model: Model, scatter: LayerScatter) -> ScatteringModel:
    """Return the same model, which scatters the gradients of the layers that it scans."""
    return model.as_kind(ScatteringModel, scatter=scatter)
