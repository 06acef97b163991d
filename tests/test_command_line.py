"""Tests of the command lines of scripts: each mistake is one line on stderr with exit code 2."""

import errno
import io
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxpar import commands
from jaxpar.command_line import Parser, integer, names, number, output_path, split_overrides
from jaxpar.commands import (
    audit,
    certify,
    compare_pipelines,
    compare_runs,
    compare_strategies,
    compare_updates,
    draw,
    export,
    generate,
    launch,
    partition_profile,
    plan,
    predict,
    serve,
    simulate,
    swarm_simulate,
)
from jaxpar.errors import TrainingError, UserError, exit_code
from jaxpar.use.inference.generate import Sampling
from scripts.bench import peers, pipeline
from tests.runs import script_error

CONFIG = "--config is missing; it must be set, as in --config=configs/quickstart.py"
EXPORT = "--workdir=runs/quickstart --output=quickstart.safetensors --format=safetensors"
FORMATS = "safetensors, hf, stablehlo"
LAUNCH = "jaxpar launch --num_processes=2 -- --config=configs/quickstart.py --workdir=runs/quickstart"
TRAIN = ["--", "--config=x", "--workdir=y"]
LISTED = "it must be one that --help lists"
OVERRIDE = " or --config.KEY=VALUE"
BEHIND = ", or follow --, as the arguments of `jaxpar train` do"
# A script, its arguments, and the message.
MISTAKES: list[tuple[ModuleType, list[str], str]] = [
    (audit, [], CONFIG),
    (audit, ["--config"], "--config has no value; it must be written --config=VALUE"),
    (audit, ["--json=5"], "--json is '5'; it must be set without a value"),
    (
        audit,
        ["--conifg.strategy=x"],
        f"--conifg.strategy is not a flag; {LISTED}{OVERRIDE}. Did you mean '--config.strategy'?",
    ),
    (audit, ["--jsn"], f"--jsn is not a flag; {LISTED}{OVERRIDE}. Did you mean '--json'?"),
    (audit, ["--config=x", "y"], f"'y' is not an argument; it must be a flag that --help lists{OVERRIDE}"),
    (certify, ["--num_steps=10", "--config.seed=1"], CONFIG),
    (certify, ["--num_steps=0.5"], "--num_steps is '0.5'; it must be an integer"),
    (compare_strategies, ["--strategies=ddp"], CONFIG.replace("quickstart", "compare_bert")),
    (compare_updates, ["--cases=sync"], CONFIG),
    (compare_updates, ["--workers=0"], "--workers is 0; it must be at least 1"),
    (compare_updates, ["--slowdown=nan"], "--slowdown is 'nan'; it must be a number of at least 1"),
    (draw, ["--auto=yes"], "--auto is 'yes'; it must be set without a value"),
    (export, [], f"--workdir is missing; it must be set, as in {EXPORT}"),
    (export, ["--workdir=runs/x", "--format=hf"], f"--output is missing; it must be set, as in {EXPORT}"),
    (export, [*EXPORT.split(), "runs/x"], "'runs/x' is not an argument; it must be a flag that --help lists"),
    (export, ["--step=last"], "--step is 'last'; it must be an integer"),
    (export, ["--checkpoint=last"], "--checkpoint is 'last'; it must be one of best, newest"),
    (
        export,
        ["--format=safetensor"],
        f"--format is 'safetensor'; it must be one of {FORMATS}. Did you mean 'safetensors'?",
    ),
    (plan, ["--config=x", "--cluster=here", "--verify=2"], "--verify is 2; it must be unset with --cluster=here"),
    (serve, ["--workdir=x", "--port=65536"], "--port is 65536; it must be at most 65535"),
    (simulate, ["zb_h1"], "'zb_h1' is not an argument; it must be a flag that --help lists"),
    (launch, [], "--num_processes is missing; it must be set, as in --num_processes=2"),
    (launch, ["--num_processes=two"], "--num_processes is 'two'; it must be an integer"),
    (launch, ["--num_processes=0"], "--num_processes is 0; it must be at least 1"),
    (launch, ["--num_processes=3", *TRAIN], "--num_processes is 3; it must divide the number of visible GPUs, 4"),
    (launch, ["--num_processes=2", "--max_restarts=-1"], "--max_restarts is -1; it must be at least 0"),
    (launch, ["--num_processes=2", "--workdir=x"], f"--workdir is not a flag; {LISTED}{BEHIND}"),
    (launch, ["--num_processes=2"], f"--config is missing; it must be set, as in {LAUNCH}"),
    (launch, ["--num_processes=2", "--", "--config=x"], f"--workdir is missing; it must be set, as in {LAUNCH}"),
    (peers, [], "--torch_python is missing; it must be set, as in --torch_python=TORCH/bin/python"),
    (peers, ["--torch_python=nowhere"], "--torch_python is 'nowhere', which does not exist; it must be an interpreter"),
    (
        peers,
        [f"--torch_python={sys.executable}", "--widths=100"],
        "--widths is '100'; it must be one or more positive multiples of 64, such as 128,256",
    ),
    (pipeline, ["--stages=4,x"], "--stages is '4,x'; it must be one or more positive integers, such as 4,8"),
    (
        launch,
        ["--num_processes=2", "--", "--process_id=1"],
        "--process_id is set by `jaxpar launch`; remove it from the arguments after --",
    ),
]


@pytest.mark.parametrize(("script", "arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    script: ModuleType,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
    assert exit_code(script.main if script is peers else lambda: script.main(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err == f"jaxpar: {message}\n"
    assert captured.out == ""


def test_values() -> None:
    parser = Parser("A script.")
    parser.require("--count", "--count=1", type=integer(-2))
    parser.add_argument("--share", type=number("between 0 and 1", maximum=1), default=0.5)
    parser.add_argument("--some", type=names(["a", "b", "c"]))
    arguments, overrides = parser.parse_with_overrides(["--count=-2", "--config.seed", "3", "--some", "c, a"])
    assert vars(arguments) == {"count": -2, "share": 0.5, "some": ["c", "a"]}
    assert overrides == ["--config.seed", "3"]
    for share in ("-0.1", "1.1", "inf", "half"):
        with pytest.raises(UserError, match=rf"^--share is '{share}'; it must be between 0 and 1$"):
            parser.parse(["--count=1", f"--share={share}"])
    with pytest.raises(UserError, match=r"^--some is 'a,d'; it must be one or more of a, b, c$"):
        parser.parse(["--count=1", "--some=a,d"])
    with pytest.raises(UserError, match=r"^--coun is not a flag; .*'--count'\?$"):  # flags are not abbreviated
        parser.parse(["--coun=1"])


def test_an_override_has_its_value_behind_it_or_an_equals_sign() -> None:
    arguments = ["--a", "--config.x=1", "--config.y", "2", "--noconfig.z", "--b", "c", "--config.w", "--d"]
    others, overrides = split_overrides(arguments)
    assert others == ["--a", "--b", "c", "--d"]
    assert overrides == ["--config.x=1", "--config.y", "2", "--noconfig.z", "--config.w"]


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException) -> None:
        raise error

    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: 1) == 1
    assert exit_code(lambda: fails(KeyboardInterrupt())) == 130
    assert exit_code(lambda: fails(UserError("x is 1; it must be 2"))) == 2
    assert exit_code(lambda: fails(TrainingError("the loss is nan"))) == 1
    assert capsys.readouterr().err == "jaxpar: x is 1; it must be 2\njaxpar: the loss is nan\n"


def test_a_file_that_may_not_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/run/config.json")

    assert exit_code(refused) == 2
    assert capsys.readouterr().err == "jaxpar: /run/config.json may not be read or written: Permission denied\n"


def test_a_closed_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert exit_code(lambda: 0) == 2
    assert (
        capsys.readouterr().err == "jaxpar: the standard output is closed; it must be open, such as with >/dev/null\n"
    )


def test_sigterm_ends_a_command_as_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are half written are removed by `finally`. Afterwards, the signal does what it did before."""
    removed = []

    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            removed.append("file")

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            exit_code(command)
        after = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert removed == ["file"]
    assert capsys.readouterr().err == "jaxpar: terminated\n"
    assert after is signal.SIG_DFL


OUTPUTS: list[tuple[ModuleType, str]] = [
    *((compare_runs, "--output"), (predict, "--output"), (export, "--output"), (certify, "--output")),
    *((compare_strategies, "--workdir"), (compare_pipelines, "--workdir"), (compare_updates, "--workdir")),
    *((draw, "--out"), (draw, "--save"), (plan, "--out"), (plan, "--save_cluster"), (partition_profile, "--out")),
    *((swarm_simulate, "--out"), (swarm_simulate, "--make_trace")),
]


@pytest.mark.parametrize(("script", "flag"), OUTPUTS, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_no_script_writes_into_a_run(
    script: ModuleType, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "5").mkdir(parents=True)
    (run / "config.json").touch()  # as in runs of earlier versions
    (tmp_path / "link").symlink_to(run / "checkpoints")
    before = sorted(tmp_path.rglob("*"))
    for path in (run, run / "checkpoints" / "999", run / "result.json", tmp_path / "link" / "x" / "y.csv"):
        _, message = script_error(monkeypatch, capsys, script, f"{flag}={path}")
        assert message == f"{flag} is '{path}', which belongs to the run in '{run}'; it must be another path\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_files_next_to_those_of_a_run_are_outputs(tmp_path: Path) -> None:
    """A certificate stands in the workdir. A directory of a model also has a config.json."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "starts.jsonl").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    for path in ("run/certificate.json", "run/predictions.csv", "model/checkpoints/x", "run2", "none/x"):
        assert output_path(f"{tmp_path}/{path}") == tmp_path / path


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        (): "the command is missing; it must be one of train, launch, ",
        ("plna",): "the command is 'plna'; it must be one of train, launch, ",
        ("compare", "rnus"): "the command is 'compare'; it must be one of train, launch, ",
    }.items():
        assert commands.find_command(words) is None
        assert exit_code(lambda words=words: commands._describe(words)) == 2  # type: ignore[misc]
        assert capsys.readouterr().err.startswith(f"jaxpar: {message}")
    assert commands.find_command(["compare", "runs", "a"]) == "compare runs"
    assert commands.find_command(["partition", "--profile=x"]) == "partition"
    assert commands.find_command(["--config=x"]) == "train"


def test_a_service_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^the package starlette is not installed; install the extra serve \(scripts/"):
        serve.main(["--workdir=x"])


class NotText(io.StringIO):
    """A standard input that is not UTF-8."""

    def __next__(self) -> str:  # type: ignore[override]
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (None, "the standard input is closed; it must be open, or --prompt must be set"),
        (io.StringIO(), "the standard input is empty; it must have a prompt in each line"),
        (NotText(), "the standard input is not UTF-8; it must be text in UTF-8"),
    ],
)
def test_prompts_that_cannot_be_read(stdin: io.StringIO | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = None  # is not reached
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(UserError, match=f"^{message}$"):
        generate.generate(model, None, 1, Sampling(0.0, 0, 1.0, 0), as_json=False)


def test_a_step_of_what_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "is_pretrained", lambda _: True)
    with pytest.raises(UserError, match=r"^--step is 3; it must not be set for x, which is not a run$"):
        generate.main(["--workdir=x", "--step=3"])
