"""Compares the arrays on devices with the layouts of a plan."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar import cluster
from jaxpar.exchange.exchange import DistributedState
from jaxpar.layout import HELD, Layout, LeafLayout
from jaxpar.strategies import Strategy
from jaxpar.strategies.asynchronous.local import LocalState
from jaxpar.strategies.asynchronous.server import ServerRun
from jaxpar.strategies.asynchronous.virtual_time import VirtualTime
from jaxpar.strategies.pipeline.details import PipelineDetails
from jaxpar.strategies.pipeline.schedules import DISPATCH
from tests.strategies.pipelines import staged_state


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
        shape, index = list(leaf.shape), [0] * len(leaf.shape)
        for dim, axis, copies in leaf.splits:
            shape[dim] = math.ceil(shape[dim] / (axes[axis] // copies))
            index[dim] = index[dim] * axes[axis] + number[axis]
        begin = [share * at for share, at in zip(shape, index, strict=True)]
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


def assert_state_is_where_plan_says(strategy: Strategy[Any], state: Any) -> None:
    """Assert that every array of a state is on the devices of its layout, with its bytes."""
    layouts, num_devices = strategy.plan.layouts, strategy.plan.num_devices
    if isinstance(strategy.plan.details, PipelineDetails):
        (_dispatched if strategy.plan.details.executor == DISPATCH else _packed)(strategy, state)
        return
    trees = _parts(state)
    temporary = {"step", "copies", "history", "averages"}  # they exist only during a step, or their number varies
    assert layouts.keys() - trees.keys() <= temporary
    for part in layouts.keys() & trees.keys():
        if part not in temporary:
            assert_all_is_where_layout_says(trees[part], layouts[part], num_devices, part)
    for part, tree in _stashed(state).items():
        now, most = nbytes_by_device(tree, num_devices), layouts[part].nbytes_by_device
        assert all(a <= b for a, b in zip(now, most, strict=True)), part


def _packed(strategy: Strategy[Any], state: Any) -> None:
    """Packed arrays have the same size on every device: the largest size of any device's leaves."""
    layouts, num_devices = strategy.plan.layouts, strategy.plan.num_devices
    assert_all_is_where_layout_says(state, staged_state(strategy).packed, num_devices, "packed")
    for part in ("params", "optimizer"):
        assert layouts[part].kind == HELD
        most = max(layouts[part].nbytes_by_device)
        assert nbytes_by_device(getattr(state, part), num_devices) == [most] * num_devices, part


def _dispatched(strategy: Strategy[Any], state: Any) -> None:
    """A device has the arrays of its own stages alone."""
    plan = strategy.plan
    held = nbytes_by_device((state.params, state.optimizer, state.private), plan.num_devices)
    kinds = ("parameters", "optimizer", "private")
    assert held == [sum(parts.get(kind, 0) for kind in kinds) for parts in plan.memory]
    assert_all_is_where_layout_says(state.private, plan.layouts["private"], plan.num_devices, "private")


def _parts(state: Any) -> dict[str, Any]:
    """Return the trees of the state by the names of their layouts."""
    if hasattr(state, "older"):  # of a swarm
        return {**state.state._asdict(), "history": state.older}
    if isinstance(state, ServerRun):
        server = state.server
        fields = {"optimizer": server.optimizer, "waiting": server.waiting, "mitigations": server.mitigations}
        return {"key": state.key, "params": state.params, **fields}
    if isinstance(state, LocalState):
        fields = {part: tuple(getattr(one, part) for one in state.servers) for part in ("optimizer", "mitigations")}
        return {"key": state.key, "params": state.params, "outer": state.outer, **fields}
    fields = state._asdict()
    if isinstance(state.optimizer, DistributedState):
        fields |= state.optimizer._asdict()
    return fields


def _stashed(state: Any) -> dict[str, Any]:
    """Return the arrays of asynchronous training whose number varies, by the names of their layouts."""
    if isinstance(state, LocalState):
        return {"averages": state.averages}
    if isinstance(state, ServerRun) and isinstance(state.transport, VirtualTime):
        return {"history": state.transport.history}
    return {}
