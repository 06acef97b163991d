"""Rematerialization: which values the forward pass of a layer saves for its backward pass."""

from typing import Any

import jax
import jax.numpy as jnp

LINEAR_MAP = "linear"  # name of a product whose function has its own gradient, which hides it from the policies
# Policies for `jax.checkpoint`
REMAT_POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(LINEAR_MAP),
    ),
}

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
