"""Fills W into a skeleton, which is a schedule of F and B alone, while simulating it on a time axis.

The rules are from Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3.1: W runs while a device waits for
inputs, and when it is short of memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxpar.strategies.pipeline.tables.simulate import Time, Times
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, Action, B, F, StageDevices, W, action_inputs

Orders = list[list[Action]]  # by device

# Rules that decide whether to run a W while the next action waits for its inputs. Their arguments are the length of the
# gap, the time of W, and the slack: the difference between the longest waiting time of any device so far and that of
# this device.
RULES: dict[str, Callable[[Time, Time, Time], bool]] = {
    "where it fits": lambda gap, w, _slack: gap >= w,
    "where half of it fits": lambda gap, w, _slack: 2 * gap >= w,
    "where the widest bubble would widen": lambda gap, w, slack: gap >= w or gap > slack,
    "in every gap": lambda _gap, _w, _slack: True,
}


class SearchProblem(NamedTuple):
    """The problem that a search solves."""

    num_devices: int
    num_microbatches: int
    num_chunks: int
    times: Times
    communication: Time
    most_stashed: float  # limit of microbatches of one chunk between their F and their W
    weight_memory: float  # fraction of a microbatch's memory that is still held between its B and its W

    def change(self, kind: int) -> float:
        """Return the change in the number of stashed microbatches that an action of this kind causes."""
        return ACTION_KINDS[kind].stashes(self.weight_memory)

    def fits(self, stashed: float) -> bool:
        """Return whether this many stashed microbatches fit, with a tolerance for rounded sums of weight_memory."""
        return stashed <= self.most_stashed + 1e-6


class Skeleton(NamedTuple):
    """The orders of F and B on each device, without W."""

    name: str
    stages: np.ndarray  # by [device, chunk]
    orders: Orders


class WeightGradients:
    """A skeleton that is filled with W by one of RULES."""

    def __init__(self, problem: SearchProblem, skeleton: Skeleton, rule: str):
        p = problem.num_devices
        self.problem, self.skeleton, self.rule = problem, skeleton, rule
        self.orders: Orders = [[] for _ in range(p)]
        devices = StageDevices(skeleton.stages)
        self._device_of = [devices.device(stage, 0) for stage in range(skeleton.stages.size)]
        self._stages = skeleton.stages.tolist()
        self._durations = problem.times.by_kind(p, problem.num_chunks)
        self._ends: dict[tuple[int, int, int], Time] = {}  # by phase, microbatch, stage
        self._starts: list[Time] = [0] * p
        self._now: list[Time] = [0] * p
        self._waited: list[Time] = [0] * p
        self._stashed: list[float] = [0] * p
        self._owed: list[list[Action]] = [[] for _ in range(p)]  # W, oldest first

    def costs(self) -> tuple[Time, Time]:
        """Return the cost, which is the longest span, and the sum of all spans."""
        spans = [end - start for start, end in zip(self._starts, self._now, strict=True)]
        return max(spans), sum(spans)

    def run(self) -> bool:
        """Run the skeleton, and return whether it completes within the memory limit."""
        left = [iter(order) for order in self.skeleton.orders]
        nexts = [next(order, None) for order in left]
        is_moving = True
        while is_moving:
            is_moving = False
            for device, order in enumerate(left):
                while (action := nexts[device]) and (arrival := self._arrival(device, action)) is not None:
                    while action.kind == F and not self.problem.fits(self._stashed[device] + 1):
                        if not self._owed[device]:
                            return False
                        self._do(device, self._owed[device].pop(0), 0)
                    self._fill(device, arrival)
                    self._do(device, action, arrival)
                    nexts[device] = next(order, None)
                    is_moving = True
        for device, owed in enumerate(self._owed):
            while owed:
                self._do(device, owed.pop(0), 0)
        return not any(nexts)

    def _arrival(self, device: int, action: Action) -> Time | None:
        """Return the time at which the inputs of an action have arrived; None if an input has not run yet."""
        arrival: Time = 0
        stage = self._stages[device][action.chunk]
        for key in action_inputs(action.kind, action.microbatch, stage, self.skeleton.stages.size):
            if key not in self._ends:
                return None
            delay = self.problem.communication if self._device_of[key[2]] != device else 0
            arrival = max(arrival, self._ends[key] + delay)
        return arrival

    def _fill(self, device: int, arrival: Time) -> None:
        while self._owed[device] and (gap := arrival - self._now[device]) > 0:
            slack = max(self._waited) - self._waited[device]
            if not RULES[self.rule](gap, self._durations[device][W], slack):
                return
            self._do(device, self._owed[device].pop(0), 0)

    def _do(self, device: int, action: Action, arrival: Time) -> None:
        kind, microbatch, chunk = action
        wait = max(0, arrival - self._now[device])
        if not self.orders[device]:
            self._starts[device] = self._now[device] + wait
        else:
            self._waited[device] += wait
        self._now[device] += wait + self._durations[device][kind]
        self._ends[ACTION_KINDS[kind].phase, microbatch, self._stages[device][chunk]] = self._now[device]
        self._stashed[device] += self.problem.change(kind)
        if kind == B:
            self._owed[device].append(Action(W, microbatch, chunk))
        self.orders[device].append(action)
