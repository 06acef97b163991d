"""Random scenarios: heterogeneous peers that join, fail and move while they train."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxpar.strategies.swarm.availability import PeerEvent, RandomTrace, SwarmPeer, events_before
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.scenario import SwarmScenario, write_scenario

Scenario = tuple[list[SwarmPeer], Workload, list[PeerEvent], SwarmSettings]


@contextlib.contextmanager
def replayable(scenario: Scenario) -> Iterator[None]:
    """Within `with`, write the scenario of a failing test to a file, and add to the error how to replay it."""
    try:
        yield
    except Exception as error:
        path = Path(tempfile.gettempdir()) / "jaxpar_scenario.json"
        write_scenario(path, SwarmScenario(*scenario))
        error.add_note(f"replay: jaxpar swarm simulate --report=replay --scenario={path}")
        raise


def make_scenario(seed: int) -> Scenario:
    """Return a scenario in which a peer fails every few seconds, as a pass takes 1 to 10 of them."""
    rng = np.random.default_rng(seed)
    num_stages = int(rng.integers(2, 5))
    num_peers = int(rng.integers(2 * num_stages, 4 * num_stages))
    num_microbatches = int(rng.integers(3, 12))
    peers = [
        SwarmPeer(f"p{n}", float(rng.lognormal(0, 0.5)), float(rng.uniform(5, 20)), float(rng.uniform(0, 0.05)))
        for n in range(num_peers)
    ]
    forward, backward = (tuple(map(float, rng.uniform(low, 2 * low, num_stages))) for low in (0.5, 1.0))
    settings = SwarmSettings(
        num_steps=6,
        num_microbatches=num_microbatches,
        in_flight=int(rng.integers(0, num_microbatches)),
        delayed=bool(rng.integers(2)),
        rebalance_seconds=float(rng.choice([0, 10, 20])),
        rule=str(rng.choice(["paper", "balance"])),
        seed=seed,
    )
    trace = events_before(RandomTrace(num_peers, lifetime=60, rejoin=15, seed=seed), 2000)
    return peers, Workload(forward, backward, 1.0, 5.0, 20.0), trace, settings
