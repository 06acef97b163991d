"""Measured rates: timings made from known rates give these rates back, and a cluster file keeps them."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import cluster as clusters
from jaxpar.choose.costs import calibrate, measured_rates, rates
from jaxpar.choose.costs.machine import GpuMachine
from jaxpar.choose.costs.measured_rates import (
    GPU_SIZES,
    MeasuredSizes,
    describe_rates,
    measure_seconds,
    with_measured_rates,
)
from jaxpar.cluster import Cluster
from jaxpar.cluster.files import cluster_toml, find_named
from jaxpar.commands import plan as command
from jaxpar.core import mesh
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Traffic
from jaxpar.core.ring import PERMUTE
from jaxpar.errors import UserError
from tests.choose.test_planner import PERCEPTRON
from tests.cluster.test_target import needs_plugin, run
from tests.runs import run_script, script_error

H100 = clusters.named_cluster("h100", 8)
# The rates of the machine from whose timings they must be read.
LAUNCH, MEMORY, LINK, HOP = 3e-6, 2.5e12, 2e11, 7e-6
PRODUCTS = {"float32": 2e14, "bfloat16": 8e14}
SMALL = MeasuredSizes(width=16, kernels=3, few=8, many=256, sent=64)


def length_of(elements: int, n: int) -> int:
    return math.ceil(elements / n) * n


def collective_seconds(n: int = 8, sizes: MeasuredSizes = GPU_SIZES) -> dict[tuple[str, int], float]:
    """Return what a collective of n devices with the rates above takes, by its kind and the length of its vector."""

    def collective(sent: float, hops: float) -> list[float]:
        return [sent * 4 * length_of(length, n) / LINK + hops * HOP for length in (sizes.few, sizes.sent)]

    every = {
        "all-reduce": collective(2 * (n - 1) / n, 2 * (n - 1)),
        "reduce-scatter": collective((n - 1) / n, n - 1),
        "all-gather": collective(n - 1, n - 1),
        "collective-permute": collective(1, 1),
    }
    lengths = [length_of(length, n) for length in (sizes.few, sizes.sent)]
    return {(kind, length): of for kind, each in every.items() for length, of in zip(lengths, each, strict=True)}


def timings(n: int = 8, sizes: MeasuredSizes = GPU_SIZES, dispatch: float = 5e-5) -> dict[Any, float]:
    """Return what n devices with the rates above take. dispatch: what every program takes in addition."""
    found: dict[Any, float] = {}
    if n > 1:
        for key, of_collective in collective_seconds(n, sizes).items():
            found[key] = dispatch + calibrate.NUM_REPEATED * of_collective
            found[measured_rates.NO_COLLECTIVE, key[1]] = dispatch
    few, many = (sizes.kernels * (LAUNCH + 8 * length / MEMORY) for length in (sizes.few, sizes.many))
    one = LAUNCH + 8 * sizes.few / MEMORY
    found |= {"kernel": dispatch + one, "kernels": dispatch + few, "passes": dispatch + many}
    return found | {dtype: dispatch + one + 2 * sizes.width**3 / rate for dtype, rate in PRODUCTS.items()}


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_known_rates_are_read(n: int) -> None:
    cluster = with_measured_rates(clusters.named_cluster("h100", n), timings(n), GPU_SIZES)
    assert rates.launch_seconds(cluster) == pytest.approx(LAUNCH, rel=1e-3)
    assert rates.memory_seconds(cluster, MEMORY) == pytest.approx(1)
    for dtype, rate in PRODUCTS.items():
        assert rates.product_seconds(cluster, "product", dtype, rate) == pytest.approx(1)
    for head, assumed in ((64, 0.25), (128, 0.5)):
        assert rates.product_seconds(cluster, "attention", "bfloat16", assumed * 989.5e12, head) == pytest.approx(1)
    assert cluster.peak_flops == H100.peak_flops  # MFU is still relative to these
    assert GpuMachine(cluster).clock_seconds == pytest.approx(10 * LAUNCH, rel=1e-3)
    if n > 1:
        assert rates.send_rate(cluster, "host") == pytest.approx(LINK)
        assert rates.hop_seconds(cluster, "host") == pytest.approx(HOP)
        assert rates.send_rate(cluster, "network") == 0.8 * H100.send_rates["network"]
    else:
        assert (cluster.send_rates, cluster.latencies) == (H100.send_rates, {})


def test_collectives_are_predicted_as_measured() -> None:
    """The planner predicts the time of the collectives from which the link was read."""
    machine, given = GpuMachine(with_measured_rates(H100, timings(), GPU_SIZES)), collective_seconds()
    sent = {"all-reduce": 14 / 8, "reduce-scatter": 7 / 8, "all-gather": 7, "collective-permute": 1}
    messages = {"all-reduce": 14, "reduce-scatter": 7, "all-gather": 7, "collective-permute": 1}
    assert {kind for kind, _ in given} == set(sent)
    for (kind, length), of_collective in given.items():
        traffic = Traffic(kind, "float32", DATA, sent[kind] * 4 * length, messages[kind])
        assert machine.collective(traffic, {DATA: 8, STAGE: 1}) == pytest.approx(of_collective), kind


def test_devices_of_an_unknown_kind() -> None:
    """All rates are the measured ones."""
    unknown = Cluster("gpu", "GeForce 256", 8)
    cluster = with_measured_rates(clusters.with_rates_of_kind(unknown), timings(), GPU_SIZES)
    assert cluster.memory_bandwidth == pytest.approx(MEMORY)
    assert cluster.peak_flops == pytest.approx({**PRODUCTS, "float16": PRODUCTS["bfloat16"]})
    assert cluster.efficiencies == {"float32": 1, "bfloat16": 1, "memory": 1, "host": 1}


def test_efficiencies_of_two_links() -> None:
    """A measured link inside the host does not change the efficiency of the network."""
    cluster = replace(clusters.named_cluster("h100", 16, num_processes=2), efficiencies={"host": 0.3})
    host, network = 0.3 * 450e9, 0.8 * 50e9
    across = rates.collective_seconds(cluster, "all-reduce", [range(16)], 1e9, 0)
    assert across == pytest.approx(1e9 / min(host, 8 * network))
    assert rates.collective_seconds(cluster, PERMUTE, [(0, 8)], 1e9, 0) == pytest.approx(1e9 / network)


DISTURBED: dict[str, dict[Any, float]] = {
    "a kernel": {"kernel": 1.0},
    "a pass over the memory": {"passes": 1e-4},
    "a product in bfloat16": {"float32": 1.0, "bfloat16": 1e-6},
    "a collective of a long vector": {("all-reduce", GPU_SIZES.few): 100.0},
}


@pytest.mark.parametrize("what", DISTURBED)
def test_disturbed_timings(what: str) -> None:
    with pytest.raises(UserError, match=f"--cluster is 'here', but {what} is too fast to time; it"):
        with_measured_rates(H100, timings() | DISTURBED[what], GPU_SIZES)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_measure(n: int) -> None:
    """The programs run on devices of any kind."""
    measured = measure_seconds(jax.devices()[:n], SMALL, rounds=1)
    assert min(measured.values()) > 0
    lengths = [length_of(length, n) for length in (SMALL.few, SMALL.sent)] if n > 1 else []
    looped = {(kind, length) for kind in (*calibrate.KINDS, measured_rates.NO_COLLECTIVE) for length in lengths}
    assert set(measured) == {"kernel", "kernels", "passes", "float32", "bfloat16"} | looped


def test_programs() -> None:
    """Each program computes what it is timed for: kernels one after the other, and all collectives of a loop."""
    x, n, repeats = np.arange(8, dtype=np.float32), 4, calibrate.NUM_REPEATED
    assert measured_rates.chained_kernels(3, jnp.asarray(x)).tolist() == (x / 8).tolist()
    vectors = np.random.default_rng(0).normal(size=(n, 8)).astype(np.float32)
    results: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "all-reduce": lambda v: np.tile(v.sum(axis=0), (n, 1)),
        "reduce-scatter": lambda v: v.sum(axis=0).reshape(n, 2),
        "all-gather": lambda v: np.tile(v.reshape(-1), (n, 1)),
        "collective-permute": lambda v: np.roll(v, 1, axis=0),
        measured_rates.NO_COLLECTIVE: lambda v: v,
    }
    on_mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:n]), (calibrate.AXIS,))
    spec = jax.P(calibrate.AXIS)
    for kind, function in measured_rates.loops(n).items():
        expected = vectors.astype(np.float64)
        for _ in range(repeats):
            result = results[kind](expected)
            expected = 0.5 * (result if result.shape == expected.shape else expected) + result[:, :1]
        looped = jax.shard_map(function, mesh=on_mesh, in_specs=spec, out_specs=spec, check_vma=False)
        np.testing.assert_allclose(
            np.asarray(jax.jit(looped)(vectors.reshape(-1))).reshape(n, 8), expected, rtol=1e-4, err_msg=kind
        )


@needs_plugin
@pytest.mark.slow
def test_programs_of_absent_gpus() -> None:
    """From the programs that XLA compiles for H100s, at assumed rates, the assumed rates are read."""
    done = run(["-m", "tests.absent_rates"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, assumed in rates.EFFICIENCY.items():
        if name in found["efficiencies"] and name != "host":
            assert found["efficiencies"][name] == pytest.approx(assumed, rel=0.01), name
    assert found["launch_seconds"] == pytest.approx(rates.LAUNCH_SECONDS, rel=1e-3)
    assert found["send_rate"] == pytest.approx(0.8 * H100.send_rates["host"], rel=0.01)
    assert found["latency"] == pytest.approx(rates.HOP_SECONDS["host"], rel=0.05)


def test_cluster_files_keep_the_rates(tmp_path: Path) -> None:
    for n in (1, 8):
        measured = with_measured_rates(clusters.named_cluster("h100", n), timings(n), GPU_SIZES)
        path = tmp_path / f"{n}.toml"
        path.write_text(cluster_toml(measured, "h100", 'measured on "a" machine'))
        _, again = find_named(str(path), "--cluster")
        for name in ("efficiencies", "send_rates", "latencies", "peak_flops"):
            assert getattr(again, name) == pytest.approx(getattr(measured, name), rel=1e-3), name
        assert again.launch_seconds == pytest.approx(LAUNCH, rel=1e-3)
        rest: dict[str, Any] = {"efficiencies": {}, "send_rates": {}, "latencies": {}, "launch_seconds": None}
        assert replace(again, **rest) == replace(measured, **rest)


BASE = 'gpu = "h100"\nhosts = 1\ngpus_per_host = 8\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "efficiency = 0.7\n",
            "efficiency is 0.7; it must be a table with some of float32, bfloat16, attention, memory,",
        ),
        ("[efficiency]\nproduct = 0.7\n", "efficiency is {'product': 0.7}; it must be a table with some of float32, "),
        ("[efficiency]\nmemory = 0\n", "efficiency.memory is 0; it must be a number greater than 0"),
        ("[efficiency]\nhost = true\n", "efficiency.host is True; it must be a number greater than 0"),
        ("launch_seconds = -1\n", "launch_seconds is -1; it must be a number of at least 0"),
    ],
)
def test_invalid_rates(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(BASE + content)
    with pytest.raises(UserError, match=re.escape(f"{path}: {message}")):
        find_named(str(path), "--cluster")


# ---- the command line ----------------------------------------------------------------------------------------------

# A model that is large enough for the order of events in a swarm not to depend on rounding, and few candidates.
FEW = (
    *("--config=configs/quickstart.py", "--config.data.source=synthetic", "--config.batch_size=8"),
    *("--config.strategy=auto", "--config.exchange=zero2", "--config.model.remat=full"),
)


def use_gpus(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Make the script believe that the devices of this process are H100s, as JAX describes them."""
    here = replace(H100, memory_bandwidth=None, send_rates={}, memory_bytes=60e9, **changes)
    monkeypatch.setattr(clusters, "find_cluster", lambda: here)
    monkeypatch.setattr(mesh, "prepare_jax", lambda *_: None)
    monkeypatch.setattr(measured_rates, "measure_seconds", lambda devices, _sizes: timings(len(devices)))


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Elsewhere, the file of the measured GPUs gives the same predictions, which are not those of assumed rates."""
    use_gpus(monkeypatch)
    path = tmp_path / "here.toml"
    listed = []
    for cluster in ("--cluster=here", f"--cluster={path}", "--cluster=h100:8"):
        saved = [f"--save_cluster={path}"] if cluster == "--cluster=here" else []
        assert run_script(monkeypatch, command, *FEW, cluster, *saved, "--json") == 0
        printed = capsys.readouterr()
        listed.append({str(one["settings"]): one["seconds"] for one in json.loads(printed.out)})
        lines = printed.err.splitlines(keepends=True)
        assert "".join(line for line in lines if not line.startswith("planner ")) == (  # its progress, if it is slow
            "measured  float32 products 200 TFLOP/s (40%), bfloat16 products 800 TFLOP/s (81%), memory 2500 GB/s "
            "(75%), 3 us per kernel, links 200 GB/s and 7 us a hop\n"
            if saved
            else ""
        )
    here, again, assumed = listed
    assert again.keys() == here.keys()
    for settings, seconds in here.items():  # rounding can reorder events of a swarm
        assert again[settings] == pytest.approx(seconds, rel=0.05 if "'strategy': 'swarm'" in settings else 5e-3)
    assert min(here.values()) < 0.95 * min(assumed.values())  # 3 us for a kernel, instead of 4
    assert 'source = "measured on 8 x NVIDIA H100 80GB HBM3 on 20' in path.read_text()


def test_one_unknown_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans for a GPU without any rates of a data sheet, which cannot be saved."""
    use_gpus(monkeypatch, device_kind="GeForce 256", peak_flops={}, num_devices=1)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    assert run_script(monkeypatch, command, *PERCEPTRON, "--cluster=here") == 0
    printed = capsys.readouterr()
    assert re.search(r"^ 1 .*  single", printed.out, re.MULTILINE)
    assert "links" not in printed.err
    _, message = script_error(monkeypatch, capsys, command, *PERCEPTRON, "--cluster=here", "--save_cluster=x.toml")
    assert message.startswith("--save_cluster is 'x.toml' on GeForce 256; it must be unset, because a cluster file has")


MISTAKES = {
    ("--cluster=here", "--save_cluster=x.py"): "--save_cluster is 'x.py'; it must be the path of a .toml file in a",
    ("--cluster=here", "--save_cluster=no/x.toml"): "--save_cluster is 'no/x.toml'; it must be the path of a .toml",
    (
        "--cluster=h100:8",
        "--save_cluster=x.toml",
    ): "--save_cluster is 'x.toml'; it must be unset without --cluster=here",
    ("--cluster=here:8",): "--cluster is 'here:8'; it must be here, without a number of devices",
    ("--cluster=her",): "t4, v100, here, or the path of a TOML file. Did you mean 'here'?",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_gpus(monkeypatch)
    assert MISTAKES[flags] in script_error(monkeypatch, capsys, command, *PERCEPTRON, *flags)[1]


def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_gpus(monkeypatch)
    folder = tmp_path / "x.toml"
    folder.mkdir()
    _, message = script_error(monkeypatch, capsys, command, *PERCEPTRON, "--cluster=here", f"--save_cluster={folder}")
    assert message.startswith(f"--save_cluster is '{folder}'; it must be the path of a .toml file")


def test_descriptions() -> None:
    assert describe_rates(with_measured_rates(H100, timings(), GPU_SIZES)).endswith("links 200 GB/s and 7 us a hop")
