"""Compares cuDNN attention with XLA attention: the ratio of the step times, and the losses. Needs a GPU.

    scripts/python scripts/bench/attention.py [--config.KEY=VALUE ...]

BERT base in bfloat16 on synthetic texts of 512 tokens, half of them padding, unless overridden.
"""

import sys
import tempfile
from pathlib import Path

from jaxpar import config as configs
from jaxpar import data, tasks
from jaxpar.cluster import find_cluster
from jaxpar.core import mesh
from scripts.bench.steps import measure

ROUNDS = 20
DEFAULTS = [
    "--config.model.size=base",
    "--config.model.dtype=bfloat16",
    "--config.data.source=synthetic",
    "--config.data.max_length=512",
    "--config.data.length_buckets=512",
    "--config.batch_size=32",
    "--config.mesh.data=1",
]


def main(arguments: list[str]) -> None:
    """Print the ratio of the step times, and the first loss of each."""
    contenders = {kernel: configs.load_config("configs/default.py") for kernel in ("xla", "cudnn")}
    for kernel, config in contenders.items():
        configs.override(config, [*DEFAULTS, *arguments, f"--config.model.attention={kernel}"])
    config = contenders["xla"]
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    with tempfile.TemporaryDirectory() as folder:
        dataset = data.load(config, tasks.find_task(config).labels, Path(folder))
    batch = data.Batches(dataset.train, batch_size=config.batch_size, seed=0, shuffle=True).batch(0)
    xla, cudnn = measure(contenders, dataset.info, batch, rounds=ROUNDS).values()
    print(f"{find_cluster().device_kind}: cudnn / xla step time {cudnn.seconds / xla.seconds:.3f}")
    print(f"loss of the first step: xla {xla.first_loss:.6f}, cudnn {cudnn.first_loss:.6f}")


if __name__ == "__main__":
    main(sys.argv[1:])
