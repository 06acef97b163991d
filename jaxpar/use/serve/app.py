"""The routes of the service, as an ASGI application.

    POST /predict    {"texts": ["a", "b"], "top_k": 1}
                     ->  {"predictions": [{...}, {...}], "truncated": [], "step": 780}
    POST /generate   {"prompt": "a", "max_tokens": 50, "temperature": 0.8, "top_k": 0, "top_p": 1, "seed": 0}
                     ->  {"text": "...", "tokens": [...], "end": "length", "step": 780}
                     {"prompt": "a", "stream": true}
                     ->  data: {"piece": " sma"}, data: {"piece": "ll"}, ..., data: {"text": "...", ...}
    GET  /health     the model, the number of waiting texts, and latencies
    GET  /           a page to try the model in

Mistakes are answered with {"error": LINE} and a 4xx status, a full queue with 503.
"""

import asyncio
import contextlib
import json
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxpar.errors import UserError
from jaxpar.tasks import Prediction
from jaxpar.use.inference.api import InferenceModel, Text
from jaxpar.use.inference.generate import Completion, Sampling, TextPiece
from jaxpar.use.serve import guard
from jaxpar.use.serve.batching import Batcher, Continuations, Latencies, QueueFull

DEFAULT_TOKENS = 100  # length of a continuation
MOST_CHOICES = 10  # that a prediction lists: programs differ by their number, so all predictions are computed with it
Endpoint = Callable[[Mapping[str, Any]], Coroutine[Any, Any, Response]]


class Service:
    """A model, the queues in front of it, and the routes."""

    def __init__(self, model: InferenceModel, limits: guard.Limits):
        """Prepare the service. Raises UserError if the model does not read texts."""
        self._model, self._limits, self._trained = model, limits, model.trained
        task, config = self._trained.task, self._trained.config
        if self._trained.info.kind != "text" or self._trained.tokenizer is None:
            raise UserError(
                f"--workdir is {str(self._trained.workdir)!r}, whose data is {config.data.source} "
                f"({self._trained.info.kind}); it must be a run on texts"
            )
        size, waiting = model.predictor.batch_size, limits.waiting
        self._continuations: Continuations | None = None
        if task.head == "causal_lm":
            self._continuations = Continuations(model.generator, largest=size, most_waiting=waiting)
        self._default_tokens = min(DEFAULT_TOKENS, limits.tokens)
        self._most_choices = MOST_CHOICES if task.ranks_choices else 1
        # Texts are sorted by length, and cut into batches.
        self._predict = Batcher(self._predict_texts, largest=4 * size, most_waiting=waiting)
        self._facts = {
            "task": task.name,
            "model": config.model.name,
            "workdir": self._trained.workdir.resolve().name,  # the path is nobody's business
            "step": self._trained.step,
            "columns": list(model.columns),
            "generates": self._continuations is not None,
            "ranks": task.ranks_choices,
        }
        self._page = guard.render_page(self._facts)
        self.headers = guard.security_headers(self._page)
        self.latencies = Latencies()

    def warm_up(self) -> None:
        """Compile programs, so that the first requests do not wait for them."""
        self._model.warm_up(self._most_choices)
        if self._continuations is not None:
            self._model.generator.warm_up(self._model.predictor.batch_size, self._default_tokens)

    def app(self, host: str, allowed_hosts: Collection[str]) -> Starlette:
        """Return the application for the hosts of `Guard`."""
        routes = [
            Route("/", self._answer_page),
            Route("/health", self._health),
            Route("/predict", self._route(self._answer_predict), methods=["POST"]),
            Route("/generate", self._route(self._answer_generate), methods=["POST"]),
        ]
        middleware = [Middleware(guard.Guard, host=host, allowed=allowed_hosts)]
        app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _error})
        app.router.redirect_slashes = False  # /predict/ is another path
        return app

    # ---- routes --------------------------------------------------------------------------------------

    async def _answer_page(self, _request: Request) -> Response:
        return HTMLResponse(self._page)

    async def _health(self, _request: Request) -> Response:
        waiting = self._predict.num_waiting + (self._continuations.num_waiting if self._continuations else 0)
        p50, p99 = self.latencies.percentile(50), self.latencies.percentile(99)
        return JSONResponse(
            {
                "status": "ok",
                **{name: value for name, value in self._facts.items() if name in ("workdir", "step", "task")},
                "waiting": waiting,
                "answered": self.latencies.num_answered,
                "p50_ms": None if p50 is None else round(1000 * p50, 1),
                "p99_ms": None if p99 is None else round(1000 * p99, 1),
            }
        )

    def _route(self, answer: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that answers a JSON object."""

        async def route(request: Request) -> Response:
            begin = time.perf_counter()
            try:
                response = await _unless_gone(request, answer(await guard.read_object(request, self._limits)))
            except UserError as error:
                return guard.refusal(400, str(error))
            except QueueFull:
                line = f"the queue is full ({self._limits.waiting} texts); try again later"
                return guard.refusal(503, line, {"Retry-After": "1"})
            except ClientDisconnect:
                return guard.refusal(400, "the client has disconnected")
            except HTTPException:
                raise
            except Exception as error:  # a fault of the service; it continues
                return guard.refusal(500, failure(error))
            if isinstance(response, EventStream):
                response.on_end = lambda: self.latencies.add(begin)
            else:
                self.latencies.add(begin)
            return response

        return route

    async def _answer_predict(self, values: Mapping[str, Any]) -> Response:
        guard.check_keys(values, {"texts"}, {"top_k"})
        top_k, texts = guard.take(values, "top_k", "an integer", 1), guard.take(values, "texts", "a list")
        if len(texts) > self._limits.texts:
            raise HTTPException(413, f"texts has {len(texts):,} texts; it must have at most {self._limits.texts}")
        for number, text in enumerate(texts):
            self._check_text(f"texts[{number}]", text)
        if not 1 <= top_k <= self._most_choices:
            rule = f"from 1 to {self._most_choices}" if self._most_choices > 1 else "1: the task has no choices"
            raise UserError(f"top_k is {top_k!r:.60}; it must be {rule}")
        self._model.check(texts, "texts")
        answers = await self._predict(texts)
        predictions = [_with_choices(prediction, top_k) for prediction, _ in answers]
        truncated = [number for number, (_, is_long) in enumerate(answers) if is_long]
        return JSONResponse({"predictions": predictions, "truncated": truncated, "step": self._trained.step})

    async def _answer_generate(self, values: Mapping[str, Any]) -> Response:
        if self._continuations is None:
            name = self._trained.task.name
            raise UserError(f"the task of the model is {name!r}; to generate, it must be 'causal_lm'")
        guard.check_keys(values, {"prompt"}, {"max_tokens", "temperature", "top_k", "top_p", "seed", "stream"})
        max_tokens = guard.take(values, "max_tokens", "an integer", self._default_tokens)
        prompt = guard.take(values, "prompt", "a string")
        self._check_text("prompt", prompt)
        if max_tokens > self._limits.tokens:
            raise UserError(f"max_tokens is {max_tokens!r:.60}; it must be at most {self._limits.tokens}")
        is_streamed = guard.take(values, "stream", "true or false", False)
        sampling = Sampling(**{name: values[name] for name in Sampling._fields if name in values})
        pieces = self._continuations(self._model.generator.request(prompt, max_tokens, sampling))
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(pieces.aclose)
            first = await anext(pieces)  # raises what is wrong before the answer begins
            completion = Completion(prompt, "", [], "").extended(first)
            if is_streamed:
                stack.pop_all()  # the answer closes the pieces
                return EventStream(completion, pieces, self._trained.step)
            async for piece in pieces:
                completion = completion.extended(piece)
        return JSONResponse(completion._asdict() | {"step": self._trained.step})

    def _check_text(self, name: str, text: Any) -> None:
        parts = text if isinstance(text, list) else [text]
        size, most = sum(len(part) for part in parts if isinstance(part, str)), self._limits.characters
        if size > most:
            raise HTTPException(413, f"{name} has {size:,} characters; it must have at most {most:,}")

    def _predict_texts(self, texts: list[Text]) -> list[tuple[Prediction, bool]]:
        """Return the prediction for each text, with the most choices, and whether it was truncated."""
        predictions = self._model.predict(texts, top_k=self._most_choices)
        return list(zip(predictions, self._model.is_truncated(texts), strict=True))


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer. Raises ClientDisconnect, and cancels the answer, if the client goes away before."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    line = error.detail
    if error.status_code in (404, 405):
        routes = [f"{method} {one.path}" for one in request.app.routes for method in sorted(one.methods - {"HEAD"})]
        line = f"the request is {request.method} {request.url.path:.60}; it must be one of {', '.join(routes)}"
    return guard.refusal(error.status_code, line, error.headers)


def _with_choices(value: Any, number: int) -> Any:
    """Return a prediction that lists at most `number` choices."""
    if isinstance(value, list):
        return [_with_choices(one, number) for one in value]
    if not isinstance(value, dict):
        return value
    rest = {name: _with_choices(one, number) for name, one in value.items() if name != "top"}
    return {**rest, "top": value["top"][:number]} if number > 1 and "top" in value else rest


class EventStream(StreamingResponse):
    """Server-sent events: one per piece of text, and then one with the whole continuation."""

    on_end: Callable[[], None]  # function that is called after the last event

    def __init__(self, completion: Completion, pieces: AsyncGenerator[TextPiece, None], step: int):
        """Continue a continuation, which has its first piece, with the other pieces."""
        self._pieces = pieces
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies send each event at once
        super().__init__(self._events(completion, step), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and stop if the client goes away."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()

    async def _events(self, completion: Completion, step: int) -> AsyncGenerator[str, None]:
        try:
            if completion.text:
                yield _event({"piece": completion.text})
            async for piece in self._pieces:
                completion = completion.extended(piece)
                if piece.text:
                    yield _event({"piece": piece.text})
        except Exception as error:  # a fault of the service; it continues
            yield _event({"error": failure(error)})
            return
        yield _event(completion._asdict() | {"step": step})
        self.on_end()


def _event(values: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"


def failure(error: Exception) -> str:
    """Print the traceback of a fault of the service, and return the line for the client."""
    traceback.print_exception(error, file=sys.stderr)
    return f"the model failed: {type(error).__name__}"
