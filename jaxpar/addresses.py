"""Which layer each leaf of a tree belongs to, wherever the tree has parameters, or arrays made for them, in it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, keystr


class Address(NamedTuple):
    """A leaf of a tree that has parameters, or arrays made for them, in it.

    Attributes:
      layer: that the leaf belongs to; None where it belongs to none, such as a counter of steps.
      path: of the leaf, with the layer left open; it is the same for the same array of equal layers.
    """

    layer: str | None
    path: str


MARK = "\0"  # before the name of a layer: no key of an optimizer begins so, and layers sort as without it


def addresses(function: Callable[[Any], Any], params: Mapping[str, Any]) -> list[Address]:
    """Return the addresses of the leaves of function(params), in its tree's order.

    The keys of the layers are marked before the function is traced, so an optimizer may put parameters anywhere in its
    state, and have dicts with keys of its own, such as the labels of a partitioned one.

    Args:
      function: such as an optimizer's init; it computes each array of a layer from that layer's alone.
      params: {layer: ..}, abstract.
    """
    marked = {MARK + name: tree for name, tree in params.items()}
    made = jax.eval_shape(function, marked)
    return [_address(path) for path, _ in jax.tree_util.tree_leaves_with_path(made)]


def layer_name(key: str) -> str:
    """Return the name of a layer from its key in parameters, which `addresses` may have marked."""
    return key.removeprefix(MARK)


def _address(path: Sequence[Any]) -> Address:
    for place, part in enumerate(path):
        if isinstance(part, DictKey) and str(part.key).startswith(MARK):
            return Address(layer_name(part.key), f"{keystr(tuple(path[:place]))}[]{keystr(tuple(path[place + 1 :]))}")
    return Address(None, keystr(tuple(path)))
