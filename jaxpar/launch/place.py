"""The place of a process among those of its run: by flags, by environment variables, or as a cluster says. No JAX."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from jaxpar.errors import UserError


class PlaceFlag(NamedTuple):
    """A flag of scripts/train that places a process.

    Attributes:
      variable: the environment variable that stands for it.
      kind: of its value.
      help: for --help.
    """

    variable: str
    kind: type[int] | type[str]
    help: str


# By name. The launcher sets the variables of each process that it starts.
FLAGS = {
    "coordinator_address": PlaceFlag("JAXPAR_COORDINATOR_ADDRESS", str, "HOST:PORT of process 0, of several."),
    "num_processes": PlaceFlag("JAXPAR_NUM_PROCESSES", int, "How many there are."),
    "process_id": PlaceFlag("JAXPAR_PROCESS_ID", int, "Which of them this one is, from 0."),
}
COMMAND = "JAXPAR_COMMAND"  # environment variable: how the user called the program, for messages
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


def find_place(flags: Mapping[str, str | int | None], environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process; None where it is alone.

    Args:
      flags: by the names of FLAGS, what the command line has; None where it has nothing.
      environ: the environment's variables.

    Raises:
      UserError: only a part is set, or it cannot be.
    """
    values = {name: environ.get(flag.variable) if flags[name] is None else flags[name] for name, flag in FLAGS.items()}
    if str(values["num_processes"]) == "1":
        return None
    if all(value is None for value in values.values()):
        if KUBERNETES_INDEX in environ and environ.get("KUBERNETES_SERVICE_HOST"):
            number = FLAGS["num_processes"].variable
            raise UserError(
                f"{KUBERNETES_INDEX} is set, as in an indexed Job, but not {number} and "
                f"{FLAGS['coordinator_address'].variable}; set them too ({number}=1: each pod for itself)"
            )
        return _of_cluster(environ)
    if values["process_id"] is None:
        values["process_id"] = environ.get(KUBERNETES_INDEX)
    missing = [name for name, value in values.items() if value is None]
    if missing:
        wanted = ", ".join(f"--{name} (or {FLAGS[name].variable})" for name in missing)
        raise UserError(f"one of several processes needs {', '.join(f'--{name}' for name in FLAGS)}; missing: {wanted}")
    address, number, process = (str(values[name]) for name in FLAGS)
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
