"""Tests of config files, overrides and the errors for mistakes in them."""

from pathlib import Path
from typing import Any

import pytest

from jaxpar import config as configs
from jaxpar.errors import UserError

WIRE_DTYPE = "exchange_options.wire_dtype"


def overridden(*arguments: str) -> dict[str, Any]:
    config = configs.default_config()
    configs.override(config, arguments)
    return configs.keys(config)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--config.optimizer.lr=1e-4"], "optimizer.lr", 1e-4),
        (["--config.optimizer.lr=1"], "optimizer.lr", 1.0),
        (["--config.optimizer.lr", "3e-4"], "optimizer.lr", 3e-4),
        (["--config.mesh.data=4"], "mesh.data", 4),
        (["--config.log.tensorboard=false"], "log.tensorboard", False),
        (["--noconfig.log.tensorboard"], "log.tensorboard", False),
        (["--config.data.augment"], "data.augment", True),
        (["--config.model.num_layers=3"], "model.num_layers", 3),
        (["--config.model.num_layers=None"], "model.num_layers", None),
        (["--config.model.num_layers=3", "--config.model.num_layers=None"], "model.num_layers", None),
        (["--config.exchange_options.wire_dtype=bf16", "--config.exchange_options.wire_dtype=None"], WIRE_DTYPE, None),
        (["--config.model.norm=rmsnorm"], "model.norm", "rmsnorm"),
        (["--config.model.scan_layers=True"], "model.scan_layers", True),
        (["--config.model.scan_layers=false"], "model.scan_layers", False),
        (["--config.model.scan_layers"], "model.scan_layers", True),
        (["--noconfig.model.scan_layers"], "model.scan_layers", False),
        (["--config.model.scan_layers=0", "--config.model.scan_layers=auto"], "model.scan_layers", "auto"),
        (["--config.data.length_buckets=(8,16)"], "data.length_buckets", (8, 16)),
        (["--config.data.length_buckets=8"], "data.length_buckets", (8,)),
        (["--config.data.text_columns=premise,hypothesis"], "data.text_columns", ("premise", "hypothesis")),
        (["--config.data.target_columns=()"], "data.target_columns", ()),
        (["--config.data.train=a=b.csv"], "data.train", "a=b.csv"),
    ],
)
def test_override(arguments: list[str], key: str, value: object) -> None:
    result = overridden(*arguments)[key]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.optimizer.learning_rate=1"], "does not exist. Did you mean 'optimizer.lr'?"),
        (["--config.exchange_options.topk=1"], "does not exist. Did you mean 'exchange_options.ratio'?"),
        (["--config.fp16=True"], "config.fp16 does not exist. Did you mean 'model.dtype'?"),
        (["--config.optimzer.lr=1"], "config.optimzer.lr does not exist. Did you mean 'optimizer.lr'?"),
        (["--config.optimizer=adamw"], "optimizer.name"),
        (
            ["--config.asynchronous.cures=dc_asgd"],
            "config.asynchronous.cures was renamed; use config.asynchronous.mitigations",
        ),
        (["--config.optimizer.lr=fast"], "config.optimizer.lr is 'fast'; it must be a number, such as 0.001"),
        (["--config.mesh.data=2.5"], "config.mesh.data is '2.5'; it must be an integer"),
        (["--config.mesh.data=None"], "config.mesh.data is 'None'; it must be an integer"),
        (["--config.mesh.data"], "config.mesh.data has no value"),
        (["--config.log.tensorboard=maybe"], "config.log.tensorboard is 'maybe'; it must be true or false"),
        (["--config.data.length_buckets=(8,'x')"], "a tuple of integers, such as (16, 32"),
        (
            ["--config.data.target_columns=(1,2)"],
            "config.data.target_columns is '(1,2)'; it must be a tuple of strings, such as ('target',)",
        ),
        (["--config.model.num_layers=two"], "config.model.num_layers is 'two'; it must be an integer"),
        (["quickstart"], "'quickstart' is not an argument"),
    ],
)
def test_override_mistakes(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        overridden(*arguments)
    assert message in str(caught.value)
    assert not str(caught.value).endswith((", such as 0", ", such as False"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import x y", "line 1: SyntaxError"),
        ("def get_config():\n    return 3", "returned an object of type int; it must"),
        ("x = 1", "get_config"),
        ("def get_config():\n    raise RuntimeError('no')", "line 2: RuntimeError: no"),
        (
            "from jaxpar.config import default_config\ndef get_config():\n    c = default_config()\n"
            "    c.optimizer.lrr = 1\n    return c",
            "line 4: config has no key 'lrr'. Did you mean 'lr'?",
        ),
        (
            "from jaxpar.config import default_config\ndef get_config():\n    c = default_config()\n"
            "    c.asynchronous.cures = 'dc_asgd'\n    return c",
            "line 4: config has no key 'cures'. It was renamed to asynchronous.mitigations.",
        ),
        (
            "from jaxpar.config import default_config\ndef get_config():\n    c = default_config()\n"
            "    c.optimizer.lr = 'fast'\n    return c",
            "line 4: TypeError",
        ),
        (
            "from jaxpar.config import default_config\ndef get_config():\n    c = default_config()\n"
            "    c.model.scan_layers = 2\n    return c",
            "line 4: TypeError: Could not override field 'scan_layers'",
        ),
    ],
)
def test_config_file_mistakes(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(body)
    with pytest.raises(UserError) as caught:
        configs.load_config(str(path))
    assert message in str(caught.value)
    assert not str(caught.value).endswith((", such as 0", ", such as False"))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_former_names_of_keys() -> None:
    """A former name in a saved config is read as the current name."""
    known = configs.keys(configs.default_config())
    assert configs.RENAMED
    assert not configs.RENAMED.keys() & known.keys()
    assert set(configs.RENAMED.values()) <= known.keys()
    assert configs.keys(configs.from_keys({"asynchronous.cures": "dc_asgd"})) == known | {
        "asynchronous.mitigations": "dc_asgd"
    }


def test_a_missing_config_suggests_a_similar_name() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'configs/quickstart.py'"):
        configs.load_config("configs/quikstart.py")


def test_a_workdir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/run contains no run: {tmp_path}/run/config.json is inside a file"):
        configs.read_config(tmp_path / "run")


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--config is '{tmp_path}', which is a directory; it must be a config file"):
        configs.load_config(tmp_path)


def test_a_config_is_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Title")
    with pytest.raises(UserError, match=r"--config is '.*README.md'; it must be a Python file \(.py\)"):
        configs.load_config(str(tmp_path / "README.md"))


def test_a_preset_that_does_not_exist() -> None:
    with pytest.raises(UserError, match=r"it must be configs/quickstart.py, because this config has no presets"):
        configs.load_config("configs/quickstart.py:big")
    with pytest.raises(
        UserError, match=r"^the preset of --config is 'zbh1'; it must be one of .*CSV table. Did you mean"
    ):
        configs.load_config("configs/pipeline_gpt.py:zbh1")
    with pytest.raises(UserError, match=r"^the preset of --config is 'lama'; it must be 'llama', or left out$"):
        configs.load_config("configs/gpt_wordnet.py:lama")


def test_the_name_of_a_config_is_a_text_or_a_path() -> None:
    paths: list[Any] = ["configs/quickstart.py", Path("configs/quickstart.py")]
    first, second = (configs.keys(configs.load_config(path)) for path in paths)
    assert first == second
    name: Any = 3
    with pytest.raises(UserError, match=r"^the config is 3; it must be the path of a config file$"):
        configs.load_config(name)


def test_a_config_must_begin_with_the_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'seed': 1})")
    with pytest.raises(UserError, match=r"lacks config.asynchronous.*; it must return a modified default_config\(\)"):
        configs.load_config(str(path))


def test_preset_reaches_get_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from jaxpar.config import default_config\ndef get_config(preset=''):\n    c = default_config()\n"
        "    c.model.size = preset or 'tiny'\n    return c"
    )
    assert configs.load_config(f"{tmp_path}/mine.py:mini").model.size == "mini"
    assert configs.load_config(f"{tmp_path}/mine.py").model.size == "tiny"


def test_shipped_configs_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in sorted(configs.config_folder().glob("*.py")):
        config = configs.load_config(f"configs/{path.name}")
        assert configs.keys(config).keys() == configs.keys(configs.default_config()).keys()


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"seed": 1, "seed": 2}'])
def test_a_damaged_saved_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config.json is damaged"):
        configs.read_config(tmp_path)


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    config = configs.load_config("configs/quickstart.py")
    configs.override(
        config, ["--config.model.num_layers=3", "--config.data.text_columns=a,b", "--config.optimizer.clip_norm=inf"]
    )
    configs.save(config, tmp_path)
    assert configs.keys(configs.read_config(tmp_path)) == configs.keys(config)


def test_other_names_are_not_keys() -> None:
    known = configs.keys(configs.default_config())
    for name, key in configs.OTHER_NAMES.items():
        assert key in known
        assert not [one for one in known if one.rpartition(".")[2] == name], name
