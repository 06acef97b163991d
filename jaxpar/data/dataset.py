"""Loads the data set that a config names."""

from pathlib import Path

from ml_collections import ConfigDict

from jaxpar.data import images, synthetic, text
from jaxpar.data.check import check
from jaxpar.data.examples import Dataset


def load(config: ConfigDict, workdir: Path) -> Dataset:
    """The data set. Token arrays come from, or go to, the cache; a text's tokenizer is kept as workdir/tokenizer.json.

    Reads config.task, data, model.name, model.init_from, cache_dir and seed. Raises UserError for whatever
    is wrong with the keys, the files or what is in them.
    """
    check(config)
    if config.data.source == "synthetic":
        return synthetic.load(config)
    if config.data.source in images.IMAGE_READERS:
        return images.load(config)
    return text.load(config, workdir)
