"""Checksums that detect damage to a checkpoint by a disk or a copy; docs/reference/checkpoint.md specifies them."""

import json
import zlib
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core.state import Canonical

Info = dict[str, Any]  # the JSON values that a checkpoint contains besides its arrays
Array = TypeVar("Array", np.ndarray, jax.Array)
_FACTORS = 2 * np.arange(2**16, dtype=np.uint32) + np.uint32(1)


def of_array(x: np.ndarray) -> int:
    """Return the checksum of an array: the sum over elements i of (2i + 1) times the bits of element i, mod 2^32.

    A sum of integers does not depend on the order, so any devices and NumPy compute the same value. Each factor is odd
    and therefore invertible mod 2^32, so a change of any single element changes the checksum.
    """
    bits, total = _bits(np, x).reshape(-1), 0
    for first in range(0, x.size, len(_FACTORS)):
        block = bits[first : first + len(_FACTORS)].astype(np.uint32, copy=False)
        total += int(np.dot(block, _FACTORS[: len(block)])) + 2 * first * int(block.sum(dtype=np.uint32))
    return total % 2**32


def of_tree(tree: Canonical) -> dict[str, int]:
    """Return the checksum of each array by path. Checksums of arrays on devices are computed on the devices."""
    leaves = by_path(tree)
    if all(isinstance(leaf, np.ndarray) for leaf in leaves.values()):
        return {name: of_array(leaf) for name, leaf in leaves.items()}
    return {name: int(value) for name, value in jax.device_get(_on_devices(leaves)).items()}


@jax.jit
def _on_devices(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def of(x: jax.Array) -> jax.Array:
        factors = 2 * jnp.arange(x.size, dtype=jnp.uint32) + jnp.uint32(1)
        return jnp.sum(_bits(jnp, x).reshape(-1).astype(jnp.uint32) * factors, dtype=jnp.uint32)

    return jax.tree.map(of, leaves)


def _bits(numpy: ModuleType, x: Array) -> Array:
    """Return the bits of the elements as unsigned integers; integers are taken mod 2^32."""
    if x.dtype.kind in "iub":
        return x.astype(numpy.uint32)
    return x.view({1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32}[x.dtype.itemsize])


def of_info(info: Info) -> int:
    """Return the checksum of the JSON text of all keys except `checksum`."""
    return zlib.crc32(json.dumps({key: info[key] for key in info if key != "checksum"}, sort_keys=True).encode())


def by_path(tree: Canonical) -> dict[str, Any]:
    """Return the leaves by path, such as `['params']['embed']['tokens']`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
