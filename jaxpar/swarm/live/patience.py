"""Limits on the silence of peers, from the times that their calls have taken so far.

There is no fixed limit: a call may take `factor` times as long as the longest one that is comparable. Calls are
comparable if they have the same label: the kind of call, the stage and the shapes, and whether it is the peer's first
one, which compiles. If a peer has made no such call yet, those of the other peers count. If nobody has, there is no
limit. The longest time of a label decays towards newer ones, so that one slow call does not raise a limit for good.
"""

import math
from collections.abc import Hashable

from jaxpar.swarm.routing import SMOOTHING

Label = Hashable


class Patience:
    """Mutable record of the times of calls."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._own: dict[int, dict[Label, float]] = {}  # peer -> label -> longest time
        self._longest: dict[Label, float] = {}  # of all peers

    def observe(self, peer: int, label: Label, seconds: float) -> None:
        """Record a call that was answered after `seconds`."""
        own = self._own.setdefault(peer, {})
        for longest in (own, self._longest):
            before = longest.get(label, 0.0)
            longest[label] = max(seconds, before + SMOOTHING * (seconds - before))

    def limit(self, peer: int, label: Label) -> float:
        """Return the seconds after which a peer that has not answered is silent; inf if nothing is comparable yet.

        A peer whose calls of other labels took longer is given that time, too: short calls vary more.
        """
        own = self._own.get(peer, {})
        comparable = own.get(label, self._longest.get(label))
        if comparable is None:
            return math.inf
        return self._factor * max(comparable, *own.values(), 0.0)
