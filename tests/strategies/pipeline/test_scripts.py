"""Tests of `jaxpar simulate` and `jaxpar draw`: a subprocess without JAX, and mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jaxpar.commands import draw, simulate
from jaxpar.commands import schedule_flags as options
from jaxpar.errors import exit_code
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, replicated_table
from jaxpar.strategies.pipeline.tables.table_file import read_table, write_table
from jaxpar.strategies.pipeline.tables.validate import TableError, peak_stashed
from tests.runs import run_script

ROOT = Path(__file__).parents[3]
RUN = "import runpy, sys; code = 0\n"
RUN += "try: runpy.run_module('jaxpar', run_name='__main__')\n"
RUN += "except SystemExit as stop: code = stop.code\n"
RUN += "assert 'jax' not in sys.modules and 'flax' not in sys.modules; sys.exit(code)"


def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a subprocess that fails if it imports JAX."""
    command = [sys.executable, "-c", RUN, name, *flags]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True)


ZB_H1 = ["--schedule=zb_h1", "--num_stages=8", "--num_microbatches=24", "--forward=18.522", "--backward=18.086"]
ZB_H1 += ["--weight=9.337", "--communication=0.601"]


def test_simulate_prints_a_result_a_line() -> None:
    process = run("simulate", *ZB_H1)
    assert process.returncode == 0, process.stderr
    assert not process.stderr, process.stderr
    lines = {name: values for name, *values in map(str.split, process.stdout.splitlines())}
    assert list(lines) == [
        *("schedule", "devices", "microbatches", "makespan", "cost", "bubble_rate", "lockstep"),
        *("idle", "idle_in_span", "peak_in_flight", "peak_stashed"),
    ]
    assert [lines[name] for name in ("schedule", "devices", "microbatches")] == [["zb_h1"], ["8"], ["24"]]
    assert round(float(lines["bubble_rate"][0]), 4) == 0.1585  # published, see test_simulate.py
    assert lines["peak_in_flight"] == ["8", "7", "6", "5", "4", "3", "2", "1"]
    assert lines["peak_stashed"] == ["8"] * 8
    assert float(lines["idle"][0]) == pytest.approx(float(lines["makespan"][0]) - 24 * (18.522 + 18.086 + 9.337))
    found = json.loads(run("simulate", *ZB_H1, "--json").stdout)
    assert list(found) == list(lines)
    assert found["idle_in_span"] == pytest.approx([float(value) for value in lines["idle_in_span"]])


def test_chunks_and_times_by_device() -> None:
    flags = ["--num_stages=2", "--num_microbatches=3", "--json"]
    for chunks in ([], ["--num_chunks=2"]):  # the default is the number of chunks of the schedule
        found = json.loads(run("simulate", "--schedule=zb_v", *flags, *chunks).stdout)
        assert found["bubble_rate"] == 0
        assert found["makespan"] == 3 * 3 + 0.5
    found = json.loads(run("simulate", "--schedule=gpipe", *flags, "--forward=1,2", "--weight=0").stdout)
    assert found["makespan"] == 1 + 3 * 2 + 3 * 1 + 1


def test_a_schedule_is_found_saved_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "found.csv"
    flags = ["--forward=4", "--backward=5", "--weight=3", "--json"]
    search = ["--auto", "--num_stages=4", "--num_microbatches=8", "--memory_limit=6"]
    found = json.loads(run("simulate", *search, *flags, f"--save={path}").stdout)
    of_one_chunk = json.loads(run("simulate", *search, "--num_chunks=1", *flags).stdout)
    assert "1f1b with" in of_one_chunk["schedule"]
    assert "zb_v with" in found["schedule"]
    assert found["cost"] < of_one_chunk["cost"]
    assert (
        found["bubble_rate"]
        < json.loads(run("simulate", "--schedule=zb_h1", *search[1:3], *flags).stdout)["bubble_rate"]
    )
    assert peak_stashed(read_table(path)).max() <= 6 * read_table(path).num_chunks
    again = json.loads(run("simulate", f"--schedule={path}", *flags).stdout)
    assert again | {"schedule": ""} == found | {"schedule": ""}


def test_a_schedule_is_found_for_lockstep() -> None:
    """The result is faster in lockstep than that of the search for `cost`, and has a higher cost."""
    search = ["--auto", "--num_stages=4", "--num_microbatches=8", "--memory_limit=7", "--num_chunks=1", "--json"]
    times = ["--forward=1.74", "--backward=1.88", "--weight=1.61"]
    cost, of_lockstep = (
        json.loads(run("simulate", *search, *times, f"--objective={name}").stdout) for name in ("cost", "lockstep")
    )
    assert of_lockstep["schedule"] == "zb_h2, improved in lockstep"
    assert of_lockstep["lockstep"] < 0.98 * cost["lockstep"]
    assert of_lockstep["cost"] > cost["cost"]
    assert of_lockstep["lockstep_bound"] == pytest.approx(3 * 1.74 + 8 * (1.74 + 1.88 + 1.61))
    assert "lockstep_bound" not in cost
    # zb_v, which has two chunks, beats all schedules with one chunk if F, B and W take the same time.
    two = json.loads(run("simulate", *search[:-2], "--json", "--objective=lockstep").stdout)
    assert two["schedule"] == "zb_v"
    assert two["lockstep"] == 25.5
    assert two["lockstep_bound"] <= 25.5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--auto", "--num_stages=2", "--num_microbatches=4"], "searching for about 8 s\n"),
        (
            ["--schedule=interleaved_1f1b", "--num_stages=2", "--num_chunks=2", "--num_microbatches=2"],
            "making and simulating the table for about 16 s\n",
        ),
    ],
)
def test_long_work_is_announced(
    flags: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "SEARCH_SECONDS", 1.0)
    monkeypatch.setattr(options, "TABLE_SECONDS", 2.0)
    simulate.main(flags)
    assert capsys.readouterr().err == expected


def test_a_text_has_a_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """GPipe of 3 devices and 4 microbatches takes 2 (3 + 4 - 1) clocks."""
    flags = ["--schedule=gpipe", "--num_stages=3", "--num_microbatches=4", "--out=x.txt"]
    monkeypatch.setattr(draw, "MAX_CELLS", 3 * 12 - 1)
    assert exit_code(lambda: draw.main(flags)) == 2
    message = (
        "--out is 'x.txt'; it must end in .svg or .png with 3 devices and 12 clocks, because a text has at most 35"
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["txt", "svg", "png"])
def test_draw_by_the_suffix(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"chart.{suffix}"
    schedules, sizes = "--schedule=1f1b,gpipe", ("--num_stages=3", "--num_microbatches=4")
    flags = schedules, *sizes, "--forward=2", "--backward=2", "--weight=2"
    process = run("draw", *flags, f"--out={out}")
    assert process.returncode == 0, process.stderr
    assert not process.stderr + process.stdout, process.stderr
    start = {"txt": b"1f1b, 3 devices, 4 microbatches: bubble 33.3%\n0:  F0  F1", "svg": b"<?xml", "png": b"\x89PNG"}
    assert out.read_bytes().startswith(start[suffix])
    if suffix != "png":
        assert "\n0:  F0  F1  F2  F3" in out.read_text() or suffix == "svg"
        assert "gpipe, 3 devices, 4 microbatches: bubble 33.3%" in out.read_text()
    if suffix == "svg":
        assert "1f1b, 3 devices, 4 microbatches: bubble 33.3%" in out.read_text()
        assert "time (F takes 2)" in out.read_text()


def test_replicas_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: two replicas share the first stage of GPipe, and a third has no microbatch.

    The table of PipeDream has two batches, after which each of three devices updates its weights.
    """
    flags = "--schedule=gpipe", "--replicas=3,1", "--num_microbatches=2", "--json"
    assert run_script(monkeypatch, simulate, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan"] == 1 + 2 * 1 + 2 * 2 + 2
    assert found["idle"] == [9 - 3, 9 - 3, 9, 9 - 6]
    out = tmp_path / "table.txt"
    flags = "--schedule=pipedream", "--replicas=2,1", "--num_microbatches=8", "--microbatches_per_batch=4"
    assert run_script(monkeypatch, draw, *flags, f"--out={out}") == 0
    assert [line.count("U") for line in out.read_text().splitlines()] == [0, 2, 2, 2]


def test_a_table_with_replicas_cannot_be_read_back(tmp_path: Path) -> None:
    """This is why --save refuses it."""
    write_table(replicated_table("1f1b", (2, 1), 4), tmp_path / "table.csv")
    with pytest.raises(TableError):
        read_table(tmp_path / "table.csv")


SIZES = ["--num_stages=4", "--num_microbatches=6"]
ONLY_WITH_REPLICAS = "it must not be set with --schedule=zb_h1, only with one of gpipe, 1f1b, " + ", ".join(CONTINUOUS)


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (
            simulate,
            ["--schedule=zbh1", *SIZES],
            f"--schedule is 'zbh1'; it must be one of {', '.join((*SCHEDULES, *CONTINUOUS))}, or the path of a CSV "
            "table. Did you mean 'zb_h1'?",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--foward=1"],
            "--foward is not a flag; it must be one that --help lists. Did you mean '--forward'?",
        ),
        (
            simulate,
            ["--sched=gpipe", *SIZES],
            "--sched is not a flag; it must be one that --help lists. Did you mean '--schedule'?",
        ),
        (
            simulate,
            SIZES,
            "--schedule is missing; it must be a schedule or the path of a CSV table, unless --auto is set",
        ),
        (
            simulate,
            ["--schedule=gpipe", "--num_stages=4"],
            "--num_microbatches is missing; it must be set, as in --num_microbatches=4",
        ),
        (
            simulate,
            ["--schedule=1f1b", "--num_stages=64", "--num_microbatches=100000"],
            "--num_microbatches is 100000; it must be at most 7812 with 64 stages, because a table can "
            "have at most 500000 actions of each kind",
        ),
        (
            simulate,
            ["--auto", "--num_stages=1000", "--num_microbatches=1000"],
            "--num_microbatches is 1000; it must be at most 500 with 1000 stages, because a table can "
            "have at most 500000 actions of each kind",
        ),
        (simulate, ["--schedule=gpipe", "--num_stages=0", SIZES[1]], "--num_stages is 0; it must be at least 1"),
        (simulate, ["--schedule=gpipe", "--num_stages=two"], "--num_stages is 'two'; it must be an integer"),
        (simulate, ["--communication=-1"], "--communication is '-1'; it must be a time between 0 and 1e+30"),
        (simulate, ["--communication=1e308"], "--communication is '1e308'; it must be a time between 0 and 1e+30"),
        (
            simulate,
            ["--schedule=interleaved_1f1b", *SIZES],
            "--num_microbatches is 6; it must be a multiple of 4, the number of devices, for schedule interleaved_1f1b",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--num_chunks=2"],
            "--num_chunks is 2; it must be 1 for schedule gpipe",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--weight=-1"],
            "--weight is '-1'; it must be a time between 0 and 1e+30, or one time per device, such as 1,1.5,1",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--weight=1,x"],
            "--weight is '1,x'; it must be a time between 0 and 1e+30, or one time per device, such as 1,1.5,1",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--weight=1,2"],
            "--weight has 2 times; it must have one, or one per device (4)",
        ),
        (
            simulate,
            ["--schedule=none.csv"],
            "--schedule is 'none.csv', which does not exist; it must be the path of a CSV file",
        ),
        (
            simulate,
            ["--schedule=gpipe", "--auto", *SIZES],
            "--schedule is 'gpipe'; it must not be set with --auto, which searches for a schedule",
        ),
        (
            simulate,
            ["--schedule=gpipe,mine.csv", *SIZES],
            "--schedule is 'gpipe,mine.csv'; it must be one schedule or table, except for `jaxpar draw`",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--memory_limit=3"],
            "--memory_limit is 3; it must not be set without --auto",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--objective=lockstep"],
            "--objective is 'lockstep'; it must not be set without --auto",
        ),
        (
            simulate,
            ["--auto", *SIZES, "--objective=lockstep", "--memory_limit=0.5"],
            "--memory_limit is 0.5; it must be at least 1",
        ),
        (simulate, ["--auto", *SIZES, "--memory_limit=0.5"], "--memory_limit is 0.5; it must be at least 1"),
        (
            simulate,
            ["--auto", *SIZES, "--weight_memory=2"],
            "--weight_memory is '2'; it must be a number between 0 and 1",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--save=none/x.csv"],
            "--save is 'none/x.csv'; it must be in an existing directory, and 'none' is not one",
        ),
        (
            simulate,
            ["--schedule=pipedream", *SIZES, "--save=x.csv"],
            "--save is 'x.csv'; it must not be set with --schedule=pipedream, because a run cannot read this table; a "
            "run makes it with config.pipeline.schedule='pipedream'",
        ),
        (
            simulate,
            ["--schedule=1f1b", "--replicas=2,1", SIZES[1], "--save=x.csv"],
            "--save is 'x.csv'; it must not be set with --schedule=1f1b and --replicas, because a run cannot read this "
            "table; a run makes it with config.pipeline.schedule='1f1b'",
        ),
        (
            simulate,
            ["--schedule=pipedream", "--num_stages=1", SIZES[1]],
            "--num_stages is 1; it must be at least 2 for schedule pipedream",
        ),
        (
            simulate,
            ["--schedule=pipedream", "--num_stages=1000000000", SIZES[1]],
            "--num_stages is 1000000000; it must be at most 500,000 with num_chunks=1",
        ),
        (
            simulate,
            ["--schedule=1f1b", "--replicas=900000000,1", SIZES[1]],
            "--replicas is 900000000,1, whose number of devices is 900000001; it must be at most 500,000 with "
            "num_chunks=1",
        ),
        (
            simulate,
            ["--schedule=pipedream", "--replicas=2", SIZES[1]],
            "--replicas is 2, whose number of stages is 1; it must be at least 2 for schedule pipedream",
        ),
        (
            simulate,
            ["--schedule=pipedream", *SIZES, "--replicas=2,1"],
            "--num_stages is 4; it must not be set with --replicas",
        ),
        (
            simulate,
            ["--schedule=1f1b", "--replicas=2,x", SIZES[1]],
            "--replicas is '2,x'; it must list the number of devices of each stage, separated by commas, such as 2,1,1"
            ", and each must be less than 1,000,000,000",
        ),
        (
            simulate,
            ["--schedule=1f1b", "--replicas=2,1", SIZES[1], "--num_chunks=2"],
            "--num_chunks is 2; it must be 1 for schedule 1f1b",
        ),
        (simulate, ["--schedule=zb_h1", "--replicas=2,1", SIZES[1]], f"--replicas is 2,1; {ONLY_WITH_REPLICAS}"),
        (
            simulate,
            ["--auto", "--replicas=2,1", SIZES[1]],
            f"--replicas is 2,1; {ONLY_WITH_REPLICAS}".replace("--schedule=zb_h1", "--auto"),
        ),
        (
            simulate,
            ["--schedule=pipedream", "--replicas=2,1", "--microbatches_per_batch=3", SIZES[1]],
            "--microbatches_per_batch is 3; it must be a multiple of 2, because the replicas of a stage take turns, "
            "for schedule pipedream",
        ),
        (
            simulate,
            ["--schedule=gpipe", *SIZES, "--microbatches_per_batch=2"],
            "--microbatches_per_batch is 2; it must not be set with --schedule=gpipe, only with one of "
            f"{', '.join(CONTINUOUS)}",
        ),
        (
            simulate,
            ["--auto", *SIZES, "--microbatches_per_batch=2"],
            f"--microbatches_per_batch is 2; it must not be set with --auto, only with one of {', '.join(CONTINUOUS)}",
        ),
        (draw, ["--schedule=gpipe", *SIZES], "--out is missing; it must end in one of .txt, .svg, .png"),
        (
            draw,
            ["--schedule=gpipe", *SIZES, "--out=x.pdf"],
            "--out is 'x.pdf'; it must end in one of .txt, .svg, .png",
        ),
        (
            draw,
            ["--schedule=gpipe,1f1b", *SIZES, "--out=x.svg", "--save=x.csv"],
            "--save is 'x.csv'; it must not be set with several schedules",
        ),
        (
            draw,
            ["--schedule=gpipe", *SIZES, "--out=none/x.svg"],
            "--out is 'none/x.svg'; it must be in an existing directory, and 'none' is not one",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    script: ModuleType,
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(lambda: script.main(flags)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"jaxpar: {message}\n"


def test_sizes_are_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*flags: str) -> str:
        exit_code(lambda: simulate.main([f"--schedule={path}", *flags]))
        return "".join(capsys.readouterr())

    path = tmp_path / "mine.csv"
    path.write_text("clock,device,kind,microbatch,chunk\n0,0,F,0,0\n0,0,BW,0,0\n")
    assert json.loads(run("--num_stages=1", "--json"))["schedule"] == "mine.csv"
    assert run("--num_stages=2") == f"jaxpar: --num_stages is 2; it must be 1, as in {path}\n"
    path.write_text("clock,device,kind,microbatch,chunk\n0,0,BW,0,0\n1,0,F,1,0\n2,0,BW,1,0\n")
    where = f"--schedule is '{path}': clock 0, device 0"
    assert run().startswith(f"jaxpar: {where}: BW of microbatch 0, stage 0 needs the result of F")
