"""Compares the time of a token with a memory of earlier positions to that of a whole forward pass, by position.

    scripts/python scripts/bench/generate.py [--size=gpt2] [--positions=128,512,960] [--rounds=5]

The weights are random. Prints, for each position, the median time of the next token in a text of that length, with the
memory and by computing the logits of the whole text again, and their ratio; then by how much both grow from the first
to the last position. Measurements take turns.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import models, tasks
from jaxpar.command_line import Parser, integer
from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import DATA, TENSOR
from jaxpar.data import DataInfo
from jaxpar.errors import exit_code
from jaxpar.measure.phases import seconds_in_turn
from jaxpar.use.inference.generate import Generator, Request, Sampling
from jaxpar.use.inference.load import Trained

WORDS, MORE = 5000, 33  # tokens of the vocabulary, and of a long continuation


def make_model(size: str, length: int) -> Trained:
    """Return a language model with random weights."""
    config = configs.default_config()
    config.task, config.model.name, config.model.size, config.data.max_length = "causal_lm", "gpt", size, length
    info = DataInfo("text", (length,), 0, (), WORDS, 0)
    model = models.build(config, info, clusters.find_cluster())
    mesh = meshes.make_mesh({DATA: 1, TENSOR: 1}, clusters.devices()[:1])
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(WORDS)}, unk_token="t0"))
    params = jax.jit(model.init)(jax.random.key(0))
    return Trained(Path(), 0, config, info, tasks.find_task(config), model, params, tokenizer, mesh)


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--size", default="gpt2", help="config.model.size (default: gpt2)")
    parser.add_argument("--positions", default="128,512,960", help="lengths of the text")
    parser.add_argument("--rounds", type=integer(1), default=5, help="measurements (default: 5)")
    arguments = parser.parse()
    positions = [int(text) for text in arguments.positions.split(",")]
    trained = make_model(arguments.size, max(positions) + MORE)
    generator = Generator(trained)
    whole = jax.jit(lambda params, tokens: trained.model.apply(params, {"inputs": tokens})[:, -1].argmax())

    def continue_text(length: int, number: int) -> None:
        for _ in generator.stream_requests([Request([5] * length, number, Sampling())]):
            pass

    calls = {}
    for length in positions:
        calls["one", length] = partial(continue_text, length, 1)
        calls["many", length] = partial(continue_text, length, MORE)
        calls["whole", length] = partial(whole, trained.params, np.full((1, length), 5, np.int32))
    seconds = seconds_in_turn(calls, arguments.rounds)
    with_memory = [(seconds["many", length] - seconds["one", length]) / (MORE - 1) for length in positions]
    without = [seconds["whole", length] for length in positions]
    print(f"{'position':>8} {'with memory':>12} {'whole text':>12} {'ratio':>7}")
    for length, short, long in zip(positions, with_memory, without, strict=True):
        print(f"{length:>8} {1e3 * short:>9.2f} ms {1e3 * long:>9.2f} ms {short / long:>7.3f}")
    growth = (values[-1] / values[0] for values in (with_memory, without))
    print("last / first position: {:.2f} with memory, {:.2f} for the whole text".format(*growth))


if __name__ == "__main__":
    sys.exit(exit_code(main))
