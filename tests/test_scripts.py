"""Tests which Python the scripts run and how they set up .venv, with a fake uv that installs nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

UV = """#!/bin/sh
echo "$@" >>uv.log
[ "$1" != venv ] || { mkdir -p .venv/bin && ln -s "$(command -v python3)" .venv/bin/python; }
[ "$1" != pip ] || [ ! -e slow ] || sleep 60
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose constraints pin packages that do not exist in any index."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    (clone / "constraints").mkdir()
    for name in ("base", "dev", "gpu"):
        (clone / "constraints" / f"{name}.txt").write_text(
            f"jaxpar-{name}-of-no-registry==1 --hash=sha256:{'0' * 64}\n"
        )
    (clone / "bin").mkdir()
    (clone / "bin" / "python3").symlink_to(sys.executable)
    (clone / "bin" / "uv").write_text(UV)
    (clone / "bin" / "uv").chmod(0o755)
    return clone


def environment(clone: Path, **extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXPAR_")}
    return {**kept, "PATH": f"{clone / 'bin'}:/usr/bin:/bin", "JAXPAR_EXTRAS": "", **extra}


def run(clone: Path, script: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [str(clone / "scripts" / script), *arguments]
    return subprocess.run(command, env=environment(clone, **extra), cwd="/", text=True, capture_output=True)


def installed(clone: Path) -> list[str]:
    """Return the constraints files of each call of `uv pip install`."""
    calls = (clone / "uv.log").read_text().splitlines()
    files = [call.split(" -r constraints/")[1:] for call in calls if call.startswith("pip install")]
    return [" ".join(call).replace(".txt", "") for call in files]


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["nope.py"], "nope.py"),
        (["-k", "nope", "-xq", "bin", "tests/nope.py::test"], "tests/nope.py::test"),
        (["-k", "nope", "--basetemp", "nope", "bin/python3::test"], ""),
    ],
)
def test_a_missing_test_is_refused_before_the_checks(arguments: list[str], missing: str, clone: Path) -> None:
    fake = clone / "bin" / "fake"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    process = run(clone, "test", *arguments, JAXPAR_PYTHON=str(fake))
    message = f"jaxpar: the path of tests is '{missing}'; it must exist in {clone}\n"
    assert (process.returncode, process.stderr) == ((2, message) if missing else (0, ""))


def test_a_given_python_is_used_as_it_is(tmp_path: Path) -> None:
    program = "import jaxpar, os, sys; print(sys.argv[1], os.getcwd(), os.getpid(), jaxpar.__file__)"
    command = [str(ROOT / "scripts" / "python"), "-c", program, "a b"]
    process = subprocess.Popen(
        command, env={**os.environ, "JAXPAR_PYTHON": sys.executable}, cwd=tmp_path, text=True, stdout=subprocess.PIPE
    )
    output, _ = process.communicate()
    # Python runs in the same process, so a signal to the script reaches it.
    assert output.strip() == f"a b {tmp_path} {process.pid} {ROOT / 'jaxpar' / '__init__.py'}"


@pytest.mark.parametrize("arguments", [["train", "--help"], ["launch", "--num_processes=1", "--", "--help"]])
def test_modules_in_the_current_folder_are_not_imported(arguments: list[str], tmp_path: Path) -> None:
    """Neither by the script nor by the processes that the launcher starts."""
    for name in ("absl", "ml_collections", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')")
    script, *rest = arguments
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    environment = {**kept, "JAXPAR_PYTHON": sys.executable}
    ended = subprocess.run(
        [ROOT / "scripts" / script, *rest], env=environment, cwd=tmp_path, text=True, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--workdir" in ended.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="env cannot block signals")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["jaxpar", "draw", "--schedule=gpipe"], 130),
        (["launch", "--num_processes=2"], 130),
        (["train", "--config=configs/default.py", "--workdir=never", "--stopped_exit_code=75"], 75),
        (["python", "-c", "print()"], -signal.SIGINT),
    ],
)
def test_an_interrupt_while_python_starts(command: list[str], code: int, tmp_path: Path) -> None:
    """Without a traceback, except for Python itself."""
    planted = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "sitecustomize.py").write_text(f"{planted}os.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "JAXPAR_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    arguments = [str(ROOT / "scripts" / command[0]), *command[1:]]
    ended = subprocess.run(arguments, env=environment, cwd=tmp_path, text=True, capture_output=True)
    if code < 0:
        assert "KeyboardInterrupt" in ended.stderr
    else:
        assert (ended.returncode, ended.stderr) == (code, "")
    assert not (tmp_path / "never").exists()


def test_sets_up_once(clone: Path) -> None:
    first = run(clone, "python", "-c", "print('ran')")
    assert first.stdout == "ran\n", first
    assert "setting up" in first.stderr, first
    second = run(clone, "python", "-c", "print('ran')")
    assert (second.stdout, second.stderr) == ("ran\n", "")
    assert installed(clone) == ["base"]


def test_the_command_of_an_activated_environment(clone: Path) -> None:
    (clone / "jaxpar").mkdir()
    (clone / "jaxpar" / "__init__.py").touch()
    program = "import os, sys; print(os.environ['JAXPAR_COMMAND'], sys.argv[1:])"
    (clone / "jaxpar" / "__main__.py").write_text(program)
    run(clone, "setup")
    command = "PATH=.venv/bin:$PATH; jaxpar plan 'a b'"  # as `source .venv/bin/activate`
    result = subprocess.run(["bash", "-c", command], env=environment(clone), cwd=clone, text=True, capture_output=True)
    assert (result.stdout, result.stderr) == ("jaxpar ['plan', 'a b']\n", "")
    assert run(clone, "jaxpar", "plan").stdout.startswith(str(clone / "scripts" / "jaxpar").replace(" ", "\\ "))


def test_installs_what_is_missing_or_changed(clone: Path) -> None:
    run(clone, "setup")
    run(clone, "setup", "dev", JAXPAR_EXTRAS="gpu")
    run(clone, "setup")
    (clone / "constraints" / "dev.txt").write_text("another==2\n")
    run(clone, "setup")
    run(clone, "setup", "dev")
    assert installed(clone) == ["base", "gpu dev", "dev"]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_setup_starts_over(clone: Path, by: signal.Signals) -> None:
    (clone / "slow").touch()
    # If the tests run as a background job, SIGINT is ignored, and child processes inherit that.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", heed, str(clone / "scripts" / "setup")]
    process = subprocess.Popen(command, env=environment(clone), start_new_session=True)
    wait_for(clone / "uv.log", "pip install")
    os.killpg(process.pid, by)
    assert process.wait() != 0
    (clone / "slow").unlink()
    (clone / ".venv" / "half").touch()
    result = run(clone, "python", "-c", "print('ran')")
    assert result.stdout == "ran\n", result
    assert "did not finish; starting over" in result.stderr, result
    assert not (clone / ".venv" / "half").exists()
    assert run(clone, "setup").stderr == ""


def test_a_second_setup_waits(clone: Path) -> None:
    (clone / "slow").touch()
    first = subprocess.Popen([clone / "scripts" / "setup"], env=environment(clone), start_new_session=True)
    wait_for(clone / "uv.log", "pip install")
    second = subprocess.Popen([clone / "scripts" / "setup"], env=environment(clone), stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    assert "waiting for another setup" in second.stderr.readline()
    assert installed(clone) == ["base"]
    (clone / "slow").unlink()
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second.communicate()
    assert second.returncode == 0
    assert installed(clone) == ["base", "base"]


def test_a_failure_ends_in_one_line(clone: Path) -> None:
    """If uv fails, pip is tried. If pip fails too, the end of the log and advice are printed."""
    (clone / "bin" / "uv").write_text("#!/bin/sh\nexit 1\n")
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "pip").touch(0o755)
    (clone / ".venv" / "bin" / "python").write_text("#!/bin/sh\necho ERROR: no registry\nexit 1\n")
    (clone / ".venv" / "bin" / "python").chmod(0o755)
    result = run(clone, "train")
    assert result.returncode == 2
    *_, attempt, reason, log = result.stderr.splitlines()
    assert (attempt, log) == ("jaxpar: uv could not install the packages; trying pip", "ERROR: no registry")
    assert reason.startswith("jaxpar: could not install the packages (log: ")
    (clone / ".venv" / "incomplete").unlink()
    (clone / ".venv" / "bin" / "python").write_text("#!/bin/sh\necho Temporary failure in name resolution\nexit 1\n")
    result = run(clone, "train")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("jaxpar: the package index cannot be reached (log: ")


def test_mistakes(clone: Path) -> None:
    for extra in ("gpus", "*", "../constraints/gpu"):
        result = run(clone, "train", JAXPAR_EXTRAS=extra)
        expected = f"jaxpar: the extra is '{extra}'; it must be one of dev, gpu\n"
        assert (result.returncode, result.stderr) == (2, expected)
    for flag in ("--help", "-h"):
        result = run(clone, "setup", "dev", flag)
        assert result.stdout.startswith("Creates or updates .venv.")
        assert "scripts/setup [EXTRA...]" in result.stdout
        assert result.stdout.endswith("interrupted setup, .venv is recreated.\n")
    result = run(clone, "lock", PATH="/usr/bin:/bin")
    assert (result.returncode, result.stderr) == (
        2,
        "jaxpar: PATH has no uv; install it, such as with pip install uv\n",
    )
    (clone / "bin" / "python3").unlink()
    (clone / "bin" / "python3").write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.9\n")
    (clone / "bin" / "python3").chmod(0o755)
    result = run(clone, "train", PATH=f"{clone / 'bin'}:{path_without_python(clone)}")
    assert (result.returncode, result.stderr) == (
        2,
        "jaxpar: PATH has no Python 3.11 to 3.14; python3 is Python 3.9.9\n",
    )
    assert not (clone / ".venv").exists()


def path_without_python(clone: Path) -> Path:
    tools = clone / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool}"))
    return tools


def wait_for(file: Path, words: str) -> None:
    deadline = time.monotonic() + 30
    while not (file.exists() and words in file.read_text()):
        assert time.monotonic() < deadline, f"{file} never had {words!r}"
        time.sleep(0.02)
