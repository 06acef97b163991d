"""Counts what the devices that compute a stage together send each other, from the traced programs of the stages."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jaxpar.core.groups import SentArrays

COLLECTIVE_KINDS = {  # by primitive
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


def sent_arrays(equations: Sequence[Any], times: int = 1) -> Iterator[SentArrays]:
    """Yield what equations of a jaxpr, and of those inside it, send over named axes. times: how often they run.

    XLA for GPUs gathers an array before it widens it. XLA may merge gathers that rematerialization repeats.
    """
    narrow: dict[Any, Any] = {}  # dtypes of arrays before they were widened
    for equation in equations:
        kind, params = COLLECTIVE_KINDS.get(equation.primitive.name), equation.params
        if equation.primitive.name == "convert_element_type":
            [wide], [x] = equation.outvars, equation.invars
            narrow |= {wide: x.aval.dtype} if x.aval.dtype.itemsize < wide.aval.dtype.itemsize else {}
        if kind is not None:
            axes = params["axes"] if "axes" in params else params["axis_name"]
            [axis] = axes if isinstance(axes, tuple) else (axes,)
            for operand, result in zip(equation.invars, equation.outvars, strict=True):
                var = result if kind == "all-gather" else operand
                dtype = narrow.get(operand, var.aval.dtype) if kind == "all-gather" else var.aval.dtype
                least = times / 2 if kind == "all-gather" else times
                yield SentArrays(kind, axis, np.dtype(dtype), var.aval.size, times, least)
        inside = times * (params["length"] if equation.primitive.name == "scan" else 1)
        for jaxpr in core.jaxprs_in_params(params):
            yield from sent_arrays(jaxpr.eqns, inside)
