"""Virtual time: a clock that calls events in the order of their times."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """A clock and its future events. Events at the same time are called in the order in which they were added.

    Attributes:
      now: the time, in seconds.
      num_advances: number of events so far.
    """

    def __init__(self) -> None:
        self.now, self.num_advances = 0.0, 0
        self._number = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no event is left."""
        return not self._heap

    def next_number(self) -> int:
        """Return a number that is higher than all before, which orders what happens at the same time."""
        self._number += 1
        return self._number

    def at(self, time: float, event: Callable[..., None], *arguments: object, is_first: bool = False) -> None:
        """Call `event` with the arguments at this time. is_first: before other events; only one can wait."""
        heapq.heappush(self._heap, (time, 0 if is_first else self.next_number(), event, arguments))

    def advance(self) -> None:
        """Go to the next event, and call it."""
        self.now, _, event, arguments = heapq.heappop(self._heap)
        self.num_advances += 1
        event(*arguments)


class LoadMeter:
    """Mean number of passes that each peer has been assigned since the last reading: the load of its queue."""

    def __init__(self, num_peers: int, clock: VirtualClock) -> None:
        self._clock = clock
        self._depth, self._area, self._changed = [0] * num_peers, [0.0] * num_peers, [0.0] * num_peers

    def count(self, peer: int, change: int) -> None:
        """Change the number of passes that a peer has been assigned, and integrate it over time."""
        self._area[peer] += self._depth[peer] * (self._clock.now - self._changed[peer])
        self._depth[peer] += change
        self._changed[peer] = self._clock.now

    def read(self, seconds: float) -> list[float]:
        """Return the load of each peer in the last `seconds`, since the last reading."""
        for peer in range(len(self._area)):
            self.count(peer, 0)
        loads = [area / seconds for area in self._area]
        self._area = [0.0] * len(self._area)
        return loads
