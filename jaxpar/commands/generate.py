"""Continues texts with the language model of a run, or with one in Hugging Face format.

    jaxpar generate --workdir=runs/gpt --prompt="a small" [--prompt=TEXT ...] [--max_tokens=100]
        [--temperature=0.8 --top_k=50 --top_p=0.95 --seed=0] [--step=N] [--tensor=2] [--json]

Without --prompt, prompts are the lines of the standard input; in a terminal, you are asked for one after another. One
continuation is printed while it is computed, several ones at their end, in order, after their prompts. --json prints
one object a line instead: prompt, text, tokens, and end ("end of text" or "length").

By default, every token is the most likely one. A temperature above 0 draws tokens, of the --top_k most likely ones, or
of the fewest whose probabilities sum up to --top_p. The same seed gives the same text.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxpar.command_line import Parser, integer, log_line, number
from jaxpar.errors import UserError
from jaxpar.use.inference.generate import Generator, Sampling
from jaxpar.use.inference.load import is_pretrained, load_language_model, load_trained, prepare

TOGETHER = 16  # prompts of the standard input that are continued at the same time


def print_stream(generator: Generator, prompt: str, max_tokens: int, sampling: Sampling) -> None:
    """Print a prompt and its continuation as it is computed."""
    pieces = generator.stream([prompt], max_tokens, sampling)
    print(prompt, end="", flush=True)
    is_empty = True
    for piece in pieces:
        print(piece.text, end="", flush=True)
        is_empty = is_empty and not piece.text
    print(flush=True)
    if is_empty:
        log_line("the model ended the text at once")


def _ask(generator: Generator, max_tokens: int, sampling: Sampling) -> None:
    """Ask for prompts in the terminal until the end of the input."""
    log_line("Enter a text to continue; Ctrl-D ends.")
    with contextlib.suppress(EOFError):
        while True:
            prompt = input("> ")
            try:
                print_stream(generator, prompt, max_tokens, sampling)
            except UserError as error:
                log_line(f"jaxpar: {error}")
    print(file=sys.stderr)


def groups_of_lines() -> Iterator[list[str]]:
    """Yield the lines of the standard input, TOGETHER at a time."""
    lines = (line.rstrip("\r\n") for line in sys.stdin)
    try:
        while group := list(itertools.islice(lines, TOGETHER)):
            yield group
    except UnicodeDecodeError:
        raise UserError("the standard input is not UTF-8; it must be text in UTF-8") from None


def generate(
    generator: Generator, prompts: Sequence[str] | None, max_tokens: int, sampling: Sampling, *, as_json: bool
) -> None:
    """Continue the prompts, or those of the standard input, and print the texts."""
    if prompts is None and sys.stdin is None:
        raise UserError("the standard input is closed; it must be open, or --prompt must be set")
    if prompts is None and sys.stdin.isatty() and not as_json:
        _ask(generator, max_tokens, sampling)
        return
    if prompts is not None and len(prompts) == 1 and not as_json:
        print_stream(generator, prompts[0], max_tokens, sampling)
        return
    is_empty = True
    for group in groups_of_lines() if prompts is None else [list(prompts)]:
        is_empty = False
        for one in generator(group, max_tokens, sampling):
            print(json.dumps(one._asdict(), ensure_ascii=False) if as_json else one.prompt + one.text, flush=True)
    if is_empty:
        raise UserError("the standard input is empty; it must have a prompt in each line")


def main(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, "jaxpar generate")
    example, add = '--workdir=runs/gpt --prompt="a small"', parser.add_argument
    parser.require("--workdir", example, type=Path, help="workdir of a run, or directory of a GPT-2")
    add("--prompt", action="append", help="text to continue; repeat it for several texts")
    add("--max_tokens", type=integer(1), default=100, help="longest continuation (default: 100)")
    temperature = "divisor of the logits (default: 0, which chooses the most likely token)"
    add("--temperature", type=number("a number of at least 0"), default=0.0, help=temperature)
    add("--top_k", type=integer(0), default=0, help="number of tokens to draw from (default: 0, all)")
    top_p = "draw from the fewest tokens with this probability (default: 1, all)"
    add("--top_p", type=number("a number from 0 to 1", 0, 1), default=1.0, help=top_p)
    add("--seed", type=integer(0), default=0, help="seed of the random numbers (default: 0)")
    add("--tensor", type=integer(1), default=1, help="devices that compute each layer together (default: 1)")
    add("--step", type=integer(0), help="step of the checkpoint (default: the best one)")
    add("--json", action="store_true", help="print one JSON object a line")
    arguments = parser.parse(argv)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    sampling.check("--")
    if sampling.temperature == 0 and (sampling.top_k or sampling.top_p < 1):
        log_line("--top_k and --top_p have no effect without --temperature, because the most likely token is chosen")
    workdir: Path = arguments.workdir
    if is_pretrained(workdir):
        if arguments.step is not None:
            raise UserError(f"--step is {arguments.step}; it must not be set for {workdir}, which is not a run")
        trained = load_language_model(workdir, tensor=arguments.tensor, log=log_line)
    else:
        prepare(workdir)
        trained = load_trained(workdir, arguments.step, tensor=arguments.tensor, log=log_line)
    generate(Generator(trained), arguments.prompt, arguments.max_tokens, sampling, as_json=arguments.json)
