"""Runs the benchmarks that need a GPU, and writes one JSON file and one page of them, to send back.

    scripts/bench/gpu [--out=FOLDER] [--only=NAME,NAME] [--torch_python=python3] [--minutes=120] [--dry_run=v100:8]

Each command is a process of its own, because the memory of one that used a GPU is not free until it ends. One that
fails, or is killed after 15 minutes, is a line of the page, and the others run. --minutes limits the whole report: what
is left then does not start. The exit code is 1 unless all commands succeeded. The page begins with a table of the
steps, and with how many were predicted well. The GPUs that JAX finds decide on the dtypes, sections and cases. With
--dry_run, prints the commands for GPUs that need not exist, and runs none.

  equality    jaxpar certify, with the strategies that the GPUs of this machine allow, also in float16
  attention   cuDNN attention against XLA's, whole and in the chunks of a context axis; from compute capability 8 on
  steps       time and memory of training steps on one GPU and on all, predicted and measured
  float16     the quickstart in float32 and in float16: accuracy and examples/s
  torch       the step of GPT-2 124M in torch and in jaxpar; needs --torch_python
  strategies  predicted and measured steps of the strategies on all GPUs
  loop        the training loop around a step, and the time until the first step
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jaxpar.cluster import Cluster
from jaxpar.cluster.files import find_named
from jaxpar.command_line import Parser, integer
from jaxpar.compare.report import markdown_table
from jaxpar.errors import TrainingError, UserError, exit_code, format_count
from scripts.bench.gpu_steps import ALIKE, COLUMNS, cases_of, half_dtype, ratios_of, row

ROOT = Path(__file__).parents[2]
STEPS, LINES = "steps.json", 40  # the file of the rows of gpu_steps.py, and the lines of a command that are kept
LONGEST = 900  # seconds of a command
QUICKSTART = "--config=configs/quickstart.py"
MACHINE = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current", "--format=csv,noheader"]
KEYS = ("platform", "device_kind", "num_devices", "compute_capability")  # of Cluster, which FIND prints
FIND = f"""
import json, sys, jax, jaxlib
from jaxpar.cluster import find_cluster
versions = f"Python {{sys.version.split()[0]}}, jax {{jax.__version__}}, jaxlib {{jaxlib.__version__}}"
there = find_cluster()
print(json.dumps([versions, {{key: getattr(there, key) for key in {KEYS}}}]))
"""
NEEDS = {"torch": "--torch_python", "attention": "GPUs with bfloat16"}  # of sections that may be left out


def sections(cluster: Cluster, torch_python: str | None, runs: Path) -> dict[str, list[list[str]]]:
    """Return the commands of each section, for the GPUs of a cluster. runs: the folder of their runs."""
    has_several, has_bfloat16 = cluster.num_devices > 1, half_dtype(cluster) == "bfloat16"
    stages = [f"--config.mesh.stage={2 if has_several else 1}", "--config.strategy=pipeline"]
    dispatch = [*stages, "--config.pipeline.executor=dispatch"]
    strategies = [
        ["--config.strategy=single"],
        *([f"--config.exchange={name}"] for name in ("ddp", "zero1", "zero2", "zero3", "horovod", "bagua_bytegrad")),
        ["--config.exchange=zero2", "--config.exchange_options.offload=True"],
        [*stages, "--config.pipeline.executor=lockstep"],
        dispatch,
        ["--config.strategy=swarm"],
    ]
    in_16_bits = [["--config.strategy=single"], ["--config.strategy=async_data_parallel"]]
    if has_several:
        in_16_bits += [[f"--config.exchange={name}"] for name in ("ddp", "zero2")]
        in_16_bits.append([*dispatch, "--config.pipeline.schedule=1f1b"])
    for dtype in ("float16", "bfloat16") if has_bfloat16 else ("float16",):
        strategies += [[*one, f"--config.model.dtype={dtype}"] for one in in_16_bits]
    certify = ["scripts/jaxpar", "certify", QUICKSTART, "--num_steps=3"]
    cases = [name for name in cases_of(cluster) if has_bfloat16 or name not in ALIKE]
    less = [] if has_bfloat16 else ["--config.batch_size=2"]  # without a fused kernel, attention needs more memory

    def bench(name: str, *arguments: str) -> list[str]:
        return ["scripts/python", f"scripts/bench/{name}.py", *arguments]

    def trained(dtype: str) -> list[str]:
        return ["scripts/train", QUICKSTART, f"--workdir={runs / dtype}", f"--config.model.dtype={dtype}"]

    found = {
        "equality": [
            [*certify, f"--output={runs / f'certificate_{i}.json'}", *one] for i, one in enumerate(strategies)
        ],
        "attention": [bench("attention"), bench("attention_chunks")],
        "steps": [bench("gpu_steps", f"--only={name}", f"--json={runs / STEPS}") for name in cases],
        "float16": [trained("float32"), trained("float16")],
        "torch": [bench("peers", "--gpu", "--norms=layernorm", f"--torch_python={torch_python}", *less)],
        "strategies": [bench("planner_gpu")],
        "loop": [bench("trainer"), bench("data_parallel"), bench("startup")],
    }
    if torch_python is None:
        del found["torch"]
    if not has_bfloat16:
        del found["attention"]
    return found


def run(command: list[str], seconds: float) -> dict[str, Any]:
    """Run a command in the repository. Return its exit code (None: it did not end), seconds, and last lines."""
    start = time.monotonic()
    if seconds <= 0:
        return entry(command, None, 0.0, "The command was not started.")
    # A session of its own, so that the processes that a command has started end with it.
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with subprocess.Popen(command, cwd=ROOT, encoding="utf-8", start_new_session=True, **pipes) as process:
        try:
            output, code = process.communicate(timeout=seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, code = f"{process.communicate()[0]}\nThe command took too long.", None
        except BaseException:  # such as Ctrl-C, which does not reach another session
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return entry(command, code, time.monotonic() - start, output)


def entry(command: list[str], code: int | None, seconds: float, output: str) -> dict[str, Any]:
    """Return the entry of a command in the report."""
    return {"command": shlex.join(command), "code": code, "seconds": seconds, "output": output.splitlines()[-LINES:]}


def verdicts(report: dict[str, Any]) -> list[str]:
    """Return what the report found, one line each: how many commands failed, and how many predictions are good."""
    codes = [one["code"] for done in report["sections"].values() for one in done]
    lines = [f"{codes.count(0)} of {format_count(len(codes), 'command')} succeeded"]
    ratios = [ratios_of(found) for found in report["steps"] if "seconds" in found]
    for i, (what, limit) in enumerate((("step", 0.15), ("peak memory", 0.10))):
        good = [sum(abs(of[i][j] - 1) <= limit for of in ratios) for j in range(2)]
        lines.append(
            f"{what} within {limit:.0%}: planner {good[0]} of {len(ratios)}, program {good[1]} of {len(ratios)}"
        )
    return lines


def page(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    there = report["cluster"]
    lines = [f"# jaxpar on {there['num_devices']} x {there['device_kind']}", ""]
    lines += [*markdown_table(COLUMNS, map(row, report["steps"])), "", *(f"- {one}" for one in verdicts(report))]
    lines += [f"- {key}: {report[key]}" for key in ("gpus", "versions", "commit")]
    lines += [f"- {name} was not run: it needs {need}" for name, need in report["left_out"].items()]
    lines += [f"- seconds: {report['seconds']:.0f}", ""]
    for name, done in report["sections"].items():
        lines += [f"## {name}", ""]
        for one in done:
            state = "not finished" if one["code"] is None else f"exit code {one['code']}"
            lines += ["```text", f"$ {one['command']}", *one["output"], "```", f"{state}, {one['seconds']:.0f} s", ""]
    return "\n".join(lines)


def find_gpus() -> tuple[Cluster, dict[str, Any]]:
    """Return the GPUs that JAX finds, and the start of the report. Raises UserError if it does not use those there."""
    if shutil.which(MACHINE[0]) is None:
        raise UserError(f"{MACHINE[0]} was not found; this machine must have an NVIDIA GPU and its driver")
    machine, found = run(MACHINE, 60), run(["scripts/python", "-c", FIND], 300)
    for one, name in ((machine, MACHINE[0]), (found, "JAX")):
        if one["code"] != 0:
            raise UserError(f"{name} failed: {' '.join(one['output'])}")
    versions, there = json.loads(next(line for line in found["output"] if line.startswith('["Python')))
    gpus, cluster = machine["output"], Cluster(**there)
    if cluster.platform != "gpu":
        raise UserError(
            f"JAX uses a {cluster.device_kind} instead of a GPU; JAX must have its plugin for GPUs (the extra gpu)"
        )
    if cluster.num_devices != len(gpus) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES is not set, and JAX uses {cluster.num_devices} of {format_count(len(gpus), 'GPU')}; "
            "it must list those to measure"
        )
    commit = " ".join(run(["git", "log", "-1", "--format=%h %cs"], 60)["output"])
    return cluster, {
        "cluster": there,
        "gpus": gpus,
        "versions": versions,
        "commit": commit,
        "left_out": {},
        "steps": [],
        "sections": {},
    }


def main() -> None:
    """Run the sections, and write the report after each command."""
    parser = Parser(__doc__)
    known = sections(find_named("h100:8", "")[1], "python3", Path())
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="the folder of report.json and report.md")
    parser.add_names("--only", known)
    parser.add_argument("--torch_python", help="interpreter of an environment with torch")
    parser.add_argument("--minutes", type=integer(1), default=120, help="the most that the report may take")
    parser.add_argument("--dry_run", metavar="GPUS", help="print the commands for these GPUs, such as v100:8")
    arguments = parser.parse()
    if arguments.torch_python is None and arguments.only == ["torch"]:
        raise UserError("--torch_python is None; it must be an interpreter with torch for --only=torch")
    start, out = time.monotonic(), arguments.out.absolute()
    is_dry, rows = arguments.dry_run is not None, out / "runs" / STEPS
    cluster, report = (find_named(arguments.dry_run, "--dry_run")[1], {}) if is_dry else find_gpus()
    todo = sections(cluster, arguments.torch_python, rows.parent)
    commands = [(name, command) for name in arguments.only for command in todo.get(name, [])]
    if not commands:
        raise UserError(f"--only is {','.join(arguments.only)}; it must have a section for {cluster.device_kind}")
    if is_dry:
        print("\n".join(shlex.join(command) for _, command in commands))
        return
    report["left_out"] = {name: NEEDS[name] for name in arguments.only if name in NEEDS and name not in todo}
    shutil.rmtree(rows.parent, ignore_errors=True)
    rows.parent.mkdir(parents=True)
    for name, command in commands:
        print(f"$ {shlex.join(command)}", flush=True)
        left = 60 * arguments.minutes - (time.monotonic() - start)
        report["sections"].setdefault(name, []).append(done := run(command, min(left, LONGEST)))
        print("\n".join(done["output"]), flush=True)
        if rows.exists():
            report["steps"] = [json.loads(line) for line in rows.read_text().splitlines()]
        report["seconds"] = time.monotonic() - start
        (out / "report.json").write_text(json.dumps(report, indent=1))
        (out / "report.md").write_text(page(report))
    print(f"Send back {out}/report.json and report.md.\n" + "\n".join(verdicts(report)))
    failed = [one["command"] for done in report["sections"].values() for one in done if one["code"] != 0]
    if failed:
        raise TrainingError(f"{format_count(len(failed), 'command')} failed, the first of which is {failed[0]}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
