"""Loads the data set of a config, and stores its properties in the workdir."""

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxpar.data import images, synthetic, text
from jaxpar.data.check import check_data
from jaxpar.data.class_weights import weighted
from jaxpar.data.examples import DataInfo, Dataset
from jaxpar.data.labels import Labels
from jaxpar.errors import UserError
from jaxpar.files import parse_json, regular, write_text


def load(config: ConfigDict, labels: Labels, workdir: Path) -> Dataset:
    """Load the data set with the given kind of labels.

    Token arrays are read from the cache, or created there. The tokenizer of a text data set is saved as
    workdir/tokenizer.json.

    Reads config.data, model.name, model.init_from, cache_dir and seed. Raises UserError if a key, a file or the
    contents of a file are invalid.
    """
    check_data(config, labels)
    if config.data.source == "synthetic":
        dataset = synthetic.load(config, labels)
    elif config.data.source in images.IMAGE_READERS:
        dataset = images.load(config)
    else:
        dataset = text.load(config, labels, workdir)
    return weighted(dataset, config.data.class_weights)


def write_info(workdir: Path, info: DataInfo) -> None:
    """Write the properties of a data set to workdir/data.json."""
    write_text(workdir / "data.json", json.dumps(info._asdict(), indent=1) + "\n")


def read_info(workdir: Path) -> DataInfo:
    """Return the properties that `write_info` wrote. Raises UserError if the file is missing or damaged."""
    path = workdir / "data.json"
    try:
        return _info(parse_json(regular(path).read_text()))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); it must be the file that the run wrote") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged (it is not UTF-8); it must be the file that the run wrote") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r:.200}); it must be the file that the run wrote") from None


def _info(values: Any) -> DataInfo:
    """Return the properties with these JSON values by name. Raises TypeError if one has another type."""
    if not isinstance(values, dict):
        raise TypeError(f"it contains {values!r:.40}")
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    info = DataInfo(**fields)
    for name, value in info._asdict().items():
        is_tuple = name in ("input_shape", "class_names", "targets")
        kind = str if name in ("kind", "class_names", "targets") else int
        if isinstance(value, tuple) != is_tuple or any(
            type(item) is not kind for item in (value if is_tuple else [value])
        ):
            raise TypeError(f"{name} is {value!r:.40}")
    return info
