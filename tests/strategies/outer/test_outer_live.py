"""Live workers of an outer step on a Ray cluster: one is killed and starts again, another one joins."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpar.strategies.outer.table import OuterEvent, read_contributions
from tests.strategies.swarm.test_live_machines import ROOT, RayCluster, cluster

__all__ = ["cluster"]  # a fixture
EVERY, NUM_STEPS, KILLED_AT, GATE = 4, 32, 10, 17
# Files decide what a worker does before a step: kill_WORKER_STEP kills it once, and hold_WORKER_STEP lets it wait.
PACED = """
import os, signal, sys, time

if any("outer.num_workers" in one for one in sys.argv):
    from jaxpar import training

    def step(self, number, *others):
        place = f"{os.environ['GATES']}/%s_{self._run.config.outer.worker}_{number}"
        if os.path.exists(place % "kill"):
            os.remove(place % "kill")
            os.kill(os.getpid(), signal.SIGKILL)
        while os.path.exists(place % "hold"):
            time.sleep(0.02)
        return before(self, number, *others)

    before, training.Loop._step = training.Loop._step, step
"""
VALUES: dict[str, Any] = {
    **{"model.name": "mlp", "model.num_layers": 1, "model.hidden_size": 16, "model.dropout": 0.1},
    **{
        "data.source": "synthetic",
        "data.synthetic_examples": 200,
        "data.validation_fraction": 0,
        "strategy": "single",
        "batch_size": 8,
    },
    **{"num_steps": NUM_STEPS, "log.curves": False, "log.report": False, "log.tensorboard": False},
    **{"checkpoint.every_steps": 6, "checkpoint.asynchronous": False, "log.every_steps": 1, "outer.min_workers": 2},
    **{"outer.num_workers": 3, "outer.every_steps": EVERY, "outer.compression": "int8", "outer.silence_seconds": 2},
}


def start_worker(
    cluster: RayCluster, folder: Path, worker: int, **changes: Any
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a worker, and return its process and its log. changes: to config.outer."""
    values = VALUES | {"outer.worker": worker, "outer.address": cluster.address}
    values |= {f"outer.{key}": value for key, value in changes.items()}
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "jaxpar", f"--config={ROOT}/configs/default.py", f"--workdir={folder}/w{worker}"]
    log, environment = folder / f"log{worker}", {**cluster.environment, "GATES": str(folder)}
    environment["PYTHONPATH"] = f"{ROOT}:{folder}"
    with log.open("ab") as file:
        started = subprocess.Popen([*command, *flags], cwd=folder, env=environment, stdout=file, stderr=file)
    return started, log


def wait_for(log: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds Ray's processes in /proc")
def test_a_worker_is_killed_and_another_joins(cluster: RayCluster, tmp_path: Path) -> None:
    """All end, the bytes are those of the plan, and a replay from the table has every bit of every run."""
    cluster.start_node()
    (tmp_path / "sitecustomize.py").write_text(PACED)
    gate = tmp_path / f"hold_0_{GATE}"
    for file in (gate, tmp_path / f"kill_1_{KILLED_AT}"):
        file.touch()
    first, log = start_worker(cluster, tmp_path, 0)
    killed, log_of_killed = start_worker(cluster, tmp_path, 1)
    assert killed.wait(120) == -signal.SIGKILL, log_of_killed.read_text()
    wait_for(log, f"\nstep {GATE - 2}", first)  # without worker 1, which is silent
    again, _ = start_worker(cluster, tmp_path, 1)
    joining, log_of_joining = start_worker(cluster, tmp_path, 2)
    wait_for(log_of_killed, "outer     worker 1 joined at step 6, 4 rounds", again)
    wait_for(log_of_joining, "outer     worker 2 joined at step 16, 4 rounds", joining)
    gate.unlink()
    for process, path in ((first, log), (joining, log_of_joining), (again, log_of_killed)):
        assert process.wait(120) == 0, path.read_text()
    rows = read_contributions(tmp_path / "w0" / "outer" / "contributions.csv")
    steps: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        steps.setdefault((row.event, row.worker), []).append(row.step)
    every = list(range(EVERY, NUM_STEPS + 1, EVERY))
    assert steps[OuterEvent.COUNTED, 0] == steps[OuterEvent.COUNTED, 1] == every
    assert steps[OuterEvent.COUNTED, 2] == every[4:]
    assert steps[OuterEvent.REPEATED, 1] == [8]
    assert (OuterEvent.SILENT, 1) in steps
    counted = {(row.worker, row.step): row.counted for row in rows if row.event == OuterEvent.COUNTED}
    assert [counted[1, step] for step in every] == [0, 1, *range(4, 10)]  # late from step 12 on
    results = [json.loads((tmp_path / f"w{worker}" / "result.json").read_text()) for worker in range(3)]
    [sent] = {row.nbytes for row in rows if row.nbytes >= 0}
    assert sent == round(results[0]["wire_bytes"] * EVERY)
    assert results[2]["outer"]["messages"] == 4
    assert results[2]["outer"]["sent_bytes"] == 4 * sent
    assert results[2]["outer"]["received_bytes"] == 4 * 4 * 936  # parameters of the model
    assert "since step 17" in results[2]["ledger"]
    assert "outer     worker 1 is silent; the others no longer wait for it" in log.read_text()
    assert "outer     worker 2 joined at step 16" in log.read_text()
    assert replayed(tmp_path, 3) == [
        "worker 0, start 0, step 32: equal bitwise",
        "worker 1, start 1, step 32: equal bitwise",
        "worker 2, start 0, step 32: equal bitwise",
    ]


def replayed(folder: Path, num_workers: int) -> list[str]:
    """Replay the runs of all workers, and return the ends of the lines."""
    command = [sys.executable, "-m", "jaxpar", "replay", *(str(folder / f"w{worker}") for worker in range(num_workers))]
    replay = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert replay.returncode == 0, replay.stderr
    return [line.rpartition("  ")[2] for line in replay.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds Ray's processes in /proc")
def test_a_worker_is_interrupted_while_it_waits_and_another_one_is_paused(cluster: RayCluster, tmp_path: Path) -> None:
    """Ctrl-C saves the step. A worker that SIGSTOP pauses is late when it continues. The replay has every bit."""
    cluster.start_node()
    (tmp_path / "sitecustomize.py").write_text(PACED)
    gate = tmp_path / "hold_1_5"
    gate.touch()
    settings = {"num_workers": 2, "compression": "topk"}
    first, log = start_worker(cluster, tmp_path, 0, **settings)
    paused, log_of_paused = start_worker(cluster, tmp_path, 1, **settings)
    wait_for(log, "step 7/32", first)
    time.sleep(1)  # worker 0 waits for the second round
    first.send_signal(signal.SIGINT)
    assert first.wait(30) == 0, log.read_text()
    assert "SIGINT: stopped after step 8 of 32, state saved in" in log.read_text()
    again, _ = start_worker(cluster, tmp_path, 0, **settings)
    wait_for(log, "outer     worker 0 joined at step 8, 1 rounds", again)
    paused.send_signal(signal.SIGSTOP)
    wait_for(log, "outer     worker 1 is silent; the others no longer wait for it", again)
    wait_for(log, "step 12/32", again)
    gate.unlink()
    paused.send_signal(signal.SIGCONT)
    for process, path in ((again, log), (paused, log_of_paused)):
        assert process.wait(120) == 0, path.read_text()
    events = {row.event for row in read_contributions(tmp_path / "w0" / "outer" / "contributions.csv")}
    assert events == {*OuterEvent}
    assert replayed(tmp_path, 2) == [
        "worker 0, start 1, step 32: equal bitwise",
        "worker 1, start 0, step 32: equal bitwise",
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds Ray's processes in /proc")
def test_the_server_ends_after_its_last_worker_was_killed(cluster: RayCluster, tmp_path: Path) -> None:
    """Until then, a run of the same name in another workdir is refused."""
    cluster.start_node()
    (tmp_path / "sitecustomize.py").write_text(PACED)
    (tmp_path / "kill_0_5").touch()
    killed, log = start_worker(cluster, tmp_path, 0, num_workers=1, min_workers=1, silence_seconds=12)
    assert killed.wait(120) == -signal.SIGKILL, log.read_text()
    other = tmp_path / "other"
    other.mkdir()
    refused, log = start_worker(cluster, other, 0, num_workers=1, min_workers=1)
    assert refused.wait(60) == 2, log.read_text()
    assert "until all of its workers have left or are silent; it must be the name of this run alone" in log.read_text()
    deadline, code = time.monotonic() + 90, 2
    while code == 2 and time.monotonic() < deadline:
        accepted, log = start_worker(cluster, other, 0, num_workers=1, min_workers=1)
        code = accepted.wait(60)
    assert code == 0, log.read_text()
