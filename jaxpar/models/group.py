"""The interface of devices that compute the layers of a model together, each with a part of the arrays.

Models have no mesh: without a group, a device has everything. jaxpar/core/tensor.py implements the group of a mesh.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax

from jaxpar.tasks.token_logits import Devices


class TensorSplit(NamedTuple):
    """The division of the arrays of a model among the devices of a group."""

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
    """A group of devices. Between products, a device has 1/size of the positions (Korthikanti et al., 2022, section 4).

    The last positions of a device can be padding.
    """

    def whole(self, x_BTD: jax.Array, number: int) -> jax.Array:
        """Return all `number` positions of an array of which each device has its own: [B, T / size, D] -> [B, T, D]."""

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """Return this device's positions of an array with all positions along `dim`."""

    def summed(self, x_BTD: jax.Array) -> jax.Array:
        """Return this device's positions of the sum over the group: [B, T, D] -> [B, T / size, D]."""

    def rows(self, table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        """Return this device's positions of the rows of a table of which each device has some: [B, T / size, D]."""
