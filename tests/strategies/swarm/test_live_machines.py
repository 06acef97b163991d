"""A live swarm on a cluster that `ray start` started: a machine joins while it trains, and another one is lost.

The machines are two of Ray's nodes on this machine.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxpar.launch.place import free_port
from jaxpar.strategies.ray_cluster import clusters_here
from tests.runs import small_arguments
from tests.strategies.pipelines import relative_error
from tests.test_train import final_params

ROOT = Path(__file__).parents[3]
NUM_MICROBATCHES = 4


class RayCluster:
    """Nodes of Ray that this class starts and ends, which ask for a token."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        (folder / "token").write_text(64 * "a")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        }

    @property
    def address(self) -> str:
        [address] = [one for one in clusters_here() if one.endswith(f":{self._port}")]
        return address

    def start_node(self) -> None:
        """Start a node with room for two peers. The first one asks for tokens because there is one."""
        is_first = not self._processes("gcs_server")
        place = [f"--port={self._port}", "--head", f"--temp-dir={self._folder}", "--include-dashboard=false"]
        command = [str(Path(sys.executable).parent / "ray"), "start", "--num-cpus=2", "--disable-usage-stats"]
        if is_first:
            subprocess.run([*command, *place], env=self.environment, check=True, capture_output=True)
        else:
            joins = {**self.environment, "RAY_AUTH_MODE": "token"}
            subprocess.run([*command, f"--address={self.address}"], env=joins, check=True, capture_output=True)

    def kill_last_node(self) -> None:
        os.kill(max(self._processes("raylet/raylet"), key=_started), signal.SIGKILL)

    def stop(self) -> None:
        for pid in self._processes(""):
            os.kill(pid, signal.SIGKILL)

    def _processes(self, program: str) -> list[int]:
        """Return the processes of this cluster whose command line contains a text."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_text(errors="replace")
            except OSError:  # it has ended meanwhile
                continue
            if str(self._folder) in line and program in line and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        return found


def _started(pid: int) -> int:
    """Return when a process was started, in ticks of the system's clock."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # the paths of Ray's sockets must be short
    started = RayCluster(folder)
    try:
        yield started
    finally:
        started.stop()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(lines: Callable[[], str], text: str, count: int, process: subprocess.Popen[bytes]) -> None:
    while lines().count(text) < count:
        assert process.poll() is None, lines()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds Ray's processes in /proc")
def test_a_machine_joins_and_is_lost(cluster: RayCluster, tmp_path: Path) -> None:
    """The parameters are those of one device with the same number of steps."""
    command = [sys.executable, "-m", "jaxpar", f"--config={ROOT}/configs/default.py", *small_arguments(tmp_path)]
    more = {"optimizer.lr": 1e-3, "optimizer.schedule": "constant", "checkpoint.every_steps": 0, "mesh.data": 1}
    command += ["--config.optimizer.warmup=0", *(f"--config.{key}={value}" for key, value in more.items())]
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT)}
    cluster.start_node()
    settings = {"mode": "live", "stages": 2, "peers": 4, "num_microbatches": NUM_MICROBATCHES, "join_seconds": 1}
    live = [f"--config.swarm.{key}={value}" for key, value in (settings | {"address": cluster.address}).items()]
    live = [*command, f"--workdir={tmp_path}/live", "--config.num_steps=1000000", "--config.strategy=swarm", *live]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(live, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT)
    wait_for(log.read_text, "\nstep ", 1, process)
    cluster.start_node()
    wait_for(log.read_text, " serves stage ", 2, process)
    cluster.kill_last_node()
    wait_for(log.read_text, " failed, ", 2, process)
    wait_for(log.read_text, "\nstep ", log.read_text().count("\nstep ") + 2, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, log.read_text()
    got = final_params(tmp_path / "live")
    steps = int(got["['step']"])
    alone = [f"--config.num_steps={steps}", f"--config.optimizer.accumulation_steps={NUM_MICROBATCHES}"]
    subprocess.run([*command, f"--workdir={tmp_path}/one", *alone], cwd=tmp_path, env=environment, check=True)
    expected = final_params(tmp_path / "one")
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        if "['params']" in name and "['key']['bias']" not in name:  # which has no gradient but rounding errors
            assert relative_error(got[name], array) < 1e-5, name
