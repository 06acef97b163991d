"""Samples where the CPU time of a training step is spent, in torch and in jaxpar, on the cases of peers.py.

    scripts/python scripts/bench/peers_profile.py --torch_python=TORCH/bin/python [--widths=128,256,768] [--steps=4]
        [--norms=layernorm,rmsnorm] [--strategies=single,ddp,1f1b]

Linux `perf` samples all threads 997 times a second of CPU time. A cell is torch's CPU seconds of a step / those of
jaxpar, of all cores together:

  products  matrix products, and packing their operands
  passes    all other arithmetic: norms, softmax, GELU, additions, the update, and copies in the program
  rest      the kernel, allocation, sending between replicas and stages, Python, and threads, which in torch spin

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
from itertools import product
from pathlib import Path

from jaxpar import config as configs
from jaxpar import data
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.errors import TrainingError, exit_code
from scripts.bench.peers import HEAD, STRATEGIES, WARM_STEPS, Contender, contenders, widths
from scripts.bench.pipeline_case import MODEL
from scripts.bench.tables import show

SAMPLES = 997  # of each thread in a second of its CPU time
# What a sample belongs to, by its symbol and file: the first pattern that is found.
KINDS = {
    "products": r"gemm|Eigen::internal|TensorContraction|ynn::(dot|packer|interleave|transpose)|pack[LR]hs",
    "passes": r"at::native|c10::function_ref|Sleef|ynn::|perf-\d+\.map|memmove|memcpy|memset",
}
REST = "rest"


def main() -> None:
    """Print the table."""
    parser = Parser(__doc__)
    parser.require("--torch_python", "--torch_python=TORCH/bin/python", help="interpreter of an environment with torch")
    parser.add_argument("--widths", type=widths, default=[128, 256, 768], help="widths of the model")
    parser.add_argument("--norms", type=names(["layernorm", "rmsnorm"]), default=["layernorm", "rmsnorm"], help="norms")
    parser.add_argument("--strategies", type=names(STRATEGIES), default=list(STRATEGIES), help="strategies")
    parser.add_argument("--steps", type=integer(1), default=4, help="steps whose time is sampled")
    parsed, overrides = parser.parse_with_overrides()
    os.environ["ONEDNN_JIT_PROFILE"] = "2"  # names of generated code, for perf
    config = configs.default_config()
    configs.override(config, ["--config.mesh.virtual_cpu_devices=2", *overrides])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    mesh.partition_by_gspmd()

    def profiled(strategy: str, norm: str, width: int) -> list[str]:
        model = {**MODEL, "hidden_size": width, "num_heads": width // HEAD, "norm": norm}
        with contenders(parsed.torch_python, model, strategy, overrides) as found:
            torch, ours = (cpu_seconds(one, parsed.steps) for one in found.values())
        kinds = [*KINDS, REST]
        cells = [f"{torch[kind]:.2f}/{ours[kind]:.2f}" for kind in kinds]
        return [strategy, norm, f"{width}", *cells, f"{torch.total() / ours.total():.3f}"]

    heads = [f"{kind}, torch/jaxpar" for kind in [*KINDS, REST]]
    cases = product(parsed.strategies, parsed.norms, parsed.widths)
    show(["strategy", "norm", "width", *heads, "all"], (profiled(*case) for case in cases))


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
