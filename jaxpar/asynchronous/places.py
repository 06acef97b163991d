"""Which device workers and the server are on: by numbers, before there are devices.

Those of the workers, which have them in turn, come first; the server has one of these or the next.
"""

from typing import NamedTuple


class Places(NamedTuple):
    """Where workers and server are.

    Attributes:
      num_workers: of the run.
      num_devices: that the workers have.
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
        """The number of each worker's device."""
        return [self.of_worker(worker) for worker in range(self.num_workers)]

    @property
    def num_remote(self) -> int:
        """Workers on other devices than the server's."""
        return sum(device != self.server for device in self.of_workers)
