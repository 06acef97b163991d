"""Compares the copies of a state: arrays that several devices of the mesh must have alike.

The canonical state is made from one copy. An update that one replica missed, a lost broadcast, or a gradient that was
not summed over an axis of the mesh shows in the others. Inside `shard_map`, nothing else ensures that they are equal.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.inspect.reference import Reference, Snapshot, compare
from jaxpar.run.build import Run, StrategyState


def _is_on_mesh(leaf: Any) -> bool:
    """Return whether a leaf is an array on a mesh. A state that changes in place has other leaves."""
    return isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)


def has_equal_copies(state: StrategyState) -> bool:
    """Return whether all devices that have the same part of an array of a state have the same bytes of it."""
    for leaf in filter(_is_on_mesh, jax.tree.leaves(state)):
        first: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            if first.setdefault(str(shard.index), data) != data:
                return False
    return True


def with_copy(state: StrategyState, at: Mapping[str, int]) -> StrategyState:
    """Return a state in which all devices have the copies of those at these places {axis: index} of the mesh."""

    def change(leaf: Any) -> Any:
        if not _is_on_mesh(leaf):
            return leaf
        mesh = leaf.sharding.mesh
        shards = {shard.device: shard for shard in leaf.addressable_shards}
        arrays = []
        for place, device in np.ndenumerate(mesh.devices):
            of = dict(zip(mesh.axis_names, place, strict=True))
            source = mesh.devices[tuple({**of, **at}[axis] for axis in mesh.axis_names)]
            same = shards[source].index == shards[device].index  # otherwise the array is split over the axis
            arrays.append(jax.device_put(shards[source if same else device].data, device))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

    return jax.tree.map(change, state)


def describe_copies(run: Run, reference: Reference, state: StrategyState, earlier: Snapshot | None = None) -> list[str]:
    """Return one line for each place of the mesh whose copies differ from those of most others.

    earlier: the state before the last update.
    """
    if has_equal_copies(state):
        return []
    axes = {axis: size for axis, size in run.plan.axes.items() if size > 1}
    places = [dict(zip(axes, place, strict=True)) for place in itertools.product(*map(range, axes.values()))]
    copies = [reference.snapshot(run.strategy, with_copy(state, place)) for place in places]
    texts = [", ".join(f"{axis}={index}" for axis, index in place.items()) for place in places]
    bytes_of = [tuple(leaf.tobytes() for leaf in jax.tree.leaves(copy.tree)) for copy in copies]
    usual = bytes_of.index(Counter(bytes_of).most_common(1)[0][0])
    lines = []
    for text, copy, content in zip(texts, copies, bytes_of, strict=True):
        if content == bytes_of[usual]:
            continue
        wrong = defaultdict(list)
        for part in ("params", "optimizer"):
            for name, leaves in getattr(copies[usual], part).items():
                if not compare(getattr(copy, part)[name], leaves).bitwise:
                    wrong[part].append(name)
        error = max(
            (compare(copy.params[name], copies[usual].params[name]).relative for name in wrong["params"]), default=0
        )
        listed = "; ".join(f"{part} of {', '.join(names)}" for part, names in wrong.items() if names)
        is_old = earlier and all(compare(copy.params[name], earlier.params[name]).bitwise for name in wrong["params"])
        old = ", lacks the last update" if is_old and wrong["params"] else ""
        lines.append(f"copy at {text}: {listed} differ from {texts[usual]}, by up to {error:.1e}{old}")
    return lines
