"""Device numbers of workers and server, which are known before there are devices.

The workers' devices come first, and workers are assigned to them round-robin. The server is on one of these devices, or
on the next one.
"""

from typing import NamedTuple


class DeviceNumbers(NamedTuple):
    """Device numbers of workers and server.

    Attributes:
      num_workers: number of workers of the run.
      num_devices: number of the workers' devices.
      server: number of the server's device.
    """

    num_workers: int
    num_devices: int
    server: int

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
