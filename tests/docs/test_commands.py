"""Commands of the documents: they exist, take these flags and values, and print the output that the documents show."""

import ast
import importlib
import math
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ml_collections import ConfigDict

from jaxpar import cluster, commands
from jaxpar import config as configs
from jaxpar.choose.candidates import with_settings
from jaxpar.choose.planner import AUTO_STRATEGY
from jaxpar.choose.stages import until_chosen
from jaxpar.commands import train
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from jaxpar.run import build, unused
from tests.docs.prose import ROOT
from tests.docs.test_pages import PAGES, blocks

# Commands of the system that pages use.
SYSTEM = {"cat", "cd", "cp", "curl", "export", "git", "hf", "mpirun", "pip", "printf", "ray", "source", "srun", "unzip"}
# Lines of a bash block that are no commands.
SYNTAX = re.compile(r"$|#|code=|(until|do|case|esac|exit)\b|\S+\)")
# Flags of curl, pip, mpirun and ray.
OTHERS = {"json", "no-deps", "dest", "map-by", "head", "port", "address"}
# Flags of commands whose config cannot be checked here.
FROM_OTHERS = {
    "--config=best.py": "is the config that the page's `jaxpar plan` writes",
    "--config=configs/wordnet_minilm.py": "reads a downloaded model",
    "--workdir=runs/again": "reads the table of another run",
    "--workdir=runs/own": "reads the schedule of the page above it",
    "--workdir=runs/convolutional": "reads the model of the page above it",
    "--workdir=runs/swarm": "reads the files of the page above it",
}
# Starts of commands whose output is not compared.
NOT_RUN = {
    "JAXPAR_": "installs packages, or trains",
    "PYTHONPATH=. ": "trains",
    "XLA_FLAGS": "needs a run",
    "cat labels.csv": "needs a run",
    "curl": "needs a service",
    "mpirun": "needs several hosts",
    "printf": "needs a run",
    "jaxpar audit": "compiles, and the temporary memory depends on the flags of XLA",
    "jaxpar certify": "trains",
    "jaxpar compare": "trains, or needs runs",
    "jaxpar doctor": "measures the machine",
    "jaxpar export": "needs a run, unless its output is an error",
    "jaxpar fit": "compiles for several minutes",
    "jaxpar generate": "needs a run",
    "jaxpar partition profile": "measures",
    "jaxpar plan": "prints how long it took",
    "jaxpar predict": "needs a run",
    "jaxpar serve": "needs a run",
    "jaxpar swarm --": "trains",
    "jaxpar swarm simulate --peers=400": "takes 3 s; tests/strategies/swarm/test_simulate.py checks it",
    "scripts/launch": "trains",
    'scripts/python -c "import jax;': "depends on the machine",
    "scripts/python -m pip": "installs packages",
    "scripts/python scripts/bench": "measures",
    "scripts/setup": "installs packages",
    "scripts/train": "trains, unless its output is an error",
    "source": "changes the shell",
    "cp ": "needs a run",
    "unzip": "needs a download",
}


class Shown(NamedTuple):
    """A command of a page in one line, and the lines below it up to the next command."""

    command: str
    output: str


def shown(page: str) -> Iterator[Shown]:
    """Yield the commands of a page with their outputs."""
    for language, text in blocks(page):
        for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:] * (language == "console"):
            command, _, output = part.partition("\n")
            yield Shown(one_line(command), output)


def scripted(page: str) -> Iterator[str]:
    """Yield the commands of a page's bash blocks, which have no outputs."""
    for language, text in blocks(page):
        for line in text.replace("\\\n", " ").splitlines() * (language == "bash"):
            yield from (one_line(part) for part in line.split("&&") if not SYNTAX.match(part.strip()))


def one_line(command: str) -> str:
    return " ".join(command.split()).replace("scripts/jaxpar", "jaxpar")


COMMANDS = sorted(
    {one.command for page in PAGES for one in shown(page)} | {command for page in PAGES for command in scripted(page)}
)


def split(command: str) -> list[str]:
    """Return the words of a command without variables and redirections."""
    return [word for word in shlex.split(command, comments=True) if not re.fullmatch(r"[A-Z_]+=.*|\d?>.*|&", word)]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_known(command: str) -> None:
    """Commands and scripts exist and have these flags."""
    words = split(command)
    if words[0] in SYSTEM:
        starts = [n for n, word in enumerate(words) if word.startswith("scripts/") or word == "jaxpar"]
        words = words[starts[0] :] if starts else []
        if not words:
            return
    if words[:2] == ["scripts/python", "-c"]:
        compile(words[2], command, "exec")
        return
    flags = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--") and word != "--"}
    source = sources(words)
    unknown = {
        flag for flag in flags - OTHERS if not re.match(r"config\b", flag) and not re.search(f'"(--)?{flag}"', source)
    }
    assert not unknown, f"{command}: {sorted(unknown)}"


def sources(words: list[str]) -> str:
    """Return the source of a command, or of a script, and of the modules of jaxpar that it imports."""
    known = command_of(words)
    if known == "help":
        return '"help"'
    if known:
        paths = [module_file(f"jaxpar.commands.{known.replace(' ', '_')}")]
        paths += [module_file("jaxpar.commands.train")] * (known in ("launch", "swarm"))  # it passes on flags after --
    else:
        paths = [ROOT / words[words[0] == "scripts/python" and words[1] != "-m"]]
    assert all(path.is_file() for path in paths), words
    source = "".join(path.read_text() for path in paths)
    if paths[0].suffix != ".py":
        return source
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    names |= {node.module or "" for node in imports}
    return source + "".join(file.read_text() for file in map(module_file, names) if file.is_file())


def command_of(words: list[str]) -> str | None:
    """Return the command of jaxpar that words call, directly or by a script; None if they call none."""
    if words[0] == "jaxpar":
        return commands.find_command(words[1:]) or "help"
    return words[0].removeprefix("scripts/") if words[0] in ("scripts/train", "scripts/launch") else None


def module_file(name: str) -> Path:
    return ROOT / (name.replace(".", "/") + ".py")


@pytest.mark.parametrize("path", [*PAGES, *(f"configs/{path.name}" for path in (ROOT / "configs").glob("*.py"))])
def test_overrides_have_the_right_type(path: str) -> None:
    """This includes `config.KEY=VALUE` in sentences and tables."""
    overrides = re.findall(r"(?:--|`)(config\.[a-z_.]+=[^\s`\\]+)", (ROOT / path).read_text())
    configs.override(configs.default_config(), [f"--{one.rstrip('.,;:)')}" for one in overrides])


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--config=" in command])
def test_values_are_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks before the data is read accept the config, on as many CPUs as it or --target asks for.

    Its files are made up.
    """
    words = split(command)
    if FROM_OTHERS.keys() & set(words):
        return
    config = config_of(words)
    monkeypatch.chdir(tmp_path)
    for key in ("train", "validation", "test"):
        config.data[key] = config.data[key].removeprefix("/")  # a file of this test, not of the machine
        path = Path(config.data[key].replace("*", "0"))
        if path.suffix:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n")
        else:
            path.mkdir(parents=True, exist_ok=True)
    target = math.prod(map(int, re.findall(r"\d+", value(words, "--target").partition(":")[2])))
    use_cpus(monkeypatch, config.mesh.virtual_cpu_devices or target)
    if config.strategy == AUTO_STRATEGY:  # chooses a strategy for this config, which must be valid for any
        config = with_settings(config, {"strategy": "single", "mesh.data": 1})
    if config.strategy == "pipeline":
        config = until_chosen(config, cluster.find_cluster())
    build.check_run(config, tmp_path / "run")
    unused.check_unused_keys(config, overridden(words))


def overridden(words: list[str]) -> set[str]:
    """Return the keys that a command overrides."""
    return configs.override(configs.default_config(), [word for word in words if word.startswith("--config.")])


def config_of(words: list[str]) -> ConfigDict:
    """Return the config that a command selects and overrides."""
    config = configs.load_config(value(words, "--config"))
    configs.override(config, [word for word in words if word.startswith("--config.")])
    return config


def value(words: list[str], flag: str) -> str:
    """Return the value of a flag, or an empty string if it is not set."""
    return next((word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")), "")


def use_cpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make configs believe that there are this many CPU devices, because JAX has started with another number."""
    monkeypatch.setattr(cluster, "find_cluster", lambda: cluster.named_cluster("cpu", number))
    monkeypatch.setattr(mesh, "prepare_jax", lambda *_: None)


def test_every_reason_is_needed() -> None:
    assert not [start for start in NOT_RUN if not any(command.startswith(start) for command in COMMANDS)]
    assert not [flag for flag in FROM_OTHERS if not any(flag in split(one) for one in COMMANDS)]


@pytest.mark.parametrize("page", [page for page in PAGES if any(shown(page))])
def test_outputs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands of a page that NOT_RUN does not exclude. A run that is left out leaves only its config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXPAR_CACHE", str(tmp_path / "cache"))
    use_cpus(monkeypatch, 2)
    for name in ("jaxpar", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    for command, output in shown(page):
        words = split(command)
        if words[0] == "scripts/train" and output.startswith("jaxpar: "):
            assert train.main(words) == 2
        elif words[:2] == ["jaxpar", "export"] and output.startswith("jaxpar: "):
            run(words, output)
        elif command.startswith(tuple(NOT_RUN)):
            leave_config(words)
            continue
        else:
            run(words, output)
        printed = "".join(capsys.readouterr())
        assert printed.splitlines() == output.splitlines(), command


def leave_config(words: list[str]) -> None:
    """Write the config of a run, as the run does before its first step."""
    workdir = Path(value(words, "--workdir"))
    if words[0] == "scripts/train" and not workdir.is_absolute() and not workdir.exists():
        workdir.mkdir(parents=True)
        configs.save(config_of(words), workdir)


def run(words: list[str], output: str) -> None:
    """Run a command in this process. `cat > FILE <<END` writes the lines below it, up to END."""
    if words[0] == "cat":
        path = Path(words[1])
        if words[2:] == ["<<END"]:
            path.write_text(output.removesuffix("END\n"))
            print(output, end="")
        else:
            print(path.read_text(), end="")
    elif words[1] == "-c":
        exec(words[2])
    elif words[0] == "jaxpar":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            patch.setattr(signal, "signal", lambda *_: None)  # pytest handles Ctrl-C
            with pytest.raises(SystemExit):
                commands.run_command()
    else:
        script = importlib.import_module(words[1].removesuffix(".py").replace("/", "."))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words[1:])
            exit_code(script.main)
