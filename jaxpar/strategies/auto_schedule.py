"""Chooses the schedule of a pipeline with config.pipeline.schedule=auto: the one with the shortest step that fits.

In lockstep, that is the time of its clocks; with dispatched stages, or if the executor is still to be chosen, the time
if devices wait only for their inputs.

The candidates are the named schedules with a fused backward pass and, unless stages have replicas, tables that a search
finds, with a fused backward pass and with separate B and W. Each kind is compared by the costs of its own programs: the
passes of the profile with config.pipeline.partition=auto, and otherwise the FLOPs of F, B and W, rematerialization
included. To separate B and W, a device stashes more; where the rates of the device are known, the time of reading and
writing stashes counts too.

The CPU devices of a process share its processors, so a device that waits leaves them to the others. A clock then takes
the time of all its actions, every schedule takes as long as its work, and separate B and W gain nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.errors import UserError
from jaxpar.measure.flops import forward_flops
from jaxpar.pipeline.executor.engine import PipelineEngine
from jaxpar.pipeline.executor.lowering import TableShape, lower_table
from jaxpar.pipeline.executor.programs import StagePrograms
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.pipeline.search.lockstep_search import search_fused, search_lockstep
from jaxpar.pipeline.search.search import SearchResult, search
from jaxpar.pipeline.tables.replicated import WITH_REPLICAS, replicated_table
from jaxpar.pipeline.tables.schedule import make_table
from jaxpar.pipeline.tables.simulate import Time, Times, lockstep, simulate_table
from jaxpar.pipeline.tables.table import BW, Table
from jaxpar.pipeline.tables.validate import peak_stashed
from jaxpar.state import nbytes
from jaxpar.strategies.schedules import AUTO_SCHEDULE, LOCKSTEP

WIDTH = 4  # of the beam; a search for 8 unequal stages and 64 microbatches takes about 1.5 s
EVALUATIONS = 300  # of the search without lockstep
LARGEST_SEARCH = 1024  # stages x microbatches, about 4 s; above, only named schedules are compared
FUSED = ("1f1b", "eager_1f1b", "gpipe", "model_parallel")  # of those with equal costs, the first one is chosen
SPLIT = "zb_h1"  # any schedule with separate B and W


def choose_schedule(
    config: ConfigDict,
    cluster: Cluster,
    start: Table,
    engine_of: Callable[[TableShape], PipelineEngine],
    profile: Sequence[LayerProfile],
    state_bytes: int,
) -> SearchResult:
    """Return the table that is cheapest of those that fit.

    Args:
      config: the config of the run.
      cluster: the cluster that the plan is for.
      start: a table with a fused backward pass, with one stage per device.
      engine_of: function that traces the engine of tables of a shape, for the same stages.
      profile: the layers of the profile; empty without one.
      state_bytes: bytes of the state on the fullest device.
    """
    p, m = start.num_devices, start.num_microbatches
    sharing = devices_that_share(cluster)
    in_lockstep = config.pipeline.executor == LOCKSTEP or sharing > 1

    def cost(table: Table, times: Times) -> Time:
        return lockstep(table, times, sharing=sharing) if in_lockstep else simulate_table(table, times).cost

    def costs(engine: PipelineEngine) -> tuple[Times, int]:
        """Return the times of the stages, and how many microbatches fit, with the programs of an engine."""
        limit = min(m, 2 * p - 1, _microbatches_that_fit(config, cluster, engine, state_bytes))
        times = (
            profiled_times(engine.programs, profile)
            if profile
            else phase_times(engine.programs, cluster, config.model.dtype)
        )
        return times, limit

    fused = engine_of(lower_table(start).shape)
    times, limit = costs(fused)
    if limit < 1 and config.pipeline.memory_limit:
        raise _refuse_limit(config, fused, state_bytes)
    best = _cheapest_fused(start, times, limit, cost)
    if start.replicas or sharing >= p:
        return best
    width = WIDTH if p * m <= LARGEST_SEARCH else 0
    candidates = [(best, times)]
    if 1 <= limit < 2 * p - 1:  # otherwise eager_1f1b fits
        candidates.append((search_fused(times, limit, p, m, width), times))
    named = make_table(SPLIT, num_devices=p, num_microbatches=m, num_chunks=1)
    split_times, limit = costs(engine_of(lower_table(named).shape))
    if limit >= 1:
        if in_lockstep:
            found = search_lockstep(split_times, 0, limit, p, m, width=width)
        elif width:
            found = search(split_times, 0, limit, p, m, evaluations=EVALUATIONS)
        else:
            found = SearchResult(SPLIT, named) if peak_stashed(named).max() <= limit else best
        is_split = (found.table.actions["kind"] != BW).all()  # otherwise other programs run it, which need more memory
        candidates += [(found, split_times)] * bool(is_split)
    return cheapest(candidates, cost)


def cheapest(candidates: Sequence[tuple[SearchResult, Times]], cost: Callable[[Table, Times], Time]) -> SearchResult:
    """Return the cheapest result, each with the times of its programs; the first of equal ones."""
    seconds = [cost(result.table, times) for result, times in candidates]
    return next(result for (result, _), of in zip(candidates, seconds, strict=True) if of <= min(seconds) * (1 + 1e-9))


def _cheapest_fused(start: Table, times: Times, limit: int, cost: Callable[[Table, Times], Time]) -> SearchResult:
    """Return the cheapest named schedule with a fused backward pass that fits.

    If stages have replicas and none fits, it is the one with the fewest microbatches in memory.
    """
    p, m = start.num_devices, start.num_microbatches
    if start.replicas:
        names = [name for name in FUSED if name in WITH_REPLICAS]
        found = [SearchResult(name, replicated_table(name, start.replicas, m)) for name in names]
    else:
        found = [
            SearchResult(name, make_table(name, num_devices=p, num_microbatches=m, num_chunks=1)) for name in FUSED
        ]
    peaks = [int(peak_stashed(result.table).max()) for result in found]
    fitting = [result for result, peak in zip(found, peaks, strict=True) if peak <= max(limit, min(peaks))]
    return cheapest([(result, times) for result in fitting], cost)


def devices_that_share(cluster: Cluster) -> int:
    """Return the number of neighbouring devices that share their processors."""
    return max(1, cluster.num_devices // cluster.num_processes) if cluster.platform == "cpu" else 1


def phase_times(programs: StagePrograms, cluster: Cluster, dtype: str) -> Times:
    """Return the times of F, B and W by device. B is all of a fused backward pass.

    They are seconds if the rates of a device are known: those of the FLOPs at the peak rate of `dtype`, and those in
    which stashes are read and written. Otherwise they are the FLOPs.
    """
    phases = range(programs.num_phases)
    times = [phase_flops(programs, phase) for phase in phases]
    if rates := known_rates(cluster, dtype):
        peak, bandwidth = rates
        moved = [stash_traffic(programs, phase) for phase in phases]
        times = [
            [flops / peak + size / bandwidth for flops, size in zip(*of_phase, strict=True)]
            for of_phase in zip(times, moved, strict=True)
        ]
    forward, backward, *weight = times
    return Times(forward, backward, *(weight or [[0.0] * len(forward)]))


def known_rates(cluster: Cluster, dtype: str) -> tuple[float, float] | None:
    """Return the peak FLOP/s of a device in `dtype`, and its bytes/s of memory; None if one of them is not known."""
    peak, bandwidth = cluster.peak_flops.get(dtype), cluster.memory_bandwidth
    return None if peak is None or bandwidth is None else (peak, bandwidth)


def phase_flops(programs: StagePrograms, phase: int) -> list[float]:
    """Return the FLOPs of a phase by device."""
    flops = []
    for number, program in enumerate(programs.programs):
        saved = {stash: values for stash, values in program.cut.saved.items() if stash[0] < phase <= stash[1]}
        flops.append(float(forward_flops(partial(programs.run, number, phase), program.inputs, saved)))
    return [flops[number] for number in programs.numbers[:, 0].tolist()]


def stash_traffic(programs: StagePrograms, phase: int) -> list[float]:
    """Return the bytes of stashes that a phase reads and writes, by device."""
    moved = [
        float(sum(nbytes(values) for (first, last), values in program.cut.saved.items() if first <= phase <= last))
        for program in programs.programs
    ]
    return [moved[number] for number in programs.numbers[:, 0].tolist()]


def profiled_times(programs: StagePrograms, profile: Sequence[LayerProfile]) -> Times:
    """Return the seconds of F, B and W by device. B and W each take half of a backward pass."""
    spans = [profile[begin:end] for begin, end in pairwise(programs.stages.bounds)]
    of_device = [spans[stage] for stage in programs.stages.placement[:, 0].tolist()]
    half = [sum(layer.backward_s for layer in span) / 2 for span in of_device]
    return Times([sum(layer.forward_s for layer in span) for span in of_device], half, half)


def _microbatches_that_fit(config: ConfigDict, cluster: Cluster, engine: PipelineEngine, state_bytes: int) -> int:
    """Return for how many microbatches a device has memory between F and W; below 1 if not even the state fits.

    The memory is config.pipeline.memory_limit, or what JAX takes of that of a device of the cluster. If neither is
    known, it is the number of devices, as for 1f1b.
    """
    transfers, of_microbatch = _bytes_of_microbatches(engine)
    if config.pipeline.memory_limit:
        return int((config.pipeline.memory_limit - state_bytes - transfers) // max(of_microbatch, 1))
    if cluster.usable_bytes is None:
        return len(engine.programs.stages.placement)
    memory = cluster.usable_bytes / devices_that_share(cluster)  # the CPU devices of a machine share its memory
    gradients = max(nbytes(program.inputs.params) for program in engine.programs.programs)
    # A backward pass has as much as was saved once more: its gradients, or what it computes again.
    return int((memory - state_bytes - gradients - transfers) // max(of_microbatch, 1)) - 1


def _bytes_of_microbatches(engine: PipelineEngine) -> tuple[int, int]:
    """Return the bytes that a device needs once, and for each microbatch.

    A microbatch counts as if all its stashes and transfers existed at the same time.
    """
    transfers = 2 * engine.transfers.nbytes
    return transfers, sum(stash.nbytes for stash in engine.stashes.values()) + transfers


def _refuse_limit(config: ConfigDict, engine: PipelineEngine, state_bytes: int) -> UserError:
    least = state_bytes + sum(_bytes_of_microbatches(engine))
    return UserError(
        f"config.pipeline.memory_limit is {config.pipeline.memory_limit:g}; it must be at least {least:,} with "
        f"config.pipeline.schedule={AUTO_SCHEDULE!r}, for the state and one microbatch of a device"
    )
