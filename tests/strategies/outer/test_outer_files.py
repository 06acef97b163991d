"""The actor of an outer step without Ray, its files, and what a replay and a link refuse."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar import config as configs
from jaxpar.commands import replay as command
from jaxpar.config import default_config
from jaxpar.data.share import Share, with_share
from jaxpar.errors import UserError
from jaxpar.run import replay
from jaxpar.strategies import ray_cluster
from jaxpar.strategies.outer.live import OuterActor, RayLink
from jaxpar.strategies.outer.table import OuterEvent, read_contributions
from tests.runs import small_config
from tests.strategies.outer.test_outer import anchor, difference, settings_of


def joined_actor(folder: Path) -> OuterActor:
    return OuterActor(settings_of(min_workers=1), folder, [np.array([10.0], np.float32)])


def test_the_actor_continues_from_its_files(tmp_path: Path) -> None:
    """Anchor, momentum, table and the rounds that have been counted survive, and an unfinished round does not."""
    folder = tmp_path / "outer"
    actor = joined_actor(folder)
    asyncio.run(actor.join(0, None, 0))
    assert asyncio.run(actor.exchange(0, difference(2.0, 4))) == anchor(1, 8.5)
    path = folder / "contributions.csv"
    rows = read_contributions(path)
    with path.open("a") as file:  # of a round whose anchor was not written, and a line that a crash cut short
        file.write("9.0,counted,0,0,8,0,1,1,2,4\n9.0,coun")
    again = joined_actor(folder)
    assert read_contributions(path) == rows
    assert asyncio.run(again.join(0, 4, 0)).start == 1
    assert asyncio.run(again.exchange(0, difference(9.0, 4, start=1))) == anchor(1, 8.5)  # it has counted
    assert asyncio.run(again.exchange(0, difference(1.0, 8, read=1, start=1))) == anchor(2, 7.5)
    counted = [(row.step, row.counted) for row in read_contributions(path) if row.event == OuterEvent.COUNTED]
    assert counted == [(4, 0), (8, 1)]
    path.write_text("seconds,event\n")
    with pytest.raises(UserError, match="line 1 must be the header seconds,event,worker,start"):
        joined_actor(folder)
    whole = (folder / "anchors.npz").read_bytes()
    for damaged in (b"PK", whole[: len(whole) // 2]):
        (folder / "anchors.npz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"anchors.npz is damaged \(.*\); restore it, or use a new --workdir"):
            joined_actor(folder)


def test_the_actor_ends_if_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, it would wait for silent members without end."""
    ended: list[str] = []
    monkeypatch.setattr(ray_cluster, "end_actor", lambda: ended.append("the actor"))

    async def fail() -> None:
        actor = joined_actor(tmp_path / "outer")
        await actor.join(0, None, 0)
        monkeypatch.setattr(actor, "_write", lambda: (tmp_path / "outer" / "none" / "none").touch())
        assert actor._watch
        await actor._watch

    with pytest.raises(FileNotFoundError):
        asyncio.run(fail())
    assert ended == ["the actor"]


def test_a_row_that_is_not_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "contributions.csv"
    for row in ("1,counted,0,0", "1,vanished,0,0,,,,,,", "1,leave,0,-7,,,,,,"):
        path.write_text(f"seconds,event,worker,start,step,fragment,read,counted,got,nbytes\n{row}\n")
        with pytest.raises(UserError, match=re.escape(f"line 2 is '{row}'; it must be a row of seconds,event,")):
            read_contributions(path)


def test_the_server_of_another_run(tmp_path: Path) -> None:
    """Worker 0 must be in the folder of its server, and all workers must have its settings."""
    details = SimpleNamespace(worker=0, name="outer", settings=settings_of())
    place: Any = (settings_of(), tmp_path / "other" / "outer")
    link = RayLink.__new__(RayLink)
    link._details, link._folder = details, tmp_path / "outer"  # type: ignore[assignment]
    link._ray = SimpleNamespace(get=lambda _: place)
    link._actor = SimpleNamespace(place=SimpleNamespace(remote=lambda: None))
    with pytest.raises(
        UserError, match=r"outer.name is 'outer', which the run in .*/other uses, until all of its workers have"
    ):
        link._check_place()
    for changed, message in (
        ({"every_steps": 8}, "config.outer.every_steps is 4 here and must be 8"),
        ({"lengths": (2,)}, r"the number of parameters of each fragment is \(1,\) here and must be \(2,\)"),
    ):
        place = (settings_of()._replace(**changed), tmp_path / "outer")
        with pytest.raises(UserError, match=f"a run of another config: {message}"):
            link._check_place()


def test_shares_of_the_data(tmp_path: Path) -> None:
    """Three workers have each example once."""

    class Numbers:
        lengths_N = np.arange(10)

        def __len__(self) -> int:
            return 10

        def gather(self, examples_B: np.ndarray, shard: slice, _random: Any, *, training: bool) -> Any:
            return {"inputs": examples_B[shard]}

    shares = [Share(Numbers(), worker, 3) for worker in range(3)]
    found = [share.gather(np.arange(len(share)), slice(None), None, training=True)["inputs"] for share in shares]  # type: ignore[arg-type]
    assert [list(one) for one in found] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert all(np.array_equal(share.lengths_N, one) for share, one in zip(shares, found, strict=True))  # type: ignore[arg-type]
    config = small_config(tmp_path, "--config.outer.num_workers=11")
    with pytest.raises(UserError, match="num_workers is 11; it must be at most 10, the number of training examples"):
        with_share(SimpleNamespace(train=Numbers()), config)  # type: ignore[arg-type]


def test_runs_that_cannot_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contributor must be there, with the one table."""
    private: Any = {}
    saved = SimpleNamespace(step=8, private=private)
    config = SimpleNamespace(outer=SimpleNamespace(worker=0))
    monkeypatch.setattr(replay, "checkpoint", SimpleNamespace(of_run=lambda _: saved, config_of=lambda *_: config))
    with pytest.raises(UserError, match=r"is not the run of a worker; it must be one with config.outer.num_workers"):
        replay.read_runs([tmp_path])
    private["outer"] = {"start": np.int32(0)}
    other = tmp_path / "other"
    with pytest.raises(UserError, match=f"{other} is a run of worker 0, as {tmp_path} is; it must be another worker"):
        replay.read_runs([tmp_path, other])
    with pytest.raises(UserError, match=r"0 of the runs have a table outer/contributions.csv; it must be one"):
        replay.read_runs([tmp_path])
    (tmp_path / "outer").mkdir()
    header = "seconds,event,worker,start,step,fragment,read,counted,got,nbytes"
    (tmp_path / "outer" / "contributions.csv").write_text(f"{header}\n1,counted,2,0,4,0,0,0,1,4\n")
    with pytest.raises(UserError, match="worker 2 has contributed, and its run is missing; it must be one of the work"):
        replay.read_runs([tmp_path])
    (tmp_path / "outer" / "contributions.csv").write_text(f"{header}\n1,join,0,1,0,0,,,0,\n")
    with pytest.raises(UserError, match=f"{tmp_path} is of start 0 of worker 0, which the table lacks; it must be of"):
        replay.read_runs([tmp_path])


def test_runs_with_other_numbers_of_devices_are_not_replayed(tmp_path: Path) -> None:
    """Their programs differ from those of one process, and so do their last bits."""
    for number, name in enumerate(("w0", "w1"), 1):
        (tmp_path / name).mkdir()
        config = default_config()
        config.mesh.virtual_cpu_devices = number
        configs.save(config, tmp_path / name)
    with pytest.raises(UserError, match="of the runs is 1 and 2; it must be the same in all of them"):
        command.main([str(tmp_path / "w0"), str(tmp_path / "w1")])
