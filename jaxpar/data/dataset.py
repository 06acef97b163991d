"""Loads the data set that a config names."""

from pathlib import Path

from ml_collections import ConfigDict

from jaxpar.data import images, synthetic, text
from jaxpar.data.check import check_data
from jaxpar.data.examples import Dataset
from jaxpar.data.labels import Labels


def load(config: ConfigDict, labels: Labels, workdir: Path) -> Dataset:
    """The data set, with these labels.

    Token arrays come from, or go to, the cache; a text's tokenizer is kept as workdir/tokenizer.json.

    Reads config.data, model.name, model.init_from, cache_dir and seed. Raises UserError for whatever
    is wrong with the keys, the files or what is in them.
    """
    check_data(config, labels)
    if config.data.source == "synthetic":
        return synthetic.load(config, labels)
    if config.data.source in images.IMAGE_READERS:
        return images.load(config)
    return text.load(config, labels, workdir)
