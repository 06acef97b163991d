"""Runs the benchmarks that need a GPU, and writes one JSON file and one page of them, to send back.

    scripts/bench/gpu [--out=FOLDER] [--only=NAME,NAME] [--torch_python=python3] [--minutes=60]

Each of SECTIONS is a command of its own, because the memory of a process that used a GPU is not free until it ends. A
section that fails or needs too long is a line of the page, and the others run. --minutes limits the whole report: what
is left then does not start. The exit code is 1 unless all sections succeeded.

  equality    jaxpar certify, with every strategy that the GPUs of this machine allow
  attention   cuDNN attention against XLA's, whole and in the chunks of a context axis
  steps       time and memory of training steps, predicted and measured
  float16     the quickstart in float32 and in float16: accuracy and examples/s
  torch       the step of GPT-2 124M in torch and in jaxpar; needs --torch_python
  strategies  predicted and measured steps of the strategies on all GPUs
  loop        the training loop around a step, and the time until the first step
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jaxpar.command_line import Parser, integer
from jaxpar.errors import TrainingError, UserError, exit_code, format_count

ROOT = Path(__file__).parents[2]
STEPS, LINES = "steps.json", 40  # the file of the rows of one_gpu.py, and the lines of a command that are kept
QUICKSTART = "--config=configs/quickstart.py"
CERTIFY = ["scripts/jaxpar", "certify", QUICKSTART, "--num_steps=3"]
MACHINE = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current", "--format=csv,noheader"]
VERSIONS = "import sys, jax, jaxlib; print(sys.version.split()[0], jax.__version__, jaxlib.__version__)"


def sections(number: int, torch_python: str | None, runs: Path) -> dict[str, list[list[str]]]:
    """Return the commands of each section, for a number of GPUs. runs: the folder of their runs."""
    stages = [f"--config.mesh.stage={2 if number > 1 else 1}", "--config.strategy=pipeline"]
    strategies = [
        ["--config.strategy=single"],
        *([f"--config.exchange={name}"] for name in ("ddp", "zero1", "zero2", "zero3", "horovod", "bagua_bytegrad")),
        [*stages, "--config.pipeline.executor=lockstep"],
        [*stages, "--config.pipeline.executor=dispatch"],
        ["--config.strategy=swarm"],
        ["--config.strategy=single", "--config.model.dtype=float16"],
    ]

    def bench(name: str, *arguments: str) -> list[str]:
        return ["scripts/python", f"scripts/bench/{name}.py", *arguments]

    def trained(dtype: str) -> list[str]:
        return ["scripts/train", QUICKSTART, f"--workdir={runs / dtype}", f"--config.model.dtype={dtype}"]

    found = {
        "equality": [[*CERTIFY, *one] for one in strategies],
        "attention": [bench("attention"), bench("attention_chunks")],
        "steps": [bench("one_gpu", f"--json={runs / STEPS}")],
        "float16": [trained("float32"), trained("float16")],
        "torch": [bench("peers", "--gpu", "--norms=layernorm", f"--torch_python={torch_python}")],
        "strategies": [bench("planner_gpu")],
        "loop": [bench("trainer"), bench("data_parallel"), bench("startup")],
    }
    if torch_python is None:
        del found["torch"]
    return found


def run(command: list[str], seconds: float) -> dict[str, Any]:
    """Run a command in the repository. Return its exit code (None: it did not end), seconds, and last lines."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        return unfinished(command, "took too long", (error.stdout or b"").decode())
    lines = output.splitlines()[-LINES:]
    return {"command": " ".join(command), "code": code, "seconds": time.monotonic() - start, "output": lines}


def unfinished(command: list[str], why: str, output: str = "") -> dict[str, Any]:
    """Return the entry of a command that did not end."""
    lines = [*output.splitlines()[-LINES:], f"The command {why}."]
    return {"command": " ".join(command), "code": None, "seconds": 0.0, "output": lines}


def page(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [f"# jaxpar on {report['gpus'][0]}", "", *(f"- {key}: {report[key]}" for key in ("gpus", "versions"))]
    lines += [f"- commit: {report['commit']}", f"- seconds: {report['seconds']:.0f}", ""]
    for name, done in report["sections"].items():
        lines += [f"## {name}", ""]
        for one in done:
            state = "" if one["code"] is None else f"exit code {one['code']}, {one['seconds']:.0f} s"
            lines += ["```text", f"$ {one['command']}", *one["output"], "```", state, ""]
    return "\n".join(lines)


def main() -> None:
    """Run the sections, and write the report after each command."""
    parser = Parser(__doc__)
    known = sections(1, "python3", Path())
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="the folder of report.json and report.md")
    parser.add_names("--only", known)
    parser.add_argument("--torch_python", help="interpreter of an environment with torch")
    parser.add_argument("--minutes", type=integer(1), default=60, help="the most that the report may take")
    arguments = parser.parse()
    if shutil.which(MACHINE[0]) is None:
        raise UserError(f"{MACHINE[0]} was not found; this machine must have an NVIDIA GPU and its driver")
    torch_python, only = arguments.torch_python, arguments.only
    if torch_python is None and only == ["torch"]:
        raise UserError("--torch_python is None; it must be an interpreter with torch for --only=torch")
    only = [name for name in only if torch_python or name != "torch"]
    start, out = time.monotonic(), arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "runs", ignore_errors=True)
    (out / "runs").mkdir()
    machine = run(MACHINE, 60)
    if machine["code"] != 0:
        raise UserError(f"{MACHINE[0]} failed: {' '.join(machine['output'])}")
    report: dict[str, Any] = {
        "gpus": machine["output"],
        "versions": " ".join(run(["scripts/python", "-c", VERSIONS], 300)["output"]),
        "commit": " ".join(run(["git", "log", "-1", "--format=%h %cs"], 60)["output"]),
        "sections": {},
    }
    todo, rows = sections(len(report["gpus"]), torch_python, out / "runs"), out / "runs" / STEPS
    for name in only:
        done = report["sections"].setdefault(name, [])
        for command in todo[name]:
            left = 60 * arguments.minutes - (time.monotonic() - start)
            print(f"$ {' '.join(command)}", flush=True)
            done.append(run(command, left) if left > 0 else unfinished(command, "was not started"))
            print("\n".join(done[-1]["output"]), flush=True)
            if rows.exists():
                report["steps"] = [json.loads(line) for line in rows.read_text().splitlines()]
            report["seconds"] = time.monotonic() - start
            (out / "report.json").write_text(json.dumps(report, indent=1))
            (out / "report.md").write_text(page(report))
    print(f"Send back {out}/report.json and report.md.")
    failed = [one["command"] for done in report["sections"].values() for one in done if one["code"] != 0]
    if failed:
        raise TrainingError(f"{format_count(len(failed), 'command')} failed, the first of which is {failed[0]}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
