"""`swarm` in live mode: the peers are processes on Ray, on this machine or on others (jaxpar/strategies/swarm/live).

The trainer holds a copy of the state on one device. Peers send each other activations and gradients. Each microbatch
counts exactly once, so training equals that of `single` with as many accumulation steps, even if peers fail.
"""

from typing import Any

from ml_collections import ConfigDict

from jaxpar import layout
from jaxpar.core import state as states
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Decision, Plan, Traffic, state_memory
from jaxpar.core.step import Problem
from jaxpar.errors import format_bytes, format_count
from jaxpar.strategies.swarm import options
from jaxpar.strategies.swarm.live_options import LiveDetails
from jaxpar.strategies.swarm.messages import MESSAGE_COMPRESSORS, MessageFormat
from jaxpar.strategies.swarm.options import StageSizes


def plan_live(config: ConfigDict, shapes: Problem, decision: Decision[Any]) -> Plan[LiveDetails]:
    """Plan the stages of a live swarm. Raises UserError for a model that cannot be cut into them."""
    s, num_microbatches = config.swarm, options.swarm_microbatches(config)
    stages, workload, sizes = options.plan_stages(config, shapes)
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
