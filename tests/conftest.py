"""Eight virtual CPU devices, strict JAX, and caches apart from the user's."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxpar import mesh

NUM_DEVICES = 8
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def pytest_configure(config: pytest.Config) -> None:
    """Sets JAX up before any test module is imported. Compiled programs are kept between runs."""
    # Most of the tests' time is LLVM's, on programs that run for milliseconds; processes that tests start have it too.
    os.environ["XLA_FLAGS"] = f"{FAST_COMPILATION} {os.environ.get('XLA_FLAGS', '')}"
    # Processes that tests start keep their programs in the same place, as mesh.start leaves the user's alone.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
    mesh.keep_freed_memory()
    mesh.partition_by_gspmd()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_compilation_cache_max_size", 2**30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_sessionstart() -> None:
    """Asserts the devices: a test that needs them must not pass without."""
    assert jax.device_count() == NUM_DEVICES, jax.devices()


@pytest.fixture(autouse=True, scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$JAXPAR_CACHE: token arrays made by tests are the tests' own."""
    path = tmp_path_factory.mktemp("jaxpar_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPAR_CACHE", str(path))
        yield path
