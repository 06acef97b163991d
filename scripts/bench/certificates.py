"""Counts false alarms of certificates over all strategies, dtypes and three models, and plants errors to find.

    scripts/python scripts/bench/certificates.py [--num_steps=3] [--models=mlp,bert,gpt] [--most=N]
        [--output=runs/certificates.jsonl] [--picture=docs/certificates.png]

Each line of the output is a certificate of a tiny model on 8 virtual CPU devices: its verdict, and the largest error
relative to its tolerance. Then the gradient of one layer is multiplied by a factor that is too large by slightly more,
and slightly less, than the certificate announces. Lines that are in the output already are not measured again.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from jaxpar import certify
from jaxpar import config as configs
from jaxpar.colors import CURVE_COLORS
from jaxpar.command_line import Parser, check_new_file, integer, names, output_path
from jaxpar.compare.pictures import MARKERS
from jaxpar.core import step as steps
from jaxpar.core.step import Problem
from jaxpar.errors import TrainingError, UserError, exit_code
from jaxpar.inspect import certificate, reference
from jaxpar.inspect.reference import Reference
from jaxpar.run.build import Run
from jaxpar.strategies.data_parallel import shard_map
from scripts.bench import tables

BASE = """mesh.virtual_cpu_devices=8 data.source=synthetic data.synthetic_examples=420 batch_size=24
  model.hidden_size=16 model.num_layers=2 model.dropout=0.2 optimizer.lr=0.01"""
TEXTS = "data.max_length=16 data.vocab_size=128 model.num_heads=2 model.mlp_size=32"
MODELS = {
    "mlp": "model.name=mlp model.num_heads=None model.mlp_size=None",
    "bert": TEXTS,
    "gpt": f"{TEXTS} model.name=gpt task=causal_lm",
}
DTYPES = ("float32", "bfloat16", "float16")
DDP = "mesh.data=2 data_parallel.implementation=shard_map"
PIPELINE = (
    "strategy=pipeline pipeline.executor=lockstep mesh.data=1 mesh.stage=2 pipeline.num_microbatches=4 "
    "pipeline.schedule"
)
DISPATCH = "pipeline.executor=dispatch"
TWICE = "optimizer.accumulation_steps=2"
STRATEGIES = (
    DDP,
    f"mesh.data=3 data_parallel.implementation=shard_map {TWICE}",
    "mesh.data=4 data_parallel.implementation=pmap",
    "mesh.data=2 data_parallel.implementation=sharding",
    f"mesh.data=1 strategy=single {TWICE}",
    "mesh.data=2 exchange=dp",
    "mesh.data=4 exchange=ddp exchange_options.group=2",
    "mesh.data=4 exchange=horovod exchange_options.predivide=2.0",
    "mesh.data=3 exchange=byteps exchange_options.bucket_bytes=1000",
    f"mesh.data=2 exchange=zero1 {TWICE}",
    "mesh.data=8 exchange=zero2",
    "mesh.data=4 exchange=zero3 model.remat=full",
    "mesh.data=4 exchange=hsdp exchange_options.group=2",
    f"{PIPELINE}=gpipe mesh.data=2",
    f"{PIPELINE}=1f1b pipeline.num_microbatches=6",
    f"{PIPELINE}=eager_1f1b mesh.stage=4",
    f"{PIPELINE}=interleaved_1f1b",
    f"{PIPELINE}=zb_h1 mesh.stage=4",
    f"{PIPELINE}=zb_h2",
    f"{PIPELINE}=zb_v mesh.data=2",
    f"{PIPELINE}=model_parallel pipeline.num_microbatches=1",
    f"{PIPELINE}=1f1b {DISPATCH} mesh.data=2 exchange=zero1",
    f"{PIPELINE}=zb_v {DISPATCH}",
    f"{PIPELINE}=pipedream pipeline.num_microbatches=1",
    f"{PIPELINE}=pipedream_2bw mesh.data=2",
    f"{PIPELINE}=pipedream_vertical_sync pipeline.num_microbatches=1 mesh.stage=3",
    "strategy=async_data_parallel mesh.data=2 asynchronous.policy=sync asynchronous.mitigations=",
    "strategy=async_data_parallel mesh.data=1 asynchronous.num_workers=1 asynchronous.mitigations=",
    "strategy=swarm mesh.data=2 swarm.peers=3 swarm.num_microbatches=4",
    "strategy=swarm mesh.data=2 swarm.peers=3 swarm.num_microbatches=4 swarm.delayed=True",
    "mesh.data=2 mesh.tensor=2 exchange=zero1",
    "mesh.data=1 mesh.context=2",
    f"{PIPELINE}=1f1b mesh.tensor=2",
)

FACTORS = (0.7, 1.5)  # of the smallest scale error that a certificate announces: one to miss, and one to find
COLUMNS = (
    "dtype",
    "certificates",
    "errors compared",
    "false alarms",
    "largest error / tolerance",
    "announced scale error",
    *(f"found at {factor:g} times" for factor in FACTORS),
)

make_single = reference.make_single
singles: dict[str, Any] = {}  # the references of all rows, which share their programs
references: dict[int, Reference] = {}


def shared_single(config: ConfigDict, problem: Problem) -> Any:
    """Return the reference strategy of a config, which is built once."""
    state = jax.tree.structure(jax.eval_shape(problem.optimizer.init, problem.model.shapes))
    key = repr((config.model, problem.accumulation_steps, state))
    if key not in singles:
        singles[key] = make_single(config, problem)
    return singles[key]


def shared_reference(run: Run) -> Reference:
    """Return the reference of a run of a strategy of `shared_single`."""
    if id(run.strategy) not in references:
        references[id(run.strategy)] = Reference(run)
    return references[id(run.strategy)]


def row(settings: str, num_steps: int, layer: str = "", error: float = 0.0) -> dict[str, Any]:
    """Certify a config. layer, error: the layer whose gradient is multiplied by 1 + error."""
    config = configs.default_config()
    try:
        configs.override(config, [f"--config.{setting}" for setting in settings.split()])
        changed = SimpleNamespace(**{**vars(steps), "gradients": planted(layer, error)})
        with (
            mock.patch.object(shard_map, "steps", changed),
            mock.patch.object(reference, "make_single", shared_single),
            mock.patch.object(certificate, "Reference", shared_reference),
        ):
            found = certify(config, num_steps)
    except (UserError, TrainingError) as refusal:  # such as a schedule for a tied embedding, or an overflow in float16
        return {"refused": str(refusal)}
    errors = dict(found["metrics"])
    for name, quantities in found["layers"].items():
        errors |= {f"{quantity} of {name}": of for quantity, of in quantities.items()}
    ratios = {name: of["relative"] / of["tolerance"] for name, of in errors.items() if of["tolerance"]}
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "outside": found["outside"],
        "differs": found["differs"],
        "worst": worst,
        "ratio": ratios[worst],
        "number": found["tolerance"]["number"],
        "gradients": {name: of["gradient"] for name, of in found["layers"].items()},
        "scale": found["tolerance"]["smallest_scale_errors"],
    }


def planted(layer: str, error: float) -> Any:
    """Return steps.gradients with an error in the scale of the gradient of a layer."""

    def gradients(*arguments: Any, **options: Any) -> Any:
        grads, sums = steps.gradients(*arguments, **options)
        return {**grads, layer: jax.tree.map(lambda g: g * (1 + error), grads[layer])} if layer else grads, sums

    return gradients


def cases(models: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the model, dtype and strategy of all honest configs, so that the first ones differ most."""
    for shift in range(len(models) * len(DTYPES)):
        for number, strategy in enumerate(STRATEGIES):
            which, dtype = divmod(number + shift, len(DTYPES))
            yield models[(which + number + shift // len(DTYPES)) % len(models)], DTYPES[dtype % 3], strategy


def main() -> None:
    """Run the command line."""
    # Compilation is most of the time. With other optimizations, XLA rounds differently, as on another machine.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    parser = Parser(__doc__)
    parser.add_argument("--num_steps", type=integer(1), default=3, help="number of steps of a certificate")
    parser.add_argument("--most", type=integer(1), default=1000, help="number of honest configs")
    parser.add_argument("--models", type=names(MODELS), default=[*MODELS], help="models of the configs")
    parser.add_argument("--output", type=output_path, default="runs/certificates.jsonl", help="file of the rows")
    parser.add_argument("--picture", type=output_path, help="file of the picture, .png or .svg")
    arguments = parser.parse()
    if arguments.picture:
        check_new_file("--picture", arguments.picture, [".png", ".svg"])
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = {}
    if output.exists():
        rows = {of["case"]: of for of in map(json.loads, output.read_text().splitlines())}

    def measure(case: str, settings: str, *plant: Any, **about: Any) -> dict[str, Any]:
        if case not in rows:
            begin = time.monotonic()
            rows[case] = {"case": case, **about, **row(f"{BASE} {settings}", arguments.num_steps, *plant)}
            with output.open("a") as file:
                file.write(json.dumps(rows[case]) + "\n")
            of = rows[case]
            text = of.get("refused") or f"{of['ratio']:.2f} ({of['worst']}) {' '.join(of['outside'])}"
            print(f"{case}: {text}, {time.monotonic() - begin:.0f} s", flush=True)
        return rows[case]

    for model, dtype, strategy in itertools.islice(cases(arguments.models), arguments.most):
        settings = f"{MODELS[model]} model.dtype={dtype} {strategy}"
        measure(f"{model}, {dtype}, {strategy}", settings, dtype=dtype, factor=0.0)
    for dtype, model in itertools.product(DTYPES, arguments.models):
        settings = f"{MODELS[model]} model.dtype={dtype} {DDP}"
        scale = measure(f"{model}, {dtype}, {DDP}", settings, dtype=dtype, factor=0.0)["scale"]["block_1"]
        for factor in FACTORS:
            case = f"{model}, {dtype}, {factor:g} x {scale:.1e} planted"
            measure(case, settings, "block_1", factor * scale, dtype=dtype, factor=factor)
    certified = [of for of in rows.values() if "refused" not in of]
    tables.show(COLUMNS, [summary(dtype, [of for of in certified if of["dtype"] == dtype]) for dtype in DTYPES])
    if arguments.picture:
        draw(arguments.picture, certified)


def summary(dtype: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row of the table. rows: all certificates of a dtype."""
    honest, below, above = ([of for of in rows if of["factor"] == factor] for factor in (0.0, *FACTORS))
    scales = [of["scale"]["block_1"] for of in honest if of["case"].endswith(f", {DDP}")]
    return [
        dtype,
        f"{len(honest)}",
        f"{sum(of['number'] for of in honest)}",
        f"{sum(bool(of['outside']) for of in honest)}",
        f"{max(of['ratio'] for of in honest):.2f}",
        f"{min(scales):.1e} to {max(scales):.1e}",
        *(f"{sum(bool(of['outside']) for of in some)} of {len(some)}" for some in (below, above)),
    ]


def draw(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the largest error of each certificate, relative to its tolerance, by dtype."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    labels = ("nothing planted", *(f"{factor:g} times the announced error planted" for factor in FACTORS))
    for place, (factor, label) in enumerate(zip((0.0, *FACTORS), labels, strict=True)):
        for of_dtype, dtype in enumerate(DTYPES):
            ratios = sorted(of["ratio"] for of in rows if (of["factor"], of["dtype"]) == (factor, dtype))
            heights = [of_dtype + 0.22 * (place - 1) + 0.03 * (number % 5 - 2) for number in range(len(ratios))]
            style: dict[str, Any] = {"color": CURVE_COLORS[place], "ms": 5 + 2 * bool(place), "alpha": 0.8}
            axes.plot(ratios, heights, MARKERS[place], label="" if of_dtype else label, **style)
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(DTYPES)), DTYPES)
    axes.set(xscale="log", xlabel="largest error of a certificate / its tolerance", ylim=(len(DTYPES) - 0.4, -0.6))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3, axis="x")
    figure.legend(fontsize=9, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(exit_code(main))
