"""Test setup: eight virtual CPU devices, strict JAX settings, and caches separate from the user's."""

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, settings

from jaxpar.core import host, mesh
from jaxpar.measure.hlo import present_lines
from tests import raise_sites

NUM_DEVICES = 8
DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Without these flags most of a cold run is XLA code generation, for programs that run for milliseconds.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Avoids MLIR, which took half of the time. Later versions lack this flag and abort on unknown flags.
    *(("--xla_cpu_use_fusion_emitters=false",) if jax.__version_info__ < (0, 11) else ()),
)
CACHE_BYTES = 2**30
# Properties run the same examples each time, and may write to one tmp_path again and again.
settings.register_profile(
    "jaxpar",
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("jaxpar")
MAX_MAPS = 40_000  # Linux allows a process 65,530 memory maps; with JAX 0.11 a compiled program takes about 20


def pytest_configure(config: pytest.Config) -> None:
    """Configure JAX before any test module is imported. Compiled programs are cached between runs."""
    # With nohup or in the background, signals are ignored, and would also be in the processes that tests start.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICE_COUNT)]
    flags = " ".join([*given, *(flag for flag in FAST_COMPILATION if flag not in given)])  # workers inherit the flags
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT}={NUM_DEVICES}"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # set in xdist workers and in processes that tests start
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(make_cache(config))
    host.keep_freed_memory()
    mesh.partition_by_gspmd()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    # The environment variables are for processes that tests start; mesh.prepare_jax does not override them.
    for name in ("jax_persistent_cache_min_compile_time_secs", "jax_traceback_in_locations_limit"):
        os.environ[name.upper()] = "0"
        jax.config.update(name, 0)
    gc.set_threshold(100_000, 20, 100)  # traced programs stay alive, and frequent collections took 10% of the time
    raise_sites.record()
    assert jax.device_count() == NUM_DEVICES, jax.devices()  # tests must not pass with fewer devices
    os.environ["XLA_FLAGS"] = flags  # processes that tests start choose their own number of devices


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Unload the compiled programs of a process after a file if loading many more would crash it."""
    if nextitem is None or nextitem.path == item.path:
        return
    with contextlib.suppress(FileNotFoundError):  # only Linux has this file
        if Path("/proc/self/maps").read_bytes().count(b"\n") > MAX_MAPS:
            jax.clear_caches()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the raise sites that a worker recorded."""
    raise_sites.reached.update(map(tuple, getattr(node, "workeroutput", {}).get("raised", [])))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of the whole suite if some place that raises a UserError was not reached."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["raised"] = sorted(raise_sites.reached)
    elif is_whole(config) and session.testsfailed == 0 and raise_sites.unreached(raise_sites.reached):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    gc.freeze()  # pytest and the interpreter collect garbage several times as they end, gigabytes of traced programs


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the places that a run of the whole suite has not reached."""
    missing = raise_sites.unreached(raise_sites.reached) if is_whole(config) else []
    for name in missing:
        terminalreporter.write_line(f"no test reaches the error in {name}", red=True)


def is_whole(config: pytest.Config) -> bool:
    """Return whether all tests except the slow ones were selected."""
    chosen = config.option
    is_all = config.args == config.getini("testpaths") and not chosen.keyword and chosen.markexpr == "not slow"
    return is_all and not chosen.collectonly


def make_cache(config: pytest.Config) -> Path:
    """Return the folder for compiled programs: in pytest's cache, or a temporary one if that plugin is disabled."""
    if not config.pluginmanager.has_plugin("cacheprovider"):
        folder = tempfile.TemporaryDirectory(prefix="jaxpar-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        return Path(folder.name)
    cache = config.cache.mkdir("jax")
    evict(cache)
    return cache


def evict(cache: Path) -> None:
    """Delete the least recently used programs until at most CACHE_BYTES are left.

    JAX's own limit is not used: once a process without the limit has written to the cache, writes with it fail.
    """
    newest_first = sorted(cache.glob("*-cache"), key=lambda path: path.stat().st_atime, reverse=True)
    size = 0
    for path in newest_first:
        size += path.stat().st_size
        if size > CACHE_BYTES:
            path.unlink(missing_ok=True)


@pytest.fixture(autouse=True, scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set JAXPAR_CACHE to a temporary folder, so that tests do not use the user's cached token arrays."""
    path = tmp_path_factory.mktemp("jaxpar_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPAR_CACHE", str(path))
        yield path


@pytest.fixture
def lines_in_programs() -> Iterator[None]:
    """Compile programs with the present lines of code, which other tests leave out."""
    jax.config.update("jax_traceback_in_locations_limit", 10)
    with present_lines():
        yield
    jax.config.update("jax_traceback_in_locations_limit", 0)
