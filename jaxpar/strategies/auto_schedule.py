"""Chooses the schedule of a pipeline with config.pipeline.schedule=auto: the cheapest one in lockstep that fits.

The times of a stage's F, B and W are those of the profile with config.pipeline.partition=auto, and otherwise
proportional to the FLOPs of its programs, rematerialization included.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.measure.flops import forward_flops
from jaxpar.pipeline.executor.engine import PipelineEngine
from jaxpar.pipeline.executor.programs import StagePrograms
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.pipeline.search.lockstep_search import search_lockstep
from jaxpar.pipeline.search.search import SearchResult
from jaxpar.pipeline.tables.simulate import Times

WIDTH = 4  # of the beam; a search for 8 unequal stages and 64 microbatches takes about 1.5 s


def choose_schedule(
    config: ConfigDict, cluster: Cluster, engine: PipelineEngine, profile: Sequence[LayerProfile], state_bytes: int
) -> SearchResult:
    """Return the table that is cheapest in lockstep of those that fit.

    Args:
      config: the config of the run.
      cluster: the cluster that the plan is for.
      engine: the engine of any table with separate B and W for these stages, with one stage per device.
      profile: the layers of the profile; empty without one.
      state_bytes: bytes of the state on the fullest device.
    """
    programs, p, m = engine.programs, len(engine.programs.stages.placement), engine.shape.num_microbatches
    limit = min(m, 2 * p - 1, _microbatches_that_fit(config, cluster, engine, state_bytes))
    times = profiled_times(programs, profile) if profile else flops_of_programs(programs)
    return search_lockstep(times, 0, limit, p, m, width=WIDTH)


def flops_of_programs(programs: StagePrograms) -> Times:
    """Return the FLOPs of F, B and W by stage."""
    flops = []
    for number, program in enumerate(programs.programs):
        for phase in range(programs.num_phases):
            saved = {stash: values for stash, values in program.cut.saved.items() if stash[0] < phase <= stash[1]}
            flops.append(forward_flops(partial(programs.run, number, phase), program.inputs, saved))
    numbers = programs.numbers[:, 0].tolist()
    return Times(*([float(flops[programs.num_phases * number + phase]) for number in numbers] for phase in range(3)))


def profiled_times(programs: StagePrograms, profile: Sequence[LayerProfile]) -> Times:
    """Return the seconds of F, B and W by stage. B and W each take half of a backward pass."""
    bounds = programs.stages.bounds
    spans = [profile[begin:end] for begin, end in pairwise(bounds)]
    half = [sum(layer.backward_s for layer in span) / 2 for span in spans]
    return Times([sum(layer.forward_s for layer in span) for span in spans], half, half)


def _microbatches_that_fit(config: ConfigDict, cluster: Cluster, engine: PipelineEngine, state_bytes: int) -> int:
    """Return for how many microbatches a device has memory between F and W, at least 1.

    The memory is config.pipeline.memory_limit, or that of a device of the cluster. If neither is known, it is the
    number of devices, as for 1f1b. A microbatch counts as if all its stashes and transfers existed at the same time.
    """
    memory = config.pipeline.memory_limit or cluster.memory_bytes
    if memory is None:
        return len(engine.programs.stages.placement)
    if not config.pipeline.memory_limit and cluster.platform == "cpu":  # the CPU devices of a machine share its memory
        memory /= max(1, cluster.num_devices // cluster.num_processes)
    transfers = 2 * engine.transfers.nbytes
    of_microbatch = sum(stash.nbytes for stash in engine.stashes.values()) + transfers
    return max(1, int((memory - state_bytes - transfers) // max(of_microbatch, 1)))
