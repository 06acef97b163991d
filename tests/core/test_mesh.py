"""Tests of meshes and virtual CPU devices. JAX reads the number of devices once, so some tests start processes."""

import importlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from jaxpar import cluster
from jaxpar.config import default_config, override
from jaxpar.core import host, mesh
from jaxpar.errors import UserError

COUNT = """
import os, pathlib, sys
from jaxpar import cluster, config; from jaxpar.core import mesh
made = config.default_config()
config.override(made, sys.argv[2:])
mesh.prepare_jax(made, pathlib.Path(sys.argv[1]))
axes = mesh.sizes(made, cluster.find_cluster())
print(axes["data"], dict(mesh.make_mesh(axes, cluster.devices()).shape))
print(os.environ.get("NPROC"))
"""


def count(folder: Path, *overrides: str, xla_flags: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XLA_FLAGS": xla_flags}
    environment |= {"NPROC": "5", host.USERS_NPROC: "5"}
    command = [sys.executable, "-c", COUNT, str(folder), *overrides]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_virtual_devices(tmp_path: Path) -> None:
    devices, threads = count(tmp_path, "--config.mesh.virtual_cpu_devices=3").splitlines()
    assert devices == "3 {'data': 3, 'stage': 1}"
    assert threads == "7"  # two more, for devices that wait


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        ("mesh.stage=2 mesh.data=2 pipeline.executor=lockstep", 8),
        ("mesh.stage=2 mesh.data=2 pipeline.executor=dispatch", 7),
        ("strategy=single mesh.data=1", 5),
    ],
)
def test_threads_for_waiting_devices(settings: str, threads: int, tmp_path: Path) -> None:
    """Dispatched stages do not wait for each other in collectives; their replicas do, and one device never."""
    overrides = [f"--config.{setting}" for setting in ["mesh.virtual_cpu_devices=4", *settings.split()]]
    *_, found = count(tmp_path, *overrides).splitlines()
    assert int(found) == threads


def test_the_count_in_xla_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    assert count(tmp_path, "--config.mesh.virtual_cpu_devices=4", xla_flags=flags).startswith("4 ")
    monkeypatch.setenv("XLA_FLAGS", flags)
    config = default_config()
    config.mesh.virtual_cpu_devices = 3
    message = r"^config\.mesh\.virtual_cpu_devices is 3; it must be 4, the device count in XLA_FLAGS, or 0"
    with pytest.raises(UserError, match=message):
        mesh.prepare_jax(config, tmp_path)


def test_a_count_after_jax_has_started(tmp_path: Path) -> None:
    """As in a notebook, where runs follow each other."""
    config = default_config()
    config.mesh.virtual_cpu_devices = jax.device_count()
    mesh.prepare_jax(config, tmp_path)
    config.mesh.virtual_cpu_devices = 3
    with pytest.raises(UserError, match=r"^config\.mesh\.virtual_cpu_devices is 3; it must be 8 or 0, because JAX has"):
        mesh.prepare_jax(config, tmp_path)


@pytest.mark.parametrize(("num_data", "message"), [(9, "it must be at most 8, the number of cpu"), (0, "at least 1")])
def test_invalid_mesh_sizes(num_data: int, message: str) -> None:
    config = default_config()
    override(config, [f"--config.mesh.data={num_data}"])
    with pytest.raises(UserError, match=message):
        mesh.check_sizes(config, cluster.find_cluster())


@pytest.mark.parametrize("number", [-1, 1_000_000])
def test_a_number_of_virtual_devices_that_cannot_be(number: int, tmp_path: Path) -> None:
    config = default_config()
    config.mesh.virtual_cpu_devices = number
    message = rf"config\.mesh\.virtual_cpu_devices is {number}; it must be between 0 and 1024"
    with pytest.raises(UserError, match=message):
        mesh.prepare_jax(config, tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize backend 'cuda'\nmore"), AssertionError()])
def test_a_platform_without_devices(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match=r"^JAX_PLATFORMS is 'cuda', which JAX cannot start .*; it must be") as caught:
        cluster.devices()
    assert "\n" not in str(caught.value)


def test_programs_over_several_cpu_devices_wait_for_their_results() -> None:
    calls = []

    class Result:
        def block_until_ready(self) -> "Result":
            calls.append("waited")
            return self

    mesh.one_at_a_time(Result, mesh.make_mesh({"data": 2, "stage": 1}, cluster.devices()))()
    assert calls == ["waited"]
    mesh.one_at_a_time(Result, mesh.make_mesh({"data": 1, "stage": 1}, cluster.devices()))()
    assert calls == ["waited"]
    assert jax.device_count() == 8


def test_threads_start_programs_over_several_devices_one_after_another() -> None:
    running: list[int] = []
    overlaps: list[int] = []

    def program() -> None:
        overlaps.append(len(running))
        running.append(1)
        time.sleep(0.02)
        running.pop()

    call = mesh.one_at_a_time(program, mesh.make_mesh({"data": 2, "stage": 1}, cluster.devices()))
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(call) for _ in range(4)]:
            future.result()
    assert overlaps == [0, 0, 0, 0]


def test_a_folder_without_plugins_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninstalling a plugin leaves an empty folder, with which a run on CPUs would page-fault in each step."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    config, found = default_config(), list[bool]()
    folder = tmp_path / "jax_plugins"
    for make in (None, folder.mkdir, (folder / "xla_cuda12.py").touch):
        if make:
            make()
        importlib.invalidate_caches()
        found.append(mesh.has_plugin())
    assert found == [False, False, True]
    assert mesh.computes_on_cpus(config) == (jax.config.jax_platforms == "cpu")  # type: ignore[attr-defined]
    config.mesh.virtual_cpu_devices = 2
    assert mesh.computes_on_cpus(config)
