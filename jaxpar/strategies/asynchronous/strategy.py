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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Decision, Plan, Traffic, state_memory
from jaxpar.core.state import Canonical, State, nbytes
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, format_count
from jaxpar.layout import Layout
from jaxpar.models.model import Model
from jaxpar.strategies import exchanges
from jaxpar.strategies.asynchronous import options, table
from jaxpar.strategies.asynchronous.device_numbers import DeviceNumbers, trees_sent
from jaxpar.strategies.asynchronous.engine import UpdateEngine
from jaxpar.strategies.asynchronous.gradient_rows import batches_in_flight, is_grouped, needs_earlier_batches
from jaxpar.strategies.asynchronous.layouts import layouts_on_server, local_layouts, server_layouts
from jaxpar.strategies.asynchronous.local import LocalEngine
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.options import UpdateSource
from jaxpar.strategies.asynchronous.server import ServerEngine
from jaxpar.strategies.asynchronous.table import UpdateTable, staleness_summary
from jaxpar.strategies.asynchronous.threads import Threads
from jaxpar.strategies.asynchronous.transport import BeginTransport
from jaxpar.strategies.asynchronous.virtual_time import Emulation
from jaxpar.strategies.placement import PlacedState, batch_placer, on_all
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums


def decide(config: ConfigDict, cluster: Cluster, _model: Model | None, /) -> Decision[UpdateSource]:
    """Decide on the devices of the workers, and read the files that config.asynchronous names.

    Raises UserError for a config.asynchronous that is invalid, and files that cannot be read.
    """
    meshes.check_processes("config.strategy='async_data_parallel'", cluster)
    meshes.check_stages(config)
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
    """Plan the devices of workers and server, and the update table.

    Raises UserError for a recorded table of a run of another length.
    """
    num_devices, num_workers = decision.num_replicas, config.asynchronous.num_workers
    is_live = config.asynchronous.mode == "live"
    updates = None if is_live else options.build_table(config, decision.source, shapes.num_steps)
    has_device = meshes.sizes(config, cluster)[DATA] > num_devices and not is_local(config)
    numbers = DeviceNumbers(num_workers, num_devices, server=num_devices if has_device else 0)
    problem, mitigations = options.build_mitigations(config, shapes, updates)
    like = states.abstract_state(problem.model, problem.optimizer)
    layouts = plan_layouts(config, like, mitigations, updates, numbers)
    sent = trees_sent(updates, mitigations, numbers, local=is_local(config))
    nbytes_sent, messages = round(sent * nbytes(like.params)), sent * len(jax.tree.leaves(like.params))
    return Plan(
        "async_data_parallel",
        decision,
        summarize_updates(config, updates, has_device),
        layouts,
        AsyncDetails(config.copy_and_resolve_references(), updates, mitigations, problem.optimizer, numbers),
        state_memory(layouts),
        (Traffic("copy", "float32", DATA, nbytes_sent, messages),) if sent else (),
        private_key=async_private_key(config, updates),
        differs=""
        if is_lock_step(config)
        else f"{describe_workers(config)} computes gradients of {'local' if is_local(config) else 'stale'} weights",
        advice=options.diloco_advice(config, updates),
    )


def plan_layouts(
    config: ConfigDict, like: State, mitigations: Mitigations, updates: UpdateTable | None, numbers: DeviceNumbers
) -> dict[str, Layout]:
    """Return the layouts of the arrays. like: shapes of the state; updates: None if live."""
    if updates is None or not is_local(config):
        return server_layouts(like, mitigations, updates, numbers)
    outer, waits = outer_optimizer(config), workers_wait(config)
    return local_layouts(like, mitigations, updates, numbers, outer=outer, waits=waits)


def async_private_key(config: ConfigDict, updates: UpdateTable | None) -> dict[str, Any]:
    """Return the settings that the private state depends on. updates: the table; None if the run is live."""
    return {
        "policy": config.asynchronous.policy,
        "workers": config.asynchronous.num_workers,
        "mitigations": options.named_mitigations(config),
        "table": table_fingerprint(updates) if updates else "live",
    }


def summarize_updates(config: ConfigDict, updates: UpdateTable | None, has_device: bool) -> str:
    """Return policy, workers and staleness in one line. has_device: whether the server has its own device."""
    summary = describe_workers(config)
    if updates is not None:
        staleness = staleness_summary(updates)
        summary += f", mean staleness {staleness['mean']:.2f}, maximum {staleness['max']}"
    return summary + (", server on its own device" if has_device else "")


def build(plan: Plan[AsyncDetails], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[Any]:
    """Build the strategy of config.asynchronous on the first of these devices."""
    details = plan.details
    config, updates = details.config, details.updates
    problem = problem._replace(optimizer=details.optimizer)
    like = states.abstract_state(problem.model, problem.optimizer)
    initial = layouts_on_server(like, details.numbers)
    placed = PlacedState(problem, initial, meshes.make_mesh(initial["key"].axes, devices))
    [at] = placed.shardings.key.device_set
    mesh = meshes.make_mesh(plan.axes, devices)
    engine = build_engine(details, problem, list(mesh.devices.flat), at)
    everywhere = on_all(mesh)
    sums = meshes.one_at_a_time(jax.jit(partial(steps.evaluate, problem), out_shardings=everywhere), mesh)
    place_on_devices = batch_placer(mesh)

    def from_canonical(tree: Canonical, private: Canonical | None = None) -> Any:
        step, path = int(tree["step"]), config.asynchronous.table
        if not private and path and updates is not None and needs_earlier_batches(updates, step):
            raise UserError(
                f"config.asynchronous.table is {path!r}, which applies gradients of batches before step {step} only "
                "after that step; a run can resume there only if it began with this table"
            )
        return engine.start(placed.from_canonical(tree), private or None)

    def evaluate(state: Any, batch: Mapping[str, np.ndarray]) -> Sums:
        total: Sums = sums(jax.device_put(engine.params(state), everywhere), place_on_devices(batch))
        return total

    return Strategy(
        plan,
        tuple(devices[: plan.num_devices]),
        init=lambda key: engine.start(placed.init(key)),
        place=dict,
        step=engine.step,
        evaluate=evaluate,
        to_canonical=lambda state: states.to_canonical(engine.canonical(state)),
        from_canonical=from_canonical,
        compile=lambda: [CompiledProgram(one.compile(), arguments=("parameters",)) for one in engine.lower(like)],
        to_private=engine.private,
        num_in_flight=lambda state: (
            0 if updates is None or is_local(config) else batches_in_flight(updates, state.step)
        ),
        drain=engine.drain,
        report=lambda state, workdir: report(engine.table(state), workdir),
    )


def build_engine(
    details: AsyncDetails, problem: Problem, devices: Sequence[jax.Device], at: jax.Device
) -> UpdateEngine[Any]:
    """Build the engine that runs the table, or records one. devices: of the workers; at: device of the server."""
    config, updates, mitigations, numbers = details.config, details.updates, details.mitigations, details.numbers
    if updates is not None and is_local(config):
        outer, waits = outer_optimizer(config), workers_wait(config)
        return LocalEngine(problem, mitigations, updates, numbers, devices, outer=outer, waits=waits)
    begin: BeginTransport
    if updates is None:
        bound = options.policy_settings(config).get("bound", math.inf)
        begin = partial(Threads, bound=bound, slowdown=config.asynchronous.delays.slowdown)
    else:
        begin = Emulation(updates, numbers).begin
    return ServerEngine(
        problem,
        mitigations,
        numbers,
        devices,
        at,
        begin,
        is_grouped=updates is not None and is_grouped(updates),
    )


def outer_optimizer(config: ConfigDict) -> optax.GradientTransformation | None:
    """Return the outer optimizer of policy diloco; None for other policies."""
    if config.asynchronous.policy != "diloco":
        return None
    settings = options.policy_settings(config)
    return optax.sgd(settings["outer_lr"], settings["outer_momentum"], nesterov=True)


def workers_wait(config: ConfigDict) -> bool:
    """Return whether workers with local weights wait for each other when they average their weights."""
    return bool(config.asynchronous.policy != "model_average")


def is_local(config: ConfigDict) -> bool:
    """Return whether workers have local weights, instead of reading those of a server."""
    return config.asynchronous.policy in options.LOCAL_POLICIES


def report(updates: UpdateTable | None, workdir: Path) -> dict[str, Any]:
    """Write the update table of the run, if it has one, and return its results."""
    if updates is None:
        return {}
    table.write_updates(workdir / "updates.csv", updates)
    staleness = staleness_summary(updates)
    results = {"updates": updates.num_updates, "table_seconds": float(updates.finish[-1])}
    return results | {f"staleness_{name}": staleness[name] for name in ("mean", "max")}


def describe_workers(config: ConfigDict) -> str:
    """Return policy, workers and mitigations, such as `async of 4 workers with dc_asgd`."""
    a = config.asynchronous
    workers = f"{'live ' if a.mode == 'live' else ''}{a.policy} of {a.num_workers} workers"
    return workers + (f" with {', '.join(mitigations)}" if (mitigations := options.named_mitigations(config)) else "")


def is_lock_step(config: ConfigDict) -> bool:
    """Return whether all workers wait for each other in every step, so that they train like one device."""
    return config.asynchronous.policy == "sync" and not options.named_mitigations(config)


def table_fingerprint(updates: UpdateTable) -> str:
    """Return the fingerprint of a table. It does not depend on the recorded times."""
    return hashlib.sha256(b"".join(column.tobytes() for column in updates[1:6])).hexdigest()[:12]
