"""Several processes of one run, on one machine or many: how they find each other, and what only the first of them does.

All of them run the same program on the same config. Each has its own devices, reads its own rows of every batch and
writes its own part of a checkpoint. What there is once, such as the log, is the first one's.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar import cluster, mesh
from jaxpar.errors import TrainingError, UserError

# Flags of the command line, and environment variables that stand for them.
FLAGS = {
    "coordinator_address": "JAXPAR_COORDINATOR_ADDRESS",
    "num_processes": "JAXPAR_NUM_PROCESSES",
    "process_id": "JAXPAR_PROCESS_ID",
}
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # of the pods of an indexed Job
# By launcher: what it sets for a process that it has started as one of several; JAX finds the coordinator by these.
CLUSTERS = {
    "SLURM": ("SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK")),
}


class Place(NamedTuple):
    """Where a process is among the others. None: JAX asks the cluster."""

    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None


def find_place(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process; None where it is alone.

    Args:
      given: by the names of FLAGS, what the command line has; None where it has nothing.
      environ: the environment's variables.

    Raises:
      UserError: only a part is told, or it cannot be.
    """
    told = {name: environ.get(variable) if given[name] is None else given[name] for name, variable in FLAGS.items()}
    if str(told["num_processes"]) == "1":
        return None
    if all(value is None for value in told.values()):
        if KUBERNETES_INDEX in environ and environ.get("KUBERNETES_SERVICE_HOST"):
            raise UserError(
                f"{KUBERNETES_INDEX} is set, as in an indexed Job, but not {FLAGS['num_processes']} and "
                f"{FLAGS['coordinator_address']}; set them too ({FLAGS['num_processes']}=1: each pod for itself)"
            )
        return _of_cluster(environ)
    if told["process_id"] is None:
        told["process_id"] = environ.get(KUBERNETES_INDEX)
    missing = [name for name, value in told.items() if value is None]
    if missing:
        wanted = ", ".join(f"--{name} (or {FLAGS[name]})" for name in missing)
        raise UserError(f"one of several processes needs {', '.join(f'--{name}' for name in FLAGS)}; missing: {wanted}")
    address, number, process = (str(told[name]) for name in FLAGS)
    if not number.isdigit() or int(number) < 1:
        raise UserError(f"--num_processes is {number}; it must be 1 or more")
    if not process.isdigit() or int(process) >= int(number):
        raise UserError(f"--process_id is {process}; it must be 0 to {int(number) - 1}")
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator_address is {address!r}; it must be HOST:PORT, of process 0")
    return Place(address, int(number), int(process))


def _of_cluster(environ: Mapping[str, str]) -> Place | None:
    for size, others in CLUSTERS.values():
        if int(environ.get(size, 1)) > 1 and all(variable in environ for variable in others):
            return Place(None, None, None)
    return None


def meet_processes(place: Place | None) -> None:
    """Meets the other processes. Call before JAX touches a device."""
    if place is None:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which is the loop's
    # Where the place is told JAX is not to look for a cluster: inside a task of SLURM or Open MPI it would give this
    # process one GPU, by the number of the task, though the launcher has divided them.
    asks_cluster = place.process_id is None
    jax.distributed.initialize(*place, cluster_detection_method=None if asks_cluster else "deactivate")
    if not is_first():
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # what all would say, the first one says


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
    """What the first process says, in all."""
    if jax.process_count() == 1:
        return text
    own = np.frombuffer(text.encode(), np.uint8)
    said = np.zeros(multihost_utils.broadcast_one_to_all(np.int32(len(own))), np.uint8)
    said[: len(own)] = own[: len(said)]
    return bytes(multihost_utils.broadcast_one_to_all(said)).decode()


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
    """The greatest of what all processes say at a step, known to each at the next one."""

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
        own = np.full(jax.local_device_count(), value, np.int32)
        self._asked = mesh.settled(self._most(jax.make_array_from_process_local_data(self._divided, own)))
        return before


def own_rows(devices: tuple[jax.Device, ...], num_replicas: int, num_rows: int) -> slice:
    """The rows of a batch that this process's devices take.

    Args:
      devices: of the mesh, those of a replica next to each other.
      num_replicas: ways a batch is divided.
      num_rows: of the batch.
    """
    mine = [number for number, device in enumerate(devices) if device.process_index == jax.process_index()]
    per_replica, rows = len(devices) // num_replicas, num_rows // num_replicas
    return slice(mine[0] // per_replica * rows, (mine[-1] // per_replica + 1) * rows)


def counted_rows(devices: tuple[jax.Device, ...], num_replicas: int, num_rows: int) -> slice:
    """Those of `own_rows` that no other process counts: of the replicas whose first device is this process's."""
    per_replica, rows = len(devices) // num_replicas, num_rows // num_replicas
    first = devices[::per_replica]
    mine = [number for number, device in enumerate(first) if device.process_index == jax.process_index()]
    return slice(mine[0] * rows, (mine[-1] + 1) * rows) if mine else slice(0, 0)


def fetch(tree: Any) -> Any:
    """The arrays on the host, whole, whichever processes' devices hold parts of them. One after another."""

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


def divided(tree: Any) -> Any:
    """Arrays that every process has on the host as arrays over all devices, so that each process writes its part.

    They are divided by their first dim that as many devices as there are divide; where there is none they are whole on
    each. Arrays on devices are left as they are, and so are all in a single process.
    """
    if jax.process_count() == 1:
        return tree
    devices = np.asarray(cluster.devices())
    everywhere = Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))

    def over_devices(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return x
        dim = next((dim for dim, size in enumerate(x.shape) if size and size % len(devices) == 0), None)
        spec = PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "devices")
        return jax.make_array_from_callback(x.shape, NamedSharding(everywhere, spec), lambda index: x[index])

    return jax.tree.map(over_devices, tree)
