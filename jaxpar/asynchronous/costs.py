"""Memory and traffic of asynchronous training, computed from shapes and a table without devices or compilation."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

from jaxpar.asynchronous.gradient_rows import averaging_peaks, history_peaks, is_grouped
from jaxpar.asynchronous.mitigations import Mitigations
from jaxpar.asynchronous.places import Places
from jaxpar.asynchronous.table import UpdateTable
from jaxpar.state import State, nbytes


class Costs(NamedTuple):
    """Memory and traffic of asynchronous training.

    Attributes:
      memory: by device number, bytes by purpose: parameters (the newest weights), history (older versions that some
        worker still needs), optimizer, waiting (the sum of the gradients that wait for the rest of their update),
        mitigations (their states), outer (diloco: the weights at the start of the round, and the outer optimizer),
        averages (model_average: corrections of averagings that workers have not applied yet).
      sent: number of trees as large as the parameters that are sent between devices in a step.
    """

    memory: tuple[dict[str, int], ...]
    sent: float


def emulated_server(like: State, mitigations: Mitigations, table: UpdateTable, places: Places) -> Costs:
    """Return the costs of running a table of sync, async, ssp or softsync.

    Each version of the weights is sent to a device once. A gradient is sent together with the weights that it was
    computed from if a mitigation needs them.

    Args:
      like: the state, abstract.
      mitigations: against staleness.
      table: update table of the run.
      places: device numbers of workers and server.
    """
    history = history_peaks(table, places)
    worker_places = np.take(places.of_workers, table.worker)
    reads = np.stack([table.read, worker_places])[:, worker_places != places.server]
    gradients = reads.shape[1] * (2 if mitigations.needs_read else 1)
    memory = _server_memory(like, mitigations, places, history, is_grouped(table))
    return Costs(memory, (np.unique(reads, axis=1).shape[1] + gradients) / _num_steps(table))


def live_server(like: State, mitigations: Mitigations, places: Places) -> Costs:
    """Return the costs of live workers.

    Each worker holds the weights that it has read, and the server holds a copy of these for each worker.
    """
    history = [places.of_workers.count(device) for device in range(places.num_devices)]
    memory = _server_memory(like, mitigations, places, history, grouped=False)
    memory[places.server]["history"] = places.num_workers * nbytes(like.params)
    return Costs(memory, places.num_remote * (3 if mitigations.needs_read else 2))


def local_costs(
    like: State, table: UpdateTable, places: Places, *, outer: optax.GradientTransformation | None, waits: bool
) -> Costs:
    """Return the costs of workers with local weights, which synchronize on the server's device.

    Args:
      like: the state, abstract.
      table: update table of the run.
      places: device numbers of the workers and of the state that they share.
      outer: the outer optimizer of diloco.
      waits: whether workers wait for each other when they synchronize: true for all policies except model_average.
    """
    size, optimizer, devices = nbytes(like.params), nbytes(like.optimizer), places.of_workers
    counts = [devices.count(device) for device in range(places.num_devices)]
    memory = tuple({"parameters": count * size, "optimizer": count * optimizer} for count in counts)
    if outer is not None:
        memory[places.server]["outer"] = size + nbytes(jax.eval_shape(outer.init, like.params))
    if not waits:
        for parts, number in zip(memory, averaging_peaks(table, places), strict=True):
            parts["averages"] = number * size
    return Costs(memory, 2 * places.num_remote * table.num_updates / _num_steps(table))


def _server_memory(
    like: State, mitigations: Mitigations, places: Places, history: Sequence[int], grouped: bool
) -> tuple[dict[str, int], ...]:
    """Return `Costs.memory`. history: for each device of the workers, its number of older versions."""
    size = nbytes(like.params)
    memory = [{"parameters": size, "history": number * size} for number in history]
    if places.server == places.num_devices:
        memory.append({"parameters": size})
    held = {
        "optimizer": nbytes(like.optimizer),
        "waiting": size if grouped else 0,
        "mitigations": nbytes(jax.eval_shape(mitigations.init, like.params)),
    }
    memory[places.server] |= {name: number for name, number in held.items() if number}
    return tuple(memory)


def _num_steps(table: UpdateTable) -> int:
    return int(table.step[-1]) + 1
