"""Tests `jaxpar serve` as a client sees it: answers, streams, mistakes, and 500 concurrent requests."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxpar
from jaxpar.commands.serve import bind
from jaxpar.errors import UserError
from jaxpar.use.serve.app import Service as App
from jaxpar.use.serve.guard import Limits
from tests.selection import slow_except
from tests.use.inference.conftest import TrainedRun
from tests.use.inference.conftest import classifier as classifier
from tests.use.inference.conftest import trained_run as trained_run
from tests.use.serve.service import Service, ask, request, start, stop

CONCURRENT = 500


@pytest.fixture(scope="module")
def service(classifier: Path) -> Iterator[Service]:
    made = start(classifier, "--max_body=20000", "--max_length=5000")
    yield made
    assert stop(made)[0] == 0


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
    assert health["workdir"] == classifier.name
    assert str(classifier.parent) not in str(health)
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
        ({"texts": ["\ud800"]}, 400, "texts[0] is '\\ud800'; it must be valid Unicode, in UTF-8"),
        ({"texts": ["a"], "top_k": 0}, 400, "top_k is 0; it must be from 1 to 10"),
        ({"texts": ["a"], "top_k": True}, 400, "top_k is True; it must be an integer"),
        ({"text": ["a"]}, 400, "'text' is not a key; it must be one of texts, top_k"),
        ({"top_k": 1}, 400, "texts is missing; it must be set"),
        ({"texts": ["a"], "topk": 1}, 400, "'topk' is not a key; it must be one of texts, top_k"),
        ([], 400, "the body is JSON of type list; it must be an object"),
        ({"texts": ["a"] * 257}, 413, "texts has 257 texts; it must have at most 256"),
        ({"texts": ["a" * 5001]}, 413, "texts[0] has 5,001 characters; it must have at most 5,000"),
        ({"texts": ["a" * 3_000_000]}, 413, "the body must have at most 20,000 bytes"),
    ],
)
def test_mistakes(service: Service, values: Any, status: int, line: str) -> None:
    assert ask(service.port, "/predict", values) == (status, {"error": line})


def test_other_mistakes(service: Service) -> None:
    port = service.port
    status, answer = ask(port, "/generate", {"prompt": "a"})
    assert status == 400
    assert "the task of the model is 'classification'" in answer["error"]
    possible = "it must be one of GET /, GET /health, POST /predict, POST /generate"
    refused = {"error": f"the request is POST /predict/; {possible}"}
    assert ask(port, "/predict/", {"texts": ["a"]}) == (404, refused)
    assert ask(port, "/nothing") == (404, {"error": f"the request is GET /nothing; {possible}"})
    assert ask(port, "/predict") == (405, {"error": f"the request is GET /predict; {possible}"})
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
        """Ask for each continuation as a whole and, at the same time, as a stream."""
        bodies = (json.dumps(one | {"stream": is_stream}).encode() for is_stream in (False, True) for one in requests)
        return await asyncio.gather(*(request(service.port, "POST", "/generate", body) for body in bodies))

    answers = asyncio.run(ask_all())
    assert {status for status, _ in answers} == {200}
    for (_, answer), (_, events), completion in zip(answers, answers[len(requests) :], expected, strict=False):
        assert answer == completion._asdict() | {"step": model.trained.step}
        assert events[-1] == answer
        assert all(event.keys() == {"piece"} and event["piece"] for event in events[:-1])
        assert "".join(event["piece"] for event in events[:-1]) == completion.text
        assert len(events) > 2 or len(completion.tokens) < 3
    for wrong, line in (
        ({"prompt": 1}, "prompt is 1; it must be a string"),
        ({"prompt": "a", "max_tokens": 51}, "max_tokens is 51; it must be at most 50"),
        ({"prompt": "a", "top_p": 2}, "top_p is 2; it must be more than 0 and at most 1 (1: all tokens)"),
        ({"prompt": "a", "temperature": 1e-50}, "temperature is 1e-50; it must be 0, or from 1e-05 to 100,000"),
        ({"prompt": "red " * 200}, "the prompt has 2"),
        ({"prompt": "a", "stream": 1}, "stream is 1; it must be true or false"),
    ):
        for extra in ({}, {"stream": True}):
            status, answer = ask(service.port, "/generate", extra | wrong)
            assert (status, answer["error"][: len(line)]) == (400, line)
    assert ask(service.port, "/predict", {"texts": ["red"]})[1]["predictions"][0]["next"]
    assert stop(service) == (0, f"stopped   after {2 * len(requests) + 1} answers")


@pytest.mark.parametrize(
    "task",
    slow_except(["causal_lm", "pairs"], ["classification", "causal_lm", "masked_lm", "token_classification", "pairs"]),
)
def test_the_first_requests_do_not_compile(task: str, trained_run: TrainedRun) -> None:
    compiled: list[str] = []
    model = jaxpar.load(trained_run(task))
    service = App(model, Limits())
    service.warm_up()

    def note(event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG001
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    for number, length in ((1, 1), (1, 4), (2, 10), (5, 30), (1, 300)):
        words = ["red"] * length
        text: Any = " ".join(words)
        service._predict_texts([{"token_classification": words, "pairs": (text, "cat")}.get(task, text)] * number)
    if task == "causal_lm":
        model.generate(["red"], max_tokens=3)
        model.generate(["red", "red red", "blue"], temperature=0.8, top_k=3)
        model.generate("red " * 9, temperature=0.7, top_p=0.5, seed=3)
    assert [event for event in compiled if "backend_compile" in event] == []


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


def test_addresses_that_cannot_be_used(service: Service) -> None:
    for host, port, reason in (
        ("127.0.0.1", service.port, "Address already in use"),
        ("a" * 100, 0, "encoding with 'idna' codec failed"),
    ):
        rule = rf"--host is '{host[:70]}.* and --port is {port}; they must be a free port of this machine: {reason}"
        with pytest.raises(UserError, match=rule):
            bind(host, port)
