"""The state of a pipeline: on each device its own part of the canonical state, packed.

A device holds the parameters of its layers, their optimizer state, and copies of arrays that are tied to them from
another device. `step` and `key` are on all.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, keystr

from jaxpar import state as states
from jaxpar.launch import processes
from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.executor.packing import Packed, Packing
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.state import State
from jaxpar.step import Problem


class PackedState(NamedTuple):
    """A State in packed arrays; those of params and optimizer have a leading dim of the devices.

    `own` is what the exchange of gradients keeps on each replica: arrays with leading dims of the devices and replicas.
    """

    step: Any
    key: Any
    params: Any
    optimizer: Any
    own: Any = ()


SPECS = PackedState(
    PartitionSpec(), PartitionSpec(), PartitionSpec(STAGE), PartitionSpec(STAGE), PartitionSpec(STAGE, DATA)
)


def own(tree: Any) -> Any:
    """A device's part, inside `shard_map`, of arrays with a leading dim of the devices."""
    return jax.tree.map(lambda x: x[0], tree)


def stacked(tree: Any) -> Any:
    """The reverse of `own`."""
    return jax.tree.map(lambda x: x[None], tree)


class Form:
    """The form that a problem's state has on the devices of a pipeline.

    Attributes:
      params: packing of the parameters that devices hold, by kind.
      optimizer: likewise of the optimizer's state.
    """

    def __init__(self, problem: Problem, stages: Stages, mesh: Mesh):
        """mesh: with an axis of the stages' devices."""
        self._problem, self._stages, self._mesh = problem, stages, mesh
        self._like = jax.eval_shape(lambda key: states.init(problem.model, problem.optimizer, key), jax.random.key(0))
        held = [stages.select(problem.model.shapes, device) for device in stages.examples]
        self.params = Packing(held)
        self.optimizer = Packing([jax.eval_shape(problem.optimizer.init, params) for params in held])

    @property
    def nbytes(self) -> int:
        """Of the state on each device."""
        return self.params.nbytes + self.optimizer.nbytes

    def init(self, key: jax.Array) -> PackedState:
        """The state at step 0. Each device makes its own part alone."""

        def on_device(key: jax.Array) -> PackedState:
            device = jax.lax.axis_index(STAGE)
            init_key, run_key = states.split(key)
            shifts = jnp.asarray(self._stages.shifts)[device]

            def of_kind(kind: int) -> tuple[Packed, Packed]:
                params = self._stages.init(init_key, kind, shifts)
                return self.params.pack(kind, params), self.optimizer.pack(kind, self._problem.optimizer.init(params))

            kinds = [partial(of_kind, kind) for kind in range(len(self._stages.examples))]
            params, optimizer = jax.lax.switch(jnp.asarray(self._stages.kinds)[device], kinds)
            return PackedState(jnp.zeros((), jnp.int32), run_key, stacked(params), stacked(optimizer))

        return jax.jit(
            jax.shard_map(on_device, mesh=self._mesh, in_specs=PartitionSpec(), out_specs=SPECS, check_vma=False)
        )(key)

    def distribute(self, state: State) -> PackedState:
        """A state of all layers to its devices. Leaves may be NumPy arrays, or on any device."""
        step, key = jax.device_put((state.step, state.key), NamedSharding(self._mesh, PartitionSpec()))
        return PackedState(
            step, key, self._scatter(self.params, state.params), self._scatter(self.optimizer, state.optimizer)
        )

    def gather(self, state: PackedState) -> State:
        """The state of all layers; its arrays are NumPy's."""
        step, key, params, optimizer = processes.fetch(state[:4])
        return State(
            step,
            key,
            self._collect(self.params, params, self._like.params),
            self._collect(self.optimizer, optimizer, self._like.optimizer),
        )

    def _scatter(self, packing: Packing, tree: Any) -> Packed:
        leaves = {keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        packed = []
        for device, kind in enumerate(self._stages.kinds):
            own = [leaves[path] for path in self._paths(packing, device)]
            packed.append(packing.pack(kind, jax.tree.unflatten(jax.tree.structure(packing.tree(kind)), own), np))
        sharding = NamedSharding(self._mesh, PartitionSpec(STAGE))

        def put(parts: Sequence[np.ndarray]) -> jax.Array:
            def of_devices(index: Any) -> np.ndarray:
                return np.stack(parts[index[0]])

            return jax.make_array_from_callback((len(parts), *parts[0].shape), sharding, of_devices)

        return tuple(put(parts) for parts in zip(*packed, strict=True))

    def _collect(self, packing: Packing, packed: Sequence[np.ndarray], like: Any) -> Any:
        leaves: dict[str, np.ndarray] = {}
        for device, kind in enumerate(self._stages.kinds):
            tree = packing.unpack(kind, [array[device] for array in packed])
            own = dict(zip(self._paths(packing, device), jax.tree.leaves(tree), strict=True))
            has_copies = bool(self._stages.copies(device))
            leaves = own | leaves if has_copies else leaves | own
        paths, structure = jax.tree_util.tree_flatten_with_path(like)
        return jax.tree.unflatten(structure, [leaves[keystr(path)] for path, _ in paths])

    def _paths(self, packing: Packing, device: int) -> Iterator[str]:
        """Where the leaves of what the device holds are in the tree of all layers: the first dict's keys are layers."""
        names = self._stages.own_names(device)
        for path, _ in jax.tree_util.tree_leaves_with_path(packing.tree(self._stages.kinds[device])):
            first = next((i for i, part in enumerate(path) if isinstance(part, DictKey)), None)
            if first is not None:
                path = (*path[:first], DictKey(names[path[first].key]), *path[first + 1 :])
            yield keystr(path)
