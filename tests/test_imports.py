"""Tests that imports follow the order of the folders of jaxpar, and that there are no import cycles between files."""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import jaxpar

ROOT = Path(jaxpar.__file__).parent
# A module may import the modules before it. An entry is a file at the top of jaxpar, or a folder with all its files.
ORDER = [
    *("errors", "colors", "files", "host_memory", "config", "config_help", "command_line"),
    *("measure", "layout", "cluster"),
    *("data", "tasks", "models"),
    *("core", "launch", "checkpoint", "exchange"),
    *("strategies", "run", "choose", "inspect"),
    *("use", "training", "compare", "commands", "__main__"),
]


def modules() -> dict[str, Path]:
    """Return {module name: file} of all modules of jaxpar."""
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = (ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


def imports() -> dict[str, set[str]]:
    """Return the modules of jaxpar that each module imports, at the top or inside a function.

    The package itself is left out: it imports on first use what users import from it.
    """
    known = modules()
    return {name: imported(path, known) - {name} for name, path in known.items() if name != ROOT.name}


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return {name for name in names if name in known and name != ROOT.name}


def folder(module: str) -> str:
    return module.split(".")[1]


def test_every_folder_has_a_place() -> None:
    assert {folder(name) for name in modules() if name != ROOT.name} == set(ORDER)


def test_folders_import_downwards() -> None:
    place = {name: number for number, name in enumerate(ORDER)}
    upwards = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if place[folder(other)] > place[folder(name)]
    ]
    assert not upwards


def test_the_package_imports_nothing_before_its_first_use() -> None:
    """The functions of the package are those of its modules, and importing it imports neither them nor JAX."""
    assert {name: getattr(jaxpar, name).__module__ for name in jaxpar.LAZY} == jaxpar.LAZY
    assert jaxpar.LAZY.keys() <= set(dir(jaxpar))
    program = "import sys, jaxpar; print([name for name in sys.modules if name.startswith(('jaxpar.', 'jax'))])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert printed.stdout == "['jaxpar']\n", printed.stderr


def test_files_import_without_a_cycle() -> None:
    graph = {name: {o for o in others if not name.startswith(f"{o}.")} for name, others in imports().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, whose message contains the cycle


# Names that several modules define because they implement the same contract.
CONTRACTS = {
    *("build", "decide", "plan", "resources"),  # strategies, models, and executors of pipelines
    *("resolve", "load", "metrics", "sums", "predictions", "main"),  # models; data sources; tasks; scripts
    "predict",  # from Python; the time of programs
    *("SIZES", "DEFAULTS", "NORM_EPS", "TASK"),  # models; tasks
}


def defined(node: ast.stmt) -> set[str]:
    """Return the names of the functions, classes and constants that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return set()
    stored = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return {name for name in stored if name.isupper()}


def test_names_are_unique() -> None:
    """The name of a public function, class or constant is unique in the package, except for the contracts."""
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            for name in defined(node):
                if not name.startswith("_"):
                    places.setdefault(name, []).append(module)
    assert {name for name, found in places.items() if len(found) > 1} == CONTRACTS
