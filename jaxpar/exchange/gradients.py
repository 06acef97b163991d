"""Exchanges of gradients: the all-reduces of PyTorch's DDP, Horovod and BytePS. named.py has their options.

They wrap no optimizer, so pipelines can use them, too.
"""

from collections.abc import Callable

from jaxpar.exchange import reduce
from jaxpar.exchange.compress import FLOAT8, Compressor, error_feedback, float8
from jaxpar.exchange.compress import momentum as with_momentum
from jaxpar.exchange.exchange import AllReduce
from jaxpar.exchange.fuse import by_size, fused
from jaxpar.exchange.reduce import Axis, Reducer
from jaxpar.exchange.scatter_gather import in_groups, scatter_gather

FIRST_BYTES = 2**20  # of DDP's first bucket, as in PyTorch
FLOAT8_BLOCK = 4096  # elements that share a scale


def ddp(axis: Axis, *, bucket_bytes: int, wire_dtype: str, algorithm: str, group: int) -> AllReduce:
    """Return the exchange of PyTorch's DistributedDataParallel: gradients in buckets, the last layers first.

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020. As in PyTorch, gradients
    are divided by the number of replicas before they are summed, in the dtype in which they are sent; the first bucket
    is smaller, so that sending starts early; and a bucket is closed once it is full.
    """
    reducer = _in_dtype(axis, algorithm, group, wire_dtype, predivide=axis.size)
    return fused(reducer, bucket_bytes, first_bytes=min(FIRST_BYTES, bucket_bytes), overfull=True)


def horovod(
    axis: Axis, *, bucket_bytes: int, wire_dtype: str, algorithm: str, group: int, predivide: float
) -> AllReduce:
    """Return the exchange of Horovod's DistributedOptimizer: ring all-reduce of fused tensors.

    Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
    """
    return fused(_in_dtype(axis, algorithm, group, wire_dtype, predivide), bucket_bytes)


def byteps(axis: Axis, *, bucket_bytes: int, group: int, wire_dtype: str = "") -> AllReduce:
    """Return BytePS: partitions are pushed to servers and pulled from them, the first layers first."""
    return fused(_in_dtype(axis, "push_pull", group, wire_dtype), bucket_bytes, cut=True, backwards=False)


def compressed_byteps(
    compressor: Callable[..., Compressor],
    axis: Axis,
    *,
    bucket_bytes: int,
    group: int,
    min_compress_bytes: int,
    momentum: float,
    seed: int = 0,
    **options: float,
) -> AllReduce:
    """Return BytePS with a compressor and error feedback for arrays of at least `min_compress_bytes` bytes.

    momentum: of the gradients, before compression. options: of the compressor.
    """
    server = error_feedback(compressor(**options))
    worker = with_momentum(server, momentum) if momentum else server
    large = fused(lossy(axis, group, worker, server), bucket_bytes, cut=True, backwards=False, seed=seed)
    return (
        by_size(byteps(axis, bucket_bytes=bucket_bytes, group=group), large, min_compress_bytes)
        if min_compress_bytes
        else large
    )


def lossy(axis: Axis, group: int, worker: Compressor, server: Compressor) -> Reducer:
    """Return the reducer that is exact within groups of `group` replicas, and compresses what it sends between them."""
    if group == axis.size > 1:  # nothing is sent between groups
        return reduce.psum(axis)
    if group > 1:
        return in_groups(axis, group, scatter_gather(axis.between(group), worker, server))
    return scatter_gather(axis, worker, server)


def _in_dtype(axis: Axis, algorithm: str, group: int, wire_dtype: str, predivide: float = 1.0) -> Reducer:
    """Return the reducer that sends `wire_dtype`, and sums in it. A float8 is too coarse for sums: they are float32."""
    if wire_dtype in FLOAT8:
        compressor = float8(wire_dtype, FLOAT8_BLOCK)
        return lossy(axis, group, compressor, compressor)
    dtype = wire_dtype or None
    if group > 1:
        return reduce.hierarchical(axis, group, has_servers=algorithm == "push_pull", predivide=predivide, dtype=dtype)
    algorithms = {"psum": reduce.psum, "ring": reduce.ring, "push_pull": reduce.push_pull}
    return algorithms[algorithm](axis, predivide=predivide, dtype=dtype)
