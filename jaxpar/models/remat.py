"""Policies for `jax.checkpoint`: which values the forward pass saves for the backward pass."""

from typing import Any

import jax

REMAT_POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
