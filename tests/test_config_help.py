"""Tests of --help and --print_config: every key is described, and the flags that are printed give the same config."""

import shlex
from pathlib import Path

import pytest

from jaxpar import config as configs
from jaxpar import config_help
from jaxpar.commands import train
from jaxpar.config_help import Described


def test_every_key_is_described_in_its_order() -> None:
    described = list(config_help.described())
    names = [one.name for one in described if not one.is_section]
    keys = configs.keys(configs.default_config())
    assert sorted(names) == sorted(keys)
    sections = {one.name for one in described if one.is_section}
    assert sections == {name.rpartition(".")[0] for name in keys} - {""}
    assert [one.name for one in described if not one.comment] == []


@pytest.mark.parametrize(
    "expected",
    [
        Described("optimizer.lr", "peak learning rate", "", False),  # next to the line
        Described("checkpoint.asynchronous", "True: write while the next steps compute; False: steps wait for the "
                  "write, so a crash loses at most every_steps steps", "", False),  # two lines above it
        Described("exchange_options.peers", "bagua_decentralized: average with one peer (shift_one) or with all "
                  "replicas (all)", "", False),  # at the end of three lines
        Described("model.num_layers", "number of blocks", "Overrides of model.size. None: the value of the size.",
                  False),  # the first of several keys with a comment in common
        Described("asynchronous.delays", "durations in virtual seconds, for emulated runs", "", True),
    ],
    ids=lambda one: one.name,
)  # fmt: skip
def test_comments_of_keys(expected: Described) -> None:
    assert expected in list(config_help.described())


def test_help_lists_the_sections(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert train.main(["jaxpar", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "configs/quickstart.py" in "".join(lines)
    assert "  eval                 evaluations during the training" in lines
    assert max(map(len, lines)) <= 60
    at = lines.index("  130  stopped immediately by a second Ctrl-C, without")
    assert lines[at + 1 : at + 3] == ["       saving", ""]


def test_help_for_a_section_and_for_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["jaxpar", "--help=eval"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("config.eval\n    evaluations during the training\n--config.eval.every_steps=0\n    steps")
    assert shown.count("--config.") == sum(key.startswith("eval.") for key in configs.keys(configs.default_config()))
    assert train.main(["jaxpar", "--help=optimizer.lr"]) == 0
    assert capsys.readouterr().out == "--config.optimizer.lr=0.001\n    peak learning rate\n"
    assert train.main(["jaxpar", "--help=config"]) == 0
    assert "--config.batch_size=256\n    global batch size" in capsys.readouterr().out


def test_print_config_prints_flags_that_give_the_same_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell's rules for quotes and comments apply. Nothing is written, and --workdir is not needed."""
    monkeypatch.chdir(tmp_path)
    overrides = [
        "--config.data.train=a file's name.csv",
        "--config.data.length_buckets=(8,)",
        "--config.optimizer.lr=1",
    ]
    command = ["jaxpar", "--config=configs/gpt_wordnet.py:llama", *overrides, "--print_config"]
    assert train.main(command) == 0
    printed = capsys.readouterr().out
    config = configs.default_config()
    configs.override(config, shlex.split(printed, comments=True))
    expected = configs.load_config("configs/gpt_wordnet.py:llama")
    configs.override(expected, overrides)
    assert configs.keys(config) == configs.keys(expected)
    assert "\n--config.optimizer.lr=1.0  # default: 0.001\n" in printed
    assert not list(tmp_path.iterdir())
    assert train.main([*command, f"--workdir={tmp_path}/run"]) == 0
    assert not list(tmp_path.iterdir())
