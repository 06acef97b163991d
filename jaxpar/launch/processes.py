"""Several processes of one run, on one machine or many: how they meet, and what only the first of them does.

All of them run the same program on the same config. Each has devices of its own, reads its shard of every batch and
writes its part of a checkpoint. What there is once, such as the log, belongs to the first one.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar import cluster, mesh
from jaxpar.errors import TrainingError
from jaxpar.launch.place import Place
from jaxpar.layout import Tree


def meet_processes(place: Place | None) -> None:
    """Meets the other processes. Call before JAX touches a device."""
    if place is None:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which is the loop's
    # Where the place is known JAX is not to look for a cluster: inside a task of SLURM or Open MPI it would give this
    # process one GPU, by the number of the task, though the launcher has divided them.
    asks_cluster = place.process_id is None
    jax.distributed.initialize(*place, cluster_detection_method=None if asks_cluster else "deactivate")
    if not is_first():
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # the first one prints what all would


def is_first() -> bool:
    """Whether this process does what is done once."""
    return jax.process_index() == 0


def wait(where: str) -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def check_same_value(what: str, value: int) -> None:
    """Raises TrainingError, in all processes, where they do not have the same value."""
    if jax.process_count() > 1:
        values = multihost_utils.process_allgather(np.int32(value)).tolist()
        if set(values) != {value}:
            raise TrainingError(f"{what} is {', '.join(map(str, values))} in processes 0 to {len(values) - 1}")


def from_first(text: str) -> str:
    """Return the first process's text, in all processes."""
    if jax.process_count() == 1:
        return text
    local = np.frombuffer(text.encode(), np.uint8)
    first = np.zeros(multihost_utils.broadcast_one_to_all(np.int32(len(local))), np.uint8)
    first[: len(local)] = local[: len(first)]
    return bytes(multihost_utils.broadcast_one_to_all(first)).decode()


def any_of(value: bool) -> bool:
    """Whether it is so in any process."""
    return value if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.int32(value)).any())


@contextlib.contextmanager
def first_then_others(what: str) -> Iterator[None]:
    """The first process does it, then the others, who find what it has made."""
    if not is_first():
        wait(what)
    yield
    if is_first():
        wait(what)


class Agreement:
    """The greatest value that any process gives at a step, known to each at the next one."""

    def __init__(self) -> None:
        self._asked: jax.Array | int = 0
        devices = np.asarray(cluster.devices())
        everywhere = Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))
        self._divided = NamedSharding(everywhere, PartitionSpec("devices"))
        self._most = jax.jit(lambda x: x.max(), out_shardings=NamedSharding(everywhere, PartitionSpec()))

    def __call__(self, value: int) -> int:
        """value: of this process, at this step. Returns what all agreed on at the step before."""
        if jax.process_count() == 1:
            return value
        before = int(self._asked)
        local = np.full(jax.local_device_count(), value, np.int32)
        self._asked = mesh.settled(self._most(jax.make_array_from_process_local_data(self._divided, local)))
        return before


def local_shard(devices: tuple[jax.Device, ...], num_replicas: int, batch_size: int) -> slice:
    """Return which examples of a batch this process's devices take.

    Args:
      devices: of the mesh, those of a replica next to each other.
      num_replicas: ways a batch is divided.
      batch_size: examples of the batch.
    """
    mine = [number for number, device in enumerate(devices) if device.process_index == jax.process_index()]
    per_replica, share = len(devices) // num_replicas, batch_size // num_replicas
    return slice(mine[0] // per_replica * share, (mine[-1] // per_replica + 1) * share)


def counted_shard(devices: tuple[jax.Device, ...], num_replicas: int, batch_size: int) -> slice:
    """Return those of `local_shard` that no other process counts: of replicas whose first device is this process's."""
    per_replica, share = len(devices) // num_replicas, batch_size // num_replicas
    first = devices[::per_replica]
    mine = [number for number, device in enumerate(first) if device.process_index == jax.process_index()]
    return slice(mine[0] * share, (mine[-1] + 1) * share) if mine else slice(0, 0)


def fetch(tree: Tree) -> Tree:
    """The arrays on the host, whole, whichever processes' devices hold parts of them. One after another."""

    def whole(x: jax.Array | np.ndarray) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


def divided(tree: Tree) -> Tree:
    """Arrays that every process has on the host as arrays over all devices, so that each process writes its part.

    They are divided by their first dim that as many devices as there are divide; where there is none they are whole on
    each. Arrays on devices are left as they are, and so are all in a single process.
    """
    if jax.process_count() == 1:
        return tree
    devices = np.asarray(cluster.devices())
    everywhere = Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))

    def over_devices(x: jax.Array | np.ndarray) -> jax.Array:
        if isinstance(x, jax.Array):
            return x
        dim = next((dim for dim, size in enumerate(x.shape) if size and size % len(devices) == 0), None)
        spec = PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "devices")
        return jax.make_array_from_callback(x.shape, NamedSharding(everywhere, spec), lambda index: x[index])

    return jax.tree.map(over_devices, tree)
