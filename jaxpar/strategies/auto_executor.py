"""Chooses the executor of a pipeline with config.pipeline.executor=auto: the one whose step is shorter.

On GPUs, both are simulated with the times of the actions: those of the profile with config.pipeline.partition=auto, and
otherwise those of their FLOPs and stashes. In lockstep, a clock lasts as long as its slowest action and then its
transfers. A dispatched action starts when its inputs have arrived, and a step is not shorter than the host needs to
enqueue it. If the rates of the GPU are not known, neither are seconds, and the host does not count.

The CPU devices of a process share its processors with each other and with the host, so that nothing waits. What differs
is what the executors cost themselves, which is measured (scripts/bench/executors.py): small actions are faster in
lockstep, because the host needs time for each of them.
"""

from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.mesh import STAGE
from jaxpar.pipeline.executor.enqueue import ENQUEUE_SECONDS
from jaxpar.pipeline.executor.programs import StagePrograms
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.pipeline.tables.simulate import lockstep, simulate_table, steady_bubble_rate, work
from jaxpar.pipeline.tables.table import Table
from jaxpar.state import nbytes
from jaxpar.strategies.auto_schedule import known_rates, phase_times, profiled_times
from jaxpar.strategies.schedules import DISPATCH, LOCKSTEP

CPU_FLOPS = 1e9  # of a microbatch in a stage, from which dispatched stages were faster on CPU devices


def choose_executor(
    config: ConfigDict, cluster: Cluster, table: Table, programs: StagePrograms, profile: Sequence[LayerProfile]
) -> str:
    """Return the executor whose step is shorter. The choice needs no device, so a resumed run makes it again.

    Args:
      config: the config of the run.
      cluster: the cluster that the plan is for.
      table: the table.
      programs: the programs of its stages.
      profile: the layers of the profile; empty without one.
    """
    of_flops = phase_times(programs, cluster, config.model.dtype)
    if cluster.platform == "cpu":
        of_stages = np.sum(of_flops, axis=0)  # the rates of CPUs are not known
        return DISPATCH if of_stages.min() >= CPU_FLOPS else LOCKSTEP
    in_seconds = bool(profile) or known_rates(cluster, config.model.dtype) is not None
    times = profiled_times(programs, profile) if profile else of_flops
    communication = link_seconds(cluster, programs) if in_seconds else 0.0
    if table.period:
        dispatched = max(work(table, times)) / (1 - steady_bubble_rate(table, times, communication))
    else:
        dispatched = simulate_table(table, times, communication).cost
    if in_seconds:
        # A host enqueues the actions of the columns of which it has a device.
        share = min(cluster.num_devices / cluster.num_processes / table.num_devices, 1.0)
        dispatched = max(dispatched, ENQUEUE_SECONDS * share * len(table.actions))
    return DISPATCH if dispatched <= lockstep(table, times, communication) else LOCKSTEP


def link_seconds(cluster: Cluster, programs: StagePrograms) -> float:
    """Return the time in which the largest activation is sent to the next stage; 0 if the link is not known."""
    if STAGE not in cluster.links:
        return 0.0
    link = cluster.links[STAGE]
    return link.latency + max(nbytes(program.y) for program in programs.programs) / link.bandwidth
