"""Messages between the peers of a swarm: activations and their gradients, in 8 bits or as they are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.core.state import nbytes
from jaxpar.exchange.compress import Compressor, absmax_int8
from jaxpar.models.model import Activations

MESSAGE_BLOCK = 4096  # elements that share a scale (Ryabinin et al., "SWARM Parallelism", 2023, section 4.3)
MESSAGE_COMPRESSORS: dict[str, Compressor | None] = {"none": None, "int8": absmax_int8(MESSAGE_BLOCK)}


class MessageFormat(NamedTuple):
    """The form in which activations and their gradients are sent."""

    compressor: Compressor | None  # compressor of each array; None: arrays are sent as they are

    def pack(self, tree: Activations | None) -> Any:
        """Return the message with the arrays of a tree. Jittable, like `unpack`."""
        if self.compressor is None or tree is None:
            return tree
        encode = self.compressor.encode
        return [encode(x.astype(jnp.float32).reshape(-1), ())[0] for x in jax.tree.leaves(tree)]

    def unpack(self, message: Any, like: Activations | None) -> Activations | None:
        """Return the arrays of a message. like: their shapes and dtypes."""
        if self.compressor is None or message is None:
            return message
        leaves, structure = jax.tree.flatten(like)
        arrays = [
            self.compressor.decode(payload, x.size).reshape(x.shape).astype(x.dtype)
            for payload, x in zip(message, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, arrays)

    def nbytes(self, like: Activations) -> int:
        """Return the bytes of a message with arrays of these shapes and dtypes."""
        if self.compressor is None:
            return nbytes(like)
        return sum(self.compressor.nbytes(x.size) for x in jax.tree.leaves(like))
