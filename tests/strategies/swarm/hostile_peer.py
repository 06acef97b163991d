"""A peer that sends wrong arrays. Its module is small, because Ray imports it in another process."""

from typing import Any

import numpy as np

from jaxpar.strategies.swarm.live.peer import StagePeer


class HostilePeer(StagePeer):
    """Sends `nan` in what other stages read, a wrong `shape` of it, or a wrong `gradient` of the parameters."""

    def __init__(self, node: str, lie: str) -> None:
        super().__init__(node, cpus=1, gpus=0)
        self._lie = lie

    def _lied(self, arrays: Any) -> Any:
        if self._lie == "nan":
            return [np.full_like(array, np.nan) for array in arrays]
        return [array[..., None] for array in arrays] if self._lie == "shape" else arrays

    def compute(self, *arguments: Any) -> Any:
        answer, message = super().compute(*arguments)
        return answer._replace(sums=self._lied(answer.sums)), self._lied(message)

    def publish(self, *arguments: Any) -> Any:
        answer, *shards = super().publish(*arguments)
        if self._lie == "gradient":
            shards = [[array + np.float32(np.inf) for array in shard] for shard in shards]
        return (answer, *shards)
