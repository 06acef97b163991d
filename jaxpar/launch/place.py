"""Finds the place of a process in a run of several, from flags, environment variables or the cluster, without JAX."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from jaxpar.errors import UserError


class PlaceFlag(NamedTuple):
    """A flag of scripts/train that defines the place of a process.

    Attributes:
      variable: environment variable that can be set instead of the flag.
      kind: type of the value.
      help: text for --help.
    """

    variable: str
    kind: type[int] | type[str]
    help: str


# name -> flag. The launcher sets the environment variables of each process that it starts.
FLAGS = {
    "coordinator_address": PlaceFlag("JAXPAR_COORDINATOR_ADDRESS", str, "HOST:PORT of process 0."),
    "num_processes": PlaceFlag("JAXPAR_NUM_PROCESSES", int, "Number of processes of the run."),
    "process_id": PlaceFlag("JAXPAR_PROCESS_ID", int, "Index of this process, from 0."),
}
# Environment variable with the user's command up to the flags of scripts/train, quoted for a shell.
COMMAND = "JAXPAR_COMMAND"
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # set for the pods of an indexed Job
# cluster manager -> (variable with the number of processes, other variables), from which JAX finds the coordinator
CLUSTERS = {
    "SLURM": ("SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK")),
}


class Place(NamedTuple):
    """The place of a process in a run of several. None: JAX reads the value from the cluster's environment."""

    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None


def find_place(flags: Mapping[str, str | int | None], environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process, or None if it is the only process.

    Args:
      flags: the values of FLAGS on the command line by name; None for flags that are not given.
      environ: the environment variables.

    Raises:
      UserError: some of the flags are missing, or a value is invalid.
    """
    values = {name: environ.get(flag.variable) if flags[name] is None else flags[name] for name, flag in FLAGS.items()}
    if str(values["num_processes"]) == "1":
        return None
    if all(value is None for value in values.values()):
        if KUBERNETES_INDEX in environ and environ.get("KUBERNETES_SERVICE_HOST"):
            number = FLAGS["num_processes"].variable
            raise UserError(
                f"{KUBERNETES_INDEX} is set, as in a Kubernetes indexed Job, but {number} and "
                f"{FLAGS['coordinator_address'].variable} are not; set both, or {number}=1 to run each pod separately"
            )
        return _of_cluster(environ)
    if values["process_id"] is None:
        values["process_id"] = environ.get(KUBERNETES_INDEX)
    missing = [name for name, value in values.items() if value is None]
    if missing:
        lacking = " and ".join(f"--{name} (or {FLAGS[name].variable})" for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{lacking} {verb} missing; a run of several processes needs all of --{', --'.join(FLAGS)}")
    address, number, process = (str(values[name]) for name in FLAGS)
    if not number.isdigit() or int(number) < 1:
        raise UserError(f"--num_processes is {number}; it must be at least 1")
    if not process.isdigit() or int(process) >= int(number):
        raise UserError(f"--process_id is {process}; it must be between 0 and {int(number) - 1}")
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator_address is {address!r}; it must be the HOST:PORT of process 0")
    return Place(address, int(number), int(process))


def _of_cluster(environ: Mapping[str, str]) -> Place | None:
    for size, others in CLUSTERS.values():
        if int(environ.get(size, 1)) > 1 and all(variable in environ for variable in others):
            return Place(None, None, None)
    return None
