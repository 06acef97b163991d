"""Continues texts with a causal language model, one token at a time.

The keys and values of earlier positions are kept (jaxpar/models/attention.py), so a token takes the same time at every
position. Two programs compute everything: one reads the prompts, one computes the next token of each text. Both are
compiled again for other numbers and lengths of texts, but not for other samplings. The next token is computed while the
host reads the one before.

Array dims: B texts, T positions of the prompts, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import TENSOR
from jaxpar.data import tokenizer as tokenizers
from jaxpar.errors import UserError, format_count
from jaxpar.models import Params
from jaxpar.models.attention import KeyValueCache, Stored, empty
from jaxpar.models.gpt import resolve
from jaxpar.use.inference.inputs import check_unicode
from jaxpar.use.inference.load import Trained

# Lengths are padded to these numbers of positions times a power of two, so that few programs are compiled.
SMALLEST_PROMPT, SMALLEST_TEXT = 64, 256
COLDEST, HOTTEST = 1e-5, 100_000  # temperatures by which logits can be divided in float32


class TextPiece(NamedTuple):
    """The part of a text that one step adds."""

    number: int  # number of the prompt
    token: int | None  # the token, or None at the end of a text that the model ended
    text: str  # its characters; '' while a character is not complete
    end: str  # why it ends here: 'end of text', 'length' (max_tokens, or the model's longest text); '' if it continues


class Completion(NamedTuple):
    """The continuation of a prompt."""

    prompt: str
    text: str  # the continuation, without the prompt and the end-of-text token
    tokens: list[int]  # its tokens
    end: str  # why it ended, see `TextPiece`

    def extended(self, piece: TextPiece) -> "Completion":
        """Return the continuation with one more piece."""
        tokens = self.tokens if piece.token is None else [*self.tokens, piece.token]
        return Completion(self.prompt, self.text + piece.text, tokens, piece.end)


class Sampling(NamedTuple):
    """Options for drawing tokens. The defaults always choose the most likely token."""

    temperature: float = 0.0  # divisor of the logits, from 1e-05 to 100,000; 0: choose the most likely token
    top_k: int = 0  # number of most likely tokens to draw from; 0: all
    # draw from the fewest most likely tokens whose probabilities sum up to at least this (Holtzman et al., "The Curious
    # Case of Neural Text Degeneration", 2020); 1: from all
    top_p: float = 1.0
    seed: int = 0  # seed of the random numbers, which depend on it and on the position alone

    def check(self, prefix: str = "") -> None:
        """Raise UserError if a value is of another type or out of range. prefix: what stands before its name."""
        for name, value in self._asdict().items():
            kinds = int if name in ("top_k", "seed") else int | float
            if isinstance(value, bool) or not isinstance(value, kinds):
                kind = "an integer" if kinds is int else "a number"
                raise UserError(f"{prefix}{name} is {value!r:.60}; it must be {kind}")
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise UserError(
                f"{prefix}temperature is {self.temperature!r:.30}; it must be 0, or from {COLDEST} to {HOTTEST:,}"
            )
        if self.top_k < 0:
            raise UserError(f"{prefix}top_k is {self.top_k!r:.60}; it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"{prefix}top_p is {self.top_p}; it must be more than 0 and at most 1 (1: all tokens)")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"{prefix}seed is {self.seed!r:.60}; it must be at least 0 and less than 2**32")


class Samplings(NamedTuple):
    """The options of several texts, as arrays, so that one program computes all options."""

    temperatures_B: np.ndarray  # float32
    top_ks_B: np.ndarray  # int32
    top_ps_B: np.ndarray  # float32
    seeds_B: np.ndarray  # uint32


class Request(NamedTuple):
    """A text to continue. `Generator.request` makes and checks it."""

    tokens: list[int]  # the tokens of the prompt, at least one
    max_tokens: int  # the longest continuation
    sampling: Sampling


class Generator:
    """A causal language model that is ready to continue texts, on the devices of its first replica."""

    def __init__(self, trained: Trained):
        """Prepare the model. Raises UserError if it is not a causal language model of this package."""
        config = trained.config
        if trained.task.head != "causal_lm" or config.model.name != "gpt":
            raise UserError(
                f"{trained.workdir} has config.task={trained.task.name!r} and config.model.name={config.model.name!r}; "
                "to generate text, they must be 'causal_lm' and 'gpt'"
            )
        if trained.tokenizer is None:
            raise UserError(
                f"{trained.workdir} has config.data.source={config.data.source!r}; to generate text, it must be a run "
                "with a tokenizer"
            )
        _, self._spec = resolve(config, trained.info)
        self.max_length = trained.info.input_shape[0]
        self.tokenizer = Tokenizer.from_str(trained.tokenizer.to_str())
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._end = tokenizers.find_special(self.tokenizer, tokenizers.END_OF_TEXT)
        self._vocab_size = tokenizers.vocab_size(self.tokenizer)
        self._trained = trained = trained.first_replica()
        on_all, by_head = PartitionSpec(), PartitionSpec(None, None, TENSOR)

        def read(
            params: Params, prompts_BT: jax.Array, lengths_B: jax.Array, samplings: Samplings, size: int
        ) -> tuple[jax.Array, Stored]:
            on_device = partial(self._read_prompts, size=size)
            program = trained.program(on_device, (on_all, on_all, on_all), (on_all, by_head))
            made: tuple[jax.Array, Stored] = program(params, prompts_BT, lengths_B, samplings)
            return made

        next_token = trained.program(self._next_token, (on_all, on_all, on_all, by_head), (on_all, by_head))
        self._read = meshes.one_at_a_time(jax.jit(read, static_argnums=4), trained.mesh)
        self._next = meshes.one_at_a_time(jax.jit(next_token, donate_argnums=4), trained.mesh)

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt; an empty one begins with the end-of-text token, as a text in training does."""
        check_unicode(prompt, "the prompt")
        if unseen := unseen_characters(self.tokenizer, prompt):
            raise UserError(f"the prompt is {prompt!r:.80}; it must not contain {unseen[0]!r}, which has no token")
        tokens = list(self.tokenizer.encode(prompt, add_special_tokens=False).ids)
        if not tokens:
            if self._end is None:
                raise UserError("the prompt is empty; it must have a token, because the tokenizer has no end of text")
            tokens = [self._end]
        if len(tokens) >= self.max_length:
            raise UserError(
                f"the prompt has {format_count(len(tokens), 'token')}; it must have fewer than {self.max_length}, the "
                "longest text of the model"
            )
        return tokens

    def stream(self, prompts: Sequence[str], max_tokens: int, sampling: Sampling) -> Iterator[TextPiece]:
        """Yield the continuations piece by piece: in each step, one piece of each text that has not ended.

        All texts are continued at the same time. Text i has the seed sampling.seed + i. Raises UserError for an invalid
        argument before anything is computed.
        """
        sampling.check()
        if not prompts:
            raise UserError("there are no prompts; there must be at least one")
        texts = [
            self.request(prompt, max_tokens, sampling._replace(seed=(sampling.seed + number) % 2**32))
            for number, prompt in enumerate(prompts)
        ]
        return self.stream_requests(texts)

    def request(self, prompt: str, max_tokens: int, sampling: Sampling) -> Request:
        """Check a request and return it."""
        sampling.check()
        if max_tokens < 1:
            raise UserError(f"max_tokens is {max_tokens!r:.60}; it must be at least 1")
        return Request(self.encode(prompt), max_tokens, sampling)

    def __call__(self, prompts: Sequence[str], max_tokens: int, sampling: Sampling) -> list[Completion]:
        """Return the whole continuations. See `stream`."""
        completions = [Completion(prompt, "", [], "") for prompt in prompts]
        for piece in self.stream(prompts, max_tokens, sampling):
            completions[piece.number] = completions[piece.number].extended(piece)
        return completions

    def stream_requests(self, requests: Sequence[Request]) -> Iterator[TextPiece]:
        """Yield the continuations for requests, as `stream` does."""
        limits = [min(request.max_tokens, self.max_length - len(request.tokens)) for request in requests]
        texts = [_Text(self.tokenizer, self._end, limit) for limit in limits]
        number = _power_of_two(len(requests))
        lengths_B = np.ones(number, np.int32)
        lengths_B[: len(requests)] = [len(request.tokens) for request in requests]
        prompts_BT = np.zeros((number, self._padded(int(lengths_B.max()), SMALLEST_PROMPT)), np.int32)
        for row, request in zip(prompts_BT, requests, strict=False):
            row[: len(request.tokens)] = request.tokens
        padding = [Sampling()] * (number - len(requests))
        samplings = stack_samplings([request.sampling for request in requests] + padding, self._vocab_size)
        steps = max(limits)
        size = self._padded(prompts_BT.shape[1] + steps, SMALLEST_TEXT)
        params = self._trained.params
        tokens_B, stored = self._read(params, prompts_BT, lengths_B, samplings, size)
        for step in range(steps):
            ready_B = tokens_B
            if step + 1 < steps:
                tokens_B, stored = self._next(params, tokens_B, lengths_B + step, samplings, stored)
            for index, (text, token) in enumerate(zip(texts, np.asarray(ready_B).tolist(), strict=False)):
                if not text.end:
                    yield TextPiece(index, *text.add(token))
            if all(text.end for text in texts):
                return

    def warm_up(self, most: int, max_tokens: int) -> None:
        """Compile the programs for up to `most` short prompts at the same time, and for one prompt of each length."""
        numbers = [2**e for e in range(_power_of_two(most).bit_length())]
        longest_first = reversed(range(1, self.max_length))
        shortest = {self._padded(length, SMALLEST_PROMPT): length for length in longest_first}  # of each padded length
        for number, length in [*((number, 1) for number in numbers), *((1, length) for length in shortest.values())]:
            next(self.stream_requests([Request([0] * length, max_tokens, Sampling())] * number))

    def _padded(self, length: int, smallest: int) -> int:
        """Return the length for which a program is compiled."""
        return min(smallest * _power_of_two(-(-length // smallest)), self.max_length)

    def _read_prompts(
        self, params: Params, prompts_BT: jax.Array, lengths_B: jax.Array, samplings: Samplings, *, size: int
    ) -> tuple[jax.Array, Stored]:
        """Return the first new token of each text, and the cache of `size` positions."""
        spec, num_devices = self._spec, self._trained.mesh.shape[TENSOR]
        shape = (len(prompts_BT), size, spec.num_kv_heads // num_devices, spec.head_dim)
        stored = empty(spec.num_layers * spec.num_applications, shape, spec.dtype)
        cache = KeyValueCache(stored, jnp.zeros_like(lengths_B))
        x_BTD = self._trained.local_model.extend(params, prompts_BT, cache)
        x_B1D = jnp.take_along_axis(x_BTD, (lengths_B - 1)[:, None, None], axis=1)
        return self._choose(params, x_B1D, samplings, lengths_B), cache.extended()

    def _next_token(
        self, params: Params, tokens_B: jax.Array, positions_B: jax.Array, samplings: Samplings, stored: Stored
    ) -> tuple[jax.Array, Stored]:
        """Return the token after each of tokens_B, which are at positions_B, and the extended cache."""
        cache = KeyValueCache(stored, positions_B)
        x_B1D = self._trained.local_model.extend(params, tokens_B[:, None], cache)
        return self._choose(params, x_B1D, samplings, positions_B + 1), cache.extended()

    def _choose(self, params: Params, x_B1D: Any, samplings: Samplings, positions_B: jax.Array) -> jax.Array:
        logits_B1V = self._trained.local_model.last(params, x_B1D)
        logits_BV = logits_B1V[:, 0, : self._vocab_size]  # a model can have more rows
        return choose_tokens(logits_BV.astype(jnp.float32), samplings, positions_B)


class _Text:
    """A text that grows token by token."""

    def __init__(self, tokenizer: Tokenizer, end_of_text: int | None, limit: int):
        self._tokenizer, self._end_of_text, self._left = tokenizer, end_of_text, limit
        self._decoder = DecodeStream(skip_special_tokens=True)
        self.end = ""

    def add(self, token: int) -> tuple[int | None, str, str]:
        """Return the token, its text, and why the text ends, as in `TextPiece`."""
        self._left -= 1
        if token == self._end_of_text:
            self.end = "end of text"
            return None, "", self.end
        self.end = "length" if not self._left else ""
        return token, self._decoder.step(self._tokenizer, token) or "", self.end


def unseen_characters(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the characters of a text, in order, that the tokenizer drops or replaces by its unknown token."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    unknown = {tokenizer.token_to_id(name) for name in ("[UNK]", "<unk>")} - {None}
    known = np.zeros(len(text), bool)
    for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        known[start:stop] |= token not in unknown
    return [one for one, is_known in zip(text, known, strict=True) if not (is_known or one.isspace())]


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


# ---- the choice of the next token --------------------------------------------------------------------------------


def stack_samplings(samplings: Sequence[Sampling], vocab_size: int) -> Samplings:
    """Return the options of all texts. vocab_size: larger values of top_k are replaced by it."""
    temperatures, top_ks, top_ps, seeds = zip(*samplings, strict=True)
    return Samplings(
        np.asarray(temperatures, np.float32),
        np.asarray([min(top_k, vocab_size) for top_k in top_ks], np.int32),
        np.asarray(top_ps, np.float32),
        np.asarray(seeds, np.uint32),
    )


def choose_tokens(logits_BV: jax.Array, samplings: Samplings, positions_B: jax.Array) -> jax.Array:
    """Return the next token of each text, int32 [B], at positions_B. Temperature, then top_k, then top_p apply."""
    temperatures_B, top_ks_B, top_ps_B, seeds_B = map(jnp.asarray, samplings)
    best_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        warm_BV = logits_BV / jnp.where(temperatures_B > 0, temperatures_B, 1)[:, None]
        warm_BV = jax.lax.cond(
            jnp.any((top_ks_B > 0) | (top_ps_B < 1)),
            lambda: jnp.where(_is_likely(warm_BV, top_ks_B[:, None], top_ps_B[:, None]), warm_BV, -jnp.inf),
            lambda: warm_BV,
        )
        keys_B = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds_B), positions_B)
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, warm_BV).astype(jnp.int32)
        return jnp.where(temperatures_B > 0, drawn_B, best_B)

    return jax.lax.cond(jnp.any(temperatures_B > 0), draw, lambda: best_B)


def _is_likely(logits_BV: jax.Array, top_ks_B1: jax.Array, top_ps_B1: jax.Array) -> jax.Array:
    """Return whether a token may be drawn. Tokens that are as likely as the last one of them may be drawn, too."""
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    is_beyond_BV = (top_ks_B1 > 0) & (jnp.arange(sorted_BV.shape[-1])[None] >= top_ks_B1)
    sorted_BV = jnp.where(is_beyond_BV, -jnp.inf, sorted_BV)
    probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    # The first token always stays, and without top_p all do, whatever the rounding.
    stays_BV = ((before_BV < top_ps_B1) | (top_ps_B1 == 1)).at[:, 0].set(True) & jnp.isfinite(sorted_BV)
    least_B1 = jnp.min(jnp.where(stays_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return logits_BV >= least_B1
