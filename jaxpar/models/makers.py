"""Functions that create the layers of a model: their structure and shapes without arrays, and their parameters."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

LayerMaker = Callable[[nnx.Rngs], nnx.Module]
LayerParams = dict[str, Any]  # parameters of one layer: nested dict of arrays, or of their shapes
GraphDef = nnx.GraphDef[nnx.Module]


def fresh_params(make: LayerMaker, key: jax.Array) -> LayerParams:
    """Return initial parameters of a layer."""
    return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key))))


def abstract_layer(make: LayerMaker) -> tuple[GraphDef, LayerParams]:
    """Return the structure and the parameter shapes of a layer, without allocating its arrays.

    Layers that a class or a function makes from equal values are traced once in a process, because a run, and a plan
    of many, builds them several times.
    """
    if not isinstance(make, partial) or not _is_value((make.args, make.keywords)):
        return _trace(make)
    key = make.func, repr((make.args, make.keywords))
    if key not in _TRACED:
        _TRACED[key] = _trace(make)
    graphdef, shapes = _TRACED[key]
    return graphdef, jax.tree.map(lambda leaf: leaf, shapes)


_TRACED: dict[tuple[Any, str], tuple[GraphDef, LayerParams]] = {}


def _is_value(x: Any) -> bool:
    """Return whether different x have a different `repr`: numbers, texts, dtypes, and what contains only them."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return all(_is_value(getattr(x, one.name)) and one.repr for one in dataclasses.fields(x))
    if isinstance(x, tuple | list):
        return all(map(_is_value, x))
    if isinstance(x, dict):
        return all(map(_is_value, x.items()))
    return x is None or type(x) in (bool, int, float, str) or isinstance(x, np.dtype)


def _trace(make: LayerMaker) -> tuple[GraphDef, LayerParams]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(state))
    return graphdef, shapes
