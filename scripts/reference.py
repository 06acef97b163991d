"""Writes docs/reference: config keys, commands, exchanges, schedules, models and files, from what the code reads.

    scripts/python scripts/reference.py

tests/docs/test_reference.py compares the pages with what this script would write.
"""

import ast
import contextlib
import importlib
import io
import os
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxpar import cluster, commands, config_help, data, files, models, strategies, tasks
from jaxpar import config as configs
from jaxpar.choose.costs.rates import efficiency
from jaxpar.cluster.gpus import gpu_kinds
from jaxpar.command_line import Parser
from jaxpar.core.optimizer import OPTIMIZERS, make_optimizer
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, exit_code
from jaxpar.exchange.named import EXCHANGES, OPTION_VALUES, NamedExchange
from jaxpar.models import num_parameters
from jaxpar.run import resume
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS, fewest_microbatches, most_versions, periodic_table
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table, steady_bubble_rate

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
NOTE = "This page is written by `scripts/python scripts/reference.py` from the code."
REPLICAS, WIDTH, NUM_STEPS = 4, 1024, 1000  # of the plans whose traffic is listed
STAGES, MICROBATCHES = 8, 32  # of the simulated schedules
UNITS = Times(1, 1, 1)
INPUTS, CLASSES = {"text": (128,), "image": (224, 224, 3), "vector": (784,)}, 1000
# The vocabulary and the number of learned positions of the published models.
PUBLISHED = {"bert": (30_522, 512), "gpt": (50_257, 1024), "llama": (128_256, None)}


def main() -> None:
    """Write the pages."""
    Parser(__doc__).parse()
    for name, page in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page())


def config_page() -> str:
    """Return the page of all config keys."""
    config, defaults = configs.default_config(), configs.keys(configs.default_config())
    lines = ["# Config keys", "", NOTE, "", *filled(CONFIG_HEAD)]
    head = ["| Key of `config` | Default | Meaning | On resume |", "|---|---|---|---|"]
    lines += head
    for one in config_help.described():
        if one.is_section:
            lines += ["", f"## {one.name}", "", *filled(cell(one.comment)), *head]
            continue
        changes = "may change" if resume.may_change(one.name, config) else "fixed"
        if one.heading:
            lines.append(row("", "", cell(one.heading), ""))
        lines.append(row(f"`{one.name}`", f"`{defaults[one.name]!r}`", cell(one.comment), changes))
    return "\n".join(lines) + "\n"


CONFIG_HEAD = """
Set a key on the command line with `--config.KEY=VALUE`, or in a config file. `--help=SECTION` prints the keys of a
section, and `--print_config` those of a config. A resumed run may change the keys for which the last column has "may
change"; the others define the result and are fixed. `config.num_steps` and `config.num_epochs` may change with a
constant learning rate without warm-up.
"""


def commands_page() -> str:
    """Return the page of all commands, with their help."""
    lines = ["# Commands", "", NOTE, "", "In a clone, `source .venv/bin/activate` makes `jaxpar` available.", ""]
    lines += ["| Command | What it does |", "|---|---|"]
    lines += [
        row(f"[`jaxpar {name}`](#jaxpar-{name.replace(' ', '-')})", text) for name, text in commands.COMMANDS.items()
    ]
    for name in commands.COMMANDS:
        lines += ["", f"## jaxpar {name}", "", "```text", help_of(name), "```"]
    return "\n".join(lines) + "\n"


def help_of(name: str) -> str:
    """Return what a command prints for --help."""
    module, printed = importlib.import_module(f"jaxpar.commands.{name.replace(' ', '_')}"), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        module.main([name, "--help"] if name == "train" else ["--help"])
    return printed.getvalue().rstrip()


def exchanges_page() -> str:
    """Return the page of all exchanges and their options."""
    lines = ["# Exchanges", "", NOTE, "", *filled(EXCHANGES_HEAD)]
    lines += ["| `config.exchange` | Of | What replicas send | Bytes / `ddp` | Result | Optimizers | Pipelines |"]
    lines += ["|---|---|---|---|---|---|---|"]
    ddp = sent("ddp")
    for name, one in EXCHANGES.items():
        result = one.differs or "that of one device"
        lines.append(
            row(
                f"`{name}`",
                one.of,
                one.sends,
                f"{sent(name) / ddp:.3g}",
                result,
                optimizers(one),
                yes(one.on_gradients),
            )
        )
    comments = {one.name: one.comment for one in config_help.described()}
    lines += ["", "## Options", "", *filled(OPTIONS_HEAD), "| Key | Meaning | It must | Default |", "|---|---|---|---|"]
    for key, option in OPTION_VALUES.items():
        of: dict[str, list[str]] = {}
        for name, one in EXCHANGES.items():
            if key in one.options:
                of.setdefault(repr(one.options[key]), []).append(f"`{name}`")
        by_value = "; ".join(
            f"{'none' if value == repr('') else value}: {', '.join(names)}" for value, names in of.items()
        )
        lines.append(row(f"`{key}`", cell(comments[f"exchange_options.{key}"]), option.must, by_value))
    return "\n".join(lines) + "\n"


EXCHANGES_HEAD = f"""
Set `config.exchange`. [How exchanges work](../explanation/exchanges.md) explains them, and [choose an
exchange](../howto/exchange.md) helps you choose.

Bytes are those that a device sends in a step, in the plan for an MLP of width {WIDTH:,} on {REPLICAS} replicas, on
average over {NUM_STEPS:,} steps, warm-up included. For `dp`, they are those of the first device. With `m` accumulation
steps, `zero2` sends (m + 1) / 2 times as many, and `zero3` and `hsdp` m times as many. *That of one device* means equal
up to rounding, unless an option changes the result. Pipelines need the executor `dispatch` for `zero2`, `zero3` and
`hsdp`.
"""
OPTIONS_HEAD = """
Set `config.exchange_options.KEY`. An option that the exchange lacks is refused. Defaults of 0 or none, except that
of `momentum`, are automatic.
"""


def optimizers(one: NamedExchange) -> str:
    """Return the optimizers that an exchange supports."""
    if one.adamw:
        return ", ".join(f"`{name}`" for name, kind in OPTIMIZERS.items() if kind.is_adamw)
    return ", ".join(f"`{name}`" for name, kind in OPTIMIZERS.items() if kind.elementwise) if one.shards else "all"


def sent(exchange: str, group: int | None = None) -> float:
    """Return the bytes that a device sends in a step of an MLP with this exchange. group: an option of the exchange."""
    there = cluster.named_cluster("cpu", REPLICAS)
    config = configs.default_config()
    config.exchange, config.batch_size, config.optimizer.schedule = exchange, REPLICAS, "constant"
    config.exchange_options.group = group
    config.data_parallel.implementation, config.model.name, config.model.hidden_size = "shard_map", "mlp", WIDTH
    info = data.DataInfo("vector", (WIDTH,), WIDTH, ("",) * WIDTH, 0, 0)
    x = jax.ShapeDtypeStruct((REPLICAS, WIDTH), jnp.float32)
    batch = {
        "inputs": x,
        "labels": x.update(shape=(REPLICAS,), dtype=jnp.int32),
        "weights": x.update(shape=(REPLICAS,)),
    }
    model = models.build(config, info, there)
    problem = Problem(model, make_optimizer(config, lambda _: 1e-3), 1, batch, NUM_STEPS, tasks.find_task(config))
    return strategies.plan(config, problem, there).wire_bytes


def schedules_page() -> str:
    """Return the page of all pipeline schedules."""
    lines = ["# Schedules", "", NOTE, "", *filled(SCHEDULES_HEAD)]
    lines += [
        "| Schedule | What it does | Step | In lockstep | Bubble | Microbatches in memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in SCHEDULES.items():
        table = make_table(name, num_devices=STAGES, num_microbatches=MICROBATCHES, num_chunks=one.num_chunks)
        found = simulate_table(table, UNITS)
        lines.append(
            row(
                f"`{name}`" + (f", {one.num_chunks} chunks per device" if one.num_chunks > 1 else ""),
                source(one.order),
                f"{float(found.makespan):g}",
                f"{float(found.lockstep):g}",
                f"{float(found.bubble_rate):.1%}",
                f"{float(max(found.peak_in_flight)):g}",
            )
        )
    lines += ["", "## Without a flush", "", *filled(CONTINUOUS_HEAD)]
    lines += ["| Schedule | Weights | Microbatches of a batch | Bubble | Versions of the weights in memory |"]
    lines += ["|---|---|---|---|---|"]
    stages = [1] * STAGES
    for name, without in CONTINUOUS.items():
        few = fewest_microbatches(name, stages)
        bubble = steady_bubble_rate(periodic_table(name, stages, few), UNITS)
        lines.append(
            row(f"`{name}`", without.reason, f"{few} or more", f"{bubble:.1%}", str(most_versions(name, stages, few)))
        )
    return "\n".join(lines) + "\n"


SCHEDULES_HEAD = f"""
Set `config.pipeline.schedule`, or leave it at `auto`, which chooses the fastest one with a flush and one stage per
device that fits the memory. You can also [write your own](../howto/own_schedule.md). [How pipelines
work](../explanation/pipelines.md) explains the terms.

The costs are those of `jaxpar simulate` for {STAGES} devices and {MICROBATCHES} microbatches. A forward pass, the
gradient of the input and the gradient of the weights take one unit of time each. *Step* is the time of a step if
devices wait only for their inputs, *in lockstep* if all wait for each other after each clock. *Bubble* is the share of
its step in which the device with the longest step is idle, as in the papers. There, a device can begin the
next step before the others have finished. Here it cannot, so compare schedules by *Step*. *Microbatches in memory* is
the largest number of microbatches between their forward and backward passes on a device; on a device with two chunks,
each counts 0.5.
"""
CONTINUOUS_HEAD = "These schedules never drain, and train with older weights. The bubble is that of the full pipeline."


def source(function: Callable[..., object]) -> str:
    """Return the first paragraph of the docstring of a schedule."""
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())


def models_page() -> str:
    """Return the page of models, optimizers and GPUs."""
    lines = ["# Models, optimizers and GPUs", "", NOTE, "", *filled(MODELS_HEAD)]
    lines += ["| `config.model.name` | `config.model.size` | Sizes | Parameters | Tasks |", "|---|---|---|---:|---|"]
    for name in models.MODELS:
        possible = ", ".join(f"`{task}`" for task in tasks.TASKS if model_of(name, "", task) is not None)
        for size, keys in importlib.import_module(f"jaxpar.models.{name}").SIZES.items():
            shown = ", ".join(f"{key} {value}" for key, value in keys.items() if key in SHOWN)
            model = next(found for task in REVERSED if (found := model_of(name, size, task)) is not None)
            lines.append(row(f"`{name}`", f"`{size}`", shown, f"{num_parameters(model) / 1e6:,.1f} M", possible))
            possible = ""  # those of the first row
    lines += ["", "## Optimizers", "", "| `config.optimizer.name` | Exchanges that divide its state |", "|---|---|"]
    for name, kind in OPTIMIZERS.items():
        lines.append(row(f"`{name}`", yes(kind.elementwise)))
    lines += [
        "",
        "## GPUs",
        "",
        *filled(GPUS_HEAD),
        "| Name | Memory, GB | GB/s | float32, TFLOP/s | bfloat16 | float16 | Reached | Host, GB/s | Network, GB/s |",
        f"|---|{'---:|' * 8}",
    ]
    for name, gpu in gpu_kinds().items():
        there = cluster.named_cluster(name, 1)
        peaks = (f"{there.peak_flops[dtype] / 1e12:g}" for dtype in ("float32", "bfloat16", "float16"))
        memory, *links = (
            f"{rate / 1e9:,.4g}" for rate in (gpu.memory_bandwidth, gpu.links["host"], gpu.links["network"])
        )
        reached = f"{efficiency(there, 'bfloat16'):g}"
        lines.append(row(f"`{name}`", f"{gpu.memory_bytes / 1e9:g}", memory, *peaks, reached, *links))
    return "\n".join(lines) + "\n"


MODELS_HEAD = """
Keys of `config.model`, which [config keys](config.md#model) lists, override the sizes of a model. Parameters are
counted with heads for 1,000 image classes, and with the published vocabularies (`config.model.vocab_size`).
"""
GPUS_HEAD = """
A cluster is `NAME:GPUs` or `NAME:HOSTSxGPUS`, such as `h100:4x8` for 4 hosts of 8. Rates are those of data sheets: of
memory, of matrix products by dtype (float32: TF32 if available), and of links. *Reached* is the share of the
peak that matrix products are assumed to reach.
"""
SHOWN = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "mlp_size")
REVERSED = tuple(reversed(tasks.TASKS))


def model_of(name: str, size: str, task: str) -> models.Model | None:
    """Return a model for a task; None if it does not support the task. size: empty for the smallest."""
    config = configs.default_config()
    config.task, config.model.name = task, name
    config.model.size = size or next(iter(importlib.import_module(f"jaxpar.models.{name}").SIZES))
    kind = models.MODELS[name].kind
    if kind not in tasks.TASKS[task](config).labels.inputs:
        return None
    targets = ("target",) if task == "regression" else ()
    info = data.DataInfo(kind, INPUTS[kind], CLASSES, ("",) * CLASSES, 1, 0, targets)
    if name in ("bert", "gpt"):
        config.model.vocab_size, config.model.max_length = PUBLISHED["llama" if "llama" in size else name]
    if size == "llama_8b" and task == "causal_lm":
        config.model.tied_embeddings = False
    try:
        return models.build(config, info, cluster.named_cluster("cpu", 1))
    except UserError:
        return None


def files_page() -> str:
    """Return the page of the configs and cluster files of the repository, and of what a run writes."""
    lines = ["# Files", "", NOTE, "", "## Configs", "", *filled(CONFIGS_HEAD), "| File | What it is |", "|---|---|"]
    for path in sorted(ROOT.glob("configs/*.py")):
        about, *_ = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
        lines.append(row(f"`{path.relative_to(ROOT)}`", " ".join(about.split())))
    lines += ["", "## Clusters", "", *filled(CLUSTERS_HEAD)]
    lines += ["| File | GPUs | Hosts | What it is |", "|---|---|---:|---|"]
    for path in sorted(ROOT.glob("configs/clusters/*.toml")):
        one = tomllib.loads(path.read_text())
        gpus = f"{one['hosts'] * one['gpus_per_host']} x `{one['gpu']}`"
        lines.append(row(f"`{path.relative_to(ROOT)}`", gpus, f"{one['hosts']}", one["source"]))
    lines += ["", "## Workdir", "", *filled(WORKDIR_HEAD), "| File or folder | Contents |", "|---|---|"]
    written = {**files.FILES, **files.FOLDERS}
    lines += [row(f"`{name}`", about) for name, about in written.items()]
    return "\n".join(lines) + "\n"


CONFIGS_HEAD = """
A config is a Python file whose `get_config` returns the keys that it sets: `--config=FILE`, or `--config=FILE:PRESET`
where a file has presets. The first lines of a file show its commands.
"""
CLUSTERS_HEAD = """
`jaxpar plan`, `jaxpar compare strategies` and others take a cluster by
name, such as `h100:4x8` ([names](models.md#gpus)), or by
file: `--cluster=FILE`. [Copy a file](../howto/cluster_file.md) to set your own memory, bandwidths or prices.
"""
WORKDIR_HEAD = """
A run writes into its workdir:
"""


def resume_page() -> str:
    """Return the page of what may change when a run resumes."""
    lines = ["# What may change on resume", "", NOTE, "", *filled(RESUME_HEAD)]
    lines += ["| Key of `config` | May change | Why |", "|---|---|---|"]
    named, sections = {key for rule in resume.RESUME_RULES for key in rule.keys}, configs.default_config()
    for rule in resume.RESUME_RULES:
        names = []
        for key in rule.keys:
            other = "other " if any(one.startswith(f"{key}.") for one in named) else ""
            is_section = "." not in key and isinstance(sections[key], ConfigDict)
            names.append(f"{other}`{key}.*`" if is_section else f"`{key}`")
        lines.append(row(", ".join(names), yes(rule.may_change), rule.why))
    return "\n".join(lines) + "\n"


RESUME_HEAD = """
*How* a run is computed may change when it [resumes](../howto/resume.md); *what* is computed may not. A
forbidden change ends the run with exit code 2. [Private state](../explanation/checkpoints.md#private-state) is
restored only with the settings that it depends on.
"""


PAGES: dict[str, Callable[[], str]] = {
    "config": config_page,
    "commands": commands_page,
    "exchanges": exchanges_page,
    "schedules": schedules_page,
    "models": models_page,
    "files": files_page,
    "resume": resume_page,
}


def filled(text: str) -> list[str]:
    """Return the lines of paragraphs, as wide as those of a document, and an empty line."""
    paragraphs = (" ".join(part.split()) for part in text.strip().split("\n\n"))
    lines = (textwrap.wrap(part, 100, break_long_words=False, break_on_hyphens=False) for part in paragraphs)
    return [line for part in lines for line in [*part, ""]]


def row(*cells: str) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def yes(value: bool) -> str:
    """Return a truth value as a word."""
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(exit_code(main))
