"""Tests the page of `jaxpar serve` in headless Chromium, against a service with fixed answers."""

import base64
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jaxpar.use.serve.guard import render_page, security_headers

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FACTS = {"task": "classification", "model": "bert", "workdir": "runs/</script>", "step": 1780, "columns": ["text"]}
FACTS |= {"generates": False, "ranks": True}
SUBMIT = """<script>
  boxes[0].value = {text};
  boxes[0].dispatchEvent(new KeyboardEvent("keydown", {{key: "Enter", ctrlKey: true, bubbles: true}}));
</script>"""


@contextmanager
def serving(page: str, status: int, answer: list[bytes], asked: list[Any]) -> Iterator[str]:
    """Serve a page, and the parts of an answer to every request, which is added to `asked`. Yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            for name, value in security_headers(page):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(page.encode())

        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(status)
            self.end_headers()
            for part in answer:
                self.wfile.write(part)
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


def submit(folder: Path, text: str, status: int, answer: list[bytes], **facts: Any) -> tuple[str, list[Any]]:
    """Enter a text into the page and press Ctrl-Enter. Return the page then, and the requests."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    page = render_page(FACTS | facts)
    page = page.replace("</html>", SUBMIT.format(text=json.dumps(text)) + "</html>")
    asked: list[Any] = []
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder / 'chromium'}")
    with serving(page, status, answer, asked) as address:
        command = [CHROMIUM, *flags, "--virtual-time-budget=3000", "--dump-dom", address]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return found.partition("<script>")[0], asked


class Inline(HTMLParser):
    """The texts of scripts and styles of a page, and the attributes that a content security policy would forbid."""

    def __init__(self, page: str):
        super().__init__()
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.forbidden: list[str] = []
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.forbidden += [name for name, _ in attrs if name == "style" or name.startswith("on")]
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data: str) -> None:
        if self._tag in self.texts:
            self.texts[self._tag][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


def test_the_policy_allows_the_script_and_the_style_of_the_page_alone() -> None:
    page = render_page(FACTS)
    inline = Inline(page)
    assert inline.forbidden == []
    headers = dict(security_headers(page))
    parts = (part.split(maxsplit=1) for part in headers["Content-Security-Policy"].split(";"))
    policy = dict(parts)
    for tag, texts in inline.texts.items():
        [text] = texts
        digest = subprocess.run(["sha256sum"], input=text.encode(), capture_output=True, check=True).stdout[:64]
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(bytes.fromhex(digest.decode())).decode()}'"
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'")
    assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")


def visible(html: str, name: str) -> list[str]:
    """Return the texts of the elements of a class."""
    return re.findall(rf'class="{name}"[^>]*>([^<]*)<', html)


def test_predictions(tmp_path: Path) -> None:
    top = [{"class": "a<b", "probability": 0.75}, {"class": "c", "probability": 0.25}]
    answer = {"predictions": [{**top[0], "top": top}], "truncated": [0], "step": 1780}
    html, asked = submit(tmp_path, "red cat", 200, [json.dumps(answer).encode()])
    assert asked == [("/predict", {"texts": ["red cat"], "top_k": 3})]
    assert "bert, classification" in html
    assert "step 1,780 of runs/&lt;/script&gt;" in html
    assert visible(html, "number") == ["75.0%", "25.0%"]
    assert re.findall("width: ([^;]*%)", html.partition("<output")[2]) == ["75%", "25%"]
    assert "a&lt;b" in html
    assert "The text is longer than the model allows" in html


def test_streams(tmp_path: Path) -> None:
    """Parts of the answer end within characters and events."""
    events = [{"piece": " 日"}, {"piece": "本"}, {"text": " 日本", "tokens": [1, 2, 3], "end": "length"}]
    sent = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events).encode()
    facts = {"task": "causal_lm", "generates": True}
    html, asked = submit(tmp_path, "a", 200, [sent[i : i + 5] for i in range(0, len(sent), 5)], **facts)
    options = {"max_tokens": 50, "temperature": 0.8, "top_k": 0, "top_p": 1, "seed": 0}
    assert asked == [("/generate", {"prompt": "a", "stream": True, **options})]
    assert visible(html, "new") == [" 日本"]
    assert "3 tokens, longest text reached" in html
    assert visible(html, "error") == []


def test_errors(tmp_path: Path) -> None:
    line = {"error": "texts[0] has 3 characters; it must have at most 2"}
    html, _ = submit(tmp_path, "red", 413, [json.dumps(line).encode()])
    assert visible(html, "error") == ["The text has 3 characters; it must have at most 2"]
    facts = {"task": "causal_lm", "generates": True}
    html, _ = submit(tmp_path, "a", 200, [b'data: {"piece": " b"}\n\n'], **facts)
    assert visible(html, "new") == [" b"]
    assert visible(html, "error") == ["The text broke off: the connection ended"]
