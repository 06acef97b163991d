"""`async_data_parallel`: workers take gradients of the weights that they have read, and nobody waits for all.

What workers would do by chance is a table, which a simulation in virtual time makes of config.asynchronous
(jaxpar/asynchronous/simulate.py). An engine runs it, in the order that it says (jaxpar/asynchronous/server.py where
workers send gradients to a server, local.py where they have weights of their own). So a run is the same every time,
with any number of workers, on any number of devices. Or workers are threads (live.py), and the table is what they did.

A step of the run is as many gradients as there are workers, each of its part of the batch.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from ml_collections import ConfigDict

from jaxpar import layout
from jaxpar import mesh as meshes
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.asynchronous import live, local, options, server, table
from jaxpar.asynchronous.programs import Arrival, Mitigations
from jaxpar.asynchronous.table import UpdateTable, staleness_summary
from jaxpar.cluster import Cluster
from jaxpar.errors import UserError
from jaxpar.mesh import DATA, STAGE
from jaxpar.plan import Decision, Plan, Traffic
from jaxpar.state import Canonical, State, nbytes
from jaxpar.step import Problem
from jaxpar.strategies import exchanges
from jaxpar.strategies.strategy import CompiledProgram, Strategy, placer, with_shardings
from jaxpar.tasks import Sums


def decide(config: ConfigDict, cluster: Cluster) -> Decision:
    """Decide on devices for the workers. Raises UserError for what is wrong with config.asynchronous."""
    meshes.check_one_process("config.strategy='async_data_parallel'", cluster)
    meshes.check_one_stage(config)
    if config.exchange != "ddp" or exchanges.given(config):
        raise UserError(
            f"config.exchange is {exchanges.name(config)!r}; it must be 'ddp' without options with "
            "config.strategy='async_data_parallel', where config.asynchronous says what is exchanged"
        )
    options.check(config)
    workers, microbatches = config.asynchronous.num_workers, config.optimizer.accumulation_steps
    available = meshes.sizes(config, cluster)[DATA]
    taken = min(available, workers)
    words = f"{workers} workers (config.asynchronous.num_workers) x {microbatches} accumulation steps"
    divisor = math.lcm(workers * microbatches, taken)
    return Decision({DATA: taken, STAGE: 1}, divisor, f"{words}, on {taken} devices", taken, available)


@dataclass(frozen=True)
class AsyncDetails:
    """What `build` needs of a plan. server: the number of its device, the first behind the workers', or 0."""

    config: ConfigDict
    updates: UpdateTable | None
    server: int


def plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision | None = None) -> Plan:
    """Plan the workers' devices, the server's, and the table of updates."""
    decision = decision or decide(config, cluster)
    taken, available = decision.num_replicas, decision.table
    is_live = config.asynchronous.mode == "live"
    updates = None if is_live else options.build_table(config, shapes.num_steps)
    has_its_own = available > taken and config.asynchronous.policy not in options.LOCAL
    server = taken if has_its_own else 0
    problem, mitigations = options.build_mitigations(config, shapes, updates)
    numbers: Any = list(range(taken))
    engine: Any = build_engine(config, problem, mitigations, updates, numbers, cast(Any, server))
    like = states.abstract(problem.model, problem.optimizer)
    memory, summary = engine.memory(like), words(config)
    if updates is not None:
        staleness = staleness_summary(updates)
        summary += f", staleness {staleness['mean']:.2f} on average and {staleness['max']} at most"
    if len(memory) > taken:
        summary += ", the server on a device of its own"
    sent = round(engine.sent() * nbytes(like.params))
    layouts = {part: layout.on_one(decision.axes, getattr(like, part), DATA, 0) for part in ("params", "optimizer")}
    return Plan(
        "async_data_parallel",
        decision,
        summary,
        layouts,
        tuple(memory.values()),
        (Traffic("copy", "float32", DATA, sent, messages=engine.sent()),) if sent else (),
        private_key={"policy": words(config), "table": fingerprint(updates) if updates else "live"},
        differs="" if is_lock_step(config) else f"{words(config)} takes gradients of weights that are not the newest",
        details=AsyncDetails(config, updates, server),
    )


def build(plan: Plan, problem: Problem, devices: Sequence[jax.Device]) -> Strategy:
    """Build the strategy of config.asynchronous on the first of these devices."""
    config, updates = plan.details.config, plan.details.updates
    mesh, at, used = meshes.build(plan.axes, devices), devices[plan.details.server], devices[: plan.num_devices]
    devices = list(mesh.devices.flat)
    problem, mitigations = options.build_mitigations(config, problem, updates)
    engine: Any = build_engine(config, problem, mitigations, updates, devices, at)
    first, everywhere = SingleDeviceSharding(at), NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec(DATA))
    like = states.abstract(problem.model, problem.optimizer)
    fresh = jax.jit(partial(states.init, problem.model, problem.optimizer), out_shardings=first)
    sums = meshes.one_at_a_time(jax.jit(partial(steps.evaluate, problem), out_shardings=everywhere), mesh)
    place_on_devices = placer(divided)

    def from_canonical(tree: Canonical, private: Canonical | None = None) -> Any:
        step, path = int(tree["step"]), config.asynchronous.table
        if not private and path and engine.needs_private(step):
            raise UserError(
                f"config.asynchronous.table is {path!r}, which has gradients of batches before step {step} after it; "
                "only a run that began with this table may go on with it there"
            )
        begun = engine.start(jax.device_put(states.from_canonical(tree, like), first))
        return engine.restored(begun, private) if private else begun

    def evaluate(state: Any, batch: Mapping[str, np.ndarray]) -> Sums:
        total: Sums = sums(jax.device_put(engine.params(state), everywhere), place_on_devices(batch))
        return total

    return Strategy(
        plan,
        tuple(used),
        init=lambda key: engine.start(fresh(key)),
        place=dict,
        step=engine.step,
        evaluate=evaluate,
        to_canonical=lambda state: states.to_canonical(engine.canonical(state)),
        from_canonical=from_canonical,
        compile=lambda: compiled(engine, problem, like, devices, at),
        to_private=engine.private,
        report=lambda state, workdir: report(engine.table(state), workdir),
    )


def build_engine(
    config: ConfigDict,
    problem: Problem,
    mitigations: Mitigations,
    updates: UpdateTable | None,
    devices: Sequence[jax.Device],
    at: jax.Device,
) -> server.ServerEngine | local.LocalEngine | live.LiveEngine:
    """What runs the table, or makes one. devices: of the workers; at: the server's."""
    a, own = config.asynchronous, options.settings(config)
    if updates is None:
        bound = own.get("bound", math.inf)
        return live.LiveEngine(
            problem, mitigations, a.num_workers, devices, at=at, bound=bound, slowdown=a.delays.slowdown
        )
    if a.policy not in options.LOCAL:
        return server.ServerEngine(problem, mitigations, updates, devices, at)
    outer = optax.sgd(own["outer_lr"], own["outer_momentum"], nesterov=True) if a.policy == "diloco" else None
    return local.LocalEngine(problem, mitigations, updates, devices, outer=outer, waits=a.policy != "model_average")


def report(updates: UpdateTable | None, workdir: Path) -> dict[str, Any]:
    """Writes the table of what was run, if anything was; what it comes to."""
    if updates is None:
        return {}
    table.write(workdir / "updates.csv", updates)
    staleness = staleness_summary(updates)
    figures = {"updates": updates.num_updates, "table_seconds": float(updates.finish[-1])}
    return figures | {f"staleness_{name}": staleness[name] for name in ("mean", "max")}


def compiled(
    engine: Any, problem: Problem, like: State, devices: Sequence[jax.Device], at: jax.Device
) -> list[CompiledProgram]:
    """The programs of workers, each device's, and the server's for the last gradient of an update."""
    programs, n = engine.programs, engine.num_workers
    rows = {k: jax.ShapeDtypeStruct((len(x) // n, *x.shape[1:]), x.dtype) for k, x in problem.batch.items()}
    figure, step = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    given = (like.params, like.key, step, rows, figure)
    workers = [programs.gradient.lower(*with_shardings(given, SingleDeviceSharding(device))) for device in devices]
    server = programs.abstract_server(like, is_grouped=engine.is_grouped)
    read = like.params if programs.mitigations.needs_read else None
    arguments = (like.params, server, *workers[0].out_info, read, Arrival(figure, figure, figure, step))
    places = devices if isinstance(engine, local.LocalEngine) else [at]
    updates = [
        programs.arrive.lower(not engine.is_grouped, True, *with_shardings(arguments, SingleDeviceSharding(place)))
        for place in places
    ]
    return [CompiledProgram(lowered.compile(), arguments=("params",)) for lowered in (*workers, *updates)]


def words(config: ConfigDict) -> str:
    """Policy, workers and mitigations, in words."""
    a = config.asynchronous
    made = f"{'live ' if a.mode == 'live' else ''}{a.policy} of {a.num_workers} workers"
    return made + (f" with {', '.join(mitigations)}" if (mitigations := options.named_mitigations(config)) else "")


def is_lock_step(config: ConfigDict) -> bool:
    """Whether all workers wait for each other, and so do what one device does."""
    return config.asynchronous.policy == "sync" and not options.named_mitigations(config)


def fingerprint(updates: UpdateTable) -> str:
    """Of a table, but for its times."""
    return hashlib.sha256(b"".join(column.tobytes() for column in updates[1:6])).hexdigest()[:12]
