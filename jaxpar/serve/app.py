"""The routes of the service, as an ASGI application.

    POST /predict    {"texts": ["a", "b"], "top_k": 1}
                     ->  {"predictions": [{...}, {...}], "truncated": [], "step": 780}
    POST /generate   {"prompt": "a", "max_tokens": 50, "temperature": 0.8, "top_k": 0, "top_p": 1, "seed": 0}
                     ->  {"text": "...", "tokens": [...], "end": "length", "step": 780}
    GET  /health     the model, the number of waiting texts, and latencies
    GET  /           a page to try the model in

Mistakes are answered with {"error": LINE} and a 4xx status, a full queue with 503.
"""

import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jaxpar.data import Labels
from jaxpar.data.text import buckets_of
from jaxpar.errors import UserError
from jaxpar.files import parse_json
from jaxpar.inference.generate import Completion, Generator
from jaxpar.inference.generate import Request as Continuation
from jaxpar.inference.loaded import LoadedModel, Text
from jaxpar.inference.sampling import Sampling
from jaxpar.serve.batching import Batcher, Latencies, QueueFull
from jaxpar.tasks import Prediction

MOST_CHOICES = 10  # that a prediction lists: programs differ by their number, so all predictions are computed with it
Endpoint = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class Limits(NamedTuple):
    """The limits of a request, and of all requests together.

    Attributes:
      body_bytes: the largest body of a request.
      characters: the longest text.
      texts: the most texts of a request.
      waiting: the most texts that wait.
      tokens: the longest continuation.
    """

    body_bytes: int = 2**20
    characters: int = 100_000
    texts: int = 256
    waiting: int = 1024
    tokens: int = 1024


class Service:
    """A model, the queues in front of it, and the routes."""

    def __init__(self, model: LoadedModel, limits: Limits):
        """Prepare the service. Raises UserError if the model does not read texts."""
        self._model, self._limits, self._trained = model, limits, model.trained
        if self._trained.info.kind != "text" or self._trained.tokenizer is None:
            raise UserError(
                f"--workdir is {str(self._trained.workdir)!r}, whose data is {self._trained.config.data.source} "
                f"({self._trained.info.kind}); it must be a run on texts"
            )
        self._generator: Generator | None = None
        if self._trained.task.head == "causal_lm":
            self._generator = model.generator
        largest = 4 * model.predictor.batch_size  # sorted by length, and cut into batches
        self._most_choices = MOST_CHOICES if self._trained.task.ranks_choices else 1
        self._predict = Batcher(
            self._predict_texts, largest=largest, most_waiting=limits.waiting, key=lambda _text: None
        )
        self._generate = Batcher(
            self._continue,
            largest=model.predictor.batch_size,
            most_waiting=limits.waiting,
            key=lambda request: request.sampling._replace(seed=0),
        )
        self.latencies = Latencies()

    def warm_up(self) -> None:
        """Compile programs, so that the first requests do not wait for them."""
        is_words = self._trained.task.labels is Labels.TAGS
        is_pair = len(self._model.columns) == 2
        for length in buckets_of(self._trained.config):
            text = " ".join(["a"] * length)
            example = text.split() if is_words else (text, "a") if is_pair else text
            for number in self._model.predictor.sizes:
                self._predict_texts([example] * number)
        if self._generator is not None:
            self._generator([""], 2, Sampling())

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/predict", self._route(self._answer_predict), methods=["POST"]),
            Route("/generate", self._route(self._answer_generate), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _error})

    # ---- routes --------------------------------------------------------------------------------------

    async def _page(self, _request: Request) -> Response:
        page = files("jaxpar.serve").joinpath("page.html").read_text("utf-8")
        facts = {
            "task": self._trained.task.name,
            "model": self._trained.config.model.name,
            "workdir": str(self._trained.workdir),
            "step": self._trained.step,
            "columns": list(self._model.columns),
            "generates": self._generator is not None,
            "ranks": self._trained.task.ranks_choices,
        }
        return HTMLResponse(page.replace("{{facts}}", json.dumps(facts).replace("<", "\\u003c")))

    async def _health(self, _request: Request) -> Response:
        def milliseconds(percent: float) -> float | None:
            seconds = self.latencies.percentile(percent)
            return None if seconds is None else round(1000 * seconds, 1)

        return JSONResponse(
            {
                "status": "ok",
                "workdir": str(self._trained.workdir),
                "step": self._trained.step,
                "task": self._trained.task.name,
                "waiting": self._predict.num_waiting + self._generate.num_waiting,
                "answered": self.latencies.num_answered,
                "p50_ms": milliseconds(50),
                "p99_ms": milliseconds(99),
            }
        )

    def _route(self, answer: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that answers a JSON object with a JSON object."""

        async def route(request: Request) -> Response:
            begin = time.perf_counter()
            try:
                response = JSONResponse(await answer(await self._read(request)))
            except UserError as error:
                return _refusal(400, str(error))
            except QueueFull:
                line = f"{self._limits.waiting} texts wait already; try again later"
                return JSONResponse({"error": line}, 503, {"Retry-After": "1"})
            except (HTTPException, ClientDisconnect):
                raise
            except Exception as error:  # a fault of the service; it continues
                traceback.print_exc(file=sys.stderr)
                return _refusal(500, f"the model failed: {type(error).__name__}")
            self.latencies.add(begin)
            return response

        return route

    async def _read(self, request: Request) -> Mapping[str, Any]:
        """Return the JSON object in the body. Raises HTTPException if the body is too large or another type."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
        if not kind.endswith("json"):
            raise HTTPException(415, f"the content type is {kind!r}; it must be 'application/json'")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limits.body_bytes:
                raise HTTPException(413, f"the body must have at most {self._limits.body_bytes:,} bytes")
        try:
            values = parse_json(body.decode())
        except ValueError as error:  # of UTF-8 or JSON
            raise UserError(f"the body must be JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"the body is JSON of type {type(values).__name__}; it must be an object")
        return values

    async def _answer_predict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        _check_keys(values, {"texts"}, {"top_k"})
        texts, top_k = values["texts"], _number(values, "top_k", 1, int)
        if not isinstance(texts, list):
            raise UserError(f"texts is {texts!r:.60}; it must be a list")
        if len(texts) > self._limits.texts:
            raise HTTPException(413, f"texts has {len(texts):,} texts; it must have at most {self._limits.texts}")
        for number, text in enumerate(texts):
            self._check_text(f"texts[{number}]", text)
        if not 1 <= top_k <= self._most_choices:
            raise UserError(f"top_k is {top_k}; it must be from 1 to {self._most_choices}")
        self._model.check(texts, "texts")
        answers = await self._predict(texts)
        predictions = [_with_choices(prediction, top_k) for prediction, _ in answers]
        is_truncated = [is_long for _, is_long in answers]
        truncated = [number for number, is_long in enumerate(is_truncated) if is_long]
        return {"predictions": predictions, "truncated": truncated, "step": self._trained.step}

    async def _answer_generate(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if self._generator is None:
            raise UserError(
                f"the task of the model is {self._trained.task.name!r}; to generate, it must be 'causal_lm'"
            )
        _check_keys(values, {"prompt"}, {"max_tokens", "temperature", "top_k", "top_p", "seed"})
        prompt, max_tokens = values["prompt"], _number(values, "max_tokens", min(100, self._limits.tokens), int)
        if not isinstance(prompt, str):
            raise UserError(f"prompt is {prompt!r:.60}; it must be a string")
        self._check_text("prompt", prompt)
        if max_tokens > self._limits.tokens:
            raise UserError(f"max_tokens is {max_tokens}; it must be at most {self._limits.tokens}")
        sampling = Sampling(
            _number(values, "temperature", 0.0, float),
            _number(values, "top_k", 0, int),
            _number(values, "top_p", 1.0, float),
            _number(values, "seed", 0, int),
        )
        [completion] = await self._generate([self._generator.request(prompt, max_tokens, sampling)])
        return {**completion._asdict(), "prompt": prompt, "step": self._trained.step}

    def _check_text(self, name: str, text: Any) -> None:
        parts = [part for part in (text if isinstance(text, list) else [text]) if isinstance(part, str)]
        size = sum(map(len, parts))
        if size > self._limits.characters:
            raise HTTPException(
                413, f"{name} has {size:,} characters; it must have at most {self._limits.characters:,}"
            )

    def _predict_texts(self, texts: list[Text]) -> list[tuple[Prediction, bool]]:
        """Return the prediction for each text, with the most choices, and whether it was truncated."""
        predictions = self._model.predict(texts, top_k=self._most_choices)
        return list(zip(predictions, self._model.is_truncated(texts), strict=True))

    def _continue(self, requests: list[Continuation]) -> list[Completion]:
        assert self._generator is not None
        completions = [Completion("", "", [], "") for _ in requests]
        for piece in self._generator.stream_requests(requests):
            completions[piece.number] = completions[piece.number].extended(piece)
        return completions


async def _error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, error.detail)


def _refusal(status: int, line: str) -> Response:
    return JSONResponse({"error": line}, status)


def _with_choices(value: Any, number: int) -> Any:
    """Return a prediction that lists at most `number` choices."""
    if isinstance(value, list):
        return [_with_choices(one, number) for one in value]
    if not isinstance(value, dict):
        return value
    rest = {name: _with_choices(one, number) for name, one in value.items() if name != "top"}
    return {**rest, "top": value["top"][:number]} if number > 1 and "top" in value else rest


def _check_keys(values: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    """Raise UserError if the object lacks a key or has one that is unknown."""
    for name in sorted(values.keys() - required - optional):
        raise UserError(f"{name!r:.60} is not a key; it must be one of {', '.join(sorted(required | optional))}")
    for name in sorted(required - values.keys()):
        raise UserError(f"{name} is missing; it must be set")


def _number(values: Mapping[str, Any], name: str, default: Any, kind: type) -> Any:
    """Return a number of the object. Raises UserError if it is of another type."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise UserError(f"{name} is {value!r:.60}; it must be {'an integer' if kind is int else 'a number'}")
    return value
