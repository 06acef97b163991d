"""Runs of several processes on one or more machines: initialization, barriers, agreement and batch shards.

All processes run the same program with the same config. Each process has its own devices, reads its shard of every
batch and writes its part of each checkpoint. Process 0 writes all other files, such as logs.
"""

import contextlib
import os
import platform
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpar import cluster
from jaxpar.core import host, mesh
from jaxpar.errors import TrainingError
from jaxpar.launch.place import MEET, Place, bind_address, free_port, in_address, own_address
from jaxpar.launch.signals import called_after
from jaxpar.layout import Tree

STARTUP_SECONDS = 300  # after which a process that waits for the others fails: the default of JAX
WAIT_SECONDS = 20.0  # after which a process that waits for the others prints for whom it waits
KEEP_PROCESS = "--xla_gpu_nccl_terminate_on_error=false"  # otherwise, XLA ends a process whose NCCL lost another one


def meet_processes(place: Place | None, elastic_seconds: int = 0) -> None:
    """Connect this process to the other processes. Call before JAX touches a device.

    elastic_seconds: config.elastic_seconds, after which a silent process is lost; 0: a lost process ends all of them.
    """
    if place is None:
        return
    options: dict[str, Any] = {"initialization_timeout": int(os.environ.get(MEET, STARTUP_SECONDS))}
    if elastic_seconds:
        jax.config.update("jax_enable_recoverability", True)
        flags = os.environ.get("XLA_FLAGS", "")
        if mesh.has_plugin() and KEEP_PROCESS not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {KEEP_PROCESS}"
        options["heartbeat_timeout_seconds"] = elastic_seconds
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, which the loop handles
    # JAX must not detect a cluster: in a task of SLURM or Open MPI it would restrict this process to one GPU, chosen by
    # the task id, although the launcher has already divided the GPUs. It would also listen on all addresses.
    address, number, process, device = place
    bound = bind_address(address) if process == 0 else None
    with _reported_wait(place, options["initialization_timeout"], is_elastic=elastic_seconds > 0):
        jax.distributed.initialize(
            *(address, number, process),
            local_device_ids=device,
            cluster_detection_method="deactivate",
            coordinator_bind_address=bound,
            **options,
        )
    if not is_first():
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # only process 0 prints


@contextlib.contextmanager
def _reported_wait(place: Place, seconds: int, *, is_elastic: bool) -> Iterator[None]:
    """Within `with`, print for whom this process waits, after WAIT_SECONDS: JAX waits for minutes without a line.

    At the end of the wait, JAX aborts the process with a stack trace, so the cause is printed before. A process of an
    elastic run that was lost and is started again waits in vain while the others continue without it.
    """
    address, number, process, _ = place
    line = f"process 0 waits at {address} for the other processes, {number} in all, for up to {seconds} s"
    if process:
        restart = "; if its run continues without this process, stop process 0 and start it again" * is_elastic
        line = f"process {process} waits for process 0 at {address}, for up to {seconds} s{restart}"
    last = f"not all {number} processes have connected to {address}; see their errors, and check --num_processes"
    if process:
        last = f"process 0 does not answer at {address}, or not all {number} have connected; see their errors"

    def tell(line: str) -> None:
        print(f"jaxpar: {line}", file=sys.stderr, flush=True)

    with called_after(WAIT_SECONDS, lambda: tell(line)), called_after(0.95 * seconds, lambda: tell(last)):
        yield


def listen_for_arrays(place: Place | None, num_devices: int) -> None:
    """Let `jax.device_put` send arrays to CPU devices of other processes. Call before JAX touches a device.

    Each process listens on the address from which it reaches the coordinator. GPUs need none of this. num_devices: of
    this process.
    """
    if place is None:
        return
    address = own_address(place.coordinator_address)
    shown = in_address(address)
    jax.config.update("jax_force_dcn_cross_host_transfers", True)
    jax.config.update("jax_cross_host_transfer_socket_address", f"{shown}:{free_port(address)}")
    jax.config.update("jax_cross_host_transport_addresses", f"{shown}:0")
    # A collective occupies a thread for each device while it waits for other processes, which may wait for an array
    # that this process still sends, in another thread.
    host.add_threads(2 * max(num_devices, 1))


def is_first() -> bool:
    """Return whether this is process 0, which does the work that must happen only once."""
    return jax.process_index() == 0


def wait(where: str) -> None:
    """Wait at a barrier until all processes have reached it. where: name of the barrier."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def check_same_value(what: str, value: int) -> None:
    """Raise TrainingError in all processes unless all of them have the same value."""
    if jax.process_count() > 1:
        values = multihost_utils.process_allgather(np.int32(value)).tolist()
        if set(values) != {value}:
            found = ", ".join(map(str, values))
            raise TrainingError(f"{what} is {found} in processes 0 to {len(values) - 1}; it must be the same in all")


def num_hosts() -> int:
    """Return the number of machines on which the processes run, by their names."""
    name = np.uint32(zlib.crc32(platform.node().encode()))
    return 1 if jax.process_count() == 1 else len(set(multihost_utils.process_allgather(name).tolist()))


def from_first(text: str) -> str:
    """Return the text of process 0 in all processes."""
    if jax.process_count() == 1:
        return text
    local = np.frombuffer(text.encode(), np.uint8)
    first = np.zeros(multihost_utils.broadcast_one_to_all(np.int32(len(local))), np.uint8)
    first[: len(local)] = local[: len(first)]
    return bytes(multihost_utils.broadcast_one_to_all(first)).decode()


def any_of(value: bool) -> bool:
    """Return in all processes whether `value` is true in any of them."""
    return value if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.int32(value)).any())


def from_first_process(tree: Tree) -> Tree:
    """Return the host arrays of process 0 in all processes, one after another."""
    return tree if jax.process_count() == 1 else jax.tree.map(multihost_utils.broadcast_one_to_all, tree)


@contextlib.contextmanager
def first_then_others(what: str) -> Iterator[None]:
    """Run the `with` block in process 0 first, then in the others, so that they can use the files it wrote."""
    if not is_first():
        wait(what)
    yield
    if is_first():
        wait(what)


def _mesh_of_all() -> Mesh:
    return Mesh(np.asarray(cluster.devices()), ("devices",), axis_types=(AxisType.Auto,))


class Agreement:
    """Computes the maximum of a value over all processes, one step late, so that the loop need not wait for devices."""

    def __init__(self) -> None:
        self._pending: jax.Array | int = 0
        everywhere = _mesh_of_all()
        self._divided = NamedSharding(everywhere, PartitionSpec("devices"))
        self._most = jax.jit(lambda x: x.max(), out_shardings=NamedSharding(everywhere, PartitionSpec()))

    def __call__(self, value: int) -> int:
        """Submit this process's value for this step and return the maximum of the step before."""
        if jax.process_count() == 1:
            return value
        before = int(self._pending)
        local = np.full(jax.local_device_count(), value, np.int32)
        self._pending = mesh.settled(self._most(jax.make_array_from_process_local_data(self._divided, local)))
        return before


def local_shard(devices: tuple[jax.Device, ...], num_replicas: int, batch_size: int) -> slice:
    """Return the shard of a batch, as a slice of its examples, that the devices of this process compute.

    devices: the devices of the mesh; the devices of one replica are adjacent.
    """
    mine = [number for number, device in enumerate(devices) if device.process_index == jax.process_index()]
    per_replica, share = len(devices) // num_replicas, batch_size // num_replicas
    return slice(mine[0] // per_replica * share, (mine[-1] // per_replica + 1) * share)


def counted_shard(devices: tuple[jax.Device, ...], num_replicas: int, batch_size: int) -> slice:
    """Return the examples of `local_shard` that this process counts, so that none is counted twice.

    A process counts the examples of the replicas whose first device belongs to it.
    """
    first = devices[:: len(devices) // num_replicas]
    is_any_mine = any(device.process_index == jax.process_index() for device in first)
    return local_shard(first, num_replicas, batch_size) if is_any_mine else slice(0, 0)


def fetch(tree: Tree) -> Tree:
    """Fetch whole arrays to the host, one after another, gathering shards on the devices of other processes."""

    def whole(x: jax.Array | np.ndarray) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


def fetch_from_owners(tree: Tree) -> Tree:
    """Fetch whole arrays to the host, one after another, each of which is on devices of some processes."""

    def whole(x: jax.Array) -> np.ndarray:
        by_device: Mapping[Any, Any] = x.sharding.devices_indices_map(x.shape)
        owners = {device.process_index for device in by_device}
        if jax.process_count() == 1 or (x.is_fully_replicated and len(owners) == jax.process_count()):
            return np.asarray(x)
        own = np.zeros(x.shape, x.dtype)
        for shard in x.addressable_shards:
            own[shard.index] = np.asarray(shard.data)
        if x.is_fully_replicated:
            return np.asarray(multihost_utils.broadcast_one_to_all(own, jax.process_index() == min(owners)))
        of_processes = np.asarray(multihost_utils.process_allgather(own))
        for device, index in by_device.items():
            own[index] = of_processes[device.process_index][index]
        return own

    return jax.tree.map(whole, tree)


def put_on_devices(tree: Tree, sharding: Sharding) -> Tree:
    """Return host arrays, which every process has, on devices, of which a process may have none."""

    def on_devices(x: jax.Array | np.ndarray) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: whole[index], dtype=whole.dtype)

    return jax.tree.map(on_devices, tree)


def divided(tree: Tree) -> Tree:
    """Shard host arrays that every process has over all devices, so that each process writes its part.

    An array is sharded along its first dim whose size is a multiple of the number of devices, or replicated if it has
    no such dim. Arrays on devices are returned unchanged, and in a single process all arrays are.
    """
    if jax.process_count() == 1:
        return tree
    everywhere = _mesh_of_all()

    def over_devices(x: jax.Array | np.ndarray) -> jax.Array:
        if isinstance(x, jax.Array):
            return x
        dim = next((dim for dim, size in enumerate(x.shape) if size and size % everywhere.size == 0), None)
        spec = PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "devices")
        return jax.make_array_from_callback(x.shape, NamedSharding(everywhere, spec), lambda index: x[index])

    return jax.tree.map(over_devices, tree)
