"""Compares the memory of a language model's step with chunks of logits with that of whole logits, on absent GPUs.

    scripts/python scripts/bench/vocabulary.py [--target=h100:1] [--config.KEY=VALUE ...]

GPT-2 124M in bfloat16 with 32 x 1,024 tokens, 50,304 words and no dropout, unless overridden. Compiles both steps for
the GPUs of --target, which need not exist, and prints their temporary arrays and the ratio. Needs the extra `targets`,
and nvidia-cudnn-cu12 for cuDNN attention.
"""

import sys
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpar import config as configs
from jaxpar import models, strategies, tasks
from jaxpar.cluster import Cluster
from jaxpar.cluster.target import Target, find_target
from jaxpar.command_line import Parser
from jaxpar.core import optimizer
from jaxpar.core.step import Problem
from jaxpar.data import DataInfo
from jaxpar.errors import exit_code, format_bytes
from jaxpar.inspect import audit
from jaxpar.tasks.token_logits import whole

WORDS = 50304
NUM_STEPS = 1000
DEFAULTS = {
    "task": "causal_lm",
    "model.name": "gpt",
    "model.size": "gpt2",
    "model.max_length": 1024,
    "model.dtype": "bfloat16",
    "model.dropout": 0.0,
    "batch_size": 32,
}


def make_problem(config: Any, cluster: Cluster, *, words: int = WORDS, length: int | None = None) -> Problem:
    """Return the problem of a config on texts of one length.

    Args:
      config: the config.
      cluster: the GPUs.
      words: the size of the vocabulary.
      length: tokens of a text; None: as many as the model has positions.
    """
    length = length or config.model.max_length
    info = DataInfo("text", (length,), num_classes=0, class_names=(), vocab_size=words, pad_id=0)
    dtypes: dict[str, Any] = {"inputs": np.int32, "labels": np.int32, "weights": np.float32}
    batch = {name: jax.ShapeDtypeStruct((config.batch_size, length), dtype) for name, dtype in dtypes.items()}
    batch["index"] = jax.ShapeDtypeStruct((config.batch_size,), np.int32)
    return problem_of(config, info, cluster, batch)


def problem_of(config: Any, info: DataInfo, cluster: Cluster, batch: dict[str, Any]) -> Problem:
    """Return the problem of a config on batches of these shapes."""
    made = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, NUM_STEPS))
    model, task = models.build(config, info, cluster), tasks.find_task(config)
    return Problem(model, made, config.optimizer.accumulation_steps, batch, NUM_STEPS, task)


def with_whole_logits(problem: Problem) -> Problem:
    """Return the same problem, with a loss of logits that are one array."""
    sums = problem.task.sums
    return problem._replace(task=replace(problem.task, sums=lambda outputs, batch: sums(whole(outputs), batch)))


def temporary_bytes(config: Any, problem: Problem, target: Target) -> int:
    """Return the bytes of the temporary arrays of the step on a GPU."""
    plan = strategies.plan(config, problem, target.cluster)
    strategy = strategies.build(plan, problem, target.devices)
    return audit.needed_bytes(strategy.compile(), strategy)["temporary arrays"]


def main() -> None:
    """Print the bytes of both, and the ratio."""
    parser = Parser(__doc__)
    parser.add_argument("--target", default="h100:1", help="the GPUs, such as h100:8")
    arguments, overrides = parser.parse_with_overrides()
    config = configs.default_config()
    config.update_from_flattened_dict(DEFAULTS)
    configs.override(config, overrides)
    target = find_target(arguments.target)
    problem = make_problem(config, target.cluster)
    in_chunks = temporary_bytes(config, problem, target)
    at_once = temporary_bytes(config, with_whole_logits(problem), target)
    print(
        f"{arguments.target}, {config.batch_size} x {config.model.max_length:,} tokens: temporary arrays in chunks "
        f"{format_bytes(in_chunks)} / whole logits {format_bytes(at_once)} = {in_chunks / at_once:.3f}"
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
