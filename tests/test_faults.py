"""Tests with real faults: processes that are killed, receive SIGTERM, hang, or run out of disk space.

Every run except `whole` has a fault, in a process of its own, and is resumed. It must end with the result of `whole`
(bitwise for a single process) and use each example exactly once. Damaged checkpoints and writes killed at random
moments are tested in tests/checkpoint/test_checkpoint.py and tests/test_train.py.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

from jaxpar import checkpoint, errors
from jaxpar import config as configs
from jaxpar.commands import train
from jaxpar.errors import UserError
from jaxpar.launch import watchdog
from tests.checkpoint.test_private import VALUES
from tests.launch.test_processes import assert_close
from tests.runs import small_arguments, without_texts
from tests.selection import slow
from tests.test_train import assert_bitwise_equal

ROOT = Path(__file__).parent.parent
STEPS, EVERY, EPOCH = 100, 5, 15
SETTINGS = {
    **VALUES,
    "num_steps": STEPS,
    "checkpoint.every_steps": EVERY,
    "eval.every_steps": 20,
    "log.every_steps": EVERY,
    "mesh.virtual_cpu_devices": 2,
}
GRACE_SECONDS = 30
BINARY = "from jaxpar.commands import train; train.run()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def arguments(folder: Path, workdir: Path, *overrides: str) -> list[str]:
    settings = [f"--config.{key}={value}" for key, value in SETTINGS.items()]
    own = [*without_texts(small_arguments(folder)), *settings, *overrides]
    return ["--config=configs/default.py", f"--workdir={workdir}", *own]


def start(folder: Path, workdir: Path, *overrides: str, first: str = "") -> "subprocess.Popen[str]":
    """Start the binary in a process. first: Python code that the process runs before."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{textwrap.dedent(first)}\n{BINARY}", *arguments(folder, workdir, *overrides)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]", code: int = 0, timeout: float = 240) -> tuple[str, str]:
    """Wait for a process to end with the expected exit code, and return its stdout and stderr."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, (out, err)
    return out, err


def run(folder: Path, workdir: Path) -> None:
    """Run the binary in this process, which has more devices than the run uses: starts or resumes a run."""
    rest = [one for one in arguments(folder, workdir) if not one.startswith("--config.mesh.virtual_cpu_devices")]
    assert train.main(["jaxpar", *rest]) == 0


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    run(folder, folder / "whole")
    return folder / "whole"


def assert_ended_as(whole: Path, workdir: Path) -> None:
    assert_bitwise_equal(workdir, whole)
    assert_proved(workdir)
    assert_proved(whole)


def assert_proved(workdir: Path) -> None:
    proved = json.loads((workdir / "result.json").read_text())["ledger"]
    assert proved == f"every example of {STEPS // EPOCH} epochs and {STEPS % EPOCH} steps was used exactly once"


ONCE = """
import os
from pathlib import Path

if os.environ.get("JAXPAR_PROCESS_ID") == "{process}" and not (there := Path(__file__).with_name("done")).exists():
    there.touch()
"""


def launched(folder: Path, tmp_path: Path, *overrides: str, process: int, first: str) -> tuple[list[str], str]:
    """Launch two processes in tmp_path/run with one restart, and return the lines of stdout, and stderr.

    At its first start, the process number `process` runs the Python code `first` before the binary.
    """
    once = ONCE.format(process=process) + textwrap.indent(textwrap.dedent(first), "    ")
    (tmp_path / "sitecustomize.py").write_text(once)
    own = arguments(folder, tmp_path / "run", *overrides, "--config.mesh.virtual_cpu_devices=1")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "jaxpar", "launch", "--num_processes=2", "--max_restarts=1", "--", *own],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = ended(launcher)
    return out.splitlines(), err


# ---- kill -9 and SIGTERM ------------------------------------------------------------------------

IN_A_PHASE = """
    import os, signal
    from jaxpar.measure import phases

    alive, left = phases.Phases.alive, {signs}

    def ending(self):
        global left
        alive(self)
        if self.step == {step} and self.name == "{name}":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    phases.Phases.alive = ending
"""
AS_IT_WRITES = """
    import os, signal
    from jaxpar import checkpoint

    save = checkpoint.Saver.save

    def ending(self, tree, *rest, **options):
        save(self, tree, *rest, **options)
        while int(tree["step"]) == {step} and not (self._directory / "{step}").exists():
            if list(self._directory.glob("*.orbax-checkpoint-tmp")):
                return os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.Saver.save = ending
"""
MOMENTS = {
    "a step": IN_A_PHASE.format(name="after train", step=43, signs=1),
    "an evaluation": IN_A_PHASE.format(name="eval", step=40, signs=2),  # the start of the phase and the first batch
    "a checkpoint write": AS_IT_WRITES.format(step=45),
}


@pytest.mark.parametrize("moment", [slow("a step"), slow("an evaluation"), "a checkpoint write"])
def test_a_run_that_is_killed(
    moment: str, folder: Path, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most one interval is lost, both with synchronous checkpoints and while one is written asynchronously."""
    waits = [] if moment == "a checkpoint write" else ["--config.checkpoint.asynchronous=False"]
    out, _ = ended(start(folder, tmp_path, *waits, first=MOMENTS[moment]), code=-signal.SIGKILL)
    assert "step 35/" in out
    assert "step 50/" not in out
    saved = {"a step": 40, "an evaluation": 35, "a checkpoint write": 40}[moment]  # killed at steps 43, 40 and 45
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == saved
    unfinished = list((tmp_path / "checkpoints").glob("*.orbax-checkpoint-tmp"))
    assert unfinished or moment != "a checkpoint write"
    run(folder, tmp_path)
    assert f"resumed   from step {saved}" in capsys.readouterr().out
    assert_ended_as(whole, tmp_path)
    assert not list((tmp_path / "checkpoints").glob("*.orbax-checkpoint-tmp"))


@pytest.mark.parametrize(
    ("moment", "process"),
    [
        slow(("a checkpoint write", 1)),
        slow(("an evaluation", 0)),
        slow(("a step", 0)),
        slow(("a step", 1)),
        slow(("an evaluation", 1)),
        slow(("a checkpoint write", 0)),
    ],
)
def test_one_of_two_processes_is_killed(moment: str, process: int, folder: Path, tmp_path: Path, whole: Path) -> None:
    lines, err = launched(folder, tmp_path, process=process, first=MOMENTS[moment])
    assert f"launch: process {process} was killed by SIGKILL; the other processes were killed" in err
    [resumed] = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("[0] resumed   from step")]
    assert resumed in {"a step": (35, 40), "an evaluation": (30, 35), "a checkpoint write": (40,)}[moment]
    assert_close(tmp_path / "run", whole)
    assert_proved(tmp_path / "run")


@pytest.mark.parametrize("moment", [slow("an evaluation"), "a checkpoint write"])
def test_a_run_that_receives_sigterm(moment: str, folder: Path, tmp_path: Path, whole: Path) -> None:
    """The process saves all steps and ends well within the grace period before a SIGKILL."""
    out, _ = ended(start(folder, tmp_path, first=MOMENTS[moment].replace("SIGKILL", "SIGTERM")), timeout=GRACE_SECONDS)
    stopped = re.search(r"SIGTERM: stopped after step (\d+) of 100", out)
    assert stopped
    assert 40 <= int(stopped[1]) <= 46
    last_line = out.splitlines()[-1]
    assert last_line.startswith("resume    ")
    assert f"--workdir={tmp_path}" in last_line
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == int(stopped[1])
    run(folder, tmp_path)
    assert_ended_as(whole, tmp_path)


@pytest.mark.slow
def test_killed_at_random_moments(folder: Path, tmp_path: Path, whole: Path) -> None:
    """Kill each run at random moments and restart it until it ends, for 20 kills in total."""
    draw, killed, run = random.Random(0), 0, 0
    while killed < 20:
        process = start(folder, tmp_path / str(run))
        assert process.stdout
        for line in process.stdout:
            if line.startswith("run  "):  # the process restores and compiles next
                break
        time.sleep(draw.uniform(0, 2))
        process.kill()
        process.communicate()
        if process.returncode == 0:
            assert_ended_as(whole, tmp_path / str(run))
            run += 1
        else:
            killed += 1
    ended(start(folder, tmp_path / str(run)))
    assert_ended_as(whole, tmp_path / str(run))


WRITES_FOR_LONG = """
    import ctypes
    from jaxpar import checkpoint

    def close(self):
        print("writes", flush=True)
        ctypes.CDLL(None).sleep(1000)

    checkpoint.Saver.close = close
"""


def test_a_second_sigterm_during_a_checkpoint_write(folder: Path, tmp_path: Path) -> None:
    """The process ends immediately, without waiting for the write."""
    first = textwrap.dedent(WRITES_FOR_LONG) + textwrap.dedent(MOMENTS["an evaluation"].replace("SIGKILL", "SIGTERM"))
    process = start(folder, tmp_path, first=first)
    assert process.stdout
    for line in process.stdout:
        if line == "writes\n":
            break
    process.terminate()
    out, _ = ended(process, code=130)
    assert out == "stopped immediately; the steps since the last checkpoint are lost\n"


# ---- a full disk --------------------------------------------------------------------------------

DISK_FULL = """
    import resource
    from jaxpar import checkpoint

    save = checkpoint.Saver.save

    def full(self, tree, *rest, **options):
        if int(tree["step"]) == 45:
            self.wait()  # for the previous checkpoint
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        save(self, tree, *rest, **options)

    checkpoint.Saver.save = full
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_later(
    folder: Path, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The previous checkpoint is intact, the error names it, and the run resumes from it when there is space."""
    quiet = "--config.log.every_steps=1000"  # so that only checkpoints are written
    _, err = ended(start(folder, tmp_path, quiet, first=DISK_FULL), code=2)
    [line] = [line for line in err.splitlines() if line.startswith("jaxpar: ")]
    assert "writing a checkpoint in" in line
    assert line.endswith("the newest checkpoint is from step 40")
    run(folder, tmp_path)
    assert "resumed   from step 40" in capsys.readouterr().out
    assert_ended_as(whole, tmp_path)


# ---- a process that hangs -----------------------------------------------------------------------

HANGS = """
    import ctypes, time
    from jaxpar.data import Batches

    batch = Batches.batch

    def hangs(self, step, *rest, **options):
        if step == 12 and self._shuffle:
            {how}(1000)
        return batch(self, step, *rest, **options)

    Batches.batch = hangs
"""
SECONDS = 8
WATCHED = f"--config.watchdog_seconds={SECONDS}"


def test_a_loader_that_hangs(folder: Path, tmp_path: Path, whole: Path) -> None:
    began = time.monotonic()
    hanging = HANGS.format(how="time.sleep")
    _, err = ended(start(folder, tmp_path, WATCHED, first=hanging), code=errors.HANGS)
    assert time.monotonic() - began < 8 * SECONDS
    lines = err.splitlines()
    at = lines.index(f"jaxpar: process 0 of 1 hangs: no progress for {SECONDS} s at step 13, phase input")
    assert any(re.fullmatch(r'  File "<string>", line \d+ in hangs', line) for line in lines[at:])
    assert any(line.endswith(" in _step") for line in lines[at:])
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == 10
    run(folder, tmp_path)
    assert_ended_as(whole, tmp_path)


@pytest.mark.slow
def test_a_thread_that_hangs_with_the_gil(folder: Path, tmp_path: Path) -> None:
    """No other Python thread can run, not even the watchdog."""
    hanging = HANGS.format(how="ctypes.PyDLL(None).sleep")
    _, err = ended(start(folder, tmp_path, WATCHED, first=hanging), code=1)
    assert "Timeout (0:00:0" in err
    assert " in hangs" in err


@pytest.mark.slow
def test_one_of_two_processes_that_hangs(folder: Path, tmp_path: Path, whole: Path) -> None:
    """Both processes report where they hang. The launcher restarts them, and the result equals that of one process."""
    lines, err = launched(folder, tmp_path, WATCHED, process=1, first=HANGS.format(how="time.sleep"))
    for process, phase in ((1, "input"), (0, "train")):
        where = f"no progress for {SECONDS} s at step 13, phase {phase}"
        assert f"[{process}] jaxpar: process {process} of 2 hangs: {where}" in lines
    assert "restart 1 of 1, from the last checkpoint" in err
    assert "[0] resumed   from step 10" in lines
    assert_close(tmp_path / "run", whole)
    assert_proved(tmp_path / "run")


def test_the_watchdog_reports_before_orbax_times_out() -> None:
    """If a process hangs in a write, the watchdog of a process waiting for it reports that before orbax times out."""
    assert configs.default_config().watchdog_seconds < ocp.options.AsyncOptions().timeout_secs


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e-9])
def test_an_invalid_watchdog(seconds: float) -> None:
    message = rf"config\.watchdog_seconds is {seconds}; it must be 0 \(no watchdog\), or between 1 and 1e\+09"
    with pytest.raises(UserError, match=message):
        watchdog.check_seconds(seconds)
