"""Decentralized exchanges: replicas step on their local gradients, and average weights instead of gradients.

x denotes a replica's weights, which differ from those of other replicas.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange.compress import Compressor, to_bytes
from jaxpar.exchange.exchange import AllReduce, DistributedState, Exchange, ExchangeUpdate, shared
from jaxpar.exchange.fuse import flat, flat_size
from jaxpar.exchange.reduce import Axis, Groups
from jaxpar.layout import PER_REPLICA, Tree

PEER, AVERAGING = "peer", "average"  # names of the conditionals in compiled programs


def mixed(
    optimizer: optax.GradientTransformation,
    mix: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    init_private: Callable[[Tree], Tree],
    traffic: Callable[[Tree], list[Traffic]],
    branches: Mapping[str, tuple[float, ...]] = {},
) -> Exchange:
    """Return an exchange in which each replica steps on its local gradient, and `mix` pulls weights together.

    mix: (updates, params, private state) -> (updates, private state).
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def update(grads: Tree, state: DistributedState, params: Tree, **extra: Any) -> ExchangeUpdate:
        updates, inner = optimizer.update(grads, state.optimizer, params, **extra)
        updates, private = mix(updates, params, state.private)
        return ExchangeUpdate(updates, DistributedState(inner, private), None)

    def init(params: Tree) -> DistributedState:
        return DistributedState(optimizer.init(params), init_private(params))

    return Exchange(
        init, update, lambda params, _: traffic(params), params=PER_REPLICA, optimizer=PER_REPLICA, branches=branches
    )


def decentralized(
    axis: Axis, optimizer: optax.GradientTransformation, *, peers: str = "shift_one", interval: int = 1, group: int = 1
) -> Exchange:
    """Return an exchange with x = mean + step, where the mean is over x and the weights of peers.

    Bagua's decentralized algorithm (Gan et al., 2021, section 3.3; Lian et al., "Can Decentralized Algorithms
    Outperform Centralized Algorithms?", 2017). The step is computed at x, not at the mean.

    Args:
      peers: "shift_one": one peer, and a different one each time: at time t, replica i of the first half is paired with
        replica n/2 + (i + t) mod n/2 of the second half; "all": all other replicas.
      interval: steps from one mean to the next; otherwise x = x + step.
      group: neighbours that average exactly; then groups are paired, not replicas. It must be 1 if peers is "all".
    """
    groups, half = Groups(axis, group), axis.size // group // 2

    def peer(shift: int) -> list[tuple[int, int]]:
        pairs = [(i, half + (i + shift) % half) for i in range(half)]
        return groups.routes(pairs + [(b, a) for a, b in pairs])

    def change(x: jax.Array, time: jax.Array) -> jax.Array:
        """Return mean - x."""
        if peers == "all":
            return jax.lax.pmean(x, axis.name) - x
        shard = groups.shard_of_mean(x)
        ways = [lambda x, shift=shift: jax.lax.ppermute(x, axis.name, peer(shift)) for shift in range(half)]
        with jax.named_scope(PEER):
            mean = (shard + jax.lax.switch(time % half, ways, shard)) / 2
        return groups.whole(mean, len(x)) - x

    def mix(updates: Tree, params: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        def communicate() -> Tree:
            vector, unflatten = flat(params)
            return jax.tree.map(jnp.add, updates, unflatten(change(vector, step // interval)))

        if interval == 1:
            return communicate(), step + 1
        with jax.named_scope(AVERAGING):
            return jax.lax.cond(step % interval == 0, communicate, lambda: updates), step + 1

    def traffic(params: Tree) -> list[Traffic]:
        size = flat_size(params)
        to_all = axis.traffic("all-reduce", 2, 4 * size, "float32")
        to_peer = _permuted(groups, 4 * math.ceil(size / group), "float32", distance=half)
        return shared([to_all] if peers == "all" else [*groups.traffic(size, "float32"), to_peer], 1 / interval)

    branches: dict[str, tuple[float, ...]] = {}
    if interval > 1:
        branches[AVERAGING] = (1 - 1 / interval, 1 / interval)
    if peers == "shift_one":
        branches[PEER] = (1 / half,) * half
    return mixed(optimizer, mix, lambda _params: jnp.zeros((), jnp.int32), traffic, branches)


def low_precision_decentralized(
    axis: Axis, optimizer: optax.GradientTransformation, compressor: Compressor, group: int = 1
) -> Exchange:
    """Return an exchange in which neighbours on a ring send each other compressed changes of their weights.

    Bagua's low-precision decentralized algorithm (Gan et al., 2021; Tang et al., "Communication Compression for
    Decentralized Training", 2018, algorithm 2): h = (x + x'_left + x'_right) / 3 + step, z = h - x, x += Q(z), and
    x'_j += Q(z_j). A replica's copy x'_j of a neighbour's weights is exact, because the neighbour also changes its
    weights only by the Q(z_j) that it sends. compressor: it must be stateless. group: neighbours that have the same
    weights and take the mean of their steps; then the ring is one of groups, and each replica sends its shard.
    """
    groups, n = Groups(axis, group), axis.size // group
    to_right = groups.routes([(i, (i + 1) % n) for i in range(n)])
    to_left = groups.routes([(i, (i - 1) % n) for i in range(n)])

    def mix(updates: Tree, params: Tree, known: Tree) -> tuple[Tree, Tree]:
        whole, unflatten = flat(params)
        x, step = groups.shard(whole), groups.shard_of_mean(flat(updates)[0])
        z = (x + known["left"] + known["right"]) / 3 + step - x
        payload, _ = compressor.encode(z, compressor.init(len(z), jax.random.key(0), 0))

        def moved(route: list[tuple[int, int]]) -> jax.Array:
            return compressor.decode_bytes(jax.lax.ppermute(to_bytes(payload), axis.name, route), len(z))

        private = {"left": known["left"] + moved(to_right), "right": known["right"] + moved(to_left)}
        return unflatten(groups.whole(compressor.decode(payload, len(z)), len(whole))), private

    def init(params: Tree) -> Tree:
        if dtypes := {leaf.dtype.name for leaf in jax.tree.leaves(params)} - {"float32"}:
            raise ValueError(
                f"parameters are {min(dtypes)}; they must be float32, so that neighbours can track them exactly"
            )
        x = groups.shard(flat(params)[0])
        return {"left": x, "right": x}

    def traffic(params: Tree) -> list[Traffic]:
        size = flat_size(params)
        nbytes = compressor.nbytes(math.ceil(size / group))
        sent = _permuted(groups, 2 * nbytes, "uint8", messages=2)
        if n == 2:  # both neighbours are the same, and XLA sends both messages as one
            sent = sent._replace(required=0.5)
        return [*groups.traffic(size, "float32"), sent]

    return mixed(optimizer, mix, init, traffic)


def _permuted(groups: Groups, nbytes: float, dtype: str, *, messages: int = 1, distance: int = 1) -> Traffic:
    """Return the traffic of messages between groups that are `distance` apart."""
    return Traffic(
        "collective-permute", dtype, groups.axis.name, nbytes, messages, members=groups.members, distance=distance
    )


def model_average(all_reduce: AllReduce, optimizer: optax.GradientTransformation, interval: int) -> Exchange:
    """Return an exchange that trains replicas independently, and averages their weights every `interval` steps.

    Bagua's model average in its synchronous form.
    """

    def mix(updates: Tree, params: Tree, private: Tree) -> tuple[Tree, Tree]:
        def average() -> tuple[Tree, Tree]:
            mean, state = all_reduce.mean(jax.tree.map(jnp.add, params, updates), private["reducer"])
            return jax.tree.map(lambda m, p, u: (m - p).astype(u.dtype), mean, params, updates), state

        step = private["step"] + 1
        with jax.named_scope(AVERAGING):
            updates, state = jax.lax.cond(step % interval == 0, average, lambda: (updates, private["reducer"]))
        return updates, {"step": step, "reducer": state}

    return mixed(
        optimizer,
        mix,
        lambda params: {"step": jnp.zeros((), jnp.int32), "reducer": all_reduce.init(params)},
        lambda params: shared(all_reduce.traffic(params), 1 / interval),
        {AVERAGING: (1 - 1 / interval, 1 / interval)},
    )
