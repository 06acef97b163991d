"""Compares times that the planner predicts with published rates of training, on GPUs that this machine does not have.

    scripts/python scripts/bench/published.py [--only=TEXT]

A row has the layers, GPUs, texts of a microbatch, microbatches and rematerialization of the run that it names. The
programs differ, so what is compared is jaxpar's step with that of another program. Prints both rates and their ratio.
Nothing is compiled. The rates are in bfloat16, from

- MPT with FSDP: mosaicml/llm-foundry at 495218376, scripts/train/benchmarking/README.md. 2,048 tokens a text. MPT has
  other positions and norms.
- Megatron-LM with a distributed optimizer: NVIDIA/Megatron-LM at d98e8a64dd, README.md (images/model_table.png): 408.8
  TFLOP/s, the only row without tensor parallelism. Its microbatches are not published. A message has a
  million gradients for each replica, and at least 40 million (megatron/core/distributed/distributed_data_parallel.py).
- MaxText: AI-Hypercomputer/maxtext at e591f30cbb, MaxText/configs/a3/llama_2_7b/README.md: 492, 422, 407, 409 and 375
  TFLOP/s, with full attention counted. FSDP within hosts, data parallelism between them.
- torchtitan with FSDP and torch.compile: pytorch/torchtitan at b5bcd76c66, benchmarks/llama3_h100_202412_torchtitan.md.
  Its H100s have slower memory (2.4 TB/s) and less power than those that are sold with 80 GB.
- Pax with FSDP: NVIDIA/JAX-Toolbox at 08b08d19be, rosetta/rosetta/projects/pax/README.md, sequences/s of 256 GPUs
  without and with Transformer Engine, whose attention is fused; remat of google/paxml at 04516ac858, configs.py.
- Megatron-LM with a tensor axis: huggingface/Megatron-LM, a fork that has the table of Narayanan et al., 2021, at
  100b522bb8, images/cases_april2021.png and README.md: 135 to 163 TFLOP/s with 2,048 tokens a text and 51,200 words.
  The FLOPs of a step are those of the paper: 96 B T L D^2 (1 + T / 6D + V / 16LD), with all layers computed twice.
  Heads, microbatches, schedules and how model parallelism is divided are not in the table: here heads of 96 to 160
  features, tensor parallelism in a host of 8 GPUs, 1F1B for what remains, and microbatches of 4 texts, with stages 1.
  It computes attention with products and a softmax (section 4.2), as XLA does.
- Megatron-LM with ZeRO-3 of DeepSpeed: table 2 of the same paper. Layers are gathered for the forward pass, for
  recomputing it and for the backward pass (Rajbhandari et al., "ZeRO-Infinity", 2021, section 4.1), array by array, and
  computing waits for each (microsoft/DeepSpeed pull request 1188: "the async version is not async at all").

Computing also waits for the gathers of Pax, each in the iteration of the loop over layers that reads it: its flags lack
xla_gpu_enable_pipelined_all_gather, which is newer.

The other rates of Megatron-LM and MaxText are their FLOP/s over the FLOPs of a token, 6 per parameter of a matrix and
12 per layer, feature and position. MaxText and torchtitan choose what to save operation by operation, here remat dots.
"""

import math
import statistics
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.choose import planner
from jaxpar.choose.candidates import Space
from jaxpar.choose.costs.layers import TracedLayers
from jaxpar.choose.costs.machine import GpuMachine
from jaxpar.cluster.files import find_named
from jaxpar.command_line import Parser
from jaxpar.errors import exit_code
from scripts.bench.vocabulary import DEFAULTS, WORDS, make_problem

LLAMA: dict[str, Any] = {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.positions": "rotary"}


class Model(NamedTuple):
    """A model: its features, heads and layers, the tokens of a text, the words, and other keys of the config."""

    features: int
    heads: int
    layers: int
    tokens: int = 2048
    words: int = WORDS
    others: Mapping[str, Any] = {}


MODELS = {
    "125m": Model(768, 12, 12),
    "350m": Model(1024, 16, 24),
    "760m": Model(1536, 12, 24),
    "1b": Model(2048, 16, 24),
    "3b": Model(2560, 20, 32),
    "5b": Model(4096, 32, 24),
    "7b": Model(4096, 32, 32),
    "13b": Model(5120, 40, 40),
    "30b": Model(7168, 56, 48),
    "70b": Model(8192, 64, 80),
    "gpt 1.7b": Model(2048, 16, 24, 4096, 131_072),
    "gpt 1.7b a": Model(2304, 24, 24, words=51_200),
    "gpt 3.6b": Model(3072, 32, 30, words=51_200),
    "gpt 7.5b": Model(4096, 32, 36, words=51_200),
    "gpt 18b": Model(6144, 48, 40, words=51_200),
    "gpt 39b": Model(8192, 64, 48, words=51_200),
    "gpt 76b": Model(10_240, 80, 60, words=51_200),
    "gpt 145b": Model(12_288, 96, 80, words=51_200),
    "gpt 175b": Model(12_288, 96, 96, words=51_200),
    "gpt 310b": Model(16_384, 128, 96, words=51_200),
    "gpt 530b": Model(20_480, 128, 105, words=51_200),
    "gpt 1t": Model(25_600, 160, 128, words=51_200),
    "175b": Model(12_288, 96, 96),
    "llama2 7b": Model(4096, 32, 32, 4096, 32_000, LLAMA | {"model.mlp_size": 11_008}),
    "llama3 8b": Model(4096, 32, 32, 8192, 128_256, LLAMA | {"model.mlp_size": 14_336, "model.num_kv_heads": 8}),
}


class Published(NamedTuple):
    """A published rate: the model, the GPUs, texts of a microbatch, microbatches, remat, tokens/s of a GPU, others."""

    model: str
    cluster: str
    size: int
    accumulation: int
    remat: str
    rate: float
    program: str = "MPT"
    exchange: Mapping[str, Any] = {"exchange": "zero3"}
    gathers: int = 0  # gathers of a layer in a step, if computing waits for them and all reductions; 0: as in jaxpar


def _narayanan(model: str, teraflops: float) -> float:
    """Return the tokens/s of a GPU, from its FLOP/s as Narayanan et al. count them."""
    of = MODELS[model]
    width = 1 + of.tokens / (6 * of.features) + of.words / (16 * of.layers * of.features)
    return teraflops * 1e12 / (96 * of.layers * of.features**2 * width)


def _deepspeed(model: str, hosts: int, size: int, teraflops: float) -> "Published":
    """Return a row of ZeRO-3 without model parallelism."""
    rate = _narayanan(model, teraflops)
    return Published(model, f"a100-80gb:{hosts}x8", size, 1, "full", rate, "Megatron, ZeRO-3", ARRAY_BY_ARRAY, 3)


def _megatron(model: str, hosts: int, tensor: int, batch: int, teraflops: float, stages: int = 1) -> "Published":
    """Return a row with a tensor axis, from the FLOP/s of a GPU."""
    gpus, rate = 8 * hosts, _narayanan(model, teraflops)
    settings, size = {"exchange": "ddp", "model.attention": "xla", "mesh.tensor": tensor}, 4 if stages == 1 else 1
    name = f"Megatron, tensor {tensor}"
    if stages > 1:
        settings |= {"strategy": "pipeline", "mesh.stage": stages, "pipeline.schedule": "1f1b"}
        settings |= {"pipeline.partition": "flops", "pipeline.executor": "dispatch"}
        name += f", {stages} stages"
    number = batch * tensor * stages // (gpus * size)
    return Published(model, f"a100-80gb:{hosts}x8", size, number, "full", rate, name, settings)


UNFUSED = {"exchange": "zero3", "model.attention": "xla"}
ARRAY_BY_ARRAY = UNFUSED | {"exchange_options.bucket_bytes": 1}
LARGE_BUCKETS = {"exchange": "zero1", "exchange_options.bucket_bytes": 4 * 48_000_000}
HSDP: dict[str, Any] = {"exchange": "hsdp", "exchange_options.group": 8}
ROWS = (
    Published("125m", "a100-80gb:8", 32, 2, "none", 141_737),
    Published("350m", "a100-80gb:8", 32, 2, "none", 58_782),
    Published("760m", "a100-80gb:8", 24, 2, "none", 32_434),
    Published("1b", "a100-80gb:8", 14, 4, "none", 20_513),
    Published("3b", "a100-80gb:8", 10, 2, "none", 10_811),
    Published("7b", "a100-80gb:8", 6, 2, "none", 4_641),
    Published("13b", "a100-80gb:8", 2, 3, "none", 2_262),
    Published("30b", "a100-80gb:8", 3, 21, "full", 916),
    Published("70b", "a100-80gb:8x8", 8, 4, "full", 410),
    Published("760m", "h100:8", 24, 2, "none", 63_147),
    Published("1b", "h100:8", 14, 1, "none", 45_455),
    Published("7b", "h100:8", 6, 1, "none", 10_643),
    Published("13b", "h100:8x8", 2, 1, "none", 4_800),
    Published("13b", "h100:16x8", 16, 1, "full", 5_080),
    Published("30b", "h100:16x8", 8, 1, "full", 2_199),
    Published("70b", "h100:16x8", 8, 1, "full", 1_058),
    Published("70b", "h100:64x8", 8, 1, "full", 1_007),
    Published("gpt 1.7b", "h100:6x8", 4, 1, "none", 36_259, "Megatron", LARGE_BUCKETS),
    _megatron("gpt 1.7b a", 4, 1, 512, 137),
    _megatron("gpt 3.6b", 8, 2, 512, 138),
    _megatron("gpt 7.5b", 16, 4, 512, 142),
    _megatron("gpt 18b", 32, 8, 1024, 135),
    _megatron("gpt 39b", 64, 8, 1536, 138, 2),
    _megatron("gpt 76b", 128, 8, 1792, 140, 4),
    _megatron("gpt 145b", 192, 8, 2304, 148, 8),
    _megatron("gpt 310b", 240, 8, 2160, 155, 16),
    _megatron("gpt 530b", 315, 8, 2520, 163, 35),
    _megatron("gpt 1t", 384, 8, 3072, 163, 64),
    _deepspeed("gpt 175b", 48, 4, 144),
    _deepspeed("gpt 175b", 96, 2, 88),
    _deepspeed("gpt 175b", 192, 1, 44),
    _deepspeed("gpt 530b", 80, 4, 138),
    _deepspeed("gpt 530b", 140, 2, 98),
    _deepspeed("gpt 530b", 280, 1, 48),
    Published("5b", "a100-80gb:32x8", 8, 1, "dots", 3_724, "Pax", UNFUSED, 2),
    Published("5b", "a100-80gb:32x8", 8, 1, "dots", 4_791, "Pax, fused", gathers=2),
    Published("175b", "a100-80gb:32x8", 6, 1, "full", 146.3, "Pax", UNFUSED, 2),
    Published("175b", "a100-80gb:32x8", 6, 1, "full", 157.0, "Pax, fused", gathers=2),
    Published("llama2 7b", "h100:8", 4, 1, "dots", 10_676, "MaxText"),
    Published("llama2 7b", "h100:2x8", 4, 1, "dots", 9_157, "MaxText", HSDP),
    Published("llama2 7b", "h100:4x8", 4, 1, "dots", 8_832, "MaxText", HSDP),
    Published("llama2 7b", "h100:8x8", 4, 1, "dots", 8_875, "MaxText", HSDP),
    Published("llama2 7b", "h100:16x8", 4, 1, "dots", 8_137, "MaxText", HSDP),
    Published("llama3 8b", "h100:8", 2, 1, "dots", 6_667, "torchtitan"),
    Published("llama3 8b", "h100:16x8", 2, 1, "dots", 6_514, "torchtitan"),
)


def main() -> None:
    """Print a row for each published rate, and the median error."""
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="print the rows whose program contains this text")
    only = parser.parse().only
    rates = f"{'predicted':>10} {'published':>10} tokens/s of a GPU"
    print(f"{'model':10} {'GPUs':15} {'microbatch':>10} {'remat':6} {rates}  ratio  program")
    ratios = []
    for row in (row for row in ROWS if only in row.program):
        rate = predicted_rate(row)
        ratios.append(rate / row.rate)
        size = f"{row.accumulation} x {row.size}"
        print(
            f"{row.model:10} {row.cluster:15} {size:>10} {row.remat:6} {rate:10,.0f} {row.rate:10,.0f} "
            f"{ratios[-1]:25.3f}  {row.program}",
            flush=True,
        )
    errors = [abs(ratio - 1) for ratio in ratios]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"geometric mean of the ratios {mean:.3f}; median error {statistics.median(errors):.1%}")


def predicted_rate(row: Published) -> float:
    """Return the predicted tokens/s of a GPU."""
    cluster = find_named(row.cluster, "cluster")[1]
    config: Any = configs.default_config()
    model, together = MODELS[row.model], row.exchange.get("mesh.tensor", 1) * row.exchange.get("mesh.stage", 1)
    replicas = cluster.num_devices // together
    of_step = {"model.remat": row.remat, "optimizer.accumulation_steps": row.accumulation}
    if together > row.exchange.get("mesh.tensor", 1):
        of_step = {"pipeline.remat": row.remat, "pipeline.num_microbatches": row.accumulation}
    config.update_from_flattened_dict(
        {key: value for key, value in DEFAULTS.items() if key != "model.max_length"}
        | {
            "model.hidden_size": model.features,
            "model.num_heads": model.heads,
            "model.num_layers": model.layers,
            "mesh.data": replicas,
            "batch_size": replicas * row.size * row.accumulation,
        }
        | of_step
        | dict(model.others or {"model.max_length": model.tokens})
        | dict(row.exchange)
    )
    problem = make_problem(config, cluster, words=model.words, length=model.tokens)
    assert cluster.memory_bytes is not None
    layers_of = TracedLayers(problem._replace(accumulation_steps=1), cluster)
    space = Space(config, problem, layers_of, GpuMachine(cluster), cluster.memory_bytes)
    plan = strategies.plan(config, problem, cluster)
    found = planner.candidate_of_plan(space, config, plan)
    seconds = found.costs.seconds
    if row.gathers:
        times = {"all-gather": row.gathers / 2}  # relative to those of jaxpar
        sent = sum(times.get(one.kind, 1.0) * space.machine.collective(one, plan.axes) for one in plan.traffic)
        seconds = found.costs.compute + sent + found.costs.update
    return config.batch_size * model.tokens / seconds / cluster.num_devices


if __name__ == "__main__":
    sys.exit(exit_code(main))
