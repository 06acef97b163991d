"""The parts of live swarms that need no Ray cluster."""

import math
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar.errors import TrainingError, UserError
from jaxpar.strategies import ray_cluster
from jaxpar.strategies.swarm.live import cluster
from jaxpar.strategies.swarm.live.calls import DIED, LOAD, SILENT, START, Calls, Patience
from jaxpar.strategies.swarm.live.peer import MALFORMED, NONFINITE_VALUES, find_fault

ARRAY = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("received", "fault"),
    [
        ([ARRAY], ""),
        ([np.full((2, 3), 3e38, np.float32)], ""),
        ([np.ones((2, 4), np.float32)], MALFORMED),
        ([np.ones((2, 3), np.float64)], MALFORMED),
        ([ARRAY, ARRAY], MALFORMED),
        ([], MALFORMED),
        ((ARRAY,), MALFORMED),
        (ARRAY, MALFORMED),
        (None, MALFORMED),
        ([[1.0, 2.0]], MALFORMED),
        ([np.ma.masked_array(ARRAY)], MALFORMED),  # a subclass can have methods of its own
        ([np.where(ARRAY > 0, np.nan, ARRAY).astype(np.float32)], NONFINITE_VALUES),
        ([-np.inf * ARRAY], NONFINITE_VALUES),
    ],
)
def test_faults_of_received_arrays(received: object, fault: str) -> None:
    assert find_fault(received, [ARRAY]) == fault


def test_faults_of_narrow_arrays() -> None:
    narrow = np.array([1, 2], jnp.bfloat16)
    assert find_fault([narrow], [narrow]) == ""
    assert find_fault([np.array([1, np.nan], jnp.bfloat16)], [narrow]) == NONFINITE_VALUES
    assert find_fault([np.array([1], np.int8)], [np.array([1], np.int8)]) == ""


def test_patience_is_measured() -> None:
    """Limits are 2 s and 10 times the longest comparable call: of the peer itself, or of any peer that loads."""
    patience = Patience(10)
    assert patience.limit(0, LOAD) == patience.limit(0, "F") == math.inf
    patience.observe(0, LOAD, 7.4)
    patience.observe(1, LOAD, 1.0)
    assert patience.limit(1, LOAD) == patience.limit(2, LOAD) == 76
    assert patience.limit(0, START) == math.inf
    assert patience.limit(1, "F") == 76  # its first one
    patience.observe(1, "F", 0.5)
    patience.observe(1, "B", 1.0)
    assert (patience.limit(1, "F"), patience.limit(1, "B")) == (7, 12)
    assert patience.limit(0, "F") == 76
    patience.observe(1, LOAD, 9.0)
    assert patience.limit(1, "F") == 7  # loading does not make passes slower
    patience.observe(1, "F", 60.0)
    assert patience.limit(1, "F") == 602
    for _ in range(100):
        patience.observe(1, "F", 0.1)
    assert patience.limit(1, "F") == pytest.approx(3.0, rel=1e-2)
    patience.forget(1)
    assert patience.limit(1, "F") == 92


class ScriptedRay:
    """Answers calls at given times of a clock that waiting advances."""

    exceptions = SimpleNamespace(RayActorError=OSError, RayTaskError=OSError, ObjectLostError=OSError, RayError=OSError)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answered: dict[str, float]) -> None:
        self.now, self.answered = 0.0, answered
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def wait(self, calls: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        until = min(self.answered.get(call, math.inf) for call in calls)
        self.now = max(self.now, min(self.now + timeout + 1e-6, until))
        ready = [call for call in calls if self.answered.get(call, math.inf) <= self.now][:num_returns]
        return ready, [call for call in calls if call not in ready]

    def get(self, call: str) -> str:
        return call


def test_a_stopped_peer_costs_a_multiple_of_its_usual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading took 7.4 s, and two passes 0.03 s each. The third one is not answered."""
    ray = ScriptedRay(monkeypatch, {"load": 7.4, "first": 7.43, "second": 7.46})
    calls = Calls(ray, 20)
    for name in ("load", "first", "second", "third"):
        calls.add(0, name, LOAD if name == "load" else "F", lambda *_: None)
    failures = [failure for _ in range(4) for failure in calls.wait(math.inf)]
    assert [(failure.call.answer, failure.kind) for failure in failures] == [("third", SILENT)]
    assert ray.now == pytest.approx(7.46 + 2 + 20 * 0.03, abs=1e-5)


def test_time_in_which_nobody_waits_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer evaluates for a minute, while a peer answers within a second."""
    ray = ScriptedRay(monkeypatch, {"load": 1.0, "update": 2.0})
    calls = Calls(ray, 20)
    calls.add(0, "load", LOAD, lambda *_: None)
    calls.wait(math.inf)
    calls.add(0, "update", "U", lambda *_: None)
    ray.now = 60.0
    calls.restart()
    calls.wait(math.inf)
    assert calls.patience.limit(0, "U") == 2


def test_a_run_that_is_killed_leaves_a_message() -> None:
    """Ray ends a process at once, and without a message, if its own process on the machine has ended."""
    program = "import os; from jaxpar.strategies import ray_cluster as c; p = os.fork(); c._announce_silent_end(); "
    program += "os._exit(1) if p == 0 else os.wait()"
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", program], text=True, capture_output=True)
    assert (process.returncode, process.stderr) == (0, f"{ray_cluster.SILENT_END}\n")


def test_no_cluster_answers() -> None:
    with pytest.raises(
        UserError, match=r"swarm.address is '127.0.0.1:1', where no Ray cluster accepts this process \(.*refused"
    ):
        ray_cluster.connect("swarm.address", "127.0.0.1:1", num_cpus=1)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_the_cluster_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray does not find a cluster on the loopback interface again."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for process, command in {"12": "sh\0-c\0ls\0", "345": "raylet\0--gcs-address=127.0.0.1:4567\0--x=y\0"}.items():
        (tmp_path / process).mkdir()
        (tmp_path / process / "cmdline").write_text(command)
    here = ray_cluster.clusters_here(tmp_path)
    assert here == {"127.0.0.1:4567": ""}
    monkeypatch.setattr(ray_cluster, "clusters_here", lambda: here)
    message = (
        "is 'auto', where no Ray cluster accepts this process (the cluster at 127.0.0.1:4567 is that of another run"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        ray_cluster.connect("swarm.address", "auto", num_cpus=1)


def test_a_cluster_that_asks_for_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's client does not notice. The environment of the cluster's processes shows it."""
    for process, (mode, address) in {"1": ("a", "127.0.0.1:1"), "2": ("b", "10.0.0.1:2"), "3": ("", "h:3")}.items():
        (tmp_path / process).mkdir()
        (tmp_path / process / "cmdline").write_text(f"raylet\0--gcs-address={address}\0")
        (tmp_path / process / "environ").write_text(
            "NO_RAY_AUTH_MODE=x" + (f"\0RAY_AUTH_MODE={mode}\0" if mode else "")
        )
    here = ray_cluster.clusters_here(tmp_path)
    assert here == {"127.0.0.1:1": "a", "10.0.0.1:2": "b", "h:3": ""}
    for address, expected in {"auto": "b", "localhost:1": "a", "h:3": "", "localhost:4": ""}.items():
        monkeypatch.setenv("RAY_AUTH_MODE", "")  # restored after the test, also if it was unset
        monkeypatch.delenv("RAY_AUTH_MODE")
        ray_cluster.adopt_token_mode(address, here)
        assert os.environ.get("RAY_AUTH_MODE", "") == expected
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_cluster.adopt_token_mode("auto", here)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_a_cluster_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_options: object) -> None:
        raise Exception("The current node timed out during startup.\nMore lines.")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(ray_cluster, "load_ray", lambda **_options: ray)
    message = r"^Ray does not start on this machine: The current node timed out during startup\.$"
    with pytest.raises(TrainingError, match=message):
        ray_cluster.connect("swarm.address", "", num_cpus=1)


@pytest.mark.parametrize(
    ("text", "is_at_start", "expected"),
    [
        ("The actor died because of an error\nModuleNotFoundError: No module named 'jaxpar'\n", True, "ModuleNotFound"),
        ("The actor is dead because its node has died", False, "its process ended"),
    ],
)
def test_why_a_peer_died(text: str, is_at_start: bool, expected: str) -> None:
    error = type("RayActorError", (Exception,), {"actor_init_failed": is_at_start})

    def get(_: object) -> None:
        raise error(text)

    exceptions = SimpleNamespace(RayActorError=error)
    ray = SimpleNamespace(wait=lambda refs, **_: (refs, []), get=get, exceptions=exceptions)
    calls = Calls(ray, 2.0)
    calls.add(0, "answer", None, lambda *_: None)
    [failure] = calls.wait(1.0)
    assert (failure.kind, failure.text[: len(expected)]) == (DIED, expected)


def test_a_cluster_without_room() -> None:
    nodes = [
        {"Alive": True, "NodeID": "a", "Resources": {"CPU": 5.0, "GPU": 1.0}},
        {"Alive": True, "NodeID": "b", "Resources": {"CPU": 1.0}},
        {"Alive": False, "NodeID": "c", "Resources": {"CPU": 8.0}},
    ]
    ray = SimpleNamespace(nodes=lambda: nodes)
    whole, shared = ConfigDict({"peer_cpus": 2, "peer_gpus": 0}), ConfigDict({"peer_cpus": 1, "peer_gpus": 0.5})
    whole.stages, shared.stages = 3, 1
    assert cluster.rooms(ray, whole) == cluster.rooms(ray, shared) == [("a", 2), ("b", 0)]
    message = "config.swarm.stages is 3; it must be at most 2, the number of peers for which the Ray cluster has room"
    with pytest.raises(UserError, match=re.escape(message)):
        cluster.check_room(ray, whole)
    nodes[0]["Alive"] = False
    message = "config.swarm.peer_gpus is 0.5; it must be 0, because no machine of the Ray cluster has a GPU"
    with pytest.raises(UserError, match=re.escape(message)):
        cluster.check_room(ray, shared)
