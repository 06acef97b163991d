"""The named conditionals of a pipeline's step, and the branches that devices take in them.

The engine names the conditionals; an audit then knows how often their branches run, and how long a clock takes.
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxpar.strategies.pipeline.executor.lowering import NONE, ClockShape, LoweredTable, TableArrays
from jaxpar.strategies.pipeline.executor.stages import Stages

OF_KIND = "of_kind"  # name of the conditionals whose branch depends on the kind of the device


class DeviceBranches(NamedTuple):
    """The branches that devices take in a conditional."""

    # int [iteration, device], the number of the branch in each iteration of the loop over clocks; one row if the
    # conditional is not in that loop
    taken: np.ndarray
    number: int  # number of branches

    @property
    def fractions(self) -> tuple[float, ...]:
        """The fraction of iterations and devices in which each branch is taken."""
        return tuple((np.bincount(self.taken.ravel(), minlength=self.number) / self.taken.size).tolist())


def possible_programs(of_clock: ClockShape, phase: int, numbers: np.ndarray) -> tuple[int, ...]:
    """Return the numbers of the programs that a device can run in a phase of a clock, in ascending order.

    numbers: number of the program that each [device, chunk] runs.
    """
    of_actors = numbers if of_clock.actors is None else numbers[list(of_clock.actors[phase])]
    return tuple(sorted(set(of_actors.ravel().tolist())))


def device_branches(lowered: LoweredTable, stages: Stages) -> dict[str, DeviceBranches]:
    """Return the branches that devices take in the conditionals of a training step, by named scope."""
    numbers, kinds = stages.program_numbers, np.array([stages.kinds])
    (shape, arrays), found = lowered, {OF_KIND: DeviceBranches(kinds, len(stages.examples))}
    for index, of_clock in enumerate(shape.clocks):
        nows: TableArrays = jax.tree.map(lambda x, index=index: np.asarray(x)[:, index :: len(shape.clocks)].T, arrays)
        for phase, action in enumerate(nows.actions):
            able = possible_programs(of_clock, phase, numbers)
            branches = 1 + np.searchsorted(able, numbers[np.arange(len(numbers)), action.chunk])
            taken = np.where(action.chunk == NONE, 0, branches)
            found[_scope(index, phase_scope(phase))] = DeviceBranches(taken, 1 + len(able))
        slots = {delivery_scope(phase, "local"): nows.actions[phase].local_inbox for phase in shape.local_phases}
        for number, (route, arrival) in enumerate(zip(of_clock.routes, nows.arrivals, strict=True)):
            if route.senders:
                slots |= {delivery_scope(phase, str(number)): arrival[phase] for phase in route.phases}
        for name, slot in slots.items():
            found[_scope(index, name)] = DeviceBranches((slot == NONE).astype(int), 2)
    return found


def _scope(index: int, name: str) -> str:
    return f"{clock_scope(index)}/{name}"


def clock_scope(index: int) -> str:
    """Return the name of a clock in the iteration of the loop over clocks."""
    return f"clock_{index}"


def phase_scope(phase: int) -> str:
    """Return the name of the conditional that runs the actions of a phase, within its clock."""
    return f"phase_{phase}"


def delivery_scope(phase: int, where: str) -> str:
    """Return the name of the conditional that stores a transfer in an inbox, within its clock.

    where: number of the route, or `local`.
    """
    return f"deliver_{phase}_{where}"
