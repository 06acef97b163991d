"""State of a run of a swarm: passes that have been assigned to peers, and global batches without their update."""

from collections import deque
from dataclasses import dataclass, field

from jaxpar.swarm.ledger import GradientLedger


@dataclass(eq=False)
class AssignedPass:
    """A pass that has been assigned to a peer: in transit, queued or running (then `row` is its row)."""

    step: int
    microbatch: int
    phase: int
    stage: int
    peer: int
    sources: dict[int, int]  # of the values that are in transit, STAGE_INPUT or OUTPUT_GRADIENT: the sender
    row: int = -1

    @property
    def key(self) -> tuple[int, int]:
        """Step and microbatch."""
        return self.step, self.microbatch


@dataclass(eq=False)
class GlobalBatch:
    """A global batch: its ledger, and the microbatches that have not started and that have been finished."""

    ledger: GradientLedger
    waiting: deque[int]
    finished: set[int] = field(default_factory=set)
    is_averaging: bool = False
    groups: list[list[int]] = field(default_factory=list)  # by stage, the peers of the averaging
    num_failures: int = 0  # number of times that gradients were lost, so that an older averaging is void
