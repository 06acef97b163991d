"""Tests of the settings of a process that computes on CPUs."""

import os
import subprocess
import sys

import jax
import pytest

from jaxpar.core import host

pytestmark = pytest.mark.skipif(host._glibc() is None, reason="glibc 2.33 or later is needed")
# Frees every second one of 1,000 blocks of 40 kB, and one of 4 MB, between blocks that stay.
GAPS = """
from jaxpar.core import host
host.keep_freed_memory()
libc = host._glibc()
gaps = host.Gaps(libc)
gaps.close()
blocks = [block for _ in range(1000) if (block := libc.malloc(40_000)) and libc.malloc(100)]
hole, _ = libc.malloc(4_000_000), libc.malloc(2_000_000)
before = len(gaps._blocks)
for block in [*blocks[::2], hole]:
    libc.free(block)
gaps.close()
print(len(gaps._blocks) - before)
print(libc.malloc(3_900_000) == hole, libc.malloc(40_000) in blocks)
gaps.open()
print(len(gaps._blocks), libc.malloc(40_000) in blocks)
"""


def test_gaps_are_closed_and_holes_stay() -> None:
    process = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    number, closed, opened = process.stdout.splitlines()
    assert 500 <= int(number) < 1000
    assert closed == "True False"
    assert opened == "0 True"


def test_gaps_are_closed_after_long_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that took long to lower can be compiled fast: the gaps, opened before, are closed again."""
    libc = host._glibc()
    assert libc is not None
    gaps = host.Gaps(libc)
    gaps._blocks.append(libc.malloc(10))
    calls: list[str] = []
    monkeypatch.setattr(gaps, "close", lambda: calls.append("close"))
    for event, seconds in ((host.LOWERED, 0.05), (host.COMPILED, 0.9)):
        gaps.follow(event, seconds)
    assert not calls
    assert gaps._blocks
    gaps.follow(host.COMPILED, 1.1)
    gaps.follow(host.LOWERED, 0.2)
    assert calls == ["close"]
    assert not gaps._blocks
    gaps.follow(host.COMPILED, 0.1)
    gaps.follow("/another", 9)
    assert calls == ["close", "close"]


def test_events_of_jax() -> None:
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert events.index(host.LOWERED) < events.index(host.COMPILED)


@pytest.mark.parametrize(
    ("given", "threads"),
    [(None, None), ("1", 4), ("many", None), ("100", 103)],
    ids=["unset", "one", "no number", "100"],
)
def test_threads(given: str | None, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NPROC": given} if given else {})
    for number in (2, 0, 3):  # the first one can be of the process that started this one
        host.add_threads(number)
        assert os.environ["NPROC"] == str((threads or len(os.sched_getaffinity(0)) + 3) - 3 + number)
