"""Pages in a browser: nothing is cut on a phone or a desktop, except in boxes that scroll."""

import functools
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from jaxpar.commands.compare_runs import comparison_page
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table
from jaxpar.use.pages.recorded import read_run
from tests import test_compare
from tests.docs.prose import ROOT
from tests.use.pages import test_run_page
from tests.use.pages.recorded_runs import write_run

WIDTHS = (390, 1400)
PAGES = (
    "report.html",
    "compare.html",
    "runs.html",
    "site/index.html",
    "site/howto/resume.html",
    "site/explanation/pipelines.html",
    "site/explanation/comparison.html",
    "site/reference/commands.html",
    "site/reference/config.html",
    "site/reference/exchanges.html",
    "site/reference/models.html",
    "site/results/published/bloom.html",
    "site/results/strategies/strategies.html",
)
# A picture, a label and a text that are cut, and a table that scrolls.
CUT = """<!DOCTYPE html><head></head><svg width="2000" height="9" style="max-width: none; display: block"></svg>
<svg width="90" height="20"><text x="80" y="15">label</text></svg>
<p style="width: 50px; overflow: hidden; white-space: nowrap">a text without an end</p>
<div style="overflow-x: auto"><table style="width: 3000px"><tr><td>wide</td></tr></table></div>"""


class Server(ThreadingHTTPServer):
    """Serves the files of a folder to measure.html, and keeps what it posts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("localhost", 0), functools.partial(Handler, directory=str(folder)))
        self.posted: queue.Queue[bytes] = queue.Queue()


class Handler(SimpleHTTPRequestHandler):
    """Answers requests, and logs nothing."""

    server: Server

    def do_POST(self) -> None:
        self.server.posted.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(site: Path, tmp_path: Path) -> Iterator[Server]:
    """Return a server of the site, a report, and comparisons of strategies and of runs."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "site").symlink_to(site)
    runs = [write_run(tmp_path / name) for name in ("run", "other")]
    table = make_table("1f1b", num_devices=4, num_microbatches=16, num_chunks=1)
    planned = list(simulate_table(table, Times(1, 1, 1)).timeline)
    (folder / "report.html").write_text(test_run_page.page_of(runs[0], planned=planned)[0])
    (folder / "runs.html").write_text(comparison_page([read_run(run) for run in runs]))
    (folder / "compare.html").write_text(test_compare.page_of(test_compare.OUTCOMES, test_compare.columns()))
    (folder / "cut.html").write_text(CUT)
    shutil.copy(ROOT / "tests" / "docs" / "measure.html", folder)
    with Server(folder) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_nothing_is_cut(server: Server, tmp_path: Path) -> None:
    asked = quote(json.dumps({"widths": WIDTHS, "pages": [*PAGES, "cut.html"]}))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--remote-debugging-port=0", f"http://localhost:{server.server_port}/measure.html#{asked}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as browser:
        try:
            found = json.loads(server.posted.get(timeout=120))
        finally:
            browser.terminate()
    assert set(found) == {f"{page} {width}" for page in (*PAGES, "cut.html") for width in WIDTHS}
    expected = ["svg ", "text label", "P a text without an end"]
    assert {page: cut for page, cut in found.items() if cut} == {"cut.html 390": expected, "cut.html 1400": expected}
