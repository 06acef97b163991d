"""Samples where the CPU time of a training step is spent, in torch and in jaxpar, on the cases of peers.py.

    scripts/python scripts/bench/peers_profile.py --torch_python=TORCH/bin/python [--widths=128,256,768] [--steps=4]
        [--norms=layernorm,rmsnorm] [--strategies=single,ddp,1f1b]

Linux `perf` samples all threads 997 times a second of CPU time. A cell is torch's CPU seconds of a step / those of
jaxpar, of all cores together:

  matmuls    matrix products, and packing their operands
  other ops  all other arithmetic: norms, softmax, GELU, additions, the update, and copies in the program
  rest       the kernel, allocation, sending between replicas and stages, Python, and threads, which in torch spin

XLA's products come from code that oneDNN generates, whose names perf gets by ONEDNN_JIT_PROFILE, from Eigen, which
packs for it, and from YNNPACK, which fuses them with passes in small models.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from jaxpar import config as configs
from jaxpar.command_line import integer
from jaxpar.errors import TrainingError, exit_code
from scripts.bench.peers import WARM_STEPS, Contender, contenders, in_new_process, model_of, peers_parser
from scripts.bench.tables import show

SAMPLES = 997  # of each thread in a second of its CPU time
# What a sample belongs to, by its symbol and file: the first pattern that is found.
KINDS = {
    "matmuls": r"gemm|Eigen::internal|TensorContraction|ynn::(dot|packer|interleave|transpose)|pack[LR]hs",
    "other ops": r"at::native|c10::function_ref|Sleef|ynn::|perf-\d+\.map|memmove|memcpy|memset",
}
REST = "rest"


def main() -> None:
    """Print the table."""
    parser = peers_parser(__doc__)
    parser.add_argument("--steps", type=integer(1), default=4, help="steps whose time is sampled")
    parsed, overrides = parser.parse_with_overrides()
    os.environ["ONEDNN_JIT_PROFILE"] = "2"  # names of generated code, for perf
    configs.override(configs.default_config(), overrides)  # errors before the first case

    def cells(strategy: str, norm: str, width: int) -> list[str]:
        arguments = (parsed.torch_python, model_of(norm, width), strategy, overrides, parsed.steps)
        torch, ours = in_new_process(profile, *arguments)
        found = [f"{torch[kind]:.2f}/{ours[kind]:.2f}" for kind in [*KINDS, REST]]
        return [strategy, norm, f"{width}", *found, f"{torch.total() / ours.total():.3f}"]

    heads = [f"{kind}, torch/jaxpar" for kind in [*KINDS, REST]]
    cases = product(parsed.strategies, parsed.norms, parsed.widths)
    show(["strategy", "norm", "width", *heads, "total, torch/jaxpar"], (cells(*case) for case in cases))


def profile(
    torch_python: str, model: Mapping[str, Any], strategy: str, overrides: Sequence[str], steps: int
) -> list[Counter[str]]:
    """Return the CPU seconds of a step of torch and of jaxpar."""
    with contenders(torch_python, model, strategy, overrides) as found:
        return [cpu_seconds(one, steps) for one in found.values()]


def cpu_seconds(contender: Contender, steps: int) -> Counter[str]:
    """Return the CPU seconds of a step by kind."""
    for _ in range(WARM_STEPS):
        contender.step()
    with tempfile.TemporaryDirectory() as folder:
        path, processes = Path(folder) / "perf.data", ",".join(map(str, contender.processes))
        options = ["-q", "-e", "cpu-clock", "-F", f"{SAMPLES}", "-p", processes, "-o", f"{path}"]
        recorder = subprocess.Popen(["perf", "record", *options])
        time.sleep(1)  # until it records
        for _ in range(steps):
            contender.step()
        recorder.send_signal(signal.SIGINT)
        recorder.wait()
        script = ["perf", "script", "-i", f"{path}", "-F", "ip,sym,dso"]
        printed = subprocess.run(script, capture_output=True, text=True, check=False)
    found = Counter(map(kind_of, filter(str.strip, printed.stdout.splitlines())))
    if printed.returncode or not found:
        raise TrainingError(f"perf found no samples: {printed.stderr.strip()[-500:]}")
    return Counter({kind: samples / SAMPLES / steps for kind, samples in found.items()})


def kind_of(sample: str) -> str:
    """Return the kind of a sample, a line of `perf script`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, sample)), REST)


if __name__ == "__main__":
    sys.exit(exit_code(main))
