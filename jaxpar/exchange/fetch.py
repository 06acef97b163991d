"""Models whose layers fetch their arrays from the shards of all replicas when they are computed (ZeRO, stage 3)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxpar.layout import Tree
from jaxpar.models.makers import LayerParams
from jaxpar.models.model import Activations, Batch, Layer, Model, Params
from jaxpar.models.remat import is_computed


def _as_stored(_shapes: Tree, stored: Tree) -> Tree:
    return stored


class Fetch(NamedTuple):
    """A function from the arrays of a layer as its devices store them to whole arrays."""

    # (shapes of the arrays, with the dtypes in which the layer reads them; their packed form) -> the arrays
    unpack: Callable[[Tree, Tree], Tree]
    # (the same shapes; the arrays as they are stored) -> their packed form. A scan over layers packs all of them before
    # it: XLA then scatters the gradients of a layer, which are packed too, while it computes the next one.
    pack: Callable[[Tree, Tree], Tree] = _as_stored
    num_bytes: int = 0  # size limit of a message

    def __call__(self, shapes: Tree, stored: Tree) -> Tree:
        """Return the arrays of these shapes."""
        return self.unpack(shapes, self.pack(shapes, stored))


AS_STORED = Fetch(_as_stored)  # computes like a model that fetches, from whole arrays


class FetchedModel(Model):
    """A model whose layers fetch their arrays, in the backward pass again. To generate texts, it needs whole ones."""

    fetch: Fetch
    whole: Model  # the same model for whole parameters

    def inputs(self, batch: Batch) -> list[Activations]:
        """Return the inputs of the layers, for which nothing need be fetched."""
        return self.whole.inputs(batch)

    def pack(
        self, params: Params, layers: Sequence[Layer], x: Activations, batch: Batch, keys_B: jax.Array | None
    ) -> list[Tree]:
        """Return the packed parameters of each layer of a scan."""
        shapes = self.shapes_read(layers[0], x, batch, keys_B)
        return [self.fetch.pack(shapes, params[layer.name]) for layer in layers]

    def read(
        self, layer: Layer, stored: Tree, x: Activations, batch: Batch, keys_B: jax.Array | None, *, packed: bool
    ) -> LayerParams:
        """Return the arrays of a layer."""
        fetch = self.fetch.unpack if packed else self.fetch
        return fetch(self.shapes_read(layer, x, batch, keys_B), stored)

    def policy(self, layer: Layer) -> Any:
        """Return the policy that saves computed values, unless the model recomputes more."""
        return super().policy(layer) or is_computed


def fetched(model: Model, fetch: Fetch) -> FetchedModel:
    """Return the same model for parameters that `fetch` reads."""
    return model.as_kind(FetchedModel, fetch=fetch, whole=model)
