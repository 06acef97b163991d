"""Models whose layers fetch their arrays from the shards of all replicas when they are computed (ZeRO, stage 3)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.layout import Tree
from jaxpar.models.model import Activations, Batch, Layer, LayerParams, Model, Params

MOVES = (  # primitives that only gather, move, cast or decompress data
    *("all_gather", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "decompress"),
    *("dynamic_slice", "pad", "reshape", "slice", "split", "squeeze", "transpose"),
)


def is_computed(primitive: Any, *inputs: Any, new_dtype: Any = None, **_: Any) -> bool:
    """Policy for `jax.checkpoint` that saves computed values, but not the results of MOVES.

    It also saves activations that are cast to a narrower dtype, instead of the wider ones. Parameters are cast as
    vectors, and are not saved.
    """
    is_narrowed = new_dtype is not None and jnp.dtype(new_dtype).itemsize < inputs[0].dtype.itemsize
    return (is_narrowed and inputs[0].ndim > 1) or primitive.name not in MOVES


def _as_stored(_shapes: Tree, stored: Tree) -> Tree:
    return stored


class Fetch(NamedTuple):
    """A function from the arrays of a layer as its devices store them to whole arrays."""

    # (shapes of the arrays, with the dtypes in which the layer reads them; their packed form) -> the arrays
    unpack: Callable[[Tree, Tree], Tree]
    # (the same shapes; the arrays as they are stored) -> their packed form. A scan over layers packs all of them before
    # it: XLA then scatters the gradients of a layer, which are packed too, while it computes the next one.
    pack: Callable[[Tree, Tree], Tree] = _as_stored

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
    ) -> list[LayerParams]:
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
    made = FetchedModel.__new__(FetchedModel)
    made.__dict__.update(vars(model))
    made.fetch, made.whole = fetch, model
    return made
