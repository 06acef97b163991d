"""The branches that an audit counts are the actions of the table."""

import numpy as np
import pytest

from jaxpar import cluster, strategies
from jaxpar.strategies.pipeline.executor.lowering import device_branches
from jaxpar.strategies.pipeline.tables.table import BW, B, F, W
from tests.strategies.pipelines import Task, make_config, make_problem

MLP = Task("mlp", "classification", layers=4)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_branches_are_those_of_the_table(schedule: str) -> None:
    overrides = ("--config.strategy=pipeline", "--config.mesh.stage=2", f"--config.pipeline.schedule={schedule}")
    config = make_config(MLP, *overrides)
    plan = strategies.plan(config, make_problem(config, MLP), cluster.find_cluster())
    details = plan.details
    found, table = device_branches(details.lowered, details.stages), details.table
    for phase, kinds in enumerate(([F], [B, BW], [W])[: 3 if schedule == "zb_h1" else 2]):
        acts = np.zeros((table.num_clocks, table.num_devices), bool)
        for clock, device, kind in table.actions[["clock", "device", "kind"]].tolist():
            acts[clock, device] |= kind in kinds
        branches = found[f"clock_0/phase_{phase}"]
        assert ((branches.taken > 0) == acts).all()
        assert (branches.taken < branches.number).all()
        # The two devices have stages of different kinds, so they never run the same program.
        assert not set(branches.taken[acts[:, 0], 0]) & set(branches.taken[acts[:, 1], 1])
        assert sum(branches.fractions) == pytest.approx(1)
        assert branches.fractions[0] == pytest.approx(1 - acts.mean())
    # Every transfer is stored once: each device but one receives each microbatch's activation.
    stored = [one for name, one in found.items() if "/deliver_0_" in name]
    assert sum((one.taken == 0).sum() for one in stored) == table.num_microbatches
    assert (found["of_kind"].taken == [details.stages.kinds]).all()
