"""Compares predicted rates of training with published ones, on GPUs that this machine does not have.

    scripts/python scripts/bench/predicted.py [--config.KEY=VALUE ...]

GPT-2 124M in bfloat16 with 524,288 tokens a step, without dropout, on 8 GPUs: llm.c's PyTorch trainer takes 19,560 such
steps in 45 minutes on H100s and in 90 minutes on A100s (README.md of KellerJordan/modded-nanogpt at 0006a9c, citing
karpathy/llm.c, discussion 481). Compiles the step with and without a scan over the layers, predicts its time
(jaxpar/inspect/step_time.py), and prints both rates and their ratio. The programs are not the same: what is compared
is jaxpar's step with what another program reaches. Needs the extra `targets`, and nvidia-cudnn-cu12.
"""

import sys
from itertools import product
from typing import Any

from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.cluster.target import find_target
from jaxpar.command_line import Parser
from jaxpar.errors import exit_code
from jaxpar.inspect.step_time import predict
from scripts.bench.tables import show
from scripts.bench.vocabulary import DEFAULTS, make_problem

NUM_STEPS, TOKENS = 19_560, 524_288  # tokens of a step
MINUTES = {"h100:8": 45, "a100-80gb:8": 90}


def main() -> None:
    """Print a row for each kind of GPU and form of the layers."""
    parser = Parser(__doc__)
    _, overrides = parser.parse_with_overrides()
    rows = (compared(name, scan, overrides) for name, scan in product(MINUTES, (True, False)))
    show(["GPUs", "layers", "tokens/s, predicted / published"], rows)


def compared(name: str, scan: bool, overrides: list[str]) -> list[str]:
    """Return a row."""
    target, published = find_target(name), NUM_STEPS * TOKENS / (60 * MINUTES[name])
    config: Any = configs.default_config()
    config.update_from_flattened_dict(DEFAULTS | {"mesh.data": 8, "batch_size": TOKENS // 1024})
    config.model.scan_layers = scan
    configs.override(config, overrides)
    problem = make_problem(config, target.cluster)
    plan = strategies.plan(config, problem, target.cluster)
    time = predict(strategies.build(plan, problem, target.devices).compile(), target.cluster)
    rate = TOKENS / time.seconds
    return [name, "scanned" if scan else "unrolled", f"{rate:,.0f} / {published:,.0f} = {rate / published:.3f}"]


if __name__ == "__main__":
    sys.exit(exit_code(main))
