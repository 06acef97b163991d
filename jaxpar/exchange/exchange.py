"""The contracts: an all-reduce of gradients, and an exchange, which is an optax optimizer that combines replicas.

The functions of an exchange are called inside `shard_map` over the replicas' axis. They take the mean gradient of each
replica, and return the update of the parameters that the replica holds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange.fetch import Fetch
from jaxpar.layout import REPLICATED, Tree

EVERY = "every_so_many_passes"  # name of the conditional in compiled programs


class AllReduce(NamedTuple):
    """An algorithm that averages a tree over replicas, exactly or approximately.

    Attributes:
      init: tree of arrays, or of their shapes -> state of this replica.
      mean: (tree, state) -> (exact or approximate mean over replicas; state).
      traffic: tree -> the traffic that a device sends.
      clip_norm: the norm to which callers clip a replica's gradient before `mean` (see clip.py); 0: they do not.
    """

    init: Callable[[Tree], Tree]
    mean: Callable[[Tree, Tree], tuple[Tree, Tree]]
    traffic: Callable[[Tree], list[Traffic]]
    clip_norm: float = 0.0


class AdamW(NamedTuple):
    """The arguments of optax.adamw. learning_rate: step -> learning rate."""

    learning_rate: optax.Schedule
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Callable[[Tree], Tree]


class Rule(NamedTuple):
    """An optimizer to be wrapped in an exchange, and its parameters.

    Attributes:
      optimizer: any optax optimizer.
      params: the parameters or their shapes, for exchanges that depend on them.
      adamw: if the optimizer is optax.adamw, its arguments.
      layers: if the parameters are {layer: ..}, the layers in order, so that the last layers' gradients are sent first.
      clip_norm: the norm to which `optimizer` clips the gradient; exchanges that clip to it themselves need it.
      num_steps: number of steps of the run, for exchanges with a warm-up.
    """

    optimizer: optax.GradientTransformation
    params: Tree
    adamw: AdamW | None = None
    layers: Sequence[str] = ()
    clip_norm: float = 0.0
    num_steps: int = 1


class DistributedState(NamedTuple):
    """State of an optimizer wrapped in an exchange.

    Attributes:
      optimizer: the state of the optimizer itself.
      private: state that belongs to this replica: residuals, copies of neighbours' weights.
    """

    optimizer: Tree
    private: Tree


class ExchangeUpdate(NamedTuple):
    """The result of `Exchange.update`.

    Attributes:
      updates: the updates, to be added to the parameters.
      state: the next state.
      grad_norm: norm of the gradient that replicas agreed on; None if they do not agree on one.
    """

    updates: Tree
    state: DistributedState
    grad_norm: jax.Array | None


class Exchange(NamedTuple):
    """An optimizer wrapped in an exchange.

    Attributes:
      init: params -> DistributedState.
      update: (grads, state, params, **extra) -> ExchangeUpdate; extra: passed to the optimizer's update.
      traffic: (params or their shapes, microbatches) -> the traffic that a device sends in a step, without scalars.
        With `fetch`, each layer's params include those that it shares with another layer.
      params: layout of the parameters: a kind of jaxpar/layout.py.
      optimizer: layout of the optimizer state, also a kind of jaxpar/layout.py.
      scatter: gradients of a microbatch -> the shards of them that this replica accumulates; None: it accumulates all.
      fetch: returns the arrays of a layer from the shards of the replicas; None: the replica holds full arrays.
      branches: {name of a conditional in the compiled program: the share of steps in which each branch is taken}.
      offload: whether the optimizer state is kept in host memory between steps.
      copies: number of groups of replicas that each hold all shards, if `params` or `optimizer` are sharded.
    """

    init: Callable[[Tree], DistributedState]
    update: Callable[..., ExchangeUpdate]
    traffic: Callable[[Tree, int], list[Traffic]]
    params: str = REPLICATED
    optimizer: str = REPLICATED
    scatter: Callable[[Tree], Tree] | None = None
    fetch: Fetch | None = None
    branches: Mapping[str, tuple[float, ...]] = {}
    offload: bool = False
    copies: int = 1


def every(num_passes: int, exchange: Exchange, *, average: bool) -> Exchange:
    """Accumulate the gradients of several backward passes before an exchange; parameters stay constant in between.

    Horovod's backward_passes_per_step. average: exchange the mean of the passes instead of their sum, like Horovod's
    average_aggregated_gradients.
    """

    def init(params: Tree) -> DistributedState:
        state = exchange.init(params)
        sums = jax.tree.map(jnp.zeros_like, params)
        return state._replace(private={"passes": jnp.zeros((), jnp.int32), "sums": sums, "inner": state.private})

    def update(grads: Tree, state: DistributedState, params: Tree, **extra: Any) -> ExchangeUpdate:
        sums = jax.tree.map(lambda total, g: total + g.astype(total.dtype), state.private["sums"], grads)
        passes = state.private["passes"] + 1
        inner = DistributedState(state.optimizer, state.private["inner"])

        def step() -> tuple[Tree, Tree, DistributedState]:
            total = jax.tree.map(lambda x: x / num_passes, sums) if average else sums
            made = exchange.update(total, inner, params, **extra)
            return made.updates, jax.tree.map(jnp.zeros_like, sums), made.state

        def wait() -> tuple[Tree, Tree, DistributedState]:
            updates, _, _ = jax.eval_shape(step)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), updates), sums, inner

        with jax.named_scope(EVERY):
            updates, sums, inner = jax.lax.cond(passes == num_passes, step, wait)
        private = {"passes": passes % num_passes, "sums": sums, "inner": inner.private}
        return ExchangeUpdate(updates, DistributedState(inner.optimizer, private), None)

    def traffic(params: Tree, num_microbatches: int) -> list[Traffic]:
        return shared(exchange.traffic(params, num_microbatches), 1 / num_passes)

    branches = {**exchange.branches, EVERY: (1 - 1 / num_passes, 1 / num_passes)}
    return exchange._replace(init=init, update=update, traffic=traffic, branches=branches)


def shared(traffic: list[Traffic], share: float) -> list[Traffic]:
    """Return the traffic of exchanges that run in this share of the steps."""
    return [one._replace(nbytes=one.nbytes * share, messages=one.messages * share) for one in traffic]
