"""The site of the documentation: what its search finds, and what its copy buttons copy."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from scripts import site_hooks
from tests.docs.prose import ROOT


def test_search_finds_guides_and_no_source(site: Path) -> None:
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in entries}
    assert (site / "source/jaxpar/training.py.html").is_file()
    assert not [page for page in boosts if page.endswith(".py.html")]
    first, last = boosts["howto/machines.html"], max(boosts["reference/api.html"], boosts["source/CHANGELOG.html"])
    assert first == boosts["tutorials/train.html"] > boosts["explanation/lessons.html"] > last


# The first page for what a new user might enter.
FIRST = {
    "pip": "howto/install.html",
    "two hosts": "howto/machines.html",
    "inference": "howto/predict.html",
    "torchrun": "howto/machines.html",
    "two machines": "howto/machines.html",
    "horovod": "howto/exchange.html",
    "deepspeed": "howto/exchange.html",
    "fsdp": "howto/exchange.html",
    "csv": "howto/data.html",
    "oom": "howto/memory.html",
    "out of memory": "howto/memory.html",
    "offload": "howto/memory.html",
    "bfloat16": "howto/gpus.html",
    "resume": "howto/resume.html",
    "slow": "howto/slow.html",
    "serve": "howto/serve.html",
    "pipeline": "tutorials/pipeline.html",
    "fine-tune": "howto/pretrained.html",
    "finetuning": "howto/pretrained.html",
    "pretrained": "howto/pretrained.html",
    "own schedule": "howto/own_schedule.html",
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_search_finds_guides_first(site: Path) -> None:
    command = ["node", str(ROOT / "tests" / "docs" / "search.js"), str(site), *FIRST]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert {query: pages[:1] for query, pages in found.items()} == {query: [page] for query, page in FIRST.items()}


def test_copy_buttons_copy_commands_only(site: Path) -> None:
    html = (site / "howto/resume.html").read_text()
    blocks = re.findall(r'<div data-copy="([^"]*)" class="language-console', html)
    markdown = (ROOT / "docs/howto/resume.md").read_text()
    assert len(blocks) == len(re.findall(r"^```console$", markdown, re.MULTILINE))
    copied = "\n".join(map(unescape, blocks))
    assert len(re.findall(r"^\$ ", markdown, re.MULTILINE)) == len(re.findall(r"(?<!\\)\n", copied)) + 1
    assert all(line.removesuffix("\\").strip() in markdown for line in copied.splitlines())
    assert "$ " not in copied
    assert "..." not in copied.splitlines()


def test_commands_of_a_session() -> None:
    session = '$ scripts/train --config=a \\\n    --workdir="b <c>"\nstep 1/2  loss $ 3\n...\n$ cat d\n1\n'
    session += "$ cat > e <<END\n2\nEND\n$ cat e\n2\n"
    assert site_hooks.commands(session) == [
        'scripts/train --config=a \\\n    --workdir="b <c>"',
        "cat d",
        "cat > e <<END\n2\nEND",
        "cat e",
    ]


def test_long_names_in_tables_break_before_words(site: Path) -> None:
    html = (site / "reference/config.html").read_text()
    assert "<code>pipeline.<wbr>num_<wbr>microbatches</code>" in html
    assert "<code>seed</code>" in html
    assert not re.search(r"<[^>]*<wbr>", html)  # none inside a tag
    assert "<wbr>" not in (site / "howto/resume.html").read_text().partition("<table>")[0]


def test_cells_of_wide_tables_have_the_names_of_their_columns(site: Path) -> None:
    html = (site / "explanation/comparison.html").read_text()
    wide = html.partition("<table data-stacked>")[2].partition("</table>")[0]
    columns = [site_hooks.visible(name) for name in re.findall(r"<th>(.*?)</th>", wide)]
    rows = [re.findall(r'<td data-label="(.*?)">', row) for row in wide.partition("<tbody>")[2].split("<tr>")[1:]]
    assert len(columns) > 6
    assert rows == [columns] * len(rows)
    assert "data-stacked" not in (site / "results/plans/scale.html").read_text()  # four narrow columns


def test_a_picture_is_a_link_to_itself(site: Path) -> None:
    html = (site / "results/updates/updates_bert.html").read_text()
    assert re.findall(r'<a href="([^"]+)"><img ', html) == ["../../updates.png"]
    assert (site / "updates.png").is_file()
