"""Kinds of GPUs, targets, and programs that are compiled for GPUs which this machine does not have."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from jaxpar import cluster as clusters
from jaxpar.cluster import Cluster, gpus, target
from jaxpar.cluster.files import find_named
from jaxpar.cluster.gpus import gpu_kinds
from jaxpar.errors import UserError, format_bytes
from jaxpar.exchange import EXCHANGES
from jaxpar.inspect.audit_report import format_audit, format_findings
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES
from tests.absent_gpus import TINY
from tests.selection import slow_except

H100 = (Path(gpus.__file__).parent / "h100.toml").read_text()
COMPILER = Path(sys.prefix) / "targets"  # where scripts/setup installs it
HAS_PLUGIN = importlib.util.find_spec("jax_cuda12_plugin") is not None or COMPILER.is_dir()
needs_plugin = pytest.mark.skipif(
    not HAS_PLUGIN, reason="XLA's compiler for GPUs is not installed (scripts/setup targets)"
)
ROOT = Path(__file__).parents[2]


def test_files_of_gpus() -> None:
    kinds = gpu_kinds()
    assert {"a100-40gb", "a100-80gb", "h100", "h200", "b200", "v100", "l4", "t4", "rtx-4090"} == set(kinds)
    for name, kind in kinds.items():
        assert name.split("-")[0].upper() in kind.device_kind.upper().replace(" ", ""), name
        in_xla = kind.numbers["device_memory_size"]
        assert 0.95 <= in_xla / kind.memory_bytes <= 1.1, name  # the data sheet rounds
        assert f"cuda_compute_capability {{ major: {kind.compute_capability.split('.')[0]} " in kind.config(
            kind.memory_bytes
        )
        assert "source" in (Path(gpus.__file__).parent / f"{name}.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("core_count = 132", "core_count = 0", "xla.core_count is 0; it must be a number greater than 0"),
        ("core_count = 132", "", "xla.core_count is None; it must be a number greater than 0"),
        ("core_count = 132", 'core_count = "x"', "xla.core_count is 'x'; it must be a number greater than 0"),
        ("core_count = 132", "core_count = nan", "xla.core_count is nan; it must be a number greater than 0"),
        ("memory_bytes = 80", "memory_bytes = -80", "memory_bytes is -80"),
        ('compute_capability = "9.0"', "", "compute_capability is missing; it must be one of 5.0, 5.2, "),
        ('"9.0"', '"nine"', "compute_capability is 'nine'; it must be one of 5.0, 5.2, "),
        ('"9.0"', '"99.9"', "compute_capability is '99.9'; it must be one of 5.0, 5.2, "),
        ("device_kind = ", "kind = ", "kind is not a key; it must be one of device_kind, memory_bytes, "),
        ("device_kind = ", "device_kind = 5 # ", "device_kind is 5; it must be a name"),
        ("core_count = 132", "core_count = 132\ncores = 3", "xla.cores is not a key; it must be one of shared_memory_"),
        ("[xla]", "[[xla]]", "has no table xla; it must have one with shared_memory_per_core"),
        ("device_kind", "gpu", "which describes a cluster; it must be the file of a kind of GPU, or a cluster file"),
        ("core_count = 132", "core_count = = 132", "which is not TOML ("),
        ("network = 50", "net = 50", "links.net is not a key; it must be one of host, network"),
        ("host = 450", "host = -450", "links.host is -450000000000; it must be a number greater than 0"),
        ("[links]", "[[links]]", "links is [{'host': 450000000000, 'network': 50000000000}]; it must be a table with"),
        (
            "[links]",
            "[peak_flops]\nint8 = 1e12\n[links]",
            "peak_flops is {'int8': 1000000000000.0}; it must be a table",
        ),
        (
            "[links]",
            "[peak_flops]\nfloat32 = 0\n[links]",
            "peak_flops: float32 is 0; it must be a number of at least 1",
        ),
        (
            "[links]",
            "[[peak_flops]]\n[links]",
            "peak_flops is [{}]; it must be a table with some of float32, bfloat16 and",
        ),
    ],
)
def test_wrong_files(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(H100.replace(old, new, 1))
    with pytest.raises(UserError, match=re.escape(message)):
        gpus.find_gpu(str(path), "--target")


def test_a_gpu_of_known_peaks(tmp_path: Path) -> None:
    """The peaks of a file replace those of a kind that jaxpar knows, and are the only ones of another kind."""
    path = tmp_path / "gpu.toml"
    path.write_text(H100 + "[peak_flops]\nfloat32 = 1e14\n")
    known = {"float32": 1e14, "bfloat16": 989.5e12, "float16": 989.5e12}
    assert find_named(f"{path}:2x8", "--target")[1].peak_flops == known
    path.write_text(H100 + "[peak_flops]\nbfloat16 = 8e14\n")
    assert find_named(f"{path}:2x8", "--target")[1].peak_flops["float16"] == 8e14
    path.write_text(H100.replace("NVIDIA H100 80GB HBM3", "GeForce 256") + "[peak_flops]\nfloat32 = 1e14\n")
    assert find_named(f"{path}:8", "--target")[1].peak_flops == {"float32": 1e14}


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "h10:8": "--target is 'h10'; it must be one of a100-40gb, ",
        "h100:0": "--target is 'h100:0'; it must have between 1 and 65,536 devices, as in h100:16x8",
        "h100:0x8": "--target is 'h100:0x8'; it must have between 1 and 65,536 devices",
        "h100:1000000": "--target is 'h100:1000000'; it must have between 1 and 65,536 devices",
        "nope.toml:8": "--target is 'nope.toml', which does not exist; it must be the path of a TOML file",
        "h100:8x": "--target is 'h100:8x'; it must end with the number of GPUs, as in h100:8 or h100:16x8",
        "h100:٣": "--target is 'h100:٣'; it must end with the number of GPUs, as in h100:8 or h100:16x8",
        "8xv100": "Did you mean 'v100'?",
        "v100-16gb:8": "Did you mean 'v100'?",
        "a100:8": "or the path of a TOML file. Did you mean 'a100-40gb' or 'a100-80gb'?",
        "dgx-a100:8": "Did you mean 'a100-40gb' or 'a100-80gb'?",
        "": "--target is ''; it must be one of",
        "here:8": "--target is 'here:8'; it must be here, without a number of devices",
        "here": "--target is 'here', on a machine without GPUs that JAX can use; it must be a kind of GPU, such as",
    }.items(),
)
def test_wrong_targets(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        target.find_target(text)


def test_memory_that_jax_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (target.FRACTION, target.FORMER_FRACTION):
        monkeypatch.delenv(name, raising=False)
    assert target.memory_fraction() == 0.75
    monkeypatch.setenv(target.FORMER_FRACTION, ".5")
    assert target.memory_fraction() == 0.5
    monkeypatch.setenv(target.FRACTION, "0.9")
    assert target.memory_fraction() == 0.9
    for text in ("0", "1.5", "-0.5", "nan", "90%"):
        monkeypatch.setenv(target.FRACTION, text)
        with pytest.raises(UserError, match=re.escape(f"XLA_CLIENT_MEM_FRACTION is {text!r}; it must be a number")):
            target.find_target("h100:8")


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX reports the memory that it takes, and neither the rates of the memory nor of the links."""
    here = Cluster("gpu", "Tesla T4", 2, memory_bytes=7e9, peak_flops={"float32": 8e12}, compute_capability="7.5")
    gpus_here: list[Any] = ["a GPU", "another one"]
    monkeypatch.setattr(clusters, "find_cluster", lambda: here)
    monkeypatch.setattr(clusters, "devices", lambda: gpus_here)
    monkeypatch.setenv(target.FRACTION, "0.5")
    found = target.find_target("here")
    assert found.devices == gpus_here
    assert (found.memory_bytes, found.usable_bytes) == (14e9, 7e9)
    assert found.cluster == replace(here, memory_bandwidth=320e9, send_rates={"host": 16e9, "network": 1562.5e6})


def test_memory_of_a_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have the memory that their kind reports, unless the file states another one."""
    monkeypatch.setattr(target, "PLUGINS", ("json",))
    described = []

    def describe(*, target_config: str, **_: Any) -> SimpleNamespace:
        described.append(target_config)
        return SimpleNamespace(devices=["a GPU"])

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv(target.FRACTION, "0.5")
    path = tmp_path / "cluster.toml"
    for line, memory in (("", 15_843_721_216), ("memory_bytes = 12e9", 12e9)):
        path.write_text(f'gpu = "t4"\nhosts = 1\ngpus_per_host = 1\n{line}\n')
        found = target.find_target(str(path))
        assert (found.memory_bytes, found.usable_bytes) == (memory, memory / 2)
        assert f"device_memory_size: {memory:.0f}\n" in described[-1]


def test_a_target_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(target, "PLUGINS", ("no_such_plugin",))
    with pytest.raises(UserError, match=r"--target is 'h100:2x8', for which XLA cannot compile here; install the"):
        target.find_target("h100:2x8")


def test_a_target_that_xla_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_arguments: object) -> None:
        raise RuntimeError("no such GPU\nmore")

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(target, "PLUGINS", ("json",))
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(UserError, match=r"--target is 'h100:8', which XLA refuses \(no such GPU\); it must be a GPU"):
        target.find_target("h100:8")


def run(command: Sequence[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of Python with the compiler for GPUs, and these environment variables."""
    environment = (
        os.environ
        | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{COMPILER}",
            "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "10",
        }
        | variables
    )
    environment.pop("XLA_FLAGS", None)
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def audit(*overrides: str, on: str = "h100:8") -> "subprocess.CompletedProcess[str]":
    """Run the audit for a target."""
    command = ["-m", "jaxpar", "audit", "--config=configs/quickstart.py", f"--target={on}", "--json"]
    return run([*command, "--config.data.source=synthetic", *overrides])


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is not None, reason="XLA's compiler is found")
def test_without_the_plugin() -> None:
    done = run(["-m", "jaxpar", "audit", "--config=configs/quickstart.py", "--target=h100:8"], PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert re.fullmatch(
        r"jaxpar: --target is 'h100:8', for which XLA cannot compile here; install the extra targets "
        r"\(scripts/setup targets, or pip install 'jaxpar\[targets\]'\)\n",
        done.stderr,
    )


IN_BFLOAT16 = ["--config.model.dtype=bfloat16", "--config.model.attention=xla"]
SCANNED = ["--config.model.scan_layers=True"]
STRATEGIES = {
    "ddp": [*TINY],
    "zero3": ["--config.exchange=zero3", *TINY, "--config.model.num_layers=6", *SCANNED, *IN_BFLOAT16],
    "zero2": [
        *("--config.exchange=zero2", *TINY, "--config.model.num_layers=6", "--config.model.remat=full", *IN_BFLOAT16)
    ],
    "1f1b": [
        *("--config.strategy=pipeline", "--config.pipeline.schedule=1f1b", "--config.mesh.stage=2"),
        *("--config.pipeline.executor=lockstep", *TINY, *IN_BFLOAT16),
    ],
    "bytegrad": ["--config.exchange=bagua_bytegrad", *TINY, *IN_BFLOAT16],
}


@needs_plugin
@pytest.mark.parametrize("name", slow_except(["zero2", "zero3", "1f1b"], STRATEGIES))
def test_audit_of_absent_gpus(name: str) -> None:
    """The collectives of the GPU program are those of theory, the memory is that of the buffer assignment.

    The predicted time of each part is below that of the step. All findings are normal for the strategy.
    """
    done = audit("--time", "--program", *STRATEGIES[name])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["devices"]) == 8
    assert all(row["explained"] for row in found["collectives"])
    held = sum(part["nbytes"] or 0 for part in found["devices"][0].values()) - found["needed"]["temporary arrays"]
    assert found["needed"]["arguments"] == pytest.approx(held, rel=0.1)
    assert (
        0
        < sum(found["needed"].values())
        < found["usable_bytes"]
        == 0.75 * found["memory_bytes"]
        == 0.75 * 84_942_979_072
    )
    time = found["time"]
    assert sum(time["by_kind"].values()) == pytest.approx(time["seconds"])
    assert 0 < time["exposed_seconds"] < time["seconds"] == pytest.approx(64 / time["examples_per_second"])
    assert 0 < time["mfu"] < 0.7
    assert time["longest"][0]["seconds"] >= time["longest"][-1]["seconds"] > 0
    live = sum(row["nbytes"] for row in found["buffers"])
    # The heap has gaps, most with zero3.
    assert 0.85 < live / found["needed"]["temporary arrays"] < 1.05
    layers = {layer for row in found["buffers"] for layer in row["layers"]}
    assert layers <= {"embed", "block_0", "block_1", "block_0-block_1", "block_0-block_5", "head"}
    assert sum(row["source"].startswith("jaxpar/") for row in found["buffers"]) > 0.8 * len(found["buffers"])
    check_findings(name, found)
    if name == "zero3":
        check_that_zero3_gathers_ahead(found)
    if name in ("zero2", "zero3"):
        check_that_a_scan_scatters_gradients(name, found)
    of_time = format_audit({key: value for key, value in found.items() if key not in ("programs", "model_flops")})
    assert set(format_findings(found["findings"])) <= set(of_time.split("\n"))  # without --program too
    dtypes = {product["dtype"] for program in found["programs"] for product in program["products"]}
    assert dtypes == {"float32" if name == "ddp" else "bfloat16"}


def check_findings(name: str, audited: dict[str, Any]) -> None:
    """All findings are normal, but moves and waits take a large share, and remat is not needed on so large GPUs.

    The exposed seconds by collective add up.
    """
    defects = {row["kind"]: row for row in audited["findings"] if not row["is_normal"]}
    recomputed = defects.pop("recomputation", None)
    assert recomputed is None or recomputed["remedy"].startswith("config.model.remat=none"), (name, recomputed)
    assert all(row["share"] and (row["reason"] or row["remedy"]) for row in defects.values()), (name, defects)
    waits = sum(row["exposed_seconds"] for program in audited["programs"] for row in program["collectives"])
    assert waits <= audited["time"]["exposed_seconds"] * (1 + 1e-9), name  # that of small collectives is not listed
    for program in audited["programs"]:
        assert all(row["exposed_seconds"] <= row["seconds"] * (1 + 1e-9) for row in program["collectives"]), name
        assert (program["synchronizations"] > 0) == any(
            row["kind"] == "synchronization" for row in audited["findings"]
        ), name


def check_that_zero3_gathers_ahead(audited: dict[str, Any]) -> None:
    """In the loops of both passes, the arrays of the next layers are gathered while a layer is computed.

    XLA unrolls the loops by two, so that these arrays alternate between two buffers and are not copied.
    """
    [program] = audited["programs"]
    looped = [row for row in program["collectives"] if row["per_step"] > 1 and row["kind"] == "all-gather"]
    assert [row["dtype"] for row in looped] == ["uint16"] * 4
    assert all(row["kernels"] for row in looped)


def check_that_a_scan_scatters_gradients(name: str, audited: dict[str, Any]) -> None:
    """The gradients of a layer are scattered while the one before is computed, in one message."""
    [program] = audited["programs"]
    scattered = [row for row in program["collectives"] if row["per_step"] > 1 and row["kind"] == "reduce-scatter"]
    # XLA takes the last of six iterations out of the loop; that of zero3 has two layers.
    assert [row["per_step"] for row in scattered] == {"zero2": [5], "zero3": [2, 2]}[name]
    assert all(row["products"] for row in scattered)


@needs_plugin
@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_zero3_accumulates_on_absent_gpus(scan: bool) -> None:
    """A loop over microbatches computes each product once, and holds the arrays of one microbatch."""
    zero3 = ["--config.exchange=zero3", *TINY, *IN_BFLOAT16, f"--config.model.scan_layers={scan}"]
    needed = []
    for num in (1, 4):
        many = f"--config.optimizer.accumulation_steps={num}", f"--config.batch_size={num * 512}"
        done = audit("--time", *zero3, *many)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        needed.append(found["needed"]["temporary arrays"])
    assert needed[1] < 1.5 * needed[0]


@needs_plugin
def test_collectives_between_hosts_start_earlier() -> None:
    """Between hosts, more kernels run at the same time as a message than within a host."""
    zero1 = ["--program", "--config.exchange=zero1", "--config.exchange_options.bucket_bytes=100000", *TINY]
    longest = []
    for hosts in ("a100-40gb:8", "a100-40gb:2x4"):
        done = audit(*zero1, "--config.model.num_layers=6", *IN_BFLOAT16, on=hosts)
        assert done.returncode == 0, done.stderr
        [program] = json.loads(done.stdout)["programs"]
        longest.append(max(row["kernels"] for row in program["collectives"]))
    assert longest[1] > 2 * longest[0] > 0, longest


SCAN = """
import jax, jax.numpy as jnp
from jaxpar.cluster.target import find_target
from jaxpar.inspect.programs import summarize
from jaxpar.strategies.strategy import CompiledProgram

def scan(x, weights):
    return jax.lax.scan(lambda x, w: (x @ w, x), x, weights)

gpu = jax.sharding.SingleDeviceSharding(find_target("h100:8").devices[0])
shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=gpu) for shape in ((512, 256), (6, 256, 256))]
print(*summarize(CompiledProgram(jax.jit(scan).lower(*shapes).compile(), {})).stacks)
"""


@needs_plugin
def test_traffic_of_stacks_on_absent_gpus() -> None:
    """In each of six iterations, a GPU copies a weight matrix out of a stack, and its input into another one."""
    done = run(["-c", SCAN])
    assert done.returncode == 0, done.stderr
    index, matrix, x = 4, 2 * 256 * 256, 2 * 512 * 256  # bytes
    assert list(map(float, done.stdout.split())) == [12, 6 * 2 * (index + matrix + x)]


ACTIVATED = """
import functools
import jax, jax.numpy as jnp
from jaxpar.cluster.target import find_target
from jaxpar.models.activations import activate, recomputed_mlp

def usual(x, up, bias, down):
    return activate("gelu_tanh", x @ up + bias) @ down

def recomputed(x, up, bias, down):
    return recomputed_mlp("gelu_tanh", True, x, ((up, bias),), down)

def loss(mlp, weights, x):
    for layer in weights:
        x = x + mlp(x, *layer)
    return (x.astype(jnp.float32) ** 2).sum()

gpu = jax.sharding.SingleDeviceSharding(find_target("h100:8").devices[0])
shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=gpu)
layer = shape(256, 1024), shape(1024), shape(1024, 256)
for mlp in (usual, recomputed):
    for depth in (4, 6):
        gradient = jax.jit(jax.grad(functools.partial(loss, mlp)))
        program = gradient.lower([layer] * depth, shape(4096, 256)).compile()
        print(program.memory_analysis().temp_size_in_bytes)
"""


@needs_plugin
def test_what_activations_save_on_absent_gpus() -> None:
    """A layer saves its input, the derivative of the activation and its result, and not the argument as well.

    With recomputed activations, it saves its input and the argument, and computes the gradients of its weights first.
    """
    done = run(["-c", ACTIVATED])
    assert done.returncode == 0, done.stderr
    usual_few, usual_many, few, many = map(int, done.stdout.split())
    assert (usual_many - usual_few) / 2 == pytest.approx(2 * 4096 * (256 + 1024 + 1024), rel=0.05)
    assert (many - few) / 2 == pytest.approx(2 * 4096 * (256 + 1024), rel=0.05)


@pytest.mark.slow
@needs_plugin
def test_offloaded_state_of_absent_gpus() -> None:
    """The optimizer state does not count as memory of a GPU, except for its copy during the update."""
    config = ["--config=configs/quickstart.py", "--target=h100:8", "--config.exchange=zero1", *TINY]
    offload = "--config.exchange_options.offload=True"
    whole, offloaded = (
        json.loads(run(["-m", "jaxpar", "audit", *config, "--json", *options]).stdout) for options in ([], [offload])
    )
    state = whole["devices"][0]["optimizer"]["nbytes"]
    assert offloaded["devices"][0]["optimizer on the host"] == {"nbytes": state, "theory": state}
    assert (whole["host_bytes"], offloaded["host_bytes"]) == (0, state)
    assert offloaded["needed"]["arguments"] == whole["needed"]["arguments"] - state
    assert (
        offloaded["needed"]["temporary arrays"] >= state + whole["devices"][0]["parameters"]["nbytes"]
    )  # and gradients
    assert f"For each GPU, {format_bytes(state)} of its state are on the host." in run(
        ["-m", "jaxpar", "audit", *config, offload]
    ).stdout.split("\n")


@pytest.mark.slow
@needs_plugin
def test_activations_on_a_tensor_axis_of_absent_gpus() -> None:
    """Each GPU of a group saves its part of the activations of a layer, without rematerialization."""
    gpt = ["--config.task=causal_lm", "--config.model.name=gpt", "--config.model.pooling=None"]
    gpt += ["--config.strategy=single", *IN_BFLOAT16]
    sizes = ["--config.model.hidden_size=256", "--config.model.num_heads=8", "--config.model.mlp_size=1024"]

    def case(tensor: int, layers: int) -> list[str]:
        return [*gpt, *sizes, f"--config.mesh.tensor={tensor}", f"--config.model.num_layers={layers}"]

    cases = {f"{tensor} {layers}": case(tensor, layers) for tensor in (1, 4) for layers in (2, 4)}
    done = run(["-m", "tests.absent_gpus", json.dumps(cases)])
    assert done.returncode == 0, done.stderr
    needed = {name: audited["needed"]["temporary arrays"] for name, audited in json.loads(done.stdout).items()}
    whole, part = (needed[f"{tensor} 4"] - needed[f"{tensor} 2"] for tensor in (1, 4))
    assert part == pytest.approx(whole / 4, rel=0.1)


@pytest.mark.slow
@needs_plugin
def test_a_float16_pipeline_of_absent_gpus() -> None:
    """All products, with those of the head, and transfers of stages are in float16; sums of gradients in float32."""
    case = ["--config.strategy=pipeline", "--config.mesh.stage=2", "--config.model.dtype=float16"]
    case.append("--config.model.attention=xla")  # as on a V100 or a T4
    done = run(["-m", "tests.absent_gpus", json.dumps({"float16": case})])
    assert done.returncode == 0, done.stderr
    audited = json.loads(done.stdout)["float16"]
    sent = {row["kind"]: row["dtype"] for row in audited["collectives"] if row["dtype"] != "scalars"}
    assert sent == {"all-reduce": "float32", "collective-permute": "float16"}
    products = [product for program in audited["programs"] for product in program["products"]]
    assert {("head" in one["source"], one["dtype"]) for one in products} == {(True, "float16"), (False, "float16")}


EVERY = {
    "single": ["--config.strategy=single"],
    "pmap": ["--config.data_parallel.implementation=pmap"],
    "swarm": ["--config.strategy=swarm"],
    "async": ["--config.strategy=async_data_parallel"],
    **{exchange: [f"--config.exchange={exchange}"] for exchange in EXCHANGES},
    **{
        schedule: ["--config.strategy=pipeline", f"--config.pipeline.schedule={schedule}", "--config.mesh.stage=2"]
        for schedule in (*SCHEDULES, *CONTINUOUS)
    },
}
IN_PROCESS = 7  # cases that share a process


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(EVERY), IN_PROCESS))
def test_every_strategy_on_absent_gpus(first: int) -> None:
    """The step compiles, theory explains its collectives exactly, and its schedule and time are known."""
    cases = dict([*EVERY.items()][first : first + IN_PROCESS])
    done = run(["-m", "tests.absent_gpus", json.dumps(cases)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == cases.keys()
    for name, audited in found.items():
        assert all(row["explained"] for row in audited["collectives"]), name
        for row in audited["collectives"]:
            assert row["kind"] == "copy" or row["ratio"] is None or row["ratio"] == pytest.approx(1, abs=1e-3), name
        assert any(program["products"] for program in audited["programs"]), name
        assert ("time" in audited) == (name not in ("swarm", "async", "dp")), name
        if "time" in audited:
            assert 0 < audited["time"]["exposed_seconds"] + 1e-9 < audited["time"]["seconds"], name
            check_findings(name, audited)
        else:
            assert audited["findings"] is None, name
        assert sum(audited["needed"].values()) < audited["usable_bytes"], name


@needs_plugin
@pytest.mark.slow
def test_the_largest_batch() -> None:
    command = ["-m", "jaxpar", "fit", "--config=configs/quickstart.py", "--target=t4:2", "--json", *TINY]
    command += ["--config.data.source=synthetic", "--remat=none,full"]
    done = run(command, **{target.FRACTION: "0.002"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["usable_bytes"] == pytest.approx(0.002 * 15_843_721_216)  # not of the 16 GB of the data sheet
    sizes = [fit["largest"]["size"] for fit in found["fits"]]
    for one in found["fits"]:
        assert one["largest"]["needed"] <= found["usable_bytes"] < one["following"]["needed"]
        assert one["following"]["size"] == one["largest"]["size"] + 2
    assert sizes[1] > sizes[0]  # with remat
