"""Invalid values in config.pipeline and config.mesh are refused in one line, before anything is written or compiled."""

from pathlib import Path

import pytest

from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.table_file import write_table
from tests.runs import refused

HEADER = "clock,device,kind,microbatch,chunk"
TABLES = {
    "invalid.csv": [HEADER, "0,0,F,0,0", "0,1,F,0,0", "1,1,BW,0,0", "2,0,BW,0,0"],
    "unknown_kind.csv": [HEADER, "0,0,F,0,0", "1,0,G,0,0"],
    "versions.csv": [HEADER + ",version", "0,0,F,0,0,1", "1,1,F,0,0,1", "2,1,BW,0,0,1", "3,0,BW,0,0,1"],
    "updates.csv": [
        HEADER + ",version",
        *("0,0,F,0,0,0", "1,1,F,0,0,0", "2,1,BW,0,0,0", "2,1,U,0,0,1", "3,0,BW,0,0,0", "3,0,U,0,0,1"),
    ],
    "mixed.csv": [HEADER, "0,0,F,0,0", "1,1,F,0,0", "2,1,BW,0,0", "3,0,B,0,0", "4,0,W,0,0"],
    "forward.csv": [HEADER, "0,0,F,0,0", "1,1,F,0,0"],
}
MISTAKES = {
    "schedule": (["schedule=1f1"], ["config.pipeline.schedule is '1f1'", "zb_v", "Did you mean '1f1b'?"]),
    "replicas of a schedule without": (
        ["schedule=zb_h1", "mesh.stage=3", "replicas=2,1"],
        ["config.pipeline.replicas is '2,1'; it must be empty with config.pipeline.schedule='zb_h1'; only auto, gpipe"],
    ),
    "chunks of an auto schedule": (
        ["schedule=auto", "num_chunks=2"],
        ["config.pipeline.num_chunks is 2; it must be 1 for schedule auto"],
    ),
    "memory of an auto schedule": (
        ["schedule=auto", "memory_limit=-1"],
        ["config.pipeline.memory_limit is -1.0; it must be the bytes of a device, or 0 for no limit"],
    ),
    "memory of a named schedule": (
        ["schedule=1f1b", "memory_limit=1e9"],
        [
            "config.pipeline.memory_limit is 1000000000.0; it must be 0.0 without config.pipeline.partition='auto' or "
            "config.pipeline.schedule='auto'"
        ],
    ),
    "a table of millions of actions": (
        ["batch_size=1000000", "num_microbatches=1000000"],
        ["config.pipeline.num_microbatches is 1000000; it must be at most 250000 with 2 stages, because a table"],
    ),
    "missing table": (
        ["schedule=nowhere.csv"],
        ["config.pipeline.schedule is 'nowhere.csv'", "which does not exist", "it must be"],
    ),
    "a folder as a table": (["schedule={folder}"], ["config.pipeline.schedule is '{folder}'"]),
    "invalid table": (
        ["schedule={folder}/invalid.csv"],
        ["config.pipeline.schedule", "clock 0, device 1: F of microbatch 0, stage 1 needs the result of F of"],
    ),
    "unknown kind in a table": (
        ["schedule={folder}/unknown_kind.csv"],
        ["config.pipeline.schedule", "unknown_kind.csv': line 3: kind is 'G'; it must be one of F, B, W, BW, U"],
    ),
    "weight versions": (
        ["schedule={folder}/versions.csv", "num_microbatches=0"],
        ["config.pipeline.schedule", "reads version 1; it must be a version that a U wrote in an earlier clock"],
    ),
    "updates": (
        ["schedule={folder}/updates.csv", "num_microbatches=0"],
        ["config.pipeline.schedule", "which has updates (U); it must have none, because only pipedream, "],
    ),
    "no backward": (
        ["schedule={folder}/forward.csv", "num_microbatches=0"],
        ["config.pipeline.schedule", "no backward"],
    ),
    "two kinds of backward": (
        ["schedule={folder}/mixed.csv", "num_microbatches=0"],
        ["config.pipeline.schedule", "mixes BW with B and W"],
    ),
    "a table of other devices": (
        ["schedule={folder}/four.csv"],
        ["config.mesh.stage is 2; it must be 4, as in the table of config.pipeline.schedule='{folder}/four.csv'"],
    ),
    "a table of other microbatches": (
        ["schedule={folder}/two.csv", "num_microbatches=6"],
        ["config.pipeline.num_microbatches is 6; it must be 4, as in the table of", "'{folder}/two.csv'"],
    ),
    "a table of other chunks": (
        ["schedule={folder}/two.csv", "num_chunks=2"],
        ["config.pipeline.num_chunks is 2; it must be 1, as in the table of", "'{folder}/two.csv'"],
    ),
    "more devices than there are": (
        ["mesh.stage=16", "mesh.data=1"],
        ["config.mesh.stage is 16; it must be at most 8, the number of cpu devices"],
    ),
    "more replicas than there are": (
        ["mesh.data=8"],
        ["config.mesh.stage is 2 and config.mesh.data is 8; their product must be at most 8, the number of cpu"],
    ),
    "no stage": (["mesh.stage=0"], ["config.mesh.stage is 0; it must be at least 1"]),
    "more stages than layers": (
        ["mesh.stage=4", "mesh.data=1"],
        ["config.mesh.stage", "4 stages; it must be at most 3, the number of layers of the model (embed .. head)"],
    ),
    "more chunks than layers": (
        ["schedule=zb_v"],
        ["config.pipeline.num_chunks", "4 stages; it must be at most 3, the number of layers"],
    ),
    "an indivisible batch": (
        ["num_microbatches=5"],
        ["config.batch_size is 24; it must be a multiple of 10", "5 microbatches (config.pipeline.num_microbatches)"],
    ),
    "an indivisible evaluation": (["eval.batch_size=3"], ["config.eval.batch_size is 3; it must be a multiple of 2"]),
    "an evaluation in one microbatch": (
        ["eval.batch_size=6", "num_microbatches=4"],
        ["config.eval.batch_size is 6, which is 3 examples per replica; it must be 0, or", "microbatches, 4"],
    ),
    "more microbatches than examples": (
        ["num_microbatches=48"],
        ["config.pipeline.num_microbatches is 48; it must be at most config.batch_size, 24"],
    ),
    "no microbatch": (["num_microbatches=-1"], ["config.pipeline.num_microbatches is -1; it must be at least 0"]),
    "accumulation": (
        ["optimizer.accumulation_steps=2"],
        ["config.optimizer.accumulation_steps is 2; it must be 1", "config.pipeline.num_microbatches"],
    ),
    "remat": (["remat=fulll"], ["config.pipeline.remat is 'fulll'; it must be one of full, none, dots.", "'full'?"]),
    "partition": (["partition=uniformly"], ["config.pipeline.partition is 'uniformly'", "Did you mean 'uniform'?"]),
    "a layer in the partition": (["partition=blok_0"], ["config.pipeline.partition", "Did you mean 'block_0'?"]),
    "too many cuts": (["partition=block_0,head"], ["config.pipeline.partition is 'block_0,head'"]),
    "cuts out of order": (
        ["partition=head,block_0", "mesh.stage=3", "mesh.data=1"],
        ["config.pipeline.partition is 'head,block_0'", "order"],
    ),
    "a first stage without layers": (["partition=embed"], ["config.pipeline.partition is 'embed'", "after embed"]),
    "chunks": (["schedule=1f1b", "num_chunks=2"], ["config.pipeline.num_chunks is 2; it must be 1 for schedule 1f1b"]),
    "chunks of a V": (
        ["schedule=zb_v", "num_chunks=3"],
        ["config.pipeline.num_chunks is 3; it must be 2 for schedule zb_v"],
    ),
    "negative chunks": (
        ["schedule=interleaved_1f1b", "num_chunks=-1"],
        ["config.pipeline.num_chunks is -1; it must be at least 0"],
    ),
    "interleaved in odd microbatches": (
        ["schedule=interleaved_1f1b", "num_microbatches=3"],
        ["config.pipeline.num_microbatches is 3", "a multiple of 2"],
    ),
    "a trace before the first step": (["trace=-1"], ["config.pipeline.trace is -1"]),
    "stages without a pipeline": (["strategy=data_parallel"], ["config.mesh.stage is 2", "config.strategy='pipeline'"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tables."""
    path = tmp_path_factory.mktemp("tables")
    for name, lines in TABLES.items():
        (path / name).write_text("\n".join(lines) + "\n")
    for name, devices in (("two.csv", 2), ("four.csv", 4)):
        write_table(make_table("1f1b", num_devices=devices, num_microbatches=4, num_chunks=1), path / name)
    return path


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_in_one_line_and_leave_nothing(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, messages = MISTAKES[name]
    keys = [
        text if "." in text.partition("=")[0] or text.startswith(("strategy", "batch_size")) else f"pipeline.{text}"
        for text in overrides
    ]
    arguments = ["--config.strategy=pipeline", "--config.mesh.stage=2", "--config.pipeline.num_microbatches=4"]
    arguments += [f"--config.{key.format(folder=folder)}" for key in keys]
    line = refused(folder, tmp_path, arguments, capsys)
    for message in messages:
        assert message.format(folder=folder) in line
