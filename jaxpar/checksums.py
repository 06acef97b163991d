"""Checksums that tell what a disk or a copy did to a checkpoint; docs/checkpoints.md specifies them."""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.state import Canonical


def of_array(numpy: Any, x: Any) -> Any:
    """A uint32 over the bits of an array: sum of element i's bits times 2i+1, mod 2^32.

    A sum of integers does not depend on its order, so it is the same on any devices and in NumPy.
    Each factor is odd, hence a unit: any single changed element is found.
    """
    bits = (
        x.astype(numpy.uint32)
        if x.dtype.kind in "iub"
        else x.view({1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32}[x.dtype.itemsize])
    )
    factors = 2 * numpy.arange(x.size, dtype=numpy.uint32) + numpy.uint32(1)
    return numpy.sum(bits.reshape(-1).astype(numpy.uint32) * factors, dtype=numpy.uint32)


@jax.jit
def of_tree(tree: Canonical) -> dict[str, jax.Array]:
    """By path of an array, where the arrays are; dispatched, as any program."""
    return {name: of_array(jnp, leaf) for name, leaf in named(tree).items()}


def of_info(info: dict[str, Any]) -> int:
    """Of all its other keys, as JSON."""
    return zlib.crc32(json.dumps({key: info[key] for key in info if key != "checksum"}, sort_keys=True).encode())


def named(tree: Any) -> dict[str, Any]:
    """By path, `['params']['embed']['tokens']`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
