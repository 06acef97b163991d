"""Compiles training steps of large models for GPUs that this machine does not have: memory, findings, predicted time.

    scripts/python scripts/bench/large_models.py [--only=bert_base]

In bfloat16, with cuDNN attention. Compiles each of CASES, prints its findings, those that are normal for the strategy
included, and a row: the bytes that the step needs on a GPU, and its predicted time. Needs the extra `targets`, and
nvidia-cudnn-cu12.
"""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar import config as configs
from jaxpar.cluster.target import find_target
from jaxpar.command_line import Parser
from jaxpar.errors import exit_code, format_bytes
from jaxpar.inspect import audit_report
from jaxpar.strategies.pipeline.schedules import EXECUTORS
from scripts.bench.tables import show


class Case(NamedTuple):
    """A model and strategy: the GPUs, and what differs from configs/default.py."""

    target: str
    values: dict[str, Any]


GPT = {"task": "causal_lm", "model.name": "gpt", "model.dropout": 0.0, "model.remat": "full", "data.max_length": 1024}
LLAMA = GPT | {
    "model.num_layers": 32,
    "model.hidden_size": 4096,
    "model.num_heads": 32,
    "model.num_kv_heads": 8,
    "model.mlp_size": 14336,
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.positions": "rotary",
    "data.vocab_size": 128256,
    "data.max_length": 4096,
    "batch_size": 64,
}
CASES = {
    "bert_base": Case(
        "h100:8", {"model.size": "base", "data.max_length": 512, "data.vocab_size": 30522, "batch_size": 256}
    ),
    "gpt2_xl": Case(
        "h100:8", GPT | {"model.size": "gpt2_xl", "data.vocab_size": 50304, "batch_size": 64, "exchange": "zero3"}
    ),
    "llama_8b_zero3": Case("h100:8x8", LLAMA | {"exchange": "zero3"}),
}
PIPELINE = {"strategy": "pipeline", "pipeline.num_microbatches": 16, "model.remat": "none"}
GPT2 = GPT | PIPELINE | {"model.size": "gpt2", "data.vocab_size": 50304, "mesh.stage": 4, "batch_size": 256}
GPT2_XL = GPT2 | {"model.size": "gpt2_xl", "mesh.data": 1, "batch_size": 64, "pipeline.schedule": "1f1b"}
LLAMA_8B = (
    LLAMA | PIPELINE | {"mesh.stage": 8, "batch_size": 128, "pipeline.schedule": "1f1b", "pipeline.remat": "full"}
)
for executor in EXECUTORS:
    chosen = {"pipeline.executor": executor}
    CASES |= {
        f"gpt2_1f1b_{executor}": Case("h100:8", GPT2 | chosen | {"pipeline.schedule": "1f1b"}),
        f"gpt2_zb_h1_{executor}": Case("h100:8", GPT2 | chosen | {"pipeline.schedule": "zb_h1"}),
        f"gpt2_xl_{executor}": Case("h100:4", GPT2_XL | chosen),
        f"llama_8b_{executor}": Case("h100:8x8", LLAMA_8B | chosen),
    }


def audited(case: Case) -> dict[str, Any]:
    """Return the audit of a case."""
    config: Any = configs.default_config()
    config.update_from_flattened_dict(
        {"model.dtype": "bfloat16", "data.source": "synthetic", "data.synthetic_examples": 512} | case.values
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        return audit_report.audit_run(config, Path(folder), find_target(case.target), with_program=True, with_time=True)


def main() -> None:
    """Print a row and the findings for each case."""
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=list(CASES), help="the case to compile; without it, all")
    arguments = parser.parse()
    cases = {name: case for name, case in CASES.items() if arguments.only in (None, name)}
    columns = ["model", "GPUs", "memory of a GPU", "predicted step time", "MFU"]
    show(columns, (compiled(name, case) for name, case in cases.items()))


def compiled(name: str, case: Case) -> list[str]:
    """Return the row of a case, and print its findings."""
    found = audited(case)
    needed, time = sum(found["needed"].values()), found["time"]
    if found["findings"] is not None:  # of a step of one program
        print("\n".join(f"    {line}" for line in audit_report.format_findings(found["findings"])), flush=True)
    memory = f"{format_bytes(needed)}{'' if needed <= found['usable_bytes'] else ', too much'}"
    return [name, case.target, memory, f"{1e3 * time['seconds']:.0f} ms", f"{time['mfu']:.3f}"]


if __name__ == "__main__":
    sys.exit(exit_code(main))
