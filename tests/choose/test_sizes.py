"""Numbers of GPUs that train tokens in time are compared with those that the times of steps give by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

import jaxpar
from jaxpar import config as configs
from jaxpar.choose import planner, sizes
from jaxpar.choose.candidates import Candidate, Space
from jaxpar.choose.costs.step import StepCosts
from jaxpar.choose.sizes import best_training, find_clusters, numbers_of
from jaxpar.cluster.files import find_named
from jaxpar.commands import plan as command
from jaxpar.errors import UserError
from jaxpar.inspect import plan_report
from tests.choose.test_planner import PERCEPTRON
from tests.runs import run_script, script_error

TEXTS = (
    "--config=configs/quickstart.py",
    "--config.data.source=synthetic",
    "--config.data.synthetic_examples=64",
    "--config.model.num_layers=1",
    "--config.batch_size=8",
    "--config.data.max_length=16",
)
STEP_TOKENS = 8 * 16
SECONDS = {2: 5.0, 4: 3.0, 8: 2.0, 16: 1.9, 32: 2.5}  # of a step, by number of GPUs; it does not fit on one
RECOMPUTES = 2  # the number of GPUs whose memory is short
PRICED = 'gpu = "h100"\nhosts = 4\ngpus_per_host = 8\nprice_per_hour = 2.5\n'


@pytest.fixture(scope="module")
def space() -> Space:
    config = configs.load_config(TEXTS[0].removeprefix("--config="))
    configs.override(config, TEXTS[1:])
    return plan_report.make_space(config, find_named("h100:8x8", "--cluster")[1], on_all=False)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make steps as long as SECONDS, and return the numbers of GPUs that are tried."""
    numbers = list[int]()

    def candidates(space: Space) -> list[Candidate]:
        numbers.append(space.num_devices)
        seconds = SECONDS.get(space.num_devices)
        costs = StepCosts(seconds or 1.0, 1.0, 0.0, 0.0, 0.0, 1e9)
        settings = {"model.remat": "full"} if space.num_devices == RECOMPUTES else {}
        return [Candidate("ddp", settings, costs, fits=seconds is not None)]

    monkeypatch.setattr(planner, "candidates", candidates)
    return numbers


def test_numbers_of_gpus() -> None:
    numbers = [numbers_of(find_named(name, "--cluster")[1]) for name in ("t4", "h100:8", "h100:4x8", "h100:3x6")]
    assert numbers == [[1], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32], [1, 2, 4, 6, 12, 18]]
    assert numbers_of(find_clusters("h100")["h100"])[-2:] == [2048, 4096]  # without a number
    assert find_clusters("h100:8, V100").keys() == {"h100:8", "V100"}
    assert {"h100", "a100-80gb", "v100", "t4"} < find_clusters("").keys()


@pytest.mark.parametrize(
    ("hours", "number", "last"),
    [(5.0, 2, 2), (4.9, 4, 4), (3.0, 4, 4), (2.0, 8, 8), (1.0, 16, 64)],  # more than 16 do not help
)
def test_the_fewest_gpus(space: Space, tried: list[int], hours: float, number: int, last: int) -> None:
    """3,600 steps take as many hours as a step takes seconds."""
    one = best_training("h100:8x8", space, 3600 * STEP_TOKENS, hours)
    assert one is not None
    assert (one.cluster.num_devices, one.cluster.num_processes) == (number, max(1, number // 8))
    assert one.hours == pytest.approx(SECONDS[number])
    assert one.tokens_per_second == pytest.approx(STEP_TOKENS / SECONDS[number])
    assert one.gpu_hours == pytest.approx(number * SECONDS[number])
    assert tried == [n for n in (1, *SECONDS, 64) if n <= last]


def test_numbers_that_are_too_slow_are_not_planned(
    space: Space, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of three GPU-hours need at least four GPUs to take at most one hour."""
    monkeypatch.setattr(sizes, "product_seconds", lambda *_: 3.0)
    assert best_training("h100:8x8", space, 3600 * STEP_TOKENS, 1.0) is not None
    assert tried == [4, 8, 16, 32, 64]


def test_two_hosts_can_be_slower_than_one(space: Space, tried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, 64, 1.5)
    one = best_training("h100:8x8", space, 3600 * STEP_TOKENS, 1.6)
    assert one is not None
    assert (one.cluster.num_devices, tried[-1]) == (64, 64)


@pytest.mark.parametrize(
    ("of_four", "of_eight", "number", "last"),
    # GPU-hours of 2, 4 and 8: 10, 12, 16; 10, 9.6, 10.4; 10, 12, 8.8
    [(3.0, 2.0, 2, 8), (2.4, 1.3, 4, 8), (3.0, 1.1, 8, 16)],
)
def test_the_cheapest_number(
    space: Space,
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
    of_four: float,
    of_eight: float,
    number: int,
    last: int,
) -> None:
    """If memory is short, more GPUs can need fewer hours together, at most by the recomputation of activations."""
    monkeypatch.setitem(SECONDS, 4, of_four)
    monkeypatch.setitem(SECONDS, 8, of_eight)
    one = best_training("h100:8x8", space, 3600 * STEP_TOKENS, 5.0, cheapest=True)
    assert one is not None
    assert (one.cluster.num_devices, tried[-1]) == (number, last)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Hours and prices follow from the planned step, and the cheapest cluster is first."""
    for name, price in (("dear.toml", "2.5"), ("cheap.toml", "2.0")):
        (tmp_path / name).write_text(PRICED.replace("2.5", price))
    dear, cheap = (str(tmp_path / name) for name in ("dear.toml", "cheap.toml"))
    tokens = ("--train_tokens=1e9", "--hours=1e6", "--budget=1e7", f"--cluster={dear},{cheap}")
    assert run_script(monkeypatch, command, *TEXTS, *tokens, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    config = configs.load_config(TEXTS[0].removeprefix("--config="))
    configs.override(config, TEXTS[1:])
    seconds = jaxpar.plan(config, "h100:1")[0].costs.seconds
    hours = 1e9 / STEP_TOKENS * seconds / 3600
    assert (first["cluster"], first["gpus"], first["hosts"]) == (cheap, 1, 1)
    assert first["hours"] == first["gpu_hours"] == pytest.approx(hours)
    assert [first["price"], second["price"]] == pytest.approx([2 * hours, 2.5 * hours])


def test_what_is_nearest(
    tmp_path: Path, tried: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, tokens = tmp_path / "mine.toml", f"--train_tokens={3600 * STEP_TOKENS}"
    cluster.write_text(PRICED)

    def error(*flags: str) -> tuple[str, str]:
        out, message = script_error(monkeypatch, capsys, command, *TEXTS, tokens, f"--cluster={cluster}", *flags)
        return out, message.splitlines()[-1]

    out, message = error("--hours=1")
    assert message == f"--hours is 1; it must be at least 1.9, on 16 GPUs of {cluster}"
    assert [line.split()[1:6] for line in out.splitlines()[1:]] == [["16", "67.4", "1.9", "30.4", "76"]]
    assert out.endswith("  ddp, too slow\n")
    _, message = error("--budget=20")
    assert message == f"--budget is 20; it must be at least 25, on 2 GPUs of {cluster}"
    _, message = error("--hours=5", "--budget=20")  # two GPUs for five hours
    assert message == f"--budget is 20; it must be at least 25 for at most 5 hours, on 2 GPUs of {cluster}"
    slow = "--hours=1", "--cluster=v100:2", "--config.model.dtype=bfloat16"
    assert run_script(monkeypatch, command, *TEXTS, tokens, *slow) == 2
    assert "v100:2: config.model.dtype is 'bfloat16', for which a Tesla V100" in capsys.readouterr().err
    monkeypatch.setattr(planner, "candidates", lambda _space: [])
    _, message = error("--hours=5")
    assert message == "no plan fits on --cluster; it must have more GPUs, or GPUs with more memory"
    assert tried


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hours=1", "--cluster=h100:8"), "--hours is 1; it must be unset without --train_tokens"),
        (("--train_tokens=1e9",), "--hours is missing; it must be set with --train_tokens, unless --budget is, as in"),
        (("--train_tokens=0",), "--train_tokens is '0'; it must be a number greater than 0"),
        (("--train_tokens=1", "--hours=1", "--verify=1"), "--verify is '1'; it must be unset with --train_tokens"),
        (("--train_tokens=1", "--hours=1", "--cluster=here"), "--cluster is 'here'; it must be one of a100-40gb"),
        (("--train_tokens=1", "--hours=1", "--budget=1", "--cluster=h100"), "--budget is 1, but h100 has no price"),
        (("--train_tokens=1", "--hours=1", "--cluster=h100"), "config.task is 'classification', whose inputs are not"),
    ],
)
def test_invalid_flags(
    flags: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script_error(monkeypatch, capsys, command, *PERCEPTRON, *flags)[1].startswith(message)


def test_an_invalid_price(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(PRICED.replace("2.5", "-1"))
    with pytest.raises(UserError, match="price_per_hour is -1; it must be a number of at least 0"):
        find_clusters(str(tmp_path / "mine.toml"))
