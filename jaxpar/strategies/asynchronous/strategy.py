"""`async_data_parallel`: workers compute gradients at the weights that they last read, without waiting for each other.

In an emulated run, the order of reads and updates is a table, which a simulation in virtual time derives from
config.asynchronous (jaxpar/strategies/asynchronous/simulate.py). An engine runs the rows of the table in order:
server.py if workers send gradients to a server, local.py if workers have local weights. So a run is reproducible for
any number of workers, on any number of devices. In a live run, the workers are threads (threads.py), and the table
records what they did.

One step of a run processes one gradient per worker, each of the worker's shard of the batch.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Decision, Plan, Traffic, state_memory
from jaxpar.core.state import Canonical, nbytes
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, format_count
from jaxpar.models.model import Model
from jaxpar.strategies import exchanges
from jaxpar.strategies.asynchronous import options, table
from jaxpar.strategies.asynchronous.layouts import (
    DeviceNumbers,
    layouts_on_server,
    local_layouts,
    server_layouts,
    trees_sent,
)
from jaxpar.strategies.asynchronous.local import LocalEngine
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.options import UpdateSource
from jaxpar.strategies.asynchronous.server import ServerEngine
from jaxpar.strategies.asynchronous.table import UpdateTable
from jaxpar.strategies.asynchronous.threads import Threads
from jaxpar.strategies.asynchronous.transport import BeginTransport
from jaxpar.strategies.asynchronous.virtual_time import VirtualTime
from jaxpar.strategies.placement import PlacedState, evaluator
from jaxpar.strategies.strategy import CompiledProgram, Strategy


def decide(config: ConfigDict, cluster: Cluster, _model: Model | None, /) -> Decision[UpdateSource]:
    """Decide on the devices of the workers, and read the files of config.asynchronous. Raises UserError."""
    meshes.check_processes("config.strategy='async_data_parallel'", cluster)
    meshes.check_stages(config)
    meshes.check_no_groups(config, "config.strategy='async_data_parallel'")
    exchanges.check_no_exchange(config, "whose exchange is set by config.asynchronous")
    source = options.decide_updates(config)
    workers, microbatches = config.asynchronous.num_workers, config.optimizer.accumulation_steps
    meshes.check_sizes(config, cluster)
    taken = min(meshes.sizes(config, cluster)[DATA], workers)
    steps_words = format_count(microbatches, "accumulation step")
    words = f"{format_count(workers, 'worker')} (config.asynchronous.num_workers) x {steps_words}"
    divisor = math.lcm(workers * microbatches, taken)
    return Decision({DATA: taken, STAGE: 1}, divisor, f"{words}, on {taken} devices", taken, source)


@dataclass(frozen=True)
class AsyncDetails:
    """The details of a plan that `build` needs."""

    config: ConfigDict  # a copy of the config of the run
    updates: UpdateTable | None  # the update table; None for a live run
    mitigations: Mitigations  # mitigations of staleness
    optimizer: optax.GradientTransformationExtraArgs  # the optimizer of the problem, possibly modified by a mitigation
    numbers: DeviceNumbers  # the devices of the workers and the server


def plan(
    config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[UpdateSource], /
) -> Plan[AsyncDetails]:
    """Plan devices and update table. Raises UserError for a recorded table of a run of another length."""
    a, num_devices, is_local = config.asynchronous, decision.num_replicas, has_local_weights(config)
    updates = None if a.mode == "live" else options.build_table(config, decision.source, shapes.num_steps)
    has_device = meshes.sizes(config, cluster)[DATA] > num_devices and not is_local
    numbers = DeviceNumbers(a.num_workers, num_devices, server=num_devices if has_device else 0)
    problem, mitigations = options.build_mitigations(config, shapes, updates)
    like = states.abstract_state(problem.model, problem.optimizer)
    if is_local and updates is not None:
        outer, waits = _meeting(config)
        layouts = local_layouts(like, mitigations, updates, numbers, outer=outer, waits=waits)
    else:
        layouts = server_layouts(like, mitigations, updates, numbers)
    sent = trees_sent(updates, mitigations, numbers, local=is_local)
    nbytes_sent, messages = round(sent * nbytes(like.params)), sent * len(jax.tree.leaves(like.params))
    names = options.named_mitigations(config)
    workers = f"{'live ' if a.mode == 'live' else ''}{a.policy} of {format_count(a.num_workers, 'worker')}"
    workers += f" with {', '.join(names)}" if names else ""
    # One emulated worker computes each gradient from the newest weights. Only diloco has a further optimizer.
    is_alone = a.num_workers == 1 and a.mode != "live" and a.policy != "diloco"
    is_exact = not names and (a.policy == "sync" or is_alone)  # workers train like one device
    summary, fingerprint = workers, "live"
    if updates is not None:
        staleness = updates.staleness
        summary += f", mean staleness {staleness.mean():.2f}, maximum {staleness.max()}"
        # times do not count: a run and its replay have the same weights
        fingerprint = hashlib.sha256(b"".join(column.tobytes() for column in updates[1:6])).hexdigest()[:12]
    return Plan(
        "async_data_parallel",
        decision,
        summary + (", server on its own device" if has_device else ""),
        layouts,
        AsyncDetails(config.copy_and_resolve_references(), updates, mitigations, problem.optimizer, numbers),
        state_memory(layouts),
        (Traffic("copy", "float32", DATA, nbytes_sent, messages),) if sent else (),
        private_key={
            "policy": a.policy,
            "workers": a.num_workers,
            "mitigations": names,
            "table": fingerprint,
        },
        differs="" if is_exact else f"{workers} computes gradients of {'local' if is_local else 'stale'} weights",
        advice=options.diloco_advice(config, updates),
    )


def has_local_weights(config: ConfigDict) -> bool:
    """Return whether workers have local weights, instead of reading those of a server."""
    return config.asynchronous.policy in options.LOCAL_POLICIES


def _meeting(config: ConfigDict) -> tuple[optax.GradientTransformation | None, bool]:
    """Return `outer` and `waits` of `LocalEngine`: how workers with local weights synchronize."""
    policy, settings = config.asynchronous.policy, options.policy_settings(config)
    if policy != "diloco":
        return None, policy != "model_average"
    return optax.sgd(settings["outer_lr"], settings["outer_momentum"], nesterov=True), True


def build(plan: Plan[AsyncDetails], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[Any]:
    """Build the strategy of config.asynchronous on the first of these devices."""
    details = plan.details
    config, updates, numbers = details.config, details.updates, details.numbers
    problem = problem._replace(optimizer=details.optimizer)
    like = states.abstract_state(problem.model, problem.optimizer)
    initial = layouts_on_server(like, numbers)
    placed = PlacedState(problem, initial, meshes.make_mesh(numbers.axes, devices))
    [at] = placed.shardings.key.device_set
    mesh = meshes.make_mesh(plan.axes, devices)
    engine = _build_engine(details, problem, list(mesh.devices.flat), at)
    evaluate = evaluator(problem, mesh)

    def from_canonical(tree: Canonical, private: Canonical | None = None) -> Any:
        step, path = int(tree["step"]), config.asynchronous.table
        if not private and path and updates is not None and table.needs_earlier_batches(updates, step):
            raise UserError(
                f"config.asynchronous.table is {path!r}, which applies gradients of batches before step {step} only "
                "after that step; a run can resume there only if it began with this table"
            )
        return engine.start(placed.from_canonical(tree), private or None)

    def num_in_flight(state: Any) -> int:
        return 0 if updates is None or has_local_weights(config) else table.batches_in_flight(updates, state.step)

    def report(state: Any, workdir: Path) -> dict[str, Any]:
        """Write the update table of the run, if it has one, and return its results."""
        done = engine.table(state)
        if done is None:
            return {}
        table.write_updates(workdir / "updates.csv", done)
        results = {"updates": done.num_updates, "table_seconds": float(done.finish[-1])}
        return results | {"staleness_mean": float(done.staleness.mean()), "staleness_max": int(done.staleness.max())}

    return Strategy(
        plan,
        tuple(devices[: plan.num_devices]),
        init=lambda key: engine.start(placed.init(key)),
        place=dict,
        step=engine.step,
        evaluate=lambda state, batch: evaluate(engine.params(state), batch),
        to_canonical=lambda state: states.to_canonical(engine.canonical(state)),
        from_canonical=from_canonical,
        compile=lambda: [CompiledProgram(one.compile(), arguments=("parameters",)) for one in engine.lower(like)],
        to_private=engine.private,
        num_in_flight=num_in_flight,
        drain=engine.drain,
        report=report,
    )


def _build_engine(
    details: AsyncDetails, problem: Problem, devices: Sequence[jax.Device], at: jax.Device
) -> ServerEngine | LocalEngine:
    """Build the engine that runs the table, or records one. devices: of the workers; at: device of the server."""
    config, updates, mitigations, numbers = details.config, details.updates, details.mitigations, details.numbers
    if updates is not None and has_local_weights(config):
        outer, waits = _meeting(config)
        return LocalEngine(problem, mitigations, updates, numbers, devices, outer=outer, waits=waits)
    begin: BeginTransport
    if updates is None:
        bound = options.policy_settings(config).get("bound", math.inf)
        begin = partial(Threads, bound=bound, slowdown=config.asynchronous.delays.slowdown)
    else:
        begin = partial(VirtualTime, updates)
    is_grouped = updates is not None and updates.is_grouped
    return ServerEngine(problem, mitigations, numbers, devices, at, begin, is_grouped=is_grouped)
