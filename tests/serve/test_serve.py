"""Tests scripts/serve as a client sees it: answers, mistakes, 500 concurrent requests, and SIGTERM."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jaxpar
from tests.inference.conftest import TrainedRun
from tests.inference.conftest import classifier as classifier
from tests.inference.conftest import trained_run as trained_run

ROOT = Path(__file__).parents[2]

CONCURRENT = 500


class Service(NamedTuple):
    """A service and its port."""

    process: "subprocess.Popen[str]"
    port: int


def start(workdir: Path, *flags: str) -> Service:
    """Start the service and return it when it serves."""
    command = [sys.executable, "-P", str(ROOT / "scripts" / "serve.py"), f"--workdir={workdir}", "--port=0", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"serving   http://127.0.0.1:(\d+)", line):
            return Service(process, int(found[1]))
    raise AssertionError("".join(lines))


def stop(service: Service) -> tuple[int, str]:
    """Send SIGTERM, and return the exit code and the last line."""
    service.process.send_signal(signal.SIGTERM)
    output = service.process.communicate(timeout=60)[0]
    return service.process.returncode, output.splitlines()[-1] if output else ""


@pytest.fixture(scope="module")
def service(classifier: Path) -> Iterator[Service]:
    made = start(classifier, "--max_body=20000", "--max_length=5000")
    yield made
    assert stop(made)[0] == 0


async def request(
    port: int, method: str, path: str, body: bytes = b"", kind: str = "application/json"
) -> tuple[int, Any]:
    """Send a request, and return the status and the JSON value, or the text, of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: {kind}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    first, _, content = answer.decode().partition("\r\n\r\n")
    is_json = "application/json" in first
    return int(first.split()[1]), json.loads(content) if is_json else content


def ask(port: int, path: str, values: Any = None) -> tuple[int, Any]:
    """Send one request: POST with JSON values, or GET without."""
    if values is None:
        return asyncio.run(request(port, "GET", path))
    return asyncio.run(request(port, "POST", path, json.dumps(values).encode()))


def test_answers_equal_those_from_python(service: Service, classifier: Path) -> None:
    texts = ["red cat", "a blue dog and a green bird", "", "red " * 100]
    status, answer = ask(service.port, "/predict", {"texts": texts, "top_k": 2})
    assert status == 200
    expected = jaxpar.load(classifier).predict(texts, top_k=2)
    for ours, theirs in zip(answer["predictions"], json.loads(json.dumps(expected)), strict=True):
        assert ours["class"] == theirs["class"]
        assert [one["class"] for one in ours["top"]] == [one["class"] for one in theirs["top"]]
        assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-5)
    assert answer["truncated"] == [3]
    assert "top" not in ask(service.port, "/predict", {"texts": ["red"]})[1]["predictions"][0]


def test_health_and_page(service: Service, classifier: Path) -> None:
    ask(service.port, "/predict", {"texts": ["red"]})
    status, health = ask(service.port, "/health")
    assert status == 200
    assert (health["status"], health["task"], health["waiting"]) == ("ok", "classification", 0)
    assert health["workdir"] == str(classifier)
    assert health["p99_ms"] >= health["p50_ms"] > 0
    status, page = ask(service.port, "/")
    assert status == 200
    facts = json.loads(re.search(r"const facts = (\{.*\});", page)[1])  # type: ignore[index]
    assert (facts["task"], facts["columns"], facts["generates"]) == ("classification", ["text"], False)
    assert not re.search(r"(src|href)=\"(?!data:)", page), "the page loads nothing"


@pytest.mark.parametrize(
    ("values", "status", "line"),
    [
        ({"texts": "red"}, 400, "texts is 'red'; it must be a list"),
        ({"texts": []}, 400, "texts is []; it must be a non-empty list of texts"),
        ({"texts": [1]}, 400, "texts[0] is 1; they must be texts"),
        ({"texts": [["a", "b"]]}, 400, "texts[0] is ['a', 'b']; they must be texts"),
        ({"texts": ["\ud800"]}, 400, "texts[0] is '\\ud800'; it must be Unicode text, without unpaired surrogates"),
        ({"texts": ["a"], "top_k": 0}, 400, "top_k is 0; it must be from 1 to 10"),
        ({"texts": ["a"], "top_k": True}, 400, "top_k is True; it must be an integer"),
        ({"text": ["a"]}, 400, "'text' is not a key; it must be one of texts, top_k"),
        ({"top_k": 1}, 400, "texts is missing; it must be set"),
        ({"texts": ["a"], "topk": 1}, 400, "'topk' is not a key; it must be one of texts, top_k"),
        ([], 400, "the body is JSON of type list; it must be an object"),
        ({"texts": ["a"] * 257}, 413, "texts has 257 texts; it must have at most 256"),
        ({"texts": ["a" * 5001]}, 413, "texts[0] has 5,001 characters; it must have at most 5,000"),
        ({"texts": ["a" * 30000]}, 413, "the body must have at most 20,000 bytes"),
    ],
)
def test_mistakes(service: Service, values: Any, status: int, line: str) -> None:
    assert ask(service.port, "/predict", values) == (status, {"error": line})


def test_other_mistakes(service: Service) -> None:
    port = service.port
    status, answer = ask(port, "/generate", {"prompt": "a"})
    assert status == 400
    assert "the task of the model is 'classification'" in answer["error"]
    assert ask(port, "/nothing") == (404, {"error": "Not Found"})
    assert ask(port, "/predict") == (405, {"error": "Method Not Allowed"})
    status, answer = asyncio.run(request(port, "POST", "/predict", b"{"))
    assert (status, answer["error"].partition(":")[0]) == (400, "the body must be JSON")
    status, answer = asyncio.run(request(port, "POST", "/predict", b"\x89PNG", kind="image/png"))
    assert (status, answer) == (415, {"error": "the content type is 'image/png'; it must be 'application/json'"})


def test_continuations_do_not_depend_on_other_requests(trained_run: TrainedRun) -> None:
    """Requests of different lengths, samplings and seeds at the same time get the texts that Python gets one by one."""
    workdir = trained_run("causal_lm")
    model = jaxpar.load(workdir)
    requests: list[dict[str, Any]] = [
        {"prompt": "red", "max_tokens": 5},
        {"prompt": "blue cat", "max_tokens": 3},
        *({"prompt": "red", "max_tokens": 6, "temperature": 2.0, "seed": seed} for seed in (1, 2, 1)),
        {"prompt": "", "max_tokens": 4, "temperature": 1.0, "top_k": 3, "top_p": 0.9},
    ]
    expected = [
        model.generate(one["prompt"], **{key: one[key] for key in one if key != "prompt"})[0] for one in requests
    ]
    service = start(workdir, "--max_tokens=50")

    async def ask_all() -> list[tuple[int, Any]]:
        bodies = (json.dumps(one).encode() for one in requests)
        return await asyncio.gather(*(request(service.port, "POST", "/generate", body) for body in bodies))

    for (status, answer), completion in zip(asyncio.run(ask_all()), expected, strict=True):
        assert status == 200
        assert (answer["prompt"], answer["text"]) == (completion.prompt, completion.text)
        assert (answer["tokens"], answer["end"]) == (completion.tokens, completion.end)
    for wrong, line in (
        ({"prompt": 1}, "prompt is 1; it must be a string"),
        ({"prompt": "a", "max_tokens": 51}, "max_tokens is 51; it must be at most 50"),
        ({"prompt": "a", "top_p": 2}, "top_p is 2; it must be more than 0 and at most 1 (1: all tokens)"),
        ({"prompt": "red " * 200}, "the prompt has 2"),
    ):
        status, answer = ask(service.port, "/generate", wrong)
        assert (status, answer["error"][: len(line)]) == (400, line)
    assert ask(service.port, "/predict", {"texts": ["red"]})[1]["predictions"][0]["next"]
    assert stop(service) == (0, f"stopped   after {len(requests) + 1} answers")


def test_none_of_500_concurrent_requests_is_lost(service: Service, classifier: Path) -> None:
    """Each request has a text of its own, whose prediction is known."""
    colors = ("red", "green", "blue", "none")
    texts = [" ".join(colors[(number // 4**place) % 4] for place in range(6)) for number in range(CONCURRENT)]
    expected = jaxpar.load(classifier).predict(texts)

    async def ask_all() -> list[tuple[int, Any]]:
        bodies = (json.dumps({"texts": [text]}).encode() for text in texts)
        return await asyncio.gather(*(request(service.port, "POST", "/predict", body) for body in bodies))

    answers = asyncio.run(ask_all())
    assert {status for status, _ in answers} == {200}
    for (_, answer), prediction in zip(answers, expected, strict=True):
        assert answer["predictions"][0]["probability"] == pytest.approx(prediction["probability"], abs=1e-5)


def test_sigterm_answers_what_was_accepted(classifier: Path) -> None:
    service = start(classifier)

    async def ask_and_stop() -> list[tuple[int, Any]]:
        body = json.dumps({"texts": ["red"] * 200}).encode()
        tasks = [asyncio.create_task(request(service.port, "POST", "/predict", body)) for _ in range(4)]
        while (await request(service.port, "GET", "/health"))[1]["answered"] == 0:
            pass
        service.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(ask_and_stop())
    assert [status for status, _ in answers] == [200] * 4
    assert all(len(answer["predictions"]) == 200 for _, answer in answers)
    output = service.process.communicate(timeout=60)[0]
    assert service.process.returncode == 0
    assert output.splitlines()[-1] == "stopped   after 4 answers"
