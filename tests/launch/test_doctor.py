"""Tests `jaxpar doctor`: what the facts mean, who is missing or unreachable, and a whole examination."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpar.commands import doctor as command
from jaxpar.errors import UserError
from jaxpar.launch.doctor import connections, examination, facts
from jaxpar.launch.doctor.examination import Examination
from jaxpar.launch.doctor.facts import Row
from jaxpar.launch.place import Place, free_port

FACTS = {
    "host": "a",
    "versions": {"python": "3.12.1", "jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2"}
    | {"nvidia-nccl-cu13": "2.31.2", "driver": "580.65.06"},
    "gpus": ["H100", "H100"],
    "memory": 10**11,
    "disk": 10**12,
    "shared": 2**34,
}


def problems(rows: list[Row]) -> dict[str, str]:
    return {row.what: row.problem for row in rows if row.problem}


def of_version(name: str, version: str) -> dict[str, Any]:
    return {"versions": {**FACTS["versions"], name: version}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("changes", "all_change", "what", "problem"),
    [
        ({}, True, None, ""),
        (of_version("jaxlib", "0.11.1"), False, "jaxlib", "process 1 has 0.11.1, process 0 has 0.11.2"),
        (of_version("jax-cuda13-plugin", "0.11.1"), True, "jax-cuda13-plugin", "must be the same version"),
        (of_version("driver", "575.51.03"), True, "driver", "must be 580 or newer"),
        (of_version("driver", f"{facts.NO_DRIVER}: No devices were found"), True, "driver", "must list the GPUs"),
        (of_version("nvidia-nccl-cu13", "2.30.7"), True, "nvidia-nccl-cu13", "known to hang"),
        ({"gpus": ["H100"], "host": "b"}, False, "GPUs that nvidia-smi lists", "process 1 on b has 1, process 0 has 2"),
        ({"gpus": ["A100", "A100"]}, False, "GPUs that nvidia-smi lists", "wait for the slowest: A100, H100"),
        ({"memory": 10**8}, False, "host memory", "process 1 on a has 100 MB; it needs 500 MB"),
        ({"disk": 10**8}, False, "free disk for the workdir", "process 1 on a has 100 MB; it needs 1 GB"),
        ({"shared": 2**26}, True, "/dev/shm", "process 0 on a has 67.1 MB; it needs 1.07 GB"),
    ],
)
def test_facts(changes: dict[str, Any], all_change: bool, what: str | None, problem: str) -> None:
    changed = {**FACTS, **changes}
    found = problems(facts.judge([changed if all_change else FACTS, changed]))
    assert list(found) == ([what] if what else [])
    assert problem in found.get(what or "", "")


def examine(number: int, workdir: Path | None, *, absent: int = 0, seconds: float = 20.0) -> list[Row]:
    """Examine processes that are threads, the last `absent` of which are missing. The others learn of problems."""
    address = f"127.0.0.1:{free_port()}"
    refused = []

    def answer(process: int) -> None:
        try:
            examination.answer(Place(address, number, process), workdir, 20.0)
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=answer, args=(i,), daemon=True) for i in range(1, number - absent)]
    for thread in threads:
        thread.start()
    rows = Examination(Place(address, number, 0), workdir, seconds).run()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    listed = ", ".join(problems(rows))
    assert all(f"see its output ({listed})" in one for one in refused)
    assert len(refused) == (len(threads) if listed else 0)
    return rows


@pytest.fixture(autouse=True)
def without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share one JAX, which cannot be several processes."""
    added = {"devices": 3, "kinds": ["cpu"], "seconds": 1.0, "wrong": ""}
    monkeypatch.setattr(examination, "add_on_devices", lambda _place: added)
    monkeypatch.setattr(connections, "SENT", 2**20)


def test_nothing_is_wrong(tmp_path: Path) -> None:
    rows = examine(3, tmp_path / "new" / "run")
    assert problems(rows) == {}
    assert {"processes", "clocks", "workdir", "network", "devices"} <= {row.what for row in rows}
    assert list(tmp_path.iterdir()) == []


def test_processes_are_missing() -> None:
    assert (
        "processes 2, 3 of 4 did not reach 127.0.0.1:" in problems(examine(4, None, absent=2, seconds=2))["processes"]
    )


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    main, now = threading.main_thread(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 5 * (threading.current_thread() is not main))
    assert "differs by 5.0 s" in problems(examine(2, None))["clocks"]


def test_workdir_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_files = examination.share_files
    monkeypatch.setattr(examination, "share_files", lambda _, own: share_files(own / "elsewhere", own))
    assert "process 1 on" in (found := problems(examine(2, tmp_path))["workdir"])
    assert "does not see the files of process 0" in found


def test_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's port is closed: both processes are named."""
    closed = f"127.0.0.1:{free_port()}"
    main, rate_to = threading.main_thread(), connections.rate_to

    def of_peers(address: str, _: float) -> float:
        return rate_to(address if threading.current_thread() is main else closed, seconds=0.3)

    monkeypatch.setattr(examination, "rate_to", of_peers)
    found = problems(examine(2, None))["network"]
    assert "process 1 on" in found
    assert "cannot send to process 0" in found


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(place: Place) -> dict[str, Any]:
        if place.process_id == 1:
            raise RuntimeError("no CUDA driver\nmore")
        return {"wrong": ""}

    monkeypatch.setattr(examination, "add_on_devices", add)
    assert problems(examine(2, None))["devices"].endswith(": no CUDA driver")


def test_an_unwritable_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    found = problems(Examination(None, tmp_path, 20.0).run())
    assert f"cannot write to {tmp_path}: Permission denied" in found["workdir"]


def test_nvidia_smi_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing nvidia-smi prints the reason where it otherwise prints the GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed, because it has no driver.'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    found = facts.facts(None)
    assert found["versions"]["driver"] == "nvidia-smi fails: NVIDIA-SMI has failed, because it has no driver."
    assert found["gpus"] == []


def test_a_process_that_ends() -> None:
    """The lost process is named, whether it is asked or answers, with half a message."""
    examined = Examination(None, None, 1.0)
    examined._facts = [FACTS, {**FACTS, "host": "b"}]
    for sends_half in (False, True):
        own, other = socket.socketpair()
        examined._peers = {1: connections.Peer(own)}
        if sends_half:
            other.sendall(b'{"wro')
        other.close()
        with pytest.raises(examination._Broken, match="process 1 on b did not answer"):
            examined._ask(1, "time")
        examined._peers[1].close()


def test_a_file_as_workdir(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert problems(Examination(None, file, 20.0).run())["workdir"].endswith(f"cannot write to {file}: Not a directory")


def test_command(tmp_path: Path) -> None:
    """Two processes on this machine, through JAX, and a port that is in use."""
    line = [sys.executable, "-m", "jaxpar", "doctor", f"--workdir={tmp_path}"]
    done = subprocess.run([*line, "--num_processes=2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 x cpu, all-reduce at" in done.stdout
    assert "PROBLEM" not in done.stdout
    with connections.listen("127.0.0.1:0") as server:
        place = [f"--coordinator_address=127.0.0.1:{server.getsockname()[1]}", "--num_processes=2"]
        with pytest.raises(UserError, match="the port must be free"):
            command.main([*place, "--process_id=0"])
    with pytest.raises(UserError, match=r"process 1 on .* cannot reach process 0"):
        command.main([*place, "--process_id=1", "--seconds=1"])
    with pytest.raises(UserError, match="--num_processes is 0; it must be at least 1"):
        command.main(["--num_processes=0"])
