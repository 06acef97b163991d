"""Tests of runs that continue without lost processes, and of what the launcher does about them."""

import json
import math
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import training
from jaxpar.commands import launch as command
from jaxpar.core.plan import PREVIOUS
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch import elastic, launcher
from jaxpar.launch.launcher import Launch
from jaxpar.launch.place import QUIET_PORTS, SURVIVOR, Place, Survivor, find_place, find_survivor, free_ports
from jaxpar.run import metrics
from jaxpar.run.history import read_starts
from jaxpar.strategies import build, decide, plan
from tests.launch.test_processes import assert_close, environment, finished, folder, settings
from tests.runs import small_config
from tests.strategies import cases

ROOT = Path(__file__).parents[2]
ALONE = {"coordinator_address": None, "num_processes": None, "process_id": None}
__all__ = ["folder"]  # a fixture
# Kills process LOST before its step 7. The others wait for it in that step.
KILLED = """
import os, signal

if os.environ.get("JAXPAR_PROCESS_ID") == os.environ["LOST"] and not os.path.exists(os.environ["ONCE"]):
    from jaxpar import training

    def step(self, number, *others):
        if number == 7:
            open(os.environ["ONCE"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return before(self, number, *others)

    before, training.Loop._step = training.Loop._step, step
"""


def lose(number: int, folder: Path, tmp_path: Path, *launched: str) -> tuple[list[str], list[str]]:
    """Run three processes, of which one is killed before its step 7, and return the lines on stdout and stderr."""
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    own = ["--config=configs/default.py", f"--workdir={tmp_path}/run", *settings(folder, "data_parallel")]
    arguments = [*own, "--config.mesh.data=-1", "--config.batch_size=25", "--config.elastic_seconds=4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpar", "launch", "--num_processes=2:3", *launched, "--", *arguments],
        env=environment(PYTHONPATH=f"{ROOT}:{tmp_path}", LOST=str(number), ONCE=str(tmp_path / "once")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = finished(process)
    return out, [line for line in err if line.startswith("launch")]


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of the same run in a single process."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    config = configs.default_config()
    configs.override(config, [*settings(folder, "data_parallel"), "--config.mesh.data=1", "--config.batch_size=25"])
    training.train(config, workdir)
    return workdir


def assert_same_run(workdir: Path, reference: Path) -> None:
    """Assert that a run has the parameters, the metrics and the ledger of another one."""
    assert_close(workdir, reference)
    rows, expected = metrics.read_metrics(workdir), metrics.read_metrics(reference)
    assert [(row["step"], row["split"]) for row in rows] == [(row["step"], row["split"]) for row in expected]
    np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in expected], 1e-5)
    ledgers = [json.loads((path / "result.json").read_text())["ledger"] for path in (workdir, reference)]
    assert ledgers[0] == ledgers[1]
    assert ledgers[0].startswith("every example of ")


def test_two_of_three_processes_do_the_step_again(folder: Path, tmp_path: Path, reference: Path) -> None:
    """Neither three nor two processes divide the 25 examples of a batch."""
    out, launched = lose(1, folder, tmp_path)
    assert launched == ["launch: process 1 was killed by SIGKILL; the others continue without it"]
    lost = [line.removeprefix("[0] lost      ") for line in out if line.startswith("[0] lost")]
    assert len(lost) == 1
    assert re.fullmatch(r"process 1; 2 left, numbers 0, 2; \d+\.\d s since the last step", lost[0])
    assert "[0] resumed   from step 6, which was kept in memory" in out
    assert [(start.step, start.devices, start.changed) for start in read_starts(tmp_path / "run")] == [
        (0, 3, []),
        (6, 2, [f"lost {lost[0]}"]),
    ]
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.slow
def test_the_run_is_restarted_without_process_0(folder: Path, tmp_path: Path, reference: Path) -> None:
    """The last checkpoint is of step 6, as their interval is 3, unless it was not complete yet."""
    out, launched = lose(0, folder, tmp_path, "--max_restarts=1")
    assert launched == [
        "launch: process 0 was killed by SIGKILL; the other processes were killed",
        "launch: restart 1 of 1, from the last checkpoint, with 2 processes",
    ]
    assert {"[0] resumed   from step 3", "[0] resumed   from step 6"} & set(out)
    assert_same_run(tmp_path / "run", reference)


def test_a_survivor_finds_its_place() -> None:
    place = Place("host:8477", 2, 1, 0)
    record = Survivor(place, (0, 3), (1, 2), 12.5, None)
    environ = {SURVIVOR: json.dumps(record), "JAXPAR_PROCESS_ID": "3"}
    assert find_survivor(environ) == record
    assert find_place(ALONE | {"process_id": 3}, environ) == place
    assert find_place(ALONE, {SURVIVOR: json.dumps(record._replace(place=place._replace(num_processes=1)))}) is None
    assert find_survivor({}) is None


def test_an_error_of_the_run_itself_does_not_wait() -> None:
    """Other errors can come from a lost process, and then the process becomes a survivor before it ends."""
    own, lost = TrainingError("not finite"), TrainingError("writing a checkpoint failed")
    lost.__cause__ = RuntimeError("a barrier failed")
    assert [elastic._is_own(error) for error in (own, UserError("x"), lost, RuntimeError("y"))] == [
        True,
        True,
        False,
        False,
    ]


def test_an_error_that_a_lost_process_can_cause_is_announced_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    survival: Any = elastic.Survival(Place("127.0.0.1:8477", 2, 1), 10)
    survival._thread = SimpleNamespace(join=lambda _: None)
    survival.__exit__(RuntimeError, RuntimeError("a barrier failed"), None)
    assert capsys.readouterr().err == (
        "jaxpar: waiting up to 30 s, because a lost process can be the cause of this error; then the run"
        " continues, unless process 0 is lost: a barrier failed\n"
    )


def test_without_survivors_an_error_of_a_collective_names_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    error = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    for place, errors in ((Place("127.0.0.1:8477", 2, 1), [ValueError("x"), error]), (None, [error])):
        for one in errors:
            elastic.Survival(place, 0).__exit__(type(one), one, None)
    assert capsys.readouterr().err == (
        "jaxpar: a lost process can be the cause of this error; repeat the command in all processes to continue from "
        f"the last checkpoint: {error}\n"
    )


def test_a_survivor_gets_the_signal_of_its_predecessor() -> None:
    """The training of the new program reads it, and nothing before, as the state is not saved yet."""
    program = """
import ctypes, os, signal, threading, time
from jaxpar.launch.elastic import Survival
from jaxpar.launch.place import Place, find_survivor
from jaxpar.launch.signals import Ending, Interrupt

survivor = find_survivor()
with Ending(1, 75, lambda: "not saved", unblocks=survivor is None):
    if survivor:
        time.sleep(0.1)
    with Interrupt() as interrupt:
        if survivor:
            print(f"{interrupt.requested.name} {survivor.lost}", flush=True)
            os._exit(0)
        survival = Survival(Place("127.0.0.1:8477", 2, 1), 5)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.5, survival._exec, ([1], None)).start()
        ctypes.CDLL(None).sleep(60)  # as in a collective
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "SIGTERM (0,)" in ended.stdout  # next to a line of the handler


@pytest.mark.parametrize("name", ["sharding", "byteps"])
def test_the_previous_state_is_part_of_the_plan(name: str) -> None:
    """With several processes, a step leaves its input intact, and devices hold two states."""
    config, problem = cases.config(name).copy_and_resolve_references(), cases.problem(name)
    here = clusters.find_cluster()
    config.mesh.data, config.elastic_seconds = -1, 5
    alone, several = (plan(config, problem, replace(here, num_processes=number)) for number in (1, 2))
    assert not alone.keeps_previous
    assert [parts[PREVIOUS] for parts in several.memory] == alone.device_bytes
    assert several.state_bytes == 2 * alone.state_bytes
    for one, is_intact in ((alone, False), (several, True)):
        strategy = build(one, problem, clusters.devices())
        state = strategy.init(jax.random.key(0))
        strategy.step(state, strategy.place(cases.batch(0)))
        assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(state.params)) == is_intact


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["elastic_seconds=1"], "elastic_seconds is 1; it must be 0 (a lost process ends the run), or between 2 and"),
        (
            ["strategy=pipeline"],
            "strategy is 'pipeline'; it must be data_parallel, the only one that can continue",
        ),
        (
            ["exchange=zero1"],
            "exchange is 'zero1'; it must be one of ddp, horovod, byteps, bagua_bytegrad, which leave",
        ),
        (["exchange=byteps_onebit"], "exchange is 'byteps_onebit'; it must be one of ddp,"),
        (
            ["exchange_options.group=2"],
            "exchange_options.group is 2; it must be 1, because groups could not be divided",
        ),
        (
            ["mesh.data=2"],
            "mesh.data is 2; it must be -1, as many replicas as there are devices, with config.elastic_seconds=5",
        ),
        (["mesh.tensor=2"], "mesh.tensor is 2; it must be 1, so that a replica is a device, with"),
    ],
)
def test_configs_that_cannot_lose_a_process(overrides: list[str], message: str, tmp_path: Path) -> None:
    given = ["elastic_seconds=5", "mesh.data=-1", *overrides]
    config = small_config(tmp_path, *(f"--config.{one}" for one in given))
    with pytest.raises(UserError, match=f"^config.{re.escape(message)}"):
        decide(config, clusters.find_cluster())


# ---- the launcher -------------------------------------------------------------------------------


def group(codes: Sequence[int | None], **state: Any) -> Any:
    """Return the group of these processes, of which those with a code have ended. state: other attributes."""
    made: Any = launcher.Group.__new__(launcher.Group)
    made._processes = [SimpleNamespace(poll=lambda code=code: code, wait=lambda *_: None) for code in codes]
    own = {
        "_is_silent": False,
        "_least": 2,
        "_grow_seconds": 60.0,
        "_elastic_seconds": 10,
        "lost": set(),
        "_lost_at": -math.inf,
    }
    vars(made).update(own | {"_has_met": True, "_grow_at": math.inf} | state)
    return made


def test_losses_without_which_the_others_continue() -> None:
    killed, aborted = -signal.SIGKILL, -signal.SIGABRT
    now = time.monotonic()
    table: list[tuple[list[int | None], dict[str, Any], tuple[int, int] | None, set[int]]] = [
        ([None, killed, None], {}, None, {1}),
        ([None, killed, killed, None], {}, None, {1, 2}),
        ([None, 1, None], {}, None, {1}),
        ([None, killed, None, killed], {"lost": {3}}, None, {1, 3}),
        ([killed, None, None], {}, (0, killed), set()),
        ([killed, aborted, aborted], {}, (0, killed), set()),
        ([None, killed, killed], {}, (1, killed), set()),  # one is left
        ([None, killed, None], {"_elastic_seconds": 0}, (1, killed), set()),
        ([None, 2, None], {}, (1, 2), set()),  # a user error
        ([None, None, None, killed], {"lost": {1}, "_lost_at": now - 4, "_has_met": False}, None, {1, 3}),
        ([None, None, None, killed], {"lost": {1}, "_lost_at": now - 6, "_has_met": False}, (3, killed), {1}),
        ([None, None, None, killed], {"lost": {1}, "_lost_at": now - 6, "_has_met": True}, None, {1, 3}),
        ([None, killed, None], {"_has_met": False}, (1, killed), set()),  # before they have met
        ([0, None, 0], {}, (0, 0), set()),  # process 1 was lost, but is only stopped
        ([0, aborted, 0], {}, (0, 0), set()),
        ([75, 75, 75], {}, (0, 75), set()),
    ]
    for codes, state, expected, lost in table:
        made = group(codes, **state)
        assert made._ended(is_stopping=False) == expected, (codes, state)
        assert made.lost == lost, (codes, state)
        assert (made._grow_at < math.inf) == (expected is None)


def test_process_0_is_killed_if_it_does_not_continue(capsys: pytest.CaptureFixture[str]) -> None:
    """The others abort if it is stopped, which looks as if they were lost."""
    made = group([None, -signal.SIGABRT], _least=1)
    killed: list[int] = []
    made._processes[0].kill = lambda: killed.append(0)
    for seconds in (None, -1.0, 1.0, 2.0):
        if seconds:
            made._lost_at = time.monotonic() - made._elastic_seconds - launcher.CONTINUE_SECONDS - seconds
        assert made._ended(is_stopping=True) is None
        assert killed == [0][: bool(seconds and seconds > 0)]
    assert "launch: process 0 has not continued within 300 s, and is killed" in capsys.readouterr().err


def test_the_processes_have_met_when_process_0_prints_the_header() -> None:
    made = group([], _has_met=False)
    made._read(1, "platform  cpu\n")
    made._read(0, "strategy  data_parallel\n")
    assert not made._has_met
    made._read(0, "platform  cpu\n")
    made._read(0, "strategy  data_parallel\n")
    assert made._has_met


def test_restarts_with_fewer_and_with_all_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed process keeps its GPUs until all processes are started again."""
    ends = [((0, -9), {2}, False), ((1, 0), set(), True), ((3, 1), set(), False), ((0, 0), set(), False)]
    started = []

    def start(_launch: Launch, places: list[int]) -> Any:
        started.append(list(places))
        ended, lost, grows = ends[len(started) - 1]
        return SimpleNamespace(wait=lambda _: ended, lost=lost, grows=grows)

    monkeypatch.setattr(launcher, "Group", start)
    assert launcher.run_processes(Launch((2, 4), 2, 60.0, 10, [], []), []) == 0
    assert started == [[0, 1, 2, 3], [1, 3], [0, 1, 2, 3], [0, 1, 2]]
    assert [line.removeprefix("launch: ") for line in capsys.readouterr().err.splitlines()] == [
        "process 0 was killed by SIGKILL; the other processes were killed",
        "restart 1 of 2, from the last checkpoint, with 2 processes",
        "all 4 processes are started, from the last checkpoint",
        "process 3 exited with code 1; the other processes were killed",
        "restart 2 of 2, from the last checkpoint, with 3 processes",
    ]


def test_fewer_processes_than_the_most_are_stopped_after_a_time() -> None:
    sent: list[int] = []
    made = group([None, None], _grow_at=time.monotonic() - 1, _printers=[], grows=False)
    made._send = sent.append
    made._ended = lambda **_: (0, 0) if sent else None
    assert made.wait([]) == (0, 0)
    assert made.grows
    assert sent == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize(("text", "counts"), [("3", (3, 3)), ("2:4", (2, 4)), ("4:4", (4, 4))])
def test_numbers_of_processes(text: str, counts: tuple[int, int]) -> None:
    assert command.process_counts(text) == counts
    launch = Launch(counts, 0, launcher.GROW_SECONDS, 0, [], [])
    assert launch.command.endswith(f" launch --num_processes={text.replace('4:4', '4')}")


@pytest.mark.parametrize(
    ("text", "message"),
    [("4:2", "4:2; MIN must be at most MAX"), ("0:2", "0; it must be at least 1"), ("2:x", "'x'; it must be an int")],
)
def test_wrong_numbers_of_processes(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^--num_processes is {re.escape(message)}"):
        command.main([f"--num_processes={text}", "--", "--config=x", "--workdir=y"])


def test_the_launcher_knows_whether_a_run_is_elastic() -> None:
    own = ["--config=configs/default.py", "--workdir=x", "--config.elastic_seconds", "7", "--config.seed=1"]
    assert command.elastic_seconds(own) == 7
    assert command.elastic_seconds(own[:2]) == 0
    assert command.elastic_seconds(["--help"]) == 0


def test_adjacent_free_ports() -> None:
    first = free_ports(3)
    assert first in QUIET_PORTS
    for port in range(first, first + 3):
        socket.create_server(("127.0.0.1", port)).close()
