"""Compares predicted rates of training with published ones, on GPUs that this machine does not have.

    scripts/python scripts/bench/predicted.py [--only=llama] [--config.KEY=VALUE ...]

Compiles the step of each of CASES in bfloat16, predicts its time (jaxpar/inspect/step_time.py), and prints both rates
and their ratio. The programs are not the same: what is compared is jaxpar's step with what another program reaches.
Needs the extra `targets`, and nvidia-cudnn-cu12.

GPT-2 124M with 524,288 tokens a step, without dropout, on 8 GPUs: llm.c's PyTorch trainer takes 19,560 such steps in
45 minutes on H100s and in 90 minutes on A100s (README.md of KellerJordan/modded-nanogpt at 0006a9c, citing
karpathy/llm.c, discussion 481).

Llama 3.1 8B with two texts of 8,192 tokens on each GPU: torchtitan with FSDP trains 5,762 tokens a second on each of 8
H100s without torch.compile, with selective activation checkpointing (pytorch/torchtitan at 31a17bf,
benchmarks/llama3_h100_202412_torchtitan.md, table 1). Its H100s have 96 GB of slower memory and a limit of 500 W. Here,
with 80 GB, everything is computed again (remat full). The same rate is taken for 64 GPUs.
"""

import sys
from typing import Any, NamedTuple

from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.cluster.target import find_target
from jaxpar.command_line import Parser
from jaxpar.errors import exit_code
from jaxpar.inspect.step_time import predict
from scripts.bench.tables import show
from scripts.bench.vocabulary import DEFAULTS, WORDS, make_problem

SCANNED, UNROLLED = {"model.scan_layers": True}, {"model.scan_layers": False}
GPT2 = {"batch_size": 512}
LLAMA = {"model.size": "llama_8b", "model.max_length": None, "model.remat": "full", "model.tied_embeddings": False}
LLAMA |= {"exchange": "zero3"}
STEPS, TORCHTITAN = 19_560 * 524_288 / 60, 5762  # tokens of llm.c's run / 60; tokens/s of a GPU


class Case(NamedTuple):
    """A training step."""

    target: str
    values: dict[str, Any]  # what differs from vocabulary.py
    published: float  # tokens/s
    words: int = WORDS  # the size of the vocabulary
    length: int = 1024  # tokens of a text


CASES = {
    "gpt2, scanned": Case("h100:8", GPT2 | SCANNED, STEPS / 45),
    "gpt2, unrolled": Case("h100:8", GPT2 | UNROLLED, STEPS / 45),
    "gpt2, scanned, A100s": Case("a100-80gb:8", GPT2 | SCANNED, STEPS / 90),
    "gpt2, unrolled, A100s": Case("a100-80gb:8", GPT2 | UNROLLED, STEPS / 90),
    "llama_8b, zero3": Case("h100:8", LLAMA | {"batch_size": 16}, 8 * TORCHTITAN, 128_256, 8192),
    "llama_8b, zero3, 8 hosts": Case("h100:8x8", LLAMA | {"batch_size": 128}, 64 * TORCHTITAN, 128_256, 8192),
}


def main() -> None:
    """Print a row for each case."""
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    arguments, overrides = parser.parse_with_overrides()
    rows = (compared(name, case, overrides) for name, case in CASES.items() if arguments.only in name)
    show(["case", "GPUs", "tokens/s, predicted / published"], rows)


def compared(name: str, case: Case, overrides: list[str]) -> list[str]:
    """Return a row."""
    target = find_target(case.target)
    config: Any = configs.default_config()
    config.update_from_flattened_dict(DEFAULTS | case.values)
    configs.override(config, overrides)
    problem = make_problem(config, target.cluster, words=case.words, length=case.length)
    plan = strategies.plan(config, problem, target.cluster)
    time = predict(strategies.build(plan, problem, target.devices).compile(), target.cluster)
    rate = config.batch_size * case.length / time.seconds
    return [name, case.target, f"{rate:,.0f} / {case.published:,.0f} = {rate / case.published:.3f}"]


if __name__ == "__main__":
    sys.exit(exit_code(main))
