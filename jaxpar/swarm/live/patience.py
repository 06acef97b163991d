"""Limits on the silence of peers, from the times that their calls have taken so far.

A call may take `factor` times as long as a comparable one, and SLACK_SECONDS more, because short calls vary. An
ordinary call is compared with the calls of the same peer that have the same label: its kind, the stage and the shapes.
Their longest time decays towards newer ones, so that one slow call does not raise the limit for good.

Rare calls, which start a process, load or compile, have labels of their own and are compared with those of all peers.
The first ordinary call of a kind has the limit of loading, too. Until any peer has loaded, there is no limit.
"""

import math
from collections.abc import Hashable

from jaxpar.swarm.routing import SMOOTHING

Label = Hashable
RARE = START, ATTACH, LOAD = "start", "attach", "load"
SLACK_SECONDS = 2.0


class Patience:
    """Mutable record of the times of calls."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._rare: dict[Label, float] = {}  # longest time of all peers
        self._ordinary: dict[int, dict[Label, float]] = {}  # peer -> label -> longest time

    def observe(self, peer: int, label: Label, seconds: float) -> None:
        """Record a call that was answered after `seconds`."""
        if label in RARE:
            self._rare[label] = max(seconds, self._rare.get(label, 0.0))
        else:
            own = self._ordinary.setdefault(peer, {})
            before = own.get(label, 0.0)
            own[label] = max(seconds, before + SMOOTHING * (seconds - before))

    def forget(self, peer: int) -> None:
        """Forget the ordinary calls of a peer: it serves another stage, or was too slow for its limits."""
        self._ordinary.pop(peer, None)

    def limit(self, peer: int, label: Label) -> float:
        """Return the seconds after which a peer that has not answered is silent; inf if nothing is comparable yet."""
        if label in RARE:
            longest = self._rare.get(label)
        else:
            longest = self._ordinary.get(peer, {}).get(label, self._rare.get(LOAD))
        return math.inf if longest is None else SLACK_SECONDS + self._factor * longest
