"""Plans the same GPT on 64 H100s with ddp and with zero3, and prints the memory and the traffic of a GPU.

    scripts/python scripts/examples/plan.py

It needs no GPU, and compiles nothing.
"""

import sys

import jax
import numpy as np

from jaxpar import cluster, config, models, strategies, tasks
from jaxpar.core import optimizer
from jaxpar.core.step import Problem
from jaxpar.data import DataInfo

BATCH, LENGTH, STEPS = 256, 512, 1000
MODEL = ("task=causal_lm", "model.name=gpt", "model.size=gpt2_large", f"model.max_length={LENGTH}")


def main() -> int:
    """Print the plans."""
    settings = config.default_config()
    config.override(settings, [f"--config.{value}" for value in (*MODEL, f"batch_size={BATCH}")])
    h100s = cluster.named_cluster("H100", 64, num_processes=8)
    info = DataInfo("text", (LENGTH,), num_classes=0, class_names=(), vocab_size=50257, pad_id=0)
    dtypes = {"inputs": np.int32, "labels": np.int32, "weights": np.float32}
    batch = {name: jax.ShapeDtypeStruct((BATCH, LENGTH), dtype) for name, dtype in dtypes.items()}
    batch["index"] = jax.ShapeDtypeStruct((BATCH,), np.int32)
    adamw = optimizer.make_optimizer(settings, optimizer.build_learning_rate(settings, STEPS))
    model, task = models.build(settings, info, h100s), tasks.find_task(settings)
    problem = Problem(model, adamw, 1, batch, STEPS, task)
    for exchange in ("ddp", "zero3"):
        config.override(settings, [f"--config.exchange={exchange}"])
        plan = strategies.plan(settings, problem, h100s)
        in_flight = sum(strategies.in_flight_bytes(plan, problem).values())
        print(plan.summary)
        print(f"    held: {max(plan.device_bytes) / 1e9:.2f} GB, in a step {in_flight / 1e9:.2f} GB more")
        print(f"    sent: {plan.wire_bytes / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
