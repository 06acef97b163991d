"""Maps each leaf of a parameter-like tree, such as an optimizer state, to the layer that it belongs to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, keystr


class LeafPath(NamedTuple):
    """The position of a leaf in a tree that contains parameters or arrays derived from them."""

    layer: str | None  # the layer that the leaf belongs to; None if it belongs to no layer, such as a step counter
    path: str  # without the layer name, so corresponding arrays of identical layers have equal paths


MARK = "\0"  # prefix of layer names: no optimizer key starts with it, and it does not change how layers sort


def leaf_paths(function: Callable[[Any], Any], params: Mapping[str, Any]) -> list[LeafPath]:
    """Return the paths of the leaves of function(params), in tree order.

    The layer keys are marked before the function is traced. An optimizer can therefore store parameters anywhere in
    its state, and can have dicts with other keys, such as the labels of `optax.partition`.

    function: for example an optimizer's init; it must compute each array of a layer from that layer alone.
    """
    made = jax.eval_shape(function, {MARK + name: tree for name, tree in params.items()})
    return [_leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(made)]


def layer_name(key: str) -> str:
    """Return the layer name for a key of the parameters, with or without the mark that `leaf_paths` adds."""
    return key.removeprefix(MARK)


def _leaf_path(path: Sequence[Any]) -> LeafPath:
    for place, part in enumerate(path):
        if isinstance(part, DictKey) and str(part.key).startswith(MARK):
            return LeafPath(layer_name(part.key), f"{keystr(tuple(path[:place]))}[]{keystr(tuple(path[place + 1 :]))}")
    return LeafPath(None, keystr(tuple(path)))
