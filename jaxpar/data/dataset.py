"""Loads the data set of a config."""

from pathlib import Path

from ml_collections import ConfigDict

from jaxpar.data import images, synthetic, text
from jaxpar.data.check import check_data
from jaxpar.data.examples import Dataset
from jaxpar.data.labels import Labels


def load(config: ConfigDict, labels: Labels, workdir: Path) -> Dataset:
    """Load the data set with the given kind of labels.

    Token arrays are read from the cache, or created there. The tokenizer of a text data set is saved as
    workdir/tokenizer.json.

    Reads config.data, model.name, model.init_from, cache_dir and seed. Raises UserError if a key, a file or the
    contents of a file are invalid.
    """
    check_data(config, labels)
    if config.data.source == "synthetic":
        return synthetic.load(config, labels)
    if config.data.source in images.IMAGE_READERS:
        return images.load(config)
    return text.load(config, labels, workdir)
