"""Every array of every strategy has the placement in the layouts of the plan, initially and after a step."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import cluster
from jaxpar.exchange import EXCHANGES
from jaxpar.exchange.exchange import DistributedState
from jaxpar.layout import HELD, PER_REPLICA, REPLICATED, SHARDED, Layout, LeafLayout
from jaxpar.strategies import STRATEGIES, Strategy
from jaxpar.strategies.asynchronous.local import LocalState
from jaxpar.strategies.asynchronous.server import ServerRun
from jaxpar.strategies.asynchronous.virtual_time import VirtualTime
from tests.strategies.pipelines import Task, make, make_batch, staged_state

MLP = Task("mlp", "classification", layers=1)
STAGED_MLP = MLP._replace(layers=4)
N = 4
DATA_PARALLEL = ("strategy=data_parallel", f"mesh.data={N}")
CASES: dict[str, tuple[str, ...]] = {
    "single": ("strategy=single",),
    "sharding": DATA_PARALLEL,
    "pmap": (*DATA_PARALLEL, "data_parallel.implementation=pmap"),
    "dp": (*DATA_PARALLEL, "exchange=dp"),
    **{f"exchange {name}": (*DATA_PARALLEL, f"exchange={name}") for name in EXCHANGES if name != "dp"},
    **{
        f"exchange {name}": (*DATA_PARALLEL, f"exchange={name}", "exchange_options.min_compress_bytes=0")
        for name, row in EXCHANGES.items()
        if "min_compress_bytes" in row.options
    },
    "exchange zero2, offload": (*DATA_PARALLEL, "exchange=zero2", "exchange_options.offload=True"),
}
ASYNCHRONOUS = ("strategy=async_data_parallel", "asynchronous.delays.distribution=lognormal", f"mesh.data={N}")
ASYNC_CASES: dict[str, tuple[str, ...]] = {
    "sync": ("policy=sync", "num_workers=8"),
    "async": ("policy=async", "num_workers=16", "mitigations=adaptive_dc_asgd,staleness_aware"),
    "softsync, the server on a device of its own": ("policy=softsync", "num_workers=2"),
    "live": ("policy=async", "num_workers=4", "mode=live", "delays.distribution=constant"),
    "local_sgd": ("policy=local_sgd", "num_workers=8", "interval=2"),
    "diloco": ("policy=diloco", "num_workers=16", "interval=2"),
    "model_average": ("policy=model_average", "num_workers=8", "interval=2"),
}
PIPELINE = ("strategy=pipeline", "mesh.stage=2", "pipeline.num_microbatches=4")
ONEBIT = "exchange=byteps_onebit", "exchange_options.min_compress_bytes=0"
PIPELINE_CASES: dict[str, tuple[str, ...]] = {
    "1f1b": (*PIPELINE, "mesh.data=2", "pipeline.schedule=1f1b"),
    "1f1b, private state": (*PIPELINE, "mesh.data=2", "pipeline.schedule=1f1b", *ONEBIT),
    "zb_v": (*PIPELINE, "pipeline.schedule=zb_v"),
    "zb_v, private state": (*PIPELINE, "mesh.data=2", "pipeline.schedule=zb_v", *ONEBIT),
}
SWARM = ("strategy=swarm", "swarm.stages=2", "swarm.peers=3", "mesh.data=2", "swarm.delayed=True")
# The kinds of layout of parameters and optimizer state.
KINDS = {
    "dp": (HELD, HELD),
    "exchange zero1": (REPLICATED, SHARDED),
    "exchange zero2": (REPLICATED, SHARDED),
    "exchange zero2, offload": (REPLICATED, SHARDED),
    "exchange zero3": (SHARDED, SHARDED),
    "exchange hsdp": (SHARDED, SHARDED),
    "exchange hsdp, groups": (SHARDED, SHARDED),
    "exchange horovod_adasum": (REPLICATED, PER_REPLICA),
    "exchange bagua_decentralized": (PER_REPLICA, PER_REPLICA),
    "exchange bagua_low_precision_decentralized": (PER_REPLICA, PER_REPLICA),
    "exchange bagua_model_average": (PER_REPLICA, PER_REPLICA),
}


def parts(state: Any) -> dict[str, Any]:
    """Return the trees of the state by the names of their layouts."""
    fields = state._asdict()
    if isinstance(state.optimizer, DistributedState):
        fields |= state.optimizer._asdict()
    return fields


def expected_shards(leaf: LeafLayout, axes: Mapping[str, int]) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shape and the start indices of each device's shard of the global array, by device.

    They are derived independently from the definition of the layout. Neighbours on the second of two axes are
    neighbouring devices.
    """
    shards = {}
    for device, place in enumerate(np.ndindex(*axes.values())):
        number = dict(zip(axes, place, strict=True))
        if leaf.holders and number[leaf.holders.axis] not in leaf.holders.numbers:
            continue
        shape, begin = list(leaf.shape), [0] * len(leaf.shape)
        if leaf.split:
            share = math.ceil(shape[leaf.split.dim] / (axes[leaf.split.axis] // leaf.split.copies))
            shape[leaf.split.dim], begin[leaf.split.dim] = share, share * number[leaf.split.axis]
        shards[device] = ((1,) * len(leaf.leading) + tuple(shape), (*[number[axis] for axis in leaf.leading], *begin))
    return shards


def assert_is_where_layout_says(array: jax.Array, leaf: LeafLayout, axes: Mapping[str, int]) -> None:
    devices = cluster.devices()
    found = {
        devices.index(shard.device): (shard.data.shape, tuple(part.start or 0 for part in shard.index))
        for shard in array.addressable_shards
    }
    assert found == expected_shards(leaf, axes)
    assert array.dtype == leaf.dtype
    assert (array.sharding.memory_kind == "pinned_host") == leaf.on_host


def nbytes_by_device(tree: Any, num_devices: int) -> list[int]:
    held, devices = [0] * num_devices, cluster.devices()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[devices.index(shard.device)] += shard.data.nbytes
    return held


def assert_all_is_where_layout_says(tree: Any, layout: Layout, num_devices: int, note: Any) -> None:
    leaves = jax.tree.leaves(layout.leaves, is_leaf=lambda node: isinstance(node, LeafLayout))
    for array, leaf in zip(jax.tree.leaves(tree), leaves, strict=True):
        assert_is_where_layout_says(array, leaf, layout.axes)
    assert nbytes_by_device(tree, num_devices) == layout.nbytes_by_device, note


def states(strategy: Strategy[Any], task: Task) -> dict[str, Any]:
    """Return the initial state, the state after a step, and the state converted from the canonical one."""
    initial = strategy.init(jax.random.key(0))
    again = strategy.from_canonical(jax.device_get(strategy.to_canonical(initial)))
    batch = strategy.place(make_batch(task, 0))
    stepped, _ = strategy.step(strategy.init(jax.random.key(0)), batch)
    return {"init": initial, "step": stepped, "from_canonical": again}


@pytest.mark.parametrize("name", CASES)
def test_arrays_are_where_layouts_say(name: str) -> None:
    strategy = make(MLP, *(f"--config.{setting}" for setting in CASES[name]))
    layouts = strategy.plan.layouts
    assert (layouts["params"].kind, layouts["optimizer"].kind) == KINDS.get(name, (REPLICATED, REPLICATED))
    for when, state in states(strategy, MLP).items():
        trees = parts(state)
        assert layouts.keys() - trees.keys() <= {"copies"}  # they exist only during a step
        for part in layouts.keys() & trees.keys():
            layout = layouts[part]
            assert_all_is_where_layout_says(trees[part], layout, strategy.plan.num_devices, (when, part))


@pytest.mark.parametrize("name", PIPELINE_CASES)
def test_packed_arrays_are_where_layouts_say(name: str) -> None:
    """Packed arrays have the same size on every device: the largest size of any device's leaves."""
    strategy = make(STAGED_MLP, *(f"--config.{setting}" for setting in PIPELINE_CASES[name]))
    layouts, num_devices = strategy.plan.layouts, strategy.plan.num_devices
    packed = staged_state(strategy).packed
    assert bool(jax.tree.leaves(packed.shapes.private)) == ("private state" in name)
    for when, state in states(strategy, STAGED_MLP).items():
        assert_all_is_where_layout_says(state, packed, num_devices, when)
        for part in ("params", "optimizer"):
            assert layouts[part].kind == HELD
            most = max(layouts[part].nbytes_by_device)
            assert nbytes_by_device(getattr(state, part), num_devices) == [most] * num_devices, (when, part)


COMPILED = {
    **{name: CASES[name] for name in ("single", "sharding", "pmap", "dp", "exchange zero3", "exchange byteps_onebit")},
    **{name: PIPELINE_CASES[name] for name in ("1f1b, private state", "zb_v")},
    "async": (*ASYNCHRONOUS, "asynchronous.policy=async", "asynchronous.num_workers=4"),
    "diloco": (*ASYNCHRONOUS, *(f"asynchronous.{setting}" for setting in ASYNC_CASES["diloco"])),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile_allocates_nothing(name: str) -> None:
    strategy = make(STAGED_MLP, *(f"--config.{setting}" for setting in COMPILED[name]))
    before = {id(array) for array in jax.live_arrays()}
    with jax.transfer_guard("disallow_explicit"):
        assert strategy.compile()
    assert all(id(array) in before for array in jax.live_arrays())


def test_every_strategy_has_a_case() -> None:
    cases = [*CASES.values(), *PIPELINE_CASES.values(), ASYNCHRONOUS, SWARM]
    assert {name for name in STRATEGIES for case in cases if f"strategy={name}" in case} == set(STRATEGIES)


def test_arrays_of_a_swarm_are_where_layouts_say() -> None:
    """Its peers have copies of the weights only within a step."""
    strategy = make(STAGED_MLP, *(f"--config.{setting}" for setting in SWARM))
    layouts, num_devices = strategy.plan.layouts, strategy.plan.num_devices
    assert num_devices == 2
    for when, state in states(strategy, STAGED_MLP).items():
        parts = {**state.state._asdict(), "history": state.older}
        assert layouts.keys() - parts.keys() == {"copies"}
        for part, tree in parts.items():
            assert_all_is_where_layout_says(tree, layouts[part], num_devices, (when, part))


def async_parts(state: Any) -> dict[str, Any]:
    """Return the permanent arrays of asynchronous training by the names of their layouts."""
    if isinstance(state, ServerRun):
        server = state.server
        fields = {"optimizer": server.optimizer, "waiting": server.waiting, "mitigations": server.mitigations}
    else:
        fields = {part: tuple(getattr(one, part) for one in state.servers) for part in ("optimizer", "mitigations")}
        fields["outer"] = state.outer
    return {"key": state.key, "params": state.params, **fields}


def stashed(state: Any) -> dict[str, Any]:
    """Return the temporary arrays of asynchronous training by the names of their layouts."""
    if isinstance(state, LocalState):
        return {"averages": state.averages}
    return {"history": state.transport.history} if isinstance(state.transport, VirtualTime) else {}


@pytest.mark.parametrize("name", ASYNC_CASES)
def test_arrays_of_workers_and_servers_are_where_layouts_say(name: str) -> None:
    settings = (*ASYNCHRONOUS, *(f"asynchronous.{setting}" for setting in ASYNC_CASES[name]))
    strategy = make(MLP, *(f"--config.{setting}" for setting in settings))
    layouts, num_devices = strategy.plan.layouts, strategy.plan.num_devices
    assert num_devices == (3 if "device of its own" in name else N)
    for when, state in states(strategy, MLP).items():
        trees = async_parts(state)
        assert layouts.keys() - trees.keys() <= {"step", "copies", "history", "averages"}
        for part, tree in trees.items():
            assert_all_is_where_layout_says(tree, layouts[part], num_devices, (when, part))
        for part, tree in stashed(state).items():
            now, most = nbytes_by_device(tree, num_devices), layouts[part].nbytes_by_device
            assert all(a <= b for a, b in zip(now, most, strict=True)), (when, part)
