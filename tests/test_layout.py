"""Layouts of arrays that are split over several axes: each device has the shard that NumPy cuts out, and no more."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxpar import layout
from jaxpar.layout import SHARDED, DimSplit, Layout, LeafLayout

AXES = {"data": 4, "tensor": 2}
SPLITS = {
    "one dim": (DimSplit(1, "tensor"),),
    "two dims": (DimSplit(0, "tensor"), DimSplit(1, "data")),
    "a dim twice": (DimSplit(1, "tensor"), DimSplit(1, "data")),
    "copies": (DimSplit(1, "data", 2),),
    "two dims, copies": (DimSplit(1, "tensor"), DimSplit(0, "data", 2)),
    "a dim twice, copies": (DimSplit(0, "tensor"), DimSplit(0, "data", 2)),
}


def shard(x: np.ndarray, splits: tuple[DimSplit, ...], index: dict[str, int]) -> np.ndarray:
    """Cut out the part of an array that a device holds, padded with zeros."""
    for dim, axis, copies in splits:
        number = AXES[axis] // copies
        size = -(-x.shape[dim] // number)
        start = index[axis] % number * size
        part = x.take(range(start, min(start + size, x.shape[dim])), dim)
        x = np.pad(part, [(0, size - part.shape[dim] if at == dim else 0) for at in range(x.ndim)])
    return x


@pytest.mark.parametrize("shape", [(8, 16), (5, 7), (3, 2)])
@pytest.mark.parametrize(("name", "leading"), [*((name, ()) for name in SPLITS), ("one dim", ("data",))])
def test_each_device_holds_its_shard(name: str, leading: tuple[str, ...], shape: tuple[int, ...]) -> None:
    splits = SPLITS[name]
    x = np.arange(1.0, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    leaf = LeafLayout(shape, x.dtype, splits, leading)
    of_tree = Layout(AXES, {"x": leaf})
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), tuple(AXES), axis_types=(AxisType.Auto,) * 2)
    made = of_tree.to_global({"x": x}, np)["x"]
    placed = jax.device_put(made, of_tree.shardings(mesh)["x"])
    in_jit = jax.jit(of_tree.to_global, out_shardings=of_tree.shardings(mesh))({"x": x})["x"]
    for (data, tensor), device in np.ndenumerate(mesh.devices):
        expected = shard(x, splits, {"data": data, "tensor": tensor})
        for array in (placed, in_jit):
            [on_device] = [one.data for one in array.addressable_shards if one.device == device]
            local = on_device[0] if leading else on_device
            assert local.shape == leaf.local_shape(AXES)
            np.testing.assert_array_equal(local, expected)
    assert of_tree.nbytes_by_device == [shard(x, splits, {"data": 0, "tensor": 0}).nbytes] * 8
    np.testing.assert_array_equal(jax.jit(of_tree.to_canonical)({"x": placed})["x"], x)
    np.testing.assert_array_equal(np.asarray(of_tree.to_canonical({"x": made})["x"]), x)


def test_shards_are_split_along_their_longest_dim() -> None:
    like = {"x": jax.ShapeDtypeStruct((16, 12), np.float32), "b": jax.ShapeDtypeStruct((6,), np.float32)}
    dims = {"x": 0, "b": 0}
    base = Layout(
        AXES, jax.tree.map(lambda x, dim: LeafLayout(x.shape, x.dtype, (DimSplit(dim, "tensor"),)), like, dims)
    )
    both = layout.by_kind(SHARDED, base, "data", copies=2)
    assert both.leaves["x"].splits == (DimSplit(0, "tensor"), DimSplit(1, "data", 2))
    assert both.leaves["b"].splits == (DimSplit(0, "tensor"), DimSplit(0, "data", 2))
    assert [both.local_shapes[name].shape for name in "xb"] == [(8, 6), (2,)]
    assert str(both.leaves["x"].spec) == str(jax.P("tensor", "data"))
