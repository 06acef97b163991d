"""Device numbers of workers and server, and the trees sent between them, known before there are devices.

The workers' devices come first, and workers are assigned to them round-robin. The server is on one of these devices, or
on the next one.
"""

from typing import NamedTuple

import numpy as np

from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.table import UpdateTable


class DeviceNumbers(NamedTuple):
    """Device numbers of workers and server."""

    num_workers: int  # number of workers of the run
    num_devices: int  # number of the workers' devices
    server: int  # number of the server's device

    def of_worker(self, worker: int) -> int:
        """Return the number of a worker's device."""
        return worker % self.num_devices

    @property
    def of_workers(self) -> list[int]:
        """Number of each worker's device."""
        return [self.of_worker(worker) for worker in range(self.num_workers)]

    @property
    def num_remote(self) -> int:
        """Number of workers that are not on the server's device."""
        return sum(device != self.server for device in self.of_workers)


def trees_sent(updates: UpdateTable | None, mitigations: Mitigations, numbers: DeviceNumbers, *, local: bool) -> float:
    """Return the number of trees as large as the parameters that are sent between devices in a step.

    Args:
      updates: update table of the run; None: workers are live.
      mitigations: against staleness.
      numbers: device numbers of workers and server.
      local: whether workers have local weights, which they send to each other, instead of gradients.
    """
    if updates is None:
        return numbers.num_remote * (3 if mitigations.needs_read else 2)
    num_steps = int(updates.step[-1]) + 1
    if local:
        return 2 * numbers.num_remote * updates.num_updates / num_steps
    # Each version of the weights is sent to a device once. A gradient is sent together with the weights that it was
    # computed from if a mitigation needs them.
    worker_devices = np.take(numbers.of_workers, updates.worker)
    reads = np.stack([updates.read, worker_devices])[:, worker_devices != numbers.server]
    gradients = reads.shape[1] * (2 if mitigations.needs_read else 1)
    return (np.unique(reads, axis=1).shape[1] + gradients) / num_steps
