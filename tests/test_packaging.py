"""Tests what `pip install .` installs: the files, and every command of `jaxpar`, without the clone."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxpar.commands import COMMANDS
from jaxpar.config import config_folder
from tests.runs import small_arguments

ROOT = Path(__file__).parent.parent
FOLDERS = {"jaxpar": "jaxpar", "configs": "jaxpar/configs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return str(wheel)


def test_the_wheel_has_all_code_data_and_configs(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert "jaxpar/py.typed" in names
        (entry_points,) = [archive.read(name) for name in archive.namelist() if name.endswith("entry_points.txt")]
    expected = {
        f"{target}/{file.relative_to(ROOT / source).as_posix()}"
        for source, target in FOLDERS.items()
        for file in (ROOT / source).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert names == expected
    assert {"jaxpar/configs/quickstart.py", "jaxpar/data/wordnet/glosses.tsv.xz"} <= names
    assert b"jaxpar = jaxpar.__main__:enter" in entry_points


def test_a_clone_has_its_configs_next_to_the_package() -> None:
    assert config_folder() == ROOT / "configs"


# Runs command lines in one process, which imports JAX once, and prints the exit code of each as the last line. The
# service is stopped when it serves. `swarm` does not find rich.
RUN_ALL = """
import json, os, signal, sys, threading, time
from pathlib import Path
from jaxpar import commands
def stop_service():
    while "serving   http" not in Path("log.txt").read_text():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    sys.modules.pop("rich.console", None)
    if words[0] == "swarm" and "--" in words:
        sys.modules["rich.console"] = None
    if words[0] == "serve":
        threading.Thread(target=stop_service).start()
    print(f"$ {time.process_time():.1f} s, {words[:2]}", flush=True)
    try:
        commands.run_command()
    except SystemExit as end:
        codes.append(end.code)
Path("codes.json").write_text(json.dumps([commands.__file__, codes]))
"""


def test_every_command_runs_without_the_clone(wheel: str, tmp_path: Path) -> None:
    """The wheel is installed in an empty folder, without its dependencies, which are those of this interpreter."""
    installed, cwd = tmp_path / "installed", tmp_path / "empty"
    cwd.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", installed, wheel], check=True)
    small = ["--config=configs/default.py", *small_arguments(tmp_path), "--config.mesh.virtual_cpu_devices=2"]
    small += ["--config.num_steps=2", "--config.checkpoint.every_steps=2"]
    text = ["--config.model.name=gpt", "--config.task=causal_lm", "--config.data.vocab_size=300"]
    pipeline = ["--schedule=1f1b", "--num_stages=2", "--num_microbatches=4"]
    has_gpus = importlib.util.find_spec("jax_cuda12_plugin") is not None
    lines: list[tuple[int, list[str]]] = [
        (0, ["train", *small, "--workdir=run"]),
        (0, [*small, *text, "--workdir=gpt"]),
        (0, ["launch", "--num_processes=1", "--", "--help"]),
        (0, ["doctor"]),
        (2, ["replay", "run"]),
        (0, ["plan", *small[:-3], "--cluster=h100:1"]),
        (0 if has_gpus else 2, ["fit", *small, "--target=h100:2"]),
        (0, ["audit", *small]),
        (0, ["certify", *small, "--num_steps=1"]),
        (0, ["predict", "--workdir=run", f"--input={tmp_path}/data.csv", "--output=labels.csv"]),
        (0, ["generate", "--workdir=gpt", "--prompt=red cat", "--max_tokens=3"]),
        (0, ["serve", "--workdir=run", "--port=0"]),
        (0, ["export", "--workdir=run", "--output=exported", "--format=stablehlo"]),
        (0, ["compare", "runs", "run", "gpt", "--output=runs.html"]),
        *((2, ["compare", form]) for form in ("strategies", "pipelines", "updates")),
        (0, ["draw", *pipeline, "--out=1f1b.svg"]),
        (0, ["simulate", *pipeline]),
        (0, ["partition", "profile", *small, "--out=profile.json", "--repeats=1"]),
        (0, ["partition", "--profile=profile.json", "--num_workers=2", "--bandwidth=1e9"]),
        (2, ["swarm", "--", *small, "--workdir=swarm"]),
        (0, ["swarm", "simulate", "--report=width"]),
        (2, ["plna"]),
        (0, ["--help"]),
    ]
    named = {" ".join(words[:2]) for _, words in lines} | {words[0] for _, words in lines}
    assert set(COMMANDS) <= named
    with (cwd / "log.txt").open("w") as log:
        subprocess.run(
            [sys.executable, "-P", "-c", RUN_ALL, json.dumps([words for _, words in lines])],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(installed)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    shown = (cwd / "log.txt").read_text()
    path, codes = json.loads((cwd / "codes.json").read_text())
    assert path == str(installed / "jaxpar" / "commands" / "__init__.py")
    assert codes == [code for code, _ in lines], shown
    assert has_gpus or "(scripts/setup targets, or pip install 'jaxpar[targets]')" in shown
    assert "(scripts/setup swarm, or pip install 'jaxpar[swarm]')" in shown
    assert "jaxpar: the command is 'plna'; it must be one of train, launch, doctor, plan, " in shown
    assert ". Did you mean 'plan'?\n" in shown
    assert sum(name in shown for name in COMMANDS) == len(COMMANDS)


def test_commands_that_are_wrong_or_only_listed_do_not_import_jax() -> None:
    program = (
        "import contextlib, sys\nfrom jaxpar.__main__ import enter\nwith contextlib.suppress(SystemExit): enter()\n"
    )
    program += "assert 'jax' not in sys.modules and 'absl' not in sys.modules"
    for words, message in (["--help"], ""), ([], "is missing"), (["audti"], "is 'audti'"), (["compare", "rnus"], "is "):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert message in done.stderr
        assert message or (done.stderr == "" and "  plan  " in done.stdout)
    assert done.stderr.endswith("Did you mean 'compare runs'?\n")
