"""Tests of the settings of a process that computes on CPUs."""

import os
import subprocess
import sys

import jax
import pytest

from jaxpar.core import host

# Frees every second one of 1,000 blocks of 40 kB, and one of 4 MB, between blocks that stay.
GAPS = """
from jaxpar.core import host
host.keep_freed_memory()
host.close_gaps()
libc = host._libc()
large = []
gaps = [block for _ in range(1000) if (block := libc.malloc(40_000)) and libc.malloc(100)]
hole, _ = libc.malloc(4_000_000), libc.malloc(100)
for block in [*gaps[::2], hole]:
    libc.free(block)
print(host.close_gaps())
print(libc.malloc(3_900_000) == hole, libc.malloc(40_000) in gaps)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_gaps_are_closed_and_holes_stay() -> None:
    process = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    number, found = process.stdout.splitlines()
    assert 500 <= int(number) < 1000
    assert found == "True False"


def test_a_long_compilation_closes_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(host, "close_gaps", lambda: calls.append(None))
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert not calls
    monkeypatch.setattr(host, "LONG_COMPILATION", 0)
    jax.jit(lambda x: x + 2).lower(1.0).compile()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("given", "added"), [(None, 3), ("1", 3), ("many", 3), ("1000", None)], ids=["unset", "fewer", "no number", "more"]
)
def test_threads(given: str | None, added: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    if given is not None:
        monkeypatch.setenv("NPROC", given)
    host.add_threads(3)
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count()
    assert cores is not None
    assert os.environ["NPROC"] == (given if added is None else str(cores + added))
    os.environ.pop("NPROC")
