"""The details of a planned pipeline, from which its executors are built (lockstep.py, dispatched.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.core.plan import Plan, Traffic
from jaxpar.layout import Layout
from jaxpar.strategies.pipeline.executor.continuous import ContinuousState
from jaxpar.strategies.pipeline.executor.engine import PipelineEngine
from jaxpar.strategies.pipeline.executor.lowering import LoweredTable
from jaxpar.strategies.pipeline.executor.stage_programs import StagePrograms
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.executor.state import StagedState
from jaxpar.strategies.pipeline.tables.table import Table

# The fields of `Plan` that depend on the executor: the layouts of the state, and what each device holds and sends.
ExecutorResources = tuple[Mapping[str, Layout], tuple[dict[str, int], ...], tuple[Traffic, ...]]


@dataclass(frozen=True)
class PipelineDetails:
    """The details of a plan that `build` needs."""

    schedule: str  # the schedule: its name or path, or how the plan chose it
    table: Table  # the table of the schedule
    lowered: LoweredTable  # the table in the form that the engine runs, as NumPy arrays
    stages: Stages  # the stages
    engine: PipelineEngine  # their F, B and W programs, as branches of one program
    staged: StagedState  # distribution of the state between flushes, and the exchange of gradients between replicas
    state: StagedState | ContinuousState  # distribution of the state; `staged`, unless the pipeline never drains
    remat: str  # none, full or dots: which values the forward pass saves for the backward pass
    measured_step: int  # number of the step whose actions are measured; 0: none
    executor: str  # one of EXECUTORS

    @property
    def programs(self) -> StagePrograms:
        """The F, B and W programs of the stages."""
        return self.engine.programs


def num_unapplied(plan: Plan[PipelineDetails], in_flight: Any) -> int:
    """Return the number of the last batches whose gradients are not in all weights of a pipeline that never drains.

    in_flight: its private state.
    """
    assert plan.delays is not None
    return min(int(in_flight.num_entered), max(stage.updated_after for stage in plan.delays.stages))
