"""Progress of a global batch: which peers hold which values, and whose accumulator contains which microbatch.

A peer keeps every input and gradient of the output of a stage that it has sent, received or computed, and what it has
accumulated, until the update of the step. If it fails, all of that is lost. The weights of the step are on every peer
of the stage, and outside the swarm. Every lost value can be computed from the data again, by a chain of passes: forward
up to the input of the stage, and backward from the loss to the gradient of its output (docs/explanation/swarm.md).
"""

FORWARD_PASS, BACKWARD_PASS = 0, 1
COUNTED, REPEATED, LOST = 0, 1, 2  # outcomes of a pass
STAGE_INPUT, OUTPUT_GRADIENT = 0, 1  # values that peers send: the input of a stage, and the gradient of its output


class BatchProgress:
    """Mutable record of what each peer holds and has accumulated, for every microbatch of a global batch."""

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        self.num_stages = num_stages
        stages, microbatches = range(num_stages), range(num_microbatches)
        # the peers that hold the input of each stage, except the data, and the gradient of its output
        self._inputs: list[list[set[int]]] = [[set() for _ in stages] for _ in microbatches]
        self._gradients: list[list[set[int]]] = [[set() for _ in stages] for _ in microbatches]
        self._forwarded: list[set[int]] = [set() for _ in microbatches]  # stages with a finished forward pass
        self._counted: list[dict[int, tuple[int, int]]] = [{} for _ in microbatches]  # stage -> peer, row

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of all microbatches in all stages are in an accumulator."""
        return all(len(counted) == self.num_stages for counted in self._counted)

    def is_counted(self, microbatch: int, stage: int) -> bool:
        """Return whether the gradient of a stage is in an accumulator."""
        return stage in self._counted[microbatch]

    def next_phase(self, microbatch: int) -> tuple[int, int] | None:
        """Return the phase and the stage of the next pass of a microbatch; None if all its gradients are counted.

        It goes towards the missing gradient that is nearest to the loss, and from there back to the nearest value that
        a peer still holds.
        """
        inputs, gradients, last = self._inputs[microbatch], self._gradients[microbatch], self.num_stages - 1
        missing = [stage for stage in range(self.num_stages) if stage not in self._counted[microbatch]]
        if not missing:
            return None
        phase, stage = BACKWARD_PASS, missing[-1]
        while stage < last and not gradients[stage]:
            stage += 1
        if stage == last and last not in self._forwarded[microbatch]:
            phase = FORWARD_PASS
        while stage > 0 and not inputs[stage]:
            phase, stage = FORWARD_PASS, stage - 1
        return phase, stage

    def holders(self, microbatch: int, phase: int, stage: int) -> dict[int, set[int]]:
        """Return, for each value that a pass reads from other peers, STAGE_INPUT or OUTPUT_GRADIENT, its holders."""
        values = {STAGE_INPUT: self._inputs[microbatch][stage]} if stage > 0 else {}
        if phase == BACKWARD_PASS and stage < self.num_stages - 1:
            values[OUTPUT_GRADIENT] = self._gradients[microbatch][stage]
        return values

    def finish(self, microbatch: int, phase: int, stage: int, peer: int, row: int) -> int:
        """Record a finished pass, whose output the peer now holds, and return COUNTED or REPEATED.

        A pass that is repeated only for its output is not accumulated again. row: in the routing table, for `lose`.
        """
        if phase == FORWARD_PASS:
            if stage + 1 < self.num_stages:
                self._inputs[microbatch][stage + 1].add(peer)
            is_new = stage not in self._forwarded[microbatch]
            self._forwarded[microbatch].add(stage)
        else:
            if stage > 0:
                self._gradients[microbatch][stage - 1].add(peer)
            is_new = not self.is_counted(microbatch, stage)
            if is_new:
                self._counted[microbatch][stage] = (peer, row)
        return COUNTED if is_new else REPEATED

    def lose(self, peer: int) -> list[tuple[int, int]]:
        """Remove what a peer held and had accumulated. Return the microbatches and rows of the lost gradients."""
        lost: list[tuple[int, int]] = []
        for microbatch, counted in enumerate(self._counted):
            for holders in (*self._inputs[microbatch], *self._gradients[microbatch]):
                holders.discard(peer)
            stages = [stage for stage, (owner, _) in counted.items() if owner == peer]
            lost += [(microbatch, counted.pop(stage)[1]) for stage in stages]
        return lost

    def contributors(self, stage: int) -> set[int]:
        """Return the peers whose accumulators contain gradients of a stage."""
        return {counted[stage][0] for counted in self._counted if stage in counted}
