"""`swarm` in live mode: the peers are processes on Ray, on this machine or on others (jaxpar/swarm/live).

The trainer holds a copy of the state on one device. Peers send each other activations and gradients. Each microbatch
counts exactly once, so training equals that of `single` with as many accumulation steps, even if peers fail.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import layout
from jaxpar import mesh as meshes
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.core.plan import Decision, Plan, Traffic, state_memory
from jaxpar.errors import Refusals, format_bytes, format_count
from jaxpar.mesh import DATA, STAGE
from jaxpar.state import State
from jaxpar.step import Problem
from jaxpar.strategies.placement import PlacedState, on_all
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.swarm import options
from jaxpar.swarm.executor import SwarmExecutor
from jaxpar.swarm.live_options import LiveDetails
from jaxpar.swarm.messages import MESSAGE_COMPRESSORS, MessageFormat
from jaxpar.swarm.options import StageSizes
from jaxpar.swarm.programs import SwarmPrograms
from jaxpar.tasks import Sums


def plan_live(config: ConfigDict, shapes: Problem, decision: Decision[Any]) -> Refusals[Plan[LiveDetails]]:
    """Plan the stages of a live swarm. Refuses a model that cannot be cut into them."""
    s, num_microbatches = config.swarm, options.swarm_microbatches(config)
    stages, workload, sizes = yield from options.plan_stages(config, shapes)
    like = states.abstract_state(shapes.model, shapes.optimizer)
    layouts = {part: layout.on_one(decision.axes, tree, DATA) for part, tree in like._asdict().items()}
    messages = MessageFormat(MESSAGE_COMPRESSORS[s.compress])
    most = int(s.peers)
    where = f"on Ray at {s.address}" if s.address else "on Ray on this machine"
    return Plan(
        "swarm",
        decision,
        f"up to {format_count(most, 'peer')} in {format_count(stages.num_stages, 'stage')} {where}, "
        f"{format_count(num_microbatches, 'microbatch')}, {format_bytes(max(sizes.gradients))} of "
        "parameters per peer",
        layouts,
        LiveDetails(stages, workload, messages, num_microbatches, s, config.seed),
        state_memory(layouts),
        live_traffic(sizes, num_microbatches, most, s.compress),
        differs=f"{s.compress} messages are lossy" if s.compress != "none" else "",
    )


def live_traffic(sizes: StageSizes, num_microbatches: int, num_peers: int, compress: str) -> tuple[Traffic, ...]:
    """Return what a peer sends per step, on average, if no peer fails and all stages have equally many.

    An averaging among n peers of a stage sends 2 (n - 1) / n of the bytes of its gradient from each of them.
    """
    num_stages, dtype = len(sizes.gradients), "float32" if compress == "none" else compress
    groups = [num_peers // num_stages + (stage < num_peers % num_stages) for stage in range(num_stages)]
    number = 2 * len(sizes.messages) * num_microbatches
    averaged = sum(2 * (size - 1) * nbytes for size, nbytes in zip(groups, sizes.gradients, strict=True))
    traffic = (
        Traffic("copy", dtype, STAGE, 2 * num_microbatches * sum(sizes.messages) / num_peers, number / num_peers),
        Traffic("copy", "float32", DATA, averaged / num_peers, sum(2 * (n - 1) * n for n in groups) / num_peers),
    )
    return tuple(one for one in traffic if one.nbytes)


def build_live(plan: Plan[LiveDetails], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[Any]:
    """Join or start the Ray cluster, start peers on it, and build their trainer on the first of these devices.

    Raises:
      UserError: no cluster answers at config.swarm.address, or it has room for fewer peers than stages.
    """
    from jaxpar.swarm.live.trainer import LiveState, start_trainer  # late, because Ray may not be installed

    details, mesh = plan.details, meshes.make_mesh(plan.axes, devices)
    placed = PlacedState(problem, plan.layouts, mesh)
    trainer = start_trainer(details, problem)
    sums = jax.jit(partial(steps.evaluate, problem), out_shardings=on_all(mesh))

    def begin(state: State) -> LiveState:
        return LiveState(int(state.step), state)

    def evaluate(state: LiveState, batch: Mapping[str, np.ndarray]) -> Sums:
        total: Sums = sums(state.state.params, dict(batch))
        return total

    def compile_programs() -> list[CompiledProgram]:
        programs = SwarmPrograms(problem, details.stages, details.messages, keeps_params=False)
        num, on = details.num_microbatches, tuple(mesh.devices.flat)
        return compile_swarm(SwarmExecutor(programs, details.stages, lambda _: [], num, on), problem)

    return Strategy(
        plan,
        tuple(mesh.devices.flat),
        init=lambda key: begin(placed.init(key)),
        place=dict,
        step=trainer.step,
        evaluate=evaluate,
        to_canonical=lambda state: placed.to_canonical(state.state),
        from_canonical=lambda tree, _private=None: begin(placed.from_canonical(tree)),
        compile=compile_programs,
        report=lambda _state, workdir: trainer.report(workdir),
    )


def compile_swarm(executor: SwarmExecutor, problem: Problem) -> list[CompiledProgram]:
    """Compile the passes of all stages and the optimizer step, from shapes alone."""
    *passes, update = executor.lower(states.abstract_state(problem.model, problem.optimizer), problem.batch)
    compiled = [CompiledProgram(one.compile()) for one in passes]
    return [*compiled, CompiledProgram(update.compile(), arguments=("parameters",))]
