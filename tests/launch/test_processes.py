"""Tests of runs of two real processes with two or three virtual devices each."""

import errno
import functools
import io
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from jaxpar import checkpoint, training
from jaxpar import config as configs
from jaxpar.commands import launch as command
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch import launcher, processes
from jaxpar.launch.place import BIND, FLAGS, bind_address, find_place, free_port, own_address
from jaxpar.run import metrics
from tests.checkpoint.test_private import VALUES
from tests.runs import small_arguments, without_texts
from tests.selection import slow, slow_except
from tests.strategies.pipelines import relative_error
from tests.test_train import final_params, stop_at

ROOT = Path(__file__).parents[2]
ALONE: dict[str, Any] = {"coordinator_address": None, "num_processes": None, "process_id": None}
GIVEN = {"coordinator_address": "host:1234", "num_processes": 4, "process_id": 3}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
JAXPAR = {"JAXPAR_COORDINATOR_ADDRESS": "pod-0.jobs:1234", "JAXPAR_NUM_PROCESSES": "4"}
NO_ADDRESS = "--coordinator_address (or JAXPAR_COORDINATOR_ADDRESS)"


@pytest.mark.parametrize(
    ("given", "environ", "place"),
    [
        (ALONE, {}, None),
        (GIVEN, {}, ("host:1234", 4, 3, None)),
        (GIVEN, SLURM, ("host:1234", 4, 3, None)),
        (ALONE, JAXPAR | {"JAXPAR_PROCESS_ID": "1"}, ("pod-0.jobs:1234", 4, 1, None)),
        (ALONE | {"process_id": 0}, JAXPAR | {"JAXPAR_PROCESS_ID": "1"}, ("pod-0.jobs:1234", 4, 0, None)),
        (ALONE, JAXPAR | POD, ("pod-0.jobs:1234", 4, 2, None)),
        (ALONE, POD | {"JAXPAR_NUM_PROCESSES": "1"}, None),
        (ALONE | {"num_processes": 1}, {}, None),
        (ALONE | {"num_processes": 1, "process_id": 1}, {}, None),
        (ALONE, {"JOB_COMPLETION_INDEX": "2"}, None),
        (ALONE, SLURM, ("localhost:61447", 2, 1, 1)),
        (ALONE, SLURM | {"SLURM_JOB_ID": "4099", "SLURM_STEP_NODELIST": "n7,n[8-9]"}, ("n7:61443", 2, 1, 1)),
        (ALONE, SLURM | {"SLURM_STEP_NODELIST": "node[0012-0015,21],m"}, ("node0012:61447", 2, 1, 1)),
        (ALONE, SLURM | {"SLURM_STEP_NODELIST": "a[3,7]", "JAX_COORDINATOR_PORT": "80"}, ("a3:80", 2, 1, 1)),
        (ALONE, SLURM | {"SLURM_NTASKS": "1"}, None),
        (ALONE, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),  # a batch script, without srun
        (ALONE, OPEN_MPI, ("10.96.0.1:62880", 2, 1, 0)),
        (ALONE, SLURM | OPEN_MPI, ("10.96.0.1:62880", 2, 1, 0)),  # mpirun in a SLURM job
        (
            ALONE,
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "0.0;tcp6://[fe80::b9b,fd00::2]:4"},
            ("[fe80::b9b]:61440", 2, 1, 0),
        ),
        (ALONE, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_the_place_of_a_process(given: Any, environ: dict[str, str], place: Any) -> None:
    assert find_place(given, environ) == place


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        (GIVEN | {"process_id": None}, {}, "--process_id (or JAXPAR_PROCESS_ID) is missing; a run of several"),
        (ALONE | {"num_processes": 2}, {}, f"{NO_ADDRESS} and --process_id (or JAXPAR_PROCESS_ID) are missing"),
        (ALONE | {"process_id": 1, "num_processes": 2}, {}, f"{NO_ADDRESS} is missing"),
        (ALONE | {"process_id": 1}, {}, f"{NO_ADDRESS} and --num_processes (or JAXPAR_NUM_PROCESSES) are missing"),
        (ALONE | {"process_id": 0}, SLURM, f"{NO_ADDRESS} and"),
        (ALONE | {"process_id": 1}, POD, f"{NO_ADDRESS} and"),
        (ALONE, {"JAXPAR_PROCESS_ID": "1"}, f"{NO_ADDRESS} and"),
        (GIVEN | {"process_id": 4}, {}, "--process_id is 4; it must be between 0 and 3"),
        (GIVEN | {"num_processes": 0}, {}, "--num_processes is 0; it must be at least 1"),
        (GIVEN | {"coordinator_address": "host"}, {}, "--coordinator_address is 'host'; it must be the HOST:PORT"),
        (
            GIVEN | {"coordinator_address": "host:65536"},
            {},
            "--coordinator_address is 'host:65536'; it must be the HOST",
        ),
        (ALONE, JAXPAR | {"JAXPAR_PROCESS_ID": "one"}, "--process_id is one; it must be between 0 and 3"),
        (ALONE, POD, "JOB_COMPLETION_INDEX is set, as in a Kubernetes indexed Job, but JAXPAR_NUM_PROCESSES and"),
    ],
)
def test_an_invalid_place(given: Any, environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        find_place(given, environ)
    assert message in str(error.value)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of 127.0.0.1 on which a socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_process_0_listens_on_its_own_address(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    for own in (f"127.0.0.1:{free_port()}", f"localhost:{free_port()}"):
        assert bind_address(own, {}) == own
    assert bind_address("no.invalid:1", {BIND: f"0.0.0.0:{free_port()}"}).startswith("0.0.0.0:")  # type: ignore[union-attr]
    assert capsys.readouterr().err == ""
    for wrong in ("8476", "192.0.2.1:8476", "no.invalid:8476", "127.0.0.1:70000"):
        with pytest.raises(UserError, match=f"^{BIND} is '{wrong}'; it must be the HOST:PORT of an address of this"):
            bind_address("localhost:1", {BIND: wrong})
    with pytest.raises(
        TrainingError, match=f"^--coordinator_address is 127.0.0.1:{taken}; the port must be free: Addr"
    ):
        bind_address(f"127.0.0.1:{taken}", {})


@pytest.mark.parametrize(
    ("found", "is_own"),
    [
        (["127.0.1.1"], False),  # how Debian resolves the name of the machine itself
        (["198.51.100.1"], False),  # behind a proxy
        (["198.51.100.1", "127.0.0.1"], False),
        ([], False),
        (["0.0.0.0"], True),
    ],
)
def test_names_that_the_coordinator_resolves_differently(
    found: list[str], is_own: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(_host: str, port: str, **_: Any) -> list[Any]:
        if not found:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, int(port))) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    address = f"node0:{free_port()}"
    assert bind_address(address, {}) == (address if is_own else None)
    line = f"listens on all addresses; to choose one, set {BIND}=IP:"
    assert (line in capsys.readouterr().err) is not is_own


@pytest.mark.parametrize(
    ("num_replicas", "of_process", "rows"),
    [
        (4, [0, 0, 1, 1], [slice(0, 12), slice(12, 24)]),
        (2, [0, 0, 1, 1], [slice(0, 12), slice(12, 24)]),
        (1, [0, 0, 1, 1], [slice(0, 24), slice(0, 24)]),  # one replica on the devices of both processes
        (2, [0, 1, 2, 3], [slice(0, 12), slice(0, 12), slice(12, 24), slice(12, 24)]),
        (3, [0, 0, 1], [slice(0, 16), slice(16, 24)]),
        (3, [0, 0, 0, 1, 1, 1], [slice(0, 16), slice(8, 24)]),  # both processes have devices of the middle replica
    ],
)
def test_a_process_reads_the_shard_of_its_devices(
    num_replicas: int, of_process: list[int], rows: list[slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: Any = tuple(SimpleNamespace(process_index=process) for process in of_process)
    for process, expected in enumerate(rows):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert processes.local_shard(devices, num_replicas, 24) == expected


@pytest.mark.parametrize(("values", "right"), [([3, 3], True), ([3, -1], False), ([-1, 3], False)])
def test_processes_that_see_different_checkpoints(
    values: list[int], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If processes find different checkpoints, for example in folders that are not shared, all of them fail."""
    monkeypatch.setattr(jax, "process_count", lambda: len(values))
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda _: np.array(values))
    for value in values:
        if right:
            processes.check_same_value("the step", value)
            continue
        message = f"^the step is {values[0]}, {values[1]} in processes 0 to 1; it must be the same in all$"
        with pytest.raises(TrainingError, match=message):
            processes.check_same_value("the step", value)


# ---- real processes -----------------------------------------------------------------------------

PIPELINE = ("--config.strategy=pipeline", "--config.pipeline.num_microbatches=4")
RUNS: dict[str, tuple[str, ...]] = {
    "data_parallel": ("--config.mesh.data=4",),
    "zero3": ("--config.mesh.data=4", "--config.exchange=zero3"),
    "zero1 in a pipeline": (*PIPELINE, "--config.mesh.stage=2", "--config.mesh.data=2", "--config.exchange=zero1"),
    "zero3 in dispatched stages": (
        *PIPELINE,
        "--config.mesh.stage=2",
        "--config.mesh.data=2",
        "--config.pipeline.executor=dispatch",
        "--config.exchange=zero3",
    ),
    "a pipeline across both": (*PIPELINE, "--config.mesh.stage=4", "--config.mesh.data=1"),
    "dispatched stages across both": (
        *PIPELINE,
        "--config.mesh.stage=4",
        "--config.mesh.data=1",
        "--config.pipeline.executor=dispatch",
    ),
    "one of three pipelines across both": (*PIPELINE, "--config.mesh.stage=2", "--config.mesh.data=3"),
    "dispatched, one of three pipelines across both": (
        *PIPELINE,
        "--config.mesh.stage=2",
        "--config.mesh.data=3",
        "--config.pipeline.executor=dispatch",
    ),
    "dispatched stages without a flush": (
        *PIPELINE,
        "--config.mesh.stage=2",
        "--config.mesh.data=2",
        "--config.pipeline.executor=dispatch",
        "--config.pipeline.schedule=pipedream",
        "--config.exchange=byteps_onebit",
        "--config.exchange_options.min_compress_bytes=0",
    ),
    "texts": ("--config.mesh.data=4",),
    "texts, tensor in each": ("--config.mesh.data=2", "--config.mesh.tensor=2", "--config.exchange=zero2"),
    "texts, tensor across both": ("--config.mesh.data=1", "--config.mesh.tensor=4"),
    "texts, one of three groups across both": ("--config.mesh.data=3", "--config.mesh.tensor=2"),
    "texts, context across both": ("--config.mesh.data=1", "--config.mesh.context=4"),
    "texts, context across both, tensor in each": (
        *("--config.mesh.data=1", "--config.mesh.context=2", "--config.mesh.tensor=2", "--config.exchange=zero3"),
    ),
    "texts, stages of two devices": (
        *(*PIPELINE, "--config.mesh.data=1", "--config.mesh.stage=2", "--config.mesh.tensor=2"),
    ),
    "texts, dispatched stages of two devices": (
        *(*PIPELINE, "--config.mesh.data=1", "--config.mesh.stage=2", "--config.mesh.context=2"),
        "--config.pipeline.executor=dispatch",
    ),
}
MORE = [*(f"--config.{key}={value}" for key, value in VALUES.items()), "--config.model.num_layers=2"]
# Four heads, and more epsilon than the rounding of gradients.
OF_TEXTS = ["--config.model.num_heads=4", "--config.optimizer.eps=1e-4"]
STEPS = ["--config.num_steps=12", "--config.batch_size=24", "--config.eval.every_steps=6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def settings(folder: Path, name: str) -> list[str]:
    """Return the overrides for a small MLP on vectors, or BERT on texts, with the strategy of RUNS."""
    own = small_arguments(folder)
    chosen = [*own, *OF_TEXTS] if name.startswith("texts") else [*without_texts(own), *MORE]
    return [*chosen, *STEPS, *RUNS[name]]


def configured(folder: Path, name: str) -> ConfigDict:
    """Return the config of `settings`."""
    config = configs.default_config()
    configs.override(config, settings(folder, name))
    return config


def num_devices(name: str) -> int:
    """Return the number of devices of both processes."""
    return 6 if "one of three" in name else 4


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def launch(folder: Path, workdir: Path, name: str, *overrides: str, restarts: int = 0) -> "subprocess.Popen[str]":
    own = [*settings(folder, name), *overrides]
    arguments = ["--config=configs/default.py", f"--workdir={workdir}", *own]
    command = [sys.executable, "-m", "jaxpar", "launch", "--num_processes=2", f"--max_restarts={restarts}", "--"]
    return subprocess.Popen(
        [*command, *arguments, f"--config.mesh.virtual_cpu_devices={num_devices(name) // 2}"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: "subprocess.Popen[str]", code: int = 0) -> tuple[list[str], list[str]]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out.splitlines(), err.splitlines()


def assert_close(got: Path, expected: Path) -> None:
    """Assert that parameters agree to 1e-6, and the optimizer state, which contains squares, to 3e-6.

    Biases of keys are excluded. They add the same number to all scores of a query, so their gradient is zero except
    for rounding.
    """
    actual, reference = final_params(got), final_params(expected)
    for name, x in reference.items():
        if "['key']['bias']" not in name:
            assert relative_error(actual[name], x) < (3e-6 if "['optimizer']" in name else 1e-6), name


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The function that trains one of RUNS in a single process on as many devices, once, and returns its workdir."""

    @functools.cache
    def trained(name: str) -> Path:
        workdir = tmp_path_factory.mktemp("alone") / "run"
        training.train(configured(folder, name), workdir)
        return workdir

    return trained


# The tests below run the data-parallel case, zero3 and texts.
@pytest.mark.parametrize(
    "name",
    slow_except(
        ["a pipeline across both", "dispatched stages across both", "texts, tensor across both"],
        [name for name in RUNS if name != "data_parallel"],
    ),
)
def test_two_processes_compute_what_one_does(
    name: str, folder: Path, tmp_path: Path, alone: Callable[[str], Path]
) -> None:
    out, err = finished(launch(folder, tmp_path / "run", name))
    assert not [line for line in err if line.startswith(("jaxpar", "launch", "Traceback"))]
    lines = [line for line in out if any(f"] {word} " in line for word in ("platform", "run", "step", "test"))]
    assert len(lines) >= 4
    assert {line[:4] for line in lines} == {"[0] "}
    assert lines[0] == f"[0] platform  cpu, {num_devices(name)} devices in 2 processes (cpu), jax {jax.__version__}"
    assert_close(tmp_path / "run", alone(name))
    rows, expected = metrics.read_metrics(tmp_path / "run"), metrics.read_metrics(alone(name))
    assert [(row["step"], row["split"]) for row in rows] == [(row["step"], row["split"]) for row in expected]
    np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in expected], 1e-5)
    if num_devices(name) == 6:
        return  # no dim of these small arrays can be divided by 6, so process 0 writes all of them
    [newest] = checkpoint.steps(tmp_path / "run" / "checkpoints")[-1:]
    written = [
        sum(file.stat().st_size for file in (folder / "d").iterdir())
        for folder in sorted((tmp_path / "run" / "checkpoints" / str(newest) / "state").glob("ocdbt.process_*"))
    ]
    assert len(written) == 2
    assert min(written) > 0.1 * sum(written)  # about half each, plus nodes that OCDBT may write several times


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "third", "reference"),
    [
        ("zero3", "data_parallel", "a pipeline across both", "data_parallel"),
        (
            *("texts, tensor across both", "texts, tensor in each", "texts, context across both, tensor in each"),
            "texts",
        ),
        ("texts, context across both", "texts, context across both", "texts, one of three groups across both", "texts"),
    ],
)
def test_from_two_processes_to_one_and_back(
    first: str, second: str, third: str, reference: str, folder: Path, tmp_path: Path, alone: Callable[[str], Path]
) -> None:
    """A run of two processes is stopped by a SIGTERM to one of them, resumed by one process, and again by two."""
    workdir = tmp_path / "run"
    process = launch(folder, workdir, first, "--config.checkpoint.every_steps=1", "--stopped_exit_code=75")
    wait_for_step(process, workdir, 3)
    os.kill(workers(process)[1], signal.SIGTERM)
    out, err = finished(process, code=75)
    assert not [line for line in err if line.startswith("launch")]
    stopped = max(checkpoint.steps(workdir / "checkpoints"))
    assert f"[0] SIGTERM: stopped after step {stopped} of 12, state saved in {workdir}" in out
    if stopped < 9:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, 2, signal.SIGTERM)
            with pytest.raises(training.Stopped):
                training.train(configured(folder, second), workdir)
    out, _ = finished(launch(folder, workdir, third))
    assert any(line.startswith("[0] resumed   from step") for line in out)
    assert any(re.fullmatch(r"\[0\] ledger    every example of .* was used exactly once", line) for line in out), out
    assert_close(workdir, alone(reference))


@pytest.mark.parametrize("name", ["data_parallel", slow("dispatched stages without a flush")])
def test_a_killed_process_restarts_the_run(
    name: str, folder: Path, tmp_path: Path, alone: Callable[[str], Path]
) -> None:
    """The private state is restored too, of which each process has a part on its devices."""
    workdir = tmp_path / "run"
    process = launch(folder, workdir, name, "--config.checkpoint.every_steps=2", restarts=1)
    wait_for_step(process, workdir, 4)
    os.kill(workers(process)[1], signal.SIGKILL)
    out, err = finished(process)
    assert [line for line in err if line.startswith("launch")] == [
        "launch: process 1 was killed by SIGKILL; the other processes were killed",
        "launch: restart 1 of 1, from the last checkpoint",
    ]
    assert sum(line.startswith("[0] resumed   from step") for line in out) == 1
    assert [line for line in out if line.startswith("[0] ledger    every example of 12 steps was used exactly once")]
    assert not [line for line in out if "discarded" in line]
    assert_close(workdir, alone(name))


def test_the_coordinator_of_a_launch_listens_on_the_loopback_address(folder: Path, tmp_path: Path) -> None:
    """Whoever reaches the coordinator can end the run, because JAX asks for no password."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BIND, "0.0.0.0:1")  # for runs on several machines
        process = launch(folder, tmp_path / "run", "data_parallel", "--config.num_steps=100000")
    wait_for(lambda: len(workers(process)) == 2)
    first = Path(f"/proc/{workers(process)[0]}")
    wait_for(lambda: b"JAXPAR_COORDINATOR_ADDRESS=" in (first / "environ").read_bytes())
    port = re.search(rb"JAXPAR_COORDINATOR_ADDRESS=[^:]*:(\d+)", (first / "environ").read_bytes())
    assert port is not None
    name = f":{int(port[1]):04X}"

    def listening() -> list[str]:
        """Return the addresses, in hexadecimal, of the sockets that listen (state 0A) on the port."""
        tables = [(first / "net" / kind).read_text().splitlines()[1:] for kind in ("tcp", "tcp6")]
        rows = [line.split() for lines in tables for line in lines]
        return [row[1].removesuffix(name) for row in rows if row[1].endswith(name) and row[3] == "0A"]

    wait_for(lambda: listening() != [])
    addresses = listening()
    process.kill()
    process.communicate()
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, and as an IPv6 address


def test_a_user_error_is_not_retried(folder: Path, tmp_path: Path) -> None:
    out, err = finished(launch(folder, tmp_path / "run", "data_parallel", "--config.exchange=dp", restarts=3), code=2)
    message = "jaxpar: config.exchange='dp' runs in a single process, but there are 2 processes"
    assert any(message in line for line in out)
    assert not [line for line in err if "restart" in line]
    assert not (tmp_path / "run" / "config.json").exists()


def test_processes_that_slurm_starts(folder: Path, tmp_path: Path, alone: Callable[[str], Path]) -> None:
    """Processes need only the environment variables of SLURM, which this test sets."""
    job = str(free_port())
    arguments = [*settings(folder, "data_parallel"), "--config.mesh.virtual_cpu_devices=2"]
    command = [sys.executable, "-m", "jaxpar", "train", "--config=configs/default.py", f"--workdir={tmp_path}/run"]
    started = [
        subprocess.Popen(
            [*command, *arguments],
            env=environment(**SLURM | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    first, second = (finished(process) for process in started)
    assert any("4 devices in 2 processes" in line for line in first[0])
    # Two threads of Gloo can write their messages into one another, which then leave an empty line.
    assert not [line for line in second[0] if line and "Gloo" not in line and "peer ranks" not in line]
    assert_close(tmp_path / "run", alone("data_parallel"))


def test_processes_that_are_given_different_runs(folder: Path, tmp_path: Path) -> None:
    """Without the check, a checkpoint would mix parts of different models, and the ledger would not detect it."""
    place = [f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    arguments = [*settings(folder, "texts"), "--config.mesh.virtual_cpu_devices=2", *place]
    other = tmp_path / "other.csv"
    other.write_text((folder / "data.csv").read_text() + "one more row,none\n")
    command = [sys.executable, "-m", "jaxpar", "train", "--config=configs/default.py"]
    workdirs = [f"--workdir={tmp_path}/{name}" for name in ("run", "elsewhere")]
    own = [workdirs[:1], [workdirs[1], "--config.optimizer.lr=0.5", f"--config.data.train={other}"]]
    started = [
        subprocess.Popen(
            [*command, *arguments, *own[i], f"--process_id={i}"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    first, second = (finished(process, code=2)[1] for process in started)
    elsewhere = f"--workdir is '{tmp_path}/elsewhere', which is another folder"
    data = "the data, of which all processes must read the same examples"
    differs = f"config.optimizer.lr: 0.01 -> 0.5; {data}; {elsewhere}"
    assert f"jaxpar: process 1 differs from process 0: {differs} (process 0 -> process 1)" in second
    assert "jaxpar: another process differs from process 0; see the error of that process" in first
    assert not (tmp_path / "run").exists()


SRUN = 'echo "srun $*"; exit $CODE'
SCONTROL = 'echo "scontrol $*"'


@pytest.mark.parametrize(
    ("code", "restarts", "comes_back"),
    [
        *[(code, restarts, False) for code in (0, 2, 130) for restarts in (None, "3")],
        *[(code, restarts, True) for code in (75, 1, 3, 137) for restarts in (None, "19")],
        *[(code, restarts, False) for code in (75, 1, 3, 137) for restarts in ("20", "21")],
    ],
)
def test_the_job_script_of_the_docs(code: int, restarts: str | None, comes_back: bool, tmp_path: Path) -> None:
    """The script follows the table of exit codes. The commands of SLURM are replaced by fakes."""
    page = (ROOT / "docs" / "howto" / "machines.md").read_text()
    script = "#!/bin/bash\n" + page.partition("```bash\n#!/bin/bash\n")[2].partition("```")[0]
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    set_by_slurm = {"SLURM_JOB_ID": "7"} | ({} if restarts is None else {"SLURM_RESTART_COUNT": restarts})
    more = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code)}
    ended = subprocess.run(["bash", "-c", script], env=more | set_by_slurm, capture_output=True, text=True)
    called = ended.stdout.splitlines()
    assert (ended.returncode, ended.stderr) == (code, "")
    assert called[0].endswith("--stopped_exit_code=75")
    assert called[1:] == (["scontrol requeue 7"] if comes_back else [])


def wait_for_step(process: "subprocess.Popen[str]", workdir: Path, step: int) -> None:
    """Wait until there is a checkpoint of the step or a later one."""
    deadline = time.monotonic() + 200
    while max(checkpoint.steps(workdir / "checkpoints"), default=0) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers(process: "subprocess.Popen[str]") -> list[int]:
    """Return the ids of the processes that a launcher has started, in order."""

    def children() -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            if int(fields[1]) == process.pid:
                yield int(path.parent.name)

    return sorted(children())


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_no_process_outlives_the_launcher(number: signal.Signals, folder: Path, tmp_path: Path) -> None:
    """The launcher is killed while it starts processes, before they have called prctl."""
    process = launch(folder, tmp_path / "run", "data_parallel", "--config.num_steps=100000")
    wait_for(lambda: len(workers(process)) == 2)
    started = workers(process)
    process.send_signal(number)
    process.communicate()
    wait_for(lambda: not any(map(is_running, started)))


STARTED = """
import time
from jaxpar.launch.launcher import end_with_launcher
end_with_launcher()
print("here", flush=True)
time.sleep(200)
"""
LAUNCHER = f"""
import os, subprocess, sys
environment = os.environ | {{"JAXPAR_LAUNCHER": str(os.getpid())}}
subprocess.run([sys.executable, "-c", {STARTED!r}], env=environment)
"""


def test_a_process_ends_with_its_launcher() -> None:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER], env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "here\n"
    process.kill()
    process.communicate(timeout=60)  # returns when all processes that share its stdout have ended


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If a process cannot be started, those started before are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(_command: list[str], **options: Any) -> "subprocess.Popen[str]":
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(real(["sleep", "200"], **options))
        return started[0]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(launcher, "visible_gpus", list)
    assert command.main(["--num_processes=2", "--", "--config=x", "--workdir=y"]) == 1
    assert capsys.readouterr().err == "launch: a process could not be started: Resource temporarily unavailable\n"
    assert started[0].returncode == -signal.SIGKILL


ONE_IS_LATE = """
import os, time

if number := os.environ.get("JAXPAR_PROCESS_ID"):
    from jaxpar.launch.signals import Interrupt

    def enter(self):
        os.write(2, b"is there\\n" if number == "0" else b"is late\\n")
        if number == "1":
            time.sleep(1000)
        return before(self)

    before, Interrupt.__enter__ = Interrupt.__enter__, enter
"""
FIRST_READS_FOR_LONG = """
import os, time

if number := os.environ.get("JAXPAR_PROCESS_ID"):
    from jaxpar import data
    from jaxpar.launch import processes

    def load(*_):
        print("reads", flush=True)
        time.sleep(1000)

    def wait(what):
        os.write(2, b"waits\\n")
        before(what)

    data.load, before, processes.wait = load, processes.wait, wait
"""
# The wait of process 1 fails, because process 0 has ended, before the thread of its signals runs.
FIRST_ENDS_FIRST = f"""
{FIRST_READS_FOR_LONG}
import threading
from jaxpar.launch.signals import Ending

has_failed = threading.Event()

def fail(what):
    try:
        wait(what)
    except Exception:
        has_failed.set()
        raise

def receive(*arguments):
    has_failed.wait()
    time.sleep(1)
    received(*arguments)

if number == "1":
    processes.wait, received, Ending._received = fail, Ending._received, receive
"""


@pytest.mark.parametrize(
    ("number", "code", "program", "moment"),
    [
        slow((signal.SIGINT, 0, FIRST_READS_FOR_LONG, {"[0] reads\n", "[1] waits\n"})),
        (signal.SIGTERM, 75, FIRST_ENDS_FIRST, {"[0] reads\n", "[1] waits\n"}),
        # Takes until JAX detects missing heartbeats of the other process, 100 seconds.
        slow((signal.SIGTERM, 75, ONE_IS_LATE, {"[0] is there\n", "[1] is late\n"})),
    ],
    ids=["Ctrl-C as one reads", "SIGTERM as one reads", "SIGTERM as one is at the loop"],
)
def test_stopped_before_the_first_step(
    number: signal.Signals, code: int, program: str, moment: set[str], folder: Path, tmp_path: Path
) -> None:
    """A signal ends the run while one process waits for the other."""
    (tmp_path / "sitecustomize.py").write_text(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.ROOT", f"{ROOT}:{tmp_path}")
        process = launch(folder, tmp_path / "run", "data_parallel", f"--stopped_exit_code={code}", restarts=3)
    assert process.stdout
    missing = set(moment)
    while missing:
        missing.discard(line := process.stdout.readline())
        assert line, process.communicate()
    time.sleep(0.2)  # until the process really waits
    process.send_signal(number)
    out, err = finished(process, code=code)
    # On a busy machine, JAX in the other process may log that the first one has gone before it receives the signal.
    of_jaxpar = "stopped", "resume", "jaxpar", "Traceback"
    lines = [line for line in out if line.startswith(tuple(f"[{i}] {word}" for i in (0, 1) for word in of_jaxpar))]
    assert lines[0] == "[0] stopped before the first step"
    assert lines[1].startswith("[0] resume ")
    assert len(lines) == 2
    assert "--num_processes=2 --max_restarts=3 -- " in lines[1]
    assert err == []


def test_a_signal_before_the_handlers_are_installed(folder: Path, tmp_path: Path) -> None:
    process = launch(folder, tmp_path / "run", "data_parallel", restarts=3)
    wait_for(lambda: len(workers(process)) == 2)
    process.send_signal(signal.SIGINT)
    out, err = finished(process)
    assert {line[4:] for line in out if "resume" not in line} == {"stopped before the first step"}
    assert err == []


IN_A_TASK = """
import sys
import jax
from jaxpar.launch import processes
from jaxpar.launch.place import Place
processes.meet_processes(Place(sys.argv[1], 1, 0))
print(jax.config.read("jax_cuda_visible_devices"))
"""


@pytest.mark.parametrize("cluster", [SLURM, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}], ids=("SLURM", "Open MPI"))
def test_a_process_inside_a_cluster_task_keeps_its_devices(cluster: dict[str, str]) -> None:
    """A process whose place is given does not restrict itself to the GPU that JAX would choose for the task."""
    result = subprocess.run(
        [sys.executable, "-c", IN_A_TASK, f"localhost:{free_port()}"],
        env=environment(**cluster),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "all\n"


WAITS = """
import sys
from jaxpar.launch import processes
from jaxpar.launch.place import Place
processes.WAIT_SECONDS = 0.2
processes.meet_processes(Place(sys.argv[1], 2, int(sys.argv[2])), int(sys.argv[3]))
"""


def test_a_process_that_waits_for_others_prints_for_whom() -> None:
    """JAX connects without holding the GIL, and ends a process that does not meet the others in time.

    Before, the process prints what to check.
    """
    end_of_0 = "not all 2 processes have connected to {}; see their errors, and check --num_processes"
    end_of_1 = "process 0 does not answer at {}, or not all 2 have connected; see their errors"
    restart = "; if its run continues without this process, stop process 0 and start it again"
    cases = [
        ("0", "0", "process 0 waits at {} for the other processes, 2 in all, for up to 1 s", end_of_0),
        ("1", "0", "process 1 waits for process 0 at {}, for up to 1 s", end_of_1),
        ("1", "5", f"process 1 waits for process 0 at {{}}, for up to 1 s{restart}", end_of_1),
    ]
    for process, seconds, *lines in cases:
        address = f"localhost:{free_port()}"
        ended = subprocess.run(
            [sys.executable, "-c", WAITS, address, process, seconds],
            env=environment(JAXPAR_MEET_SECONDS="1"),
            capture_output=True,
            text=True,
        )
        printed = [line for line in ended.stderr.splitlines() if line.startswith("jaxpar: ")]
        assert printed == [f"jaxpar: {line.format(address)}" for line in lines]


def test_a_coordinator_without_a_known_name() -> None:
    with pytest.raises(
        TrainingError, match=r"^--coordinator_address is no\.host:1; it must have a host that this machine"
    ):
        own_address("no.host:1")


def test_the_process_that_failed_first_is_reported() -> None:
    """The launcher reports the process that failed first, not one that aborted because of that."""

    def ended(*codes: int, signals: Sequence[int] = ()) -> Any:
        group: Any = launcher.Group.__new__(launcher.Group)
        vars(group).update(lost=set(), _elastic_seconds=0, _lost_at=0.0, _grow_at=math.inf, grows=False)
        group._processes = [SimpleNamespace(poll=lambda code=code: code, wait=int, send_signal=print) for code in codes]
        group._printers = [SimpleNamespace(join=lambda **_: None) for _ in codes]
        return group.wait(list(signals))

    abort = -signal.SIGABRT
    assert ended(abort, 2) == (1, 2)
    assert ended(abort, 1) == (1, 1)
    assert ended(1, abort) == (0, 1)
    assert ended(-9, 2) == (0, -9)
    assert ended(2, -9) == (1, -9)
    assert ended(2, 3) == (1, 3)
    assert ended(1, 2) == (1, 2)
    assert ended(abort, -9) == (1, -9)
    assert ended(0, 0)[1] == 0
    assert ended(0, abort) == (1, abort)
    assert ended(75, 75)[1] == 75
    assert ended(75, 0)[1] == 75
    assert ended(75, 1) == (1, 1)
    assert ended(1, 75, signals=[15]) == (1, 75)
    assert ended(1, abort, signals=[15]) == (0, 1)


@pytest.mark.parametrize(
    ("number", "threads", "rule"),
    [
        (9, 1000, "at most 8 on this machine: 2 GB of memory / 250 MB, the least for a process"),
        (100_000, resource.RLIM_INFINITY, "at most 8 on this machine: 2 GB of memory / 250 MB, the least for a"),
        (3, 100, "at most 2 on this machine: 100 threads (ulimit -u) / 40, the least for a process"),
        (8, 320, ""),
    ],
)
def test_more_processes_than_the_machine_can_hold(
    number: int, threads: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "host_bytes", lambda: 2_000_000_000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (threads, threads))
    monkeypatch.setattr(command, "run_processes", lambda *_: 0)
    monkeypatch.setattr(launcher, "visible_gpus", list)
    arguments = [f"--num_processes={number}", "--", "--config=x", "--workdir=y"]
    if not rule:
        assert command.main(arguments) == 0
        return
    with pytest.raises(UserError, match=re.escape(f"{number}; it must be {rule}")):
        command.main(arguments)


def test_gpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5,7")
    assert launcher.visible_gpus() == ["0", "1", "5", "7"]
    started: list[Any] = []

    def start(_command: list[str], env: dict[str, str], **_: Any) -> FakeProcess:
        started.append(env)
        return FakeProcess()

    monkeypatch.setattr(subprocess, "Popen", start)
    launcher.Group(launcher.Launch((1, 2), 0, 60.0, 0, ["--config=x"], launcher.visible_gpus()), [0, 1])
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["0,1", "5,7"]
    assert [env["JAXPAR_PROCESS_ID"] for env in started] == ["0", "1"]
    assert len({env["JAXPAR_COORDINATOR_ADDRESS"] for env in started}) == 1


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("written", ["--{}=0", "-{}=0", "--{} 0", "-{} 0"])
def test_flags_set_by_the_launcher_are_refused(flag: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_processes", lambda *_: 0)
    monkeypatch.setattr(launcher, "visible_gpus", list)
    own = ["--num_processes=2", "--", "--config=x", f"--workdir={flag}", flag]
    assert command.main(own) == 0
    with pytest.raises(UserError, match=f"^--{flag} is set by `jaxpar launch`; remove it "):
        command.main([*own, *written.format(flag).split()])


class FakeProcess:
    """A process without output."""

    def __init__(self) -> None:
        self.stdout = io.StringIO()
