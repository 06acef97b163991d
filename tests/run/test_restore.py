"""Tests of the start of a run from a checkpoint with batches in flight."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar import checkpoint
from jaxpar.core.plan import format_private_key
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.run.restore import Past, save_info, start
from tests.runs import small_config


def make_run(tmp_path: Path, *overrides: str) -> build.Run:
    config = small_config(tmp_path, "--config.mesh.data=1", "--config.model.num_layers=2", *overrides)
    return build.make_run(config, tmp_path, Phases(), build.check_run(config, tmp_path))


@pytest.mark.parametrize(("step", "batches"), [(9, "3 batches"), (1, "1 batch")])
def test_discarded_batches_are_counted(
    step: int, batches: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of four stages applies a batch three steps after it entered."""
    pipeline = "strategy=pipeline", "mesh.stage=4", "pipeline.schedule=pipedream", "pipeline.executor=lockstep"
    settings = [f"--config.{one}" for one in pipeline]
    before, now = make_run(tmp_path, *settings), make_run(tmp_path)
    state = SimpleNamespace(private=SimpleNamespace(num_entered=np.int32(step)))
    earlier = {"step": 0, "private_state": "another", "batches": 0}
    info = save_info(before, step, before.strategy.num_in_flight(state), Past(0, [earlier]))
    saved = checkpoint.Checkpoint(step, {}, {"stashes": {}}, info)
    monkeypatch.setattr(checkpoint, "restore", lambda *_args, **_options: saved)

    def from_canonical(*_trees: Any) -> None:
        pass

    _, past = start(now._replace(strategy=now.strategy._replace(from_canonical=from_canonical)))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("discarded ")]
    key = format_private_key(before.plan.private_key)
    lost = f"discarded private state of {key}, with {batches} in flight, whose gradients are lost; this run uses ddp"
    assert lines == [lost]
    assert past.step == step
    assert past.discarded == [earlier, {"step": step, "private_state": key, "batches": int(batches[0])}]
