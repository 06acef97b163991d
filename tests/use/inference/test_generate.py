"""Tests generation against `transformers`, sampling against probabilities, streams, ends, and errors."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxpar.commands import generate
from jaxpar.errors import UserError
from jaxpar.use.inference.generate import Generator, Sampling, choose_tokens, stack_samplings, unseen_characters
from jaxpar.use.inference.load import Trained, is_pretrained, load_language_model, load_trained
from tests.runs import run_script

REFERENCE = Path(__file__).parent / "reference" / "gpt_generation"
LONGEST = 32  # positions of the reference


def make_tokenizer(*, end: int = 1) -> Tokenizer:
    """Return a tokenizer of 40 tokens: token 7 is the word t7, and token `end` is the end of a text."""
    names = {"<|endoftext|>" if number == end else f"t{number}": number for number in range(40)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("t", " t")])
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the language model of the reference, with a tokenizer."""
    directory = shutil.copytree(REFERENCE, tmp_path_factory.mktemp("generation") / "gpt")
    make_tokenizer().save(str(directory / "tokenizer.json"))
    assert is_pretrained(directory)
    return load_language_model(directory, jax.devices()[:1], log=lambda _: None)


@pytest.fixture(scope="module")
def generator(reference: Trained) -> Generator:
    return Generator(reference)


def words(tokens: np.ndarray) -> str:
    return " ".join(f"t{token}" for token in tokens)


def test_greedy_equals_transformers(generator: Generator) -> None:
    """Three prompts of different lengths at the same time, and each of them alone, up to the longest text."""
    example = load_file(REFERENCE / "example.safetensors")
    prompts = [words(text[:length]) for text, length in zip(example["inputs"], example["lengths"], strict=True)]
    together = generator(prompts, LONGEST, Sampling())
    for prompt, length, expected, completion in zip(
        prompts, example["lengths"], example["greedy"], together, strict=True
    ):
        assert completion.tokens == expected[length:].tolist()
        assert completion.text.split() == words(expected[length:]).split()
        assert (completion.prompt, completion.end) == (prompt, "length")
    [alone] = generator(prompts[1:2], 5, Sampling())
    assert alone.tokens == together[1].tokens[:5]


def test_layers_on_several_devices(
    reference: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_file(REFERENCE / "example.safetensors")
    text, length, expected = (example[name][0] for name in ("inputs", "lengths", "greedy"))
    flags = "--tensor=4", f"--workdir={reference.workdir}", f"--prompt={words(text[:length])}", "--json"
    assert run_script(monkeypatch, generate, *flags) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected[length:].tolist()


def test_a_text_ends_at_the_end_of_text(reference: Trained) -> None:
    """With token 12 as the end of a text, the first continuation of the reference is 8 8 8 8 8 38 38."""
    generator = Generator(dataclasses.replace(reference, tokenizer=make_tokenizer(end=12)))
    ended, other = generator(["t6", "t26 t9 t34 t37"], 12, Sampling())
    assert (ended.tokens, ended.end) == ([8, 8, 8, 8, 8, 38, 38], "end of text")
    assert (len(other.tokens), other.end) == (9, "end of text")
    [empty] = generator([""], 3, Sampling())  # begins with the end of a text, token 12
    assert empty.tokens == generator(["<|endoftext|>"], 3, Sampling())[0].tokens


def test_a_stream_has_one_piece_a_step(generator: Generator) -> None:
    pieces = list(generator.stream(["t6", "t26 t9"], 3, Sampling()))
    assert [piece.number for piece in pieces] == [0, 1, 0, 1, 0, 1]
    assert [piece.end for piece in pieces] == ["", "", "", "", "length", "length"]
    assert "".join(piece.text for piece in pieces if piece.number == 0).split() == ["t8"] * 3


def test_samples_depend_on_the_seed_alone(generator: Generator) -> None:
    sampling = Sampling(temperature=3.0, seed=5)
    first, second = generator(["t6", "t6"], 20, sampling)
    assert first.tokens != second.tokens
    assert generator(["t6"], 20, sampling)[0].tokens == first.tokens
    assert generator(["t6"], 20, sampling._replace(seed=6))[0].tokens == second.tokens


PROBABILITIES = np.array([0.4, 0.05, 0.3, 0.15, 0.1])


def tempered(temperature: float) -> np.ndarray:
    return PROBABILITIES ** (1 / temperature) / np.sum(PROBABILITIES ** (1 / temperature))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), PROBABILITIES),
        (Sampling(0.5), tempered(0.5)),
        (Sampling(1.0, top_k=2), np.array([4, 0, 3, 0, 0]) / 7),
        (Sampling(1.0, top_k=9), PROBABILITIES),
        (Sampling(1.0, top_p=0.4), np.array([1, 0, 0, 0, 0])),
        (Sampling(1.0, top_p=0.41), np.array([4, 0, 3, 0, 0]) / 7),
        (Sampling(1.0, top_p=0.71), np.array([8, 0, 6, 3, 0]) / 17),
        (Sampling(1.0, top_k=3, top_p=0.8), np.array([4, 0, 3, 0, 0]) / 7),  # 0.4, 0.3 of 0.85
        (Sampling(1e-9), np.array([1, 0, 0, 0, 0])),
        (Sampling(), np.array([1, 0, 0, 0, 0])),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(sampling: Sampling, expected: np.ndarray) -> None:
    number = 4000
    logits_BV = jnp.tile(jnp.log(PROBABILITIES.astype(np.float32)), (number, 1))
    # Every second text has other options, which must not matter.
    other = Sampling(0.7, top_k=1 - sampling.top_k % 2, top_p=0.3)
    options = [one._replace(seed=seed) for seed in range(number) for one in (sampling, other)]
    positions_B = jnp.zeros(2 * number, jnp.int32)
    drawn_B = choose_tokens(jnp.repeat(logits_BV, 2, axis=0), stack_samplings(options, 5), positions_B)[::2]
    alone_B = choose_tokens(logits_BV, stack_samplings(options[::2], 5), positions_B[::2])
    np.testing.assert_array_equal(drawn_B, alone_B)
    np.testing.assert_allclose(np.bincount(drawn_B, minlength=5) / number, expected, atol=0.03)
    assert set(np.unique(drawn_B)) <= set(np.flatnonzero(expected > 0))


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "sampling", "message"),
    [
        (["t6"], 3, Sampling(-1), "temperature is -1; it must be 0, or from 1e-05 to 100,000"),
        (["t6"], 3, Sampling("1"), "temperature is '1'; it must be a number"),  # type: ignore[arg-type]
        (["t6 \udcff"], 3, Sampling(), "the prompt is 't6 .udcff'; it must be valid Unicode"),
        (["t6"], 3, Sampling(1, top_k=-1), "top_k is -1"),
        (["t6"], 3, Sampling(1, top_p=0.0), "top_p is 0.0; it must be more than 0 and at most 1"),
        (["t6"], 3, Sampling(seed=-1), "seed is -1"),
        (["t6"], 0, Sampling(), "max_tokens is 0; it must be at least 1"),
        ([], 3, Sampling(), "there are no prompts"),
        ([words(np.full(LONGEST, 5))], 3, Sampling(), "the prompt has 32 tokens; it must have fewer than 32"),
    ],
)
def test_mistakes(prompts: list[str], max_tokens: int, sampling: Sampling, message: str, generator: Generator) -> None:
    with pytest.raises(UserError, match=message):
        generator.stream(prompts, max_tokens, sampling)


def test_models_that_cannot_generate(reference: Trained, classifier: Path) -> None:
    with pytest.raises(UserError, match=r"has config.task='classification' and config.model.name='bert'"):
        Generator(load_trained(classifier))
    with pytest.raises(UserError, match="it must be a run with a tokenizer"):
        Generator(dataclasses.replace(reference, tokenizer=None))


def test_characters_without_a_token() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert unseen_characters(tokenizer, "ab a") == []
    assert unseen_characters(tokenizer, "ab ☃ a") == ["☃"]


def test_prompts_that_a_tokenizer_cannot_encode(reference: Trained) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    generator = Generator(dataclasses.replace(reference, tokenizer=tokenizer))
    assert generator.encode("a a") == [1, 1]
    with pytest.raises(UserError, match=r"the prompt is 'a ☃'; it must not contain '☃', which has no token"):
        generator.encode("a ☃")
    with pytest.raises(UserError, match=r"the prompt is empty; it must have a token"):
        generator.encode("")
