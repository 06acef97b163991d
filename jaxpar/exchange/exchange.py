"""The contracts: an all-reduce of gradients, and an exchange, which is an optax optimizer that combines replicas.

Their functions are called inside `shard_map` over the replicas' axis, with the mean gradient of each replica.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange.fetch import Fetch
from jaxpar.exchange.scatter_layers import LayerScatter
from jaxpar.layout import REPLICATED, Tree

EVERY = "every_so_many_passes"  # name of the conditional in compiled programs


class ShardSteps(NamedTuple):
    """The steps of an exchange that shards arrays (zero.py), for any tree. Pipelines take them at different times."""

    stage: int  # 1: the optimizer state is sharded; 2: so are accumulated gradients; 3: so are parameters
    copies: int  # number of groups of replicas that each hold all shards
    local: Callable[[Tree], Tree]  # arrays -> the shards of this replica
    gather: Callable[[Tree, Tree], Tree]  # (shapes of arrays; shards of this replica) -> the arrays
    scatter: Callable[[Tree], Tree]  # gradients -> this replica's shards of their sum over its group
    mean: Callable[[Tree], Tree]  # results of `scatter` -> shards of the mean over all replicas
    square: Callable[[Tree], jax.Array]  # shards -> the sum of the squares of all elements of the arrays
    gather_traffic: Callable[[Tree], Traffic]  # shapes of arrays -> the traffic that a device sends in `gather`
    scatter_traffic: Callable[[Tree], Traffic]  # the same for `scatter`
    mean_traffic: Callable[[Tree], list[Traffic]]  # the same for `mean`


class AllReduce(NamedTuple):
    """An algorithm that averages a tree over replicas."""

    init: Callable[[Tree], Tree]  # tree of arrays, or of their shapes -> state of this replica
    mean: Callable[[Tree, Tree], tuple[Tree, Tree]]  # (tree, state) -> (exact or approximate mean over replicas; state)
    traffic: Callable[[Tree], list[Traffic]]  # tree -> the traffic that a device sends once in a step
    # the norm to which callers clip a replica's gradient before `mean` (see clip.py); 0: they do not
    clip_norm: float = 0.0
    # whether an element changes others, with which it shares a scale or a rank, so that `mean` may hide infinities
    is_lossy: bool = False
    # how replicas shard arrays: `mean` then returns shards, and from stage 2 on, it takes those that were accumulated
    shards: ShardSteps | None = None


class AdamW(NamedTuple):
    """The arguments of optax.adamw. learning_rate: step -> learning rate."""

    learning_rate: optax.Schedule
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Callable[[Tree], Tree]


class Rule(NamedTuple):
    """An optimizer to be wrapped in an exchange, and its parameters."""

    optimizer: optax.GradientTransformation  # any optax optimizer
    params: Tree  # the parameters or their shapes, for exchanges that depend on them
    adamw: AdamW | None = None  # if the optimizer is optax.adamw, its arguments
    # if the parameters are {layer: ..}, the layers in order, so that the last layers' gradients are sent first
    layers: Sequence[str] = ()
    # the norm to which `optimizer` clips the gradient; exchanges that clip to it themselves need it
    clip_norm: float = 0.0
    num_steps: int = 1  # number of steps of the run, for exchanges with a warm-up
    norm: Callable[[Tree], jax.Array] = optax.tree.norm  # of a tree like the parameters, of which others may hold parts
    # returns for each array of a tree like the parameters whether others hold parts of it; None: nobody does
    is_split: Callable[[Tree], Tree] | None = None
    in_turn: bool = False  # whether ZeRO scatters a bucket only after the one before, which pays on slow networks


class DistributedState(NamedTuple):
    """State of an optimizer wrapped in an exchange."""

    optimizer: Tree  # the state of the optimizer itself
    private: Tree  # state that belongs to this replica: residuals, copies of neighbours' weights


class ExchangeUpdate(NamedTuple):
    """The result of `Exchange.update`."""

    updates: Tree  # the updates, to be added to the parameters that the replica holds
    state: DistributedState  # the next state
    grad_norm: jax.Array | None  # norm of the gradient that replicas agreed on; None if they do not agree on one


class Exchange(NamedTuple):
    """An optimizer wrapped in an exchange."""

    init: Callable[[Tree], DistributedState]  # params -> DistributedState
    # (grads, state, params, **extra) -> ExchangeUpdate; extra: passed to the optimizer's update
    update: Callable[..., ExchangeUpdate]
    # (params or their shapes, microbatches) -> the traffic that a device sends in a step, without scalars. With
    # `fetch`, each layer's params include those that it shares with another layer.
    traffic: Callable[[Tree, int], list[Traffic]]
    params: str = REPLICATED  # layout of the parameters: a kind of jaxpar/layout.py
    optimizer: str = REPLICATED  # layout of the optimizer state, also a kind of jaxpar/layout.py
    # gradients of a microbatch -> the shards of them that this replica accumulates; None: it accumulates all
    scatter: Callable[[Tree], Tree] | None = None
    # the same for the gradients of a layer, while its scan computes the one before; None: there is no `scatter`
    scatter_layers: LayerScatter | None = None
    # returns the arrays of a layer from the shards of the replicas; None: a step starts with all arrays
    fetch: Fetch | None = None
    # {name of a conditional in the compiled program: the share of steps in which each branch is taken}
    branches: Mapping[str, tuple[float, ...]] = {}
    offload: bool = False  # whether the optimizer state is kept in host memory between steps
    shards: ShardSteps | None = None  # the steps of `update`, if `params` or `optimizer` are sharded
    # whether an infinity or NaN in the gradient of any replica reaches the norm of the update; compressors may hide it
    shows_nonfinite: bool = False

    @property
    def gather(self) -> Callable[[Tree, Tree], Tree] | None:
        """The function with which a step starts: (shapes; shards of this replica) -> all parameters. None: none."""
        return self.shards.gather if self.shards and not self.fetch else None

    @property
    def leaves_shards(self) -> bool:
        """Whether the backward pass leaves shards of the gradients on a replica, instead of all of them."""
        return bool(self.fetch or self.scatter)

    @property
    def copies(self) -> int:
        """Number of groups of replicas that each hold all shards."""
        return self.shards.copies if self.shards else 1


def every(num_passes: int, exchange: Exchange, *, average: bool) -> Exchange:
    """Accumulate the gradients of several backward passes before an exchange: Horovod's backward_passes_per_step.

    average: exchange the mean of the passes instead of their sum, like Horovod's average_aggregated_gradients.
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

    return exchange._replace(
        init=init,
        update=update,
        traffic=lambda params, num_microbatches: shared(exchange.traffic(params, num_microbatches), 1 / num_passes),
        branches={**exchange.branches, EVERY: (1 - 1 / num_passes, 1 / num_passes)},
        shows_nonfinite=False,
    )


def shared(traffic: list[Traffic], share: float) -> list[Traffic]:
    """Return the traffic of exchanges that run in this share of the steps."""
    return [one._replace(nbytes=one.nbytes * share, messages=one.messages * share) for one in traffic]
