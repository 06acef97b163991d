"""Tests of the report of scripts/bench/gpu, on a machine without GPUs."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar.cluster import named_cluster
from jaxpar.cluster.target import Target
from jaxpar.errors import TrainingError, UserError
from scripts.bench import gpu_report, gpu_steps

STEP = {"case": "gpt2", "examples": 32, "length": 1024, "seconds": 0.1, "mfu": 0.4, "bytes": 10e9, "needs": [1, 2]}
ROWS: list[dict[str, Any]] = [
    STEP | {"planned": [0.114, 9.5e9], "program": [0.116, 10e9]},
    STEP | {"case": "gpt2, ddp", "planned": [0.08, 10e9], "program": [0.09, 8e9]},
    {"case": "llama_8b", "examples": 8, "length": 8192, "needs": [38e9, 25e9]},
]
PAGE = """# jaxpar on 2 x Tesla V100-SXM2-32GB

| case | batch | step time | MFU | predicted / measured time | peak memory | predicted / measured memory |
| --- | --- | --- | --- | --- | --- | --- |
| gpt2 | 32 x 1,024 | 100.00 ms | 0.400 | 1.140, 1.160 | 10 GB | 0.950, 1.000 |
| gpt2, ddp | 32 x 1,024 | 100.00 ms | 0.400 | 0.800, 0.900 | 10 GB | 1.000, 0.800 |
| llama_8b | 8 x 8,192 |  |  |  | needs 38 GB of 25 GB |  |

- 1 of 3 commands succeeded
- step within 15%: planner 1 of 2, program 1 of 2
- peak memory within 10%: planner 2 of 2, program 1 of 2
- gpus: ['V100, 550.54, 32768 MiB, 3', 'V100, 550.54, 32768 MiB, 3']
"""


def report(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    gpu_report.main()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that lists two V100s."""
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nfor _ in 1 2; do echo 'V100, 550.54, 32768 MiB, 3'; done\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JAXPAR_PYTHON", sys.executable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def found_by_jax(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    there = ["Python 3", dict(zip(gpu_report.KEYS, ("gpu", "Tesla V100-SXM2-32GB", number, "7.0"), strict=True))]
    monkeypatch.setattr(gpu_report, "FIND", f"print('a warning'); print({json.dumps(there)!r})")


def test_commands_for_a_kind_of_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No V100 computes in bfloat16 or has cuDNN attention, and one GPU has no strategies of several."""
    report(monkeypatch, "--dry_run=v100:8", "--torch_python=python3")
    on_v100 = capsys.readouterr().out
    report(monkeypatch, "--dry_run=h100:1")
    on_h100 = capsys.readouterr().out
    assert [word in on_v100 for word in ("bfloat16", "attention", "gpt2, float16", "peers.py")] == [False] * 3 + [True]
    assert [word in on_h100 for word in ("attention_chunks.py", "gpt2, float16", "peers.py")] == [True, True, False]
    in_float16 = [line for line in on_v100.splitlines() if "certify" in line and "float16" in line]
    for word in ("=single", "=async_data_parallel", "=ddp", "=zero2", "=1f1b"):
        assert sum(word in line for line in in_float16) == 1
    for name in gpu_steps.PARALLEL:
        assert (f"--only={name}'" in on_v100, f"--only={name}'" in on_h100) == (True, False)


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there are fewer examples than GPUs: a Llama of 8B does not fit eight V100s."""
    cluster = named_cluster("v100", 8)
    assert cluster.usable_bytes is not None
    target = Target(cluster, [], 32e9, cluster.usable_bytes)
    monkeypatch.setattr(gpu_steps, "find_target", lambda _: target)
    case, settings = gpu_steps.PARALLEL["llama_8b, zero3"]
    monkeypatch.setitem(gpu_steps.PARALLEL, "llama_8b, zero3", (case._replace(size=2), settings))
    found = gpu_steps.measured("llama_8b, zero3", 1, None)
    needed, usable = found["needs"]
    assert (found["examples"], usable, needed > usable) == (8, 24e9, True)


def test_a_section_without_commands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^--only is attention; it must have a section for Tesla V100"):
        report(monkeypatch, "--dry_run=v100:8", "--only=attention")


@pytest.mark.usefixtures("gpus")
def test_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that takes too long ends with the processes that it started, and its output can be any bytes."""
    found_by_jax(monkeypatch, 2)
    out = tmp_path / "out"
    lines = "\n".join(map(json.dumps, ROWS))
    commands = {
        "steps": [["sh", "-c", f"printf '%s' '{lines}' >{out}/runs/{gpu_report.STEPS}"]],
        "loop": [["sh", "-c", r"printf '\303'; sleep 60 & wait"], ["sh", "-c", "echo bad; exit 3"]],
    }
    of_torch: dict[str, list[list[str]]] = {"torch": []}
    monkeypatch.setattr(gpu_report, "sections", lambda _, torch, __: commands | (of_torch if torch else {}))
    monkeypatch.setattr(gpu_report, "LONGEST", 2)
    with pytest.raises(TrainingError, match=r"2 commands failed, the first of which is sh -c 'printf"):
        report(monkeypatch, f"--out={out}")
    text, found = (out / "report.md").read_text(), json.loads((out / "report.json").read_text())
    assert text.startswith(PAGE)
    assert "\n- torch was not run: it needs --torch_python\n" in text
    # The output ends when `sleep` does.
    assert re.search("\N{REPLACEMENT CHARACTER}\nThe command took too long.\n```\nnot finished, [2-9] s\n", text)
    assert re.search("bad\n```\nexit code 3, [0-9] s\n", text)
    assert (found["steps"], found["cluster"]["compute_capability"]) == (ROWS, "7.0")


@pytest.mark.usefixtures("gpus")
def test_gpus_that_jax_does_not_use_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserError, match=r"^JAX uses a cpu instead of a GPU; JAX must have its plugin for GPUs"):
        report(monkeypatch, f"--out={tmp_path / 'out'}")
    found_by_jax(monkeypatch, 1)
    with pytest.raises(UserError, match=r"^CUDA_VISIBLE_DEVICES is not set, and JAX uses 1 of 2 GPUs; it must list"):
        report(monkeypatch, f"--out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_report.find_gpus()[0].num_devices == 1
