"""Tests of the command line: exit codes, one-line errors and signals."""

import contextlib
import errno
import fcntl
import os
import pty
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

from jaxpar import checkpoint, training
from jaxpar import config as configs
from jaxpar import host_memory as memory
from jaxpar.commands import train
from jaxpar.errors import TrainingError, UserError
from jaxpar.run import build
from tests.runs import small_arguments
from tests.test_train import stop_at

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> int:
    return train.main(["jaxpar", *arguments])


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command line with a mistake, assert exit code 2 and a single line on stderr, and return that line."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("jaxpar: ")
    return lines[0]


def small(folder: Path, *arguments: str, workdir: str = "run") -> list[str]:
    """Return the arguments of the small run in a folder."""
    return ["--config=configs/default.py", f"--workdir={folder}/{workdir}", *small_arguments(folder), *arguments]


MISTAKES = {
    "unknown key": (["--config.optimizer.lrr=1"], "config.optimizer.lrr does not exist. Did you mean 'optimizer.lr'?"),
    "key of another section": (["--config.model.lr=1"], "config.model.lr does not exist. Did you mean 'optimizer.lr'?"),
    "a section": (
        ["--config.model=gpt"],
        "config.model is a section; to set its name, use config.model.name; its keys",
    ),
    "wrong type": (["--config.batch_size=many"], "config.batch_size is 'many'; it must be an integer"),
    "unknown task": (["--config.task=clasification"], "Did you mean 'classification'?"),
    "unknown strategy": (["--config.strategy=dataparallel"], "Did you mean 'data_parallel'?"),
    "unknown implementation": (
        ["--config.data_parallel.implementation=ddp"],
        "it must be one of auto, shard_map, sharding, pmap",
    ),
    "unknown model": (["--config.model.name=brt"], "Did you mean 'bert'?"),
    "indivisible batch": (
        ["--config.batch_size=25"],
        "config.batch_size is 25; it must be a multiple of 2: 2 replicas (the data axis) x 1 accumulation step",
    ),
    "indivisible eval batch": (["--config.eval.batch_size=5"], "config.eval.batch_size is 5"),
    "indivisible accumulation": (["--config.optimizer.accumulation_steps=5"], "a multiple of 10"),
    "too many devices": (
        ["--config.mesh.data=64"],
        "config.mesh.data is 64; it must be at most 8, the number of cpu devices",
    ),
    "single on a mesh": (["--config.strategy=single"], "config.mesh.data is 2; it must be 1 or -1"),
    "missing file": (["--config.data.train=nowhere.csv"], "nowhere.csv"),
    "unknown column": (["--config.data.label_column=lable"], "label"),
    "nothing to do": (["--config.num_epochs=0"], "config.num_epochs"),
    "endless": (["--config.num_epochs=inf"], "config.num_epochs is inf"),
    "more steps than a counter": (
        ["--config.num_steps=1000000000000000"],
        "num_steps is 1000000000000000; it must be at most 2,147,483,647",
    ),
    "more epochs than a counter": (["--config.num_epochs=1e300"], "config.num_epochs is 1e+300; it must be at most"),
    "half a profile": (["--config.profile=5"], "config.profile is (5,)"),
    "a profile backwards": (["--config.profile=(3,1)"], "config.profile is (3, 1)"),
    "a batch of too many tokens": (
        ["--config.batch_size=200000000"],
        "config.batch_size is 200000000 and config.data.max_length is 16, which is 3,200,000,000 tokens; a batch must "
        "have at most 2,147,483,647",
    ),
    "an evaluation of too many tokens": (["--config.eval.batch_size=200000000"], "config.eval.batch_size is 200000000"),
    "synthetic data of too many bytes": (
        ["--config.data.source=synthetic", "--config.data.train=", "--config.data.synthetic_examples=1000000000000"],
        "config.data.synthetic_examples is 1000000000000 and config.data.max_length is 16, which needs 680 TB of host "
        "memory; it must fit in",
    ),
    "a huge number of layers": (["--config.model.num_layers=10001"], "num_layers is 10001; it must be at most 10,000"),
    "a huge width": (["--config.model.hidden_size=20000000"], "hidden_size is 20000000; it must be at most 10,000,000"),
    "a number beyond int64": (
        [f"--config.exchange_options.seed={10**30}"],
        f"config.exchange_options.seed is {10**30}; its magnitude must be less than 2^63",
    ),
    "a tuple beyond int64": (
        [f"--config.profile=(0,{10**99})"],
        f"config.profile is (0, 1{'0' * 52}...; its magnitude must be less than 2^63",
    ),
    "a number beyond float64": (
        [f"--config.optimizer.lr={'9' * 400}"],
        f"config.optimizer.lr is '{'9' * 56}...; it must be a number less than 1.8e308",
    ),
    "a number that is too long for Python": (
        [f"--config.batch_size={'9' * 5000}"],
        f"config.batch_size is '{'9' * 56}...; it must be an integer",
    ),
    "not a number": (
        ["--config.swarm.forward_seconds=nan"],
        "config.swarm.forward_seconds is nan; it must be a number",
    ),
    "parentheses": ([f"--config.profile={'(' * 5000}"], "...; it must be a tuple of integers"),
    "a module of dots": (["--config.model.name=.."], "config.model.name is '..'; it must be one of bert, gpt, resnet"),
    "a relative module": (["--config.model.name=.x"], "config.model.name is '.x'; it must be one of bert, gpt, resnet"),
    "a module whose build is another": (
        ["--config.model.name=jaxpar.models"],
        "jaxpar/models/__init__.py has no function build(config, info)",
    ),
    "a name that is too long": ([f"--config.model.init_from={'a' * 300}"], "config.model.init_from is 'aaa"),
    "a cache that is a file": (
        ["--config.cache_dir=LICENSE"],
        "config.cache_dir is 'LICENSE', which is a file; it must",
    ),
    "a cache in a file": (
        ["--config.cache_dir=LICENSE/a"],
        "'LICENSE/a', which is inside a file; it must be a directory",
    ),
    "many threads": (["--config.data.num_threads=1000000"], "data.num_threads is 1000000; it must be at most 1,000"),
    "prefetch forever": (
        ["--config.data.prefetch=10000000"],
        "data.prefetch is 10000000; it must be at most 1,000,000",
    ),
    "negative FLOP/s": (
        ["--config.log.peak_flops=-1"],
        "config.log.peak_flops is -1.0; it must be finite and at least",
    ),
    "an impatient watchdog": (["--config.watchdog_seconds=1e-9"], "it must be 0 (no watchdog), or between 1 and 1e+09"),
    "a huge seed": (["--config.seed=99999999999999999999"], "config.seed is 99999999999999999999"),
    "a negative seed": (["--config.seed=-1"], "config.seed is -1; it must be between 0 and 2147483647"),
    "no columns": (["--config.data.text_columns=()"], "it must name one column"),
    "log never": (["--config.log.every_steps=0"], "config.log.every_steps is 0; it must be at least 1"),
    "save backwards": (
        ["--config.checkpoint.every_steps=-1"],
        "config.checkpoint.every_steps is -1; it must be at least",
    ),
    "evaluate backwards": (["--config.eval.every_steps=-2"], "config.eval.every_steps is -2; it must be at least 0"),
    "keep nothing": (["--config.checkpoint.keep=0"], "config.checkpoint.keep is 0"),
    "init_from nowhere": (["--config.model.init_from=nowhere"], "nowhere"),
    "stray argument": (
        ["quickstart"],
        "'quickstart' is not an argument; it must be a flag that --help lists or --config.KEY=VALUE",
    ),
    "an exit code that has a meaning": (
        ["--stopped_exit_code=3"],
        "--stopped_exit_code is 3; it must be 0, or 4 to 125",
    ),
    "an exit code of a shell": (["--stopped_exit_code=137"], "--stopped_exit_code is 137; it must be 0, or 4 to 125"),
    "stray flag": (
        ["--wrkdir=x"],
        "--wrkdir is not a flag; it must be one that --help lists or --config.KEY=VALUE. Did you mean '--workdir'?",
    ),
    "a flag of another type": (["--process_id=two"], "--process_id is 'two'; it must be an integer"),
    "a switch with a value": (["--print_config=5"], "--print_config is '5'; it must be true or false"),
    "help for an unknown key": (
        ["--help=optimiser"],
        "--help is 'optimiser'; it must be a key, or one of config, mesh, data_parallel, exchange_options, async",
    ),
    "a flag without a value": (["--config"], "--config has no value; it must be written --config=VALUE"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_in_one_line_and_leave_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = MISTAKES[name]
    assert message in mistake(capsys, *small(tmp_path, *arguments))
    assert not (tmp_path / "run").exists()


def test_epochs_with_too_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found as soon as the data is read."""
    line = mistake(capsys, *small(tmp_path, "--config.num_steps=0", "--config.num_epochs=2e9"))
    assert "config.num_epochs is 2000000000.0, which is" in line


@pytest.mark.parametrize(
    ("key", "value", "strategy"), [("profile", "(3, 17)", "data_parallel"), ("pipeline.trace", "17", "pipeline")]
)
def test_a_measured_step_after_the_last_one(
    key: str, value: str, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = mistake(capsys, *small(tmp_path, f"--config.strategy={strategy}", f"--config.{key}={value}"))
    assert line == f"jaxpar: config.{key} is {value}; it must be at most 16, the last step of the run"


def test_batches_larger_than_the_host_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example of 16 tokens takes 92 bytes: 4 per token, 1 in the mask, and 4 each for label, weight and index.

    Nine batches of 24 examples are in memory: eight prepared ahead, and the one in use. Preparing one takes the memory
    of three more.
    """
    monkeypatch.setattr(memory, "host_bytes", lambda: 12 * 24 * 92 - 1)
    line = mistake(capsys, *small(tmp_path))
    assert "config.batch_size is 24, which needs 26.5 kB of host memory for preparing and holding 9 batches; it" in line
    monkeypatch.setattr(memory, "host_bytes", lambda: 12 * 24 * 92)
    line = mistake(capsys, *small(tmp_path, "--config.eval.batch_size=240"))  # a single batch holds the split
    needs = "which needs 88.3 kB of host memory for preparing and holding 1 batch; it"
    assert f"config.eval.batch_size is 240, {needs}" in line


def test_a_text_length_whose_positions_exceed_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches are short, because the texts are, but the model has an embedding for every position."""
    changes = ["--config.data.max_length=1000000000", "--config.batch_size=2", "--config.model.hidden_size=64"]
    line = mistake(capsys, *small(tmp_path, *changes))
    assert "config.strategy is 'data_parallel', which needs 1.54 TB on devices 0 to 1 (parameters 512 GB" in line
    assert "the memory of this machine" in line


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("Unable to allocate 12. TiB for an array"), "Unable to allocate 12. TiB for an array"),
        (MemoryError(), "Unable to allocate memory"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nmore"),
         "Out of memory allocating 8 bytes"),
    ],
)  # fmt: skip
def test_running_out_of_memory(
    error: Exception, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(training, "train_config", fails)
    line = mistake(capsys, *small(tmp_path))
    assert line.startswith(f"jaxpar: out of memory ({reason}); lower config.batch_size or ")
    assert memory.memory_error(RuntimeError("INTERNAL: something else")) is None


def test_the_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [tmp_path / "missing", tmp_path / "none", tmp_path / "some"]
    limits[1].write_text("max\n")
    monkeypatch.setattr(memory, "_LIMITS", limits[:2])
    assert memory.host_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits[2].write_text("1000\n")
    monkeypatch.setattr(memory, "_LIMITS", limits)
    assert memory.host_bytes() == 1000


def test_missing_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config is missing" in mistake(capsys, "--workdir=x")
    assert "--workdir is missing" in mistake(capsys, "--config=configs/default.py")
    assert "Did you mean 'configs/default.py'" in mistake(capsys, "--config=configs/defualt.py", "--workdir=x")


DAMAGED_FILES = {
    "empty": (b"", "empty"),
    "header only": (b"text,label\n", "data.csv"),
    "ragged": (b"text,label\na,b\na,b,c\n", "data.csv:3"),
    "invalid UTF-8": (b"text,label\na,b\n\xff\xfe,b\n", "data.csv:3"),
}


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_damaged_data(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = DAMAGED_FILES[name]
    arguments = small(tmp_path)
    (tmp_path / "data.csv").write_bytes(content)
    assert message in mistake(capsys, *arguments)


def test_a_label_that_training_never_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test.csv").write_text("text,label\nred cat,purple\n")
    line = mistake(capsys, *small(tmp_path, f"--config.data.test={tmp_path}/test.csv"))
    assert "purple" in line
    assert "test.csv:2" in line


def test_a_label_that_the_split_took_from_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 60 labels of one example each, some labels occur only in the validation or test split."""
    arguments = small(tmp_path)
    with (tmp_path / "data.csv").open("a") as file:
        file.writelines(f"lonely {number},only{number}\n" for number in range(60))
    line = mistake(capsys, *arguments)
    assert "data.csv', whose label 'only" in line
    assert "so rare that the split by hash puts it only into" in line


def test_a_workdir_that_cannot_be_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    line = mistake(capsys, *small(tmp_path, workdir="file/run"))
    assert f"--workdir is '{tmp_path}/file/run', which is inside a file; it must be a writable directory" in line
    line = mistake(capsys, *small(tmp_path, workdir="file"))
    assert f"--workdir is '{tmp_path}/file', which is a file; it must be a writable directory" in line


def test_a_disk_without_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    line = mistake(capsys, *small(tmp_path))
    # 4,220 parameters with Adam's two moments and counter, 4 bytes each
    assert "on a disk with 1 kB free; it must have" in line
    assert "kB free, for 4 of 4 checkpoints" in line


def test_a_disk_that_fills_up_while_saving(tmp_path: Path) -> None:
    """Real writes of orbax fail, because files are limited to 20 kB, less than a checkpoint of this model."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    arguments = command(tmp_path)[4:]
    cache = str(tmp_path / "cache")  # its entries are truncated, so other tests must not read them
    process = subprocess.run(
        [sys.executable, "-c", f"{limit}; from jaxpar.commands import train; train.run()", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": cache},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2, process.stderr
    # Other lines are warnings of JAX that it cannot write its cache.
    lines = [line for line in process.stderr.splitlines() if line.startswith("jaxpar: ")]
    assert len(lines) == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert "writing a checkpoint in" in lines[0]
    assert "no checkpoint exists yet" in lines[0]


NO_SPACE = "RESOURCE_EXHAUSTED: Failed to write 30000 bytes to file 4: No space left on device [os_error_code='28']"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError(NO_SPACE), UserError),
        (ValueError("Error writing local file [OS error 27: EFBIG File too large]"), UserError),
        (ValueError("Failed to open: Connection timed out [os_error_code='110']"), TrainingError),
        (ValueError("DEADLINE_EXCEEDED: Barrier timed out"), TrainingError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), UserError),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), TrainingError),
    ],
)
def test_exit_codes_of_failed_checkpoint_writes(
    error: Exception, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disk errors that the user must fix end with exit code 2, errors that may be temporary with exit code 1."""

    def fails(_self: Any) -> None:
        raise error

    saver = checkpoint.Saver(tmp_path / "checkpoints", keep=1, keep_best=False)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "wait_until_finished", fails)
        with pytest.raises(kind, match=r"^writing a checkpoint in .* failed: .*; no checkpoint exists yet$"):
            saver.wait()
    saver.close()


def test_the_exit_code_of_a_stopped_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = small(tmp_path, "--stopped_exit_code=75")
    with monkeypatch.context() as patch:
        stop_at(patch, 2, signal.SIGTERM)
        assert run(*arguments) == 75
    resume = capsys.readouterr().out.splitlines()[-1]
    assert resume.startswith("resume ")
    assert resume.endswith("--stopped_exit_code=75")
    assert run(*arguments) == 0
    compare = "next      to compare, try --config.model.size=mini with a new --workdir;"
    assert capsys.readouterr().out.splitlines()[-2] == compare


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        ([], ["--config.strategy=single", "--config.model.size=mini"]),
        (["strategy=single"], ["--config.strategy=data_parallel", "--config.model.size=mini"]),
        (["strategy=async_data_parallel", "model.name=gpt"], ["--config.strategy=single"]),
        (["exchange=zero3", "model.size=base"], []),
        (["strategy=pipeline", "mesh.stage=2", "model.name=gpt"], []),
    ],
)
def test_the_changes_to_try_after_a_run(overrides: list[str], flags: list[str]) -> None:
    """`single` accepts only exchange ddp and one stage. Only BERT has the size mini."""
    config = configs.default_config()
    configs.override(config, [f"--config.{text}" for text in overrides])
    assert build.changes_to_try(config) == flags


TWO_SIGNALS = """
import signal
from jaxpar.launch.signals import Interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with SIGINT ignored
with Interrupt():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
"""


def test_control_characters_of_names_are_printed_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "\x1b[31mred"
    arguments = ["--config=configs/default.py", f"--workdir={workdir}", *small_arguments(tmp_path)]
    assert run(*arguments, "--config.num_epochs=0", "--config.num_steps=1") == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.count(f"{tmp_path}/\\x1b[31mred") == 2  # in the header and at the end


def test_a_second_signal_ends_the_process_immediately() -> None:
    process = subprocess.run(
        [sys.executable, "-c", TWO_SIGNALS], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert process.returncode == 130
    assert "stopped immediately" in process.stdout


EARLY_SIGNAL = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with SIGINT ignored
from jaxpar.__main__ import enter
load = builtins.__import__
def interrupted(name, *arguments):
    if name == "jaxpar.commands":
        os.kill(os.getpid(), signal.SIGINT)
    return load(name, *arguments)
builtins.__import__ = interrupted
enter()
"""


def test_a_signal_during_the_imports(tmp_path: Path) -> None:
    """The signal ends the process like any signal before the first step, without a traceback."""
    arguments = ["--config=configs/default.py", f"--workdir={tmp_path}", "--stopped_exit_code=75"]
    process = subprocess.run(
        [sys.executable, "-c", EARLY_SIGNAL, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stderr) == (75, "")
    assert process.stdout.startswith("stopped before the first step\nresume ")


# Stands in for scripts/python: prints the command that `train` would print to resume the run.
PRINT_COMMAND = """#!/usr/bin/env bash
while [[ $1 != -m ]]; do shift; done
code='import sys; from jaxpar.commands.train import resume_command; print(resume_command(sys.argv[2:]))'
PYTHONPATH={root} {python} -c "$code" "$@"
"""


@pytest.mark.parametrize(
    "started",
    [["./train"], ["../a folder/train"], ["{folder}/train"], ["./jaxpar", "train"], ["{folder}/jaxpar", "train"]],
)
def test_the_command_that_resumes_a_run_can_be_pasted(started: list[str], tmp_path: Path) -> None:
    """A shell in any folder starts the same script in the same folder with the same arguments."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("train", "jaxpar"):
        shutil.copy(ROOT / "scripts" / name, folder)
    (folder / "python").write_text(PRINT_COMMAND.format(root=ROOT, python=sys.executable))
    (folder / "python").chmod(0o755)
    arguments = ["--workdir=it's mine", "--config.data.train=*.csv", "--config.num_epochs=$HOME"]
    command = [*(word.format(folder=folder) for word in started), *arguments]
    first = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    pasted = subprocess.run(["bash", "-c", first], cwd="/", capture_output=True, text=True, check=True).stdout
    assert pasted == first
    assert shlex.split(first) == ["cd", str(folder), "&&", *command]


def test_the_command_of_the_module() -> None:
    """`python` may be another interpreter in the shell into which the command is pasted."""
    command = train.resume_command(["/x/jaxpar/__main__.py", "--workdir=x"])
    assert shlex.split(command) == ["cd", os.getcwd(), "&&", sys.executable, "-m", "jaxpar", "--workdir=x"]  # noqa: PTH109
    assert train.resume_command(["my bin/jaxpar"]).endswith(" && 'my bin/jaxpar'")


def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C is answered at once, with the bar above it, and the run stops after the step and prints how to resume."""
    small_arguments(tmp_path)
    terminal, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    start = "import os, runpy, sys; os.login_tty(int(sys.argv.pop(1))); runpy.run_module('jaxpar', run_name='__main__')"
    _, _, _, *arguments = command(tmp_path, "--config.num_epochs=10000")
    with subprocess.Popen(
        [sys.executable, "-c", start, str(own), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        pass_fds=[own],
    ) as process:
        os.close(own)
        shown = ""
        while "step 4/" not in shown:
            shown += os.read(terminal, 10_000).decode()
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # on Linux, this is how a terminal ends
            while text := os.read(terminal, 10_000).decode():
                shown += text
    os.close(terminal)
    assert process.returncode == 0
    lines = [line.rpartition("\r")[2] for line in shown.replace("\r\n", "\n").split("\n")]
    assert [line[: len("step 2/80000  loss ")] for line in lines if "left" in line][:1] == ["step 2/80000  loss "]
    answer = lines.index("SIGINT: stopping after this step; a second signal exits at once, without saving")
    stopped = next(number for number, line in enumerate(lines) if line.startswith("SIGINT: stopped after step "))
    assert answer < stopped
    assert lines[stopped + 1].startswith(f"resume    cd {shlex.quote(os.getcwd())} && ")  # noqa: PTH109


@pytest.mark.parametrize("is_training", [False, True])
def test_a_reader_that_closes_the_output(is_training: bool, tmp_path: Path) -> None:
    """As `| head` does. A run reports it, because it ends."""
    arguments = command(tmp_path) if is_training else [sys.executable, "-m", "jaxpar", "train", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, f"jaxpar: {train.CLOSED_OUTPUT}\n" if is_training else "")


def command(folder: Path, *overrides: str) -> list[str]:
    """Return the command that starts the small run in a separate process."""
    return [sys.executable, "-m", "jaxpar", "train", *small(folder, *overrides, "--config.mesh.virtual_cpu_devices=2")]


def test_a_closed_output(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert train.main(["jaxpar", "--config=configs/quickstart.py", f"--workdir={tmp_path}/run"]) == 2
    assert (
        capsys.readouterr().err == "jaxpar: the standard output is closed; it must be open, such as with >/dev/null\n"
    )
    assert not (tmp_path / "run").exists()
