"""ZeRO: each replica holds and updates 1/n of the arrays that data parallelism otherwise replicates.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5. Replicas
shard the optimizer state with the float32 parameters; from stage 2 on, also the accumulated gradients; in stage 3, also
the parameters that a step reads. Before stage 3, a replica gathers all of those before each step.

An array is sharded along its longest dim, padded to a multiple of n, so a shard has as many dims as the array. Scalars
are not sharded: every replica holds them, and their gradients are summed by a psum.

With groups, stage 3 is hybrid sharded data parallelism (HSDP), as in PyTorch's FSDP (Zhao et al., 2023, section 3.2):
each group of replicas, such as a node, shards its own copy of all arrays, so arrays are gathered only within groups.

In stage 3, the shards of a layer are packed into vectors before a scan over layers, and their gradients are unpacked
after it. XLA can then gather the vectors of the next layer, and scatter the gradients of the previous one, while a
layer is computed. An array is gathered in the dtype in which its layer reads it: half of the bytes, if a bfloat16 model
casts it first. Gradients are summed in float32. Parameters and gradients can also be sent with 8 bits per element, as
in ZeRO++ (Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange.compress import Compressor
from jaxpar.exchange.exchange import AllReduce, DistributedState, Exchange, ExchangeUpdate, ShardSteps
from jaxpar.exchange.fetch import Fetch
from jaxpar.exchange.fuse import Leaf, after, buckets, numbers_in_order
from jaxpar.exchange.reduce import Axis, added_up
from jaxpar.exchange.scatter_gather import all_gather_coded, reduce_scatter_coded
from jaxpar.exchange.scatter_layers import LayerScatter
from jaxpar.layout import SHARDED, Tree, pad, shard_shape, split_dim, unpad


class Codes(NamedTuple):
    """The compressors of what stage 3 sends, which have no state; None: it is sent uncompressed."""

    params: Compressor | None = None  # compressor of the shards of parameters that are gathered
    grads: Compressor | None = None  # compressor of the shards of gradients that are scattered


UNCODED = Codes()


class Order(NamedTuple):
    """The order in which buckets are sent."""

    layers: Sequence[str] = ()  # as in `Rule`
    in_turn: bool = False  # as in `Rule`


BY_NAME = Order()
FLOAT = np.dtype(np.float32)
WORD = np.dtype(np.uint16)  # in which arrays are sent if not all are float32, because XLA may widen 16-bit floats


class PackedShards(NamedTuple):
    """The shards of a replica."""

    vectors: list[jax.Array]  # those of each bucket, concatenated
    whole: list[jax.Array]  # the arrays that are not sharded


class Shards:
    """The arrays of a tree and their shards. Its methods convert between them, inside `shard_map`.

    A flat shard has the sharded dim first, and is a vector; a bucket of them is sent as one vector.
    """

    def __init__(self, axis: Axis, tree: Tree, num_bytes: int, codes: Codes = UNCODED, order: Order = BY_NAME):
        """Plan the buckets, of at most `num_bytes` bytes, of arrays that are sent together.

        tree: full arrays or their shapes, with the dtypes in which `gather` returns them.
        """
        self._axis, self._codes, self._in_turn = axis, codes, order.in_turn
        self._leaves, self._structure = jax.tree.flatten(tree)
        self._dims = [split_dim(leaf.shape) or 0 for leaf in self._leaves]
        self._shapes = [shard_shape(leaf.shape, axis.size) for leaf in self._leaves]
        self._lengths = [math.prod(shape) for shape in self._shapes]
        self._wire = FLOAT if all(leaf.dtype == FLOAT for leaf in self._leaves) else WORD
        words = [leaf.size * leaf.dtype.itemsize // self._wire.itemsize for leaf in self._leaves]
        sent = [jax.ShapeDtypeStruct((size,), self._wire) for size in words]
        self._buckets = messages(tree, sent, num_bytes, order.layers)
        self._numbers = [number for bucket in self._buckets for number in bucket]  # of the sharded arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all sharded arrays, including their padding, as `gather` sends them uncompressed."""
        return self._axis.size * sum(self._lengths[i] * self._leaves[i].dtype.itemsize for i in self._numbers)

    @property
    def size(self) -> int:
        """Number of elements of all sharded arrays, including their padding."""
        return self._axis.size * sum(self._lengths[number] for number in self._numbers)

    def scatter_traffic(self, times: int) -> Traffic:
        """Return the traffic of a device that scatters all arrays `times` times, in float32 or compressed."""
        if self._codes.grads:  # compressed vectors cannot be summed
            return self._coded_traffic("all-to-all", times, self._codes.grads)
        return self._axis.traffic("reduce-scatter", times, 4 * self.size, "float32", len(self._buckets))

    def gather_traffic(self, times: int) -> Traffic:
        """Return the traffic of a device that gathers all arrays `times` times."""
        if self._codes.params:
            return self._coded_traffic("all-gather", times, self._codes.params)
        return self._axis.traffic("all-gather", times, self.nbytes, self._wire.name, len(self._buckets))

    def _coded_traffic(self, kind: str, times: int, compressor: Compressor) -> Traffic:
        nbytes = self._axis.size * sum(compressor.nbytes(self._lengths[number]) for number in self._numbers)
        return self._axis.traffic(kind, times, nbytes, "uint8", len(self._buckets))

    def local(self, tree: Tree) -> Tree:
        """Return this replica's shards of full arrays."""
        replica = self._axis.position()
        leaves = jax.tree.leaves(tree)
        for number in self._numbers:
            shard = jax.lax.dynamic_index_in_dim(self._flat_shards(leaves[number]), replica, keepdims=False)
            leaves[number] = self._shaped(shard, number)
        return jax.tree.unflatten(self._structure, leaves)

    def scatter(self, tree: Tree) -> Tree:
        """Return this replica's shards of the sum of full arrays over replicas, and its own unsharded arrays."""
        leaves, vectors = jax.tree.leaves(tree), list[jax.Array]()
        for bucket in self._buckets:
            arrays = [leaves[number] for number in bucket]
            if vectors and self._in_turn:
                arrays, vectors[-1] = after(arrays, vectors[-1])
            vectors.append(self._scatter(list(map(self._flat_shards, arrays))))
        for bucket, vector in zip(self._buckets, vectors, strict=True):
            for number, shard in zip(bucket, self._split(vector, bucket), strict=True):
                leaves[number] = self._shaped(shard, number)
        return jax.tree.unflatten(self._structure, leaves)

    def gather(self, tree: Tree) -> Tree:
        """Return full arrays from all replicas' shards. `jax.grad` turns it into `scatter`."""
        return self.gather_packed(self.pack(tree))

    def pack(self, tree: Tree) -> PackedShards:
        """Return the shards of a replica as `gather_packed` sends them."""
        leaves = dict(enumerate(jax.tree.leaves(tree)))
        vectors = []
        for bucket in self._buckets:
            flat = [jnp.moveaxis(leaves.pop(number), self._dims[number], 0).reshape(-1) for number in bucket]
            vectors.append(jnp.concatenate(flat))
        return PackedShards(vectors, list(leaves.values()))

    def gather_packed(self, packed: PackedShards) -> Tree:
        """Return full arrays from all replicas' packed shards, as `gather` does."""
        sharded, whole = set(self._numbers), iter(packed.whole)
        leaves = [None if number in sharded else next(whole) for number in range(len(self._leaves))]
        for bucket, vector in zip(self._buckets, packed.vectors, strict=True):
            for number, shards in zip(bucket, self._gather(vector, bucket), strict=True):
                leaves[number] = unpad(self._shaped(shards, number, self._axis.size), self._leaves[number].shape)
        return jax.tree.unflatten(self._structure, leaves)

    def read(self, tree: Tree, packed: PackedShards) -> Tree:
        """Return full arrays, of any dtypes. Their gradient is scattered, and is that of the packed shards."""

        def backward(_: None, slopes: Tree) -> tuple[None, PackedShards]:
            wide = (x.astype(leaf.dtype) for x, leaf in zip(jax.tree.leaves(slopes), self._leaves, strict=True))
            leaves = dict(enumerate(wide))
            flat = [[self._flat_shards(leaves.pop(number)) for number in bucket] for bucket in self._buckets]
            return None, PackedShards([self._scatter(arrays) for arrays in flat], list(leaves.values()))

        read = jax.custom_vjp(lambda tree, _packed: tree)
        read.defvjp(lambda tree, _packed: (tree, None), backward)
        return read(tree, packed)

    def _scatter(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the sum over replicas of this replica's rows [L] of arrays [n, L], concatenated."""
        if self._codes.grads:
            return jnp.concatenate(reduce_scatter_coded(self._axis, self._codes.grads, arrays))
        rows = jnp.concatenate(arrays, axis=1)
        return jax.lax.psum_scatter(rows, self._axis.name, axis_index_groups=self._axis.groups)

    def _gather(self, vector: jax.Array, bucket: Sequence[int]) -> list[jax.Array]:
        """Return the flat shards of all replicas, [n, L] for each array of a bucket, from their vectors of the bucket.

        The gradient of the result is the gradient of the vector, as if casts and compression did not change it.
        """
        axis, params = self._axis, self._codes.params
        dtypes = [self._leaves[number].dtype for number in bucket]

        def forward(vector: jax.Array) -> list[jax.Array]:
            vectors = self._split(vector, bucket)
            if params:
                decoded = all_gather_coded(axis, params, vectors)
                return [x.astype(dtype) for x, dtype in zip(decoded, dtypes, strict=True)]
            words = [x.astype(dtype).view(self._wire) for x, dtype in zip(vectors, dtypes, strict=True)]
            gathered = jax.lax.all_gather(jnp.concatenate(words), axis.name, axis_index_groups=axis.groups)
            ends = np.cumsum([len(x) for x in words])[:-1]
            return [x.view(dtype) for x, dtype in zip(jnp.split(gathered, ends, axis=-1), dtypes, strict=True)]

        def backward(_: None, slopes: Sequence[jax.Array]) -> tuple[jax.Array]:
            return (self._scatter([slope.astype(vector.dtype) for slope in slopes]),)

        gather = jax.custom_vjp(forward)
        gather.defvjp(lambda vector: (forward(vector), None), backward)
        return gather(vector)

    def _flat_shards(self, x: jax.Array) -> jax.Array:
        """Return the flat shards of a full array, [n, L]."""
        return jnp.moveaxis(pad(x, self._axis.size), split_dim(x.shape) or 0, 0).reshape(self._axis.size, -1)

    def _shaped(self, flat_shards: jax.Array, number: int, num_shards: int = 1) -> jax.Array:
        """Return flat shards of the array of this number in their shape, concatenated along the sharded dim."""
        dim, shape = self._dims[number], self._shapes[number]
        return jnp.moveaxis(flat_shards.reshape(num_shards * shape[dim], *shape[:dim], *shape[dim + 1 :]), 0, dim)

    def _split(self, x: jax.Array, bucket: Sequence[int]) -> list[jax.Array]:
        """Split a bucket of flat shards, along the last dim."""
        return jnp.split(x, np.cumsum([self._lengths[number] for number in bucket])[:-1], axis=-1)


def messages(tree: Tree, sent: Sequence[Leaf], num_bytes: int, layers: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the leaves that are sent as one vector each, without scalars, the last layers first.

    sent: the leaves, or vectors of what is sent of them. num_bytes: size limit of a vector.
    """
    shapes, numbers = [leaf.shape for leaf in jax.tree.leaves(tree)], numbers_in_order(tree, layers)
    plan = buckets([sent[number] for number in numbers], num_bytes, cut=False, backwards=True)
    found = [[number for piece in bucket if shapes[number := numbers[piece.leaf]]] for bucket in plan]
    return [bucket for bucket in found if bucket]


def shard_steps(
    axis: Axis,
    stage: int,
    num_bytes: int,
    codes: Codes = UNCODED,
    group: int = 0,
    norm: Callable[[Tree], jax.Array] = optax.tree.norm,
    order: Order = BY_NAME,
) -> ShardSteps:
    """Return the steps of a stage of ZeRO. For the arguments, see `zero`."""
    group = group or axis.size
    is_grouped, within, between = group < axis.size, axis, axis
    if is_grouped:
        within, between = axis.within(group), axis.between(group)

    def of(tree: Tree) -> Shards:
        return Shards(within, tree, num_bytes, codes, order)

    def mean(shards: Tree) -> Tree:
        whole = jax.tree.map(lambda x: x if x.ndim else jax.lax.psum(x, axis.name), shards)
        return jax.tree.map(lambda x: x / axis.size, _add_up(whole) if is_grouped else whole)

    def vectors(shards: Tree) -> list[list[int]]:
        """Return the numbers of the sharded arrays that are sent between groups as one vector each."""
        return messages(shards, jax.tree.leaves(shards), max(num_bytes // group, 1), order.layers)

    def _add_up(shards: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(shards)
        for numbers in vectors(shards):
            vector = jnp.concatenate([leaves[number].reshape(-1) for number in numbers])
            total = jax.lax.psum(vector, between.name, axis_index_groups=between.groups)
            ends = np.cumsum([leaves[number].size for number in numbers])[:-1]
            for number, part in zip(numbers, jnp.split(total, ends), strict=True):
                leaves[number] = part.reshape(leaves[number].shape)
        return jax.tree.unflatten(structure, leaves)

    def mean_traffic(tree: Tree) -> list[Traffic]:
        shards = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shard_shape(x.shape, group), FLOAT), tree)
        num_vectors = len(vectors(shards)) if is_grouped else 0
        size = sum(x.size for x in jax.tree.leaves(shards) if x.ndim)
        return [between.traffic("all-reduce", 2, 4 * size, "float32", num_vectors)] if is_grouped else []

    def square(shards: Tree) -> jax.Array:
        local = jax.tree.map(lambda x: x if x.ndim else x / math.sqrt(group), shards)
        return jax.lax.psum(norm(local) ** 2, within.name, axis_index_groups=within.groups)

    return ShardSteps(
        stage,
        axis.size // group,
        local=lambda tree: of(tree).local(tree),
        gather=lambda shapes, shards: of(shapes).gather(shards),
        scatter=lambda tree: of(tree).scatter(tree),
        mean=mean,
        square=square,
        gather_traffic=lambda shapes: of(shapes).gather_traffic(1),
        scatter_traffic=lambda shapes: of(shapes).scatter_traffic(1),
        mean_traffic=mean_traffic,
    )


def reduced_to_shards(steps: ShardSteps) -> AllReduce:
    """Return the exchange of gradients whose `mean` returns shards, for pipelines.

    What it sends once in a step includes the parameters that are gathered after the optimizer step, before stage 3.
    """

    def traffic(tree: Tree) -> list[Traffic]:
        scatter = [steps.scatter_traffic(tree)] if steps.stage == 1 else []
        gather = [steps.gather_traffic(tree)] if steps.stage < 3 else []
        return [*scatter, *steps.mean_traffic(tree), *gather]

    def mean(tree: Tree, state: Tree) -> tuple[Tree, Tree]:
        return steps.mean(steps.scatter(tree) if steps.stage == 1 else tree), state

    return AllReduce(lambda _tree: (), mean, traffic, shards=steps)


def zero(
    axis: Axis,
    stage: int,
    optimizer: optax.GradientTransformation,
    tree: Tree,
    num_bytes: int,
    *,
    offload: bool = False,
    codes: Codes = UNCODED,
    group: int = 0,
    norm: Callable[[Tree], jax.Array] = optax.tree.norm,
    order: Order = BY_NAME,
) -> Exchange:
    """Return a stage of ZeRO around an elementwise optimizer.

    Elementwise means that each element of an update depends only on that element of the gradient and the parameters.
    Stage 1 takes full gradients. Stages 2 and 3 take shards of the sum of gradients over replicas: in stage 2 the
    `scatter` of the exchange computes them for each microbatch, in stage 3 the gradient of `fetch` does. The
    parameters are shards: a step gathers all of them, and in stage 3, `fetch` those of a layer.

    Args:
      optimizer: its update is passed grad_norm, the norm of the full gradient.
      tree: the parameters or their shapes.
      num_bytes: size limit of the bucket that a collective sends.
      group: in stage 3, the number of neighbours that share one copy of all arrays; 0: all replicas do. Groups sum
        their gradients once per update, with an all-reduce.
      norm: as in `Rule`.
      order: that of the buckets of whole models; arrays of one layer are sent in the order of their names.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    steps = shard_steps(axis, stage, num_bytes, codes, group, norm, order)
    within = axis.within(group) if 0 < group < axis.size else axis
    coded_shards = functools.partial(Shards, within, num_bytes=num_bytes, codes=codes)

    def init(params: Tree) -> DistributedState:
        return DistributedState(optimizer.init(params), ())

    def update(grads: Tree, state: DistributedState, params: Tree, **extra: Any) -> ExchangeUpdate:
        # From stage 2 on, gradients are scattered already.
        grads = steps.mean(steps.scatter(grads) if stage == 1 else grads)
        grad_norm = jnp.sqrt(steps.square(grads))
        updates, inner = optimizer.update(grads, state.optimizer, params, **{"grad_norm": grad_norm, **extra})
        return ExchangeUpdate(updates, DistributedState(inner, ()), grad_norm)

    def traffic(params: Tree, num_microbatches: int = 1) -> list[Traffic]:
        # In stage 3, the arrays of the layers are scattered and gathered one layer after another.
        each = [*map(coded_shards, params.values())] if stage == 3 else [coded_shards(params, order=order)]
        scatter = added_up(one.scatter_traffic(1 if stage == 1 else num_microbatches) for one in each)
        gather = added_up(one.gather_traffic(2 * num_microbatches if stage == 3 else 1) for one in each)
        # XLA may add up the gradients of an array that two layers share before it scatters them. On CPUs it drops the
        # barriers between a layer's gathers for forward and backward, and may merge them, over all microbatches too.
        shared = Shards(within, tree, num_bytes).size / sum(one.size for one in each)
        sent = [one._replace(required=shared) for one in scatter]
        sent += [one._replace(required=shared / (2 * num_microbatches) if stage == 3 else 1.0) for one in gather]
        return sent + steps.mean_traffic(tree)

    fetch = Fetch(
        unpack=lambda shapes, packed: coded_shards(shapes).gather_packed(packed),
        pack=lambda shapes, local: coded_shards(shapes).pack(local),
        num_bytes=num_bytes,
    )
    scatter_layers = LayerScatter(
        at_end=steps.scatter,
        shards=steps.local,
        pack=lambda tree, shards: coded_shards(tree).pack(shards),
        read=lambda shapes, tree, packed: coded_shards(shapes).read(tree, packed),
    )
    return Exchange(
        init,
        update,
        traffic,
        params=SHARDED,
        optimizer=SHARDED,
        scatter=steps.scatter if stage == 2 else None,
        scatter_layers=scatter_layers if stage == 2 else None,
        fetch=fetch if stage == 3 else None,
        offload=offload,
        shards=steps,
        shows_nonfinite=codes.grads is None,
    )
