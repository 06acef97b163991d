"""`data_parallel`: every device takes a share of each batch; config.exchange says how they agree.

By `shard_map`: a program for one replica, in which the exchange is written out (jaxpar/strategies/replicas.py). By
`sharding`: the step of one device is compiled for the whole mesh with the batch divided over `data` and the state
replicated; XLA's partitioner then adds the gradients up. By `pmap`: the same step runs once a device and the sums over
`data` are written out. Gradients are divided by the weight of the global batch, not of a replica's share.

XLA adds each product up right behind it, in its dtype: a weight's gradient in bfloat16, before it is made float32. So
replicas of a bfloat16 model have their sums written out.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpar import mesh as meshes
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.errors import UserError, check_choice
from jaxpar.exchange.reduce import Traffic
from jaxpar.mesh import DATA
from jaxpar.state import State, nbytes
from jaxpar.step import Metrics, Problem
from jaxpar.strategies import exchanges, master, replicas
from jaxpar.strategies.strategy import CompiledProgram, Description, Strategy, with_shardings
from jaxpar.tasks import Sums

IMPLEMENTATIONS = ("auto", "shard_map", "sharding", "pmap")


def num_replicas(config: ConfigDict) -> int:
    """Devices on the data axis. Raises UserError where there are not as many."""
    check_choice("data_parallel.implementation", config.data_parallel.implementation, IMPLEMENTATIONS)
    if config.exchange == "dp":
        meshes.check_one_process("config.exchange='dp'")
    if config.data_parallel.implementation == "pmap":
        meshes.check_one_process("config.data_parallel.implementation='pmap'")
    meshes.check_one_stage(config)
    replicas = meshes.num_replicas(config)
    exchanges.check(config, replicas)
    if config.data_parallel.implementation in ("sharding", "pmap") and not is_plain(config):
        raise UserError(
            f"config.data_parallel.implementation is {config.data_parallel.implementation!r}, in which XLA adds "
            "gradients up; it may be 'shard_map' with a config.exchange or config.exchange_options"
        )
    if config.data_parallel.implementation == "sharding" and not sums_are_float32(config, replicas):
        raise UserError(
            "config.data_parallel.implementation is 'sharding', in which XLA adds gradients up in config.model.dtype, "
            f"{config.model.dtype!r}; on several replicas it may be 'shard_map' or 'pmap', in which sums are float32"
        )
    return replicas


def is_plain(config: ConfigDict) -> bool:
    """Whether the exchange is ddp as it comes, which XLA can write too."""
    return config.exchange == "ddp" and not exchanges.given(config)


def sums_are_float32(config: ConfigDict, num_replicas: int) -> bool:
    """Whether XLA adds gradients up in float32, where it writes the sums: it does so in the model's dtype."""
    return num_replicas == 1 or config.model.dtype == "float32"


def parts(config: ConfigDict, num_replicas: int) -> tuple[int, str]:
    """What a batch divides into: of each replica, what it takes one after another."""
    microbatches = config.optimizer.accumulation_steps
    return num_replicas * microbatches, f"{num_replicas} replicas (the data axis) x {microbatches} accumulation steps"


def build(config: ConfigDict, problem: Problem) -> Strategy:
    """The implementation that config.data_parallel.implementation names."""
    mesh = meshes.build(num_replicas(config))
    if config.exchange == "dp":
        return master.build(problem, mesh)
    implementation = config.data_parallel.implementation
    if implementation == "auto":
        by_xla = is_plain(config) and sums_are_float32(config, mesh.size)
        implementation = "sharding" if by_xla else "shard_map"
    if implementation == "pmap":
        return build_pmap(problem, mesh)
    if implementation == "sharding":
        return build_sharding(problem, mesh)
    exchange = exchanges.build(config, problem, mesh.size)
    private_of = f"{exchanges.full_name(config)} on {mesh.size} replicas"
    strategy = replicas.build(problem, mesh, exchange, exchanges.name(config), private_of)
    return strategy._replace(differs=exchanges.differs(config))


def build_sharding(problem: Problem, mesh: Mesh) -> Strategy:
    """Data parallelism by jit over `mesh`: batch divided, state replicated."""
    replicated = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec(DATA))
    like = jax.eval_shape(functools.partial(states.init, problem.model, problem.optimizer), jax.random.key(0))

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        grads, sums = steps.gradients(problem, state, batch, batch["weights"].sum())
        return steps.update(problem, state, grads, sums)

    def evaluate(state: State, batch: dict[str, jax.Array]) -> Sums:
        return steps.evaluate(problem, state.params, batch)

    def place(rows: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return {key: jax.make_array_from_process_local_data(divided, value) for key, value in rows.items()}

    compiled_step = jax.jit(step, donate_argnums=0, out_shardings=replicated)
    arguments = with_shardings(like, replicated), with_shardings(problem.batch, divided)
    return Strategy(
        init=jax.jit(functools.partial(states.init, problem.model, problem.optimizer), out_shardings=replicated),
        place=place,
        step=meshes.one_at_a_time(compiled_step, mesh),
        evaluate=meshes.one_at_a_time(jax.jit(evaluate, out_shardings=replicated), mesh),
        to_canonical=states.to_canonical,
        from_canonical=lambda tree, private=None: jax.device_put(states.from_canonical(tree, like), replicated),
        describe=lambda: describe(mesh, like, "one device" if mesh.size == 1 else "batch divided, state replicated"),
        compile=lambda: [CompiledProgram(compiled_step.lower(*arguments).compile())],
    )


def build_pmap(problem: Problem, mesh: Mesh) -> Strategy:
    """Data parallelism by `jax.pmap`: arrays have a leading dim of the replicas."""
    devices = list(mesh.devices.flat)
    like = jax.eval_shape(functools.partial(states.init, problem.model, problem.optimizer), jax.random.key(0))

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        weight = jax.lax.psum(batch["weights"].sum(), DATA)
        grads_unreduced, sums_unreduced = steps.gradients(problem, state, batch, weight)
        grads, sums = jax.lax.psum((grads_unreduced, sums_unreduced), DATA)
        return steps.update(problem, state, grads, sums)

    def evaluate(state: State, batch: dict[str, jax.Array]) -> Sums:
        return jax.lax.psum(steps.evaluate(problem, state.params, batch), DATA)

    def first(tree: Any) -> Any:
        """A replicated tree as its first replica's arrays."""
        return jax.tree.map(lambda x: x.addressable_shards[0].data[0], tree)

    compiled_step = jax.pmap(step, axis_name=DATA, devices=devices, donate_argnums=0)
    mapped_step = meshes.one_at_a_time(compiled_step, mesh)
    mapped_evaluate = meshes.one_at_a_time(jax.pmap(evaluate, axis_name=DATA, devices=devices), mesh)

    def place(rows: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        sharding = NamedSharding(mesh, PartitionSpec(DATA))
        split = {key: value.reshape(len(devices), -1, *value.shape[1:]) for key, value in rows.items()}
        return {key: jax.device_put(value, sharding) for key, value in split.items()}

    def replicate(state: State) -> State:
        sharding = NamedSharding(mesh, PartitionSpec(DATA))
        stacked = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (len(devices), *x.shape)), state)
        return jax.device_put(stacked, sharding)

    def mapped_step_with_first(state: State, batch: Any) -> tuple[State, Metrics]:
        state, metrics = mapped_step(state, batch)
        return state, first(metrics)

    def compile() -> list[CompiledProgram]:
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype), like)
        batch = {
            key: jax.ShapeDtypeStruct((len(devices), x.shape[0] // len(devices), *x.shape[1:]), x.dtype)
            for key, x in problem.batch.items()
        }
        return [CompiledProgram(compiled_step.lower(state, batch).compile())]

    init = jax.jit(functools.partial(states.init, problem.model, problem.optimizer))
    return Strategy(
        init=lambda key: replicate(init(key)),
        place=place,
        step=mapped_step_with_first,
        evaluate=lambda state, batch: first(mapped_evaluate(state, batch)),
        to_canonical=lambda state: states.to_canonical(first(state)),
        from_canonical=lambda tree, private=None: replicate(states.from_canonical(tree, like)),
        describe=lambda: describe(mesh, like, "pmap: batch divided, state replicated"),
        compile=compile,
    )


def describe(mesh: Mesh, state: State, layout: str) -> Description:
    """All of the state on each device; gradients by ring all-reduce: each sends 2(n-1)/n of their bytes."""
    devices = tuple(mesh.devices.flat)
    memory = {"parameters": nbytes(state.params), "optimizer": nbytes(state.optimizer)}
    sent = 2 * (len(devices) - 1) / len(devices) * nbytes(state.params)
    traffic = (Traffic("all-reduce", "float32", DATA, sent),) if len(devices) > 1 else ()
    return Description(devices, layout, len(devices), (memory,) * len(devices), traffic)
