"""Candidates that are replicas, or a single one, with every exchange that equals training on one device."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.choose.candidates import (
    DEFAULTS_OF_CHOICES,
    GROUP,
    IMPLEMENTATION,
    OF_STAGES,
    OFFLOAD,
    Candidate,
    Settings,
    Space,
    divisors,
    options_of,
    plan_of,
    with_settings,
)
from jaxpar.choose.costs.memory import StateBytes
from jaxpar.choose.costs.replica_steps import REPLICA_KEYS, replicas_costs
from jaxpar.choose.costs.step import UpdateWork
from jaxpar.choose.costs.updates import exchange_bytes, update_bytes
from jaxpar.choose.groups import group_sizes, layers_in, named_with_groups
from jaxpar.core.mesh import GROUP_AXES, TENSOR
from jaxpar.core.plan import Plan, Traffic
from jaxpar.core.ring import RING_COLLECTIVES, sent_of_operand
from jaxpar.core.step import Problem
from jaxpar.exchange.exchange import Exchange
from jaxpar.exchange.named import EXCHANGES, LAYER_BYTES, exchange_differs
from jaxpar.exchange.scatter_layers import can_scatter
from jaxpar.layout import SHARDED
from jaxpar.models.options import scans_layers
from jaxpar.strategies.data_parallel.shard_map import ReplicaDetails, group_traffic, sent_shapes
from jaxpar.strategies.exchanges import sums_along_a_ring

LARGEST_RING = 64  # replicas of a ring whose steps are written out in the program
UPDATE_KERNELS = 2  # kernels of the norm and of the optimizer for each array, as compiled for H100s
COMBINED_BYTES = 30 * 2**20  # XLA combines all-reduces on GPUs up to this size
# Exchanges to compare with the optimizer state in host memory. zero1 saves less than zero2, and sends the same.
OFFLOADED = ("zero2", "zero3")
HSDP = "hsdp"  # with a group for each host; on one host, it is zero3


def of_replicas(space: Space) -> Iterator[Candidate]:
    """Yield those whose replicas are groups of each size."""
    for sizes in group_sizes(space):
        yield from _of_groups(space, sizes)


def _of_groups(space: Space, sizes: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield, for each exchange, remat and form of the layers, the smallest accumulation that fits; else the largest.

    sizes: numbers of devices of a replica, by axis.
    """
    together = math.prod(sizes.values())
    n, batch = space.num_devices // together, space.config.batch_size
    of_axes = {f"mesh.{axis}": size for axis, size in sizes.items()}
    cluster = space.machine.cluster
    if n == 1:
        of_single = {"strategy": "single", "mesh.data": 1, **of_axes, **options_of(space, "ddp", 1)}
        exchanges: list[tuple[str, Settings]] = [("single", of_single)]
    else:
        per_host = cluster.num_devices // cluster.num_processes
        # one group of hsdp is zero3, and groups of one replica are ddp
        no_hsdp = GROUP not in space.kept and (cluster.num_processes == 1 or per_host <= together > 1)
        equal = (name for name in EXCHANGES if not exchange_differs(name, {}, n) and not (no_hsdp and name == HSDP))
        exchanges = [(name, {**_exchange_settings(name, space, together), **of_axes}) for name in equal]
    if cluster.platform == "gpu" and cluster.has_pinned_host_memory:
        of_names = {name: _exchange_settings(name, space, together) for name in OFFLOADED}
        exchanges += [(name, {**settings, **of_axes, OFFLOAD: True}) for name, settings in of_names.items()]
    one_stage = {key: value for key, value in DEFAULTS_OF_CHOICES.items() if key.startswith(OF_STAGES)}
    for name, settings in exchanges:
        if not space.allows({**one_stage, **settings}):
            continue
        if n > LARGEST_RING and sums_along_a_ring(with_settings(space.config, settings)):
            continue
        plan = plan_of(space, settings)
        if isinstance(plan, str):
            continue
        update = update_of(space, with_settings(space.config, settings), plan)
        for remat in space.choices("model.remat", space.layers.remats):
            for scan in space.choices("model.scan_layers", ("auto",)):
                numbers = space.choices("optimizer.accumulation_steps", divisors(batch // n))
                best: Candidate | None = None
                for number in (number for number in numbers if batch % (n * number) == 0):
                    more = {"model.remat": remat, "model.scan_layers": scan, "optimizer.accumulation_steps": number}
                    best = _replicas_candidate(space, name, {**settings, **more}, plan, update)
                    if best.fits:
                        break
                if best is not None:
                    yield best


def _exchange_settings(name: str, space: Space, together: int) -> Settings:
    cluster, replicas = space.machine.cluster, space.num_devices // together
    data = -1 if space.config.elastic_seconds else replicas  # elastic runs have as many replicas as devices are left
    settings: dict[str, Any] = {"strategy": "data_parallel", "mesh.data": data, "exchange": name}
    if name == HSDP:
        settings[GROUP] = cluster.num_devices // cluster.num_processes // together
    if IMPLEMENTATION in space.kept:
        settings[IMPLEMENTATION] = space.kept[IMPLEMENTATION]
    options = options_of(space, name, replicas)
    options.pop(OFFLOAD, None)  # compared with and without
    return settings | options


def update_of(space: Space, config: ConfigDict, plan: Plan[Any]) -> UpdateWork:
    """Return what an update of replicas does on a device. plan: that of the config."""
    problem = layers_in(space, plan.axes).problem if TENSOR in plan.axes else space.problem
    whole, launching = update_bytes(problem), launching_seconds(space)
    if not _has_exchange(plan):
        return UpdateWork(0.0, whole, launching=launching)
    cluster, number = space.machine.cluster, config.optimizer.accumulation_steps

    def plan_for(problem: Problem) -> Plan[Any]:
        return strategies.plan(config, problem._replace(accumulation_steps=number), cluster)

    both = exchange_bytes(space.problem, plan, plan_for)
    exchange = plan.details.exchange
    if plan.layouts["optimizer"].kind == exchange.optimizer == SHARDED:  # not only over the tensor axis
        whole *= exchange.copies / plan.num_replicas
    return UpdateWork(max(both - whole, 0.0), min(whole, both), plan.offloaded_bytes, plan.update_bytes, launching)


def launching_seconds(space: Space) -> float:
    """Return the seconds in which a GPU launches the kernels of an update."""
    return space.machine.launched(UPDATE_KERNELS * len(jax.tree.leaves(space.problem.model.shapes)))


def combined(sent: Traffic, num_replicas: int) -> Traffic:
    """Return the all-reduces that XLA's partitioner adds, as XLA combines them on GPUs."""
    nbytes = sent.nbytes / sent_of_operand("all-reduce", num_replicas)
    return sent._replace(messages=min(sent.messages, 2 * (num_replicas - 1) * math.ceil(nbytes / COMBINED_BYTES)))


def _has_exchange(plan: Plan[Any]) -> bool:
    """Return whether the program of a replica contains the exchange; otherwise XLA or the host adds it."""
    return isinstance(plan.details, ReplicaDetails)


def _replicas_candidate(space: Space, name: str, settings: Settings, plan: Plan[Any], update: UpdateWork) -> Candidate:
    """Return a candidate without stages. plan: that of its exchange, without accumulation; update: see `update_of`."""
    accumulation, remat = settings["optimizer.accumulation_steps"], settings["model.remat"]
    layers = layers_in(space, plan.axes)
    model = layers.problem.model if TENSOR in plan.axes else space.problem.model
    exchange = plan.details.exchange if _has_exchange(plan) else None
    traffic = plan.traffic
    if exchange:
        traffic = tuple(exchange.traffic(sent_shapes(model, space.problem.batch, exchange), accumulation))
        on_cpu, group = space.machine.cluster.platform == "cpu", plan.details.group.with_remat(remat)
        sent = group_traffic(group, exchange, plan.num_replicas, on_cpu=on_cpu)
        traffic += tuple(one._replace(messages=accumulation * one.messages) for one in sent)
    elif plan.details == "sharding" and space.machine.overlaps:
        traffic = tuple(combined(one, plan.num_replicas) for one in traffic)
    gathers_whole = exchange is not None and exchange.gather is not None
    fetch = exchange.fetch if exchange else None
    params = plan.memory[0]["parameters"]
    optimizer = plan.device_bytes[0] - params
    gradients = params * (plan.num_replicas if exchange and gathers_whole and not exchange.leaves_shards else 1)
    costs = replicas_costs(
        layers,
        model,
        space.machine,
        plan.axes,
        space.config.batch_size // (plan.num_replicas * accumulation),
        settings,
        traffic,
        StateBytes(params, optimizer, gradients),
        update,
        gathers_whole=gathers_whole,
        gathers_layers=fetch is not None,
        packs_layers=fetch is not None and fetch.num_bytes >= LAYER_BYTES,
        scatters_layers=exchange is not None and exchange.scatter_layers is not None and can_scatter(model),
        sent_alone=_sent_alone(exchange, settings) if exchange else (),
    )
    if plan.offloaded_bytes:
        name += ", offload"
    if any(axis in plan.axes for axis in GROUP_AXES):
        name = named_with_groups(name, plan.axes)
    return Candidate(name, settings, costs, costs.nbytes <= space.usable_bytes)


def _sent_alone(exchange: Exchange, settings: Settings) -> tuple[str, ...]:
    """Return the kinds of collectives of an exchange that are sent when nothing can be computed."""
    accumulates = settings["optimizer.accumulation_steps"] > 1
    scans = scans_layers(settings["model.scan_layers"], settings["model.remat"])
    if accumulates and scans and not exchange.leaves_shards:  # otherwise, the last backward pass is not in a loop
        return RING_COLLECTIVES
    # Parameters are gathered before a loop over layers or microbatches, and hsdp sums over groups after it.
    if not exchange.shards or not (accumulates or scans):
        return ()
    return ("all-gather",) if exchange.gather else ("all-reduce",)


def candidate_of_replicas(space: Space, config: ConfigDict, plan: Plan[Any]) -> Candidate:
    """Return the candidate of a plan of single or data_parallel."""
    name = config.exchange if plan.strategy == "data_parallel" else plan.strategy
    return _replicas_candidate(space, name, settings_of_replicas(config), plan, update_of(space, config, plan))


def settings_of_replicas(config: ConfigDict) -> Settings:
    """Return the settings of REPLICA_KEYS that a config has."""
    flat = configs.keys(config)
    return {key: flat[key] for key in REPLICA_KEYS}
