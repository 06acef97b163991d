"""The exchanges of gradients, by name. Each is one function, and its keyword arguments are its options.

They wrap no optimizer, so pipelines can use them, too.
"""

from collections.abc import Callable

from jaxpar.exchange import reduce
from jaxpar.exchange.compress import (
    FLOAT8,
    Compressor,
    dithering,
    error_feedback,
    float8,
    min_max_uint8,
    momentum,
    onebit,
)
from jaxpar.exchange.compress import randomk as random_k
from jaxpar.exchange.compress import topk as top_k
from jaxpar.exchange.exchange import AllReduce
from jaxpar.exchange.fuse import by_size, fused
from jaxpar.exchange.reduce import Axis, Reducer
from jaxpar.exchange.scatter_gather import in_groups, scatter_gather

MIB = 2**20
BYTEPS_PARTITION, MIN_COMPRESS_BYTES = 4_096_000, 65_536  # the defaults of BytePS
# Elements that share a scale (1 bit), and a range or a scale (8 bits). The gradient of most rows of an embedding is
# zero, so the scale of 1-bit gradients should be that of one row or less.
ROW_BLOCK, BYTES_BLOCK = 128, 4096


def ddp(
    axis: Axis, *, bucket_bytes: int = 25 * MIB, wire_dtype: str = "", algorithm: str = "psum", group: int = 1
) -> AllReduce:
    """Return the exchange of PyTorch's DistributedDataParallel: gradients in buckets, the last layers first.

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020. Gradients are divided by
    the number of replicas before they are summed, in the dtype in which they are sent, as by PyTorch's fp16 hook. As in
    PyTorch, the first bucket is smaller, so that sending starts early, and a bucket is closed once it is full.
    """
    reducer = _in_dtype(axis, algorithm, group, wire_dtype, predivide=axis.size)
    return fused(reducer, bucket_bytes, first_bytes=min(MIB, bucket_bytes), overfull=True)


def horovod(
    axis: Axis,
    *,
    bucket_bytes: int = 128 * MIB,
    wire_dtype: str = "",
    algorithm: str = "ring",
    group: int = 1,
    predivide: float = 1.0,
) -> AllReduce:
    """Return the exchange of Horovod's DistributedOptimizer: ring all-reduce of fused tensors.

    Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
    """
    return fused(_in_dtype(axis, algorithm, group, wire_dtype, predivide), bucket_bytes)


def byteps(axis: Axis, *, bucket_bytes: int = BYTEPS_PARTITION, wire_dtype: str = "") -> AllReduce:
    """Return BytePS: partitions are pushed to servers and pulled from them, the first layers first."""
    return fused(_in_dtype(axis, "push_pull", 1, wire_dtype), bucket_bytes, cut=True, backwards=False)


def byteps_onebit(
    axis: Axis,
    *,
    bucket_bytes: int = BYTEPS_PARTITION,
    group: int = 1,
    min_compress_bytes: int = MIN_COMPRESS_BYTES,
    block: int = ROW_BLOCK,
    momentum: float = 0.0,
) -> AllReduce:
    """Return BytePS with 1-bit compression: signs, and a scale for each `block` elements."""
    return _byteps(axis, onebit(block=block), bucket_bytes, group, min_compress_bytes, momentum)


def byteps_topk(
    axis: Axis,
    *,
    bucket_bytes: int = BYTEPS_PARTITION,
    group: int = 1,
    min_compress_bytes: int = MIN_COMPRESS_BYTES,
    ratio: float = 0.01,
    momentum: float = 0.0,
) -> AllReduce:
    """Return BytePS with top-k compression: the largest values."""
    return _byteps(axis, top_k(ratio), bucket_bytes, group, min_compress_bytes, momentum)


def byteps_randomk(
    axis: Axis,
    *,
    bucket_bytes: int = BYTEPS_PARTITION,
    group: int = 1,
    min_compress_bytes: int = MIN_COMPRESS_BYTES,
    ratio: float = 0.25,
    momentum: float = 0.0,
    seed: int = 0,
) -> AllReduce:
    """Return BytePS with random-k compression: random values."""
    return _byteps(axis, random_k(ratio), bucket_bytes, group, min_compress_bytes, momentum, seed)


def byteps_dithering(
    axis: Axis,
    *,
    bucket_bytes: int = BYTEPS_PARTITION,
    group: int = 1,
    min_compress_bytes: int = MIN_COMPRESS_BYTES,
    levels: int = 127,
    momentum: float = 0.0,
    seed: int = 0,
) -> AllReduce:
    """Return BytePS with dithering: values rounded randomly."""
    return _byteps(axis, dithering(levels), bucket_bytes, group, min_compress_bytes, momentum, seed)


def bagua_bytegrad(axis: Axis, *, bucket_bytes: int = 10 * MIB, group: int = 1, block: int = BYTES_BLOCK) -> AllReduce:
    """Return Bagua's ByteGrad: a byte for each element, and a range for each `block` elements.

    Bagua's own block is 1/n of a bucket.
    """
    return fused(_lossy(axis, group, min_max_uint8(block), min_max_uint8(block)), bucket_bytes)


def _in_dtype(axis: Axis, algorithm: str, group: int, wire_dtype: str, predivide: float = 1.0) -> Reducer:
    """Return the reducer that sends `wire_dtype`, and sums in it. A float8 is too coarse for sums: they are float32."""
    if wire_dtype in FLOAT8:
        return _lossy(axis, group, float8(wire_dtype, BYTES_BLOCK), float8(wire_dtype, BYTES_BLOCK))
    dtype = wire_dtype or None
    if group > 1:
        return reduce.hierarchical(axis, group, predivide=predivide, dtype=dtype)
    algorithms = {"psum": reduce.psum, "ring": reduce.ring, "push_pull": reduce.push_pull}
    return algorithms[algorithm](axis, predivide=predivide, dtype=dtype)


def _lossy(axis: Axis, group: int, worker: Compressor, server: Compressor) -> Reducer:
    if group == axis.size > 1:  # nothing is sent between groups
        return reduce.psum(axis)
    if group > 1:
        return in_groups(axis, group, lambda between: scatter_gather(between, worker, server))
    return scatter_gather(axis, worker, server)


def _byteps(
    axis: Axis, compressor: Compressor, bucket_bytes: int, group: int, min_bytes: int, mu: float, seed: int = 0
) -> AllReduce:
    """Return BytePS with a compressor for arrays of at least `min_bytes` bytes. mu: momentum before compression."""
    server = error_feedback(compressor)
    worker = momentum(server, mu) if mu else server
    reducer = _lossy(axis, group, worker, server)
    lossy = fused(reducer, bucket_bytes, cut=True, backwards=False, seed=seed)
    return by_size(byteps(axis, bucket_bytes=bucket_bytes), lossy, min_bytes) if min_bytes else lossy


GRADIENTS: dict[str, Callable[..., AllReduce]] = {
    function.__name__: function
    for function in (
        *(ddp, horovod, byteps, byteps_onebit, byteps_topk, byteps_randomk, byteps_dithering),
        bagua_bytegrad,
    )
}
ERROR_FEEDBACK = ("byteps_onebit", "byteps_topk", "byteps_randomk", "byteps_dithering")
