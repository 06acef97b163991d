"""Eight virtual CPU devices, strict JAX, and caches apart from the user's."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar import mesh
from tests import raise_sites

NUM_DEVICES = 8
DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Most of a cold run is XLA's code generation, of programs that run for milliseconds: no optimization, one LLVM module.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Without MLIR, which took half of the time. Later versions have no choice, and end at a flag they do not know.
    *(("--xla_cpu_use_fusion_emitters=false",) if jax.__version_info__ < (0, 11) else ()),
)
CACHE_BYTES = 2**30


def pytest_configure(config: pytest.Config) -> None:
    """Sets JAX up before any test module is imported. Compiled programs are kept between runs."""
    given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICE_COUNT)]
    flags = " ".join([*given, *(flag for flag in FAST_COMPILATION if flag not in given)])  # a worker is given them
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT}={NUM_DEVICES}"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers of xdist and processes that tests start are given it
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(make_cache(config))
    mesh.keep_freed_memory()
    mesh.partition_by_gspmd()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    # Both for processes that tests start, too; mesh.prepare_jax leaves the setting of the cache alone.
    for name in ("jax_persistent_cache_min_compile_time_secs", "jax_traceback_in_locations_limit"):
        os.environ[name.upper()] = "0"
        jax.config.update(name, 0)
    gc.set_threshold(100_000, 20, 100)  # what is traced lives on: looking through it often took a tenth of the time
    raise_sites.record()
    assert jax.device_count() == NUM_DEVICES, jax.devices()  # a test that needs them must not pass without
    os.environ["XLA_FLAGS"] = flags  # a process that a test starts has as many as it asks for


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collects what a worker has recorded."""
    raise_sites.reached.update(map(tuple, getattr(node, "workeroutput", {}).get("raised", [])))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run of the whole suite that has not reached every place that raises a user's error."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["raised"] = sorted(raise_sites.reached)
    elif is_whole(config) and session.testsfailed == 0 and raise_sites.unreached(raise_sites.reached):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Names the places that a run of the whole suite has not reached."""
    missing = raise_sites.unreached(raise_sites.reached) if is_whole(config) else []
    for name in missing:
        terminalreporter.write_line(f"no test reaches the error in {name}", red=True)


def is_whole(config: pytest.Config) -> bool:
    """Whether all tests but the slow ones were asked for."""
    chosen = config.option
    is_all = config.args == config.getini("testpaths") and not chosen.keyword and chosen.markexpr == "not slow"
    return is_all and not chosen.collectonly


def make_cache(config: pytest.Config) -> Path:
    """Returns the folder of compiled programs: in pytest's cache, or, without that plugin, of this run alone."""
    if not config.pluginmanager.has_plugin("cacheprovider"):
        folder = tempfile.TemporaryDirectory(prefix="jaxpar-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        return Path(folder.name)
    cache = config.cache.mkdir("jax")
    evict(cache)
    return cache


def evict(cache: Path) -> None:
    """Deletes the programs that were used longest ago until CACHE_BYTES are left.

    Not by JAX's own limit: where that is set, writes fail once a process without it has written.
    """
    newest_first = sorted(cache.glob("*-cache"), key=lambda path: path.stat().st_atime, reverse=True)
    size = 0
    for path in newest_first:
        size += path.stat().st_size
        if size > CACHE_BYTES:
            path.unlink(missing_ok=True)


@pytest.fixture(autouse=True, scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$JAXPAR_CACHE: token arrays made by tests are the tests' own."""
    path = tmp_path_factory.mktemp("jaxpar_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPAR_CACHE", str(path))
        yield path
