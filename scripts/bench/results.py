"""Runs benchmarks again and records what they print, or writes the pages of all recorded results.

    scripts/python scripts/bench/results.py [NAME ...]

The results are in scripts/bench/results, a JSON file for each benchmark: the folder and the title of its page, what to
conclude, its commands, hardware, software and date, its pictures with what they show, and a table of `columns` and
`rows`.

With names, their commands run one after the other, and the rows that they show (tables.py) replace the table, with the
hardware, the software and the date of this run. All rows of a result have the same columns. Two kinds of commands show
no rows: if the result names a `table`, a file in Markdown that its commands write, the columns of the result are
read from it again; otherwise the text that they print is recorded as `output`. What to conclude is for a person to
write.

docs/results has the pages, one for each result, and an index of them; test_reference.py of the tests compares them
with what this script would write.
"""

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from jaxpar.command_line import Parser
from jaxpar.compare.report import BAR, markdown_table
from jaxpar.errors import UserError, exit_code, nearest
from jaxpar.run.report import commit, processor, versions
from scripts.bench import tables

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "bench" / "results"
PAGES = ROOT / "docs" / "results"
WIDTH = 100  # of a line of a document
GPUS = """
import jax

devices = jax.devices()
print(f"{len(devices)} x {devices[0].device_kind}" if devices[0].platform != "cpu" else "")
"""  # for a process of its own, since a process that has found GPUs keeps most of their memory
NOTE = "`scripts/python scripts/bench/results.py` generates this page from the recorded results."


def main() -> None:
    """Run the named benchmarks, and write all pages."""
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results to record again")
    for name in parser.parse().names:
        path = FOLDER / f"{name}.json"
        if not path.is_file():
            known = [path.stem for path in FOLDER.glob("*.json")]
            hint = nearest(name, known)
            raise UserError(f"NAME is {name!r}; it must be a file of {FOLDER.relative_to(ROOT)}{hint and '.' + hint}")
        recorded = record(json.loads(path.read_text()))
        path.write_text(format_json(recorded))
    for name, text in pages().items():
        (PAGES / name).parent.mkdir(exist_ok=True)
        (PAGES / name).write_text(text)


def record(result: Mapping[str, Any]) -> dict[str, Any]:
    """Run the commands of a result, and return it with their rows or text, and with this machine and day."""
    if not result["commands"]:
        raise UserError(f"NAME is that of {result['title']!r}, which has no commands; it must have some")
    where = {"hardware": hardware(), "software": software(), "date": f"{datetime.date.today()}"}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        path.touch()
        search = os.pathsep.join([os.environ["PATH"], str(ROOT / "scripts")])  # finds `jaxpar`, unless it is installed
        environment = {**os.environ, "PATH": search, tables.ROWS: str(path)}
        for command in result["commands"]:
            ran = subprocess.run(command, shell=True, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
            if ran.returncode:
                raise UserError(f"{command!r} ended with exit code {ran.returncode}; it must end with 0")
            lines += ran.stdout.splitlines()
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    if "table" in result:
        rows = read_markdown(ROOT / result["table"], result["columns"])
    kept = {key: value for key, value in result.items() if key not in ("columns", "rows", "output")}
    if not rows:
        return {**kept, **where, "output": lines}
    columns = list(rows[0])
    if others := [row for row in rows if list(row) != columns]:
        raise UserError(f"the columns of a row are {list(others[0])}; they must be those of the first row, {columns}")
    return {**kept, **where, "columns": columns, "rows": [list(row.values()) for row in rows]}


def read_markdown(path: Path, wanted: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of the first table in a file. wanted: its columns to read."""
    lines = dropwhile(lambda line: not line.startswith("|"), path.read_text().splitlines())
    table = [line[1:-1] for line in takewhile(lambda line: line.startswith("|"), lines)]
    columns, _, *rows = ([cell.strip().replace(BAR, "|") for cell in re.split(r"(?<!\\)\|", line)] for line in table)
    if missing := set(wanted) - set(columns):
        raise UserError(f"{path} has no column {sorted(missing)[0]!r}; it must be one of {', '.join(columns)}")
    return [{column: row[columns.index(column)] for column in wanted} for row in rows]


def hardware() -> str:
    """Return the GPUs of this machine, if it has any, and its processor and number of cores."""
    gpus = subprocess.run([sys.executable, "-c", GPUS], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    return ", ".join(filter(None, [gpus, processor()]))


def software() -> str:
    """Return the versions that a result depends on, and the commit of jaxpar."""
    found, of_jaxpar = versions(), commit()
    found["jaxpar"] += f" at {of_jaxpar[:8]}" if of_jaxpar else ""
    return ", ".join(f"{name} {found[name]}" for name in ("jaxpar", "python", "jax", "jaxlib"))


def read() -> dict[str, dict[str, Any]]:
    """Return all results, in the order in which pages show them."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: item[1]["order"]))


def pages() -> dict[str, str]:
    """Return the text of each page by its path in PAGES: the index, and a page of each result."""
    found = read()
    lines = ["# Results", wrapped(INDEX)]
    for folder, title in FOLDERS.items():
        of_folder = [(name, result) for name, result in found.items() if result["folder"] == folder]
        items = (f"- [{result['title']}]({folder}/{name}.md), {result['date']}" for name, result in of_folder)
        lines += [f"## {title}", "\n".join(items)]
    of_results = {f"{result['folder']}/{name}.md": page(result) for name, result in found.items()}
    return {"index.md": "\n\n".join([*lines, wrapped(NOTE)]) + "\n", **of_results}


FOLDERS = {
    "strategies": "Strategies compared",
    "cpu": "Training on CPUs",
    "gpu": "One GPU",
    "compiled": "Programs for absent GPUs",
    "pipelines": "Pipelines",
    "exchanges": "Exchanges",
    "updates": "Asynchronous updates",
    "swarm": "Swarms, and several runs",
    "plans": "Predicted time and memory",
    "certificates": "Certificates",
    "faults": "Killed processes",
}
INDEX = (
    "Each page has one benchmark of jaxpar: what to conclude, the command that repeats it, the hardware, and the "
    "numbers. [Published results](published.md) compares jaxpar with what papers and projects measured. The "
    "[glossary](../reference/glossary.md) explains terms such as *exchange*, *remat* and *lockstep*. *The quickstart* "
    "is a small BERT that learns from scratch to classify words by their definitions (`configs/quickstart.py`). "
    "Hardware lines without a jaxlib version were written by hand."
)


def page(result: Mapping[str, Any]) -> str:
    """Return the page of a result: the conclusion, the commands, where and when they ran, and the numbers."""
    commands = "\n".join(f"$ {command}" for command in map(broken, result["commands"]))
    where = f"{result['hardware']}; {result['software']}; {result['date']}."
    if "output" in result:
        shown = "```text\n" + "\n".join(result["output"]) + "\n```"
    else:
        shown = "\n".join(markdown_table(result["columns"], result["rows"]))
    parts = [f"# {result['title']}", wrapped(result["conclusion"])]
    parts += [f"```console\n{commands}\n```"] if commands else []
    drawn = [f"![{what}](../../{picture})" for picture, what in result.get("pictures", {}).items()]
    return "\n\n".join([*parts, wrapped(where), *drawn, shown, wrapped(NOTE)]) + "\n"


def broken(command: str) -> str:
    """Return a command in lines of at most WIDTH characters, as a shell continues them."""
    if len(command) + 2 <= WIDTH:
        return command
    lines, line = [], ""
    for word in shlex.split(command):
        quoted = shlex.quote(word) if " " in word else word
        if line and len(line) + len(quoted) + 5 > WIDTH:
            lines.append(line)
            line = "   "
        line = f"{line} {quoted}" if line else quoted
    return " \\\n".join([*lines, line])


def wrapped(text: str) -> str:
    """Return a text with lines of at most WIDTH characters. Empty lines separate its paragraphs."""
    fill = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False).fill
    return "\n\n".join(map(fill, text.split("\n\n")))


def format_json(result: Mapping[str, Any]) -> str:
    """Return JSON with a line for each key, and for each row or line of output."""
    lines = []
    for key, value in result.items():
        if key in ("rows", "output", "commands") and value:
            inner = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in value)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(exit_code(main))
