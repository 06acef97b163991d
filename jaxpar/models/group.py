"""Contracts between the layers of a model and the devices that compute them together, each with a part of the arrays.

Models have no mesh: without a group, a device has everything. jaxpar/core/groups.py implements the group of a mesh.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax

from jaxpar.tasks.token_logits import Devices


class TensorSplit(NamedTuple):
    """A division of the arrays of a model among the devices of a group."""

    # the dim along which an array is split, by the last two names of its path in a layer. All devices have the others
    dims: Mapping[tuple[str, ...], int]
    counts: Mapping[str, int]  # numbers that the size of the group must divide, by their key in config.model


# A product splits the columns of its kernel, and the next one its rows, and embedding and head the vocabulary (Shoeybi
# et al., "Megatron-LM", 2019, section 3).
TRANSFORMER_DIMS: dict[tuple[str, ...], int] = {
    **{(name, "kernel"): 1 for name in ("query", "key", "value", "up", "gate")},
    **{(name, "bias"): 0 for name in ("query", "key", "value", "up", "gate")},
    **{(name, "kernel"): 0 for name in ("out", "down")},
    ("tokens",): 0,
    ("bias",): 0,  # of a masked-LM head
}


class DeviceGroup(Devices, Protocol):
    """The devices that compute a layer together: `size` on the tensor axis, times `context` on the context axis.

    A device of the context axis has some positions of each text: T of them. Between products, a device of the tensor
    axis has T / size of these (Korthikanti et al., 2022, section 4), of which the last ones can be padding. In
    inference, it has all of them.
    """

    @property
    def context(self) -> int:
        """Number of devices that have different positions of a text."""

    def whole(self, x_BTD: jax.Array, number: int) -> jax.Array:
        """Return all `number` positions of an array of which each device has its own: [B, T / size, D] -> [B, T, D]."""

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Return this device's positions of an array with all T positions along `dim`."""

    def summed(self, x_BTD: jax.Array) -> jax.Array:
        """Return this device's positions of the sum over the tensor axis: [B, T, D] -> [B, T / size, D]."""

    def rows(self, table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        """Return this device's positions of the rows of a table of which each device has some: [B, T / size, D]."""

    def positions(self, number: int) -> jax.Array:
        """Return the positions in the text of the T = `number` positions that this device has, [T]."""

    def texts(self, x: jax.Array) -> jax.Array:
        """Return whole texts, in order, of which each device has some positions: [B, T, ..] -> [B, T x context, ..]."""

    @property
    def attend(self) -> Callable[..., jax.Array]:
        """The attention of this device's positions to all positions of the texts, called as that of attention.py."""
