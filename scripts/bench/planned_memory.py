"""Compares the memory and time that the planner predicts with those of the compiled step.

    scripts/python scripts/bench/planned_memory.py [--target=h100:8] [--held-out] [--large] [--only=TEXT]

Compiles the step of each config for GPUs that need not exist. Prints the predicted time of a step / that of the
program (as `jaxpar audit --time`); the predicted bytes of a device / those of XLA's buffer assignment (arguments +
temporary arrays + results that reuse no argument, as `jaxpar audit`); and the median error of the bytes and the share
within 10%. Nothing is computed. It needs the extra `targets`. --held-out takes other models and sizes, with which the
prediction was not developed, and --large those of OF_LARGE and PROGRAMS, of which it shows time, memory, and the
waits of the program for collectives.
"""

import statistics
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar import config as configs
from jaxpar import models, strategies, tasks
from jaxpar.choose import planner
from jaxpar.choose.candidates import Space
from jaxpar.choose.costs.machine import GpuMachine
from jaxpar.choose.costs.step import StepCosts
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.cluster import Cluster
from jaxpar.cluster.target import Target, find_target
from jaxpar.command_line import Parser
from jaxpar.core import optimizer
from jaxpar.core.step import Problem
from jaxpar.data import DataInfo
from jaxpar.errors import exit_code
from jaxpar.inspect import audit, step_time
from jaxpar.inspect.step_time import StepTime
from scripts.bench import large_models
from scripts.bench.large_models import Case as LargeCase
from scripts.bench.tables import show

CLASSES, STEPS = 10, 100
PIPELINE = (
    *("strategy=pipeline", "mesh.stage=2", "mesh.data=4", "pipeline.num_microbatches=4"),
    "pipeline.executor=lockstep",
)
CONFIGS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "ddp, remat full": ("model.remat=full",),
    "ddp, 2 microbatches": ("optimizer.accumulation_steps=2",),
    "zero1": ("exchange=zero1",),
    "zero2": ("exchange=zero2",),
    "zero2, remat full": ("exchange=zero2", "model.remat=full"),
    "zero3": ("exchange=zero3",),
    "gpipe 2 x 4": (*PIPELINE, "pipeline.schedule=gpipe"),
    "1f1b 2 x 4": (*PIPELINE, "pipeline.schedule=1f1b"),
    "1f1b 2 x 4, remat full": (*PIPELINE, "pipeline.schedule=1f1b", "pipeline.remat=full"),
    "zb_h1 2 x 4": (*PIPELINE, "pipeline.schedule=zb_h1"),
}
GPT = ("task=causal_lm", "model.name=gpt", "model.size=gpt2")


class Case(NamedTuple):
    """A model: the texts of a batch, tokens of each, words, and settings."""

    size: int
    length: int
    words: int
    settings: tuple[str, ...]


LLAMA = ("model.norm=rmsnorm", "model.activation=swiglu", "model.num_kv_heads=2")  # besides positions
CASES = {
    "bert base, 3 layers": Case(
        256, 128, 30522, ("model.size=base", "model.num_layers=3", "model.dtype=bfloat16", "model.attention=xla")
    ),
    "gpt2, 3 layers": Case(
        64, 512, 50304, (*GPT, "model.num_layers=3", "model.dtype=bfloat16", "model.dropout=0.0", "model.attention=xla")
    ),
    "bert base": Case(256, 64, 30522, ("model.size=base", "model.dtype=bfloat16", "model.attention=xla")),
    "gpt2": Case(32, 512, 50304, (*GPT, "model.dtype=bfloat16", "model.attention=xla")),
}
HELD_OUT_CASES = {
    "swiglu, 6 layers": Case(
        64,
        256,
        32000,
        (
            *GPT,
            *LLAMA,
            "model.num_layers=6",
            "model.hidden_size=1024",
            "model.num_heads=16",
            "model.dtype=bfloat16",
            "model.dropout=0.0",
            "model.attention=xla",
        ),
    ),
    "bert large, 4 layers": Case(64, 256, 30522, ("model.size=large", "model.num_layers=4", "model.attention=xla")),
}
GPT2 = large_models.GPT | {"model.size": "gpt2", "data.vocab_size": 50304, "batch_size": 256, "model.remat": "none"}
GPT2_MEDIUM = GPT2 | {"model.size": "gpt2_medium", "data.max_length": 512, "batch_size": 64, "model.attention": "xla"}
LLAMA_8B = large_models.LLAMA | {"batch_size": 8}
LLAMA_1B = LLAMA_8B | {"model.num_layers": 16, "model.hidden_size": 2048, "model.mlp_size": 8192, "batch_size": 32}
GPT_8 = {
    **{"task": "causal_lm", "model.name": "gpt", "model.num_layers": 8, "model.hidden_size": 1024},
    **{"model.num_heads": 16, "model.dropout": 0.0, "data.max_length": 1024, "data.vocab_size": 50257},
    **{"batch_size": 32, "strategy": "pipeline", "pipeline.schedule": "1f1b", "pipeline.num_microbatches": 8},
}
GPT_4 = GPT_8 | {"strategy": "data_parallel", "model.num_layers": 4, "model.attention": "xla"}
IN_LOCKSTEP, DISPATCHED = ({"pipeline.executor": executor} for executor in ("lockstep", "dispatch"))
NOT_TIED = {"model.tied_embeddings": False}
SCHEDULES_OF_8: dict[str, dict[str, Any]] = {
    **{name: {"pipeline.schedule": name} for name in ("gpipe", "eager_1f1b", "zb_h1", "zb_h2", "zb_v")},
    "interleaved_1f1b": {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2},
    "1f1b, remat full,": {"pipeline.remat": "full"},
    **{f"{one}, untied,": {"pipeline.schedule": one} | NOT_TIED for one in ("pipedream", "pipedream_2bw")},
}
OF_LOCKSTEP = ("eager_1f1b", "zb_v", "1f1b, remat full,", "pipedream_2bw, untied,")
BERT_SHORT: dict[str, Any] = {
    **{"model.size": "base", "data.max_length": 64, "data.vocab_size": 30522, "model.attention": "xla"},
    **{"batch_size": 256, "strategy": "pipeline", "mesh.stage": 2},
    **{"pipeline.schedule": "1f1b", "pipeline.num_microbatches": 4},
}
OF_LARGE = {  # model and plan of each case of large_models.py
    "bert_base": ("BERT base", "ddp"),
    "gpt2_xl": ("GPT-2 XL, remat full", "zero3"),
    "llama_8b_zero3": ("Llama 8B, remat full, 64 GPUs", "zero3"),
    "gpt2_1f1b_lockstep": ("GPT-2 124M", "1f1b in lockstep"),
    "gpt2_1f1b_dispatch": ("GPT-2 124M", "1f1b dispatched"),
    "gpt2_zb_h1_lockstep": ("GPT-2 124M", "zb_h1 in lockstep"),
    "gpt2_zb_h1_dispatch": ("GPT-2 124M", "zb_h1 dispatched"),
    "gpt2_xl_lockstep": ("GPT-2 XL, 4 GPUs", "1f1b in lockstep"),
    "gpt2_xl_dispatch": ("GPT-2 XL, 4 GPUs", "1f1b dispatched"),
    "llama_8b_lockstep": ("Llama 8B, 64 GPUs", "1f1b, remat full, in lockstep, 8 x 8"),
    "llama_8b_dispatch": ("Llama 8B, 64 GPUs", "1f1b, remat full, dispatched, 8 x 8"),
}
PROGRAMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(
        ("GPT-2 124M", name, GPT2 | {"exchange": name})
        for name in ("ddp", "horovod", "byteps", "zero1", "zero2", "zero3")
    ),
    ("GPT-2 124M", "hsdp, groups of 4", GPT2 | {"exchange": "hsdp", "exchange_options.group": 4}),
    ("GPT-2 124M, dropout 0.1", "ddp", GPT2 | {"exchange": "ddp", "model.dropout": 0.1}),
    *(("Llama 1B", name, LLAMA_1B | {"exchange": name}) for name in ("ddp", "zero2", "zero3")),
    ("Llama 8B", "zero3", LLAMA_8B | {"exchange": "zero3"}),
    ("GPT-2 medium, 64 x 512, XLA's attention", "ddp, tensor 2 x 4 replicas", GPT2_MEDIUM | {"mesh.tensor": 2}),
    ("8-layer GPT", "1f1b in lockstep, 4 x 2", GPT_8 | IN_LOCKSTEP | {"mesh.stage": 4}),
    ("8-layer GPT", "1f1b dispatched, 4 x 2", GPT_8 | DISPATCHED | {"mesh.stage": 4}),
    *(
        ("8-layer GPT", f"1f1b {how}, 2 stages, tensor 4", GPT_8 | executor | {"mesh.stage": 2, "mesh.tensor": 4})
        for how, executor in (("in lockstep", IN_LOCKSTEP), ("dispatched", DISPATCHED))
    ),
    ("8-layer GPT", "1f1b in lockstep, 2 x 4, zero1", GPT_8 | IN_LOCKSTEP | {"mesh.stage": 2, "exchange": "zero1"}),
    *(
        ("8-layer GPT", f"1f1b dispatched, 2 x 4, {name}", GPT_8 | DISPATCHED | {"mesh.stage": 2} | sharded)
        for name, sharded in (("zero1", {"exchange": "zero1"}), ("zero2", {"exchange": "zero2"}))
    ),
    *(
        ("8-layer GPT", f"{name} {how}, 4 x 2", GPT_8 | executor | {"mesh.stage": 4} | SCHEDULES_OF_8[name])
        for how, executor, names in (
            ("dispatched", DISPATCHED, SCHEDULES_OF_8),
            ("in lockstep", IN_LOCKSTEP, OF_LOCKSTEP),
        )
        for name in names
    ),
    *(
        ("BERT base, 256 x 64, XLA's attention", f"1f1b {name}, 2 x 4", BERT_SHORT | executor)
        for name, executor in (("in lockstep", IN_LOCKSTEP), ("dispatched", DISPATCHED))
    ),
    ("8-layer GPT", "ddp, context 2 x 4 replicas", GPT_8 | {"strategy": "data_parallel", "mesh.context": 2}),
    *(
        ("4-layer GPT, XLA's attention", f"ddp, {name}", GPT_4 | settings)
        for name, settings in (
            ("tensor 4 x 2 replicas", {"mesh.tensor": 4}),
            ("context 2, tensor 4", {"mesh.context": 2, "mesh.tensor": 4}),
            ("context 8", {"mesh.context": 8}),
            ("context 8, 1 key head", {"mesh.context": 8, "model.num_kv_heads": 1}),
        )
    ),
    ("GPT-2 124M", "zero2, offload", GPT2 | {"exchange": "zero2", "exchange_options.offload": True}),
)


def main() -> None:
    """Print the table."""
    parser = Parser(__doc__)
    parser.add_argument("--target", default="h100:8", help="compile for these GPUs (h100:8)")
    parser.add_argument("--held-out", action="store_true", help="take the models that were held out")
    parser.add_argument("--large", action="store_true", help="take the models of PROGRAMS")
    parser.add_argument("--only", default="", help="compile the configs whose `model: name` contains this text")
    arguments = parser.parse()
    errors: list[float] = []
    models_of = HELD_OUT_CASES if arguments.held_out else CASES
    rows = [
        (model, name, arguments.target, case, CONFIGS[name]) for model, case in models_of.items() for name in CONFIGS
    ]
    if arguments.large:
        large = [(*names, large_models.CASES[case]) for case, names in OF_LARGE.items()]
        large += [(model, name, LargeCase("h100:8", values)) for model, name, values in PROGRAMS]
        rows = [(model, name, case.target, *of_large(case)) for model, name, case in large]
    listed, ratios = [], {}
    for model, name, gpus, case, settings in rows:
        if arguments.only in f"{model}: {name}":
            costs, needed, time = compare(case, settings, find_target(gpus))
            total, seconds = sum(needed.values()), time.seconds
            errors.append(abs(costs.nbytes / total - 1))
            ratios[name, model] = f"{costs.nbytes / total:.3f}"
            of_time = f"{1e3 * costs.seconds:.1f} / {1e3 * seconds:.1f} ms = {costs.seconds / seconds:.2f}"
            memory = f"{costs.nbytes / 1e9:.3g} / {total / 1e9:.3g} GB = {costs.nbytes / total:.3f}"
            listed.append([model, name, of_time, memory, f"{time.exposed / seconds:.1%}"])
            print(f"{model:20} {name:24} {of_time}  {memory}", flush=True)
    if arguments.large:
        show(["model", "plan", "step time, planned / compiled", "memory, planned / compiled", "waits"], listed)
    else:
        names = dict.fromkeys(name for name, _ in ratios)
        grid = [[name, *(ratios.get((name, model), "") for model in models_of)] for name in names]
        show(["config", *models_of], grid)
    within = sum(error <= 0.1 for error in errors)
    print(f"median error {statistics.median(errors):.1%}; {within} of {len(errors)} within 10%")


def of_large(large: LargeCase) -> tuple[Case, tuple[str, ...]]:
    """Return a case of large_models.py, and its strategy."""
    values = {"model.dtype": "bfloat16", "data.source": "synthetic", **large.values}
    size, length, words = (values.pop(key) for key in ("batch_size", "data.max_length", "data.vocab_size"))
    is_model = {key: key.startswith(("model.", "task", "data.")) and key != "model.remat" for key in values}
    of_model, others = (
        tuple(f"{key}={value}" for key, value in values.items() if is_model[key] == wanted) for wanted in (True, False)
    )
    return Case(size, length, words, of_model), others


def compare(case: Case, settings: tuple[str, ...], target: Target) -> tuple[StepCosts, dict[str, int], StepTime]:
    """Return the predicted costs, the parts of the bytes that the compiled step needs, and its predicted time."""
    config, cluster = configured(case, settings), target.cluster
    problem = make_problem(config, case, cluster)
    plan: Any = strategies.plan(config, problem, cluster)
    whole = make_problem(configured(case, ()), case, cluster)  # without rematerialization
    space = Space(config, whole, TracedLayers(whole, cluster), GpuMachine(cluster), usable_bytes=0)
    found = planner.candidate_of_plan(space, config, plan)
    strategy = strategies.build(plan, problem, target.devices)
    programs = strategy.compile()
    predicted = step_time.predict(programs, cluster, plan.offloaded_bytes)
    return found.costs, audit.needed_bytes(programs, strategy), predicted


def configured(case: Case, settings: tuple[str, ...]) -> Any:
    """Return the config of a row."""
    config = configs.default_config()
    lengths = [f"data.max_length={case.length}", f"batch_size={case.size}"]
    if "model.positions=rotary" not in case.settings:
        lengths.append(f"model.max_length={case.length}")
    configs.override(config, [f"--config.{value}" for value in (*lengths, *case.settings, *settings)])
    return config


def make_problem(config: Any, case: Case, cluster: Cluster) -> Problem:
    """Return the problem of a config on texts that fill all positions."""
    is_lm = config.task == "causal_lm"
    names = () if is_lm else tuple(map(str, range(CLASSES)))
    info = DataInfo("text", (case.length,), len(names), names, case.words, 0)
    text, of_text = (case.size, case.length), (case.size,)
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {"inputs": (np.int32, text), "index": (np.int32, of_text)}
    if is_lm:
        shapes |= {"labels": (np.int32, text), "weights": (np.float32, text)}
    else:
        shapes |= {"mask": (np.bool_, text), "labels": (np.int32, of_text), "weights": (np.float32, of_text)}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, shape) in shapes.items()}
    made = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, STEPS))
    model, task = models.build(config, info, cluster), tasks.find_task(config)
    return Problem(model, made, config.optimizer.accumulation_steps, batch, STEPS, task)


if __name__ == "__main__":
    sys.exit(exit_code(main))
