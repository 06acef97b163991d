"""Tests the files that `pip install .` installs."""

import zipfile
from pathlib import Path

import pytest

from jaxpar.config import config_folder

ROOT = Path(__file__).parent.parent
FOLDERS = {"jaxpar": "jaxpar", "configs": "jaxpar/configs"}


def test_the_wheel_has_all_code_data_and_configs(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert "jaxpar/py.typed" in names
        (entry_points,) = [archive.read(name) for name in archive.namelist() if name.endswith("entry_points.txt")]
    expected = {
        f"{target}/{file.relative_to(ROOT / source).as_posix()}"
        for source, target in FOLDERS.items()
        for file in (ROOT / source).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert names == expected
    assert {"jaxpar/configs/quickstart.py", "jaxpar/data/wordnet/glosses.tsv.xz"} <= names
    assert b"jaxpar = jaxpar.__main__:enter" in entry_points


def test_a_clone_has_its_configs_next_to_the_package() -> None:
    assert config_folder() == ROOT / "configs"
